"""Arithmetic on contiguous pieces: list those of a strided box, sort them, merge neighbours.

Addresses here are *flat*: the regions of one side laid end to end with a gap between, so that one integer
orders them all and pieces of two regions never look adjacent. :class:`Flat` converts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from pushkv.core.geometry import Geometry
from pushkv.errors import GeometryError

Int64 = NDArray[np.int64]
MAX_PIECES = 1 << 24
"""More pieces than this in one plan cost gigabytes to list: a peer may not ask for them, nor is there a point."""
Axis = tuple[int, int, int]
"""(size, source stride, target stride), strides in bytes."""


@dataclass(frozen=True)
class Flat:
    """The flat addresses of one geometry: used region ``regions[i]`` starts at ``starts[i]``."""

    regions: Int64
    starts: Int64

    @classmethod
    def of(cls, geometry: Geometry) -> Flat:
        """Lay out the regions that the geometry names, each as long as its last element."""
        stops: dict[int, int] = {}
        for group in geometry.groups:
            extent = group.extent
            for layer in group.layers:
                for region, offset in ((place.region, place.offset) for place in layer.places):
                    stops[region] = max(stops.get(region, 0), offset + extent)
        regions = sorted(stops)
        starts = [0]
        for region in regions[:-1]:
            # One page between two regions keeps the end of one from touching the start of the next.
            starts.append(starts[-1] + stops[region] + 4096)
        return cls(np.array(regions, np.int64), np.array(starts if regions else [], np.int64))

    def address(self, regions: Iterable[int], offsets: Iterable[int]) -> Int64:
        """The flat addresses of (region, offset) pairs."""
        slots = np.searchsorted(self.regions, np.fromiter(regions, np.int64))
        return self.starts[slots] + np.fromiter(offsets, np.int64)

    def locate(self, addresses: Int64) -> tuple[Int64, Int64]:
        """(regions, offsets) of flat addresses."""
        if self.starts.size == 1:
            return np.full(addresses.size, self.regions[0]), addresses
        slots = np.searchsorted(self.starts, addresses, side="right") - 1
        return self.regions[slots], addresses - self.starts[slots]


@dataclass(frozen=True)
class Pieces:
    """``length[i]`` bytes from ``source[i]`` to ``target[i]``, ascending by target."""

    source: Int64
    target: Int64
    length: Int64

    def __len__(self) -> int:
        return int(self.target.size)


def concatenate(many: Sequence[Pieces]) -> Pieces:
    """All the pieces, one after the other; they need not ascend together."""
    if len(many) == 1:
        return many[0]
    return Pieces(
        np.concatenate([pieces.source for pieces in many]),
        np.concatenate([pieces.target for pieces in many]),
        np.concatenate([pieces.length for pieces in many]),
    )


def box_pieces(source: Int64, target: Int64, axes: Sequence[Axis], itemsize: int) -> Pieces:
    """The fewest pieces that copy, for each row ``(source[i], target[i])``, the box that ``axes`` spans."""
    run, left = itemsize, [axis for axis in axes if axis[0] > 1]
    while inner := next((axis for axis in left if axis[1] == axis[2] == run), None):
        run *= inner[0]
        left.remove(inner)
    check_count(target.size * prod(axis[0] for axis in left))
    for size, source_stride, target_stride in left:
        steps = np.arange(size, dtype=np.int64)
        source = np.add.outer(source, steps * source_stride).ravel()
        target = np.add.outer(target, steps * target_stride).ravel()
    return merge(ascending(Pieces(source, target, np.full(target.size, run, np.int64))))


def check_count(count: int) -> None:
    """Raise GeometryError if a plan would have to list more than MAX_PIECES pieces."""
    if count > MAX_PIECES:
        raise GeometryError(
            f"The two layouts differ so much that {count} pieces would be copied one by one; plan fewer tokens or "
            f"layers at a time, at most {MAX_PIECES} pieces."
        )


def is_ascending(addresses: Int64) -> bool:
    """Whether no address is below the one before."""
    return addresses.size < 2 or bool((addresses[1:] >= addresses[:-1]).all())


def ascending(pieces: Pieces) -> Pieces:
    """The same pieces in ascending order of target."""
    if is_ascending(pieces.target):
        return pieces
    # Stable, because it is fast where long stretches are in order already, as they nearly always are.
    order = np.argsort(pieces.target, kind="stable")
    return Pieces(pieces.source[order], pieces.target[order], pieces.length[order])


def merge(pieces: Pieces) -> Pieces:
    """Join neighbours that continue each other on both sides.

    Targets are never written twice, so whatever continues a piece is its neighbour in this order, and one pass
    leaves only maximal pieces.
    """
    if len(pieces) < 2:
        return pieces
    source, target, length = pieces.source, pieces.target, pieces.length
    breaks = target[1:] - target[:-1] != length[:-1]
    breaks |= source[1:] - source[:-1] != length[:-1]
    if breaks.all():
        return pieces
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    last = np.append(starts[1:], len(pieces)) - 1
    return Pieces(source[starts], target[starts], target[last] + length[last] - target[starts])


def overlap(pieces: Pieces) -> int | None:
    """The first target address that two pieces (ascending) would both write, or None."""
    clash = pieces.target[1:] < pieces.target[:-1] + pieces.length[:-1]
    return int(pieces.target[1:][clash][0]) if clash.any() else None
