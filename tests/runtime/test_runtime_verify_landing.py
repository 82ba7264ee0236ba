"""verify="checksum" through landing slots: what differs in a slot fails its transfer, and never gets into a block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.core.commands import Send
from pushkv.core.messages import Cancel, Complete
from pushkv.core.ways import Costs
from pushkv.runtime import digest, verifying
from pushkv.runtime.digest import Reader
from pushkv.runtime.posting import Posting
from pushkv.runtime.slots import Slots
from pushkv.transport.memory import Faults, Network
from runtime.actors import BLOCK, make_cache, make_config, start
from runtime.engines import BYTES, LAYOUTS, Engines, Layout, fails_while_unreadable
from runtime.scene import WAIT, Pushed, Scene, array_of, blocks_for, until

CORRUPT = Faults(corrupt=1.0)
TOKEN = 128
"""Bytes of a token of the scene's caches, over all layers."""
SLOT = 8 * TOKEN
SETTINGS: dict[str, Any] = {
    "landing": "landing", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT, "verify": "checksum",
}  # fmt: skip


def connected(scene: Scene, **settings: Any) -> tuple[Producer, Consumer, Link]:
    settings = {**SETTINGS, **settings}
    producer, consumer = scene.producer(**settings), scene.consumer(**settings)
    return producer, consumer, consumer.connect(producer.address)


def pushes(producer: Producer, consumer: Consumer, count: int, tokens: int = 24) -> list[Pushed]:
    """Prompts of three parts."""
    blocks = -(-tokens // 4)
    return [
        Pushed(
            producer, consumer, f"r{n}", blocks_for(tokens, n * blocks),
            blocks_for(tokens, 60 - (n + 1) * blocks), tokens,
        )
        for n in range(count)
    ]  # fmt: skip


def slots_of(endpoint: Producer | Consumer) -> Slots:
    slots = endpoint._shared.slots
    assert slots is not None
    return slots


def all_free(*endpoints: Producer | Consumer) -> bool:
    return all(len(slots_of(one).pool) == slots_of(one).pool.count for one in endpoints)


def custody(consumer: Consumer) -> str:
    return consumer.ask(lambda side: str({slot.name: n for slot, n in side.machine.landing_slots().items()}))


def untouched(consumer: Consumer, blocks: list[int]) -> bool:
    return not array_of(consumer)[:, :, blocks].any()


SMALL: dict[str, Any] = {"landing": "landing", "slot_bytes": 3 * BYTES, "landing_bytes": 9 * BYTES}
"""Slots of three tokens of all ranks' heads."""


class TestAcrossLayouts:
    @pytest.mark.parametrize(("ours", "theirs"), LAYOUTS)
    def test_what_arrives_as_it_was_is_complete(self, scene: Scene, ours: Layout, theirs: Layout) -> None:
        engines = Engines(scene, ours, theirs, SMALL)
        transfers = engines.offer()
        for ready in (5, 13, 22):
            engines.stage(ready)
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.COMPLETE] * theirs.ranks
        assert engines.arrived()
        assert engines.stat("bytes verified") == 22 * BYTES
        assert engines.stat("parts that differ") == 0
        assert engines.stat("scatters") >= 8

    @pytest.mark.parametrize(("ours", "theirs"), LAYOUTS)
    def test_a_bit_that_does_not_fails_the_transfer(self, scene: Scene, ours: Layout, theirs: Layout) -> None:
        engines = Engines(scene, ours, theirs, SMALL)
        transfers = engines.offer(start=9)
        scene.network.faults = CORRUPT
        engines.stage()
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.TRANSPORT_ERROR] * theirs.ranks
        assert all(transfer.wait_released(WAIT) for transfer in transfers)
        assert not any(array.any() for array in engines.targets), "no part of it was scattered"


class TestHowItFails:
    def test_the_part_is_named_its_blocks_are_clean_and_all_else_lives_on(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        bad, good, later = pushes(producer, consumer, 3)
        transfer, other = bad.offer(link), good.offer(link)
        bad.stage(ready=8)
        until(lambda: bad.arrived(0, 8), "the first part")
        scene.network.faults = CORRUPT
        staged = bad.stage(ready=16)
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        scene.network.faults = Faults()
        assert "part 1 (tokens 8 to 16) of producer rank 0 was sent with the digest " in transfer.detail
        assert transfer.wait_released(WAIT)
        assert staged.wait_released(WAIT)
        assert untouched(consumer, bad.target[2:])
        good.stage()
        assert other.wait(WAIT) is Outcome.COMPLETE
        assert good.arrived()
        again = bad.offer(link, attempt=1, blocks=later.target)
        bad.stage()
        assert again.wait(WAIT) is Outcome.COMPLETE
        assert consumer.stats()["parts that differ"] == 1
        until(lambda: all_free(producer, consumer), "the slots")

    def test_a_slot_whose_part_differs_waits_for_the_producers_word(self, scene: Scene) -> None:
        """Its bytes may still be on their way; the blocks are out of their reach and come back at once."""
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, tokens=8)
        transfer = push.offer(link)
        send, withheld = consumer._side._send, threading.Event()

        def withhold(command: Send, now: float) -> None:
            if isinstance(command.message, Cancel):
                withheld.set()
            else:
                send(command, now)

        consumer._side._send = withhold  # type: ignore[method-assign]
        scene.network.faults = CORRUPT
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert transfer.wait_released(WAIT)
        assert withheld.wait(WAIT)
        assert custody(consumer) == "{'QUARANTINED': 1}"
        consumer._side._send = send  # type: ignore[method-assign]
        until(lambda: all_free(consumer), "the slot")
        assert consumer.ask(lambda side: str(len(side._offers) + len(side._looks) + len(side._fading))) == "0"

    def test_a_staging_slot_that_changes_after_its_digest(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, tokens=8)
        hand_over = Posting._hand_over

        def spoil(self: Posting, *given: Any) -> int:
            slots_of(producer)._memory[:] ^= 1
            return hand_over(self, *given)

        monkeypatch.setattr(Posting, "_hand_over", spoil)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert untouched(consumer, push.target)

    def test_a_landing_slot_that_changes_before_it_is_looked_at(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, tokens=8)
        part = verifying.Verifying.part

        def spoil(self: Any, pair: Any, complete: Complete, now: float) -> None:
            assert complete.credit is not None
            slots_of(consumer)._memory[complete.credit.slot * SLOT + SLOT - 1] ^= 128
            part(self, pair, complete, now)

        monkeypatch.setattr(verifying.Verifying, "part", spoil)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert untouched(consumer, push.target)

    def test_a_part_without_a_digest(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, tokens=8)
        monkeypatch.setattr(Posting, "_digest", lambda *_: None)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "part 0 (tokens 0 to 8) of producer rank 0 came without a digest" in transfer.detail
        assert untouched(consumer, push.target)

    @pytest.mark.parametrize("whose", ["producer", "consumer"])
    def test_a_slot_that_cannot_be_read_back(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
        producer, consumer, link = connected(scene)
        push, other = pushes(producer, consumer, 2)
        victim = slots_of({"producer": producer, "consumer": consumer}[whose])
        fails_while_unreadable(monkeypatch, Slots, lambda one: one is victim, (push, other), link)
        until(lambda: all_free(producer, consumer), "the slots")

    @pytest.mark.parametrize("lie", ["longer than a slot", "beyond what is owed", "another's credit"])
    def test_a_part_that_is_not_what_its_slot_was_granted_for(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, lie: str
    ) -> None:
        """Nothing is read for it; one that names another's credit costs nobody anything."""
        producer, consumer, link = connected(scene)
        push, other = pushes(producer, consumer, 2)
        part = verifying.Verifying.part

        def told(self: Any, pair: Any, complete: Complete, now: float) -> None:
            assert complete.credit is not None
            if lie == "another's credit":
                part(
                    self,
                    pair,
                    msgspec.structs.replace(complete, credit=msgspec.structs.replace(complete.credit, generation=99)),
                    now,
                )
                part(self, pair, complete, now)
                return
            stop = 24 if lie == "longer than a slot" else 1000
            spans = tuple(msgspec.structs.replace(span, token_start=0, token_stop=stop) for span in complete.spans)
            part(self, pair, msgspec.structs.replace(complete, spans=spans), now)

        monkeypatch.setattr(verifying.Verifying, "part", told)
        transfer = push.offer(link)
        push.stage()
        expected = {
            "longer than a slot": (Outcome.TRANSPORT_ERROR, f"its {24 * TOKEN} bytes are more than a slot's {SLOT}"),
            "beyond what is owed": (Outcome.REJECTED_GEOMETRY, ""),
            "another's credit": (Outcome.COMPLETE, ""),
        }[lie]  # fmt: skip
        assert transfer.wait(WAIT) is expected[0], transfer.detail
        assert expected[1] in transfer.detail
        if lie == "another's credit":
            assert push.arrived()
            assert consumer.stats()["bytes verified"] == 24 * TOKEN
        else:
            assert untouched(consumer, push.target)
            assert "bytes verified" not in consumer.stats()
        monkeypatch.setattr(verifying.Verifying, "part", part)
        good = other.offer(link)
        other.stage()
        assert good.wait(WAIT) is Outcome.COMPLETE
        until(lambda: all_free(producer, consumer), "the slots")


class TestALittleAtATime:
    @pytest.fixture(autouse=True)
    def slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Four chunks a slot, one a look."""
        monkeypatch.setattr(digest, "CHUNK", SLOT // 4)
        monkeypatch.setattr(verifying, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr("pushkv.runtime.posting.SLICE_SECONDS", 0.0)

    def test_it_comes_to_the_same(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        for push in pushes(producer, consumer, 3, tokens=50):
            transfer = push.offer(link)
            push.stage(ready=20)
            push.stage()
            assert transfer.wait(WAIT) is Outcome.COMPLETE
            assert push.arrived()
        until(lambda: all_free(producer, consumer), "the slots")

    @pytest.mark.parametrize("answered", [True, False], ids=["drained meanwhile", "looked at to the end"])
    def test_what_is_cancelled_while_it_is_looked_at(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, answered: bool
    ) -> None:
        """Its blocks come back at once, and its slot by the producer's word or by having come whole."""
        producer, consumer, link = connected(scene)
        push, other = pushes(producer, consumer, 2, tokens=8)
        reading, go_on = threading.Event(), threading.Event()
        read, send = Slots.read, producer._side._send

        def slowly(self: Slots, runs: Any) -> Any:
            if self is slots_of(consumer):
                reading.set()
                assert go_on.wait(WAIT)
            return read(self, runs)

        monkeypatch.setattr(Slots, "read", slowly)
        transfer = push.offer(link)
        push.stage()
        assert reading.wait(WAIT)
        if not answered:
            producer._side._send = lambda *_: None  # type: ignore[method-assign]
        consumer.cancel(transfer)
        go_on.set()
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert transfer.wait_released(WAIT)
        until(lambda: all_free(consumer), "the slot")
        assert untouched(consumer, push.target)
        producer._side._send = send  # type: ignore[method-assign]
        until(lambda: consumer.ask(lambda side: str(len(side._offers) + len(side._looks) + len(side._fading))) == "0")
        assert "parts that differ" not in consumer.stats()
        good = other.offer(link)
        other.stage()
        assert good.wait(WAIT) is Outcome.COMPLETE
        assert other.arrived()


def test_a_part_is_looked_at_once_whatever_is_said_of_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that sends a part's notification a thousand times, each with another digest, gets one look."""
    producer, consumer, link = connected(scene)
    push, other = pushes(producer, consumer, 2, tokens=8)
    part, most = verifying.Verifying.part, [0]

    def flood(self: Any, pair: Any, complete: Complete, now: float) -> None:
        for number in range(1000):
            part(self, pair, msgspec.structs.replace(complete, digest=number.to_bytes(4, "big")), now)
            most.append(len(self._looks))

    monkeypatch.setattr(verifying.Verifying, "part", flood)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
    assert max(most) == 1
    assert consumer.stats()["parts that come while they are verified"] == 999
    monkeypatch.setattr(verifying.Verifying, "part", part)
    good = other.offer(link)
    other.stage()
    assert good.wait(WAIT) is Outcome.COMPLETE
    until(lambda: all_free(producer, consumer), "the slots")


def test_both_ways_beside_each_other(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``auto`` each transfer is verified where it comes in."""
    settings = {**SETTINGS, "landing": "auto"}
    producer = scene.producer(**settings)
    lands = scene.consumer("d0", **{**settings, "landing_costs": Costs(descriptor=1.0, copy=1e9)})
    direct = scene.consumer("d1", **{**settings, "landing_costs": Costs(descriptor=0.0)})
    links = [consumer.connect(producer.address) for consumer in (lands, direct)]
    for faults, outcome in ((Faults(), Outcome.COMPLETE), (CORRUPT, Outcome.TRANSPORT_ERROR)):
        scene.network.faults = faults
        for consumer, link in zip((lands, direct), links, strict=True):
            name = f"r{consumer.config.engine}{outcome.value}"
            pushed = Pushed(producer, consumer, name, blocks_for(20), blocks_for(20, 9), 20)
            transfer = pushed.offer(link)
            pushed.stage()
            assert transfer.wait(WAIT) is outcome
            assert transfer.wait_released(WAIT)
            assert pushed.arrived() == (outcome is Outcome.COMPLETE or consumer is lands), "slots keep it from blocks"
    assert lands.stats()["scatters"] > 0
    assert "scatters" not in direct.stats()


def test_where_all_parts_land_the_cache_is_not_read_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(Reader, "__init__", fail)
    producer, consumer, link = connected(scene)
    (push,) = pushes(producer, consumer, 1)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_where_one_write_in_three_is_corrupt_just_those_fail(timed: Callable[[Network], Scene]) -> None:
    scene = timed(Network(seed=7))
    producer, consumer, link = connected(scene)
    scene.network.faults = Faults(corrupt=0.33, duplicate=0.5, reorder=0.5, delay=(0.0, 0.01))
    many = pushes(producer, consumer, 60, tokens=4)
    transfers = [push.offer(link) for push in many]
    for push in many:
        push.stage()
    assert all(transfer.wait(WAIT) for transfer in transfers)
    assert {transfer.outcome for transfer in transfers} == {Outcome.COMPLETE, Outcome.TRANSPORT_ERROR}
    for push, transfer in zip(many, transfers, strict=True):
        good = transfer.outcome is Outcome.COMPLETE
        assert push.arrived() if good else untouched(consumer, push.target)
    assert all(transfer.wait_released(WAIT) for transfer in transfers)
    scene.network.faults = Faults()
    until(lambda: all_free(producer, consumer), "the slots")


@pytest.mark.processes
@pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
def test_a_staging_slot_that_is_written_into_while_it_is_sent(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two processes over NIXL: 64 blocks of 1 MiB through slots of 16."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    settings = {**SETTINGS, "slot_bytes": 16 * BLOCK, "landing_bytes": 64 * BLOCK, "silence": WAIT}
    producer = start("producer", "p", **settings)
    try:
        consumer = Consumer(make_config("d", **settings), make_cache(0))
        link = consumer.connect(producer.ask("address"))

        def push(name: str, first: int) -> Any:
            blocks = list(range(first, first + 64))
            transfer = consumer.offer(name, link, blocks, prompt=bytes(32), prompt_tokens=64)
            producer.ask("stage", name, first, 64)
            transfer.wait(WAIT)
            assert transfer.wait_released(WAIT)
            return transfer

        array: Any = consumer.cache.arrays[0]
        assert push("sound", 0).outcome is Outcome.COMPLETE
        assert (array[0, :64, 0] == (1 + np.arange(64) % 250)[:, None]).all()
        assert consumer.stats()["bytes verified"] == 64 * BLOCK
        producer.ask("spoil_slot", 2)
        failed = push("spoilt", 64)
        assert failed.outcome is Outcome.TRANSPORT_ERROR
        assert "part 2 (tokens 32 to 48) of producer rank 0 was sent with the digest" in failed.detail
        assert not array[0, 96:112].any(), "none of that part"
        producer.ask("spoil_slot", -1)
        assert push("another", 128).outcome is Outcome.COMPLETE
        assert consumer.close(WAIT)
    finally:
        producer.kill()
        producer.pipe.close()
