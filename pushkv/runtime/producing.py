"""The producer's transfer thread: introductions, stages behind their fences, WRITEs."""

from __future__ import annotations

import logging

import numpy as np

from pushkv.core.commands import Command, Ended, Gather, Post, PostSlot, Send
from pushkv.core.compat import differences
from pushkv.core.memory import Region
from pushkv.core.messages import Cancel, Failed, Grant, Message, Offer, Renew, TransferKey, encode
from pushkv.core.messages import Hello as HelloMessage
from pushkv.core.outcome import Outcome
from pushkv.core.parts import cut
from pushkv.core.producer import ProducerMachine
from pushkv.core.states import Source
from pushkv.core.template import PairTemplate, UnitRows
from pushkv.errors import HandshakeError, PeerLost, PushKVError, TransportError
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.runtime.gathering import Gathering
from pushkv.runtime.loop import Urgency
from pushkv.runtime.pair import Pair, addresses
from pushkv.runtime.posting import pieces
from pushkv.runtime.side import Shared
from pushkv.runtime.slots import agreed_room
from pushkv.runtime.streaming import streaming_of
from pushkv.trace import now as trace_now
from pushkv.transport.base import Lattice, Pieces, WriteResult, WriteStatus
from pushkv.transport.host import ProcessWatch

log = logging.getLogger(__name__)


class Producing(Gathering):
    """The producer's side."""

    accepts = (Offer, Cancel, Renew, Grant)

    def __init__(self, shared: Shared, machine: ProducerMachine) -> None:
        super().__init__(shared, machine)
        self._warming: dict[int, tuple[Pair, bytes]] = {}
        """The WRITEs that open paths, with the pair and its handshake's token."""
        self._seen: dict[TransferKey, int] = {}

    def ground(self, detail: str, now: float) -> None:
        """Without a data mover nothing can be sent: whatever was in flight may travel for ever."""
        self.strand(detail, now)
        self.end_all(now, Outcome.TRANSPORT_ERROR, detail)

    def urgency(self) -> Urgency:
        """WRITEs in flight need polling, and so do fences; the next slice waits for nothing."""
        if self.slicing:
            return Urgency.NO_ONE
        waits = self._writes or self._fenced
        return max(Urgency.WRITE if waits else Urgency.NOTHING, super().urgency())

    def look(self, now: float) -> bool:
        """As for any side, after the fences."""
        return self.pass_fences(now) | self.advance(now) | super().look(now)

    def measure(self) -> None:
        """Publish how much is open or read."""
        self.in_custody = self.machine.open_transfers + self.machine.reading
        custody = self.machine.custody()
        self.quarantined = (
            custody[Source.STUCK] + custody[Source.DRAINING] if self.grounded else custody[Source.STUCK]
        )

    def end_open(self, outcome: Outcome, detail: str) -> None:
        """End every stage and every offer, for this reason."""
        self.end_all(self.shared.clock(), outcome, detail)

    # Handshakes

    def introduced(self, route: Route, introduction: wire.Introduction) -> None:
        """Answer an introduction: both sides are connected after it, or neither."""
        known = self.pairs.get(introduction.token)
        try:
            if self.transport is None:
                raise HandshakeError(f"this producer's data mover is stuck ({self.grounded}); restart it")
            pair = known or self._pair(route, introduction)
        except Exception as error:  # whatever a stranger's introduction makes of us
            if not isinstance(error, PushKVError):
                log.exception("The introduction of %s cannot be dealt with.", introduction.side.agent)
            self.shared.stats["handshakes refused"] += 1
            detail = str(error)[:2000] or type(error).__name__
            log.warning("Refused %s: %s", introduction.side.agent, detail)
            self.shared.control.send(route, wire.Refusal(introduction.token, detail))
            self.run_commands()
            return
        pair.route = route
        assert self.me is not None
        version = wire.common_version((self.me.oldest, self.me.newest), (pair.theirs.oldest, pair.theirs.newest))
        self.shared.control.send(
            route, wire.Welcome(introduction.token, version, self.me, tuple(self.shared.fellows))
        )
        self._warm_up(pair, introduction.token)
        self.run_commands()

    def _pair(self, route: Route, introduction: wire.Introduction) -> Pair:
        theirs, me = introduction.side, self.me
        assert me is not None
        wire.common_version((me.oldest, me.newest), (theirs.oldest, theirs.newest))
        wire.check_verify(me, theirs)
        theirs.geometry.check(theirs.regions)
        if differing := differences(me.factors, theirs.factors):
            raise HandshakeError(f"the two caches differ (ours against theirs) in {'; '.join(differing)}")
        template = PairTemplate(me.geometry, theirs.geometry)
        room = agreed_room(me, theirs, template)
        pair = self.meet(theirs)
        if pair is None:
            pair = Pair(introduction.token, route, theirs, template, None, self.shared.clock(), room=room)
            pair.prepared = self._prepare(pair)
            pair.watch = ProcessWatch.on(theirs.host) if theirs.host is not None else None
            self.add(pair)
        else:
            self.pairs.pop(pair.coming, None)
            pair.coming, pair.theirs, pair.template = introduction.token, theirs, template
            self.pairs[introduction.token] = pair
            pair.prepared = self._prepare(pair) if pair.prepared is None else pair.prepared
        self.back(pair)
        return pair

    def regain(self, pair: Pair, now: float) -> None:
        """Tell the machine that this consumer is there."""
        template, room = pair.template, pair.room
        self.machine.connected(
            pair.agent,
            lambda start, stop, end: template.owed((start, stop), end=end),
            now,
            (lambda spans: cut(template, spans, room)) if room else None,
            streaming_of(self.shared.config.stream, template),
        )

    def estranged(self, pair: Pair) -> None:
        """Have the consumer introduce itself again: nothing that it offers meanwhile would be taken."""
        self.shared.control.send(pair.route, wire.Moved(pair.token))

    def _prepare(self, pair: Pair) -> int | None:
        lattice = pair.template.lattice()
        if lattice is None or self.transport is None or self._slots_only(pair):
            return None
        source, target, unit = lattice
        ours, theirs = self.shared.cache.regions, pair.theirs.regions
        return self.transport.prepare(pair.agent, _lattice(ours, source, unit), _lattice(theirs, target, unit))

    def _slots_only(self, pair: Pair) -> bool:
        """Whether a cache of the two is not registered."""
        assert self.me is not None
        return any(side.slots is not None and side.slots.only for side in (self.me, pair.theirs))

    def _warm_up(self, pair: Pair, token: bytes) -> None:
        """A WRITE of no bytes opens the path, so that the first real one does not pay for it."""
        assert self.transport is not None
        notification = encode(token, HelloMessage(self.shared.agent))
        source, target = self.reached(pair)
        try:
            write = self.transport.write(pair.agent, _no_bytes(source), _no_bytes(target), notification)
            self._warming[write] = pair, token
        except TransportError as error:
            self._no_path(pair, token, str(error), isinstance(error, PeerLost), self.shared.clock())

    def _no_path(self, pair: Pair, token: bytes, detail: str, lost: bool, now: float) -> None:
        """The path could not be opened: the consumer waits for that, and is told."""
        log.warning("The path to %s could not be opened: %s", pair.agent, detail)
        told = f"its path to {pair.agent} could not be opened: {detail}"
        self.shared.control.send(pair.route, wire.Refusal(token, told[:2000]))
        if lost:
            pair.broken = True
            self.lose(pair, detail, now)

    def hello(self, pair: Pair) -> None:
        """The consumer's answer to the warm-up: both ways are open."""

    # Messages and WRITEs

    def message(self, pair: Pair, message: Message, now: float) -> None:
        """Offers, cancels and renewals."""
        assert isinstance(message, (Offer, Cancel, Renew, Grant))
        if isinstance(message, (Offer, Cancel)) and (
            (message.key.engine, message.key.epoch) != (pair.theirs.engine, pair.theirs.epoch)
        ):
            # A later attempt under another's name would end that one's transfer.
            self.shared.stats["foreign keys"] += 1
            return
        if isinstance(message, Offer):
            self._trace_offer(message)
        self.machine.receive(pair.agent, message, now)

    def execute(self, command: Command, now: float) -> None:
        """Posts are ours; the rest is every side's."""
        if isinstance(command, (Post, PostSlot)):
            self.post(command, now)
            self._trace_post(command)
            return
        if isinstance(command, Gather):
            self.gather(command)
            return
        self._account(command)
        if isinstance(command, Ended):
            self.cut(command.key, now)
        elif isinstance(command, Send) and isinstance(command.message, Failed):
            self.cut(command.message.key, now)
        super().execute(command, now)

    def _account(self, command: Command) -> None:
        if isinstance(command, Ended):
            self.shared.stats[f"transfers {command.outcome.value}"] += 1
            self._seen.pop(command.key, None)
        else:
            self.account(command)

    def _trace_post(self, post: Post | PostSlot) -> None:
        write = self._writes.get(post.write)
        if write is None:
            return
        started = write.posted_ns
        trace, nonce = self.shared.trace, post.complete.nonce
        if trace.enabled:
            trace.instant("rendezvous", "transfers", str(post.key), at_ns=started)
            trace.flow_start("KV", "transfers", f"{nonce.hex()}.{post.complete.part}", at_ns=started)
            if (seen := self._seen.pop(post.key, None)) is not None:
                trace.span("offer waits", "transfers", str(post.key), seen, started)

    def _trace_offer(self, offer: Offer) -> None:
        trace = self.shared.trace
        if trace.enabled and offer.key not in self._seen:
            if len(self._seen) >= self.shared.config.limits.window:  # offers that came to nothing
                del self._seen[next(iter(self._seen))]
            self._seen[offer.key] = trace_now()
            trace.instant("offer seen", "transfers", str(offer.key), tokens=offer.stop - offer.start)
            trace.flow_end("offer", "transfers", offer.nonce.hex())

    def poll_writes(self, now: float) -> bool:
        """Take the WRITEs that ended and tell the machine."""
        if self.transport is None or not (self._writes or self.agents):
            return False
        try:
            ended = self.transport.poll()
        except Exception as error:
            self.complain("WRITEs cannot be polled", error)
            return False
        return self.each(ended, lambda result: self._ended(result, now))

    def _ended(self, result: WriteResult, now: float) -> None:
        if not self.slice_ended(result, now):
            self._warmed(result, now)

    def _warmed(self, result: WriteResult, now: float) -> None:
        warmed = self._warming.pop(result.write, None)
        if warmed is not None and result.status is WriteStatus.FAILED:
            self._no_path(*warmed, result.error, result.peer_lost, now)


def _lattice(regions: tuple[Region, ...], rows: UnitRows, unit: int) -> Lattice:
    return Lattice(
        address=addresses(regions, rows.region, rows.offset),
        stride=rows.stride.astype(np.uint64),
        count=rows.units.astype(np.uint64),
        size=unit,
        device=regions[0].device,
        memory=regions[0].memory,
    )


def _no_bytes(regions: tuple[Region, ...]) -> Pieces:
    return pieces(regions, np.array([regions[0].address], np.uint64), np.zeros(1, np.uint64))
