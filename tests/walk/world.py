"""The hostile world: two machines, a lossy network that reorders and duplicates, and WRITEs that land at any time.

The rules that are checked are about bytes: who owns a block when something is written into it, and whether source
blocks are still what they were when they are read. Nothing here models the protocol: it runs the machines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from pushkv.core.commands import AskProof, Command, Ended, Post, Released, Send, StageEnded, StageReleased
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Blocks, Cancel, Complete, Failed, Table, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.receiving import Order
from pushkv.core.span import Span
from pushkv.core.states import Target

from walk.machines import Machines, plain

LIMITS = Limits(resend=1.0, resend_most=1.0, insist_after=0, window=4)
PROMPT = b"p" * 32
TOKENS = 2
FREE = "free"


class Violation(Exception):
    """A rule was broken; the message begins with the rule's name."""


class Flight(NamedTuple):
    """A WRITE whose bytes have not landed, or that its producer has not been told the end of."""

    write: int
    life: int
    to_life: int
    key: TransferKey
    block: str
    version: int
    complete: Complete
    landed: bool = False
    told: bool = False


class World(NamedTuple):
    """One joint state. ``p`` and ``c`` are machine states by number.

    ``to_p`` and ``to_c`` hold every message ever sent between the present lives: each may be delivered at any time,
    in any order, any number of times, or never. That is more than loss, reordering and one duplicate, and it makes
    fewer states.
    """

    p: int
    c: int
    to_p: frozenset[Any] = frozenset()
    to_c: frozenset[Any] = frozenset()
    flights: frozenset[Flight] = frozenset()
    owners: tuple[Any, ...] = (FREE, FREE, FREE)
    landed: frozenset[tuple[TransferKey, int]] = frozenset()
    posted: frozenset[tuple[TransferKey, int]] = frozenset()
    version: int = 0
    staged: int = 0
    """Tokens the producer's engine has staged; -1: preempted and waiting; -2: over."""
    p_life: int = 0
    c_life: int = 0
    p_dead: bool = False
    offered: int = 0
    preempted: bool = False
    ended_p: frozenset[tuple[TransferKey, Outcome]] = frozenset()
    ended_c: frozenset[tuple[TransferKey, Outcome]] = frozenset()
    c_lost: bool = False
    """The consumer was told that it lost the producer's present epoch."""
    p_lost: bool = False


@dataclass(frozen=True)
class Bounds:
    """What the world may do."""

    attempts: int = 2
    parts: int = 2
    p_restarts: int = 1
    c_restarts: int = 1
    preemptions: int = 1
    cancels: bool = True
    write_errors: bool = True
    losses: bool = True
    """Whether a side may be told, rightly or not, that it lost the other."""
    death: str = "cma"
    """What a producer's death does to its WRITEs: ``cma`` ends them, ``tcp`` leaves bytes in sockets."""
    death_is_proof: bool = False
    """A wrong transport that takes a death for a proof although bytes travel on (variant F)."""


def owed(start: int, stop: int, end: int) -> tuple[Span, ...]:
    """One group of one layer: what is owed are the tokens."""
    return (Span(0, 0, 1, start, stop),) if start < stop else ()


def nonce_of(key: TransferKey, peer: str) -> bytes:
    """A nonce that is the same in every walk."""
    return f"{key.epoch}{key.attempt}{peer}".ljust(16).encode()


def blocks(block: str) -> Blocks:
    """The block table with this one block."""
    return Blocks((Table(0, struct.pack("<i", "ABC".index(block))),))


class Rules:
    """Machines of both sides and what the world makes of their commands. Subclasses break one rule each."""

    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.ps: Machines[ProducerMachine] = Machines()
        self.cs: Machines[ConsumerMachine] = Machines()

    def start(self) -> World:
        """The world before anything has happened: both sides are connected."""
        return World(p=self._new_p(0, 0), c=self._new_c(0))

    def _new_p(self, life: int, c_life: int) -> int:
        machine = self.producer(0, f"p{life}", LIMITS)
        machine.connected(f"c{c_life}", owed, 0.0)
        machine.commands()
        return self.ps.number(machine)

    def _new_c(self, life: int) -> int:
        return self.cs.number(self.consumer(LIMITS, nonce_of))

    # Carrying out commands

    def after_p(self, w: World, result: tuple[int, tuple[Command, ...], str]) -> World:
        """The world after the producer's machine has moved."""
        state, commands, _ = result
        w = w._replace(p=state)
        for command in commands:
            w = self._do_p(w, command)
        return w

    def _do_p(self, w: World, command: Command) -> World:
        if isinstance(command, Send):
            return w._replace(to_c=w.to_c | {_plain(command.message)})
        if isinstance(command, Post):
            return self._post(w, command)
        if isinstance(command, Ended):
            _once(w.ended_p, command, "producer")
            return self._agree(w._replace(ended_p=w.ended_p | {(command.key, plain(command.outcome))}))
        if isinstance(command, StageEnded):
            return w._replace(staged=-2)
        if isinstance(command, StageReleased):
            return w._replace(version=w.version + 1, staged=0 if w.staged == -1 else w.staged)
        return w

    def _post(self, w: World, post: Post) -> World:
        for span in post.complete.spans:
            for token in range(span.token_start, span.token_stop):
                if (post.key, token) in w.posted:
                    raise Violation(f"posted once: token {token} of {post.key} is posted again")
                w = w._replace(posted=w.posted | {(post.key, token)})
        assert isinstance(post.target, Blocks)
        block = "ABC"[struct.unpack("<i", post.target.tables[0].ids)[0]]
        flight = Flight(post.write, w.p_life, w.c_life, post.key, block, w.version, post.complete)
        return w._replace(flights=w.flights | {flight})

    def after_c(self, w: World, result: tuple[int, tuple[Command, ...], str]) -> World:
        """The world after the consumer's machine has moved."""
        state, commands, _ = result
        w = w._replace(c=state)
        for command in commands:
            w = self._do_c(w, command)
        return w

    def _do_c(self, w: World, command: Command) -> World:
        if isinstance(command, Send):
            return w if w.p_dead else w._replace(to_p=w.to_p | {_plain(command.message)})
        if isinstance(command, Ended):
            _once(w.ended_c, command, "consumer")
            if command.outcome is Outcome.COMPLETE:
                here = {token for key, token in w.landed if key == command.key}
                if here != set(range(TOKENS)):
                    raise Violation(f"complete means covered: {command.key} has tokens {sorted(here)}")
            return self._agree(w._replace(ended_c=w.ended_c | {(command.key, plain(command.outcome))}))
        if isinstance(command, Released):
            owners = tuple(FREE if owner == command.key else owner for owner in w.owners)
            return w._replace(owners=owners)
        return w

    def _agree(self, w: World) -> World:
        theirs = dict(w.ended_p)
        for key, mine in w.ended_c:
            other = theirs.get(key)
            if other is Outcome.COMPLETE and mine.rejected:
                raise Violation(f"agreement: {key} is complete at the producer, {mine.value} at the consumer")
        return w

    def saturate(self, w: World) -> World:
        """Send at once whatever a side may send without changing its own state.

        A message in the network may be delivered or not, so a world with more messages can do all that one with
        fewer can: only the fullest of them needs a visit.
        """
        while True:
            to_c = w.to_c if w.p_dead else w.to_c | self._sends_p(w)
            to_p = w.to_p if w.p_dead else w.to_p | self._sends_c(w)
            if to_c == w.to_c and to_p == w.to_p:
                return w
            w = w._replace(to_c=to_c, to_p=to_p)

    def _sends_p(self, w: World) -> frozenset[Any]:
        steps = [self.ps.step(w.p, "receive", f"c{w.c_life}", message, 0.0) for message in w.to_p]
        steps += [self.ps.step(w.p, "fire", timer, 0.0) for timer in self.ps.timers(w.p)]
        return _free_sends(w.p, steps)

    def _sends_c(self, w: World) -> frozenset[Any]:
        steps = [self.cs.step(w.c, "receive", f"p{w.p_life}", message, 0.0) for message in w.to_c]
        steps += [self.cs.step(w.c, "fire", timer, 0.0) for timer in self.cs.timers(w.c)]
        return _free_sends(w.c, steps)

    def check(self, w: World) -> None:
        """What must hold in every state, whatever comes next."""
        for transition in (self._waits_c(w), self._waits_p(w)):
            if transition:
                raise Violation(f"nothing hangs: {transition}")

    def _waits_c(self, w: World) -> str:
        return self.cs.fact(w.c, "waits", _consumer_waits)

    def _waits_p(self, w: World) -> str:
        return "" if w.p_dead else self.ps.fact(w.p, "waits", _producer_waits)


def _free_sends(state: int, steps: list[tuple[int, tuple[Command, ...], str]]) -> frozenset[Any]:
    return frozenset(
        _plain(command.message)
        for after, commands, _ in steps
        if after == state and all(isinstance(command, (Send, AskProof)) for command in commands)
        for command in commands
        if isinstance(command, Send)
    )


def _plain(message: Any) -> Any:
    if isinstance(message, Failed):
        return msgspec.structs.replace(message, outcome=plain(message.outcome), detail="")
    if isinstance(message, Cancel):
        return msgspec.structs.replace(message, outcome=plain(message.outcome))
    return message


def _consumer_waits(machine: ConsumerMachine) -> str:
    timers = machine.timers
    for key, transfer in machine._transfers.items():
        if transfer.outcome is None and ("deadline", key) not in timers:
            return f"{key} is open without a deadline"
        for peer, rank in transfer.ranks.items():
            if rank.custody is Target.DRAINING and ("resend", key, peer) not in timers:
                return f"{key} drains at {peer} and nothing asks again"
            if rank.custody is Target.QUARANTINED and ("proof", peer) not in timers:
                return f"{key} is quarantined at {peer} and nothing seeks proof"
    return ""


def _producer_waits(machine: ProducerMachine) -> str:
    for peer, customer in machine._customers.items():
        for sequence, serving in customer.live.items():
            if serving.state.value != "over" and ("deadline", peer, sequence) not in machine.timers:
                return f"{serving.offer.key} is open without a deadline"
            if serving.custody.value == "stuck" and ("proof", peer) not in machine.timers:
                return f"{serving.offer.key} is stuck and nothing seeks proof"
    return ""


def _once(ended: frozenset[tuple[TransferKey, Outcome]], command: Ended, side: str) -> None:
    if any(key == command.key for key, _ in ended):
        raise Violation(f"one outcome: {command.key} ends a second time at the {side}, {command.outcome.value}")


def land(w: World, flight: Flight) -> World:
    """The bytes of a WRITE arrive; its notification may arrive from now on."""
    if flight.to_life == w.c_life:
        owner = w.owners["ABC".index(flight.block)]
        if owner != flight.key:
            raise Violation(f"custody ends on proof: bytes of {flight.key} land in block {flight.block} of {owner}")
        tokens = {(flight.key, t) for s in flight.complete.spans for t in range(s.token_start, s.token_stop)}
        w = w._replace(landed=w.landed | tokens, to_c=w.to_c | {flight.complete})
    if flight.version != w.version and flight.life == w.p_life and not w.p_dead:
        raise Violation(f"sources are held: a WRITE of {flight.key} reads blocks that were given back")
    rest = w.flights - {flight}
    return w._replace(flights=rest if flight.told else rest | {flight._replace(landed=True)})


def order(key: TransferKey, block: str, p_life: int) -> Order:
    """Offer the whole prompt into one block."""
    return Order(key, blocks(block), PROMPT, TOKENS, 0, TOKENS, {f"p{p_life}": owed(0, TOKENS, TOKENS)})


__all__ = ["AskProof", "Bounds", "Flight", "Iterator", "Rules", "Violation", "World", "land", "order", "owed"]
