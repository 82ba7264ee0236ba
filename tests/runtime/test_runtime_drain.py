"""Draining: nothing new is taken, what is open finishes; and the handler of SIGTERM, in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from pushkv import Consumer, Link, Outcome, Producer, drain_on_sigterm
from pushkv.errors import ConfigError, EndpointClosed, HandshakeRefused
from pushkv.transport.memory import Network
from runtime.scene import WAIT, Pushed, Scene, knows, until


def connected(scene: Scene) -> tuple[Producer, Consumer, Link]:
    producer, consumer = scene.producer(), scene.consumer()
    return producer, consumer, consumer.connect(producer.address)


class Draining:
    """A drain that goes on beside the test."""

    def __init__(self, endpoint: Producer | Consumer, timeout: float = WAIT) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(endpoint.drain(timeout)))
        self._thread.start()
        until(lambda: endpoint.draining)

    def wait(self) -> bool:
        self._thread.join(WAIT)
        return self.answers[0]


def test_a_producer_finishes_what_has_met(scene: Scene) -> None:
    producer, consumer, link = connected(scene)
    met = Pushed(producer, consumer, "met", [1, 2], [3, 4], 8)
    transfer = met.offer(link)
    first = met.stage(ready=4)
    until(lambda: met.arrived(0, 4))
    draining = Draining(producer)
    assert not draining.answers
    assert met.stage(ready=6) is first, "the engine goes on with what it computes"
    until(lambda: met.arrived(0, 4))
    producer.preempt("met")
    met.stage(blocks=[1, 2])
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert met.arrived()
    assert draining.wait()
    assert first.wait_released(WAIT)
    assert producer.close()


def test_a_producer_refuses_what_has_not_met(scene: Scene) -> None:
    producer, consumer, link = connected(scene)
    met = Pushed(producer, consumer, "met", [1, 2], [3, 4], 8)
    transfer = met.offer(link)
    met.stage(ready=4)
    waiting = Pushed(producer, consumer, "offered", [5], [5], 4).offer(link)
    alone = Pushed(producer, consumer, "staged", [6], [6], 4).stage()
    knows(producer, 2)
    draining = Draining(producer)
    assert alone.wait(WAIT) is Outcome.REJECTED_CLOSING
    assert alone.wait_released(WAIT)
    late = Pushed(producer, consumer, "late", [7], [7], 4)
    for refused in (waiting, late.offer(link)):
        assert refused.wait(WAIT) is Outcome.REJECTED_CLOSING
        assert "shutting down" in refused.detail
        assert refused.wait_released(WAIT)
    with pytest.raises(EndpointClosed, match="shutting down and takes nothing new; use another"):
        late.stage()
    with pytest.raises(HandshakeRefused, match="shutting down; connect to another"):
        scene.consumer("new").connect(producer.address)
    assert transfer.outcome is None
    met.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert draining.wait()


def test_a_stage_waits_for_no_more_siblings_than_have_come(scene: Scene) -> None:
    producer, consumer, link = connected(scene)
    push = Pushed(producer, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    stage = push.stage(siblings=3)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert stage.outcome is None
    assert producer.drain(WAIT)
    assert stage.wait(WAIT) is Outcome.REJECTED_CLOSING
    assert stage.wait_released(WAIT)


def test_a_consumer_finishes_what_it_has_offered(scene: Scene) -> None:
    producer, consumer, link = connected(scene)
    push, other = (Pushed(producer, consumer, name, [n], [n], 4) for n, name in enumerate(("r", "other")))
    transfer, unwanted = push.offer(link), other.offer(link)
    knows(producer, 2)
    draining = Draining(consumer)
    for call in (lambda: Pushed(producer, consumer, "late", [7], [7], 4).offer(link),
                 lambda: consumer.connect(producer.address)):  # fmt: skip
        with pytest.raises(EndpointClosed, match="takes nothing new"):
            call()
    consumer.cancel(unwanted)
    assert unwanted.wait(WAIT) is Outcome.CANCELLED
    assert not draining.answers
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()
    assert draining.wait()
    assert transfer.released


def test_the_timeout_cuts_nothing_short(timed: Callable[[Network], Scene]) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    scene.network.stall(producer.agent)
    push = Pushed(producer, consumer, "r", [1, 2], [3, 4], 8)
    transfer, stage = push.offer(link), push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    assert not producer.drain(0.1)
    assert not consumer.drain(0.1)
    assert (transfer.outcome, stage.outcome) == (None, None)
    scene.network.release()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert producer.drain(WAIT)
    assert consumer.drain(WAIT)


def test_asleep_or_closed_there_is_nothing_to_drain(scene: Scene) -> None:
    producer, consumer, _ = connected(scene)
    assert consumer.sleep(WAIT)
    assert consumer.drain(WAIT)
    assert producer.close()
    assert producer.drain(WAIT)


@pytest.fixture
def handler() -> Iterator[None]:
    """SIGTERM's handler is put back after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
class TestTheHandler:
    def test_is_taken_back(self, scene: Scene) -> None:
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
        mine = signal.getsignal(signal.SIGTERM)
        with drain_on_sigterm(scene.producer()) as installed:
            assert signal.getsignal(signal.SIGTERM) != mine
        assert signal.getsignal(signal.SIGTERM) is mine
        installed.undo()
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert not installed.begun
        assert not installed._thread.is_alive()

    def test_taken_back_beneath_another_passes_on(self, scene: Scene) -> None:
        heard: list[str] = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
        installed = drain_on_sigterm(scene.producer())
        below = signal.getsignal(signal.SIGTERM)
        assert callable(below)
        signal.signal(signal.SIGTERM, lambda *args: (heard.append("above"), below(*args)))
        installed.undo()
        signal.raise_signal(signal.SIGTERM)
        assert heard == ["above", "mine"]

    def test_drains_and_then_calls_the_one_before(self, scene: Scene) -> None:
        """Here in one process: the endpoints are closed, and the earlier handler has been called, once."""
        heard: list[bool] = []
        producer, consumer, _ = connected(scene)
        signal.signal(signal.SIGTERM, lambda *_: heard.append(producer._closing and consumer._closing))
        mine = signal.getsignal(signal.SIGTERM)
        with drain_on_sigterm(producer, consumer, limit=WAIT) as installed:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            assert installed.begun
        assert heard == [True]
        assert signal.getsignal(signal.SIGTERM) is mine

    @pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
    def test_with_a_limit_that_is_none(self, scene: Scene, limit: float) -> None:
        with pytest.raises(ConfigError, match="s; give seconds above 0"):
            drain_on_sigterm(scene.producer(), limit=limit)

    def test_of_nothing(self) -> None:
        with pytest.raises(ConfigError, match="No endpoint is given"):
            drain_on_sigterm()

    def test_in_another_thread(self, scene: Scene) -> None:
        errors: list[ConfigError] = []

        def install() -> None:
            with pytest.raises(ConfigError, match="in thread other; call it in the main thread") as error:
                drain_on_sigterm(scene.producer())
            errors.append(error.value)

        thread = threading.Thread(target=install, name="other")
        thread.start()
        thread.join()
        assert len(errors) == 1
