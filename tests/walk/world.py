"""The hostile world between producer ranks and one consumer: a network, WRITEs in flight, engines, deaths.

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
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from pushkv.core.commands import Command, Ended, Post, Released, StageEnded, StageReleased
from pushkv.core.messages import Blocks, Cancel, Complete, Failed, Table, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from walk.errors import Violation
from walk.machines import plain

T = TypeVar("T")
K = TypeVar("K", bound="_OfAKind")
Arrived: TypeAlias = frozenset[tuple[bytes, int, int]]
"""What has landed: the nonce of its offer, the rank, the token."""

PROMPT = b"p" * 32
OTHER_PROMPT = b"q" * 32
TOKENS = 2
BLOCKS = "AB"
RANKS = "pq"
"""The producer ranks' letters. An epoch's name is a rank's letter, or the consumer's ``c``, and its life's number."""


@dataclass(frozen=True)
class Bounds:
    """What the world may do, and how often.

    ``attempts`` are offers of one transfer by the consumer's first life (a later life makes one), each to all
    ``ranks`` of the producer; ``stagings`` is how often a rank's engine begins to stage it, in at most ``parts``.
    ``losses``: a side may be told, truly or not, that it lost the other. ``refusals``: a producer may stage another
    prompt, or shut down. Of several ranks the first alone may be preempted, and restarted: any one of them stands for
    any other.
    """

    attempts: int = 2
    parts: int = 2
    ranks: int = 1
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


class _Seat(NamedTuple):
    name: str
    alive: bool = True
    stagings: int = 0
    staged: int = 0
    """Tokens that the engine has staged; -1: preempted, -2: over, and its blocks not yet back."""
    preempted: int = 0
    closing: bool = False
    ended: frozenset[tuple[TransferKey, str]] = frozenset()


class _Env(NamedTuple):
    c_name: str = "c0"
    offered: int = 0
    owners: tuple[TransferKey | None, ...] = (None,) * len(BLOCKS)
    ended: frozenset[tuple[TransferKey, str]] = frozenset()


class _OfAKind:
    """There is one of a kind of these (:meth:`but` and ``first`` make them), so that they compare by identity."""

    __slots__ = ()
    _kinds: ClassVar[dict[tuple[Any, ...], Any]] = {}
    _changes: ClassVar[dict[tuple[Any, ...], Any]] = {}
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def but(self: K, **fields: Any) -> K:
        """The one that differs in these fields."""
        change = (self, *fields.items())
        known = self._changes.get(change)
        if known is None:
            known = self._changes[change] = one_of_a_kind(self._replace(**fields))
        return known


class Seat(_OfAKind, _Seat):
    """What is neither machine, network nor flight about a producer rank: its life, its engine, its outcomes."""

    __slots__ = ()

    @classmethod
    def first(cls, rank: int, life: int = 0) -> Seat:
        """A rank that has just started."""
        return one_of_a_kind(cls(f"{RANKS[rank]}{life}"))

    @property
    def life(self) -> int:
        """How many lives it has had before."""
        return int(self.name[1:])


class Env(_OfAKind, _Env):
    """The same about the consumer, and the owner of each target block."""

    __slots__ = ()

    @classmethod
    def first(cls, life: int = 0) -> Env:
        """A consumer that has just started."""
        return one_of_a_kind(cls(f"c{life}"))

    @property
    def life(self) -> int:
        """How many lives it has had before."""
        return int(self.c_name[1:])


def one_of_a_kind(thing: T) -> T:
    """The one that all its equals are."""
    return _OfAKind._kinds.setdefault((type(thing), *thing), thing)


class World(NamedTuple):
    """One joint state. Machines are numbers (-1: dead); sets of messages and of WRITEs are bit masks."""

    ps: tuple[int, ...]
    c: int
    to_p: int
    """Messages on their way to producers; each says to which."""
    to_c: int
    air: int
    """WRITEs whose bytes may still land."""
    untold: int
    """WRITEs whose end their producer has not been told."""
    posted: int
    """WRITEs ever posted for offers that their producer still serves."""
    seats: tuple[Seat, ...]
    env: Env

    def with_seat(self, rank: int, seat: Seat) -> World:
        """The world with another seat of a rank."""
        return self._replace(seats=put(self.seats, rank, seat))

    def lives(self, name: str) -> bool:
        """Whether an epoch is that of a process that runs."""
        return name == self.env.c_name or name in alive(self.seats)


class Flight(NamedTuple):
    """One WRITE, from one life to another."""

    producer: str
    consumer: str
    write: int
    key: TransferKey
    block: int
    complete: Complete

    @property
    def tokens(self) -> set[int]:
        """The tokens it writes."""
        return {token for span in self.complete.spans for token in range(span.token_start, span.token_stop)}


def put(row: tuple[T, ...], index: int, thing: T) -> tuple[T, ...]:
    """A row with another thing in one place."""
    return (*row[:index], thing, *row[index + 1 :])


@cache
def alive(seats: tuple[Seat, ...]) -> tuple[str, ...]:
    """The epochs of the producer ranks that run."""
    return tuple(seat.name for seat in seats if seat.alive)


class Bits:
    """Things by bit number."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._bits: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        """The mask with this thing's bit."""
        known = self._bits.get(thing)
        return self.add(thing) if known is None else known

    def add(self, thing: Any) -> int:
        """Give a new thing the next bit."""
        bit = self._bits[thing] = 1 << len(self.things)
        self.things.append(thing)
        return bit

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


class Owes(NamedTuple):
    """What a rank owes: one layer of its own, of each token."""

    rank: int

    def __call__(self, start: int, stop: int, _end: int = TOKENS) -> tuple[Span, ...]:
        return (Span(0, self.rank, self.rank + 1, start, stop),) if start < stop else ()


def nonce_of(key: TransferKey, peer: str) -> bytes:
    """A nonce that is the same in every walk."""
    return f"{key.epoch}{key.attempt}{peer}".ljust(16).encode()


def key_of(c_name: str, attempt: int) -> TransferKey:
    """The key of an attempt of a life of the consumer."""
    return TransferKey("t", "e", c_name, 0, attempt)


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

    def producer(self, w: World, rank: int, commands: tuple[Command, ...], alone: bool) -> World:
        """``alone``: the machine was moved by its own deadline or by a loss, not by the consumer's word."""
        for command in commands:
            seat = w.seats[rank]
            if isinstance(command, Post):
                w = self._post(w, seat, command)
            elif isinstance(command, Ended):
                w = w.with_seat(rank, _ended_p(seat, command, alone))
                agree(w.seats, w.env)
            elif isinstance(command, StageEnded):
                w = w.with_seat(rank, seat.but(staged=-2 if seat.staged else 0))
            elif isinstance(command, StageReleased):
                self._check_sources(w, seat)
                w = w.with_seat(rank, seat.but(staged=0))
        return w

    def _post(self, w: World, seat: Seat, post: Post) -> World:
        flight = Flight(seat.name, post.peer, post.write, post.key, block_of(post.target), post.complete)
        for _, earlier in self.flights.each(w.posted):
            if earlier.key == post.key and earlier.producer == seat.name and earlier.tokens & flight.tokens:
                raise Violation(f"posted once: tokens {flight.tokens} of {post.key} are posted again")
        if seat.staged == 0:
            raise Violation(f"sources are held: a WRITE of {post.key} is posted from blocks that were given back")
        bit = self.flights.of(flight)
        w = w._replace(air=w.air | bit, untold=w.untold | bit, posted=w.posted | bit)
        self.check_targets(w, bit)
        return w

    def check_targets(self, w: World, mask: int) -> None:
        """A WRITE under way can land at the next moment: the owner of its block must be its own transfer now."""
        for _, flight in self.flights.each(w.air & mask):
            owner = w.env.owners[flight.block]
            if flight.consumer == w.env.c_name and owner != flight.key:
                whose = f"{owner}'s" if owner else "somebody else's"
                raise Violation(
                    f"custody ends on proof: bytes of {flight.key} land in block {BLOCKS[flight.block]}, now {whose}"
                )

    def _check_sources(self, w: World, seat: Seat) -> None:
        for _, flight in self.flights.each(w.air):
            if flight.producer == seat.name:
                raise Violation(f"sources are held: a WRITE of {flight.key} reads blocks that were given back")

    def consumer(self, w: World, commands: tuple[Command, ...], arrived: Arrived) -> World:
        """Blocks that are released are nobody's, and outcomes are compared with what has landed."""
        for command in commands:
            if isinstance(command, Ended):
                w = w._replace(env=_ended_c(w.env, command, arrived, len(w.seats)))
                agree(w.seats, w.env)
            elif isinstance(command, Released):
                owners = tuple(None if owner == command.key else owner for owner in w.env.owners)
                w = w._replace(env=w.env.but(owners=owners))
                self.check_targets(w, -1)
        return w


def _ended_p(seat: Seat, end: Ended, alone: bool) -> Seat:
    if any(key == end.key for key, _ in seat.ended):
        raise Violation(f"one outcome: {end.key} ends a second time at {seat.name}, {end.outcome.value}")
    how = "complete" if end.outcome is Outcome.COMPLETE else "alone" if alone else "answered"
    return seat.but(ended=seat.ended | {(end.key, how)})


def _ended_c(env: Env, end: Ended, arrived: Arrived, ranks: int) -> Env:
    if any(key == end.key for key, _ in env.ended):
        raise Violation(f"one outcome: {end.key} ends a second time at the consumer, {end.outcome.value}")
    how = "rejected" if end.outcome.rejected else "other"
    if end.outcome is Outcome.COMPLETE:
        how = "complete"
        mine = f"{end.key.epoch}{end.key.attempt}".encode()
        here = {(rank, token) for nonce, rank, token in arrived if nonce.startswith(mine)}
        missing = sorted({(rank, token) for rank in range(ranks) for token in range(TOKENS)} - here)
        if missing:
            lacks = ", ".join(f"token {token} of rank {RANKS[rank]}" for rank, token in missing)
            raise Violation(f"complete means covered: {end.key} is complete without {lacks}")
    return env.but(ended=env.ended | {(end.key, how)})


def agree(seats: tuple[Seat, ...], env: Env) -> None:
    """The outcomes of the two sides agree as far as a word could cross.

    A rank may be complete although the consumer was refused, by another rank: not if all of them are.
    """
    for key, mine in env.ended:
        theirs = [how for seat in seats for ended, how in seat.ended if ended == key]
        if mine == "rejected" and theirs.count("complete") == len(seats):
            raise Violation(f"agreement: {key} is complete at the producer, rejected at the consumer")
        if mine == "complete" and "answered" in theirs:
            raise Violation(f"agreement: {key} is complete at the consumer and failed at the producer, which asked")
