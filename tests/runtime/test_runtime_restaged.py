"""A transfer id that is staged anew: calls of its last stage that come late, and ends that nobody has seen."""

from __future__ import annotations

import pytest

from pushkv import Consumer, Outcome, Producer
from pushkv.core.commands import StageEnded, StageReleased
from pushkv.runtime.ending import Ending
from runtime.scene import WAIT, Gate, Pushed, Scene, blocks_for, until


def test_a_late_call_of_the_last_stage_releases_nothing_of_the_next(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    first = Pushed(producer, consumer, "r", blocks_for(12), blocks_for(12), 12)
    late, gate = Gate(), Gate()
    ended = first.stage(ready=4)
    assert first.stage(ready=8, fence=late) is ended
    offered = first.offer(link)
    consumer.cancel(offered)
    assert ended.wait(WAIT) is Outcome.CANCELLED
    assert ended.wait_released(WAIT)
    second = Pushed(producer, consumer, "r", blocks_for(12, 20), blocks_for(12, 20), 12)
    stage = second.stage(fence=gate)
    late.open = True
    until(lambda: producer.ask(lambda side: str(len(side._fenced))) == "1", "the late call")
    assert stage.outcome is None
    assert not stage.released
    gate.open = True
    assert second.offer(link, attempt=1).wait(WAIT) is Outcome.COMPLETE
    assert stage.wait_released(WAIT)
    assert second.arrived()


def test_a_late_call_whose_fence_fails_ends_nothing_of_the_next(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    link = consumer.connect(producer.address)
    first = Pushed(producer, consumer, "r", blocks_for(12), blocks_for(12), 12)
    late = Gate()
    ended = first.stage(ready=4)
    first.stage(ready=8, fence=late)
    consumer.cancel(first.offer(link))
    assert ended.wait_released(WAIT)
    second = Pushed(producer, consumer, "r", blocks_for(12, 20), blocks_for(12, 20), 12)
    stage = second.stage(ready=4)
    late.error = "the kernel faulted"
    until(lambda: producer.ask(lambda side: str(len(side._fenced))) == "0", "the late call")
    assert stage.outcome is None
    assert not stage.released
    transfer = second.offer(link, attempt=1)
    second.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait_released(WAIT)


def over(scene: Scene) -> tuple[Producer, Consumer, Pushed, Ending]:
    """A stage that the consumer has ended while it was computed; the engine has not looked."""
    producer, consumer = scene.producer(), scene.consumer()
    push = Pushed(producer, consumer, "r", blocks_for(12), blocks_for(12), 12)
    stage = push.stage(ready=4)
    consumer.cancel(push.offer(consumer.connect(producer.address)))
    until(lambda: stage.outcome is not None and stage.released)
    return producer, consumer, push, stage


def test_more_of_a_stage_whose_end_nobody_has_seen_begins_no_other(scene: Scene) -> None:
    """The engine is about to see that its blocks are free: they must not be read for another stage."""
    producer, _, push, stage = over(scene)
    assert push.stage(ready=8) is stage
    assert stage.released
    events = [event for event in producer.events() if isinstance(event, (StageEnded, StageReleased))]
    assert [type(event) for event in events] == [StageEnded, StageReleased]
    again = push.stage(ready=8)
    assert again is not stage
    assert not again.released
    assert producer.unstage("r") is again
    assert again.wait_released(WAIT)
    assert push.stage(ready=8) is not again, "who has waited knows"


def test_ends_that_nobody_looks_at_are_forgotten(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.producer.REMEMBERED", 3)
    producer, _, push, _ = over(scene)
    for number in range(8):
        ending = producer.stage(f"s{number}", push.source, prompt=push.prompt, prompt_tokens=12)
        producer.unstage(f"s{number}")
        until(lambda: ending.released)  # noqa: B023  # it is awaited here
    assert list(producer._untold) == ["s5", "s6", "s7"]
    assert not producer._stages


def test_an_ending_that_has_ended_holds_nothing() -> None:
    ending = Ending()
    assert ending.hold()
    ending.release()
    ending.end(Outcome.CANCELLED, "")
    assert not ending.hold()
    assert ending.released
