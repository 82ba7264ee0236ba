"""The machines in the hostile world: what each may do on its own, and the normal form of a joint state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pushkv.core.commands import Command, Post, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Complete, Offer, TransferKey
from pushkv.core.producer import ProducerMachine
from walk import facts
from walk.errors import Violation
from walk.machines import Machines
from walk.timing import check_consumer, check_producer, consumer_due, producer_due
from walk.world import Bits, Bounds, Effects, Env, World, nonce_of, owed, plain_message

LIMITS = Limits(resend=1.0, resend_most=1.0, insist_after=0, window=4)
M = TypeVar("M")


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


class Side(Generic[M]):
    """One side's machine: its steps as moves.

    ``exact``: forget no message, however useless, so that a machine that is wrong about it is found out.
    """

    def __init__(
        self,
        machines: Machines[M],
        net: Bits,
        due: Callable[[M], tuple[Any, ...]],
        idle: Callable[[M, str, Any], Any],
        exact: bool,
    ) -> None:
        self.machines = machines
        self._net = net
        self._due = due
        self._idle = idle
        self._exact = exact
        self._moves: dict[tuple[int, str, tuple[Any, ...]], Move] = {}
        self._arrivals: dict[tuple[int, int, str], tuple[Move, Any]] = {}

    def move(
        self, state: int, me: str, alive: str, name: tuple[Any, ...], call: tuple[Any, ...], alone: bool = False
    ) -> Move:
        """A call of a method as a move; what is sent to a peer that is gone is lost."""
        known = self._moves.get((state, alive, call))
        if known is None:
            step = self.machines.step(state, *call)
            sent = 0
            for command in step.commands:
                if isinstance(command, Send) and command.peer == alive:
                    sent |= self._net.of(Parcel(me, alive, plain_message(command.message)))
            commands = tuple(command for command in step.commands if not isinstance(command, Send))
            known = self._moves[state, alive, call] = Move(name, step.after, sent, commands, alone)
        return known

    def view(self, state: int, inbox: int, me: str, alive: str) -> View:
        """The machine's own moves in a state with these messages on their way to it."""
        idle, twins, moves = 0, set(), []
        for bit, parcel in self._net.each(inbox):
            move, why = self._arrival(state, bit, parcel, me, alive)
            moves.append(move)
            if why is True or why in twins:
                idle |= bit
                self._must_idle(state, move, parcel)
            elif why:
                twins.add(why)
        for timer in self.machines.fact(state, self._due):
            name = ("timer", *timer)
            moves.append(self.move(state, me, alive, name, ("fire", timer, 0.0), timer[0] == "deadline"))
        return _view(state, 0 if self._exact else idle, moves)

    def _arrival(self, state: int, bit: int, parcel: Parcel, me: str, alive: str) -> tuple[Move, Any]:
        known = self._arrivals.get((state, bit, alive))
        if known is None:
            name = ("gets", parcel.sender, parcel.message)
            call = ("receive", parcel.sender, parcel.message, 0.0)
            known = self.move(state, me, alive, name, call), self._why_idle(state, parcel)
            self._arrivals[state, bit, alive] = known
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
    """Both machines and the world's effects. Subclasses put a mutant in a machine's place."""

    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine

    def __init__(self, bounds: Bounds, exact: bool = False) -> None:
        self.bounds = bounds
        self.exact = exact
        self.trying: tuple[Any, ...] = ()
        """The move that is being made, for who wants to know which one broke a rule."""
        self.net = Bits()
        self.effects = Effects()
        self.ps: Machines[ProducerMachine] = Machines(check_producer)
        self.cs: Machines[ConsumerMachine] = Machines(check_consumer)
        self.p = Side(self.ps, self.net, producer_due, facts.idle_at_producer, exact)
        self.c = Side(self.cs, self.net, consumer_due, facts.idle_at_consumer, exact)
        self._views_p: dict[tuple[int, int, int], View] = {}
        self._views_c: dict[tuple[int, int, int], View] = {}
        self._arrived: dict[int, frozenset[tuple[bytes, int]]] = {}
        self._sending: dict[tuple[int, int], int] = {}
        self._compared: dict[tuple[int, int, Env], Env] = {}

    def new_p(self, life: int) -> int:
        """A producer that has just started."""
        return self.ps.number(self.producer(0, f"p{life}", LIMITS))

    def new_c(self) -> int:
        """A consumer that has just started."""
        return self.cs.number(self.consumer(LIMITS, nonce_of))

    def start(self) -> World:
        """The world before anything has happened: both sides are connected."""
        p = self.ps.step(self.new_p(0), "connected", "c0", owed, 0.0).after
        c = self.cs.step(self.new_c(), "connected", "p0", 0.0).after
        return self.normal(World(p, c, 0, 0, 0, 0, 0, Env.first()))

    # One machine moves

    def p_move(
        self, state: int, env: Env, name: tuple[Any, ...], method: str, *args: Any, alone: bool = False
    ) -> Move:
        """A call of the producer's machine as a move."""
        self.trying = name if name[0] == "P" else ("P", *name)
        return self.p.move(state, env.p_name, env.c_name, name, (method, *args), alone)

    def c_move(self, state: int, env: Env, name: tuple[Any, ...], method: str, *args: Any) -> Move:
        """A call of the consumer's machine as a move."""
        self.trying = name if name[0] == "C" else ("C", *name)
        alive = "" if env.p_dead else env.p_name
        return self.c.move(state, env.c_name, alive, name, (method, *args))

    def view_p(self, p: int, to_p: int, env: Env) -> View:
        """The producer's own moves."""
        view = self._views_p.get((p, to_p, env.c_life))
        if view is None:
            view = self._views_p[p, to_p, env.c_life] = self.p.view(p, to_p, env.p_name, env.c_name)
        return view

    def view_c(self, c: int, to_c: int, env: Env) -> View:
        """The consumer's own moves."""
        alive = -1 if env.p_dead else env.p_life
        view = self._views_c.get((c, to_c, alive))
        if view is None:
            name = "" if env.p_dead else env.p_name
            view = self._views_c[c, to_c, alive] = self.c.view(c, to_c, env.c_name, name)
        return view

    def after_p(self, w: World, move: Move, env: Env) -> World:
        """The world after the producer's machine has moved, in what has become of the rest."""
        _, c, to_p, to_c, air, untold, posted, _ = w
        after = World(move.after, c, to_p, to_c | move.sent, air, untold, posted, env)
        if not move.commands:
            return after
        self._check_superseded(move)
        return self.effects.producer(after, move.commands, move.alone)

    def _check_superseded(self, move: Move) -> None:
        for command in move.commands:
            if isinstance(command, Post):
                newest = self.ps.fact(move.after, facts.newest_attempts)
                if newest.get(command.key.base, 0) > command.key.attempt:
                    raise Violation(f"superseded: {command.key} is posted although a later attempt was offered")

    def after_c(self, w: World, move: Move, env: Env) -> World:
        """The world after the consumer's machine has moved, in what has become of the rest."""
        p, _, to_p, to_c, air, untold, posted, _ = w
        after = World(p, move.after, to_p | move.sent, to_c, air, untold, posted, env)
        return self.effects.consumer(after, move.commands, self.arrived(to_c)) if move.commands else after

    def arrived(self, to_c: int) -> frozenset[tuple[bytes, int]]:
        """The tokens that have landed, by nonce: a notification is there once its bytes have landed."""
        known = self._arrived.get(to_c)
        if known is None:
            completes = [p.message for _, p in self.net.each(to_c) if isinstance(p.message, Complete)]
            known = self._arrived[to_c] = frozenset(
                (complete.nonce, token)
                for complete in completes
                for span in complete.spans
                for token in range(span.token_start, span.token_stop)
            )
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
        p, c, to_p, to_c, air, untold, posted, env = w
        while True:
            view_c = self.view_c(c, to_c, env)
            to_p |= view_c.free
            if env.p_dead:
                to_p = 0
                break
            view_p = self.view_p(p, to_p, env)
            if not view_p.free & ~to_c:
                to_p &= ~view_p.idle
                break
            to_c |= view_p.free
        to_c &= ~view_c.idle
        if not self.exact:
            posted = self._still_sending(p, posted) if posted else 0
            env = self._uncompared(p, to_p, env) if env.ended_c or env.ended_p else env
        return World(p, c, to_p, to_c, air, untold, posted, env)

    def _still_sending(self, p: int, posted: int) -> int:
        known = self._sending.get((p, posted))
        if known is None:
            keys = self.ps.fact(p, facts.sending_keys)
            known = self.effects.flights.where(posted, lambda flight: flight.key in keys)
            self._sending[p, posted] = known
        return known

    def _uncompared(self, p: int, to_p: int, env: Env) -> Env:
        known = self._compared.get((p, to_p, env))
        if known is None:
            known = self._compared[p, to_p, env] = self._without_compared(p, to_p, env)
        return known

    def _without_compared(self, p: int, to_p: int, env: Env) -> Env:
        undecided: set[TransferKey] = set()
        if not env.p_dead:
            offers = [parcel.message for _, parcel in self.net.each(to_p) if isinstance(parcel.message, Offer)]
            undecided = {offer.key for offer in offers} | self.ps.fact(p, facts.open_keys)
        done = {key for key, _ in env.ended_c} - undecided
        return env.but(
            ended_c=frozenset(end for end in env.ended_c if end[0] not in done),
            ended_p=frozenset(
                (key, how)
                for key, how in env.ended_p
                if key not in done and how != "alone" and key.epoch == env.c_name
            ),
        )


def _view(state: int, idle: int, moves: list[Move]) -> View:
    free = 0
    for move in moves:
        if move.after == state and not move.commands:
            free |= move.sent
    return View(idle, free, tuple(move for move in moves if move.after != state or move.commands))
