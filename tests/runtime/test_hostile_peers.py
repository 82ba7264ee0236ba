"""Notifications of those who mean no good: strangers without a token, frames replayed, peers that say anything."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv import Consumer, Outcome, Producer
from pushkv.core.messages import (
    TOKEN_BYTES,
    Ack,
    Blocks,
    Cancel,
    Complete,
    Credit,
    Drained,
    Failed,
    Grant,
    Hello,
    Message,
    Offer,
    Ready,
    Renew,
    Ring,
    Table,
    TransferKey,
    encode,
)
from pushkv.core.span import Span
from pushkv.runtime import wire
from pushkv.runtime.pair import Pair
from pushkv.transport.memory import MemoryTransport, Network
from runtime.hostility import LIVE, Good, spoiled
from runtime.scene import WAIT, Pushed, Scene, array_of, knows, until

HEADER = 3 + 1 + TOKEN_BYTES
PRESENT = "present ####"
"""Stands for the id of the transfer that is open when a frame is sent."""

small = st.integers(0, 8) | st.integers(0, 2**31 - 1)
counts = st.integers(0, 8) | st.integers(0, 2**40)
seconds = st.floats(0.0, 60.0)
outcomes = st.sampled_from(Outcome)
tables = st.lists(st.integers(-2, 70), max_size=6).map(lambda ids: struct.pack(f"<{len(ids)}i", *ids)) | st.binary(
    max_size=9
)
spans = st.lists(st.builds(Span, small, small, small, small, small), max_size=3).map(tuple) | st.just(
    (Span(0, 0, 2, 0, 4),)
)
into = st.builds(
    lambda kind, ids: kind(tuple(Table(0, one) for one in ids)),
    st.sampled_from([Blocks, Blocks, Ring]),
    st.lists(tables, max_size=2),
)
credits = st.builds(Credit, small, counts)
sums = st.binary(min_size=4, max_size=64)


def to_a_producer(keys: st.SearchStrategy[TransferKey], prompts: list[bytes]) -> st.SearchStrategy[Message]:
    """Anything a consumer can say."""
    nonces, digests = st.binary(min_size=16, max_size=16), st.sampled_from(prompts)
    return st.one_of(
        st.builds(
            Offer,
            keys,
            counts,
            counts,
            nonces,
            digests,
            small | st.just(4),
            small,
            small,
            into,
            seconds,
            seconds,
            small,
        ),
        st.builds(Cancel, keys, counts, outcomes, small),
        st.builds(Renew, counts, seconds),
        st.builds(Grant, counts, small, credits),
        st.builds(Hello, st.text(min_size=1, max_size=20)),
    )


def to_a_consumer(keys: st.SearchStrategy[TransferKey], nonces: list[bytes]) -> st.SearchStrategy[Message]:
    """Anything a producer can say."""
    nonce = st.sampled_from(nonces) | st.binary(min_size=16, max_size=16)
    return st.one_of(
        st.builds(
            Complete,
            nonce,
            small,
            st.text(min_size=1, max_size=20),
            small,
            spans,
            st.none() | spans,
            st.none() | credits,
            st.none() | sums,
        ),
        st.builds(Failed, keys, counts, outcomes, st.text(max_size=50), st.booleans()),
        st.builds(Drained, keys, counts),
        st.builds(Ack, counts),
        st.builds(Ready, counts, small),
        st.builds(Hello, st.text(min_size=1, max_size=20)),
    )


@pytest.fixture
def good(scene: Scene) -> Good:
    return Good(scene)


@dataclass
class Evil:
    """An endpoint that is connected with another, and through which the test says what it likes."""

    endpoint: Producer | Consumer
    victim: Producer | Consumer

    def pair(self) -> Pair:
        return self.endpoint._side.agents[self.victim.agent]

    def say(self, frame: bytes, by_control: bool) -> None:
        """Send a frame, as a notification or over the control connection."""
        if by_control:
            self.endpoint._control.send(self.pair().route, wire.Relay(frame))
            return

        def send(side: Any) -> str:
            side.transport.send(self.victim.agent, frame)
            return "sent"

        assert self.endpoint.ask(send) == "sent"

    def speech(self, messages: st.SearchStrategy[Message]) -> st.SearchStrategy[list[tuple[bytes, bool]]]:
        """Frames with the right token: messages, and what is almost one."""
        token = self.pair().token
        frames = messages.map(lambda message: encode(token, message))
        bodies = [encode(token, Hello("x"))[HEADER:], encode(token, Renew(1, 1.0))[HEADER:]]
        broken = st.builds(lambda body: encode(token, Hello("x"))[:HEADER] + body, spoiled(bodies))
        return st.lists(st.tuples(frames | frames | frames | broken, st.booleans()), min_size=1, max_size=12)


def key_of(consumer: Consumer, transfer: str, attempt: int = 0) -> TransferKey:
    return TransferKey(transfer, consumer.config.engine, consumer.epoch, 0, attempt)


def test_a_consumer_that_says_anything(good: Good, scene: Scene) -> None:
    """It knows the ids, digests and keys of the good one's transfers, and ends none of them."""
    spoiler = scene.consumer("evil")
    spoiler.connect(good.producer.address)
    evil = Evil(spoiler, good.producer)
    numbers = iter(range(1_000_000))
    prompt = b"p" * 32
    keys = st.builds(
        key_of, st.sampled_from([spoiler, good.consumer]), st.sampled_from([PRESENT, "good 1"]), st.integers(0, 9)
    )

    @LIVE
    @given(evil.speech(to_a_producer(keys, [prompt, bytes(32)])))
    def says(frames: list[tuple[bytes, bool]]) -> None:
        name = f"present {next(numbers):04}"
        push = Pushed(good.producer, good.consumer, name, [1], [2], 4, prompt)
        waiting = push.offer(good.link)
        until(lambda: offered(good.producer, good.consumer) == 1)
        for frame, by_control in frames:
            evil.say(frame.replace(PRESENT.encode(), name.encode()), by_control)
        good.push()
        assert waiting.outcome is None, waiting.detail
        push.stage(siblings=100)
        assert waiting.wait(WAIT) is Outcome.COMPLETE, waiting.detail
        assert push.arrived()
        good.producer.unstage(push.name)

    says()
    good.unharmed()


def offered(producer: Producer, consumer: Consumer) -> int:
    """How many of a consumer's offers a producer has open."""

    def count(side: Any) -> str:
        return str(len(side.machine._book.customers[consumer.agent].live))

    return int(producer.ask(count))


def test_a_producer_that_says_anything(good: Good, scene: Scene) -> None:
    """It can spoil what was offered to it, and nothing else; what was offered to it comes back."""
    liar = scene.producer("evil")
    link = good.consumer.connect(liar.address)
    evil = Evil(liar, good.consumer)
    last, this = b"the last one's..", b"this one's......"
    nonces = {last: bytes(16), this: bytes(16)}
    numbers = iter(range(1_000_000))
    keys = st.builds(key_of, st.just(good.consumer), st.sampled_from([PRESENT, "good 1"]), st.integers(0, 2))

    @LIVE
    @given(evil.speech(to_a_consumer(keys, [last, this])))
    def says(frames: list[tuple[bytes, bool]]) -> None:
        name = f"present {next(numbers):04}"
        transfer = Pushed(liar, good.consumer, name, [9], [9], 4).offer(link)
        nonces[last], nonces[this] = nonces[this], nonce_of(good.consumer, transfer.key, liar.agent)
        for frame, by_control in frames:
            frame = frame.replace(last, nonces[last]).replace(this, nonces[this])
            evil.say(frame.replace(PRESENT.encode(), name.encode()), by_control)
        good.push()
        good.consumer.cancel(transfer)
        assert transfer.wait(WAIT) is not None
        assert transfer.wait_released(WAIT)

    says()
    good.unharmed()


def nonce_of(consumer: Consumer, key: TransferKey, agent: str) -> bytes:
    found: list[bytes] = []

    def look(side: Any) -> str:
        found.append(side.machine._transfers[key].ranks[agent].nonce)
        return "found"

    assert consumer.ask(look) == "found"
    return found[0]


# Strangers on the network


@dataclass
class Wiretap:
    """What has come to each agent, frame by frame."""

    heard: dict[str, list[bytes]] = field(default_factory=dict)


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Wiretap:
    """Listens to every notification on every in-process network."""
    tap, receive = Wiretap(), MemoryTransport.receive

    def listening(self: MemoryTransport) -> list[tuple[str, bytes]]:
        came = receive(self)
        tap.heard.setdefault(self.agent, []).extend(payload for _, payload in came)
        return came

    monkeypatch.setattr(MemoryTransport, "receive", listening)
    return tap


@pytest.fixture
def intruder(scene: Scene) -> Iterator[Callable[[Producer | Consumer, bytes], None]]:
    """Sends to an endpoint's agent from one that nobody has met; its name is almost the good consumer's."""
    agent = MemoryTransport(scene.network, "pushkv-decode-good-0-0123456789abcdef")
    agent.claim()
    known: set[str] = set()

    def send(endpoint: Producer | Consumer, frame: bytes) -> None:
        if endpoint.agent not in known:
            assert endpoint._side.me is not None
            known.add(agent.add_peer(endpoint._side.me.metadata, None))
        agent.send(endpoint.agent, frame)

    yield send
    agent.close()


def test_replayed_frames_do_nothing(
    tap: Wiretap, scene: Scene, intruder: Callable[[Producer | Consumer, bytes], None]
) -> None:
    """All that was ever said, said again: in any order, while idle and beside something new, from somebody else."""
    good = Good(scene)
    for _ in range(3):
        good.push()
    over = Pushed(good.producer, good.consumer, "cancelled", [5], [5], 4).offer(good.link)
    good.consumer.cancel(over)
    assert over.wait_released(WAIT)
    said = [(end, frame) for end in (good.producer, good.consumer) for frame in tap.heard[end.agent]]
    assert len(said) > 12
    array = array_of(good.consumer)
    array[:] = 0
    taken = len(good.producer.events()), len(good.consumer.events())
    assert all(taken)
    for seed in range(10):
        Random(seed).shuffle(said)
        for endpoint, frame in said:
            intruder(endpoint, frame)
        if seed % 2:
            good.push()
            good.producer.events()
            good.consumer.events()
            array[:] = 0
    for endpoint in (good.producer, good.consumer):
        endpoint.ask(lambda side: str(side.look(side.shared.clock())))
        assert not endpoint.events(), "nothing has happened to the engine"
    assert not array.any()
    good.unharmed()


def test_a_stranger_has_no_token(
    good: Good, scene: Scene, intruder: Callable[[Producer | Consumer, bytes], None]
) -> None:
    """Well-formed messages about what is there, with every token but the right one: counted, and dropped unread."""
    waiting = Pushed(good.producer, good.consumer, "waits", [1], [2], 4)
    transfer = waiting.offer(good.link)
    knows(good.producer, 1)
    keys = st.builds(key_of, st.just(good.consumer), st.sampled_from(["waits", "good 1"]), st.integers(0, 2))
    nonces = [nonce_of(good.consumer, transfer.key, good.producer.agent)]
    messages = to_a_producer(keys, [waiting.prompt]) | to_a_consumer(keys, nonces)
    sent = 0

    @settings(LIVE, max_examples=200)
    @given(messages, st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES))
    def said(message: Message, token: bytes) -> None:
        nonlocal sent
        for endpoint in (good.producer, good.consumer):
            intruder(endpoint, encode(token, message))
        sent += 1

    said()
    for endpoint in (good.producer, good.consumer):
        until(lambda endpoint=endpoint: endpoint.stats().get("foreign frames", 0) == sent)  # type: ignore[misc]
    assert transfer.outcome is None
    waiting.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert waiting.arrived()
    good.unharmed()


def test_another_ones_key_is_foreign(good: Good, scene: Scene) -> None:
    """A later attempt, forged by another consumer of the cluster, does not supersede what is open."""
    other = scene.consumer("other")
    other.connect(good.producer.address)
    push = Pushed(good.producer, good.consumer, "mine", [1], [2], 4)
    transfer = push.offer(good.link)
    knows(good.producer, 1)
    evil = Evil(other, good.producer)
    forged = Cancel(msgspec.structs.replace(transfer.key, attempt=7), 1, Outcome.CANCELLED)
    evil.say(encode(evil.pair().token, forged), False)
    until(lambda: good.producer.stats().get("foreign keys") == 1)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_fences_are_asked_for_one_at_a_time(timed: Callable[[Network], Scene]) -> None:
    """Whoever may speak at the port may ask for one, and not have it start a hundred."""
    scene = timed(Network())
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    scene.network.stall(producer.agent)
    push = Pushed(producer, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as operator:
        operator.setsockopt(zmq.LINGER, 0)
        operator.connect(producer.address)
        for _ in range(100):
            operator.send(wire.pack(wire.Fence(WAIT)))
        refused = [wire.unpack(operator.recv()) for _ in range(99) if operator.poll(WAIT * 1000)]
        assert {type(one) for one in refused} == {wire.Fenced}
        assert {one.detail for one in refused} == {"another fence is under way; ask again after it"}  # type: ignore
        assert sum(thread.name == "pushkv-prefill-fence" for thread in threading.enumerate()) == 1
        scene.network.release()
        assert operator.poll(WAIT * 1000)
        answer = wire.unpack(operator.recv())
        assert isinstance(answer, wire.Fenced)
        assert answer.clear
        operator.send(wire.pack(wire.Fence(WAIT)))
        assert operator.poll(WAIT * 1000), "after it another is welcome"
    context.term()
    assert transfer.wait_released(WAIT)
    assert np.isfinite(array_of(consumer)).all()
