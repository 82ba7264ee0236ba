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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import msgspec

from pushkv.core.commands import Command, Ended, Gather, Post, PostSlot, Released, Scatter, StageEnded, StageReleased
from pushkv.core.messages import Blocks, Cancel, Complete, Credit, Failed, Ring, Table, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from walk.bits import Bits
from walk.cells import TOKENS, Cells, cells_of, computed
from walk.errors import Violation
from walk.machines import plain
from walk.slots import Berths, SlotRules, check_block, gather_of, scatter_of

T = TypeVar("T")
K = TypeVar("K", bound="_OfAKind")
Arrived: TypeAlias = frozenset[tuple[bytes, int, int]]
"""What has landed: the nonce of its offer, the layer, the token."""
Landed: TypeAlias = frozenset[tuple[Credit, tuple[Span, ...]]]
"""What has landed in which slot."""

PROMPT = b"p" * 32
OTHER_PROMPT = b"q" * 32
BLOCKS = "AB"
RANKS = "pq"
"""The producer ranks' letters. An epoch's name is a rank's letter, or the consumer's ``c``, and its life's number."""


@dataclass(frozen=True)
class Bounds:
    """What the world may do, and how often. With ``slots`` all parts land: in as many landing slots, from ``staging``
    staging slots a rank, each of ``slot_tokens`` tokens; ``copy_errors``: gathers and scatters may fail.

    ``attempts`` are offers of one transfer by the consumer's first life (a later life makes one), each to all
    ``ranks`` of the producer; ``stagings`` is how often a rank's engine begins to stage it, in at most ``parts``.
    Of one rank alone there may be two ``layers``, of which the first may be staged before the second is.
    ``losses``: a side may be told, truly or not, that it lost the other. ``refusals``: a producer may stage another
    prompt, or shut down. Of several ranks the first alone may be preempted, and restarted: any one of them stands for
    any other.
    """

    attempts: int = 2
    parts: int = 2
    ranks: int = 1
    layers: int = 1
    p_restarts: int = 1
    c_restarts: int = 1
    preemptions: int = 1
    stagings: int = 1
    cancels: bool = True
    write_errors: bool = True
    losses: bool = True
    refusals: bool = False
    slots: int = 0
    staging: int = 1
    slot_tokens: int = 2
    copy_errors: bool = False
    death_is_proof: bool = False
    """A wrong transport: it takes a producer's death for proof although bytes still travel."""


class _Seat(NamedTuple):
    name: str
    alive: bool = True
    stagings: int = 0
    staged: int = 0
    """Tokens that the engine has staged, plus :data:`HALF` for each that it has staged the first layer alone up to;
    -1: preempted, -2: over, and its blocks not yet back."""
    preempted: int = 0
    closing: bool = False
    ended: frozenset[tuple[TransferKey, str]] = frozenset()


class _Env(NamedTuple):
    c_name: str = "c0"
    offered: int = 0
    owners: tuple[TransferKey | None, ...] = (None,) * len(BLOCKS)
    ended: frozenset[tuple[TransferKey, str]] = frozenset()
    scattered: frozenset[tuple[TransferKey, int, int]] = frozenset()
    """Of transfers that are open: the ranks' tokens that are in their blocks."""


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
    copies: int
    """Gathers and scatters under way."""
    seats: tuple[Seat, ...]
    env: Env

    def with_seat(self, rank: int, seat: Seat) -> World:
        """The world with another seat of a rank."""
        return self._replace(seats=put(self.seats, rank, seat))

    def lives(self, name: str) -> bool:
        """Whether an epoch is that of a process that runs."""
        return name == self.env.c_name or name in alive(self.seats)


class Flight(NamedTuple):
    """One WRITE, from one life to another. ``block`` is the target block; a landing slot where it lands in one."""

    producer: str
    consumer: str
    write: int
    key: TransferKey
    block: int
    complete: Complete
    staging: int = -1
    """The staging slot that it reads; -1 where it reads blocks."""

    @property
    def cells(self) -> Cells:
        """The (layer, token) pairs that it writes."""
        return cells_of(self.complete.spans)


def put(row: tuple[T, ...], index: int, thing: T) -> tuple[T, ...]:
    """A row with another thing in one place."""
    return (*row[:index], thing, *row[index + 1 :])


@cache
def alive(seats: tuple[Seat, ...]) -> tuple[str, ...]:
    """The epochs of the producer ranks that run."""
    return tuple(seat.name for seat in seats if seat.alive)


def nonce_of(key: TransferKey, peer: str) -> bytes:
    """A nonce that is the same in every walk."""
    return f"{key.epoch}{key.attempt}{peer}".ljust(16).encode()


def key_of(c_name: str, attempt: int) -> TransferKey:
    """The key of an attempt of a life of the consumer."""
    return TransferKey("t", "e", c_name, 0, attempt)


def block_table(block: int) -> Blocks:
    """The block table with this one block."""
    return Blocks((Table(0, struct.pack("<i", block)),))


def block_of(blocks: Blocks | Ring) -> int:
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


def check_computed(seat: Seat, key: TransferKey, cells: Cells) -> None:
    """What is read for a part must have been staged; of blocks that were asked back nothing is known any more."""
    if seat.staged > 0 and (early := cells - computed(seat.staged, RANKS.index(seat.name[0]))):
        raise Violation(f"sent once computed: {early} (layer, token) of {key} are sent, and are not there")


class Effects:
    """Carries out what a machine commanded besides messages, and raises Violation where that breaks a rule."""

    def __init__(self, berths: Callable[[int], Berths], layers: int = 1) -> None:
        """``layers`` of all ranks together."""
        self.flights = Bits()
        self.copies = Bits()
        self.slots = SlotRules(self.flights, self.copies, berths)
        self.layers = layers

    def producer(self, w: World, rank: int, commands: tuple[Command, ...], alone: bool) -> World:
        """``alone``: the machine was moved by its own deadline or by a loss, not by the consumer's word."""
        for command in commands:
            seat = w.seats[rank]
            if isinstance(command, (Post, PostSlot)):
                w = self._post(w, seat, command)
            elif isinstance(command, Gather):
                w = self._gather(w, seat, command)
            elif isinstance(command, Ended):
                w = w.with_seat(rank, _ended_p(seat, command, alone))
                agree(w.seats, w.env)
            elif isinstance(command, StageEnded):
                w = w.with_seat(rank, seat.but(staged=-2 if seat.staged else 0))
            elif isinstance(command, StageReleased):
                self._check_sources(w, seat)
                w = w.with_seat(rank, seat.but(staged=0))
        return w

    def _gather(self, w: World, seat: Seat, command: Gather) -> World:
        if seat.staged == 0:
            raise Violation(f"sources are held: a part of {command.key} is gathered from blocks that were given back")
        check_computed(seat, command.key, cells_of(command.spans))
        copy = gather_of(seat.name, command, block_of(command.target))
        self.slots.gather(w, copy)
        return w._replace(copies=w.copies | self.copies.of(copy))

    def _post(self, w: World, seat: Seat, post: Post | PostSlot) -> World:
        flight = _flight(seat, post)
        for _, earlier in self.flights.each(w.posted):
            if earlier.key == post.key and earlier.producer == seat.name and earlier.cells & flight.cells:
                raise Violation(f"posted once: {flight.cells} (layer, token) of {post.key} are posted again")
        if isinstance(post, PostSlot):
            self.slots.post(w, flight)
        elif seat.staged == 0:
            raise Violation(f"sources are held: a WRITE of {post.key} is posted from blocks that were given back")
        else:
            check_computed(seat, post.key, flight.cells)
        bit = self.flights.of(flight)
        w = w._replace(air=w.air | bit, untold=w.untold | bit, posted=w.posted | bit)
        self.check_targets(w, bit)
        if isinstance(post, PostSlot):
            self.slots.check(w)
        return w

    def check_targets(self, w: World, mask: int) -> None:
        """A WRITE under way can land at the next moment: the owner of its block must be its own transfer now.

        So it is with a scatter.
        """
        for _, copy in self.copies.each(w.copies):
            if copy.life == w.env.c_name:
                check_block(copy, w.env.owners[copy.block])
        for _, flight in self.flights.each(w.air & mask):
            if flight.staging >= 0:
                continue
            owner = w.env.owners[flight.block]
            if flight.consumer == w.env.c_name and owner != flight.key:
                whose = f"{owner}'s" if owner else "somebody else's"
                raise Violation(
                    f"custody ends on proof: bytes of {flight.key} land in block {BLOCKS[flight.block]}, now {whose}"
                )

    def _check_sources(self, w: World, seat: Seat) -> None:
        for _, flight in self.flights.each(w.air):
            if flight.producer == seat.name and flight.staging < 0:
                raise Violation(f"sources are held: a WRITE of {flight.key} reads blocks that were given back")
        for _, copy in self.copies.each(w.copies):
            if copy.life == seat.name:
                raise Violation(f"sources are held: a gather of {copy.key} reads blocks that were given back")

    def consumer(self, w: World, commands: tuple[Command, ...], arrived: Arrived, landed: Landed) -> World:
        """Blocks that are released are nobody's, and outcomes are compared with what has landed."""
        for command in commands:
            if isinstance(command, Scatter):
                copy = scatter_of(w.env.c_name, command, block_of(command.target))
                self.slots.scatter(copy, landed, w.env.owners[copy.block])
                w = w._replace(copies=w.copies | self.copies.of(copy))
            elif isinstance(command, Ended):
                lands = bool(landed) or bool(w.env.scattered)
                w = w._replace(env=_ended_c(w.env, command, arrived, self.layers, lands))
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


def _flight(seat: Seat, post: Post | PostSlot) -> Flight:
    if isinstance(post, Post):
        return Flight(seat.name, post.peer, post.write, post.key, block_of(post.target), post.complete)
    assert post.complete.credit is not None
    return Flight(
        seat.name, post.peer, post.write, post.key, post.complete.credit.slot, post.complete, post.slot
    )  # fmt: skip


def _ended_c(env: Env, end: Ended, arrived: Arrived, layers: int, lands: bool) -> Env:
    if any(key == end.key for key, _ in env.ended):
        raise Violation(f"one outcome: {end.key} ends a second time at the consumer, {end.outcome.value}")
    how = "rejected" if end.outcome.rejected else "other"
    if end.outcome is Outcome.COMPLETE:
        how = "complete"
        mine = f"{end.key.epoch}{end.key.attempt}".encode()
        here = {(layer, token) for nonce, layer, token in arrived if nonce.startswith(mine)}
        missing = sorted({(layer, token) for layer in range(layers) for token in range(TOKENS)} - here)
        if missing:
            lacks = ", ".join(f"token {token} of layer {layer}" for layer, token in missing)
            raise Violation(f"complete means covered: {end.key} is complete without {lacks}")
        if lands and sum(key == end.key for key, _, _ in env.scattered) != layers * TOKENS:
            raise Violation(f"complete means covered: {end.key} is complete and not in its block yet")
    rest = frozenset(one for one in env.scattered if one[0] != end.key)
    return env.but(ended=env.ended | {(end.key, how)}, scattered=rest)


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
