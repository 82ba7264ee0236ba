"""Every move that the world or an engine may make in a joint state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from walk import facts
from walk.rules import Move, Parcel, Rules
from walk.world import BLOCKS, OTHER_PROMPT, PROMPT, TOKENS, Env, Flight, World, block_table, key_of, owed

Named = tuple[tuple[Any, ...], World]
Engine = tuple[Move, Env]


class Moves:
    """The moves of a set of rules. What an engine may do depends on little, so it is looked up."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._p: dict[tuple[int, Env], list[Engine]] = {}
        self._c: dict[tuple[int, int, Env], list[Engine]] = {}

    def of(self, w: World) -> Iterator[Named]:
        """All moves from a state, each with the state after it. A broken rule raises Violation."""
        r, env = self.rules, w.env
        for move in r.view_c(w.c, w.to_c, env).moves:
            r.trying = ("C", *move.name)
            yield r.trying, r.after_c(w, move, env)
        for move, after in self._consumer(w):
            r.trying = ("C", *move.name)
            made = r.after_c(w, move, after)
            r.effects.check_targets(made, -1)
            yield r.trying, made
        if not env.p_dead:
            for move in r.view_p(w.p, w.to_p, env).moves:
                r.trying = ("P", *move.name)
                yield r.trying, r.after_p(w, move, env)
            for move, after in self._producer(w):
                r.trying = ("P", *move.name)
                yield r.trying, r.after_p(w, move, after)
            yield from _told(r, w)
            yield from _losses(r, w)
        yield from _landings(r, w)
        yield from _proofs(r, w)
        yield from _deaths(r, w)

    def _consumer(self, w: World) -> list[Engine]:
        """What the consumer's engine does, and what the consumer is told about the producer."""
        p_side = 0 if w.env.p_dead else w.p
        known = self._c.get((w.c, p_side, w.env))
        if known is None:
            known = self._c[w.c, p_side, w.env] = list(_consumer_engine(self.rules, w))
        return known

    def _producer(self, w: World) -> list[Engine]:
        known = self._p.get((w.p, w.env))
        if known is None:
            known = self._p[w.p, w.env] = list(_producer_engine(self.rules, w.p, w.env))
        return known


def _consumer_engine(r: Rules, w: World) -> Iterator[Engine]:
    c, env = w.c, w.env
    connected = r.cs.fact(c, facts.reachable_producers)
    most = r.bounds.attempts if env.c_life == 0 else 1
    if env.offered < most and env.p_name in connected:
        yield from _offers(r, c, env)
    for key in r.cs.fact(c, facts.held_keys) if r.bounds.cancels else ():
        yield r.c_move(c, env, ("cancels", key), "cancel", key, 0.0), env
    for peer in connected:
        if r.bounds.losses or not env.lives(peer):
            yield r.c_move(c, env, ("loses", peer), "peer_lost", peer, "no answer", 0.0), env
    if not env.p_dead and env.p_name not in connected and env.c_name in r.ps.fact(w.p, facts.reachable_consumers):
        yield r.c_move(c, env, ("connects",), "connected", env.p_name, 0.0), env


def _offers(r: Rules, c: int, env: Env) -> Iterator[Engine]:
    """Offer a block. One that is held is tried too, and must be refused; free blocks are as good as one another."""
    key = key_of(env.c_life, env.offered)
    for block in range(len(BLOCKS)):
        offering = Offering(key, block, env.p_life)
        if r.cs.step(c, "offer", offering, 0.0).refusal:
            continue
        owners = tuple(key if index == block else owner for index, owner in enumerate(env.owners))
        offered = env.but(offered=env.offered + 1, owners=owners)
        yield r.c_move(c, offered, ("offers", key, BLOCKS[block]), "offer", offering, 0.0), offered
        if env.owners[block] is None:
            return


class Offering(Order):
    """An order that can be looked up: the walk remembers steps by their arguments."""

    name: tuple[Any, ...]

    def __new__(cls, *_: Any) -> Offering:
        return object.__new__(cls)

    def __init__(self, key: Any, block: int, p_life: int) -> None:
        super().__init__(key, block_table(block), PROMPT, TOKENS, 0, TOKENS, {f"p{p_life}": owed(0, TOKENS, TOKENS)})
        object.__setattr__(self, "name", (key, block, p_life))

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Offering) and self.name == other.name

    def __reduce__(self) -> Any:
        return Offering, self.name


def _producer_engine(r: Rules, p: int, env: Env) -> Iterator[Engine]:
    has_stage = r.ps.fact(p, facts.has_stage)
    if env.staged >= 0 and (has_stage or env.stagings < r.bounds.stagings):
        yield from _stagings(r, p, env if has_stage else env.but(stagings=env.stagings + 1))
    if env.staged > 0 and env.preempted < r.bounds.preemptions:
        waiting = env.but(staged=-1, preempted=env.preempted + 1)
        yield r.p_move(p, env, ("preempts",), "preempt", "t"), waiting
    if has_stage and r.bounds.cancels:
        yield r.p_move(p, env, ("unstages",), "unstage", "t", 0.0), env
    if r.bounds.refusals and not env.closing:
        yield r.p_move(p, env, ("closes",), "close", 0.0), env.but(closing=True)
    if env.c_name not in r.ps.fact(p, facts.reachable_consumers):
        yield r.p_move(p, env, ("connects",), "connected", env.c_name, owed, 0.0), env


def _stagings(r: Rules, p: int, env: Env) -> Iterator[Engine]:
    for prompt in (PROMPT, OTHER_PROMPT) if r.bounds.refusals else (PROMPT,):
        for ready in range(env.staged + 1, TOKENS + 1):
            args = ("t", block_table(0), prompt, TOKENS, ready, 0.0)
            if (ready == TOKENS or r.bounds.parts > 1) and not r.ps.step(p, "stage", *args).refusal:
                name = ("stages", ready, "tokens" if prompt == PROMPT else "tokens of another prompt")
                yield r.p_move(p, env, name, "stage", *args), env.but(staged=ready)


def _told(r: Rules, w: World) -> Iterator[Named]:
    """The producer is told how a WRITE ended: well, once its bytes are there; in error at any time."""
    for bit, flight in r.effects.flights.each(w.untold):
        told = w._replace(untold=w.untold & ~bit)
        if not w.air & bit:
            name = ("P", "told done", flight)
            yield name, r.after_p(told, r.p_move(w.p, w.env, name, "write_done", flight.write, 0.0), w.env)
        if r.bounds.write_errors:
            name = ("P", "told failed", flight)
            failed = ("write_failed", flight.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
            yield name, r.after_p(told, r.p_move(w.p, w.env, name, *failed), w.env)
        if r.bounds.write_errors and w.air & bit:
            name = ("P", "told it never left", flight)
            never = told._replace(air=w.air & ~bit)
            yield name, r.after_p(never, r.p_move(w.p, w.env, name, *failed, False), w.env)


def _landings(r: Rules, w: World) -> Iterator[Named]:
    """Bytes land. Those that nobody waits for any more, in a memory that is gone, need not."""
    for bit, flight in r.effects.flights.each(w.air):
        parcel = Parcel(f"p{flight.p_life}", f"c{flight.c_life}", flight.complete)
        if flight.c_life == w.env.c_life:
            yield ("bytes land", flight), w._replace(air=w.air & ~bit, to_c=w.to_c | r.net.of(parcel))
        elif w.untold & bit:
            yield ("bytes land nowhere", flight), w._replace(air=w.air & ~bit)


def _losses(r: Rules, w: World) -> Iterator[Named]:
    """The producer is told that it lost a consumer. Messages of a life that has ended are strays from then on."""
    for peer in r.ps.fact(w.p, facts.reachable_consumers):
        lives = w.env.lives(peer)
        if r.bounds.losses or not lives:
            name = ("P", "loses", peer)
            move = r.p_move(w.p, w.env, name, "peer_lost", peer, "no answer", 0.0, alone=True)
            heard = w if lives else w._replace(to_p=_not_from(r, w.to_p, peer))
            yield name, r.after_p(heard, move, w.env)


def _not_from(r: Rules, messages: int, sender: str) -> int:
    return r.net.where(messages, lambda parcel: parcel.sender != sender)


def _proofs(r: Rules, w: World) -> Iterator[Named]:
    """The transport tells the truth: of an epoch that is gone, once what was under way has landed or is lost.

    That bytes are lost is a move only here: as long as they may still land, the world can do more.
    """
    for peer in r.cs.fact(w.c, facts.known_producers):
        if not w.env.lives(peer):
            name = ("C", "has proof", peer)
            move = r.c_move(w.c, w.env, name, "writes_ended", peer, 0.0)
            air = w.air if r.bounds.death_is_proof else _not_between(r, w.air, peer, w.env.c_name)
            yield name, r.after_c(w._replace(air=air, to_c=_not_from(r, w.to_c, peer)), move, w.env)
    for peer in () if w.env.p_dead else r.ps.fact(w.p, facts.known_consumers):
        if not w.env.lives(peer):
            name = ("P", "has proof", peer)
            move = r.p_move(w.p, w.env, name, "writes_ended", peer, 0.0, alone=True)
            rest = w._replace(air=_not_between(r, w.air, w.env.p_name, peer), to_p=_not_from(r, w.to_p, peer))
            yield name, r.after_p(rest, move, w.env)


def _not_between(r: Rules, air: int, producer: str, consumer: str) -> int:
    pair = (producer, consumer)
    return r.effects.flights.where(air, lambda flight: (f"p{flight.p_life}", f"c{flight.c_life}") != pair)


def _deaths(r: Rules, w: World) -> Iterator[Named]:
    env = w.env
    if env.p_dead:
        born = env.but(p_life=env.p_life + 1, p_dead=False, stagings=0, preempted=0)
        yield ("P starts again",), w._replace(p=r.new_p(born.p_life), env=born)
    elif env.p_life < r.bounds.p_restarts:
        yield ("P is killed",), _killed_p(r, w)
    if env.c_life < r.bounds.c_restarts:
        yield ("C is killed and starts again",), _killed_c(r, w)


def _killed_p(r: Rules, w: World) -> World:
    """A producer dies. Its bytes may go on travelling; what its memory held is gone."""
    air = r.effects.flights.where(w.air, lambda flight: flight.c_life == w.env.c_life)
    dead = w.env.but(p_dead=True, staged=0, closing=False, ended_p=frozenset(), ended_c=frozenset())
    return w._replace(p=-1, to_p=0, air=air, untold=0, posted=0, env=dead)


def _killed_c(r: Rules, w: World) -> World:
    """A consumer dies, and the next life starts with nothing: no WRITE to the life before reaches its memory."""
    present = -1 if w.env.p_dead else w.env.p_life
    air = r.effects.flights.where(w.air, lambda flight: flight.p_life == present)
    first = Env.first()
    born = w.env.but(
        c_life=w.env.c_life + 1,
        offered=0,
        owners=first.owners,
        ended_p=first.ended_p,
        ended_c=first.ended_c,
    )
    return w._replace(c=r.new_c(), to_c=0, air=air, env=born)


__all__ = ["Flight", "Moves"]
