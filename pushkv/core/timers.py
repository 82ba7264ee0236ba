"""Timers as data: what is due when. Nothing here reads a clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterator


class Timers:
    """A set of named timers. Few are pending at once and most are cancelled, so a dict does."""

    __slots__ = ("_due", "_next")

    def __init__(self) -> None:
        self._due: dict[Hashable, float] = {}
        self._next: float | None = None

    def set(self, name: Hashable, when: float) -> None:
        """Set or move a timer."""
        self._due[name] = when
        if self._next is not None and when < self._next:
            self._next = when

    def cancel(self, name: Hashable) -> None:
        """Forget a timer; unknown names are fine."""
        if self._due.pop(name, None) == self._next:
            self._next = None

    def __contains__(self, name: Hashable) -> bool:
        return name in self._due

    def pending(self) -> Iterator[Hashable]:
        """The names of all timers that are set."""
        return iter(self._due)

    def next(self) -> float | None:
        """When the first timer is due, None for no timer at all."""
        if self._next is None and self._due:
            self._next = min(self._due.values())
        return self._next if self._due else None

    def take(self, now: float) -> list[Hashable]:
        """Remove and return the timers that are due, earliest first."""
        first = self.next()
        if first is None or first > now:
            return []
        due = sorted((when, index, name) for index, (name, when) in enumerate(self._due.items()) if when <= now)
        for _, _, name in due:
            del self._due[name]
        self._next = None
        return [name for _, _, name in due]
