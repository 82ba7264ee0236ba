"""The consumer's transfer thread: handshakes with producers, offers, arrivals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from pushkv.core.commands import Command, Ended, Released, Send
from pushkv.core.compat import differences
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import (
    OLDEST_VERSION,
    VERSION,
    Ack,
    Complete,
    Drained,
    Failed,
    Hello,
    Message,
    Offer,
    Ready,
    TransferKey,
    encode,
)
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from pushkv.core.template import PairTemplate
from pushkv.errors import GeometryError, HandshakeError, HandshakeRefused, PeerLost, PushKVError, TransportError
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.runtime.side import Pair, Shared, Side
from pushkv.trace import now as trace_now
from pushkv.transport.host import ProcessWatch

log = logging.getLogger(__name__)


@dataclass
class Dial:
    """A handshake under way. ``path_open``: the producer's warm-up WRITE has arrived."""

    token: bytes
    route: Route
    done: Future[Pair]
    pair: Pair | None = None
    path_open: bool = False

    def settle(self) -> bool:
        """Report success once the welcome and the warm-up are both here."""
        if self.pair is None or not self.path_open:
            return False
        if not self.done.done():
            self.done.set_result(self.pair)
        return True


class Consuming(Side):
    """The consumer's side."""

    accepts = (Ack, Complete, Drained, Failed, Ready)

    def __init__(self, shared: Shared, machine: ConsumerMachine) -> None:
        super().__init__(shared, machine)
        self.machine = machine
        self.dials: dict[bytes, Dial] = {}
        self._traced: dict[bytes, TransferKey] = {}
        self._offered: dict[TransferKey, int] = {}
        self.held_blocks = 0

    def ground(self, detail: str, now: float) -> None:
        """Without a data mover no arrival is heard: end what is open and drain over the control connections."""
        for key in self.machine.transfers():
            self.machine.cancel(key, now, Outcome.TRANSPORT_ERROR, detail)
        for dial in self.dials.values():
            if not dial.done.done():
                dial.done.set_exception(TransportError(detail))

    def measure(self) -> None:
        """Publish how much is in custody."""
        self.in_custody = len(self.machine.transfers())
        self.held_blocks = self.machine.held_blocks()

    # Handshakes

    def dial(self, dial: Dial) -> None:
        """Introduce ourselves to a producer."""
        if self.me is None or self.transport is None:
            stuck = f"this consumer's data mover is stuck ({self.grounded}); restart it"
            dial.done.set_exception(TransportError(stuck))
            return
        self.dials[dial.token] = dial
        self.shared.control.send(dial.route, wire.Introduction(dial.token, self.me))

    def give_up(self, token: bytes) -> None:
        """Forget a handshake that took too long."""
        self.dials.pop(token, None)

    def refused(self, refusal: wire.Refusal) -> None:
        """The producer does not want us."""
        dial = self.dials.pop(refusal.token, None)
        if dial is not None and not dial.done.done():
            dial.done.set_exception(HandshakeRefused(f"{dial.route!s} refused this consumer: {refusal.detail}"))

    def welcomed(self, route: Route, welcome: wire.Welcome) -> None:
        """The producer is connected to us; connect to it."""
        dial = self.dials.get(welcome.token)
        if dial is None or dial.pair is not None:
            return
        try:
            dial.pair = self._pair(route, welcome)
        except (PushKVError, ValueError) as error:
            self.dials.pop(welcome.token, None)
            dial.done.set_exception(error if isinstance(error, HandshakeError) else HandshakeError(str(error)))
            return
        self._conclude(dial)
        self.run_commands()

    def _pair(self, route: Route, welcome: wire.Welcome) -> Pair:
        theirs, me = welcome.side, self.me
        assert me is not None
        assert self.transport is not None
        if not OLDEST_VERSION <= welcome.version <= VERSION:
            raise HandshakeError(f"{route!s} answers in protocol version {welcome.version}; upgrade the older side")
        theirs.geometry.check(theirs.regions)
        if differing := differences(theirs.factors, me.factors):
            raise HandshakeError(f"the two caches differ (theirs against ours) in {'; '.join(differing)}")
        template = PairTemplate(theirs.geometry, me.geometry)
        if theirs.agent in self.agents:
            self.transport.remove_peer(theirs.agent)
        agent = self.transport.add_peer(theirs.metadata, theirs.host)
        if agent != theirs.agent:
            self.transport.remove_peer(agent)
            raise HandshakeError(f"{route!s} sent the metadata of {agent} as {theirs.agent}'s")
        watch = ProcessWatch.on(theirs.host) if theirs.host is not None else None
        pair = Pair(welcome.token, route, theirs, template, watch, time.monotonic())
        self._lose_earlier_epochs(pair)
        self.add(pair)
        self.machine.connected(agent, pair.heard)
        self._greet(pair)
        return pair

    def _lose_earlier_epochs(self, pair: Pair) -> None:
        for earlier in list(self.agents.values()):
            if earlier.route == pair.route and earlier.agent != pair.agent:
                earlier.broken = True
                self.lose(earlier, f"{pair.agent} is a new epoch at its address", pair.heard)

    def _greet(self, pair: Pair) -> None:
        """A notification opens our way to the producer."""
        assert self.transport is not None
        try:
            self.transport.send(pair.agent, encode(pair.token, Hello(self.shared.agent)))
        except PeerLost as error:
            raise HandshakeError(f"{pair.agent} was lost right after the handshake: {error}") from error

    def stranger(self, token: bytes, payload: bytes) -> None:
        """The warm-up WRITE may be faster than the welcome."""
        dial = self.dials.get(token)
        if dial is None:
            super().stranger(token, payload)
        else:
            dial.path_open = True

    def hello(self, pair: Pair) -> None:
        """The producer's warm-up WRITE has arrived."""
        dial = self.dials.get(pair.token)
        if dial is not None:
            dial.path_open = True
            self._conclude(dial)

    def _conclude(self, dial: Dial) -> None:
        if dial.settle():
            self.dials.pop(dial.token, None)

    def regain(self, pair: Pair, now: float) -> None:
        """Tell the machine that this producer is there."""
        self.machine.connected(pair.agent, now)

    # Transfers

    def offer(self, make: Callable[[], Order]) -> None:
        """Offer blocks; an order that cannot be taken ends at once and touches nothing else."""
        order = make()
        try:
            self.machine.offer(order, time.monotonic())
        except PushKVError as error:
            outcome = Outcome.REJECTED_GEOMETRY if isinstance(error, GeometryError) else Outcome.PEER_LOST
            self.shared.emit(Ended(order.key, outcome, str(error)))
            self.shared.emit(Released(order.key))
        self.run_commands()

    def cancel(self, key: TransferKey, outcome: Outcome, detail: str) -> None:
        """End a transfer from this side."""
        self.machine.cancel(key, time.monotonic(), outcome, detail)
        self.run_commands()

    def unsendable(self, command: Send, detail: str, now: float) -> None:
        """An offer too large for a frame fails alone."""
        if isinstance(command.message, Offer):
            self.machine.cancel(command.message.key, now, Outcome.REJECTED_GEOMETRY, detail)

    def message(self, pair: Pair, message: Message, now: float) -> None:
        """Arrivals, failures and proofs."""
        assert isinstance(message, (Ack, Complete, Drained, Failed, Ready))
        if isinstance(message, Complete) and (key := self._traced.get(message.nonce)):
            trace = self.shared.trace
            trace.instant("arrival", "transfers", str(key), part=message.part)
            trace.flow_end("KV", "transfers", f"{message.nonce.hex()}.{message.part}")
        self.machine.receive(pair.agent, message, now)

    def execute(self, command: Command, now: float) -> None:
        """As for every side, with the trace and the outcomes counted."""
        if isinstance(command, Send) and isinstance(command.message, Offer):
            self._trace_offer(command.message)
        elif isinstance(command, Ended):
            self.shared.stats[f"transfers {command.outcome.value}"] += 1
            self._trace_end(command)
        super().execute(command, now)

    def _trace_offer(self, offer: Offer) -> None:
        trace = self.shared.trace
        if trace.enabled and offer.nonce not in self._traced:
            self._traced[offer.nonce] = offer.key
            self._offered.setdefault(offer.key, trace_now())
            trace.instant("offer sent", "transfers", str(offer.key), tokens=offer.stop - offer.start)
            trace.flow_start("offer", "transfers", offer.nonce.hex())

    def _trace_end(self, ended: Ended) -> None:
        started = self._offered.pop(ended.key, None)
        if started is not None:
            trace, name = self.shared.trace, str(ended.key)
            trace.span("offer to end", "transfers", name, started, trace_now(), outcome=ended.outcome.value)
            self._traced = {nonce: key for nonce, key in self._traced.items() if key != ended.key}
