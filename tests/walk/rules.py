"""The machines in the hostile world: what each may do on its own, and the normal form of a joint state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from pushkv.core.commands import Command, Post, PostSlot, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Complete, Offer
from pushkv.core.producer import ProducerMachine
from pushkv.core.ring import SlotPool
from walk import facts, slots
from walk.bits import Bits
from walk.cells import Owes, cells_of
from walk.errors import Violation
from walk.machines import Machines
from walk.timing import check_consumer, check_producer, consumer_due, producer_due
from walk.world import (
    Arrived,
    Bounds,
    Effects,
    Env,
    Landed,
    Seat,
    World,
    alive,
    nonce_of,
    plain_message,
    put,
)

LIMITS = Limits(resend=1.0, resend_most=1.0, insist_after=0, window=4)
M = TypeVar("M")
Names: TypeAlias = tuple[str, ...]


class Move(NamedTuple):
    """One step of one machine: its state after, the messages it sends, and what else it commands.

    ``alone``: it moved by its own deadline or by a loss, not by the other side's word.
    """

    name: tuple[Any, ...]
    after: int
    sent: int
    commands: tuple[Command, ...]
    alone: bool = False


class View(NamedTuple):
    """What a machine may do on its own with the messages that may reach it."""

    idle: int
    """Messages that can do nothing any more."""
    free: int
    """Messages that it may send without any change of its state."""
    moves: tuple[Move, ...]


class Parcel(NamedTuple):
    """A message in the network."""

    sender: str
    receiver: str
    message: Any


class Net(Bits):
    """The messages there are, also by whom they are for."""

    def __init__(self) -> None:
        super().__init__()
        self._to: dict[str, int] = {}

    def add(self, thing: Any) -> int:
        """Give a new parcel the next bit."""
        bit = super().add(thing)
        self._to[thing.receiver] = self._to.get(thing.receiver, 0) | bit
        return bit

    def to(self, name: str) -> int:
        """The mask of all that are for an epoch."""
        return self._to.get(name, 0)


class Side(Generic[M]):
    """One side's machine: its steps as moves.

    ``exact``: forget no message, however useless, so that a machine that is wrong about it is found out.
    """

    def __init__(
        self,
        machines: Machines[M],
        net: Net,
        due: Callable[[M], tuple[Any, ...]],
        idle: Callable[[M, str, Any], Any],
        exact: bool,
    ) -> None:
        self.machines = machines
        self._net = net
        self._due = due
        self._idle = idle
        self._exact = exact
        self._moves: dict[tuple[int, Names, tuple[Any, ...]], Move] = {}
        self._arrivals: dict[tuple[int, int, Names], tuple[Move, Any]] = {}

    def move(
        self, state: int, me: str, others: Names, name: tuple[Any, ...], call: tuple[Any, ...], alone: bool = False
    ) -> Move:
        """A call of a method as a move; what is sent to a peer that is not among the ``others`` is lost."""
        known = self._moves.get((state, others, call))
        if known is None:
            step = self.machines.step(state, *call)
            sent = 0
            for command in step.commands:
                if isinstance(command, Send) and command.peer in others:
                    sent |= self._net.of(Parcel(me, command.peer, plain_message(command.message)))
            commands = tuple(command for command in step.commands if not isinstance(command, Send))
            known = self._moves[state, others, call] = Move(name, step.after, sent, commands, alone)
        return known

    def view(self, state: int, inbox: int, me: str, others: Names) -> View:
        """The machine's own moves in a state with these messages on their way to it."""
        idle, twins, moves = 0, set(), []
        for bit, parcel in self._net.each(inbox):
            move, why = self._arrival(state, bit, parcel, me, others)
            moves.append(move)
            if why is True or why in twins:
                idle |= bit
                self._must_idle(state, move, parcel)
            elif why:
                twins.add(why)
        for timer in self.machines.fact(state, self._due):
            name = ("timer", *timer)
            moves.append(self.move(state, me, others, name, ("fire", timer, 0.0), timer[0] == "deadline"))
        return _view(state, 0 if self._exact else idle, moves)

    def _arrival(self, state: int, bit: int, parcel: Parcel, me: str, others: Names) -> tuple[Move, Any]:
        known = self._arrivals.get((state, bit, others))
        if known is None:
            name = ("gets", parcel.sender, parcel.message)
            call = ("receive", parcel.sender, parcel.message, 0.0)
            known = self.move(state, me, others, name, call), self._why_idle(state, parcel)
            self._arrivals[state, bit, others] = known
        return known

    def _why_idle(self, state: int, parcel: Parcel) -> Any:
        def why(machine: M) -> Any:
            return self._idle(machine, parcel.sender, parcel.message)

        why.__name__ = f"idle {self._net.of(parcel)}"
        return self.machines.fact(state, why)

    def _must_idle(self, state: int, move: Move, parcel: Parcel) -> None:
        if not self._exact and (move.after != state or move.commands):
            raise AssertionError(f"the walk takes {parcel} for idle, and it is not")


class Rules:
    """The machines and the world's effects. Subclasses put a mutant in a machine's place."""

    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine

    def __init__(self, bounds: Bounds, exact: bool = False) -> None:
        self.bounds = bounds
        self.exact = exact
        self.trying: tuple[Any, ...] = ()
        """The move that is being made, for who wants to know which one broke a rule."""
        self.net = Net()
        self.effects = Effects(lambda c: self.cs.fact(c, slots.berths), bounds.layers * bounds.ranks)
        self.ps: Machines[ProducerMachine] = Machines(check_producer)
        self.cs: Machines[ConsumerMachine] = Machines(check_consumer)
        self.p = Side(self.ps, self.net, producer_due, facts.idle_at_producer, exact)
        self.c = Side(self.cs, self.net, consumer_due, facts.idle_at_consumer, exact)
        self._views_p: dict[tuple[int, int, str], View] = {}
        self._views_c: dict[tuple[int, int, Names], View] = {}
        self._arrived: dict[int, tuple[Arrived, Landed]] = {}
        self._sending: dict[tuple[tuple[int, ...], int], int] = {}
        self._compared: dict[tuple[Any, ...], tuple[tuple[Seat, ...], Env]] = {}

    def owes(self, rank: int) -> Owes:
        """What a rank owes."""
        return Owes(rank, self.bounds.layers)

    def new_p(self, seat: Seat, rank: int) -> int:
        """A producer that has just started."""
        staging = SlotPool(self.bounds.staging if self.bounds.slots else 0)
        return self.ps.number(self.producer(rank, seat.name, LIMITS, slots=staging))

    def new_c(self) -> int:
        """A consumer that has just started."""
        return self.cs.number(self.consumer(LIMITS, nonce_of, slots=SlotPool(self.bounds.slots)))

    def connecting(self, env: Env, rank: int) -> tuple[Any, ...]:
        """How a producer is told that the consumer is connected."""
        cut = (slots.Cuts(self.bounds.slot_tokens),) if self.bounds.slots else ()
        return ("connected", env.c_name, self.owes(rank), 0.0, *cut)

    def start(self) -> World:
        """The world before anything has happened: the consumer and every rank are connected."""
        env, seats = Env.first(), tuple(Seat.first(rank) for rank in range(self.bounds.ranks))
        c, ps = self.new_c(), []
        for rank, seat in enumerate(seats):
            ps.append(self.ps.step(self.new_p(seat, rank), *self.connecting(env, rank)).after)
            c = self.cs.step(c, "connected", seat.name, 0.0).after
        return self.normal(World(tuple(ps), c, 0, 0, 0, 0, 0, 0, seats, env))

    # One machine moves

    def p_move(
        self, p: int, seat: Seat, env: Env, name: tuple[Any, ...], method: str, *args: Any, alone: bool = False
    ) -> Move:
        """A call of a producer's machine as a move."""
        self.trying = (seat.name, *name)
        return self.p.move(p, seat.name, (env.c_name,), name, (method, *args), alone)

    def c_move(self, c: int, env: Env, others: Names, name: tuple[Any, ...], method: str, *args: Any) -> Move:
        """A call of the consumer's machine as a move."""
        self.trying = (env.c_name, *name)
        return self.c.move(c, env.c_name, others, name, (method, *args))

    def view_p(self, p: int, to_p: int, seat: Seat, env: Env) -> View:
        """A producer's own moves."""
        inbox = to_p & self.net.to(seat.name)
        view = self._views_p.get((p, inbox, env.c_name))
        if view is None:
            view = self._views_p[p, inbox, env.c_name] = self.p.view(p, inbox, seat.name, (env.c_name,))
        return view

    def view_c(self, c: int, to_c: int, others: Names, env: Env) -> View:
        """The consumer's own moves."""
        view = self._views_c.get((c, to_c, others))
        if view is None:
            view = self._views_c[c, to_c, others] = self.c.view(c, to_c, env.c_name, others)
        return view

    def after_p(self, w: World, rank: int, move: Move, seat: Seat) -> World:
        """The world after a producer's machine has moved, and its engine has come to this."""
        ps, c, to_p, to_c, air, untold, posted, copies, seats, env = w
        if seat is not seats[rank]:
            seats = put(seats, rank, seat)
        after = World(put(ps, rank, move.after), c, to_p, to_c | move.sent, air, untold, posted, copies, seats, env)
        if not move.commands:
            return after
        self._check_superseded(move)
        return self.effects.producer(after, rank, move.commands, move.alone)

    def _check_superseded(self, move: Move) -> None:
        for command in move.commands:
            if isinstance(command, (Post, PostSlot)):
                newest = self.ps.fact(move.after, facts.newest_attempts)
                if newest.get(command.key.base, 0) > command.key.attempt:
                    raise Violation(f"superseded: {command.key} is posted although a later attempt was offered")

    def after_c(self, w: World, move: Move, env: Env) -> World:
        """The world after the consumer's machine has moved, in what has become of the rest."""
        ps, _, to_p, to_c, air, untold, posted, copies, seats, _ = w
        after = World(ps, move.after, to_p | move.sent, to_c, air, untold, posted, copies, seats, env)
        if move.commands:
            after = self.effects.consumer(after, move.commands, *self._landed(to_c))
        if self.bounds.slots:
            self.effects.slots.check(after)
        return after

    def arrived(self, to_c: int) -> Arrived:
        """What has landed: a notification is there once its bytes have landed."""
        return self._landed(to_c)[0]

    def _landed(self, to_c: int) -> tuple[Arrived, Landed]:
        known = self._arrived.get(to_c)
        if known is None:
            completes = [p.message for _, p in self.net.each(to_c) if isinstance(p.message, Complete)]
            arrived = frozenset(
                (complete.nonce, *cell) for complete in completes for cell in cells_of(complete.spans)
            )
            known = self._arrived[to_c] = arrived, slots.landed_in(completes)
        return known

    # The normal form

    def normal(self, w: World) -> World:
        """The one world that stands for others that can do the same or less.

        * Whatever a side may send without changing its own state is sent: a message in the network may be delivered
          or not, so a world with more messages can do all that one with fewer can.
        * Messages that can do nothing any more are forgotten (:mod:`walk.facts` says which, and every time one is
          forgotten the machine is asked).
        * What was posted for an offer of which nothing more can be posted is forgotten, and outcomes that have been
          compared, or that no other outcome will be compared with.
        """
        ps, c, to_p, to_c, air, untold, posted, copies, seats, env = w
        others = alive(seats)
        while True:
            view_c = self.view_c(c, to_c, others, env)
            to_p |= view_c.free
            free = idle = 0
            for p, seat in zip(ps, seats, strict=True):
                if seat.alive:
                    view_p = self.view_p(p, to_p, seat, env)
                    free |= view_p.free
                    idle |= view_p.idle
            if not free & ~to_c:
                break
            to_c |= free
        to_p &= ~idle
        to_c &= ~view_c.idle
        if not self.exact:
            posted = self._still_sending(ps, posted) if posted else 0
            if env.ended or any(seat.ended for seat in seats):
                seats, env = self._uncompared(ps, to_p, seats, env)
        return World(ps, c, to_p, to_c, air, untold, posted, copies, seats, env)

    def _still_sending(self, ps: tuple[int, ...], posted: int) -> int:
        known = self._sending.get((ps, posted))
        if known is None:
            keys = {(name, key) for p in ps if p >= 0 for name, key in self.ps.fact(p, facts.sending_keys)}
            known = self.effects.flights.where(posted, lambda flight: (flight.producer, flight.key) in keys)
            self._sending[ps, posted] = known
        return known

    def _uncompared(
        self, ps: tuple[int, ...], to_p: int, seats: tuple[Seat, ...], env: Env
    ) -> tuple[tuple[Seat, ...], Env]:
        known = self._compared.get((ps, to_p, seats, env))
        if known is None:
            known = self._compared[ps, to_p, seats, env] = self._without_compared(ps, to_p, seats, env)
        return known

    def _without_compared(
        self, ps: tuple[int, ...], to_p: int, seats: tuple[Seat, ...], env: Env
    ) -> tuple[tuple[Seat, ...], Env]:
        undecided = {parcel.message.key for _, parcel in self.net.each(to_p) if isinstance(parcel.message, Offer)}
        for p in ps:
            undecided |= self.ps.fact(p, facts.open_keys) if p >= 0 else set()
        done = {key for key, _ in env.ended} - undecided
        rest = tuple(
            seat.but(
                ended=frozenset(
                    (key, how)
                    for key, how in seat.ended
                    if key not in done and how != "alone" and key.epoch == env.c_name
                )
            )
            for seat in seats
        )
        return rest, env.but(ended=frozenset(end for end in env.ended if end[0] not in done))


def _view(state: int, idle: int, moves: list[Move]) -> View:
    free = 0
    for move in moves:
        if move.after == state and not move.commands:
            free |= move.sent
    return View(idle, free, tuple(move for move in moves if move.after != state or move.commands))
