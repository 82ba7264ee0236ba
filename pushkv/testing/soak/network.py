"""The in-process network, watched: each WRITE is looked at when it is posted, lands and fails."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

from pushkv.transport.base import WriteResult, WriteStatus
from pushkv.transport.memory import Faults, Network
from pushkv.transport.memory_bytes import U64, Copy, Station, Write


class Watch(Protocol):
    """Who looks."""

    def posted(self, write: Write, source: U64, length: U64) -> None:
        """A WRITE is under way, from these addresses."""

    def landing(self, copy: Copy) -> None:
        """A part of a WRITE is about to land."""

    def spoilt(self, write: int) -> None:
        """A byte of a WRITE that is under way will land as another."""

    def failed(self, write: int) -> None:
        """Its initiator is being told that a WRITE has failed."""


class WatchedNetwork(Network):
    """A network that shows what happens on it, and counts the faults that strike."""

    def __init__(self, watch: Watch, **settings: Any) -> None:
        super().__init__(**settings)
        self._watch = watch
        self._hits: Counter[float] = Counter()
        self._spoilt: list[int] = []
        self._rates = {getattr(self.faults, field.name): field.name for field in fields(Faults)[:5]}

    def struck(self) -> Counter[str]:
        """How often each random fault has struck."""
        struck = Counter({self._rates[rate]: count for rate, count in self._hits.items()})
        return struck + Counter({"corrupt": len(self._spoilt)})

    def _chance(self, probability: float) -> bool:
        hit = super()._chance(probability)
        self._hits[probability] += hit
        return hit

    def post(self, ours: Station, peer: Station, pieces: tuple[U64, U64, U64], notification: bytes) -> int:
        """As the network does; the watch is told before anything can land."""
        number = super().post(ours, peer, pieces, notification)
        self._watch.posted(ours.writes[number], pieces[0], pieces[2])
        if number in self._spoilt:
            self._watch.spoilt(number)
        return number

    def _spoil(self, write: Write) -> None:
        super()._spoil(write)
        if any(copy.corrupt is not None for copy in write.copies):
            self._spoilt.append(write.number)

    def ended(self, station: Station) -> list[WriteResult]:
        """As the network does."""
        results = super().ended(station)
        for result in results:
            if result.status is WriteStatus.FAILED:
                self._watch.failed(result.write)
        return results

    def _land(self, copy: Copy) -> None:
        if copy in copy.write.copies and copy.write.target.receives:
            self._watch.landing(copy)
        super()._land(copy)


class Agenda:
    """What is to be done when, on a virtual clock; what is due at one time is done in the order it was added."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, when: float, action: Callable[[], None]) -> None:
        """Have something done."""
        self._count += 1
        heapq.heappush(self._entries, (when, self._count, action))

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._entries and self._entries[0][0] <= now:
            heapq.heappop(self._entries)[2]()
