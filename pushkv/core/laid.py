"""Copies of equal rows in few numbers: the rows of one block, and where the blocks are.

A part of many blocks is thousands of rows, and to list, order and check them costs more than a GPU takes to copy
them. Most parts are a few places in a block by the blocks of a request, and whether rows that are laid out like that
ascend can be seen without listing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pushkv.core.geometry import BlockTable, CacheGroup, Kind
from pushkv.core.pieces import Int64, Pieces
from pushkv.core.plan import Stretch, pieces_across
from pushkv.core.runs import LaidRuns
from pushkv.core.span import Span
from pushkv.core.template import GroupPair, PairTemplate, Range, whole_blocks_match

Tables = tuple[Sequence[BlockTable], Sequence[BlockTable]]


@dataclass(frozen=True, eq=False)
class LaidCopy:
    """Copy the runs of ``reads`` to those of ``writes``, one for one; the latter ascend and do not overlap."""

    reads: LaidRuns
    writes: LaidRuns

    @property
    def bytes(self) -> int:
        """How many bytes are copied."""
        return self.writes.bytes

    def at(self, source: Int64, target: Int64) -> LaidCopy:
        """The same rows at other steps, of which the target's ascend."""
        return LaidCopy(self.reads.at(source), self.writes.at(target))


def laid_copy(template: PairTemplate, stretches: list[Stretch]) -> LaidCopy | None:
    """The copy in few numbers, None where it is not of equal rows, or they do not ascend as they are laid."""
    if len(stretches) != 1:
        return None
    (stretch,) = stretches
    tokens, steps = stretch.tokens, stretch.target_base
    if (tokens != tokens[0]).any():
        return None
    least = int(np.diff(steps).min()) if steps.size > 1 else None
    extent = int(steps[-1] - steps[0])
    rows = _rows(template, stretch.pieces, stretch.width, int(tokens[0]), least, extent)
    return None if rows is None else rows.at(stretch.source_base, steps)


def _rows(
    template: PairTemplate, pieces: Pieces, across: int, tokens: int, least: int | None, extent: int
) -> LaidCopy | None:
    """The rows of one step, None where they differ or would not ascend at all steps; see :func:`_ascend`."""
    if not len(pieces) or (pieces.length != pieces.length[0]).any():
        return None
    width, none = int(pieces.length[0]) * tokens, np.zeros(1, np.int64)
    if not _ascend(pieces.target.reshape(-1, across), least, extent, width):
        return None
    return LaidCopy(
        LaidRuns(*template.source_flat.locate(pieces.source), none, across, width),
        LaidRuns(*template.target_flat.locate(pieces.target), none, across, width),
    )


def _ascend(places: Int64, least: int | None, extent: int, width: int) -> bool:
    """Whether rows of ``width`` bytes ascend and do not overlap, laid by rows of places.

    The steps ascend by ``least`` or more (None: there is one), and by ``extent`` together.
    """
    if places.shape[1] > 1 and (np.diff(places, axis=1) < width).any():
        return False
    if least is not None and least < int((places[:, -1] - places[:, 0]).max()) + width:
        return False
    return len(places) < 2 or bool((places[1:, 0] - places[:-1, -1] >= extent + width).all())


@dataclass
class LaidPlans:
    """Copies of whole blocks between caches whose blocks are of one size, in the least of work a part.

    What does not depend on the request is worked out once for each range of layers.
    """

    template: PairTemplate
    _known: dict[tuple[int, Range], LaidCopy | None] = field(default_factory=dict)

    def copy(self, tables: Tables, span: Span) -> LaidCopy | None:
        """The copy of a span from the source's tables' blocks to the target's.

        None where it is not of whole blocks, or a table does not hold it: :func:`pushkv.core.plan.plan_copy` knows.
        """
        pair = self.template.pairs[span.group] if span.group < len(self.template.pairs) else None
        if pair is None or pair.source.kind in (Kind.STATE, Kind.WINDOW) or not whole_blocks_match(pair):
            return None
        if any(len(side) != len(self.template.pairs) for side in tables):
            return None
        if not pair.common.alike:
            return None
        first, stop = (pair.source.stripe.before(token) for token in (span.token_start, span.token_stop))
        block = pair.source.block_size
        within = (span.layer_start, span.layer_stop)
        if first % block or stop % block or first >= stop or pair.layer_range(within) != within:
            return None
        places = self._places(pair, within)
        ids = [
            _ids(side[pair.number], group, first // block, stop // block)
            for side, group in zip(tables, (pair.source, pair.target), strict=True)
        ]
        return None if places is None else _at(places, ids[0], ids[1], pair)

    def _places(self, pair: GroupPair, layers: Range) -> LaidCopy | None:
        """The rows of block 0, None where rows of other blocks might not ascend."""
        key = (pair.number, layers)
        if key not in self._known:
            if len(self._known) >= 256:
                self._known.clear()
            self._known[key] = _first_rows(self.template, pair, layers)
        return self._known[key]


def _first_rows(template: PairTemplate, pair: GroupPair, layers: Range) -> LaidCopy | None:
    if layers[0] >= layers[1]:
        return None
    pieces, stride = pair.pieces(layers, block=True), pair.target.strides.block
    return _rows(template, pieces, pieces_across(pieces, stride), 1, stride, (pair.target.blocks - 1) * stride)


def _ids(table: BlockTable, group: CacheGroup, first: int, stop: int) -> Int64 | None:
    """The blocks of a table, None if it lacks one or names one that is not there."""
    ids = table.ids[max(first - table.first, 0) : stop - table.first]
    if first < table.first or ids.size < stop - first or ids.min() < 0 or ids.max() >= group.blocks:
        return None
    return ids.astype(np.int64)


def _at(places: LaidCopy, source: Int64 | None, target: Int64 | None, pair: GroupPair) -> LaidCopy | None:
    """The same rows of other blocks, in ascending order of the target's; None if a block is named twice."""
    if source is None or target is None:
        return None
    order = np.argsort(target)
    target, source = target[order], source[order]
    again = np.sort(source)
    if (target[1:] == target[:-1]).any() or (again[1:] == again[:-1]).any():
        return None
    return places.at(source * pair.source.strides.block, target * pair.target.strides.block)
