"""Two producer ranks and two consumer ranks in a hostile world with real time, for tests that take random ways.

Every transfer is owed by both producer ranks, a layer each, to both consumer ranks. The consumer *engine* holds one
outcome over its ranks: the worst. The world is that of :mod:`walk.world`, without its bounds.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pushkv.core.commands import Command, Ended, Post, Released, Send, StageEnded, StageReleased
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Blocks, Table, TransferKey
from pushkv.core.outcome import Outcome, worst
from pushkv.core.producer import ProducerMachine
from pushkv.core.receiving import Order
from pushkv.core.sending import Owed
from pushkv.core.span import Span
from pushkv.core.states import Receiving, Sending, Source
from pushkv.errors import GeometryError, ProtocolError
from walk.errors import Violation

RANKS = 2
TOKENS = 4
BLOCKS = 3
LIMITS = Limits(deadline=20.0, lease=3.0, stage_deadline=15.0, window=4, unmatched=4, resend_most=1.0)
PROMPT = b"p" * 32


@dataclass
class Flight:
    """A WRITE: ``air`` while its bytes may land, ``told`` once its producer knows its end."""

    producer: str
    consumer: str
    post: Post
    air: bool = True
    told: bool = False

    @property
    def block(self) -> int:
        """The target block."""
        block: int = struct.unpack("<i", self.post.target.tables[0].ids)[0]
        return block

    @property
    def pieces(self) -> set[tuple[int, int]]:
        """The (layer, token) pairs it writes."""
        return {
            (span.layer_start, token)
            for span in self.post.complete.spans
            for token in range(span.token_start, span.token_stop)
        }


@dataclass
class Request:
    """What the consumer engine asked for: one offer a rank, one outcome over all."""

    transfer: str
    attempt: int
    keys: dict[str, TransferKey] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome | None:
        """The worst of the ranks', once all of them have one."""
        return worst(self.outcomes.values()) if len(self.outcomes) == len(self.keys) else None


def owes(rank: int) -> Owed:
    """A producer rank owes its own layer."""
    return lambda start, stop, end: (Span(0, rank, rank + 1, start, stop),) if start < stop else ()


def table(block: int) -> Blocks:
    """One block."""
    return Blocks((Table(0, struct.pack("<i", block)),))


class Cluster:
    """The world. Methods are what may happen; they raise Violation where a rule is broken."""

    def __init__(self) -> None:
        self.now = 0.0
        self.net: deque[tuple[str, str, Any]] = deque(maxlen=300)
        self.flights: list[Flight] = []
        self.producers: dict[str, ProducerMachine] = {}
        self.consumers: dict[str, ConsumerMachine] = {}
        self.names = {f"p{rank}": f"p{rank}.0" for rank in range(RANKS)}
        self.names |= {f"c{rank}": f"c{rank}.0" for rank in range(RANKS)}
        self.staged: dict[tuple[str, str], int] = {}
        self.owners: dict[tuple[str, int], TransferKey] = {}
        self.landed: dict[TransferKey, set[tuple[int, int]]] = {}
        self.posted: set[tuple[str, TransferKey, int, int]] = set()
        self.ended: dict[tuple[str, TransferKey], str] = {}
        self.requests: list[Request] = []
        for seat in list(self.names):
            self._start(seat)
        for producer in self.producers:
            for consumer in self.consumers:
                self.connect(producer, consumer)
                self.connect(producer, consumer)

    # Lives

    def _start(self, seat: str) -> None:
        name = self.names[seat]
        if seat[0] == "p":
            self.producers[name] = ProducerMachine(int(seat[1:]), name, LIMITS)
        else:
            self.consumers[name] = ConsumerMachine(LIMITS)

    def alive(self, name: str) -> bool:
        """Whether this life is the present one of its seat."""
        return name in self.producers or name in self.consumers

    def kill(self, seat: str) -> None:
        """A process dies and another takes its place; its bytes may go on travelling, its memory is gone."""
        name = self.names[seat]
        self.producers.pop(name, None)
        self.consumers.pop(name, None)
        for flight in self.flights:
            flight.told |= flight.producer == name
            flight.air &= flight.consumer != name or self.alive(flight.producer)
        self.owners = {place: key for place, key in self.owners.items() if place[0] != name}
        self.staged = {place: ready for place, ready in self.staged.items() if place[0] != name}
        for request in self.requests:
            if name in request.keys:
                request.outcomes[name] = Outcome.PEER_LOST
        seat_name, life = name.split(".")
        self.names[seat] = f"{seat_name}.{int(life) + 1}"
        self._start(seat)

    def connect(self, producer: str, consumer: str) -> None:
        """One half of the handshake: the producer's first."""
        source = self.producers[producer]
        if consumer not in source._book.customers or source._book.customers[consumer].lost:
            source.connected(consumer, owes(source.rank), self.now)
            self._after_p(producer, False)
        else:
            self.consumers[consumer].connected(producer, self.now)
            self._after_c(consumer)

    def lose(self, name: str, peer: str) -> None:
        """A side is told, truly or not, that it lost the other."""
        self._machine(name).peer_lost(peer, "silence", self.now)
        self._after(name, alone=True)

    def prove(self, name: str, peer: str) -> None:
        """Proof about an epoch that is gone: what was under way between the two has landed or is lost."""
        for flight in self.flights:
            flight.air &= {flight.producer, flight.consumer} != {name, peer}
        self._machine(name).writes_ended(peer, self.now)
        self._after(name, alone=True)

    # Engines

    def ask(self, transfer: str, attempt: int, block: int) -> bool:
        """The consumer engine offers one block of every rank; False where a rank refuses."""
        request = Request(transfer, attempt)
        for name, machine in self.consumers.items():
            key = TransferKey(transfer, "engine", name, 0, attempt)
            peers = {peer: owes(int(peer[1]))(0, TOKENS, TOKENS) for peer in self.producers}
            try:
                machine.offer(Order(key, table(block), PROMPT, TOKENS, 0, TOKENS, peers), self.now)
            except (ProtocolError, GeometryError):
                continue
            request.keys[name] = key
            self.owners[name, block] = key
            self._check_targets()
        if request.keys:
            self.requests.append(request)
        for name in request.keys:
            self._after_c(name)
        return bool(request.keys)

    def cancel(self, request: Request, outcome: Outcome = Outcome.CANCELLED) -> None:
        """The consumer engine ends a request at every rank."""
        for name, key in request.keys.items():
            if name in self.consumers:
                self.consumers[name].cancel(key, self.now, outcome)
                self._after_c(name)

    def hear(self) -> None:
        """The consumer engine hears that a rank's part has failed, and ends the others'."""
        for request in self.requests:
            bad = [outcome for outcome in request.outcomes.values() if outcome is not Outcome.COMPLETE]
            if bad and request.outcome is None:
                self.cancel(request, worst(bad))

    def stage(self, name: str, transfer: str, ready: int) -> None:
        """A producer engine has computed this many tokens."""
        try:
            self.producers[name].stage(transfer, table(0), PROMPT, TOKENS, ready, self.now, siblings=RANKS)
        except ProtocolError:
            return
        self.staged[name, transfer] = ready
        self._after_p(name, False)

    def preempt(self, name: str, transfer: str) -> None:
        """A producer engine wants its blocks back."""
        self.producers[name].preempt(transfer)
        self._after_p(name, False)

    def unstage(self, name: str, transfer: str) -> None:
        """A producer engine gives up."""
        self.producers[name].unstage(transfer, self.now)
        self._after_p(name, False)

    # The network and the wire

    def deliver(self, index: int) -> None:
        """A message arrives, and may arrive again."""
        receiver, sender, message = self.net[index % len(self.net)]
        if self.alive(receiver):
            self._machine(receiver).receive(sender, message, self.now)
            self._after(receiver)

    def land(self, flight: Flight) -> None:
        """The bytes of a WRITE arrive, and with them its notification is on its way."""
        flight.air = False
        if self.alive(flight.consumer):
            self.landed.setdefault(flight.post.key, set()).update(flight.pieces)
            self.net.append((flight.consumer, flight.producer, flight.post.complete))

    def tell(self, flight: Flight, error: bool, reached: bool = True) -> None:
        """A producer is told how a WRITE ended; good news only once it has landed."""
        if not error and flight.air:
            self.land(flight)
        flight.told = True
        flight.air &= reached
        machine, write = self.producers[flight.producer], flight.post.write
        if error:
            machine.write_failed(write, Outcome.TRANSPORT_ERROR, "broke", self.now, reached)
        else:
            machine.write_done(write, self.now)
        self._after_p(flight.producer, False)

    def tick(self, name: str) -> None:
        """A machine's timers go off."""
        self._machine(name).tick(self.now)
        self._after(name, alone=True)
        machine = self.consumers.get(name)
        for transfer in machine._transfers.values() if machine is not None else ():
            if transfer.state is Receiving.OPEN and transfer.deadline <= self.now:
                raise Violation(f"nothing hangs: {transfer.order.key} is open after its deadline")

    # Carrying out commands

    def _machine(self, name: str) -> Any:
        return self.producers.get(name) or self.consumers[name]

    def _after(self, name: str, alone: bool = False) -> None:
        if name in self.producers:
            self._after_p(name, alone)
        else:
            self._after_c(name)

    def _after_p(self, name: str, alone: bool) -> None:
        for command in self.producers[name].commands():
            self._carry_out_p(name, command, alone)

    def _carry_out_p(self, name: str, command: Command, alone: bool) -> None:
        if isinstance(command, Send):
            self.net.append((command.peer, name, command.message))
        elif isinstance(command, Post):
            self._post(Flight(name, command.peer, command))
        elif isinstance(command, Ended):
            good = command.outcome is Outcome.COMPLETE
            self._end(name, command, "complete" if good else "alone" if alone else "answered")
        elif isinstance(command, StageReleased):
            self.staged.pop((name, command.transfer), None)
            for flight in self.flights:
                if flight.air and flight.producer == name and flight.post.key.transfer == command.transfer:
                    raise Violation(f"sources are held: a WRITE of {flight.post.key} reads what was given back")
        elif isinstance(command, StageEnded):
            pass

    def _post(self, flight: Flight) -> None:
        key = flight.post.key
        if (flight.producer, key.transfer) not in self.staged:
            raise Violation(f"sources are held: {key} is posted from what was given back")
        for layer, token in flight.pieces:
            piece = (flight.producer, key, layer, token)
            if piece in self.posted:
                raise Violation(f"posted once: {piece}")
            self.posted.add(piece)
        self.flights.append(flight)
        self._check_targets()

    def _check_targets(self) -> None:
        for flight in self.flights:
            if flight.air and flight.consumer in self.consumers:
                owner = self.owners.get((flight.consumer, flight.block))
                if owner != flight.post.key:
                    raise Violation(f"custody ends on proof: bytes of {flight.post.key} land in a block of {owner}")

    def _after_c(self, name: str) -> None:
        for command in self.consumers[name].commands():
            if isinstance(command, Send):
                self.net.append((command.peer, name, command.message))
            elif isinstance(command, Ended):
                self._ended_c(name, command)
            elif isinstance(command, Released):
                self.owners = {place: key for place, key in self.owners.items() if key != command.key}
                self._check_targets()

    def _ended_c(self, name: str, end: Ended) -> None:
        if end.outcome is Outcome.COMPLETE:
            here = self.landed.get(end.key, set())
            if here != {(layer, token) for layer in range(RANKS) for token in range(TOKENS)}:
                raise Violation(f"complete means covered: {end.key} has {sorted(here)}")
        self._end(name, end, "complete" if end.outcome is Outcome.COMPLETE else "other")
        for request in self.requests:
            if request.keys.get(name) == end.key:
                request.outcomes[name] = end.outcome

    def _end(self, name: str, end: Ended, how: str) -> None:
        if (name, end.key) in self.ended:
            raise Violation(f"one outcome: {end.key} ends a second time at {name}")
        self.ended[name, end.key] = how
        at_consumer = self.ended.get((end.key.epoch, end.key))
        for producer in self.producers:
            if at_consumer == "complete" and self.ended.get((producer, end.key)) == "answered":
                raise Violation(
                    f"agreement: {end.key} is complete at the consumer and failed at {producer}, which asked"
                )

    # The end

    def settle(self) -> None:
        """Fair weather until nothing is left to do; raises Violation where something is left for ever."""
        for _ in range(100):
            self._fair_round()
            if not self._unsettled():
                return
        raise Violation(f"nothing hangs: in fair weather {self._unsettled()}")

    def _fair_round(self) -> None:
        for flight in self.flights:
            if flight.air and flight.told:
                self.land(flight)
            elif not flight.told:
                self.tell(flight, error=False)
        for name in [*self.producers, *self.consumers]:
            for peer in self._known(name):
                if not self.alive(peer):
                    self.prove(name, peer)
        for producer in self.producers:
            for consumer in self.consumers:
                self.connect(producer, consumer)
        for _ in range(2 * len(self.net)):
            self.deliver(0)
            self.net.rotate(-1)
        self.hear()
        self.now += 1.0
        for name in [*self.producers, *self.consumers]:
            self.tick(name)

    def _known(self, name: str) -> list[str]:
        if name in self.producers:
            return list(self.producers[name]._book.customers)
        return list(self.consumers[name]._pairings)

    def _unsettled(self) -> str:
        for name, source in self.producers.items():
            for serving in source._book:
                if serving.state is not Sending.OVER or serving.custody is not Source.STUCK:
                    return f"{serving.offer.key} stays {serving.state.value}, {serving.custody.value} at {name}"
        stuck = {serving.offer.key for source in self.producers.values() for serving in source._book}
        for name, target in self.consumers.items():
            for key in target.transfers():
                if key not in stuck or (name, key) not in self.ended:
                    return f"{key} stays at {name}"
        return ""
