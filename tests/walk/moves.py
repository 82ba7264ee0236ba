"""Every move that the world or an engine may make in a joint state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pushkv.core.messages import Complete, Ring
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from walk import facts
from walk.cells import HALF, TOKENS, Owes
from walk.rules import Move, Names, Parcel, Rules
from walk.slots import Copy
from walk.world import (
    BLOCKS,
    OTHER_PROMPT,
    PROMPT,
    RANKS,
    Env,
    Flight,
    Seat,
    World,
    alive,
    block_table,
    key_of,
    put,
)

Named = tuple[tuple[Any, ...], World]
"""Who, what, and what more there is to say; and what becomes of the world."""


class Moves:
    """The moves of a set of rules. What an engine may do depends on little, so it is looked up."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._p: dict[tuple[int, Seat, str], list[tuple[Move, Seat]]] = {}
        self._c: dict[tuple[int, Names, Names, Env], list[tuple[Move, Env]]] = {}

    def of(self, w: World) -> Iterator[Named]:
        """All moves from a state, each with the state after it. A broken rule raises Violation."""
        yield from self._consumer(w)
        for rank, seat in enumerate(w.seats):
            if seat.alive:
                yield from self._producer(w, rank, seat)
                yield from _told(self.rules, w, rank)
                yield from _losses(self.rules, w, rank)
        yield from _landings(self.rules, w)
        if w.copies:
            yield from _copies(self.rules, w)
        yield from _proofs(self.rules, w)
        yield from _deaths(self.rules, w)

    def _consumer(self, w: World) -> Iterator[Named]:
        r, env = self.rules, w.env
        for move in r.view_c(w.c, w.to_c, alive(w.seats), env).moves:
            r.trying = (env.c_name, *move.name)
            yield r.trying, r.after_c(w, move, env)
        for move, after in self._consumer_engine(w):
            r.trying = (env.c_name, *move.name)
            made = r.after_c(w, move, after)
            r.effects.check_targets(made, -1)
            yield r.trying, made

    def _producer(self, w: World, rank: int, seat: Seat) -> Iterator[Named]:
        r, p = self.rules, w.ps[rank]
        for move in r.view_p(p, w.to_p, seat, w.env).moves:
            r.trying = (seat.name, *move.name)
            yield r.trying, r.after_p(w, rank, move, seat)
        known = self._p.get((p, seat, w.env.c_name))
        if known is None:
            known = self._p[p, seat, w.env.c_name] = list(_producer_engine(r, p, rank, seat, w.env))
        for move, after in known:
            r.trying = (seat.name, *move.name)
            yield r.trying, r.after_p(w, rank, move, after)

    def _consumer_engine(self, w: World) -> list[tuple[Move, Env]]:
        """What the consumer's engine does, and what the consumer is told about the producers."""
        others, ready = alive(w.seats), _ready(self.rules, w)
        known = self._c.get((w.c, others, ready, w.env))
        if known is None:
            known = self._c[w.c, others, ready, w.env] = list(_consumer_engine(self.rules, w, others, ready))
        return known


def _ready(r: Rules, w: World) -> Names:
    """The ranks that take the consumer for connected."""
    return tuple(
        seat.name
        for p, seat in zip(w.ps, w.seats, strict=True)
        if seat.alive and w.env.c_name in r.ps.fact(p, facts.reachable_consumers)
    )


def _consumer_engine(r: Rules, w: World, others: Names, ready: Names) -> Iterator[tuple[Move, Env]]:
    c, env = w.c, w.env
    connected = r.cs.fact(c, facts.reachable_producers)
    most = r.bounds.attempts if env.life == 0 else 1
    if env.offered < most and all(seat.name in connected for seat in w.seats):
        yield from _offers(r, w, others)
    for key in r.cs.fact(c, facts.held_keys) if r.bounds.cancels else ():
        yield r.c_move(c, env, others, ("cancels", key), "cancel", key, 0.0), env
    for peer in connected:
        if r.bounds.losses or peer not in others:
            yield r.c_move(c, env, others, ("loses", peer), "peer_lost", peer, "no answer", 0.0), env
    for peer in ready:
        if peer not in connected:
            yield r.c_move(c, env, others, ("connects", peer), "connected", peer, 0.0), env


def _offers(r: Rules, w: World, others: Names) -> Iterator[tuple[Move, Env]]:
    """Offer a block. One that is held is tried too, and must be refused; free blocks are as good as one another."""
    c, env = w.c, w.env
    key, peers = key_of(env.c_name, env.offered), tuple(seat.name for seat in w.seats)
    for block in range(len(BLOCKS)):
        offering = Offering(key, block, peers, r.bounds.slots > 0, r.bounds.layers)
        if r.cs.step(c, "offer", offering, 0.0).refusal:
            continue
        offered = env.but(offered=env.offered + 1, owners=put(env.owners, block, key))
        yield r.c_move(c, env, others, ("offers", key, BLOCKS[block]), "offer", offering, 0.0), offered
        if env.owners[block] is None:
            return


class Offering(Order):
    """An order that can be looked up: the walk remembers steps by their arguments."""

    name: tuple[Any, ...]

    def __new__(cls, *_: Any) -> Offering:
        return object.__new__(cls)

    def __init__(self, key: Any, block: int, peers: Names, lands: bool, layers: int) -> None:
        owed = {peer: Owes(RANKS.index(peer[0]), layers)(0, TOKENS) for peer in peers}
        into = Ring(block_table(block).tables) if lands else block_table(block)
        super().__init__(key, into, PROMPT, TOKENS, 0, TOKENS, owed)
        object.__setattr__(self, "name", (key, block, peers, lands, layers))

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offering) and self.name == other.name

    def __reduce__(self) -> Any:
        return Offering, self.name


def _producer_engine(r: Rules, p: int, rank: int, seat: Seat, env: Env) -> Iterator[tuple[Move, Seat]]:
    has_stage = r.ps.fact(p, facts.has_stage)
    if seat.staged >= 0 and (has_stage or seat.stagings < r.bounds.stagings):
        yield from _stagings(r, p, seat if has_stage else seat.but(stagings=seat.stagings + 1), env)
    if rank == 0 and seat.staged > 0 and seat.preempted < r.bounds.preemptions:
        waiting = seat.but(staged=-1, preempted=seat.preempted + 1)
        yield r.p_move(p, seat, env, ("preempts",), "preempt", "t"), waiting
    if has_stage and r.bounds.cancels:
        yield r.p_move(p, seat, env, ("unstages",), "unstage", "t", 0.0), seat
    if r.bounds.refusals and not seat.closing:
        yield r.p_move(p, seat, env, ("closes",), "close", 0.0), seat.but(closing=True)
    if env.c_name not in r.ps.fact(p, facts.reachable_consumers):
        yield r.p_move(p, seat, env, ("connects",), *r.connecting(env, rank)), seat


def _stagings(r: Rules, p: int, seat: Seat, env: Env) -> Iterator[tuple[Move, Seat]]:
    for prompt in (PROMPT, OTHER_PROMPT) if r.bounds.refusals else (PROMPT,):
        what = "tokens" if prompt == PROMPT else "tokens of another prompt"
        until, ready = divmod(seat.staged, HALF)
        for more in range(ready + 1, TOKENS + 1) if r.bounds.parts > 1 else (TOKENS,) * (ready < TOKENS):
            args = ("t", block_table(0), prompt, TOKENS, more, 0.0)
            if not r.ps.step(p, "stage", *args).refusal:
                yield r.p_move(p, seat, env, ("stages", more, what), "stage", *args), seat.but(staged=more)
        for more in range(max(until, ready) + 1, TOKENS + 1) if r.bounds.layers > 1 else ():
            args = ("t", block_table(0), prompt, TOKENS, more, 0.0, 1, None, (1,))
            if (more == TOKENS or r.bounds.parts > 1) and not r.ps.step(p, "stage", *args).refusal:
                name = ("stages a layer of", more, what)
                yield r.p_move(p, seat, env, name, "stage", *args), seat.but(staged=HALF * more + ready)


def _told(r: Rules, w: World, rank: int) -> Iterator[Named]:
    """A producer is told how a WRITE ended: well, once its bytes are there; in error at any time."""
    p, seat = w.ps[rank], w.seats[rank]
    for bit, flight in r.effects.flights.each(w.untold):
        if flight.producer != seat.name:
            continue
        told = w._replace(untold=w.untold & ~bit)
        if not w.air & bit:
            done = r.p_move(p, seat, w.env, ("told done", flight), "write_done", flight.write, 0.0)
            yield r.trying, r.after_p(told, rank, done, seat)
        if r.bounds.write_errors:
            args = ("write_failed", flight.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
            failed = r.p_move(p, seat, w.env, ("told failed", flight), *args)
            yield r.trying, r.after_p(told, rank, failed, seat)
        if r.bounds.write_errors and w.air & bit:
            stayed = r.p_move(p, seat, w.env, ("told it never left", flight), *args, False)
            yield r.trying, r.after_p(told._replace(air=w.air & ~bit), rank, stayed, seat)


def _landings(r: Rules, w: World) -> Iterator[Named]:
    """Bytes land. Those that nobody waits for any more, in a memory that is gone, need not."""
    for bit, flight in r.effects.flights.each(w.air):
        parcel = Parcel(flight.producer, flight.consumer, flight.complete)
        if flight.consumer == w.env.c_name:
            yield ("bytes", "land", flight), w._replace(air=w.air & ~bit, to_c=w.to_c | r.net.of(parcel))
        elif w.untold & bit:
            yield ("bytes", "land nowhere", flight), w._replace(air=w.air & ~bit)


def _copies(r: Rules, w: World) -> Iterator[Named]:
    """A gather or a scatter ends, well or not."""
    errors = ("", "broke") if r.bounds.copy_errors else ("",)
    for bit, copy in r.effects.copies.each(w.copies):
        over = w._replace(copies=w.copies & ~bit)
        for error in errors:
            how = "ends" if not error else "fails"
            if copy.gathers:
                rank = RANKS.index(copy.life[0])
                args = ("gathered", copy.number, 0.0, error)
                move = r.p_move(w.ps[rank], w.seats[rank], w.env, (f"gather {how}", copy), *args)
                yield r.trying, r.after_p(over, rank, move, w.seats[rank])
            else:
                call = ("scattered", copy.slot, copy.number, 0.0, error)
                scatter = r.c_move(w.c, w.env, alive(w.seats), (f"scatter {how}", copy), *call)
                yield r.trying, r.after_c(over, scatter, w.env if error else _scattered(w.env, copy))


def _scattered(env: Env, copy: Copy) -> Env:
    """The consumer with these tokens in their block, where their transfer has no outcome yet."""
    if any(key == copy.key for key, _ in env.ended):
        return env
    spans = copy.spans
    tokens = {(copy.key, one.layer_start, n) for one in spans for n in range(one.token_start, one.token_stop)}
    return env.but(scattered=env.scattered | tokens)


def _losses(r: Rules, w: World, rank: int) -> Iterator[Named]:
    """A producer is told that it lost a consumer. Messages of a life that has ended are strays from then on."""
    p, seat = w.ps[rank], w.seats[rank]
    for peer in r.ps.fact(p, facts.reachable_consumers):
        lives = w.lives(peer)
        if r.bounds.losses or not lives:
            move = r.p_move(p, seat, w.env, ("loses", peer), "peer_lost", peer, "no answer", 0.0, alone=True)
            heard = w if lives else w._replace(to_p=_without(r, w.to_p, peer, seat.name))
            yield r.trying, r.after_p(heard, rank, move, seat)


def _without(r: Rules, messages: int, sender: str, receiver: str, *but: type) -> int:
    """The messages without those from one to the other, but for some types: what has landed is known by them."""

    def stays(parcel: Parcel) -> bool:
        return (parcel.sender, parcel.receiver) != (sender, receiver) or isinstance(parcel.message, but)

    return r.net.where(messages, stays)


def _proofs(r: Rules, w: World) -> Iterator[Named]:
    """The transport tells the truth: of an epoch that is gone, once what was under way has landed or is lost.

    That bytes are lost is a move only here: as long as they may still land, the world can do more.
    """
    env = w.env
    for peer in r.cs.fact(w.c, facts.known_producers):
        if not w.lives(peer):
            move = r.c_move(w.c, env, alive(w.seats), ("has proof", peer), "writes_ended", peer, 0.0)
            air = w.air if r.bounds.death_is_proof else _not_between(r, w.air, peer, env.c_name)
            rest = w._replace(air=air, to_c=_without(r, w.to_c, peer, env.c_name, Complete))
            yield r.trying, r.after_c(rest, move, env)
    for rank, (p, seat) in enumerate(zip(w.ps, w.seats, strict=True)):
        for peer in r.ps.fact(p, facts.known_consumers) if seat.alive else ():
            if not w.lives(peer):
                move = r.p_move(p, seat, env, ("has proof", peer), "writes_ended", peer, 0.0, alone=True)
                air = _not_between(r, w.air, seat.name, peer)
                rest = w._replace(air=air, to_p=_without(r, w.to_p, peer, seat.name))
                yield r.trying, r.after_p(rest, rank, move, seat)


def _not_between(r: Rules, air: int, producer: str, consumer: str) -> int:
    pair = (producer, consumer)
    return r.effects.flights.where(air, lambda flight: (flight.producer, flight.consumer) != pair)


def _deaths(r: Rules, w: World) -> Iterator[Named]:
    for rank, seat in enumerate(w.seats):
        if not seat.alive:
            born = Seat.first(rank, seat.life + 1)
            ps, seats = put(w.ps, rank, r.new_p(born, rank)), put(w.seats, rank, born)
            yield (seat.name, "starts again"), w._replace(ps=ps, seats=seats)
        elif rank == 0 and seat.life < r.bounds.p_restarts:
            yield (seat.name, "is killed"), _killed_p(r, w, rank)
    if w.env.life < r.bounds.c_restarts:
        yield (w.env.c_name, "is killed and starts again"), _killed_c(r, w)


def _killed_p(r: Rules, w: World, rank: int) -> World:
    """A producer dies. Its bytes may go on travelling; what its memory held is gone."""
    name, flights = w.seats[rank].name, r.effects.flights
    return w._replace(
        ps=put(w.ps, rank, -1),
        to_p=w.to_p & ~r.net.to(name),
        air=flights.where(w.air, lambda flight: flight.producer != name or flight.consumer == w.env.c_name),
        untold=flights.where(w.untold, lambda flight: flight.producer != name),
        posted=flights.where(w.posted, lambda flight: flight.producer != name),
        copies=r.effects.copies.where(w.copies, lambda copy: copy.life != name),
        seats=put(w.seats, rank, w.seats[rank].but(alive=False, staged=0, closing=False, ended=frozenset())),
    )


def _killed_c(r: Rules, w: World) -> World:
    """A consumer dies, and the next life starts with nothing: no WRITE to the life before reaches its memory."""
    others = alive(w.seats)
    return w._replace(
        c=r.new_c(),
        to_c=0,
        air=r.effects.flights.where(w.air, lambda flight: flight.producer in others),
        copies=r.effects.copies.where(w.copies, lambda copy: copy.life in others),
        seats=tuple(seat.but(ended=frozenset()) for seat in w.seats),
        env=Env.first(w.env.life + 1),
    )


__all__ = ["Flight", "Moves"]
