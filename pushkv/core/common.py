"""The tokens of a request that two ranks both hold, where engines share tokens out over their ranks.

Each side holds a :class:`~pushkv.core.geometry.Stripe`. What both hold repeats after the least common multiple of
the two periods, so it is listed for one period and everything else is arithmetic: how many there are before a token,
which token is the n-th, and the runs between two tokens.

A range of a request is *trimmed* to end behind the last common token in it, and to begin behind the last in front of
it. So ranges that partition a request stay a partition when they are trimmed, and are empty where there is nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pushkv.core.geometry import CacheGroup, Stripe
from pushkv.core.pieces import Int64, check_count
from pushkv.errors import GeometryMismatch

Range = tuple[int, int]
MOST_RUNS = 1 << 16
"""More runs than this in a period are not listed: no two engines deal out tokens so oddly."""
MOST_BLOCKS = 1 << 10
"""Over more blocks than this no regularity is looked for."""


@dataclass(frozen=True, eq=False)
class CommonTokens:
    """In each ``period`` of a request's tokens, the runs of ``lengths`` from ``starts`` on, ascending.

    No run crosses into another run of a stripe of either side. ``alike``: both sides hold the same stripe.
    """

    period: int
    starts: Int64
    lengths: Int64
    alike: bool

    @classmethod
    def of(cls, source: Stripe, target: Stripe) -> CommonTokens:
        """What these two have in common. Raises GeometryMismatch where it takes too many runs to say."""
        if source == target or source.count == 1 or target.count == 1:
            one = target if source.count == 1 else source
            first = np.array([one.index * one.width], np.int64)
            return cls(one.period, first, np.array([one.width], np.int64), source.count == target.count)
        period = common_period((source, target))
        edges = edges_of((source, target), period)
        held = source.holds(edges) & target.holds(edges)
        return cls(period, edges[held], np.diff(edges, append=period)[held], alike=False)

    @property
    def empty(self) -> bool:
        """Whether there are none, in any request."""
        return not self.starts.size

    @cached_property
    def every(self) -> bool:
        """Whether these are all tokens."""
        return self._total == self.period

    @cached_property
    def _total(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def _sums(self) -> Int64:
        return np.cumsum(self.lengths) - self.lengths

    def before(self, token: int) -> int:
        """How many common tokens there are in front of ``token``."""
        if self.every or self.empty:
            return token if self.every else 0
        rounds, rest = divmod(token, self.period)
        run = int(np.searchsorted(self.starts, rest, side="right")) - 1
        inside = 0 if run < 0 else int(self._sums[run] + min(rest - self.starts[run], self.lengths[run]))
        return rounds * self._total + inside

    def past(self, count: int) -> int:
        """Behind which token the first ``count`` common ones are complete; 0 for none."""
        if self.every or count == 0:
            return count
        rounds, rest = divmod(count - 1, self._total)
        run = int(np.searchsorted(self._sums, rest, side="right")) - 1
        return rounds * self.period + int(self.starts[run] + rest - self._sums[run]) + 1

    def count(self, tokens: Range) -> int:
        """How many there are in a range."""
        return self.before(tokens[1]) - self.before(tokens[0])

    def trim(self, tokens: Range) -> Range:
        """The range from behind the last common token in front of it to behind the last in it."""
        if self.every:
            return tokens
        return self.past(self.before(tokens[0])), self.past(self.before(tokens[1]))

    def ends(self, tokens: Range) -> Range:
        """The first and the last common token of a trimmed range that has some."""
        return self.past(self.before(tokens[0]) + 1) - 1, tokens[1] - 1

    def runs(self, tokens: Range) -> tuple[Int64, Int64]:
        """Where the runs of a range start and stop."""
        start, stop = tokens
        first, last = start // self.period, max(stop - 1, start) // self.period
        check_count((last + 1 - first) * self.starts.size)
        starts = np.add.outer(np.arange(first, last + 1, dtype=np.int64) * self.period, self.starts).ravel()
        stops = np.minimum(starts + np.tile(self.lengths, last + 1 - first), stop)
        starts = np.maximum(starts, start)
        some = starts < stops
        return starts[some], stops[some]

    def grid(self, group: CacheGroup) -> int:
        """At multiples of so many common tokens blocks of this side's ``group`` begin; 1 where that is irregular."""
        blocks = math.lcm(self.period, group.span) // group.span
        if self.empty or blocks > MOST_BLOCKS:
            return 1
        edges = [self.before(block * group.span) for block in range(blocks + 1)]
        return math.gcd(*np.diff(edges).tolist())


def common_period(stripes: tuple[Stripe, ...]) -> int:
    """After how many tokens all stripes repeat. Raises GeometryMismatch where that takes too many runs to list."""
    period = math.lcm(*(stripe.period for stripe in stripes))
    if sum(period // stripe.width for stripe in stripes if stripe.count > 1) > MOST_RUNS:
        told = " and ".join(sorted({str(stripe) for stripe in stripes}))
        raise GeometryMismatch(
            f"Tokens shared out as {told} repeat after {period} only; set interleave sizes that divide each other."
        )
    return period


def edges_of(stripes: tuple[Stripe, ...], period: int) -> Int64:
    """Where in a period any of these stripes goes to another rank, from 0 on."""
    widths = {stripe.width for stripe in stripes if stripe.count > 1}
    many = [np.arange(0, period, width, dtype=np.int64) for width in widths]
    return np.unique(np.concatenate([np.zeros(1, np.int64), *many]))


def cut_at(starts: Int64, stops: Int64, size: int) -> tuple[Int64, Int64]:
    """The same runs, cut at the multiples of ``size``."""
    first = starts // size
    counts = (stops - 1) // size - first + 1
    check_count(int(counts.sum()))
    run = np.repeat(np.arange(starts.size), counts)
    block = first[run] + np.arange(run.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.maximum(starts[run], block * size), np.minimum(stops[run], (block + 1) * size)
