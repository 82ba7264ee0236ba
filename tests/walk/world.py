"""The hostile world between one producer rank and one consumer: a network, WRITEs in flight, engines, deaths.

Nothing here models the protocol: the machines are run. The world only carries out their commands and says what may
happen next. Its rules are about bytes: who owns a block that a WRITE may land in, and whether source blocks are
given back while a WRITE may read them. The world is meaner than any network or transport:

* A message once sent can be delivered at any time, in any order, any number of times, or never; messages of a life
  that has ended too, as long as the other side has not been told that it ended.
* The bytes of a WRITE land at any time after it is posted, or never: after its error, after its producer's death,
  after its consumer's death (then nowhere). Its notification can arrive whenever its bytes have landed.
* Any timer that is set may fire at any time. A loss may be told at any time, true or not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import msgspec

from pushkv.core.commands import Command, Ended, Post, Released, StageEnded, StageReleased
from pushkv.core.messages import Blocks, Cancel, Complete, Failed, Table, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from walk.errors import Violation
from walk.machines import plain

PROMPT = b"p" * 32
OTHER_PROMPT = b"q" * 32
TOKENS = 2
BLOCKS = "AB"


@dataclass(frozen=True)
class Bounds:
    """What the world may do, and how often.

    ``attempts`` are offers of one transfer by the consumer's first life (a later life makes one); ``stagings`` is
    how often the producer's engine begins to stage it. ``losses``: a side may be told, truly or not, that it lost the
    other. ``refusals``: the producer may stage another prompt, or shut down.
    """

    attempts: int = 2
    parts: int = 2
    p_restarts: int = 1
    c_restarts: int = 1
    preemptions: int = 1
    stagings: int = 1
    cancels: bool = True
    write_errors: bool = True
    losses: bool = True
    refusals: bool = False
    death_is_proof: bool = False
    """A wrong transport: it takes a producer's death for proof although bytes still travel."""


class _Env(NamedTuple):
    p_life: int = 0
    c_life: int = 0
    p_dead: bool = False
    offered: int = 0
    stagings: int = 0
    staged: int = 0
    """Tokens that the producer's engine has staged; -1: preempted, -2: over, and its blocks not yet back."""
    preempted: int = 0
    closing: bool = False
    owners: tuple[TransferKey | None, ...] = (None,) * len(BLOCKS)
    ended_p: frozenset[tuple[TransferKey, str]] = frozenset()
    ended_c: frozenset[tuple[TransferKey, str]] = frozenset()


class Env(_Env):
    """What is neither machine, network nor flight: lives, engines, who owns each target block, and outcomes.

    There is one of a kind (:meth:`but` and :meth:`first` make them), so that they compare by identity.
    """

    __slots__ = ()
    _kinds: ClassVar[dict[tuple[Any, ...], Env]] = {}
    _changes: ClassVar[dict[tuple[Any, ...], Env]] = {}
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @classmethod
    def first(cls, **fields: Any) -> Env:
        """The one with these fields."""
        return cls(**fields)._one()

    def but(self, **fields: Any) -> Env:
        """The one that differs in these fields."""
        change = (self, *fields.items())
        known = self._changes.get(change)
        if known is None:
            known = self._changes[change] = self._replace(**fields)._one()
        return known

    def _one(self) -> Env:
        return self._kinds.setdefault(tuple(self), self)

    @property
    def p_name(self) -> str:
        """The producer's present epoch."""
        return f"p{self.p_life}"

    @property
    def c_name(self) -> str:
        """The consumer's present epoch."""
        return f"c{self.c_life}"

    def lives(self, peer: str) -> bool:
        """Whether an epoch is that of a process that runs."""
        return peer == self.c_name or (peer == self.p_name and not self.p_dead)


class World(NamedTuple):
    """One joint state. Machines are numbers; sets of messages and of WRITEs are bit masks."""

    p: int
    c: int
    to_p: int
    to_c: int
    air: int
    """WRITEs whose bytes may still land."""
    untold: int
    """WRITEs whose end the producer has not been told."""
    posted: int
    """WRITEs ever posted for offers that the producer still serves."""
    env: Env


class Flight(NamedTuple):
    """One WRITE, from one life to another."""

    p_life: int
    c_life: int
    write: int
    key: TransferKey
    block: int
    complete: Complete

    @property
    def tokens(self) -> set[int]:
        """The tokens it writes."""
        return {token for span in self.complete.spans for token in range(span.token_start, span.token_stop)}


class Bits:
    """Things by bit number."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._bits: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        """The mask with this thing's bit."""
        known = self._bits.get(thing)
        if known is None:
            known = self._bits[thing] = 1 << len(self.things)
            self.things.append(thing)
        return known

    def each(self, mask: int) -> list[tuple[int, Any]]:
        """The things in a mask, each with its bit."""
        found = []
        while mask:
            bit = mask & -mask
            found.append((bit, self.things[bit.bit_length() - 1]))
            mask ^= bit
        return found

    def where(self, mask: int, wanted: Any) -> int:
        """The mask of those for which ``wanted`` holds."""
        return sum(bit for bit, thing in self.each(mask) if wanted(thing))


def owed(start: int, stop: int, _end: int) -> tuple[Span, ...]:
    """One group of one layer: what is owed are the tokens."""
    return (Span(0, 0, 1, start, stop),) if start < stop else ()


def nonce_of(key: TransferKey, peer: str) -> bytes:
    """A nonce that is the same in every walk."""
    return f"{key.epoch}{key.attempt}{peer}".ljust(16).encode()


def key_of(c_life: int, attempt: int) -> TransferKey:
    """The key of an attempt of a life of the consumer."""
    return TransferKey("t", "e", f"c{c_life}", 0, attempt)


def block_table(block: int) -> Blocks:
    """The block table with this one block."""
    return Blocks((Table(0, struct.pack("<i", block)),))


def block_of(blocks: Blocks) -> int:
    """The one block of a table."""
    block: int = struct.unpack("<i", blocks.tables[0].ids)[0]
    return block


def plain_message(message: Any) -> Any:
    """A message up to what the machines do about it."""
    if isinstance(message, Failed):
        outcome = Outcome.REJECTED_PROMPT if message.outcome.rejected else Outcome.CANCELLED
        return msgspec.structs.replace(message, outcome=outcome, detail="")
    if isinstance(message, Cancel):
        return msgspec.structs.replace(message, outcome=plain(message.outcome))
    return message


class Effects:
    """Carries out what a machine commanded besides messages, and raises Violation where that breaks a rule."""

    def __init__(self) -> None:
        self.flights = Bits()

    def producer(self, w: World, commands: tuple[Command, ...], alone: bool) -> World:
        """``alone``: the machine was moved by its own deadline or by a loss, not by the consumer's word."""
        for command in commands:
            if isinstance(command, Post):
                w = self._post(w, command)
            elif isinstance(command, Ended):
                w = w._replace(env=_ended_p(w.env, command, alone))
            elif isinstance(command, StageEnded):
                w = w._replace(env=w.env.but(staged=-2 if w.env.staged else 0))
            elif isinstance(command, StageReleased):
                w = w._replace(env=self._stage_released(w))
        return w

    def _post(self, w: World, post: Post) -> World:
        life = int(post.peer[1:])
        block = block_of(post.target)
        flight = Flight(w.env.p_life, life, post.write, post.key, block, post.complete)
        for _, earlier in self.flights.each(w.posted):
            if earlier.key == post.key and earlier.p_life == w.env.p_life and earlier.tokens & flight.tokens:
                raise Violation(f"posted once: tokens {flight.tokens} of {post.key} are posted again")
        if w.env.staged == 0:
            raise Violation(f"sources are held: a WRITE of {post.key} is posted from blocks that were given back")
        bit = self.flights.of(flight)
        w = w._replace(air=w.air | bit, untold=w.untold | bit, posted=w.posted | bit)
        self.check_targets(w, bit)
        return w

    def check_targets(self, w: World, mask: int) -> None:
        """A WRITE under way can land at the next moment: the owner of its block must be its own transfer now."""
        for _, flight in self.flights.each(w.air & mask):
            owner = w.env.owners[flight.block]
            if flight.c_life == w.env.c_life and owner != flight.key:
                whose = f"{owner}'s" if owner else "somebody else's"
                raise Violation(
                    f"custody ends on proof: bytes of {flight.key} land in block {BLOCKS[flight.block]}, now {whose}"
                )

    def _stage_released(self, w: World) -> Env:
        for _, flight in self.flights.each(w.air):
            if flight.p_life == w.env.p_life:
                raise Violation(f"sources are held: a WRITE of {flight.key} reads blocks that were given back")
        return w.env.but(staged=0)

    def consumer(self, w: World, commands: tuple[Command, ...], arrived: frozenset[tuple[bytes, int]]) -> World:
        """``arrived`` are the tokens that have landed, by the nonce of their offer."""
        for command in commands:
            if isinstance(command, Ended):
                w = w._replace(env=_ended_c(w.env, command, arrived))
            elif isinstance(command, Released):
                owners = tuple(None if owner == command.key else owner for owner in w.env.owners)
                w = w._replace(env=w.env.but(owners=owners))
                self.check_targets(w, -1)
        return w


def _ended_p(env: Env, end: Ended, alone: bool) -> Env:
    if any(key == end.key for key, _ in env.ended_p):
        raise Violation(f"one outcome: {end.key} ends a second time at the producer, {end.outcome.value}")
    how = "complete" if end.outcome is Outcome.COMPLETE else "alone" if alone else "answered"
    return agree(env.but(ended_p=env.ended_p | {(end.key, how)}))


def _ended_c(env: Env, end: Ended, arrived: frozenset[tuple[bytes, int]]) -> Env:
    if any(key == end.key for key, _ in env.ended_c):
        raise Violation(f"one outcome: {end.key} ends a second time at the consumer, {end.outcome.value}")
    how = "rejected" if end.outcome.rejected else "other"
    if end.outcome is Outcome.COMPLETE:
        how = "complete"
        mine = f"{end.key.epoch}{end.key.attempt}".encode()
        here = {token for nonce, token in arrived if nonce.startswith(mine)}
        missing = sorted(set(range(TOKENS)) - here)
        if missing:
            raise Violation(f"complete means covered: {end.key} is complete without tokens {missing}")
    return agree(env.but(ended_c=env.ended_c | {(end.key, how)}))


def agree(env: Env) -> Env:
    """The outcomes of the two sides agree as far as a word could cross."""
    theirs = dict(env.ended_p)
    for key, mine in env.ended_c:
        other = theirs.get(key)
        if other == "complete" and mine == "rejected":
            raise Violation(f"agreement: {key} is complete at the producer, rejected at the consumer")
        if other == "answered" and mine == "complete":
            raise Violation(f"agreement: {key} is complete at the consumer and failed at the producer, which asked")
    return env
