"""Transfers over a network that loses, doubles, reorders, delays and fails; and over one that is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from pushkv import Consumer, Limits, Link, Outcome, Producer
from pushkv.runtime.peering import FORMER
from pushkv.transport.memory import Faults, Network, OnDeath
from runtime.scene import QUICK, WAIT, Pushed, Scene, array_of, cache_of, fill, knows, memory_of, until

MakeScene = Callable[[Network], Scene]

LOSSY = Faults(drop=0.2, duplicate=0.2, reorder=0.3, delay=(0.0, 0.02))
FAILING = Faults(drop=0.1, fail=0.3, delay=(0.0, 0.02), late=0.1)


def connected(scene: Scene, blocks: int = 256) -> tuple[Producer, Consumer, Link]:
    producer = scene.producer(cache=cache_of(fill(memory_of(blocks))))
    consumer = scene.consumer(cache=cache_of(memory_of(blocks)))
    return producer, consumer, consumer.connect(producer.address)


def pushes_over(producer: Producer, consumer: Consumer, count: int) -> list[Pushed]:
    """Prompts of 10 tokens whose blocks are scattered over 256."""
    order = np.random.default_rng(3).permutation(256)
    names = (f"r{number}" for number in itertools.count())
    cuts = [slice(3 * number, 3 * number + 3) for number in range(count)]
    return [
        Pushed(producer, consumer, name, order[cut].tolist(), order[::-1][cut].tolist(), 10)
        for name, cut in zip(names, cuts, strict=False)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_made_good(timed: MakeScene, seed: int) -> None:
    scene = timed(Network(seed=seed))
    producer, consumer, link = connected(scene)
    scene.network.faults = LOSSY
    pushes = pushes_over(producer, consumer, 64)
    transfers = [push.offer(link, deadline=WAIT) for push in pushes]
    for ready in (5, 10):
        stages = [push.stage(ready=ready) for push in pushes]
    for transfer in transfers[::4]:
        consumer.cancel(transfer)
    # A lost Complete cannot be made good: such a transfer ends when the engine loses patience.
    until(lambda: sum(stage.outcome is not None for stage in stages) == len(stages), "every stage's end")
    for transfer in transfers:
        if transfer.wait(0.05) is None:
            consumer.cancel(transfer)
    assert all(transfer.wait_released(WAIT) for transfer in transfers)
    assert all(stage.wait_released(WAIT) for stage in stages)
    ended = [transfer.outcome for transfer in transfers]
    assert set(ended) == {Outcome.COMPLETE, Outcome.CANCELLED}
    assert all(push.arrived() for push, outcome in zip(pushes, ended, strict=True) if outcome is Outcome.COMPLETE)
    assert producer.stats()["errors"] == consumer.stats()["errors"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_failed_writes_hold_their_blocks_until_there_is_proof(timed: MakeScene, seed: int) -> None:
    scene = timed(Network(seed=seed))
    producer, consumer, link = connected(scene)
    scene.network.faults = FAILING
    pushes = pushes_over(producer, consumer, 48)
    transfers = [push.offer(link, deadline=4.0) for push in pushes]
    stages = [push.stage(deadline=4.0) for push in pushes]
    assert all(transfer.wait(WAIT) for transfer in transfers)
    assert all(stage.wait(WAIT) for stage in stages)
    failed = [n for n, transfer in enumerate(transfers) if transfer.outcome is Outcome.TRANSPORT_ERROR]
    assert failed
    assert {transfer.outcome for transfer in transfers} <= {
        Outcome.COMPLETE, Outcome.TRANSPORT_ERROR, Outcome.EXPIRED
    }  # fmt: skip
    scene.network.faults = Faults()
    stuck = [n for n in failed if not transfers[n].released]
    assert not any(stages[n].released for n in stuck)
    scene.kill(producer)
    assert all(transfer.wait_released(WAIT) for transfer in transfers), "a dead peer is proof, once nothing travels"


def test_stalled_writes_are_waited_for(timed: MakeScene) -> None:
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    push, other = pushes_over(producer, consumer, 2)
    scene.network.stall(producer.agent)
    transfer = push.offer(link)
    stage = push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    consumer.cancel(transfer)
    assert transfer.wait(WAIT) is Outcome.CANCELLED
    assert stage.wait(WAIT) is Outcome.CANCELLED
    later = other.offer(link)
    other.stage()
    until(lambda: producer.stats().get("writes") == 2)
    assert not transfer.released
    assert not stage.released
    assert consumer.held_blocks == 6
    scene.network.release()
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    assert later.wait(WAIT) is Outcome.COMPLETE
    assert other.arrived()


def test_what_notifications_cannot_say_goes_over_the_control_connection(timed: MakeScene) -> None:
    """Not one notification comes through, in either direction."""
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    scene.network.faults = Faults(drop=1.0)
    push, refused = pushes_over(producer, consumer, 2)
    transfer, other = push.offer(link), refused.offer(link)
    knows(producer, 2)
    refused.stage(prompt=bytes(32))
    assert other.wait(WAIT) is Outcome.REJECTED_PROMPT
    assert other.wait_released(WAIT)
    consumer.cancel(transfer)
    assert transfer.wait_released(WAIT)
    assert consumer.stats()["relayed"] > 0
    assert producer.stats()["relayed"] > 0


def all_acked(consumer: Consumer) -> bool:
    """Whether every open offer has been seen by its producer, told by the transfer thread."""
    return consumer.ask(
        lambda side: str(all(rank.acked for one in side.machine._transfers.values() for rank in one.ranks.values()))
    ) == str(True)


class TestLoss:
    @pytest.mark.parametrize("on_death", list(OnDeath))
    def test_a_producer_that_dies(self, timed: MakeScene, on_death: OnDeath) -> None:
        scene = timed(Network(on_death=on_death, faults=Faults(late=0.2)))
        producer, consumer, link = connected(scene)
        push, waiting, _ = pushes_over(producer, consumer, 3)
        scene.network.stall(producer.agent)
        transfers = [push.offer(link), waiting.offer(link)]
        push.stage()
        until(lambda: producer.stats().get("writes") == 1)
        until(lambda: all_acked(consumer), "the acks, after which no offer is sent again")
        scene.kill(producer)
        consumer.cancel(transfers[0])  # which is how its death is noticed
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.CANCELLED, Outcome.PEER_LOST]
        if on_death is OnDeath.TCP:
            assert not transfers[0].wait_released(0.1), "the kernel may still deliver"
        scene.network.release()
        assert all(transfer.wait_released(WAIT) for transfer in transfers)
        assert not link.alive

    def test_a_consumer_that_dies_and_another_that_is_served_meanwhile(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        other = scene.consumer("other", cache=cache_of(memory_of(256)))
        second = other.connect(producer.address)
        push, more = pushes_over(producer, consumer, 2)
        scene.network.stall(producer.agent, consumer.agent)
        push.offer(link)
        stage = push.stage()
        until(lambda: producer.stats().get("writes") == 1)
        scene.kill(consumer)
        more.scene_consumer = other
        transfer = more.offer(second)
        more.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert more.arrived()
        assert stage.wait(WAIT) is Outcome.PEER_LOST
        assert not stage.released, "its WRITE still reads the blocks"
        scene.network.release()
        assert stage.wait_released(WAIT)
        until(lambda: consumer.agent not in producer._side.agents)

    def test_silence_is_no_proof_and_a_word_brings_the_peer_back(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer = scene.producer(cache=cache_of(fill(memory_of(256))))
        consumer = scene.consumer(cache=cache_of(memory_of(256)), silence=1.5)
        link = consumer.connect(producer.address)
        push, later = pushes_over(producer, consumer, 2)
        transfer = push.offer(link)
        scene.network.partition(producer.agent, consumer.agent)
        signs, producer._watch.give_signs = producer._watch.give_signs, lambda: None  # type: ignore[method-assign]
        assert transfer.wait(WAIT) is Outcome.PEER_LOST
        assert "not a word" in transfer.detail
        assert not link.alive
        assert not transfer.released
        refused = later.offer(link)
        assert refused.wait(WAIT) is Outcome.PEER_LOST
        assert "connect again" in refused.detail
        assert refused.wait_released(WAIT)
        scene.network.heal()
        producer._watch.give_signs = signs  # type: ignore[method-assign]
        assert transfer.wait_released(WAIT), "heard again, it drains"
        until(lambda: link.alive)
        again = later.offer(link, attempt=1)
        later.stage()
        assert again.wait(WAIT) is Outcome.COMPLETE

    def test_the_next_epoch_at_the_same_address(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        push, later = pushes_over(producer, consumer, 2)
        transfer = push.offer(link)
        bind = producer.address
        scene.kill(producer)
        successor = scene.producer(cache=cache_of(fill(memory_of(256), 5)), bind=bind)
        fresh = consumer.connect(bind)
        assert transfer.wait(WAIT) is Outcome.PEER_LOST
        assert transfer.wait_released(WAIT)
        assert fresh.alive
        assert link.alive, "a link is to an address, whoever answers there"
        later.scene_producer = successor
        again = later.offer(fresh)
        later.stage()
        assert again.wait(WAIT) is Outcome.COMPLETE
        assert later.arrived()
        until(lambda: set(consumer._side.agents) == {successor.agent})


class TestConnectingAgain:
    def test_harms_nothing_in_flight(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        push, other = pushes_over(producer, consumer, 2)
        scene.network.stall(producer.agent)
        transfer, waiting = push.offer(link), other.offer(link)
        push.stage()
        until(lambda: producer.stats().get("writes") == 1)
        with pytest.raises(Exception, match="first WRITE has not arrived"):
            consumer.connect(producer.address, timeout=0.2)
        scene.network.release()
        for _ in range(3):
            again = consumer.connect(producer.address)
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        other.stage()
        assert waiting.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived()
        assert other.arrived()
        assert again.pairs == link.pairs
        for _ in range(2 * FORMER):
            consumer.connect(producer.address)
        assert len(producer._side.pairs) <= FORMER + 2, "tokens of much earlier handshakes are forgotten"
        assert len(consumer._side.pairs) <= FORMER + 2

    def test_a_handshake_that_failed_half_way_leaves_the_pair_as_it_was(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        ignore, consumer._side.welcomed = consumer._side.welcomed, lambda welcome: None  # type: ignore
        with pytest.raises(Exception, match="does not answer"):
            consumer.connect(producer.address, timeout=0.2)
        consumer._side.welcomed = ignore  # type: ignore[method-assign]
        push = pushes_over(producer, consumer, 1)[0]
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        heard = [consumer._side.agents[producer.agent].heard, producer._side.agents[consumer.agent].heard]
        until(lambda: consumer._side.agents[producer.agent].heard > heard[0], "a sign of life")
        until(lambda: producer._side.agents[consumer.agent].heard > heard[1], "a sign of life")

    def test_after_a_path_broke(self, timed: MakeScene) -> None:
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        for end, peer in ((consumer, producer), (producer, consumer)):
            pair = end._side.agents[peer.agent]
            end._transfer.submit(lambda end=end, pair=pair: end._side.peer_gone(pair.token, "broke"))  # type: ignore
        until(lambda: not link.alive)
        assert consumer.connect(producer.address).alive
        push = pushes_over(producer, consumer, 1)[0]
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE

    def test_after_a_path_broke_that_only_the_producer_misses(self, timed: MakeScene) -> None:
        """The consumer hears its signs of life and would go on offering to somebody who takes nothing of it."""
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        token = producer._side.agents[consumer.agent].token
        open_before, after = pushes_over(producer, consumer, 2)
        transfer = open_before.offer(link)
        knows(producer, 1)
        producer._transfer.submit(lambda: producer._side.peer_gone(token, "its path broke"))
        until(lambda: producer._side.agents[consumer.agent].token != token, "they meet again")
        until(lambda: link.alive)
        assert transfer.wait(WAIT) is Outcome.PEER_LOST, "it is told, and need not wait for its deadline"
        assert transfer.detail == "its path broke"
        assert transfer.wait_released(WAIT), "a cancel is answered again"
        transfer = after.offer(link)
        after.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert after.arrived()

    def test_a_consumer_whose_connection_was_made_anew(self, timed: MakeScene) -> None:
        """ZeroMQ then knows it by another identity, and the producer must answer to that one."""
        scene = timed(Network())
        producer, consumer, link = connected(scene)
        route = link.pairs[0].route
        consumer._control.hang_up(str(route))
        consumer._transfer.submit(lambda: consumer._control.dial(consumer_address(producer)))
        before = producer._side.agents[consumer.agent].route
        until(lambda: producer._side.agents[consumer.agent].route != before)
        heard = consumer._side.agents[producer.agent].heard
        until(lambda: consumer._side.agents[producer.agent].heard > heard, "a sign of life")
        scene.network.faults = Faults(drop=1.0)
        push = pushes_over(producer, consumer, 1)[0]
        transfer = push.offer(link)
        knows(producer, 1)
        consumer.cancel(transfer)
        assert transfer.wait_released(WAIT)


def consumer_address(producer: Producer) -> tuple[str, int]:
    host, _, port = producer.address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_deadlines_hold_whatever_happens(timed: MakeScene) -> None:
    """Everything is cut in both ways, and the control connections drop what is relayed."""
    scene = timed(Network())
    producer, consumer, link = connected(scene)
    for end in (producer, consumer):
        end._control.send = lambda route, message: None  # type: ignore[method-assign]
    scene.network.partition(producer.agent)
    pushes = pushes_over(producer, consumer, 8)
    transfers = [push.offer(link, deadline=0.3) for push in pushes]
    stages = [push.stage(deadline=0.3) for push in pushes]
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.EXPIRED}
    assert {stage.wait(WAIT) for stage in stages} == {Outcome.EXPIRED}
    assert not any(transfer.released for transfer in transfers)
    assert array_of(consumer).sum() == 0
    assert consumer.held_blocks == 24
    scene.kill(producer)
    scene.kill(consumer)


def test_a_window_of_one_queues(timed: MakeScene) -> None:
    scene = timed(Network())
    producer = scene.producer(cache=cache_of(fill(memory_of(256))))
    limits = Limits(window=1, resend=QUICK.resend, resend_most=QUICK.resend_most)
    consumer = scene.consumer(cache=cache_of(memory_of(256)), limits=limits)
    link = consumer.connect(producer.address)
    pushes = pushes_over(producer, consumer, 12)
    transfers = [push.offer(link) for push in pushes]
    for push in reversed(pushes):
        push.stage()
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
    assert all(push.arrived() for push in pushes)
