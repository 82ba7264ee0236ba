"""What one producer rank and one consumer rank have in common, worked out once.

A :class:`PairTemplate` knows, group by group, the layers by name, the heads by number and, where ranks share tokens
out, the stripes of tokens that both ranks hold and that this producer is the one to write. Coverage
(:meth:`PairTemplate.owed`) and copying (:func:`pushkv.core.plan.plan_copy`) read off the same numbers, so neither can
promise what the other does not do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pushkv.core.common import CommonTokens, cut_at
from pushkv.core.compat import compatibility, differences
from pushkv.core.geometry import CacheGroup, Geometry, Kind, Layer
from pushkv.core.pieces import Axis, Flat, Int64, Pieces, box_pieces
from pushkv.core.span import Span
from pushkv.errors import GeometryError, GeometryMismatch

Range = tuple[int, int]
MAX_UNITS = 1 << 24
"""A lattice with more units than this a side is not worth preparing: NIXL keeps a descriptor for each."""


class UnitRows(NamedTuple):
    """Rows of equal units: row ``r`` has ``units[r]`` of them, ``stride[r]`` bytes apart, from ``offset[r]`` on."""

    region: Int64
    offset: Int64
    stride: Int64
    units: Int64

    @property
    def first(self) -> Int64:
        """The number of each row's first unit; where all rows are equal, ``row * units``."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.units)[:-1]))


class Segments(NamedTuple):
    """Stretches of tokens, each inside one block of either side: ``counts`` tokens from the ``source``-th and the
    ``target``-th on, as the two sides count the tokens that they hold."""

    source: Int64
    target: Int64
    counts: Int64


@dataclass(frozen=True)
class GroupPair:
    """One cache group of both ranks. Flat row addresses are those of block 0, token 0, the first common head.

    ``layers`` are the common layers in the producer's order; the rows have shape (layers, sides). Of each request
    the ``common`` tokens are copied.
    """

    number: int
    source: CacheGroup
    target: CacheGroup
    layers: tuple[str, ...]
    heads: int
    source_rows: Int64
    target_rows: Int64
    common: CommonTokens
    _known: dict[tuple[bool, int, int], Pieces] = field(default_factory=dict, repr=False, compare=False)

    def layer_range(self, layers: Range | None) -> Range:
        """``layers`` cut to the common layers; empty if this producer writes nothing of the group."""
        count = len(self.layers) if self.heads else 0
        start, stop = layers if layers is not None else (0, count)
        if not 0 <= start <= stop:
            raise GeometryError(f"A layer range is [{start}, {stop}); give 0 <= start <= stop.")
        return min(start, count), min(stop, count)

    def token_range(self, tokens: Range, end: int) -> Range:
        """The tokens of ``tokens`` that a request of ``end`` tokens moves in this group; empty if start == stop.

        Trimmed to those that both sides hold, so that ranges that partition a request still do.
        """
        start, stop = tokens
        if self.source.kind is Kind.STATE:
            return (end - 1, end) if start < stop == end else (stop, stop)
        if self.source.kind is Kind.WINDOW:
            start = min(max(start, end - self.source.window), stop)
        return self.common.trim((start, stop))

    def segments(self, tokens: Range, *, rounded: bool = False) -> Segments:
        """The stretches that a range is copied in, ascending; ``rounded`` out to whole blocks of both sides."""
        sides = self.source, self.target
        if self.common.alike:  # then neither needs to be told of the tokens that others hold
            tokens = self.source.stripe.before(tokens[0]), self.source.stripe.before(tokens[1])
        if rounded:
            size = self.source.block_size
            tokens = tokens[0] // size * size, -(-tokens[1] // size) * size
        if self.common.alike:
            starts = _segment_starts(tokens, sides)
            return Segments(starts, starts, np.diff(starts, append=tokens[1]))
        starts, stops = self.common.runs(tokens)
        for group in sides:
            if group.stripe.count == 1:
                starts, stops = cut_at(starts, stops, group.block_size)
        return Segments(self.source.stripe.places(starts), self.target.stripe.places(starts), stops - starts)

    @cached_property
    def grids(self) -> tuple[int, int]:
        """At multiples of so many common tokens a block begins on the source, and on the target."""
        if self.common.alike:
            return self.source.block_size, self.target.block_size
        return self.common.grid(self.source), self.common.grid(self.target)

    @property
    def longest(self) -> int:
        """The most tokens that a segment has."""
        groups = self.source, self.target
        if self.common.alike:
            return min(group.block_size for group in groups)
        return min(group.stripe.width if group.stripe.count > 1 else group.block_size for group in groups)

    def pieces(self, layers: Range, *, block: bool) -> Pieces:
        """The pieces of one whole block (equal block sizes only), or of one token, relative to it."""
        key = (block, *layers)
        if key not in self._known:
            if len(self._known) >= 64:
                self._known.clear()
            self._known[key] = self._pieces(layers, block)
        return self._known[key]

    def _pieces(self, layers: Range, block: bool) -> Pieces:
        source, target = self.source, self.target
        axes: list[Axis] = [
            (source.content, source.strides.content, target.strides.content),
            (self.heads, source.strides.head, target.strides.head),
        ]
        if block:
            axes.append((source.tokens, source.strides.token, target.strides.token))
        rows = slice(*layers)
        return box_pieces(self.source_rows[rows].ravel(), self.target_rows[rows].ravel(), axes, source.itemsize)

    @cached_property
    def grain(self) -> int:
        """Every piece of every plan is a multiple of this many bytes."""
        if not (self.heads and self.layers):
            return 0
        return int(np.gcd.reduce(self.pieces((0, len(self.layers)), block=False).length))


class PairTemplate:
    """The pair of a producer rank's and a consumer rank's geometry (stable).

    Raises GeometryMismatch naming every factor that differs with both values, GeometryError for a geometry that
    no cache can have. ``source`` is the producer's, ``target`` the consumer's.
    """

    def __init__(self, source: Geometry, target: Geometry) -> None:
        source.check()
        target.check()
        _refuse_differences(source, target)
        self.source = source
        self.target = target
        self.source_flat = Flat.of(source)
        self.target_flat = Flat.of(target)
        self.pairs = tuple(self._pair(number) for number in range(len(source.groups)))

    def _pair(self, number: int) -> GroupPair:
        source, target = self.source.groups[number], self.target.groups[number]
        common = _common_layers(source, target)
        start, stop = max(source.head_start, target.head_start), min(source.head_stop, target.head_stop)
        # Of the producer ranks that hold a head, one writes it to a given consumer rank.
        writes = source.replica == target.replica % source.replicas
        tokens = CommonTokens.of(source.stripe, target.stripe)
        heads = max(0, stop - start) if writes and not tokens.empty else 0
        return GroupPair(
            number,
            source,
            target,
            tuple(layer.name for layer, _ in common),
            heads,
            _rows(self.source_flat, [layer for layer, _ in common], source, start),
            _rows(self.target_flat, [layer for _, layer in common], target, start),
            tokens,
        )

    @property
    def writes(self) -> bool:
        """Whether this producer rank ever owes this consumer rank anything."""
        return any(pair.heads and pair.layers for pair in self.pairs)

    @cached_property
    def striped(self) -> bool:
        """Whether it depends on a request's tokens if anything is owed of it."""
        return not all(pair.common.every for pair in self.pairs)

    def owed(
        self,
        tokens: Range,
        *,
        end: int | None = None,
        layers: Range | None = None,
        groups: Collection[int] | None = None,
    ) -> tuple[Span, ...]:
        """What a plan over the same arguments writes, as spans in the order of groups (stable).

        ``end`` is how many tokens the request has, by default ``tokens``' stop: a window group moves only the last
        tokens before it, and a state group its slot, with the range that reaches it. So the spans of ranges
        that partition a request partition those of the whole. ``groups`` limits to some groups.
        """
        end = check_tokens(tokens, end)
        spans = []
        for pair in self.pairs:
            if groups is not None and pair.number not in groups:
                continue
            span = Span(pair.number, *pair.layer_range(layers), *pair.token_range(tokens, end))
            if span.layer_start < span.layer_stop and span.token_start < span.token_stop:
                spans.append(span)
        return tuple(spans)

    def common_layers(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """The first ``counts[g]`` layers of each group of the producer's, as so many of those that spans count.

        None where that is all that this producer writes.
        """
        common = tuple(bisect_left(held, count) for held, count in zip(self._held, counts, strict=True))
        written = (pair.layer_range(None)[1] for pair in self.pairs)
        return None if all(count >= all_ for count, all_ in zip(common, written, strict=True)) else common

    @cached_property
    def _held(self) -> list[list[int]]:
        """For each pair the places of its layers among the producer's, ascending."""
        places = [{layer.name: place for place, layer in enumerate(pair.source.layers)} for pair in self.pairs]
        return [sorted(place[name] for name in pair.layers) for pair, place in zip(self.pairs, places, strict=True)]

    @cached_property
    def layers_apart(self) -> bool:
        """Whether some layers of a block are in no smaller pieces than all: not where layers lie side by side."""
        return not any(pair.heads and pair.layers and _joins_layers(pair) for pair in self.pairs)

    @cached_property
    def token_grid(self) -> int:
        """At multiples of so many tokens blocks end on both sides, in every group whose tokens are moved."""
        pairs = [pair for pair in self.pairs if pair.heads and pair.layers and pair.source.kind is not Kind.STATE]
        return math.lcm(*(size for pair in pairs for size in (pair.source.span, pair.target.span)))

    @cached_property
    def grain(self) -> int:
        """Every length and cut of this pair's plans is a multiple of this many bytes; 0 if nothing is written."""
        return int(np.gcd.reduce([0, *(pair.grain for pair in self.pairs)]))

    def lattice(self) -> tuple[UnitRows, UnitRows, int] | None:
        """(source rows, target rows, unit bytes) if whole blocks are equal units on a regular grid, else None.

        Row ``r`` of the source belongs to row ``r`` of the target. Unit ``first[r] + block`` is that block's unit in
        row ``r``, on either side with that side's block numbers; see :attr:`CopyPlan.source_index`.
        """
        return self._lattice

    @cached_property
    def _lattice(self) -> tuple[UnitRows, UnitRows, int] | None:
        pairs = [pair for pair in self.pairs if pair.heads and pair.layers]
        if not pairs or any(not whole_blocks_match(pair) for pair in pairs):
            return None
        pieces = [pair.pieces((0, len(pair.layers)), block=True) for pair in pairs]
        lengths = np.concatenate([piece.length for piece in pieces])
        source = _unit_rows(self.source_flat, [p.source for p in pieces], [pair.source for pair in pairs])
        target = _unit_rows(self.target_flat, [p.target for p in pieces], [pair.target for pair in pairs])
        if (lengths != lengths[0]).any() or max(int(source.units.sum()), int(target.units.sum())) > MAX_UNITS:
            return None
        return source, target, int(lengths[0])

    def first_units(self, pair: GroupPair, layers: Range) -> tuple[Int64, Int64] | None:
        """For each piece of a block in those layers, its row's first unit on both sides; None if no unit fits."""
        if self._lattice is None:
            return None
        source, target, unit = self._lattice
        start = sum(len(p.pieces((0, len(p.layers)), block=True)) for p in self.pairs[: pair.number] if p.heads)
        whole = pair.pieces((0, len(pair.layers)), block=True)
        some = pair.pieces(layers, block=True)
        rows = np.minimum(np.searchsorted(whole.target, some.target), len(whole) - 1)
        if (whole.target[rows] != some.target).any() or (some.length != unit).any():
            return None
        return source.first[start + rows], target.first[start + rows]


def _joins_layers(pair: GroupPair) -> bool:
    block = whole_blocks_match(pair)
    one, all_ = (pair.pieces((0, count), block=block).length for count in (1, len(pair.layers)))
    return bool(all_.max() > one.max())


def whole_blocks_match(pair: GroupPair) -> bool:
    """Whether a block of one side holds exactly the tokens of a block of the other."""
    return pair.source.kind is Kind.STATE or _same_blocks(pair.source, pair.target)


def _same_blocks(source: CacheGroup, target: CacheGroup) -> bool:
    """Of one size, and where ranks share tokens out otherwise on one side, of one run each."""
    if source.block_size != target.block_size or source.stripe == target.stripe:
        return source.block_size == target.block_size
    return all(group.stripe.count == 1 or group.stripe.width == group.block_size for group in (source, target))


def _segment_starts(tokens: Range, sides: tuple[CacheGroup, CacheGroup]) -> Int64:
    """Where ``tokens`` start or cross into another block of either side."""
    starts = [np.array([tokens[0]], np.int64)]
    for size in {group.block_size for group in sides}:
        starts.append(np.arange(tokens[0] // size * size + size, tokens[1], size, dtype=np.int64))
    return np.unique(np.concatenate(starts)) if len(starts) > 2 else np.concatenate(starts)


def check_tokens(tokens: Range, end: int | None) -> int:
    """The request's end; raises GeometryError unless ``0 <= start <= stop <= end``."""
    start, stop = tokens
    end = stop if end is None else end
    if not 0 <= start <= stop <= end:
        raise GeometryError(f"Tokens [{start}, {stop}) of a request of {end} tokens; give 0 <= start <= stop <= end.")
    return end


def writers(sources: Sequence[Geometry], target: Geometry) -> tuple[int, ...]:
    """Which of the producer ranks ``sources`` write to the consumer rank ``target``."""
    return tuple(rank for rank, source in enumerate(sources) if PairTemplate(source, target).writes)


def _refuse_differences(source: Geometry, target: Geometry) -> None:
    lines = differences(compatibility(source), compatibility(target))
    homes = {layer.name: number for number, group in enumerate(target.groups) for layer in group.layers}
    for number, group in enumerate(source.groups):
        for layer in group.layers:
            if homes.get(layer.name, number) != number:
                lines.append(f"group of layer {layer.name!r}: {number} against {homes[layer.name]}")
    for number, (ours, theirs) in enumerate(zip(source.groups, target.groups, strict=False)):
        if ours.whole_blocks and theirs.whole_blocks and not _same_blocks(ours, theirs):
            lines.append(f"tokens of group {number}'s whole blocks: {ours.stripe} against {theirs.stripe}")
    if lines:
        raise GeometryMismatch(
            f"The producer's cache cannot be copied into the consumer's, they differ in {'; '.join(lines)}: "
            "run both engines with the same model and cache settings."
        )


def _common_layers(source: CacheGroup, target: CacheGroup) -> list[tuple[Layer, Layer]]:
    """Layers both hold, in the producer's order; of those that share a place on the target, the first."""
    theirs = {layer.name: layer for layer in target.layers}
    common = {theirs[layer.name].places: layer for layer in reversed(source.layers) if layer.name in theirs}
    kept = [layer for layer in source.layers if layer.name in theirs and common[theirs[layer.name].places] is layer]
    return [(layer, theirs[layer.name]) for layer in kept]


def _rows(flat: Flat, layers: list[Layer], group: CacheGroup, head: int) -> Int64:
    places = [place for layer in layers for place in layer.places]
    rows = flat.address((place.region for place in places), (place.offset for place in places))
    return (rows + (head - group.head_start) * group.strides.head).reshape(len(layers), group.sides)


def _unit_rows(flat: Flat, starts: list[Int64], groups: list[CacheGroup]) -> UnitRows:
    region, offset = flat.locate(np.concatenate(starts))
    sizes = [start.size for start in starts]
    stride = np.repeat(np.array([group.strides.block for group in groups], np.int64), sizes)
    count = np.repeat(np.array([group.blocks for group in groups], np.int64), sizes)
    return UnitRows(region, offset, stride, count)
