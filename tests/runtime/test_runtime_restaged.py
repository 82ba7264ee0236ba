"""A transfer id that is staged anew while a call for its last stage still waits for its fence."""

from __future__ import annotations

from pushkv import Outcome
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
