"""Leases over a queue that waits: the two machines, a network with delays and losses, and virtual time."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random
from typing import Any

import pytest
from protocol import TOKENS, order, owed, stage

from pushkv.core.commands import Command, Ended, Post, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Offer, Renew
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Owed

TRANSFERS = 128
LEASE = 0.3
LASTS = 3.0
"""Seconds that the prompts take to compute: ten leases."""
MOST_DELAY = 0.05


class NeverRenews(ConsumerMachine):
    """A consumer that lets its leases run out."""

    def _renew(self, peer: str, now: float) -> None:
        pass


def share(rank: int, ranks: int) -> Owed:
    """What a rank owes: its part of the tokens, as an order says too."""
    size = TOKENS // ranks
    return lambda start, stop, _end: owed(max(start, rank * size), min(stop, (rank + 1) * size))


class World:
    """One consumer, some producers, and what is under way between them. All times are virtual."""

    def __init__(self, machine: type[ConsumerMachine], window: int, peers: tuple[str, ...], lose: int) -> None:
        """``lose``: of every so many Renews and one more, only the last arrives."""
        limits = Limits(lease=LEASE, window=window)
        self.consumer = machine(limits)
        self.producers = {peer: ProducerMachine(rank, peer, limits) for rank, peer in enumerate(peers)}
        for rank, peer in enumerate(peers):
            self.producers[peer].connected("c0", share(rank, len(peers)), 0.0)
            self.consumer.connected(peer, 0.0)
        self.now = 0.0
        self.sent: list[tuple[float, str, Any]] = []
        self.ended: dict[str, Counter[Outcome]] = {peer: Counter() for peer in ("c0", *peers)}
        self._lose = lose
        self._random = Random(7)
        self._way: list[tuple[float, int, str, str, Any]] = []

    def passes(self, until: float) -> None:
        """Let time pass, event by event."""
        while (due := self._next()) <= until:
            self.now = max(self.now, due)
            while self._way and self._way[0][0] <= self.now:
                _, _, sender, receiver, message = heappop(self._way)
                self._machine(receiver).receive(sender, message, self.now)
                self.carry_out(receiver)
            for name in ("c0", *self.producers):
                self._machine(name).tick(self.now)
                self.carry_out(name)
        self.now = until

    def _next(self) -> float:
        machines = (self.consumer, *self.producers.values())
        timers = [machine.timers.next() for machine in machines]
        return min([when for when in timers if when is not None] + [item[0] for item in self._way[:1]], default=9e9)

    def _machine(self, name: str) -> ConsumerMachine | ProducerMachine:
        return self.consumer if name == "c0" else self.producers[name]

    def carry_out(self, name: str) -> None:
        """Do what a machine has commanded; WRITEs are done at once."""
        while commands := self._machine(name).commands():
            for command in commands:
                self._do(name, command)

    def _do(self, name: str, command: Command) -> None:
        if isinstance(command, Send):
            self._send(name, command.peer, command.message)
        elif isinstance(command, Post):
            self._send(name, command.peer, command.complete)
            self.producers[name].write_done(command.write, self.now)
        elif isinstance(command, Ended):
            self.ended[name][command.outcome] += 1

    def _send(self, sender: str, receiver: str, message: Any) -> None:
        self.sent.append((self.now, receiver, message))
        if isinstance(message, Renew) and len(self.renewals(receiver)) % (self._lose + 1):
            return
        arrives = self.now + self._random.uniform(0.0, MOST_DELAY)
        heappush(self._way, (arrives, len(self.sent), sender, receiver, message))

    def renewals(self, peer: str) -> list[float]:
        """When this producer was sent a Renew."""
        return [when for when, receiver, message in self.sent if receiver == peer and isinstance(message, Renew)]


def wait_in_a_queue(world: World) -> None:
    """Offer them all, and let the prompts take their time."""
    for number in range(TRANSFERS):
        world.consumer.offer(order(block=number, peers=tuple(world.producers), transfer=f"t{number}"), world.now)
    world.carry_out("c0")
    world.passes(LASTS)


@pytest.mark.parametrize("lose", [0, 1, 2], ids=["none lost", "every other lost", "two of three lost"])
@pytest.mark.parametrize("peers", [("p0",), ("p0", "p1")], ids=["one producer", "two producers"])
@pytest.mark.parametrize("window", [TRANSFERS, 16], ids=["all offered", "most of them queued at the consumer"])
def test_128_that_wait_for_ten_leases_do_not_expire(window: int, peers: tuple[str, ...], lose: int) -> None:
    world = World(ConsumerMachine, window, peers, lose)
    wait_in_a_queue(world)
    assert not any(world.ended.values())
    assert world.consumer.open_transfers == TRANSFERS
    for machine in world.producers.values():
        assert machine.open_transfers == min(window, TRANSFERS)
        for number in range(TRANSFERS):
            stage(machine, TOKENS, f"t{number}", world.now)
    for peer in peers:
        world.carry_out(peer)
    world.passes(LASTS + 2.0)
    assert world.ended == {name: {Outcome.COMPLETE: TRANSFERS} for name in ("c0", *peers)}


@pytest.mark.parametrize("peers", [("p0",), ("p0", "p1")], ids=["one producer", "two producers"])
def test_they_are_renewed_together(peers: tuple[str, ...]) -> None:
    """One message a producer at a time, whatever waits there."""
    world = World(ConsumerMachine, TRANSFERS, peers, lose=0)
    wait_in_a_queue(world)
    for peer in peers:
        renewals = world.renewals(peer)
        assert len(renewals) == pytest.approx(LASTS / Limits(lease=LEASE).renew, abs=2)
        assert sum(isinstance(message, Offer) for _, receiver, message in world.sent if receiver == peer) >= TRANSFERS


def test_without_renewals_they_do_expire() -> None:
    """Each of them, at the producer, when its lease is over: so the first test can fail."""
    world = World(NeverRenews, TRANSFERS, ("p0",), lose=0)
    wait_in_a_queue(world)
    assert world.ended["c0"] == {Outcome.EXPIRED: TRANSFERS}
    assert world.ended["p0"] == {Outcome.EXPIRED: TRANSFERS}
    assert world.producers["p0"].open_transfers == 0


def test_with_three_of_four_lost_they_expire() -> None:
    """So many losses in a row end a lease, and with it what might start: this is what bounds it."""
    world = World(ConsumerMachine, TRANSFERS, ("p0",), lose=3)
    wait_in_a_queue(world)
    assert world.ended["p0"] == {Outcome.EXPIRED: TRANSFERS}
