"""The device's work: in its order, behind the caller's back, and landing only when somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Something queued: what it does, and the storages (by address of their host memory) that it writes."""

    run: Callable[[], object]
    writes: frozenset[int]


class WorkQueue:
    """What has been queued; ``landed`` of it are in memory.

    Nothing lands by itself: an event must have been asked once before it passes when it is asked again, so that a
    caller who does not wait always finds the old bytes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._work: list[Work] = []
        self.landed = 0

    def submit(self, run: Callable[[], object], writes: Iterable[int]) -> None:
        """Queue work."""
        with self._lock:
            self._work.append(Work(run, frozenset(writes)))

    @property
    def queued(self) -> int:
        """How much has been queued so far."""
        return len(self._work)

    def land(self, behind: int) -> None:
        """Let the first ``behind`` land."""
        with self._lock:
            while self.landed < behind:
                work = self._work[self.landed]
                self._work[self.landed] = Work(_nothing, frozenset())  # what it captured can go
                self.landed += 1
                work.run()

    def land_writes_to(self, storages: Iterable[int]) -> None:
        """Let everything up to the last work that writes one of these land: a blocking read of them."""
        wanted = frozenset(storages)
        with self._lock:
            last = max((at for at in range(self.landed, self.queued) if self._work[at].writes & wanted), default=-1)
            self.land(last + 1)

    def asked(self, behind: int) -> bool:
        """Whether the first ``behind`` have landed; if not, one more does now, for the next who asks."""
        with self._lock:
            if self.landed >= behind:
                return True
            self.land(self.landed + 1)
            return False


def _nothing() -> None:
    """What is left of work that has landed."""


class Event:
    """A point in the queue."""

    def __init__(self, queue: WorkQueue) -> None:
        self._queue = queue
        self._behind = 0

    def record(self, stream: object = None) -> None:
        """Put it behind everything that is queued."""
        self._behind = self._queue.queued

    def query(self) -> bool:
        """Whether what was before it has landed; never blocks."""
        return self._queue.asked(self._behind)

    def synchronize(self) -> None:
        """Wait until what was before it has landed."""
        self._queue.land(self._behind)
