"""Large WRITEs go out in slices, with a look at everything else in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.core.geometry import BlockTable
from pushkv.core.plan import plan_copy
from pushkv.runtime import posting, slices
from pushkv.runtime.slices import Budget, _chopped
from pushkv.transport.memory import Network
from runtime.scene import WAIT, Pushed, Scene, cache_of, fill, knows, memory_of, until

MakeScene = Callable[[Network], Scene]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one block's pieces, whatever they cost."""
    monkeypatch.setattr(Budget, "learn", lambda self, seconds: None)
    monkeypatch.setattr(posting, "Budget", lambda: Budget(pieces=4, bytes=1 << 20))


def ends(scene: Scene) -> tuple[Producer, Consumer, Link]:
    producer = scene.producer(cache=cache_of(fill(memory_of(256))))
    consumer = scene.consumer(cache=cache_of(memory_of(256)))
    return producer, consumer, consumer.connect(producer.address)


def handed_over(producer: Producer) -> list[bytes]:
    """The notifications of the slices that are handed over from now on."""
    notifications: list[bytes] = []
    transport = producer._side.transport
    assert transport is not None
    for name in ("write", "write_indexed"):
        call = getattr(transport, name)

        def noting(*given: Any, call: Any = call) -> Any:
            notifications.append(given[-1])
            return call(*given)

        setattr(transport, name, noting)
    return notifications


@pytest.mark.parametrize("tokens", [80, 78])
def test_the_notification_rides_on_the_last_slice(scene: Scene, tokens: int) -> None:
    """Over prepared lists (whole blocks) and over pieces (a part of the last block)."""
    producer, consumer, link = ends(scene)
    sent = handed_over(producer)
    push = Pushed(producer, consumer, "r", list(range(0, 40, 2)), list(range(100, 140, 2)), tokens)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()
    assert len(sent) >= 20
    assert [bool(one) for one in sent] == [False] * (len(sent) - 1) + [True]
    assert producer.stats()["writes"] == 1


def test_the_last_slice_waits_for_the_others(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = ends(scene)
    sent = handed_over(producer)
    scene.network.stall(producer.agent)
    push = Pushed(producer, consumer, "r", list(range(0, 20, 2)), list(range(100, 120, 2)), 40)
    transfer = push.offer(link)
    push.stage()
    until(lambda: len(sent) == slices.MOST_FLYING)
    time.sleep(0.02)
    assert len(sent) == slices.MOST_FLYING
    assert transfer.outcome is None
    scene.network.release()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()


def test_a_cancel_stops_the_slices_that_are_to_come(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = ends(scene)
    sent = handed_over(producer)
    scene.network.stall(producer.agent)
    push = Pushed(producer, consumer, "r", list(range(0, 40, 2)), list(range(100, 140, 2)), 80)
    transfer, stage = push.offer(link), push.stage()
    until(lambda: len(sent) == slices.MOST_FLYING)
    consumer.cancel(transfer)
    assert transfer.wait(WAIT) is Outcome.CANCELLED
    assert stage.wait(WAIT) is Outcome.CANCELLED
    assert not transfer.released, "some slices are in flight"
    assert not stage.released
    scene.network.release()
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    assert len(sent) == slices.MOST_FLYING
    assert not producer._side._writes
    assert not producer._side._slices


def test_a_slice_that_fails_fails_the_transfer_once_and_holds_its_blocks(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = ends(scene)
    scene.network.stall(producer.agent)
    sent = handed_over(producer)
    push = Pushed(producer, consumer, "r", list(range(0, 40, 2)), list(range(100, 140, 2)), 80)
    transfer, stage = push.offer(link), push.stage()
    until(lambda: len(sent) == slices.MOST_FLYING)
    number = min(producer._side._slices)
    result = posting.WriteResult(number, posting.WriteStatus.FAILED, "it broke")
    producer._life.submit(lambda side: side._ended(result, time.monotonic()))
    assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
    assert "it broke" in transfer.detail
    assert stage.wait(WAIT) is Outcome.TRANSPORT_ERROR
    assert not stage.released, "bytes of the slice that failed may travel"
    assert not transfer.released
    scene.network.release()
    time.sleep(0.05)
    assert len(sent) == slices.MOST_FLYING
    assert not stage.released
    scene.kill(consumer)
    assert stage.wait_released(WAIT), "the consumer's end is proof for the source"


def test_two_consumers_take_turns(timed: MakeScene) -> None:
    """One large WRITE does not hold up a small one to somebody else."""
    scene = timed(Network())
    producer, consumer, link = ends(scene)
    other = scene.consumer("other", cache=cache_of(memory_of(256)))
    second = other.connect(producer.address)
    scene.network.stall(producer.agent, consumer.agent)
    large = Pushed(producer, consumer, "large", list(range(0, 100, 2)), list(range(100, 200, 2)), 200)
    small = Pushed(producer, other, "small", [201], [7], 4)
    waiting, quick = large.offer(link), small.offer(second)
    knows(producer, 2)
    large.stage()
    small.stage()
    assert quick.wait(WAIT) is Outcome.COMPLETE
    assert waiting.outcome is None
    scene.network.release()
    assert waiting.wait(WAIT) is Outcome.COMPLETE
    assert large.arrived()


def test_nothing_is_posted_to_a_peer_that_has_not_been_heard(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer, link = ends(scene)
    sent = handed_over(producer)
    push = Pushed(producer, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    knows(producer, 1)
    monkeypatch.setattr(posting, "LIVELY", -1e9)
    push.stage()
    time.sleep(0.05)
    assert not sent
    monkeypatch.setattr(posting, "LIVELY", 1e9)
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_budgets_follow_what_a_slice_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    budget = Budget()
    for _ in range(40):
        budget.learn(0.1)
    assert (budget.pieces, budget.bytes) == (16, 64 << 10)
    for _ in range(40):
        budget.learn(0.0)
    assert budget.pieces == 1 << 20
    assert budget.bytes == 1 << 34
    budget.learn(0.001)
    assert budget.pieces == 1 << 20


def test_long_runs_are_chopped_into_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(memory_of(64))
    table = [BlockTable(0, np.arange(40, dtype=np.int32))]
    plan = plan_copy(cache.geometry, cache.geometry, table, table, (0, 160))
    monkeypatch.setattr(slices, "RUN_MOST", 100)
    source_region, source, target_region, target, length = _chopped(plan)
    assert int(length.max()) <= 100
    assert len({len(source_region), len(source), len(target_region), len(target), len(length)}) == 1

    def bytes_of(starts: Any, lengths: Any) -> set[int]:
        return {
            at
            for start, size in zip(starts.tolist(), lengths.tolist(), strict=True)
            for at in range(start, start + size)
        }

    assert bytes_of(source, length) == bytes_of(plan.source_offset, plan.length)
    assert bytes_of(target, length) == bytes_of(plan.target_offset, plan.length)
    assert int(length.sum()) == plan.bytes
