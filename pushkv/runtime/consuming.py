"""The consumer's transfer thread: handshakes with producers, offers, arrivals."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from pushkv.core.commands import Command, Ended, Released, Scatter, Send
from pushkv.core.compat import differences
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import (
    OLDEST_VERSION,
    VERSION,
    Ack,
    Blocks,
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
from pushkv.core.receiving import Order, block_sets
from pushkv.core.states import Target
from pushkv.core.template import PairTemplate
from pushkv.errors import (
    HandshakeError,
    HandshakeRefused,
    NoSlots,
    PeerLost,
    ProtocolError,
    PushKVError,
    TransportError,
)
from pushkv.runtime import wire
from pushkv.runtime.address import Address, url
from pushkv.runtime.control import Route
from pushkv.runtime.pair import Pair
from pushkv.runtime.scattering import Scattering
from pushkv.runtime.side import Shared
from pushkv.runtime.slots import agreed_room
from pushkv.trace import now as trace_now
from pushkv.transport.host import ProcessWatch

log = logging.getLogger(__name__)

SEARCH = 1.0
"""Seconds between looks for proof that lost producers have ended, where no blocks wait for it."""


@dataclass
class Dial:
    """A handshake under way. ``path_open``: the producer's warm-up WRITE has arrived."""

    token: bytes
    address: Address
    done: Future[Pair]
    pair: Pair | None = None
    path_open: bool = False

    @property
    def route(self) -> str:
        """The route of its connection."""
        return url(self.address)

    def fail(self, error: Exception) -> None:
        """Report that it came to nothing."""
        if not self.done.done():
            self.done.set_exception(error)

    def settle(self) -> bool:
        """Report success once the welcome and the warm-up are both here."""
        if self.pair is None or not self.path_open:
            return False
        if not self.done.done():
            self.done.set_result(self.pair)
        return True


def _overlap(one: list[frozenset[int]], other: list[frozenset[int]]) -> bool:
    return any(not mine.isdisjoint(theirs) for mine, theirs in zip(one, other, strict=False))


def _refusal(error: Exception) -> Outcome:
    """Why an order is refused, by what its making or its offering raised."""
    if isinstance(error, PeerLost):
        return Outcome.PEER_LOST
    if isinstance(error, TransportError):
        return Outcome.TRANSPORT_ERROR
    if isinstance(error, NoSlots):
        return Outcome.REJECTED_BUSY
    return Outcome.SUPERSEDED if isinstance(error, ProtocolError) else Outcome.REJECTED_GEOMETRY


class Consuming(Scattering):
    """The consumer's side."""

    accepts = (Ack, Complete, Drained, Failed, Ready)

    def __init__(self, shared: Shared, machine: ConsumerMachine) -> None:
        super().__init__(shared, machine)
        self.dials: dict[bytes, Dial] = {}
        self.linked: dict[str, Pair] = {}
        """The present pair of each producer, by route; also read by other threads."""
        self._traced: dict[bytes, TransferKey] = {}
        self._offered: dict[TransferKey, int] = {}
        self.held_blocks = 0
        self.quarantined_blocks = 0
        self.stuck_slots: Counter[str] = Counter()
        """By peer, the landing slots that wait for nothing but proof; also read by other threads."""
        self._blocks: dict[TransferKey, list[frozenset[int]]] = {}
        self._refused: dict[TransferKey, set[TransferKey]] = {}
        """Refused transfers whose blocks others have in custody, and which: they are released after those."""
        self._next_search = 0.0

    def ground(self, detail: str, now: float) -> None:
        """Without a data mover no arrival is heard: end what is open and drain over the control connections."""
        self.forget_looks()
        self.end_open(Outcome.TRANSPORT_ERROR, detail)
        for dial in self.dials.values():
            dial.fail(TransportError(detail))
        self.dials.clear()

    def look(self, now: float) -> bool:
        """As for any side; and now and then whether lost producers have ended, so that they can be forgotten."""
        if now >= self._next_search:
            self._next_search = now + SEARCH
            for pair in [pair for pair in self.agents.values() if pair.lost]:
                self.ask_proof(pair.agent, now)
        return super().look(now)

    def measure(self) -> None:
        """Publish how much is in custody."""
        self.forget_past_offers()
        self.in_custody = len(self.machine.transfers()) + len(self._refused)
        self.held_blocks = self.machine.held_blocks()
        self.quarantined = self.machine.quarantined
        self.stuck_slots = self.machine.stuck_slots()
        self.quarantined_blocks = self.machine.held_blocks(Target.QUARANTINED) if self.quarantined else 0

    def end_open(self, outcome: Outcome, detail: str) -> None:
        """Cancel every transfer, for this reason."""
        for key in self.machine.transfers():
            self.machine.cancel(key, self.shared.clock(), outcome, detail)
        self.run_commands()

    # Handshakes

    def dial(self, dial: Dial) -> None:
        """Introduce ourselves to a producer."""
        if self.me is None or self.transport is None:
            stuck = f"this consumer's data mover is stuck ({self.grounded}); restart it"
            dial.fail(TransportError(stuck))
            return
        self.dials[dial.token] = dial
        self.shared.control.dial(dial.address)
        self.shared.control.send(dial.route, wire.Introduction(dial.token, self.me))

    def give_up(self, dial: Dial) -> None:
        """Forget a handshake that is over or took too long."""
        self.dials.pop(dial.token, None)
        self._hang_up_unused(dial.route)

    def _hang_up_unused(self, route: Route) -> None:
        used = {pair.route for pair in self.agents.values()} | {dial.route for dial in self.dials.values()}
        if isinstance(route, str) and route not in used:
            self.shared.control.hang_up(route)

    def forget(self, pair: Pair) -> None:
        """As for every side; the connection closes with the last pair that uses it."""
        super().forget(pair)
        self._hang_up_unused(pair.route)

    def refused(self, refusal: wire.Refusal) -> None:
        """The producer does not want us."""
        dial = self.dials.pop(refusal.token, None)
        if dial is not None:
            dial.fail(HandshakeRefused(f"{dial.route} refused this consumer: {refusal.detail}"))

    def welcomed(self, welcome: wire.Welcome) -> None:
        """The producer is connected to us; connect to it."""
        dial = self.dials.get(welcome.token)
        if dial is None or dial.pair is not None:
            return
        try:
            dial.pair = self._pair(dial.route, welcome)
        except Exception as error:  # whatever a stranger's welcome makes of us
            self.dials.pop(welcome.token, None)
            if not isinstance(error, PushKVError):
                log.exception("The welcome of %s cannot be dealt with.", dial.route)
            dial.fail(error if isinstance(error, HandshakeError) else HandshakeError(f"{dial.route}: {error}"))
        else:
            self._conclude(dial)
        self.run_commands()

    def _pair(self, route: str, welcome: wire.Welcome) -> Pair:
        theirs, me = welcome.side, self.me
        assert me is not None
        if not OLDEST_VERSION <= welcome.version <= VERSION:
            raise HandshakeError(f"{route} answers in protocol version {welcome.version}; upgrade the older side")
        wire.check_verify(me, theirs)
        theirs.geometry.check(theirs.regions)
        if differing := differences(theirs.factors, me.factors):
            raise HandshakeError(f"the two caches differ (theirs against ours) in {'; '.join(differing)}")
        template = PairTemplate(theirs.geometry, me.geometry)
        room = agreed_room(me, theirs, template)
        pair = self.meet(theirs)
        if pair is None:
            watch = ProcessWatch.on(theirs.host) if theirs.host is not None else None
            pair = Pair(welcome.token, route, theirs, template, watch, self.shared.clock(), room=room)
            self.add(pair)
        self.adopt(pair, welcome.token)
        pair.moved = False
        pair.route, pair.theirs, pair.template, pair.fellows = route, theirs, template, welcome.fellows
        self.linked[route] = pair
        self._lose_earlier_epochs(pair)
        self.back(pair)
        self._greet(pair)
        return pair

    def _lose_earlier_epochs(self, pair: Pair) -> None:
        for earlier in list(self.agents.values()):
            if earlier.route == pair.route and earlier.agent != pair.agent and not earlier.moved:
                earlier.broken = True
                self.lose(earlier, f"{pair.agent} is a new epoch at its address", pair.heard)

    def _greet(self, pair: Pair) -> None:
        """A notification opens our way to the producer."""
        assert self.transport is not None
        try:
            self.transport.send(pair.agent, encode(pair.token, Hello(self.shared.agent)))
        except TransportError as error:
            pair.broken = isinstance(error, PeerLost)
            self.lose(pair, str(error), self.shared.clock())
            raise HandshakeError(f"{pair.agent} was lost right after the handshake: {error}") from error

    def stranger(self, token: bytes, payload: bytes) -> None:
        """The warm-up WRITE may be faster than the welcome."""
        dial = self.dials.get(token)
        if dial is None:
            super().stranger(token, payload)
        else:
            dial.path_open = True

    def hello(self, pair: Pair) -> None:
        """The producer's warm-up WRITE has arrived: the path is open for whoever waits for it."""
        for dial in [dial for dial in self.dials.values() if dial.pair is pair]:
            dial.path_open = True
            self._conclude(dial)

    def _conclude(self, dial: Dial) -> None:
        if dial.settle():
            self.dials.pop(dial.token, None)

    def regain(self, pair: Pair, now: float) -> None:
        """Tell the machine that this producer is there."""
        self.machine.connected(pair.agent, now)

    # Transfers

    def decline(self, key: TransferKey, siblings: Callable[[], dict[str, int]]) -> None:
        """Have producers hear that nothing of a transfer is wanted, where they can be told."""
        try:
            self.machine.decline(key, siblings(), self.shared.clock())
        except PushKVError as error:
            self._refuse(key, [], _refusal(error), str(error))
        self.run_commands()

    def offer(self, key: TransferKey, into: Blocks, make: Callable[[], Order]) -> None:
        """Offer blocks; an order that cannot be taken ends at once and touches nothing else."""
        sets = block_sets(into)
        try:
            if self.transport is None:
                raise TransportError(f"this consumer's data mover is stuck ({self.grounded}); restart it")
            order = make()
            lost = [agent for agent in order.owed if agent not in self.agents or self.agents[agent].lost]
            if lost:
                raise PeerLost(f"{key} is offered to {', '.join(lost)}, which is lost; connect again")
            self.machine.offer(order, self.shared.clock())
        except Exception as error:
            if not isinstance(error, PushKVError):
                log.exception("%s cannot be offered.", key)
            self._refuse(key, sets, _refusal(error), str(error) or type(error).__name__)
        else:
            self._blocks[key] = sets
        self.run_commands()

    def _refuse(self, key: TransferKey, sets: list[frozenset[int]], outcome: Outcome, detail: str) -> None:
        """End a transfer that was never offered. Blocks of it that others hold are not free before those are."""
        others = {other for other, held in self._blocks.items() if _overlap(held, sets)}
        self._pending.append(Ended(key, outcome, detail))
        if others:
            self._refused[key] = others
        else:
            self._pending.append(Released(key))

    def _released(self, key: TransferKey) -> None:
        self._blocks.pop(key, None)
        self.forget_offers(key)
        for refused, others in list(self._refused.items()):
            others.discard(key)
            if not others:
                del self._refused[refused]
                self._pending.append(Released(refused))

    def cancel(self, key: TransferKey, outcome: Outcome, detail: str) -> None:
        """End a transfer from this side."""
        self.machine.cancel(key, self.shared.clock(), outcome, detail)
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
        if isinstance(message, Complete):
            self.part(pair, message, now)
        else:
            self.machine.receive(pair.agent, message, now)

    def execute(self, command: Command, now: float) -> None:
        """As for every side, with the trace and the outcomes counted."""
        if isinstance(command, Send) and isinstance(command.message, Offer):
            self.note_offer(command.peer, command.message)
            self._trace_offer(command.message)
        elif isinstance(command, Ended):
            self.shared.stats[f"transfers {command.outcome.value}"] += 1
            self._trace_end(command)
        elif isinstance(command, Released):
            self._released(command.key)
        elif isinstance(command, Scatter):
            self.scatter(command)
            return
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
