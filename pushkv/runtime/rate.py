"""Bounds on how often something may happen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_SOURCES = 4096


class Rate:
    """Token buckets: each source may do a thing ``per_second`` times on average and ``burst`` times at once.

    Sources are forgotten from the one longest unheard of when there are too many; all together are held to
    ``together`` times as much as one.
    """

    def __init__(self, per_second: float, burst: int, together: int = 50) -> None:
        self._per_second, self._burst, self._together = per_second, burst, together
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._all = (float(burst * together), 0.0)

    def allows(self, source: Hashable, now: float) -> bool:
        """Whether the source may do it once more, now; counts it if so."""
        mine = self._refilled(self._buckets.pop(source, (float(self._burst), now)), now, 1)
        everybody = self._refilled(self._all, now, self._together)
        allowed = mine >= 1.0 and everybody >= 1.0
        self._buckets[source] = (mine - allowed, now)
        self._all = (everybody - allowed, now)
        if len(self._buckets) > _SOURCES:
            self._buckets.popitem(last=False)
        return allowed

    def _refilled(self, bucket: tuple[float, float], now: float, times: int) -> float:
        left, since = bucket
        return min(left + max(0.0, now - since) * self._per_second * times, float(self._burst * times))
