"""The producer's WRITEs on its transfer thread: planned once, posted in slices, watched to their end.

A large WRITE goes out in slices, each sized so that handing it over takes about :data:`SLICE_SECONDS`, with a look at
everything else in between; over some transports handing over is copying, and the thread would be away for all
of it. The notification rides on the last slice, which is posted when the others have ended and, where it is to carry
a digest of the source bytes, when that has been worked out: a slice's time of it a look, beside the posting.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pushkv.core.commands import Post, PostSlot
from pushkv.core.copies import CopyPlan
from pushkv.core.digest import plan_span, source_bytes
from pushkv.core.memory import Region
from pushkv.core.messages import Blocks, TransferKey, encode
from pushkv.core.outcome import Outcome
from pushkv.core.parts import part_bytes
from pushkv.core.plan import plan_copy
from pushkv.core.producer import ProducerMachine
from pushkv.errors import PeerLost, PushKVError, TransportError
from pushkv.runtime import wire
from pushkv.runtime.digest import Digest
from pushkv.runtime.pair import Pair, addresses, tables
from pushkv.runtime.peering import Shared
from pushkv.runtime.slices import SLICE_SECONDS, Budget, Write
from pushkv.runtime.staging import Staging
from pushkv.trace import now as trace_now
from pushkv.transport.base import Pieces, WriteResult, WriteStatus

log = logging.getLogger(__name__)

LIVELY = 2.0
"""Nothing is posted to a peer that has not been heard for as many seconds: a call to a dead one may not return."""


def outcome_of(error: Exception, reached: bool) -> Outcome:
    """Why a WRITE was not posted. What has not reached the transport and is not its error is a plan gone wrong."""
    if isinstance(error, PeerLost):
        return Outcome.PEER_LOST
    return Outcome.TRANSPORT_ERROR if reached or isinstance(error, TransportError) else Outcome.REJECTED_GEOMETRY


class Posting(Staging):
    """The part of the producer's side that has to do with WRITEs."""

    def __init__(self, shared: Shared, machine: ProducerMachine) -> None:
        super().__init__(shared, machine)
        self._writes: dict[int, Write] = {}
        """WRITEs under way, by the machine's number."""
        self._slices: dict[int, Write] = {}
        """And by the data mover's number of each slice in flight."""
        self._queues: dict[str, deque[Write]] = {}
        """What is still to be posted, by peer: one slice a peer and look."""
        self._budgets: dict[str, Budget] = {}

    def strand(self, detail: str, now: float) -> None:
        """The data mover is gone: what was in flight may travel for ever, what was not has ended."""
        writes = list(self._writes.values())
        self._writes.clear()
        self._slices.clear()
        self._queues.clear()
        for write in writes:
            reached = bool(write.flying) or write.at > 0
            self.machine.write_failed(write.post.write, Outcome.TRANSPORT_ERROR, detail, now, reached=reached)

    def post(self, post: Post | PostSlot, now: float) -> None:
        """Plan a WRITE and begin to post it."""
        pair, asked = self.agents.get(post.peer), trace_now()
        try:
            if self.transport is None or pair is None:
                raise TransportError(self.grounded or f"{post.peer} is not connected any more")
            if pair.lost:
                raise PeerLost(f"{post.peer} is lost")
            plan = self._plan(pair, post)
            write = Write(post, pair, plan, encode(pair.token, post.complete), asked, self._digest(pair, post, plan))
        except Exception as error:
            self._not_posted(post, pair, error, False, now)
            return
        self._writes[post.write] = write
        self._queues.setdefault(post.peer, deque()).append(write)
        if len(self._queues[post.peer]) == 1:
            self._advance(post.peer, now)

    def _plan(self, pair: Pair, post: Post | PostSlot) -> CopyPlan:
        if isinstance(post, PostSlot):
            return self._slot_plan(pair, post)
        assert isinstance(post.target, Blocks)
        if post.alone:
            (span,) = post.complete.spans
            return plan_span(pair.template, tables(post.source), tables(post.target), span, post.end)
        return plan_copy(
            pair.template.source,
            pair.template.target,
            tables(post.source),
            tables(post.target),
            (post.start, post.stop),
            template=pair.template,
            end=post.end,
            whole_blocks=self._fills(pair, post),
        )

    def _fills(self, pair: Pair, post: Post) -> bool:
        """Whether a part ends where the offer does, in a block whose rest is nobody's, and begins with a block."""
        begins = all(post.start % one.source.span == 0 for one in pair.template.pairs)
        return pair.theirs.free_tail and post.stop == post.end and begins and not self.verifies

    def _digest(self, pair: Pair, post: Post | PostSlot, plan: CopyPlan) -> Digest | None:
        if not self.verifies:
            return None
        if isinstance(post, PostSlot):
            assert self.shared.slots is not None
            return Digest(self.shared.slots, self.shared.slots.stretch(post.slot, plan.bytes))
        assert self.reader is not None
        assert isinstance(post.target, Blocks)
        spans, sides = post.complete.spans, (tables(post.source), tables(post.target))
        plans = [plan_span(pair.template, *sides, span, post.end) for span in spans] if len(spans) > 1 else [plan]
        return Digest(self.reader, source_bytes(plans))

    def _slot_plan(self, pair: Pair, post: PostSlot) -> CopyPlan:
        """The run from a staging slot to its credit's landing slot. Raises TransportError for a wrong credit."""
        ours, theirs, credit = self.shared.slots, pair.theirs.slots, post.complete.credit
        if ours is None or theirs is None or credit is None or credit.slot >= theirs.count:
            raise TransportError(f"{pair.agent} has granted {credit}, which is none of its landing slots")
        length = part_bytes(pair.template, post.complete.spans)
        offset = theirs.first + credit.slot * theirs.size
        none = np.zeros(1, np.int64)
        columns = (np.array([value], np.int64) for value in (ours.offset(post.slot), offset, length))
        source, target, size = columns
        return CopyPlan(none, source, none, target, size, 1, length)

    def advance(self, now: float) -> bool:
        """Post a slice to each peer that something waits for; whether anything was posted."""
        return any([self._advance(peer, now) for peer in list(self._queues)])

    @property
    def slicing(self) -> bool:
        """Whether there is a slice that could be posted at once."""
        queues = [(peer, queue) for peer, queue in self._queues.items() if queue]
        return any(queue[0].hashing or self._next(peer, queue) is not None for peer, queue in queues)

    def _next(self, peer: str, queue: deque[Write]) -> Write | None:
        """Of the first two WRITEs to a peer the one that may be posted: while one waits for its last slice, the next
        begins. Many small parts would cross one at a time otherwise."""
        budget = self._budget(peer)
        return next((one for one in islice(queue, 2) if one.ready(budget) and self._lively(one)), None)

    def _budget(self, peer: str) -> Budget:
        return self._budgets.setdefault(peer, Budget())

    def _lively(self, write: Write) -> bool:
        return self.shared.clock() - write.pair.heard <= LIVELY

    def _advance(self, peer: str, now: float) -> bool:
        queue = self._queues.get(peer)
        if not queue:
            self._queues.pop(peer, None)
            return False
        busy = queue[0].hashing and self._hash(queue[0], now)
        write = self._next(peer, queue)
        if write is None:
            return busy
        self._post_slice(write, now)
        if (write.posted or write.post.write not in self._writes) and write in queue:
            queue.remove(write)
        return True

    def _hash(self, write: Write, now: float) -> bool:
        """Go on with a WRITE's digest; reading device memory may not return, and is watched like a call to NIXL."""
        assert write.digest is not None
        what = "a staging slot" if isinstance(write.post, PostSlot) else "the source blocks"
        try:
            self.shared.turn.away(f"reading {what} back", write.digest.work, SLICE_SECONDS)
        except Exception as error:
            self._queues[write.post.peer].remove(write)
            reached = bool(write.flying)
            self._give_up(write)
            failed = TransportError(f"{what} cannot be read back for a digest: {error}")
            self._not_posted(write.post, write.pair, failed, reached, now)
        return True

    def _post_slice(self, write: Write, now: float) -> None:
        budget = self._budget(write.post.peer)
        start, write.at = write.at, write.stop(budget)
        began = time.perf_counter()
        try:
            number = self._hand_over(write, start, write.sealed() if write.posted else b"")
        except Exception as error:
            # Of this slice nothing was handed over, by the transport's word; of those before it something was.
            reached = not isinstance(error, PushKVError) or bool(write.flying)
            self._give_up(write)
            self._not_posted(write.post, write.pair, error, reached, now)
            return
        if not write.posted or start:
            budget.learn(time.perf_counter() - began)
        if not start:
            self._count(write)
            self._time(write, began)
        if write.posted:
            self.knock(write.pair)
        write.flying.add(number)
        write.last = number if write.posted else None
        self._slices[number] = write

    def _hand_over(self, write: Write, start: int, notification: bytes) -> int:
        assert self.transport is not None
        pair, some = write.pair, slice(start, write.at)
        source, target = write.index
        if pair.prepared is not None and source is not None and target is not None:
            return self.transport.write_indexed(pair.prepared, source[some], target[some], notification)
        source_region, source_offset, target_region, target_offset, length = (column[some] for column in write.pieces)
        ours, theirs = self._memories(write)
        sizes = length.astype(np.uint64)
        return self.transport.write(
            pair.agent,
            pieces(ours, addresses(ours, source_region, source_offset), sizes),
            pieces(theirs, addresses(theirs, target_region, target_offset), sizes),
            notification,
        )

    def _memories(self, write: Write) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        """The regions that its plan speaks of: the caches', or each side's slots."""
        slots, theirs = self.shared.slots, write.pair.theirs
        if isinstance(write.post, PostSlot) and slots is not None and theirs.slots is not None:
            return (slots.region,), (theirs.slots.region,)
        return self.shared.cache.regions, theirs.regions

    def _give_up(self, write: Write) -> None:
        """Post nothing more of a WRITE, and take no more notice of what is in flight of it."""
        write.at = len(write.ends)
        self._writes.pop(write.post.write, None)
        for number in write.flying:
            self._slices.pop(number, None)

    def _not_posted(
        self, post: Post | PostSlot, pair: Pair | None, error: Exception, reached: bool, now: float
    ) -> None:
        if not isinstance(error, PushKVError):
            log.error("%s cannot be posted.", post.key, exc_info=error)
        detail = str(error) or type(error).__name__
        self.machine.write_failed(post.write, outcome_of(error, reached), detail, now, reached=reached)
        if isinstance(error, PeerLost) and pair is not None:
            pair.broken = True
            self.lose(pair, detail, now)

    def cut(self, key: TransferKey, now: float) -> None:
        """The transfer is over or fails: what is not handed over yet need not be."""
        for queue in self._queues.values():
            for write in [one for one in queue if one.post.key == key and not one.posted]:
                queue.remove(write)
                write.at = len(write.ends)
                self._end_if_idle(write, now)

    def lose(self, pair: Pair, detail: str, now: float) -> None:
        """As for every side; what waits to be posted to the peer is not."""
        super().lose(pair, detail, now)
        for write in self._queues.pop(pair.agent, ()):
            write.at = len(write.ends)
            self._end_if_idle(write, now)

    def _end_if_idle(self, write: Write, now: float) -> None:
        """End a WRITE that was cut short, once nothing of it is in flight: then nothing travels."""
        if write.last is None and not write.flying and self._writes.pop(write.post.write, None) is not None:
            self.machine.write_failed(write.post.write, Outcome.CANCELLED, "cut short", now, reached=False)

    def slice_ended(self, result: WriteResult, now: float) -> bool:
        """Take in the end of a slice; whether it was one of ours."""
        write = self._slices.pop(result.write, None)
        if write is None:
            return False
        write.flying.discard(result.write)
        if result.status is WriteStatus.FAILED:
            self._failed(write, result, now)
        elif result.write == write.last:
            self._trace_end(write, result.status)
            self._writes.pop(write.post.write, None)
            self._measure(write)
            self.knock(write.pair)
            self.machine.write_done(write.post.write, now)
        elif write.posted:
            self._end_if_idle(write, now)
        return True

    def _failed(self, write: Write, result: WriteResult, now: float) -> None:
        self._trace_end(write, result.status)
        outcome = Outcome.PEER_LOST if result.peer_lost else Outcome.TRANSPORT_ERROR
        reached = result.reached or bool(write.flying)
        self._give_up(write)
        self.machine.write_failed(write.post.write, outcome, result.error, now, reached=reached)
        if result.peer_lost:
            write.pair.broken = True
            self.lose(write.pair, result.error, now)

    def _count(self, write: Write) -> None:
        stats, plan = self.shared.stats, write.plan
        stats["writes"] += 1
        stats["bytes"] += plan.bytes
        stats["descriptors before"] += plan.descriptors_before
        stats["descriptors"] += plan.descriptors

    def _time(self, write: Write, began: float) -> None:
        """Time a WRITE from its first slice on, if nothing else is under way, nor comes to be."""
        others = [one for one in self._slices.values() if one is not write]
        for one in others:
            one.began = 0.0
        write.began = 0.0 if others else began

    def _measure(self, write: Write) -> None:
        """Learn from a WRITE that has had the way to itself, and tell the peer of what has changed."""
        if not write.began:
            return
        pair = write.pair
        pair.meter.learn(write.plan.descriptors, write.plan.bytes, time.perf_counter() - write.began)
        if (prices := pair.meter.news()) is not None:
            self.shared.control.send(pair.route, wire.Measured(pair.token, prices.descriptor, prices.wire))

    def _trace_end(self, write: Write, status: WriteStatus) -> None:
        self.shared.trace.span(
            "WRITE", "transfers", str(write.post.key), write.posted_ns, trace_now(),
            bytes=write.plan.bytes, descriptors=write.plan.descriptors, status=status.value,
        )  # fmt: skip


def pieces(regions: tuple[Region, ...], address: NDArray[np.uint64], length: NDArray[np.uint64]) -> Pieces:
    """Pieces in the memory that these regions are of."""
    return Pieces(address, length, regions[0].device, regions[0].memory)
