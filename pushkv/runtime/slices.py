"""One WRITE in slices: its pieces, how many of them a slice may hold, and what of it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from pushkv.core.commands import Post, PostSlot
from pushkv.core.copies import CopyPlan
from pushkv.core.messages import encode
from pushkv.runtime.digest import Digest
from pushkv.runtime.pair import Pair

SLICE_SECONDS = 0.002
"""How long handing over one slice may take."""
RUN_MOST = 16 << 20
"""Bytes of the longest piece that is handed over as one, where pieces are not prepared units."""
MOST_FLYING = 4
"""How many slices of one WRITE are in flight at once."""


@dataclass
class Budget:
    """How much one slice to a peer may hold, learnt from how long the last ones took to hand over."""

    pieces: int = 1024
    bytes: int = 4 << 20

    def learn(self, seconds: float) -> None:
        """Take a full slice's cost into account."""
        if seconds > SLICE_SECONDS:
            self.pieces, self.bytes = max(16, self.pieces // 2), max(64 << 10, self.bytes // 2)
        elif seconds < SLICE_SECONDS / 4:
            self.pieces, self.bytes = min(1 << 20, self.pieces * 2), min(1 << 34, self.bytes * 2)


@dataclass
class Write:
    """One WRITE of the machine's: what is still to be posted of it, and what is in flight."""

    post: Post | PostSlot
    pair: Pair
    plan: CopyPlan
    notification: bytes
    posted_ns: int
    digest: Digest | None = None
    """That of its source bytes, where the notification is to carry it."""
    at: int = 0
    """How many pieces have been handed over."""
    flying: set[int] = field(default_factory=set)
    last: int | None = None
    """The slice that carries the notification, once it is posted."""
    began: float = 0.0
    """When its first slice was handed over; 0 where others were under way with it, so that it measures nothing."""

    def __post_init__(self) -> None:
        plan, indexed = self.plan, self.pair.prepared is not None
        self.index = (plan.source_index, plan.target_index) if indexed else (None, None)
        if self.index[0] is None:
            self.pieces = _chopped(plan)
            self.ends = np.cumsum(self.pieces[4])
        else:
            self.ends = np.arange(1, len(self.index[0]) + 1) * (plan.bytes // len(self.index[0]))

    @property
    def posted(self) -> bool:
        """Whether all of it has been handed over."""
        return self.at >= len(self.ends)

    def stop(self, budget: Budget) -> int:
        """Where the next slice stops."""
        done = int(self.ends[self.at - 1]) if self.at else 0
        most = int(np.searchsorted(self.ends, done + budget.bytes, side="right"))
        return min(max(most, self.at + 1), self.at + budget.pieces, len(self.ends))

    @property
    def hashing(self) -> bool:
        """Whether its digest is still to be worked out."""
        return self.digest is not None and not self.digest.done

    def sealed(self) -> bytes:
        """The notification, with the digest where there is one."""
        if self.digest is None:
            return self.notification
        return encode(self.pair.token, msgspec.structs.replace(self.post.complete, digest=self.digest.value))

    def ready(self, budget: Budget) -> bool:
        """Whether a slice may be posted: not too many are in flight, and the last waits for others and the digest."""
        last = self.stop(budget) == len(self.ends)
        return len(self.flying) < (1 if last else MOST_FLYING) and not (last and self.hashing)


def _chopped(plan: CopyPlan) -> tuple[NDArray[np.int64], ...]:
    """Source region and offset, target region and offset, and length of a plan's runs, none longer than RUN_MOST."""
    columns = (plan.source_region, plan.source_offset, plan.target_region, plan.target_offset, plan.length)
    if not plan.length.size or int(plan.length.max()) <= RUN_MOST:
        return columns
    counts = -(-plan.length // RUN_MOST)
    run = np.repeat(np.arange(plan.length.size), counts)
    skipped = (np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)) * RUN_MOST
    source_region, source, target_region, target, length = (column[run] for column in columns)
    return source_region, source + skipped, target_region, target + skipped, np.minimum(length - skipped, RUN_MOST)
