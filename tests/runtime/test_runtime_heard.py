"""Bad news arrives: what fails on the producer is heard by the consumer, with its reason, whichever way is broken.

No deadline is near, and the tests wait for less than any: what is not told would be seen as a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.core.messages import Offer
from pushkv.errors import HandshakeRefused, PeerLost, TransportError
from pushkv.transport.base import WriteResult, WriteStatus
from pushkv.transport.memory import Faults, Network
from runtime.scene import WAIT, Pushed, Scene, cache_of, fill, knows, memory_of, until

MakeScene = Callable[[Network], Scene]
FAR = 20 * WAIT
"""A deadline that nobody waits for."""


def connected(scene: Scene, engine: str = "d", producer: Producer | None = None) -> tuple[Producer, Consumer, Link]:
    producer = producer or scene.producer(cache=cache_of(fill(memory_of(64))))
    consumer = scene.consumer(engine, cache=cache_of(memory_of(64)))
    return producer, consumer, consumer.connect(producer.address)


def pushed(producer: Producer, consumer: Consumer, name: str = "r", first: int = 0) -> Pushed:
    blocks = list(range(first, first + 3))
    return Pushed(producer, consumer, name, blocks, blocks[::-1], 10)


def mover(scene: Scene, end: Producer | Consumer) -> Any:
    """The endpoint's data mover."""
    return scene.transports[end.agent]


def breaks(method: str, scene: Scene, end: Producer | Consumer, error: Exception, to: str = "") -> Callable[[], None]:
    """Have a call of the data mover raise, to one peer or to any; returns what undoes it."""
    broken = mover(scene, end)
    call = getattr(broken, method)

    def fail(peer: Any, *given: Any) -> Any:
        if to and peer != to:
            return call(peer, *given)
        raise error

    setattr(broken, method, fail)
    return lambda: setattr(broken, method, call)


NO_WRITES = ("write", "write_indexed")


@pytest.fixture(params=["notifications work", "notifications fail", "notifications are lost"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def spoil_notifications(way: str, scene: Scene, producer: Producer) -> None:
    """The producer's word can go by one way only."""
    if way == "notifications fail":
        breaks("send", scene, producer, TransportError("no notification gets out"))
    elif way == "notifications are lost":
        mover(scene, producer).send = lambda peer, payload: None


class TestAHandshakeThatFails:
    def test_the_reason_of_a_refusal(self, scene: Scene) -> None:
        producer = scene.producer()
        consumer = scene.consumer(cache=cache_of(memory_of(), model="other"))
        with pytest.raises(HandshakeRefused, match="model: 'm' against 'other'"):
            consumer.connect(producer.address, timeout=FAR)

    @pytest.mark.parametrize("error", [TransportError("no path"), PeerLost("no path")], ids=["error", "peer lost"])
    def test_a_path_that_cannot_be_opened(self, scene: Scene, error: Exception) -> None:
        """The handshake itself went well; the consumer would wait for the first WRITE until its timeout."""
        producer, _, _ = connected(scene)
        undo = breaks("write", scene, producer, error)
        late = scene.consumer("late")
        with pytest.raises(HandshakeRefused, match=f"its path to {late.agent} could not be opened: no path"):
            late.connect(producer.address, timeout=FAR)
        undo()
        assert late.connect(producer.address, timeout=FAR).alive
        push = pushed(producer, late)
        transfer = push.offer(late.connect(producer.address))
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE

    @pytest.mark.parametrize("lost", [False, True], ids=["error", "peer lost"])
    def test_a_path_whose_opening_fails_later(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, lost: bool
    ) -> None:
        """The WRITE that opens it was taken, and failed."""
        producer, _, _ = connected(scene)
        poll = mover(scene, producer).poll

        def failing() -> list[WriteResult]:
            return [WriteResult(one.write, WriteStatus.FAILED, "unreachable", peer_lost=lost) for one in poll()]

        mover(scene, producer).poll = failing
        mover(scene, producer).write, write = lambda *given: write(*given[:-1], b""), mover(scene, producer).write
        late = scene.consumer("late")
        with pytest.raises(HandshakeRefused, match="could not be opened: unreachable"):
            late.connect(producer.address, timeout=FAR)
        mover(scene, producer).poll, mover(scene, producer).write = poll, write
        assert late.connect(producer.address, timeout=FAR).alive


class TestAPostThatFails:
    def test_its_reason_is_heard(self, scene: Scene, way: str) -> None:
        producer, consumer, link = connected(scene)
        for method in NO_WRITES:
            breaks(method, scene, producer, TransportError("the NIC is on fire"))
        spoil_notifications(way, scene, producer)
        push = pushed(producer, consumer)
        transfer = push.offer(link, deadline=FAR)
        stage = push.stage(deadline=FAR)
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert transfer.detail == "the NIC is on fire"
        assert transfer.wait_released(WAIT), "nothing was handed over"
        assert stage.wait_released(WAIT)

    def test_a_peer_that_the_data_mover_has_lost(self, scene: Scene, way: str) -> None:
        """The consumer is there, and hears nothing of the loss but from the producer. What had not begun ends too."""
        producer, consumer, link = connected(scene)
        undo = [breaks(method, scene, producer, PeerLost("it is gone")) for method in NO_WRITES]
        spoil_notifications(way, scene, producer)
        push, waiting = pushed(producer, consumer), pushed(producer, consumer, "waits", 10)
        transfers = [push.offer(link, deadline=FAR), waiting.offer(link, deadline=FAR)]
        knows(producer, 2)
        push.stage(deadline=FAR)
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.PEER_LOST] * 2
        assert [transfer.detail for transfer in transfers] == ["it is gone"] * 2
        for call in undo:
            call()
        assert all(transfer.wait_released(WAIT) for transfer in transfers), "they have met again"

    def test_another_consumer_notices_nothing(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        _, other, second = connected(scene, "e", producer)
        undo = breaks("write", scene, producer, PeerLost("gone"), to=consumer.agent)
        push, fine = pushed(producer, consumer), pushed(producer, other, "fine")
        transfer, kept = push.offer(link, deadline=FAR), fine.offer(second, deadline=FAR)
        knows(producer, 2)
        push.stage(deadline=FAR)
        assert transfer.wait(WAIT) is Outcome.PEER_LOST
        fine.stage()
        assert kept.wait(WAIT) is Outcome.COMPLETE
        undo()
        assert transfer.wait_released(WAIT)


class TestATransferThatFails:
    def test_its_reason_is_heard(self, timed: MakeScene, way: str) -> None:
        """A WRITE that was under way: its blocks wait for proof, and the engine knows at once."""
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        scene.network.faults = Faults(fail=1.0, late=3600.0)
        spoil_notifications(way, scene, producer)
        push = pushed(producer, consumer)
        transfer = push.offer(link, deadline=FAR)
        stage = push.stage(deadline=FAR)
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert transfer.detail == "The network failed it; its bytes may still travel."
        assert not transfer.released
        assert not stage.released
        until(lambda: consumer.quarantined == 1)
        scene.network.advance(3600.0)
        scene.kill(producer)
        assert transfer.wait_released(WAIT)

    def test_a_loss_that_the_producer_alone_sees(self, timed: MakeScene, way: str) -> None:
        """In the middle of a WRITE. Both sides hear each other all the time."""
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        push, waiting = pushed(producer, consumer), pushed(producer, consumer, "waits", 10)
        transfers = [push.offer(link, deadline=FAR), waiting.offer(link, deadline=FAR)]
        knows(producer, 2)
        scene.network.stall(producer.agent)
        stage = push.stage(deadline=FAR)
        until(lambda: producer.stats().get("writes") == 1)
        spoil_notifications(way, scene, producer)
        token = producer._side.agents[consumer.agent].token
        producer._transfer.submit(lambda: producer._side.peer_silent(token, "the producer heard nothing of it"))
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.PEER_LOST] * 2
        assert {transfer.detail for transfer in transfers} == {"the producer heard nothing of it"}
        assert stage.wait(WAIT) is Outcome.PEER_LOST
        assert not transfers[0].wait_released(0.1), "its WRITE is under way"
        scene.network.release()
        assert all(transfer.wait_released(WAIT) for transfer in transfers)
        assert stage.wait_released(WAIT)

    def test_what_was_said_into_a_broken_connection_is_said_again(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        push = pushed(producer, consumer)
        transfer = push.offer(link, deadline=FAR)
        knows(producer, 1)
        relay, relayed = producer._side.relay, []
        producer._side.relay = lambda pair, frame: relayed.append(frame)  # type: ignore[method-assign]
        token = producer._side.agents[consumer.agent].token
        producer._transfer.submit(lambda: producer._side.peer_silent(token, "the producer heard nothing of it"))
        until(lambda: relayed, "the word of the loss")
        producer._side.relay = relay  # type: ignore[method-assign]
        assert transfer.wait(WAIT) is Outcome.PEER_LOST, "when the producer has heard of the consumer again"
        assert transfer.wait_released(WAIT)


class TestAnOfferThatCannotBeSent:
    def test_by_notification_it_goes_over_the_control_connection(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        breaks("send", scene, consumer, TransportError("no notification gets out"))
        push = pushed(producer, consumer)
        transfer = push.offer(link, deadline=FAR)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert consumer.stats()["relayed"] > 0

    def test_one_that_no_frame_holds_fails_alone(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer, link = connected(scene)
        from pushkv.errors import ProtocolError
        from pushkv.runtime import side

        encode = side.encode

        def small_frames(token: bytes, message: Any) -> bytes:
            if isinstance(message, Offer) and message.key.transfer == "large":
                raise ProtocolError("an Offer of 5 GB exceeds the limit: offer fewer blocks at once")
            return encode(token, message)

        monkeypatch.setattr(side, "encode", small_frames)
        before, large, after = (pushed(producer, consumer, n, 10 * i) for i, n in enumerate(["a", "large", "b"]))
        transfers = [push.offer(link, deadline=FAR) for push in (before, large, after)]
        for push in (before, after):
            push.stage()
        outcomes = [transfer.wait(WAIT) for transfer in transfers]
        assert outcomes == [Outcome.COMPLETE, Outcome.REJECTED_GEOMETRY, Outcome.COMPLETE]
        assert "offer fewer blocks" in transfers[1].detail
        assert transfers[1].wait_released(WAIT)

    def test_one_to_a_producer_that_is_gone_costs_the_others_nothing(self, scene: Scene) -> None:
        """An engine of two ranks: the transfer needs both. Another engine's is served."""
        producer, consumer, link = connected(scene)
        other = scene.producer("q", cache=cache_of(fill(memory_of(64), 1)))
        second = consumer.connect(other.address)
        breaks("send", scene, consumer, PeerLost("it is gone"), to=producer.agent)
        push, fine = pushed(producer, consumer), pushed(other, consumer, "fine", 10)
        transfer, kept = push.offer(link, deadline=FAR), fine.offer(second, deadline=FAR)
        fine.stage()
        assert transfer.wait(WAIT) is Outcome.PEER_LOST
        assert "it is gone" in transfer.detail
        assert kept.wait(WAIT) is Outcome.COMPLETE
