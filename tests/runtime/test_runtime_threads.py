"""Who calls what: the data mover is the transfer thread's, and the engine's thread never waits for it."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest

from pushkv import Consumer, Limits, Outcome, Producer
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.runtime.loop import BATCH
from pushkv.runtime.pair import Pair
from pushkv.transport.base import Transport
from pushkv.transport.memory import MemoryTransport
from runtime.scene import TOKENS, WAIT, Gate, Pushed, Scene, cache_of, fill, knows, memory_of, until


def watched(scene: Scene, callers: dict[str, set[str]]) -> type[MemoryTransport]:
    """A transport that notes which thread calls which method."""

    class Watched(MemoryTransport):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name in Transport.__abstractmethods__ and name != "metadata":
                callers[name].add(threading.current_thread().name)
            return found

    return Watched


def test_only_the_transfer_thread_calls_the_data_mover(scene: Scene) -> None:
    callers: dict[str, set[str]] = defaultdict(set)
    kind = watched(scene, callers)
    scene.transport = lambda agent: kind(scene.network, agent)  # type: ignore[method-assign]
    producer, consumer = scene.producer(cache=cache_of(fill(memory_of()))), scene.consumer()
    link = consumer.connect(producer.address)
    push = Pushed(producer, consumer, "r", [1, 2, 3], [4, 5, 6], 10)
    transfer, stage = push.offer(link), push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait_released(WAIT)
    cancelled = consumer.offer("s", link, [9], prompt=bytes(32), prompt_tokens=4)
    consumer.cancel(cancelled)
    assert cancelled.wait_released(WAIT)
    for endpoint in (producer, consumer):
        assert endpoint.path(link.agents[0])
        endpoint.events()
        endpoint.stats()
        endpoint.close(WAIT)
    assert set(callers) >= {"register", "add_peer", "send", "receive", "poll", "write", "path", "close"}
    assert {name for names in callers.values() for name in names} == {"pushkv-prefill", "pushkv-decode"}


def test_the_engine_waits_for_nothing(scene: Scene) -> None:
    """Both transfer threads are held up; what the engine calls in a step goes through all the same."""
    producer, consumer = scene.producer(cache=cache_of(fill(memory_of()))), scene.consumer()
    link = consumer.connect(producer.address)
    go_on, held = threading.Event(), []
    for endpoint in (producer, consumer):
        inside = threading.Event()
        endpoint._transfer.submit(lambda inside=inside: (inside.set(), go_on.wait(WAIT)))  # type: ignore[misc]
        held.append(inside.wait(WAIT))
    assert held == [True, True]
    push = Pushed(producer, consumer, "r", [1, 2, 3], [4, 5, 6], 10)
    transfer, stage = push.offer(link), push.stage(fence=Gate(open=True))
    consumer.cancel(consumer.offer("s", link, [9], prompt=bytes(32), prompt_tokens=4))
    assert producer.preempt("r") is stage
    assert producer.stage("s", [2], prompt=bytes(32), prompt_tokens=4) is producer.unstage("s")
    assert producer.events() == consumer.events() == []
    assert consumer.held_blocks == 0
    assert "errors" in producer.stats()
    assert link.alive
    assert transfer.outcome is None
    go_on.set()
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_an_offer_to_an_idle_producer_needs_no_step_of_its_engine(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    consumer.offer("r", link, [1], prompt=bytes(32), prompt_tokens=4)
    until(lambda: producer._side.in_custody == 1)


def test_counts_may_be_read_while_they_grow(scene: Scene) -> None:
    producer = scene.producer()
    counts, stop = producer._side.machine.counts, threading.Event()

    def grow() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            counts[str(number % 5000)] += 1
            if not number % 5000:
                counts.clear()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(300):
            producer.stats()
    finally:
        stop.set()
        thread.join()


def test_a_flood_of_commands_does_not_keep_it_from_looking(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    left = [50 * BATCH]

    def again() -> None:
        left[0] -= 1
        if left[0]:
            producer._transfer.submit(again)

    seen: list[int] = []
    look = producer._side.look
    producer._side.look = lambda now: seen.append(left[0]) or look(now)  # type: ignore[func-returns-value, method-assign]
    producer._transfer.submit(again)
    consumer.offer("r", link, [1], prompt=bytes(32), prompt_tokens=4)
    knows(producer, 1)
    until(lambda: not left[0])
    assert len([number for number in seen if 0 < number < 50 * BATCH]) >= 40


class TestErrorsCostWhatRaisedThem:
    """The errors below are not supposed to happen: the thread goes on with everything else."""

    @pytest.fixture
    def ends(self, scene: Scene) -> tuple[Producer, Consumer]:
        return scene.producer(cache=cache_of(fill(memory_of()))), scene.consumer()

    def test_a_message_among_others(self, ends: tuple[Producer, Consumer], monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer = ends
        link = consumer.connect(producer.address)
        seen: list[object] = []
        message = producer._side.message

        def fail_at_first(pair: Pair, what: Any, now: float) -> None:
            seen.append(what)
            if len(seen) == 1:
                raise ZeroDivisionError
            message(pair, what, now)

        monkeypatch.setattr(producer._side, "message", fail_at_first)
        hold = threading.Event()
        producer._transfer.submit(lambda: hold.wait(WAIT))
        pushes = [Pushed(producer, consumer, f"r{n}", [n], [n + 8], 4) for n in range(4)]
        transfers = [push.offer(link) for push in pushes]
        until(lambda: consumer.held_blocks == 4)
        hold.set()
        for push in pushes:
            push.stage()
        assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}, "the first one is sent again"
        assert producer.stats()["errors"] == 1

    @pytest.mark.parametrize(("step", "released"), [("_plan", True), ("_hand_over", False)])
    def test_a_write_that_cannot_be_made(
        self, ends: tuple[Producer, Consumer], monkeypatch: pytest.MonkeyPatch, step: str, released: bool
    ) -> None:
        producer, consumer = ends
        link = consumer.connect(producer.address)
        good = getattr(producer._side, step)

        def fail_once(*given: Any) -> Any:
            monkeypatch.setattr(producer._side, step, good)
            raise IndexError("out of something")

        monkeypatch.setattr(producer._side, step, fail_once)
        bad, fine = (Pushed(producer, consumer, f"r{n}", [n], [n + 8], 4) for n in range(2))
        transfer = bad.offer(link)
        stage = bad.stage()
        assert transfer.wait(WAIT) in (Outcome.REJECTED_GEOMETRY, Outcome.TRANSPORT_ERROR)
        assert "out of something" in transfer.detail
        assert stage.wait(WAIT) is transfer.outcome
        after = fine.offer(link)
        fine.stage()
        assert after.wait(WAIT) is Outcome.COMPLETE
        if released:
            assert transfer.wait_released(WAIT)
            assert stage.wait_released(WAIT)
        else:
            assert not transfer.released, "who knows what the data mover has begun"
            assert not stage.released
            consumer._transfer.submit(lambda: consumer._side.machine.writes_ended(producer.agent, 0.0))
            producer._transfer.submit(lambda: producer._side.machine.writes_ended(consumer.agent, 0.0))
            consumer._transfer.submit(consumer._side.run_commands)
            producer._transfer.submit(producer._side.run_commands)

    def test_an_order_that_cannot_be_made(
        self, ends: tuple[Producer, Consumer], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer = ends
        link = consumer.connect(producer.address)

        def fail(*_: object) -> None:
            raise ZeroDivisionError("by zero")

        monkeypatch.setattr(type(link.pairs[0].template), "owed", fail)
        transfer = consumer.offer("r", link, [1], prompt=bytes(32), prompt_tokens=4)
        assert transfer.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert transfer.detail == "by zero"
        assert transfer.wait_released(WAIT)

    def test_a_question(self, ends: tuple[Producer, Consumer]) -> None:
        producer, _ = ends

        def fail() -> str:
            raise ZeroDivisionError

        assert producer.ask(fail).startswith("unknown")
        assert producer.ask(lambda _: "fine") == "fine"


def test_events_that_nobody_takes_are_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.endpoint.MOST_EVENTS", 10)
    producer = scene.producer()
    for number in range(10):
        stage = producer.stage(f"r{number}", [1], prompt=bytes(32), prompt_tokens=4)
        producer.unstage(f"r{number}")
        assert stage.wait_released(WAIT)
    assert len(producer.events()) == 10
    assert producer.stats()["events dropped"] == 10


def test_who_looks_seldom_is_knocked_awake(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle producer looks no more before the test gives up, nor is the offer sent again."""
    monkeypatch.setattr("pushkv.runtime.side.AWAKE", 0.0)
    late = {"limits": Limits(resend=600.0, resend_most=600.0)}
    producer, consumer = scene.producer(**late), scene.consumer(**late)
    link = consumer.connect(producer.address)
    # Its next looks are in ten minutes each, from the moment on when it wakes for this.
    monkeypatch.setattr("pushkv.runtime.loop.CALM", 1e-9)
    producer._transfer._idle_poll = 600.0
    producer.ask(lambda side: side.in_custody)
    push = Pushed(producer, consumer, "r", [5, 6], [40, 41], 2 * TOKENS)
    transfer = push.offer(link)
    until(lambda: producer._side.in_custody, "the offer")
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert transfer.wait_released(WAIT)


def test_who_waits_for_a_long_write_is_knocked_awake_at_its_end(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer looks when the WRITE is posted, and then no more before the test gives up."""
    monkeypatch.setattr("pushkv.runtime.side.AWAKE", 0.0)
    late = {"limits": Limits(resend=600.0, resend_most=600.0, lease=600.0)}
    producer, consumer = scene.producer(**late), scene.consumer(**late)
    link = consumer.connect(producer.address)
    push = Pushed(producer, consumer, "r", [5, 6], [40, 41], 2 * TOKENS)
    transfer = push.offer(link)
    until(lambda: producer._side.in_custody, "the offer")
    scene.network.stall(producer.agent)
    push.stage()
    until(lambda: producer.stats().get("writes") == 1, "the WRITE")
    monkeypatch.setattr("pushkv.runtime.loop.CALM", 1e-9)
    consumer._transfer._due_poll = 600.0
    consumer.ask(lambda side: side.in_custody)
    scene.network.release()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert transfer.wait_released(WAIT)


def test_who_is_spoken_to_all_the_time_is_not_knocked_awake(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.side.AWAKE", 600.0)
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    knocks: list[wire.Knock] = []
    send = consumer._control.send

    def noting(route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Knock):
            knocks.append(message)
        send(route, message)

    monkeypatch.setattr(consumer._control, "send", noting)
    for number in range(3):
        push = Pushed(producer, consumer, f"r{number}", [5, 6], [40, 41], 2 * TOKENS)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait_released(WAIT)
    assert len(knocks) <= 1
