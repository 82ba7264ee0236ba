"""An elementwise model of a cache split over ranks, which knows nothing of the planner.

A logical cache has values by (group, layer, side, head, token, content element). A :class:`Rank` holds some
of them in plain bytes; every byte's place is worked out one element at a time, from the geometry's definition.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pushkv.core.copies import CopyPlan
from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Kind, Layer, Place, Strides, Stripe

ALL = Stripe()


@dataclass(frozen=True)
class LogicalGroup:
    """One group of the model, over all ranks."""

    number: int
    layers: tuple[str, ...]
    sides: int
    heads: int
    content: int
    itemsize: int
    kind: Kind = Kind.ATTENTION
    window: int = 0

    def moved(self, tokens: tuple[int, int], end: int) -> list[int]:
        """The positions that a request of ``end`` tokens moves out of ``tokens``, one by one."""
        inside = [token for token in range(*tokens) if 0 <= token < end]
        if self.kind is Kind.STATE:
            return [token for token in inside if token == end - 1]
        if self.kind is Kind.WINDOW:
            return [token for token in inside if token >= end - self.window]
        return inside

    def values(self, layer: str, heads: range, positions: list[int]) -> NDArray[np.uint8]:
        """Bytes of shape (sides, heads, positions, content, itemsize), different for nearly all elements."""
        layer_number = self.layers.index(layer)
        grid = np.ix_(range(self.sides), list(heads), positions, range(self.content), range(self.itemsize))
        mixed = np.full(1, self.number * 31 + layer_number, np.uint64)
        for axis in grid:
            mixed = mixed * np.uint64(6364136223846793005) + axis.astype(np.uint64) * np.uint64(1442695040888963407)
            mixed = mixed ^ (mixed >> np.uint64(29))
        return (mixed >> np.uint64(40)).astype(np.uint8)


@dataclass(frozen=True)
class Share:
    """What one rank holds of a group: layers by name, heads, and which copy of them."""

    layers: tuple[str, ...]
    heads: range
    replica: int
    replicas: int
    stripe: Stripe = ALL

    def held(self, positions: list[int]) -> list[int]:
        """Those that are in this rank's stripe, one by one."""
        stripe = self.stripe
        return [token for token in positions if (token // stripe.width) % stripe.count == stripe.index]


@lru_cache(maxsize=1 << 12)
def place_of(stripe: Stripe, position: int) -> int:
    """How many tokens a rank holds in front of one, counted one by one."""
    return sum((token // stripe.width) % stripe.count == stripe.index for token in range(position))


@dataclass
class Rank:
    """One rank: its geometry, its memory by region, its block tables for the one request of a case."""

    geometry: Geometry
    regions: list[NDArray[np.uint8]]
    tables: list[BlockTable]
    shares: list[Share]
    counts: list[NDArray[np.uint8]] = field(default_factory=list)

    def bytes_of(
        self, group: LogicalGroup, layer: str, heads: range, positions: list[int]
    ) -> tuple[list[int], NDArray[np.int64]]:
        """(region, byte offsets) by side; offsets of shape (sides, heads, positions, content, itemsize)."""
        cache = self.geometry.groups[group.number]
        table = self.tables[group.number]
        places = next(each.places for each in cache.layers if each.name == layer)
        blocks, inside = [], []
        for position in positions:
            place = place_of(self.shares[group.number].stripe, position)
            blocks.append(int(table.ids[place // cache.block_size - table.first]))
            inside.append(0 if cache.kind is Kind.STATE else place % cache.block_size)
        strides = cache.strides
        grid = np.ix_(
            [place.offset for place in places],
            [(head - cache.head_start) * strides.head for head in heads],
            [b * strides.block + n * strides.token for b, n in zip(blocks, inside, strict=True)],
            [element * strides.content for element in range(cache.content)],
            range(cache.itemsize),
        )
        return [place.region for place in places], sum(axis.astype(np.int64) for axis in grid)

    def fill(self, group: LogicalGroup, positions: list[int]) -> None:
        """Put the group's values where this rank keeps them."""
        share = self.shares[group.number]
        positions = share.held(positions)
        for layer in share.layers:
            values = group.values(layer, share.heads, positions)
            regions, offsets = self.bytes_of(group, layer, share.heads, positions)
            for side, region in enumerate(regions):
                self.regions[region][offsets[side]] = values[side]

    def mark(self, group: LogicalGroup, layer: str, positions: list[int], expected: list[NDArray[np.uint8]]) -> None:
        """Put the values that must arrive into ``expected`` and count their bytes once."""
        heads, positions = self.shares[group.number].heads, self.shares[group.number].held(positions)
        values = group.values(layer, heads, positions)
        regions, offsets = self.bytes_of(group, layer, heads, positions)
        for side, region in enumerate(regions):
            expected[region][offsets[side]] = values[side]
            self.counts[region][offsets[side]] += 1


def lay_out(
    groups: list[LogicalGroup],
    shares: list[Share],
    orders: list[str],
    sizes: list[tuple[int, int]],
    rng: np.random.Generator,
) -> tuple[Geometry, list[int]]:
    """A geometry with the given axis orders and (block size, blocks), random padding and regions; region lengths."""
    lengths = [0]
    made = []
    for group, share, order, (block_size, blocks) in zip(groups, shares, orders, sizes, strict=True):
        made.append(_lay_out_group(group, share, order, block_size, blocks, lengths, rng))
    return Geometry(tuple(made)), lengths


def _lay_out_group(
    group: LogicalGroup,
    share: Share,
    order: str,
    block_size: int,
    blocks: int,
    lengths: list[int],
    rng: np.random.Generator,
) -> CacheGroup:
    # Layers lie in one array, or in several of the same strides: one each, or some together and some not.
    chunks = np.sort(rng.integers(0, len(share.layers) + 1, int(rng.integers(3))))
    names = [str(name) for name in rng.permutation(np.array(share.layers, dtype=object))]
    chunked = [names[start:stop] for start, stop in pairwise([0, *chunks.tolist(), len(names)]) if start < stop]
    tokens = 1 if group.kind is Kind.STATE else block_size
    dims = {"L": max(map(len, chunked), default=1), "S": group.sides, "B": blocks, "H": len(share.heads), "N": tokens}
    dims["C"] = group.content
    step, strides = group.itemsize, {}
    for letter in reversed(order):
        padding = int(rng.integers(1, 4)) * group.itemsize if rng.integers(4) == 0 else 0
        strides[letter] = step + padding
        step = strides[letter] * dims[letter]
    layers = []
    for chunk in chunked:
        if rng.integers(2):
            lengths.append(0)
        region = len(lengths) - 1
        start = lengths[region] + int(rng.integers(0, 9))
        lengths[region] = start + step
        for number, name in enumerate(chunk):
            base = start + number * strides["L"]
            layers.append(
                Layer(name, tuple(Place(region, base + side * strides["S"]) for side in range(group.sides)))
            )
    return CacheGroup(
        layers=tuple(layers),
        blocks=blocks,
        block_size=block_size,
        total_heads=group.heads,
        head_start=share.heads.start,
        head_stop=share.heads.stop,
        content=group.content,
        itemsize=group.itemsize,
        dtype=f"u{group.itemsize}",
        strides=Strides(strides["B"], strides["H"], strides["N"], strides["C"]),
        sides=group.sides,
        kind=group.kind,
        window=group.window,
        replica=share.replica,
        replicas=share.replicas,
        stripe=share.stripe,
    )


def execute(plan: CopyPlan, source: Rank, target: Rank, hits: list[NDArray[np.uint8]]) -> None:
    """Run a plan with memcpy, counting how often each target byte is written."""
    columns = (plan.source_region, plan.source_offset, plan.target_region, plan.target_offset, plan.length)
    for source_region, start, target_region, to, length in zip(*(column.tolist() for column in columns), strict=True):
        target.regions[target_region][to : to + length] = source.regions[source_region][start : start + length]
        hits[target_region][to : to + length] += 1


def execute_through_a_slot(plan: CopyPlan, source: Rank, target: Rank, hits: list[NDArray[np.uint8]]) -> None:
    """Gather into a packed slot on the source, scatter out of it on the target."""
    gather, scatter = plan.gather_indices(), plan.scatter_indices()
    unit = gather.unit
    span = np.arange(unit)
    for i in range(gather.row.size):
        piece = source.regions[gather.region[i]][gather.row[i] * unit + span]
        target.regions[scatter.region[i]][scatter.row[i] * unit + span] = piece
        hits[scatter.region[i]][scatter.row[i] * unit + span] += 1
