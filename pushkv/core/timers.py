"""Timers as data: what is due when. Nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush


class Timers:
    """A set of named timers.

    Most are moved or cancelled before they are due, so the heap may hold entries that no longer stand: an entry
    stands while it is the one that the name was last set with.
    """

    __slots__ = ("_due", "_heap", "_settings")

    def __init__(self) -> None:
        self._due: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._settings = 0

    def set(self, name: Hashable, when: float) -> None:
        """Set or move a timer."""
        self._settings += 1
        self._due[name] = (when, self._settings)
        heappush(self._heap, (when, self._settings, name))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [(when, setting, name) for name, (when, setting) in self._due.items()]
            heapify(self._heap)

    def cancel(self, name: Hashable) -> None:
        """Forget a timer; unknown names are fine."""
        self._due.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._due

    def __len__(self) -> int:
        return len(self._due)

    def pending(self) -> Iterator[Hashable]:
        """The names of all timers that are set."""
        return iter(self._due)

    def next(self) -> float | None:
        """When the first timer is due, None for no timer at all."""
        while self._heap:
            when, setting, name = self._heap[0]
            if self._due.get(name) == (when, setting):
                return when
            heappop(self._heap)
        return None

    def take(self, now: float) -> list[Hashable]:
        """Remove and return the timers that are due, earliest first."""
        due = []
        while (first := self.next()) is not None and first <= now:
            _, _, name = heappop(self._heap)
            del self._due[name]
            due.append(name)
        return due
