"""Slots that wait for proof, until none is left: what needs one is refused in words or goes directly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from pushkv import Consumer, Link, Outcome, Producer, Transfer
from pushkv.core.ways import Costs
from pushkv.transport.memory import Faults, Network
from runtime.scene import WAIT, Pushed, Scene, blocks_for, until

MakeScene = Callable[[Network], Scene]
SLOT = 1024
TOKENS = 8
"""Of a slot."""
SETTINGS: dict[str, Any] = {"landing": "landing", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT}
AUTO: dict[str, Any] = {**SETTINGS, "landing": "auto", "landing_costs": Costs(descriptor=1.0, copy=1e9)}


def slots(consumer: Consumer) -> str:
    return consumer.ask(lambda side: str({slot.name: n for slot, n in side.machine.landing_slots().items()}))


class Ring:
    """A consumer of four slots, and producers that die under their WRITEs."""

    def __init__(self, scene: Scene, settings: dict[str, Any]) -> None:
        self.scene, self.settings = scene, settings
        self.consumer = scene.consumer(**settings)
        self.names = self.stalled = 0
        self.links: dict[str, Link] = {}

    def producer(self) -> Producer:
        self.names += 1
        producer = self.scene.producer(f"p{self.names}", **self.settings)
        self.links[producer.agent] = self.consumer.connect(producer.address)
        return producer

    def push(self, producer: Producer, first: int, tokens: int = TOKENS, **more: Any) -> tuple[Pushed, Transfer]:
        self.names += 1
        blocks = blocks_for(tokens, first)
        pushed = Pushed(producer, self.consumer, f"r{self.names}", blocks, blocks, tokens)
        transfer = pushed.offer(self.links[producer.agent], **more)
        pushed.stage()
        return pushed, transfer

    def stall(self, first: int, granted: int) -> Producer:
        """A producer that takes as many slots as it may, and whose WRITEs stall."""
        self.scene.network.faults = Faults()
        producer = self.producer()
        self.scene.network.faults = Faults(stall=1.0)
        self.push(producer, first, 5 * TOKENS)
        until(lambda: slots(self.consumer) == str({"GRANTED": granted}), "the grants")
        self.stalled, mine = granted, granted - self.stalled
        until(lambda: producer.stats().get("writes", 0) == mine, "the WRITEs")
        return producer

    def kill(self, producer: Producer) -> None:
        """End a producer, and have the consumer see that its process has ended."""
        agent = producer.agent
        self.scene.kill(producer)
        self.consumer._life.submit(lambda side: side.peer_gone(side.agents[agent].token, "its process has ended"))

    def fill(self) -> None:
        """All slots wait for proof about two producers that died."""
        dead = [self.stall(0, 3), self.stall(20, 4)]
        for producer in dead:
            self.kill(producer)
        self.scene.network.faults = Faults()
        until(lambda: self.consumer.stats()["landing slots without proof"] == 4, "the quarantine")

    def prove(self) -> None:
        self.scene.network._proofs = True
        until(lambda: self.consumer.stats()["landing slots without proof"] == 0, "the proof")


def test_what_can_only_land_is_refused_until_there_is_proof(timed: MakeScene, caplog: Any) -> None:
    ring = Ring(timed(Network(seed=1, proofs=False)), SETTINGS)
    ring.fill()
    producer = ring.producer()
    with caplog.at_level(logging.WARNING):
        _, refused = ring.push(producer, 40)
        assert refused.wait(WAIT) is Outcome.REJECTED_BUSY
    assert refused.wait_released(WAIT)
    assert f"4 of 4 landing slots are quarantined, and {producer.agent} can get none" in refused.detail
    assert f"run `pushkv fence {ring.consumer.address}` for proof" in refused.detail
    assert "d: 4 of 4 landing slots are quarantined" in caplog.text
    assert ring.consumer.stats()["offers without a landing slot"] == 1
    ring.prove()
    pushed, transfer = ring.push(producer, 48)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert pushed.arrived()


def test_where_auto_may_it_goes_directly(timed: MakeScene, caplog: Any) -> None:
    ring = Ring(timed(Network(seed=1, proofs=False)), AUTO)
    ring.fill()
    before = ring.consumer.stats().get("scatters", 0)
    with caplog.at_level(logging.WARNING):
        pushed, transfer = ring.push(ring.producer(), 40, tokens=24)
        assert transfer.wait(WAIT) is Outcome.COMPLETE, transfer.detail
    assert pushed.arrived()
    assert "4 of 4 landing slots are quarantined" in caplog.text
    assert ring.consumer.stats()["offers without a landing slot"] == 1
    assert ring.consumer.stats().get("scatters", 0) == before
    ring.prove()
    _, lands = ring.push(ring.producer(), 50)
    assert lands.wait(WAIT) is Outcome.COMPLETE
    assert ring.consumer.stats()["scatters"] == before + 1


def test_one_producers_slots_do_not_stop_the_others(timed: MakeScene) -> None:
    """The one slot that is left serves everybody who is not to blame."""
    ring = Ring(timed(Network(seed=1, proofs=False)), SETTINGS)
    ring.kill(ring.stall(0, 3))
    ring.scene.network.faults = Faults()
    until(lambda: ring.consumer.stats()["landing slots without proof"] == 3, "the quarantine")
    pushed, transfer = ring.push(ring.producer(), 30, tokens=40)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert pushed.arrived()
    assert "offers without a landing slot" not in ring.consumer.stats()
    ring.prove()


def test_what_waited_for_a_slot_ends_by_its_deadline_and_says_so(timed: MakeScene) -> None:
    ring = Ring(timed(Network(seed=1, proofs=False)), SETTINGS)
    waiting = ring.producer()
    dead = [ring.stall(0, 3), ring.stall(20, 4)]
    _, waits = ring.push(waiting, 40, deadline=5.0)
    for producer in dead:
        ring.kill(producer)
    assert waits.wait(WAIT) is Outcome.EXPIRED
    assert waits.detail == "its deadline passed while it waited for a landing slot; 4 of 4 wait for proof"
    assert waits.wait_released(WAIT)
    ring.prove()


def test_slots_that_are_on_their_way_back_do_not_count(timed: MakeScene) -> None:
    """A cancelled transfer's slots are quarantined until its living producer answers: that is no reason to refuse."""
    ring = Ring(timed(Network(seed=1)), SETTINGS)
    producer = ring.producer()
    ring.scene.network.faults = Faults(stall=1.0)
    _, first = ring.push(producer, 0, 5 * TOKENS)
    until(lambda: slots(ring.consumer) == str({"GRANTED": 3}), "the grants")
    ring.consumer.cancel(first)
    assert first.wait_released(WAIT)
    assert slots(ring.consumer) == str({"QUARANTINED": 3})
    pushed, second = ring.push(producer, 20)
    assert second.wait(0.1) is None
    assert ring.consumer.stats()["landing slots without proof"] == 0
    ring.scene.network.faults = Faults()
    ring.scene.network.release()
    assert second.wait(WAIT) is Outcome.COMPLETE
    assert pushed.arrived()


def test_a_producer_whose_staging_slots_wait_for_proof_says_so(timed: MakeScene) -> None:
    ring = Ring(timed(Network(seed=1, proofs=False)), SETTINGS)
    producer = ring.producer()
    ring.scene.network.faults = Faults(fail=1.0, late=1000.0)
    outcomes: list[Any] = []
    for number in range(4):
        _, transfer = ring.push(producer, 2 * number)
        outcomes.append(transfer.wait(WAIT))
        if outcomes[-1] is Outcome.REJECTED_BUSY:
            break
    assert outcomes[-1] is Outcome.REJECTED_BUSY, outcomes
    if "staging" in transfer.detail:
        assert "of this producer's 4 staging slots wait for proof: fence it" in transfer.detail
        assert producer.stats()["refused for want of staging slots"] == 1
    else:  # its landing slots do too, and the consumer knows first
        assert "landing slots are quarantined" in transfer.detail
    ring.scene.network.faults = Faults()
    other = Consumer(ring.scene._config("e", SETTINGS), ring.consumer.cache, transport=ring.scene.transport)
    ring.scene.endpoints.append(other)
    blocks = blocks_for(TOKENS, 50)
    pushed = Pushed(producer, other, "other", blocks, blocks, TOKENS)
    good = pushed.offer(other.connect(producer.address))
    pushed.stage()
    assert good.wait(WAIT) is Outcome.COMPLETE, "one staging slot is left to those who are not to blame"
    ring.kill(producer)
    ring.prove()
