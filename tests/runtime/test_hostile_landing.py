"""Peers that say anything about landing slots, with and without digests of the bytes: they spoil their own alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv import Consumer, Outcome, Producer
from pushkv.core.messages import Complete, Credit, Drained, Failed, Grant, Message, Ready, TransferKey, encode
from pushkv.core.span import Span
from runtime.hostility import LIVE, Good
from runtime.scene import WAIT as LONG
from runtime.scene import Pushed, Scene, array_of, until
from runtime.test_hostile_peers import Evil

SLOT = 1024
WAYS: dict[str, dict[str, Any]] = {
    "landing": {"landing": "landing", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT},
    "verified": {"landing": "landing", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT, "verify": "checksum"},
    "auto": {"landing": "auto", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT, "verify": "checksum"},
}
few = st.integers(0, 3) | st.integers(0, 2**31 - 1)
spans = st.lists(
    st.builds(Span, st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)),
    max_size=3,
).map(tuple) | st.sampled_from([(Span(0, 0, 2, 0, 4),), (Span(0, 0, 2, 0, 2),), (Span(0, 0, 2, 0, 4000),)])
sums = st.none() | st.binary(min_size=4, max_size=8)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def all_free(*endpoints: Producer | Consumer) -> bool:
    slots = [endpoint._shared.slots for endpoint in endpoints]
    return all(one is not None and len(one.pool) == one.pool.count for one in slots)


def credits_of(consumer: Consumer) -> list[Credit]:
    """Of every slot in custody, whoever has it."""
    found: list[Credit] = []

    def look(side: Any) -> str:
        found.extend(berth.credit for berth in side.machine._ring._berths.values())
        return "found"

    assert consumer.ask(look) == "found"
    return found


MARK = 2**39
"""The generation of a credit that stands for one which somebody has when it is said."""
NONCE, KEY, SEQUENCE = b"its own nonce...", TransferKey("its own", "", "", 0, 0), MARK

lies = st.one_of(
    st.builds(
        Complete, st.just(NONCE), few, st.just("evil"), few, spans, st.none() | spans,
        st.none() | st.builds(Credit, few, st.just(MARK)) | st.builds(Credit, few, few), sums,
    ),
    st.builds(Ready, st.just(SEQUENCE) | few, st.integers(0, 9) | few),
    st.builds(
        Failed, st.just(KEY), st.just(SEQUENCE) | few, st.sampled_from(Outcome), st.text(max_size=20), st.booleans()
    ),
    st.builds(Drained, st.just(KEY), st.just(SEQUENCE) | few),
)  # fmt: skip
"""What a producer can say about its own offer, with credits that are others' or nobody's as well."""


def meant(lie: Any, consumer: Consumer, key: TransferKey, agent: str) -> Message | None:
    """A lie with what it stands for in its places; None where the transfer is over."""
    told: list[tuple[bytes, int]] = []

    def look(side: Any) -> str:
        ranks = side.machine._transfers[key].ranks if side.machine.knows(key) else {}
        told.extend((rank.nonce, rank.sequence) for rank in ranks.values())
        return "looked"

    assert consumer.ask(look) == "looked"
    if not told:
        return None
    changes: dict[str, Any] = {}
    if isinstance(lie, Complete):
        changes["nonce"] = told[0][0]
        held = credits_of(consumer)
        if lie.credit is not None and lie.credit.generation == MARK and held:
            changes["credit"] = held[lie.credit.slot % len(held)]
    else:
        changes["sequence"] = told[0][1] if lie.sequence == SEQUENCE else lie.sequence
        if not isinstance(lie, Ready):
            changes["key"] = key
    message: Message = msgspec.structs.replace(lie, **changes)
    return message


def test_a_producer_that_says_anything_of_slots(scene: Scene, way: dict[str, Any]) -> None:
    good = Good(scene, **way)
    liar = scene.producer("evil", **way)
    link = good.consumer.connect(liar.address)
    evil = Evil(liar, good.consumer)
    numbers = iter(range(1_000_000))

    @LIVE
    @given(st.lists(st.tuples(lies, st.booleans()), min_size=1, max_size=8))
    def says(said: list[tuple[Any, bool]]) -> None:
        until(lambda: all_free(good.consumer), "the slots of the last")
        name = f"present {next(numbers)}"
        transfer = Pushed(liar, good.consumer, name, [9], [9], 4).offer(link)
        for lie, by_control in said:
            message = meant(lie, good.consumer, transfer.key, liar.agent)
            if message is not None:
                evil.say(encode(evil.pair().token, message), by_control)
        good.push()
        good.consumer.cancel(transfer)
        assert transfer.wait(LONG) is not None
        assert transfer.wait_released(LONG)

    says()
    good.unharmed()
    assert not array_of(good.consumer)[:, :, 10:].any(), "blocks that were not offered to it"
    until(lambda: all_free(good.consumer, good.producer, liar), "the slots")


def sequence_of(consumer: Consumer, key: TransferKey) -> int:
    def look(side: Any) -> str:
        ranks = side.machine._transfers[key].ranks if side.machine.knows(key) else {}
        return str(next((rank.sequence for rank in ranks.values()), 0))

    return int(consumer.ask(look))


def test_a_consumer_that_says_anything_of_slots(scene: Scene, way: dict[str, Any]) -> None:
    """It grants slots that it has not, of other generations, beyond its ring: the WRITEs fail, and it alone."""
    good = Good(scene, **way)
    spoiler = scene.consumer("evil", **way)
    link = spoiler.connect(good.producer.address)
    evil = Evil(spoiler, good.producer)
    numbers = iter(range(1_000_000))

    @LIVE
    @given(st.lists(st.tuples(few, few, st.builds(Credit, few, few), st.booleans()), min_size=1, max_size=6))
    def says(grants: list[tuple[int, int, Credit, bool]]) -> None:
        push = Pushed(good.producer, spoiler, f"evil {next(numbers)}", [1, 2, 3, 4], [5, 6, 7, 8], 16)
        transfer = push.offer(link)
        sequence = sequence_of(spoiler, transfer.key)
        for number, part, credit, mine in grants:
            grant = Grant(sequence if mine else number, part, credit)
            evil.say(encode(evil.pair().token, grant), by_control=mine)
        stage = push.stage()
        good.push()
        spoiler.cancel(transfer)
        assert transfer.wait(LONG) is not None
        assert transfer.wait_released(LONG)
        good.producer.unstage(push.name)
        assert stage.wait_released(LONG)

    says()
    good.unharmed()
    until(lambda: all_free(good.consumer), "the slots")
