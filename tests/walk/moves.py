"""Every move that the world or an engine may make in a joint state."""

from __future__ import annotations

from collections.abc import Iterator

from pushkv.core.messages import TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order

from walk.world import FREE, PROMPT, TOKENS, Flight, Rules, World, blocks, land, order, owed

Move = tuple[str, World]


def moves(r: Rules, w: World) -> Iterator[Move]:
    """All moves from a state, each with the state after it. A broken rule raises Violation."""
    yield from _deliveries(r, w)
    yield from _timers(r, w)
    yield from _consumer_engine(r, w)
    if not w.p_dead:
        yield from _producer_engine(r, w)
    yield from _wire(r, w)
    yield from _losses(r, w)
    yield from _deaths(r, w)


def _deliveries(r: Rules, w: World) -> Iterator[Move]:
    for message in w.to_c:
        yield f"C gets {message}", r.after_c(w, r.cs.step(w.c, "receive", f"p{w.p_life}", message, 0.0))
    for message in w.to_p if not w.p_dead else ():
        yield f"P gets {message}", r.after_p(w, r.ps.step(w.p, "receive", f"c{w.c_life}", message, 0.0))


def _timers(r: Rules, w: World) -> Iterator[Move]:
    for timer in r.cs.timers(w.c):
        yield f"C timer {timer}", r.after_c(w, r.cs.step(w.c, "fire", timer, 0.0))
    if not w.p_dead:
        for timer in r.ps.timers(w.p):
            after = w._replace(staged=-2) if timer[0] == "stage" else w
            yield f"P timer {timer}", r.after_p(after, r.ps.step(w.p, "fire", timer, 0.0))


def _consumer_engine(r: Rules, w: World) -> Iterator[Move]:
    key = TransferKey("t", "e", f"c{w.c_life}", 0, w.offered)
    most = r.bounds.attempts if w.c_life == 0 else 1
    if w.offered < most and not w.c_lost and not w.p_dead:
        for block in ("A", "B") if w.offered else ("A",):
            yield from _offer(r, w, key, block)
    for attempt in range(w.offered if r.bounds.cancels else 0):
        old = TransferKey("t", "e", f"c{w.c_life}", 0, attempt)
        if r.cs.fact(w.c, f"holds {attempt}", lambda machine, old=old: machine.holds(old)):
            yield f"C cancels {old}", r.after_c(w, r.cs.step(w.c, "cancel", old, 0.0))


def _offer(r: Rules, w: World, key: TransferKey, block: str) -> Iterator[Move]:
    result = r.cs.step(w.c, "offer", Offering(order(key, block, w.p_life)), 0.0)
    if result[2]:
        return
    owners = tuple(key if name == block else owner for name, owner in zip("ABC", w.owners, strict=True))
    yield f"C offers {key} block {block}", r.after_c(w._replace(offered=w.offered + 1, owners=owners), result)


class Offering(Order):
    """An order that can be looked up: the walk remembers steps by their arguments."""

    def __new__(cls, plain: Order) -> Offering:
        return object.__new__(cls)

    def __init__(self, plain: Order) -> None:
        for name in Order.__dataclass_fields__:
            object.__setattr__(self, name, getattr(plain, name))

    def __hash__(self) -> int:
        return hash((self.key, self.into, tuple(self.owed)))

    def __eq__(self, other: object) -> bool:
        mine = (self.key, self.into, tuple(self.owed))
        return isinstance(other, Offering) and mine == (other.key, other.into, tuple(other.owed))

    def __reduce__(self) -> tuple[type[Order], tuple[object, ...]]:
        return Order, tuple(getattr(self, name) for name in Order.__dataclass_fields__)


def _producer_engine(r: Rules, w: World) -> Iterator[Move]:
    for ready in range(w.staged + 1, TOKENS + 1) if w.staged >= 0 else ():
        if ready < TOKENS and r.bounds.parts < 2:
            continue
        result = r.ps.step(w.p, "stage", "t", blocks("A"), PROMPT, TOKENS, ready, 0.0)
        if not result[2]:
            yield f"P stages {ready}", r.after_p(w._replace(staged=ready), result)
    if w.staged > 0:
        if not w.preempted and r.bounds.preemptions:
            yield "P preempts", r.after_p(w._replace(staged=-1, preempted=True), r.ps.step(w.p, "preempt", "t"))
        if r.bounds.cancels:
            yield "P unstages", r.after_p(w._replace(staged=-2), r.ps.step(w.p, "unstage", "t", 0.0))


def _wire(r: Rules, w: World) -> Iterator[Move]:
    for flight in w.flights:
        if not flight.landed:
            yield f"bytes land: {flight}", land(w, flight)
        if flight.told or w.p_dead or flight.life != w.p_life:
            continue
        told = w.flights - {flight}
        if flight.landed:
            yield f"P told done {flight.write}", r.after_p(
                w._replace(flights=told), r.ps.step(w.p, "write_done", flight.write, 0.0)
            )
        if r.bounds.write_errors:
            after = w._replace(flights=told if flight.landed else told | {flight._replace(told=True)})
            failed = ("write_failed", flight.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
            yield f"P told failed {flight.write}", r.after_p(after, r.ps.step(w.p, *failed))


def _losses(r: Rules, w: World) -> Iterator[Move]:
    if r.bounds.losses or w.p_dead:
        if not w.c_lost:
            lost = ("peer_lost", f"p{w.p_life}", "no answer", 0.0)
            yield "C loses P", r.after_c(w._replace(c_lost=True), r.cs.step(w.c, *lost))
    if r.bounds.losses and not w.p_lost and not w.p_dead:
        lost = ("peer_lost", f"c{w.c_life}", "no answer", 0.0)
        yield "P loses C", r.after_p(w._replace(p_lost=True), r.ps.step(w.p, *lost))
    if (w.c_lost or w.p_lost) and not w.p_dead:
        after = r.after_p(w._replace(p_lost=False), r.ps.step(w.p, "connected", f"c{w.c_life}", owed, 0.0))
        again = after._replace(c_lost=False)
        yield "both connect again", r.after_c(again, r.cs.step(w.c, "connected", f"p{w.p_life}", 0.0))
    yield from _proofs(r, w)


def _proofs(r: Rules, w: World) -> Iterator[Move]:
    """The transport tells the truth: a proof is given only when nothing of that epoch can land."""
    for life in range(w.p_life + 1):
        gone = life < w.p_life or w.p_dead
        travelling = any(f.life == life and not f.landed and f.to_life == w.c_life for f in w.flights)
        asked = ("proof", f"p{life}") in r.cs.timers(w.c)
        if gone and asked and (not travelling or r.bounds.death_is_proof):
            yield f"C proof p{life}", r.after_c(w, r.cs.step(w.c, "writes_ended", f"p{life}", 0.0))
        if gone and asked and travelling:
            rest = frozenset(f for f in w.flights if f.life != life or f.to_life != w.c_life)
            rebuilt = r.cs.step(w.c, "writes_ended", f"p{life}", 0.0)
            yield f"C rebuilds its agent, proof p{life}", r.after_c(w._replace(flights=rest), rebuilt)
    for life in range(w.c_life + 1):
        if not w.p_dead and ("proof", f"c{life}") in r.ps.timers(w.p) and (life < w.c_life or w.p_lost):
            rest = frozenset(f for f in w.flights if f.to_life != life or f.life != w.p_life or f.landed)
            if life == w.c_life and rest != w.flights:
                continue
            proven = r.ps.step(w.p, "writes_ended", f"c{life}", 0.0)
            if life < w.c_life:
                yield f"P rebuilds its agent, proof c{life}", r.after_p(w._replace(flights=rest), proven)


def _deaths(r: Rules, w: World) -> Iterator[Move]:
    if not w.p_dead and w.p_life < r.bounds.p_restarts:
        kept = frozenset(f._replace(told=True) for f in w.flights if not f.landed and r.bounds.death == "tcp")
        yield "P is killed", w._replace(p_dead=True, flights=kept, to_p=frozenset(), version=w.version + 1)
    if w.p_dead:
        fresh = w._replace(p=r._new_p(w.p_life + 1, w.c_life), p_life=w.p_life + 1, p_dead=False, c_lost=False)
        fresh = fresh._replace(p_lost=False, to_p=frozenset(), to_c=frozenset(), staged=0, ended_p=frozenset(), posted=frozenset())
        lost = r.cs.step(w.c, "peer_lost", f"p{w.p_life}", "a new epoch at its address", 0.0)
        after = r.after_c(fresh, lost)._replace(to_p=frozenset())
        yield "P restarts", r.after_c(after, r.cs.step(after.c, "connected", f"p{after.p_life}", 0.0))
    if w.c_life < r.bounds.c_restarts and not w.p_dead:
        yield "C is killed and restarts", _consumer_restarts(r, w)


def _consumer_restarts(r: Rules, w: World) -> World:
    life = w.c_life + 1
    fresh = w._replace(c_life=life, owners=(FREE, FREE, FREE), landed=frozenset(), offered=0, ended_c=frozenset(), c_lost=False)
    fresh = fresh._replace(to_p=frozenset(), to_c=frozenset(), c=r._new_c(life), p_lost=False)
    after = r.after_p(fresh, r.ps.step(w.p, "peer_lost", f"c{w.c_life}", "a new epoch", 0.0))
    after = r.after_p(after, r.ps.step(after.p, "connected", f"c{life}", owed, 0.0))._replace(to_c=frozenset())
    return r.after_c(after, r.cs.step(after.c, "connected", f"p{w.p_life}", 0.0))


__all__ = ["Flight", "moves"]
