"""What both sides' transfer threads do: pairs, frames, commands, and the loss of peers."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from pushkv.backends.answers import asked
from pushkv.core.commands import AskProof, Command, Send
from pushkv.core.messages import Hello, Message, decode, encode, token_of
from pushkv.errors import PeerLost, ProtocolError, TransportError
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.runtime.copying import Job, Told
from pushkv.runtime.digest import Reader
from pushkv.runtime.loop import AWAKE, Urgency
from pushkv.runtime.pair import Pair
from pushkv.runtime.peering import CLOSED, Machine, Peering, Shared
from pushkv.runtime.turn import WatchedTransport
from pushkv.runtime.vetting import not_registered
from pushkv.transport.host import this_host

__all__ = ["CLOSED", "Machine", "Shared", "Side"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Side(Peering):
    """One side of the protocol on its transfer thread. After :meth:`open` only that thread calls anything here."""

    accepts: tuple[type, ...]

    def __init__(self, shared: Shared, machine: Machine) -> None:
        super().__init__(shared, machine)
        self.me: wire.Side | None = None
        self.in_custody = 0
        """How many transfers were open or in custody when this was last published; for other threads."""
        self.quarantined = 0
        """How many of them wait for nothing but proof."""
        self.reader: Reader | None = None
        """What reads the cache back, where bytes are verified and may come into blocks."""
        self._pending: deque[Command] = deque()
        self._copies: deque[tuple[Job, Told]] = deque()
        """Copies that are still to be queued on the device: one a look."""
        self._relay_answers = False
        self.copier = shared.make_copier(f"{shared.agent}-copies", self._prepare_thread)

    def _prepare_thread(self) -> None:
        backend, device = self.shared.cache.backend, self.shared.cache.home[1]
        asked(backend, "cannot make a thread ready", lambda: backend.prepare_thread(device))

    @property
    def verifies(self) -> bool:
        """Whether the two sides take digests of bytes."""
        return self.shared.config.verify != "off"

    # Work

    def open(self) -> None:
        """Make the data mover, or go on without one where the last got stuck."""
        if self.grounded:
            self.ground(self.grounded, self.shared.clock())
            self.run_commands()
            return
        shared = self.shared
        self._prepare_thread()
        if self.verifies and shared.config.landing != "landing":
            self.reader = Reader(shared.cache)
        transport = WatchedTransport(shared.make_transport(shared.agent), shared.turn)
        transport.claim()
        slots = None if shared.slots is None else shared.slots.described(shared.config.landing == "landing")
        reached = shared.cache.regions if slots is None or not slots.only else ()
        try:
            transport.register([*reached, *([slots.region] if slots is not None else [])])
        except TransportError as error:
            transport.close()
            raise not_registered(shared.config, shared.cache, error) from error
        self.transport = transport
        self.me = wire.Side(
            engine=shared.config.engine,
            rank=shared.config.rank,
            epoch=shared.epoch,
            agent=shared.agent,
            geometry=shared.cache.geometry,
            factors=shared.cache.factors,
            regions=shared.cache.regions,
            metadata=transport.metadata(),
            host=this_host(),
            verify=shared.config.verify,
            slots=slots,
            layers=shared.config.layers,
            free_tail=shared.config.free_tail,
        )

    @abstractmethod
    def ground(self, detail: str, now: float) -> None:
        """Go on without a data mover: end what is open, for this reason."""

    def look(self, now: float) -> bool:
        """Take notifications and ended WRITEs, fire timers."""
        busy = self.each(self.copier.poll(), lambda tell: tell())
        if self.transport is not None:
            busy |= self.each(self._receive(), lambda came: self.frame(came[1]))
            busy |= self.poll_writes(now)
        self._base_machine.tick(now)
        busy |= self.run_commands()
        busy |= self._queue_copy()
        if busy:
            self.measure()
        return busy

    def _receive(self) -> list[tuple[str, bytes]]:
        assert self.transport is not None
        try:
            return self.transport.receive()
        except Exception as error:
            self.complain("Notifications cannot be taken", error)
            return []

    def complain(self, what: str, error: Exception) -> None:
        """The data mover fails at what is done all the time: deadlines hold nevertheless, and logs stay small."""
        self.shared.stats["errors"] += 1
        if self.shared.stats["errors"].bit_count() == 1:  # the first, second, fourth, …
            log.error("%s: %s", what, error)

    def each(self, items: Iterable[T], act: Callable[[T], object]) -> bool:
        """Deal with what the data mover gave, which it gives once; an error costs its own item alone."""
        busy = False
        for item in items:
            busy = True
            try:
                act(item)
            except Exception:
                self.shared.stats["errors"] += 1
                log.exception("One item is lost to an error.")
        return busy

    def copy(self, pair: Pair, job: Job, told: Told) -> None:
        """Have a part copied between a slot and the cache, here if the device does it, else on the copy thread."""
        slots = self.shared.slots
        if slots is not None and slots.quick(pair.template.grain):
            self._copies.append((partial(self.shared.turn.away, "queueing a copy", job), told))
        else:
            self.copier.submit(job, told)

    def _queue_copy(self) -> bool:
        """Have one copy queued on the device, so that what is gathered can leave before the next one is planned."""
        if not self._copies:
            return False
        self.copier.submit(*self._copies.popleft(), quick=True)
        return True

    def poll_writes(self, now: float) -> bool:
        """Take the WRITEs that ended; whether there were any."""
        return False

    def next_due(self) -> float | None:
        """When the machine's next timer is due."""
        return self._base_machine.timers.next()

    def urgency(self) -> Urgency:
        """Something open is awaited at least; copies need polling, and those to be queued wait for nothing."""
        if self._copies:
            return Urgency.NO_ONE
        if self.copier.busy:
            return Urgency.COPY
        return Urgency.PEER if self._base_machine.open_transfers else Urgency.NOTHING

    def close(self) -> None:
        """Close the data mover, and end the copies."""
        self.copier.close()
        if self.transport is not None:
            self.transport.close()
        for pair in self.pairs.values():
            if pair.watch is not None:
                pair.watch.close()

    # Frames and messages

    def frame(self, payload: bytes, route: Route | None = None) -> None:
        """Take in a frame from either way; ``route`` is where it came from over the control connection.

        Whatever is wrong with it costs this frame alone.
        """
        self._relay_answers = False
        try:
            token = token_of(payload)
            pair = self.pairs.get(token)
            if pair is None:
                self.stranger(token, payload)
                return
            message = decode(payload)
        except ProtocolError as error:
            self.shared.stats["frames dropped"] += 1
            log.debug("Dropped a frame: %s", error)
            return
        pair.heard = self.shared.clock()
        self.heard_from(pair, token, route)
        if isinstance(message, Hello):
            self.hello(pair)
        elif isinstance(message, self.accepts):
            self.message(pair, message, pair.heard)
            self._relay_answers = route is not None
            self.run_commands()
            self._relay_answers = False
        else:
            self.shared.stats["frames dropped"] += 1

    def knows(self, payload: bytes) -> bool:
        """Whether a frame bears a pair's token; from any thread."""
        try:
            return token_of(payload) in self.pairs
        except ProtocolError:
            return False

    def stranger(self, token: bytes, payload: bytes) -> None:
        """A frame with a token that no pair has."""
        self.shared.stats["foreign frames"] += 1

    @abstractmethod
    def hello(self, pair: Pair) -> None:
        """The other side's first notification has come through."""

    @abstractmethod
    def message(self, pair: Pair, message: Message, now: float) -> None:
        """Give a message of an accepted type to the machine."""

    # Commands

    def run_commands(self) -> bool:
        """Carry out what the machine asks for; whether it asked for anything.

        Commands wait in a queue of this object's, so that none is lost should the thread get stuck in one.
        """
        self._pending.extend(self._base_machine.commands())
        busy = bool(self._pending)
        while self._pending:
            self.execute(self._pending.popleft(), self.shared.clock())
            self._pending.extend(self._base_machine.commands())
        if busy:
            self.measure()
        return busy

    def execute(self, command: Command, now: float) -> None:
        """Carry out one command; those that are no work of ours are events for the engine."""
        if isinstance(command, Send):
            self._send(command, now)
        elif isinstance(command, AskProof):
            self.ask_proof(command.peer, now)
        else:
            self.shared.emit(command)

    def _send(self, command: Send, now: float) -> None:
        pair = self.agents.get(command.peer)
        if pair is None:
            return
        try:
            frame = encode(pair.token, command.message)
        except ProtocolError as error:
            self.unsendable(command, str(error), now)
            return
        if self.transport is None or command.insist or pair.broken or self._relay_answers:
            self.relay(pair, frame)
            return
        try:
            self.transport.send(pair.agent, frame)
            self.knock(pair)
        except PeerLost as error:
            pair.broken = True
            self.relay(pair, frame)
            self.lose(pair, str(error), now)
        except TransportError as error:
            log.warning("A notification to %s goes over the control connection: %s", pair.agent, error)
            self.relay(pair, frame)

    def knock(self, pair: Pair) -> None:
        """A notification is on its way: wake the other side for it, unless the last one has kept it awake.

        Nobody tells a transfer thread of a notification, and looking for one costs as much as finding one: so it
        looks seldom where it has been quiet for long, and is told over the control connection when to look.
        """
        now = self.shared.clock()
        if now - pair.spoken > AWAKE:
            self.shared.control.send(pair.route, wire.Knock(pair.token))
        pair.spoken = now

    def unsendable(self, command: Send, detail: str, now: float) -> None:
        """A message is too large for a frame."""
        log.error("%s", detail)

    def relay(self, pair: Pair, frame: bytes) -> None:
        """Send a frame over the control connection."""
        self.shared.stats["relayed"] += 1
        self.shared.control.send(pair.route, wire.Relay(frame))
