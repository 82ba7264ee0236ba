"""Runs of bytes as rows of one width, which is what vectorised copies take.

A plan's runs have a few lengths: one where no two blocks are neighbours, multiples of it where some are. They are cut
into rows of the greatest width that divides them all; where that is too small, runs of one length go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pushkv.errors import BackendError

Int64 = NDArray[np.int64]
WIDE = 512
"""Rows of as many bytes are copied at the speed of memory, so that longer ones gain nothing."""
MOST_LENGTHS = 16
"""So many lengths are copied one after the other; more are cut into rows of one width, however small."""
MOST_ROWS = 1 << 26
"""More rows than this in one copy cost gigabytes to list."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of a cache's memory, packed one after the other in a slot.

    ``length[i]`` bytes from byte ``offset[i]`` of region number ``region[i]`` on. Runs that are written must not
    overlap.
    """

    region: Int64
    offset: Int64
    length: Int64

    @property
    def bytes(self) -> int:
        """How many bytes they have together."""
        return int(self.length.sum())


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
    kept = runs.length > 0
    region, offset, length = runs.region[kept], runs.offset[kept], runs.length[kept]
    if not length.size:
        return
    packed = np.cumsum(length) - length
    width = int(np.gcd.reduce(length))
    lengths = np.unique(length)
    if lengths.size == 1:
        yield Rows(width, region, offset, packed)
    elif width >= WIDE or lengths.size > MOST_LENGTHS:
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
