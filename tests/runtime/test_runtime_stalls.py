"""A call into the data mover that never returns: the watchdog, and what becomes of everything."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from pushkv import Outcome
from pushkv.errors import TransportError
from pushkv.runtime.turn import MOST_A_LOOK, Abandoned, Turn
from pushkv.transport.memory import MemoryTransport, Network
from pushkv.transport.memory_network import Network as NetworkOf
from runtime.scene import WAIT, Gate, Pushed, Scene, cache_of, fill, knows, memory_of, until

STALL = 0.3


def pushes(scene: Scene, count: int = 4) -> list[Pushed]:
    producer = scene.producer(cache=cache_of(fill(memory_of())), stall=STALL)
    consumer = scene.consumer()
    return [Pushed(producer, consumer, f"r{n}", [3 * n, 3 * n + 1, 3 * n + 2], [40 + 3 * n, 41 + 3 * n, 42 + 3 * n],
                   10) for n in range(count)]  # fmt: skip


def thread_of(agent: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if agent in thread.name]


def test_a_producer_stuck_in_a_write(scene: Scene) -> None:
    stuck, waiting, parts, fenced = pushes(scene)
    producer, consumer = stuck.scene_producer, stuck.scene_consumer
    link = consumer.connect(producer.address)
    transfers = [push.offer(link) for push in (stuck, waiting, parts, fenced)]
    part = parts.stage(ready=4)
    until(lambda: parts.arrived(0, 4))
    behind = fenced.stage(fence=Gate())
    scene.network.block_posts(producer.agent, consumer.agent)
    first = producer._transfer._thread
    stage = stuck.stage()
    assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.TRANSPORT_ERROR] * 4
    assert "did not return for 0.3 s" in transfers[0].detail
    assert "did not return" in producer.stalled
    old, old_agent = next(life for life in producer._lives if life.stalled), producer._past[0].agent
    assert [one.wait(WAIT) for one in (stage, part, behind)] == [Outcome.TRANSPORT_ERROR] * 3
    assert part.wait_released(WAIT)
    assert behind.wait_released(WAIT)
    assert not stage.released, "the WRITE may still read its blocks"
    assert not transfers[0].released, "and its bytes may still land"
    assert transfers[1].wait_released(WAIT)
    assert transfers[2].wait_released(WAIT)

    until(lambda: link.alive and producer.agent in link.agents, "both go on over a fresh agent")
    late = Pushed(producer, consumer, "late", [60], [60], 4)
    pushed = late.offer(link)
    late.stage()
    assert pushed.wait(WAIT) is Outcome.COMPLETE
    assert late.arrived()
    assert producer.stats()["transfer threads given up"] == 1

    until(lambda: not old.side.machine.open_transfers)
    producer.events()
    before = dict(vars(old.side)), producer.events(), producer.stats().get("writes", 0)
    scene.network.unblock_posts()
    first.join(WAIT)
    assert not first.is_alive()
    after = dict(vars(old.side)), producer.events(), producer.stats().get("writes", 0)
    assert after == before, "the old thread touches nothing"
    assert transfers[0].outcome is Outcome.TRANSPORT_ERROR
    assert producer.close(0.1) is False
    assert not old.transfer._thread.is_alive()
    scene.network.die(old_agent)
    scene.kill(producer)
    assert transfers[0].wait_released(WAIT)


def test_a_consumer_stuck_in_a_notification(scene: Scene) -> None:
    producer, other = scene.producer(cache=cache_of(fill(memory_of()))), scene.producer("q")
    consumer = scene.consumer(stall=STALL)
    link, second = consumer.connect(producer.address), consumer.connect(other.address)
    push, more = (Pushed(producer, consumer, f"r{n}", [3 * n, 3 * n + 1, 3 * n + 2], [40 + 3 * n, 41 + 3 * n,
                  42 + 3 * n], 10) for n in range(2))  # fmt: skip
    waiting = consumer.offer("elsewhere", second, [1], prompt=bytes(32), prompt_tokens=4)
    knows(other, 1)
    scene.network.block_posts(consumer.agent, producer.agent)
    stuck, queued = push.offer(link), more.offer(link)
    assert [one.wait(WAIT) for one in (stuck, queued, waiting)] == [Outcome.TRANSPORT_ERROR] * 3
    assert consumer.stats()["transfer threads given up"] == 1
    assert all(one.wait_released(WAIT) for one in (stuck, queued, waiting)), "Drained comes another way"
    until(lambda: link.alive and second.alive, "the fresh agent has found both again")
    until(lambda: not consumer.stalled, "the life that got stuck ends: nothing is in its custody any more")
    again = Pushed(producer, consumer, "again", [9, 10, 11], [50, 51, 52], 10)
    transfer = again.offer(link)
    again.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert consumer.close(WAIT)


def test_the_data_mover_outlives_the_call_that_got_stuck(scene: Scene) -> None:
    """Collected, it would deregister memory that a WRITE may still touch."""
    made: list[weakref.ref[MemoryTransport]] = []

    def transport(agent: str) -> MemoryTransport:
        one = MemoryTransport(scene.network, agent)
        made.append(weakref.ref(one))
        return one

    scene.transport = transport  # type: ignore[method-assign]
    (push,) = pushes(scene, 1)
    producer = push.scene_producer
    link = push.scene_consumer.connect(producer.address)
    transfer = push.offer(link)
    knows(producer, 1)
    first = producer._transfer._thread
    scene.network.block_posts(producer.agent)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
    scene.network.unblock_posts()
    first.join(WAIT)
    del first
    gc.collect()
    assert made[0]() is not None
    scene.kill(producer)


def test_a_handshake_that_gets_stuck(scene: Scene) -> None:
    producer, consumer = scene.producer(stall=STALL), scene.consumer()
    scene.network.block_posts(producer.agent)
    with pytest.raises(Exception, match="first WRITE has not arrived"):
        consumer.connect(producer.address, timeout=1.5)
    assert producer.stats()["transfer threads given up"] == 1
    link = consumer.connect(producer.address)
    assert link.agents == (producer.agent,), "a fresh agent, whose calls return"


def test_closing_while_a_call_does_not_return(scene: Scene) -> None:
    (push,) = pushes(scene, 1)
    producer, consumer = push.scene_producer, push.scene_consumer
    link = consumer.connect(producer.address)
    push.offer(link)
    knows(producer, 1)
    scene.network.block_posts(producer.agent)
    push.stage()
    assert producer.close(2 * STALL) is False
    until(lambda: not producer._control._thread.is_alive())
    assert producer.close() is False, "the same answer again"
    scene.kill(producer)


def test_a_data_mover_that_does_not_close(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = scene.producer(stall=STALL)
    never = threading.Event()
    monkeypatch.setattr(MemoryTransport, "close", lambda self: never.wait(WAIT))
    assert producer.close(4 * STALL) is False
    never.set()
    until(lambda: not producer._transfer._thread.is_alive())


class TestTurn:
    def test_a_long_absence_of_the_watchdog_is_not_the_calls_fault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As after SIGSTOP and SIGCONT: the clock went on while nobody ran."""
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        turn, seen = Turn(), []

        def call() -> None:
            seen.append(turn.seize(5.0))
            now[0] += 60.0
            seen.append(turn.seize(5.0))
            for _ in range(int(5.0 / MOST_A_LOOK) - 1):
                now[0] += MOST_A_LOOK
                seen.append(turn.seize(5.0))

        with pytest.raises(Abandoned):
            turn.away("a call", call)
        assert seen[:-1] == [None] * (len(seen) - 1)
        assert seen[-1] == "a call"

    def test_many_short_calls_are_not_a_long_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        turn = Turn()
        for _ in range(200):
            now[0] += 0.05
            assert turn.away("a call", lambda: turn.seize(0.1)) is None

    def test_whoever_was_taken_over_from_may_make_no_call(self) -> None:
        turn = Turn()

        def call() -> None:
            turn.seize(1e-9)
            until(lambda: turn.seize(1e-9))

        with pytest.raises(Abandoned):
            turn.away("a call", call)
        with pytest.raises(Abandoned):
            turn.away("another", lambda: pytest.fail("was called"))


def test_a_data_mover_that_fails_at_everything_leaves_deadlines_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (push,) = pushes(scene, 1)
    link = push.scene_consumer.connect(push.scene_producer.address)

    def fail(self: NetworkOf, *_: object) -> None:
        raise TransportError("the agent is broken")

    fails: Callable[..., None] = fail
    transfer, stage = push.offer(link, deadline=0.3), push.scene_producer.stage(
        "other", [1], prompt=bytes(32), prompt_tokens=4, deadline=0.3
    )  # fmt: skip
    monkeypatch.setattr(Network, "take", fails)
    monkeypatch.setattr(Network, "ended", fails)
    assert transfer.wait(WAIT) is Outcome.EXPIRED
    assert stage.wait(WAIT) is Outcome.EXPIRED
    monkeypatch.undo()
    assert transfer.wait_released(WAIT)
