"""The producer's transfer thread: introductions, stages behind their fences, WRITEs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from pushkv.core.commands import Command, Ended, Post
from pushkv.core.compat import differences
from pushkv.core.copies import CopyPlan
from pushkv.core.geometry import BlockTable
from pushkv.core.memory import Region
from pushkv.core.messages import Blocks, Cancel, Grant, Message, Offer, Renew, TransferKey, encode
from pushkv.core.messages import Hello as HelloMessage
from pushkv.core.outcome import Outcome
from pushkv.core.plan import plan_copy
from pushkv.core.producer import ProducerMachine
from pushkv.core.states import Source
from pushkv.core.template import PairTemplate, UnitRows
from pushkv.errors import HandshakeError, PeerLost, PushKVError, TransportError
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.runtime.pair import Pair, addresses
from pushkv.runtime.side import Shared
from pushkv.runtime.staging import Staging
from pushkv.trace import now as trace_now
from pushkv.transport.base import Lattice, Pieces, WriteResult, WriteStatus
from pushkv.transport.host import ProcessWatch

log = logging.getLogger(__name__)


@dataclass
class _Write:
    """A WRITE that the data mover has: the machine's number for it, and what it is."""

    number: int
    post: Post
    plan: CopyPlan
    posted_ns: int


def tables(blocks: Blocks) -> tuple[BlockTable, ...]:
    """A message's block tables as the planner takes them."""
    return tuple(BlockTable(table.first, np.frombuffer(table.ids, "<i4")) for table in blocks.tables)


class Producing(Staging):
    """The producer's side."""

    accepts = (Offer, Cancel, Renew, Grant)

    def __init__(self, shared: Shared, machine: ProducerMachine) -> None:
        super().__init__(shared, machine)
        self._writes: dict[int, _Write] = {}
        self._posting: int | None = None
        self._warming: dict[int, Pair] = {}
        self._seen: dict[TransferKey, int] = {}

    def ground(self, detail: str, now: float) -> None:
        """Without a data mover nothing can be sent: whatever was in flight may travel for ever."""
        stranded = [write.number for write in self._writes.values()]
        stranded += [] if self._posting is None else [self._posting]
        self._writes.clear()
        self._posting = None
        for number in stranded:
            self.machine.write_failed(number, Outcome.TRANSPORT_ERROR, detail, now)
        self.end_all(now, Outcome.TRANSPORT_ERROR, detail)

    def urgency(self) -> int:
        """WRITEs in flight need polling, and so do fences."""
        return 2 if self._writes or self._fenced else super().urgency()

    def look(self, now: float) -> bool:
        """As for any side, after the fences."""
        return self.pass_fences(now) | super().look(now)

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
            log.warning("Refused %s: %s", introduction.side.agent, error)
            detail = str(error)[:2000] or type(error).__name__
            self.shared.control.send(route, wire.Refusal(introduction.token, detail))
            self.run_commands()
            return
        pair.route = route
        assert self.me is not None
        version = wire.common_version((self.me.oldest, self.me.newest), (pair.theirs.oldest, pair.theirs.newest))
        self.shared.control.send(route, wire.Welcome(introduction.token, version, self.me))
        self._warm_up(pair, introduction.token)
        self.run_commands()

    def _pair(self, route: Route, introduction: wire.Introduction) -> Pair:
        theirs, me = introduction.side, self.me
        assert me is not None
        wire.common_version((me.oldest, me.newest), (theirs.oldest, theirs.newest))
        theirs.geometry.check(theirs.regions)
        if differing := differences(me.factors, theirs.factors):
            raise HandshakeError(f"the two caches differ (ours against theirs) in {'; '.join(differing)}")
        template = PairTemplate(me.geometry, theirs.geometry)
        pair = self.meet(theirs)
        if pair is None:
            pair = Pair(introduction.token, route, theirs, template, None, self.shared.clock())
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
        template = pair.template
        self.machine.connected(pair.agent, lambda start, stop, end: template.owed((start, stop), end=end), now)

    def _prepare(self, pair: Pair) -> int | None:
        lattice = pair.template.lattice()
        if lattice is None or self.transport is None:
            return None
        source, target, unit = lattice
        ours, theirs = self.shared.cache.regions, pair.theirs.regions
        return self.transport.prepare(pair.agent, _lattice(ours, source, unit), _lattice(theirs, target, unit))

    def _warm_up(self, pair: Pair, token: bytes) -> None:
        """A WRITE of no bytes opens the path, so that the first real one does not pay for it."""
        assert self.transport is not None
        notification = encode(token, HelloMessage(self.shared.agent))
        source, target = self.shared.cache.regions[:1], pair.theirs.regions[:1]
        try:
            write = self.transport.write(pair.agent, _no_bytes(source), _no_bytes(target), notification)
            self._warming[write] = pair
        except PeerLost as error:
            pair.broken = True
            self.lose(pair, str(error), self.shared.clock())
        except TransportError as error:
            log.warning("The path to %s could not be opened: %s", pair.agent, error)

    def hello(self, pair: Pair) -> None:
        """The consumer's answer to the warm-up: both ways are open."""

    # Messages and WRITEs

    def message(self, pair: Pair, message: Message, now: float) -> None:
        """Offers, cancels and renewals."""
        assert isinstance(message, (Offer, Cancel, Renew, Grant))
        if isinstance(message, Offer):
            self._trace_offer(message)
        self.machine.receive(pair.agent, message, now)

    def execute(self, command: Command, now: float) -> None:
        """Posts are ours; the rest is every side's."""
        if isinstance(command, Post):
            self._post(command, now)
        else:
            self._account(command)
            super().execute(command, now)

    def _account(self, command: Command) -> None:
        if isinstance(command, Ended):
            self.shared.stats[f"transfers {command.outcome.value}"] += 1
            self._seen.pop(command.key, None)
        else:
            self.account(command)

    def _post(self, post: Post, now: float) -> None:
        pair, started = self.agents.get(post.peer), trace_now()
        try:
            if self.transport is None or pair is None:
                raise TransportError(self.grounded or f"{post.peer} is not connected any more")
            plan = self._plan(pair, post)
            notification = encode(pair.token, post.complete)
        except Exception as error:
            self._not_posted(post, pair, error, False, now)
            return
        self._posting = post.write
        try:
            number = self._write(pair, plan, notification)
        except PushKVError as error:  # nothing was handed over: the transport's word
            self._not_posted(post, pair, error, False, now)
        except Exception as error:
            self._not_posted(post, pair, error, True, now)
        else:
            self._posted(number, post, plan, started)
        self._posting = None

    def _not_posted(self, post: Post, pair: Pair | None, error: Exception, reached: bool, now: float) -> None:
        if not isinstance(error, PushKVError):
            log.error("%s cannot be posted.", post.key, exc_info=error)
        detail = str(error) or type(error).__name__
        self.machine.write_failed(post.write, _outcome(error, reached), detail, now, reached=reached)
        if isinstance(error, PeerLost) and pair is not None:
            pair.broken = True
            self.lose(pair, detail, now)

    def _plan(self, pair: Pair, post: Post) -> CopyPlan:
        assert isinstance(post.target, Blocks)
        return plan_copy(
            pair.template.source,
            pair.template.target,
            tables(post.source),
            tables(post.target),
            (post.start, post.stop),
            template=pair.template,
            end=post.end,
        )

    def _write(self, pair: Pair, plan: CopyPlan, notification: bytes) -> int:
        assert self.transport is not None
        if pair.prepared is not None:
            source, target = plan.source_index, plan.target_index
            if source is not None and target is not None:
                return self.transport.write_indexed(pair.prepared, source, target, notification)
        length = plan.length.astype(np.uint64)
        ours, theirs = self.shared.cache.regions, pair.theirs.regions
        source_at = addresses(ours, plan.source_region, plan.source_offset)
        target_at = pair.addresses(plan.target_region, plan.target_offset)
        return self.transport.write(
            pair.agent, _pieces(ours, source_at, length), _pieces(theirs, target_at, length), notification
        )

    def _posted(self, number: int, post: Post, plan: CopyPlan, started: int) -> None:
        self._writes[number] = _Write(post.write, post, plan, started)
        stats = self.shared.stats
        stats["writes"] += 1
        stats["bytes"] += plan.bytes
        stats["descriptors before"] += plan.descriptors_before
        stats["descriptors"] += plan.descriptors
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
        write = self._writes.pop(result.write, None)
        if write is None:
            self._warmed(result, now)
            return
        post = write.post
        self.shared.trace.span(
            "WRITE", "transfers", str(post.key), write.posted_ns, trace_now(),
            bytes=write.plan.bytes, descriptors=write.plan.descriptors, status=result.status.value,
        )  # fmt: skip
        if result.status is WriteStatus.DONE:
            self.machine.write_done(write.number, now)
        else:
            outcome = Outcome.PEER_LOST if result.peer_lost else Outcome.TRANSPORT_ERROR
            self.machine.write_failed(write.number, outcome, result.error, now, reached=result.reached)
            pair = self.agents.get(post.peer)
            if result.peer_lost and pair is not None:
                pair.broken = True
                self.lose(pair, result.error, now)

    def _warmed(self, result: WriteResult, now: float) -> None:
        pair = self._warming.pop(result.write, None)
        if pair is None or result.status is WriteStatus.DONE:
            return
        log.warning("The path to %s could not be opened: %s", pair.agent, result.error)
        if result.peer_lost:
            pair.broken = True
            self.lose(pair, result.error, now)


def _outcome(error: Exception, reached: bool) -> Outcome:
    """Why a WRITE was not posted. What has not reached the transport and is not its error is a plan gone wrong."""
    if isinstance(error, PeerLost):
        return Outcome.PEER_LOST
    return Outcome.TRANSPORT_ERROR if reached or isinstance(error, TransportError) else Outcome.REJECTED_GEOMETRY


def _lattice(regions: tuple[Region, ...], rows: UnitRows, unit: int) -> Lattice:
    return Lattice(
        address=addresses(regions, rows.region, rows.offset),
        stride=rows.stride.astype(np.uint64),
        count=rows.units.astype(np.uint64),
        size=unit,
        device=regions[0].device,
        memory=regions[0].memory,
    )


def _pieces(regions: tuple[Region, ...], address: np.ndarray, length: np.ndarray) -> Pieces:
    return Pieces(address, length, regions[0].device, regions[0].memory)


def _no_bytes(regions: tuple[Region, ...]) -> Pieces:
    return _pieces(regions, np.array([regions[0].address], np.uint64), np.zeros(1, np.uint64))
