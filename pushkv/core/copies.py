"""A finished plan: the runs to copy, and the ways to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pushkv.core.pieces import Int64
from pushkv.core.runs import Runs
from pushkv.errors import GeometryError

Int32 = NDArray[np.int32]
Index = tuple[Int32, Int32]


class Indices(NamedTuple):
    """Units of ``unit`` bytes: the i-th is row ``row[i]`` of region ``region[i]`` seen as rows of a unit."""

    unit: int
    region: Int64
    row: Int64


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copy ``length[i]`` bytes from ``source_offset[i]`` in region ``source_region[i]`` to the target's (stable).

    Runs ascend by (target region, target offset), do not overlap there, and are maximal: no two could be one.
    ``descriptors_before`` is how many there were before neighbours merged, ``grain`` the bytes that every run
    and every cut is a multiple of.
    """

    source_region: Int64
    source_offset: Int64
    target_region: Int64
    target_offset: Int64
    length: Int64
    descriptors_before: int
    grain: int
    _number: Callable[[], Index | None] | None = field(default=None, repr=False)

    @property
    def reads(self) -> Runs:
        """What is read, in the order of :attr:`writes`."""
        return Runs(self.source_region, self.source_offset, self.length)

    @property
    def writes(self) -> Runs:
        """What is written, ascending."""
        return Runs(self.target_region, self.target_offset, self.length)

    @property
    def descriptors(self) -> int:
        """How many runs there are."""
        return int(self.length.size)

    @cached_property
    def bytes(self) -> int:
        """How many bytes the plan copies."""
        return int(self.length.sum())

    @cached_property
    def run_bytes_p50(self) -> int:
        """The median length of a run in bytes, 0 for an empty plan; under a few KiB, landing is worth a thought."""
        return int(np.median(self.length)) if self.length.size else 0

    @cached_property
    def _index(self) -> Index | None:
        return self._number() if self._number is not None else None

    def split(self, max_bytes: int) -> tuple[CopyPlan, ...]:
        """The same copy in parts of ``max_bytes``, rounded down to a multiple of ``grain``; the last may be shorter.

        Cuts fall at byte counts of the whole, so two sides that plan the same elements cut alike, wherever their
        blocks are. Raises GeometryError if ``max_bytes`` is less than one grain.
        """
        if max_bytes < max(self.grain, 1):
            raise GeometryError(
                f"Parts of {max_bytes} bytes cannot hold one piece of {self.grain}; allow at least that."
            )
        if not self.length.size:
            return ()
        size = max_bytes - max_bytes % max(self.grain, 1)
        ends = np.cumsum(self.length)
        cuts = np.arange(size, self.bytes, size, dtype=np.int64)
        edges = np.unique(np.concatenate((np.zeros(1, np.int64), ends[:-1], cuts)))
        run = np.searchsorted(ends, edges, side="right")
        into = edges - (ends - self.length)[run]
        lengths = np.diff(edges, append=self.bytes)
        bounds = [*np.searchsorted(edges, cuts), edges.size]
        return tuple(
            self._part(run[start:stop], into[start:stop], lengths[start:stop])
            for start, stop in pairwise([0, *map(int, bounds)])
        )

    def _part(self, run: Int64, into: Int64, lengths: Int64) -> CopyPlan:
        return CopyPlan(
            self.source_region[run],
            self.source_offset[run] + into,
            self.target_region[run],
            self.target_offset[run] + into,
            lengths,
            lengths.size,
            self.grain,
        )

    @cached_property
    def unit_bytes(self) -> int:
        """The greatest unit that every offset and length is a multiple of; 0 for an empty plan."""
        return int(np.gcd.reduce(np.concatenate((self.source_offset, self.target_offset, self.length))))

    def gather_indices(self, unit: int | None = None) -> Indices:
        """The units to read, in the order in which they are packed into a slot.

        ``unit`` is in bytes, by default :attr:`unit_bytes`. Raises GeometryError if it does not divide the plan.
        """
        return self._indices(self.source_region, self.source_offset, unit)

    def scatter_indices(self, unit: int | None = None) -> Indices:
        """Where the packed units go, one for one with :meth:`gather_indices`; ascending."""
        return self._indices(self.target_region, self.target_offset, unit)

    def _indices(self, region: Int64, offset: Int64, unit: int | None) -> Indices:
        unit = self.unit_bytes if unit is None else unit
        if not self.length.size:
            return Indices(unit, region, offset)
        if unit < 1 or self.unit_bytes % unit:
            raise GeometryError(f"Units of {unit} bytes do not divide the plan; {self.unit_bytes} bytes do.")
        counts = self.length // unit
        before = np.repeat(np.cumsum(counts) - counts, counts)
        within = np.arange(before.size, dtype=np.int64) - before
        return Indices(unit, np.repeat(region, counts), np.repeat(offset // unit, counts) + within)

    @property
    def source_index(self) -> Int32 | None:
        """The units to read, numbered as in :meth:`PairTemplate.lattice`, in the order in which neighbours merge.

        None where the pair has no lattice or the plan is not made of whole units. Built when first asked for.
        """
        return self._index[0] if self._index is not None else None

    @property
    def target_index(self) -> Int32 | None:
        """The units to write, one for one with :attr:`source_index`."""
        return self._index[1] if self._index is not None else None
