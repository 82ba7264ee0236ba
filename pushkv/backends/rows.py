"""Runs of bytes as rows of one width, which is what vectorised copies take.

A plan's runs have a few lengths: one where no two blocks are neighbours, multiples of it where some are. They are cut
into rows of the greatest width that divides them all; where that is too small, runs of one length go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pushkv.core.pieces import Int64
from pushkv.core.runs import LaidRuns, Runs
from pushkv.errors import BackendError

__all__ = ["Int64", "LaidRuns", "Rows", "Runs", "aligned", "cut_to_grid", "rows_of"]

WIDE = 512
"""Rows of as many bytes are copied at the speed of memory, so that longer ones gain nothing."""
MOST_LENGTHS = 16
"""So many lengths are copied one after the other; more are cut into rows of one width, however small."""
MOST_ROWS = 1 << 26
"""More rows than this in one copy cost gigabytes to list."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of ``width`` bytes: row ``i`` is at ``offset[i]`` of ``region[i]`` and at ``packed[i]`` of the slot."""

    width: int
    region: Int64
    offset: Int64
    packed: Int64

    def __len__(self) -> int:
        return int(self.offset.size)


def rows_of(runs: Runs) -> Iterator[Rows]:
    """The same bytes as rows, in as few sets of one width as serves speed. Raises BackendError for too many rows."""
    if isinstance(runs, LaidRuns):
        if runs.bytes:
            yield Rows(runs.width, runs.region, runs.offset, np.arange(len(runs), dtype=np.int64) * runs.width)
        return
    region, offset, length = runs.region, runs.offset, runs.length
    if not (length > 0).all():
        kept = length > 0
        region, offset, length = region[kept], offset[kept], length[kept]
    if not length.size:
        return
    if (length == length[0]).all():  # as most parts are: it is worth not sorting them
        width = int(length[0])
        yield Rows(width, region, offset, np.arange(length.size, dtype=np.int64) * width)
        return
    packed = np.cumsum(length) - length
    width = int(np.gcd.reduce(length))
    lengths = np.unique(length)
    if width >= WIDE or lengths.size > MOST_LENGTHS:
        yield _cut(width, region, offset, packed, length)
    else:
        for one in lengths:
            same = length == one
            yield Rows(int(one), region[same], offset[same], packed[same])


def _cut(width: int, region: Int64, offset: Int64, packed: Int64, length: Int64) -> Rows:
    counts = length // width
    if (total := int(counts.sum())) > MOST_ROWS:
        raise BackendError(f"{length.size} runs are {total} rows of {width} bytes; copy at most {MOST_ROWS} at once")
    steps = (np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)) * width
    return Rows(
        width, np.repeat(region, counts), np.repeat(offset, counts) + steps, np.repeat(packed, counts) + steps
    )


def cut_to_grid(rows: Rows) -> Rows:
    """The same bytes as rows that lie, on either side, on a grid of their width from the first row on."""
    grid = int(np.gcd.reduce([rows.width, *(int(np.gcd.reduce(at - at[0])) for at in (rows.offset, rows.packed))]))
    if grid == rows.width:
        return rows
    return _cut(grid, rows.region, rows.offset, rows.packed, np.full(len(rows), rows.width, np.int64))


def aligned(addresses: Int64, width: int) -> bool:
    """Whether all addresses lie on one grid of this width."""
    return not ((addresses - addresses[0]) % width).any()
