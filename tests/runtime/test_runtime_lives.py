"""An endpoint's lives: fences, fresh agents, and links that outlast the ranks behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pushkv import Consumer, Link, Outcome, Producer, Transfer
from pushkv.cli import main
from pushkv.errors import EndpointClosed, HandshakeError
from pushkv.transport.host import this_host
from pushkv.transport.memory import Network
from runtime.scene import WAIT, Pushed, Scene, knows, until

MakeScene = Callable[[Network], Scene]


def connected(scene: Scene, **settings: float) -> tuple[Producer, Consumer, Link]:
    producer, consumer = scene.producer(**settings), scene.consumer(**settings)
    return producer, consumer, consumer.connect(producer.address)


def move_away(endpoint: Producer | Consumer) -> None:
    """Have an endpoint believe that its peers are on another host, so that their ends cannot be seen."""
    for pair in endpoint._side.agents.values():
        pair.watch = None
        pair.theirs = pair.theirs.__class__(
            **{
                name: getattr(pair.theirs, name)
                for name in pair.theirs.__struct_fields__
                if name != "host"
            },
            host=replace(this_host(), machine="elsewhere"),
        )  # fmt: skip


def fall_silent(scene: Scene, producer: Producer, consumer: Consumer, link: Link) -> None:
    """The producer dies without a word, and its consumer takes it for lost."""
    scene.kill(producer)
    consumer._life.submit(lambda side: side.peer_silent(link.pairs[0].token, "not a word"))


def lost(scene: Scene, producer: Producer, consumer: Consumer, link: Link, blocks: Sequence[int]) -> list[Transfer]:
    """One transfer a block, offered to a producer that falls silent: they end, and their blocks lack proof."""
    transfers = [Pushed(producer, consumer, f"r{n}", [n], [n], 4).offer(link) for n in blocks]
    knows(producer, len(transfers))
    fall_silent(scene, producer, consumer, link)
    assert {one.wait(WAIT) for one in transfers} == {Outcome.PEER_LOST}
    assert not any(one.released for one in transfers)
    until(lambda: consumer.held_blocks == consumer.quarantined == len(transfers))
    return transfers


def test_a_fence_gives_back_what_a_lost_peer_on_another_host_held(timed: MakeScene) -> None:
    """Nothing is ever proven on this network; closing the agent is what proves."""
    scene = timed(Network(proofs=False))
    producer, consumer, link = connected(scene)
    other = scene.producer("q")
    more = consumer.connect(other.address)
    move_away(consumer)
    (transfer,) = lost(scene, producer, consumer, link, [3])
    before = consumer.agent
    assert consumer.fence(WAIT)
    assert transfer.wait_released(WAIT)
    assert consumer.held_blocks == 0
    assert consumer.agent != before
    assert consumer.stats()["proof: dead and our agent rebuilt"] == 2  # the living peer's old pair too
    until(lambda: more.alive, "the living producer is met again")
    after = Pushed(other, consumer, "after", [1, 2], [3, 4], 8)
    pushed = after.offer(more)
    after.stage()
    assert pushed.wait(WAIT) is Outcome.COMPLETE
    assert after.arrived()


def test_a_fence_proves_nothing_about_a_living_process_of_this_host(timed: MakeScene) -> None:
    """It may write into our memory by itself, whatever becomes of our agent."""
    scene = timed(Network(proofs=False))
    producer, consumer, link = connected(scene)
    (transfer,) = lost(scene, producer, consumer, link, [3])
    assert not consumer.fence(0.5)
    assert not transfer.released
    assert consumer.held_blocks == 1


def test_a_fence_ends_what_is_open_and_new_work_goes_on(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    open_push = Pushed(producer, consumer, "open", [1, 2], [3, 4], 8)
    waiting = open_push.offer(link)
    knows(producer, 1)
    producer.fence(WAIT)
    assert waiting.wait(WAIT) is Outcome.TRANSPORT_ERROR
    assert "fence" in waiting.detail
    assert waiting.wait_released(WAIT), "the living producer drains before its agent is closed"
    until(lambda: producer.agent in link.agents, "the consumer has met the fresh agent")
    push = Pushed(producer, consumer, "next", [5, 6], [3, 4], 8)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()
    until(lambda: not producer._past, "the past life ends")
    assert producer.close()
    with pytest.raises(EndpointClosed):
        producer.fence()


def test_a_link_outlasts_a_restarted_producer(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    address = producer.address
    fall_silent(scene, producer, consumer, link)
    until(lambda: not link.alive)
    successor = scene.producer("p", bind=address)
    until(lambda: link.alive, "the consumer has introduced itself again")
    assert link.agents == (successor.agent,)
    push = Pushed(successor, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert len(consumer._side.dials) <= 1


def test_an_offer_while_a_rank_is_away_ends_at_once(scene: Scene) -> None:
    producer, consumer, link = connected(scene)
    del consumer._side.linked[link.routes[0]]
    consumer.disconnect(link)
    with pytest.raises(HandshakeError, match="0 of 1 ranks"):
        link.fitting()
    push = Pushed(producer, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    assert transfer.wait(WAIT) is not Outcome.COMPLETE
    assert transfer.wait_released(WAIT)


def test_dialling_a_rank_that_stays_away_leaves_nothing_behind(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.consumer.REDIAL", 0.01)
    monkeypatch.setattr("pushkv.runtime.consumer.REDIAL_MOST", 0.02)
    producer, consumer, link = connected(scene)
    sent: list[str] = []
    dial = consumer._dial
    monkeypatch.setattr(consumer, "_dial", lambda life, address: (sent.append("dial"), dial(life, address))[1])
    fall_silent(scene, producer, consumer, link)
    until(lambda: len(sent) > 10)
    assert len(consumer._side.dials) <= 2
    consumer.disconnect(link)
    count = len(sent)
    until(lambda: len(consumer._control._lines.routes) <= 1)
    assert len(sent) <= count + 1


def test_an_operator_fences_from_the_command_line(timed: MakeScene, capsys: pytest.CaptureFixture[str]) -> None:
    scene = timed(Network(proofs=False))
    producer, consumer, link = connected(scene)
    move_away(consumer)
    (transfer,) = lost(scene, producer, consumer, link, [3])
    assert main(["fence", consumer.address]) == 0
    assert consumer.agent in capsys.readouterr().out
    assert transfer.wait_released(WAIT)


def test_a_fence_that_leaves_something_says_so(timed: MakeScene, capsys: pytest.CaptureFixture[str]) -> None:
    scene = timed(Network(proofs=False))
    producer, consumer, link = connected(scene)
    lost(scene, producer, consumer, link, [3])
    assert main(["fence", consumer.address, "--timeout", "0.5"]) == 1
    assert "1 transfers are quarantined" in capsys.readouterr().err
    assert main(["fence", "127.0.0.1:1", "--timeout", "0"]) == 1
    assert "timeout is 0 s" in capsys.readouterr().err


def test_too_much_quarantine_stops_offers(timed: MakeScene) -> None:
    scene = timed(Network(proofs=False))
    producer, other = scene.producer(), scene.producer("q")
    consumer = scene.consumer()  # 64 blocks
    link, second = consumer.connect(producer.address), consumer.connect(other.address)
    move_away(consumer)
    lost(scene, producer, consumer, link, range(7))
    refused = Pushed(other, consumer, "more", [9], [9], 4).offer(second)
    assert refused.wait(0) is Outcome.REJECTED_BUSY
    assert f"7 of 64 blocks are quarantined: run `pushkv fence {consumer.address}`" in refused.detail
    assert refused.released
    assert consumer.fence(WAIT)
    until(lambda: second.alive)
    push = Pushed(other, consumer, "after", [9], [9], 4)
    transfer = push.offer(second)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_sleeping_lets_go_of_the_memory_and_waking_serves_again(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    agent = producer.agent
    assert producer.sleep(WAIT)
    assert not scene.network._stations[agent].receives, "its agent is closed"
    until(lambda: not link.alive)
    push = Pushed(producer, consumer, "r", [1, 2], [3, 4], 8)
    with pytest.raises(EndpointClosed, match="sleeps; wake it first"):
        push.stage()
    with pytest.raises(HandshakeError, match="the producer sleeps"):
        consumer.connect(producer.address)
    producer.wake()
    until(lambda: link.alive and link.agents == (producer.agent,))
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert consumer.sleep(WAIT)
    consumer.wake()
    until(lambda: link.alive, "the consumer meets its producers again")
    assert consumer.sleep(WAIT)
    assert consumer.close()


def test_memory_in_custody_does_not_sleep(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    scene.network.stall(producer.agent)
    push = Pushed(producer, consumer, "r", [1, 2], [3, 4], 8)
    transfer = push.offer(link)
    stage = push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    assert not consumer.sleep(0.2)
    assert transfer.wait(WAIT) is Outcome.CANCELLED
    assert not transfer.released
    scene.network.release()
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    until(lambda: link.alive, "it has gone on awake")
    again = Pushed(producer, consumer, "again", [5], [6], 4)
    transfer = again.offer(link)
    again.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
