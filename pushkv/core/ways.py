"""Which way is cheaper for a transfer, direct or through landing slots: a cost model, as a pure function.

Direct costs a descriptor a piece and the wire; landing costs a gather, the wire and a scatter a part, which overlap
but for the first and the last. What moves the bytes and what a descriptor costs differ by three orders of magnitude
between transports, so the numbers are :class:`Costs`, and may be set.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from pushkv.core.geometry import BlockTable, Kind
from pushkv.core.parts import span_bytes
from pushkv.core.template import GroupPair, PairTemplate, Range, whole_blocks_match


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What moving bytes costs between two endpoints.

    ``descriptor`` and ``part`` in seconds each (a part: asking for its slot, and the calls), ``wire`` and ``copy`` in
    bytes a second (``copy``: the slower of gather and scatter; 0 to have it measured).
    """

    descriptor: float = 6e-6
    part: float = 0.5e-3
    wire: float = 3e9
    copy: float = 0.0


def direct_seconds(costs: Costs, pieces: int, size: int) -> float:
    """How long ``size`` bytes in so many pieces take into the blocks themselves."""
    return pieces * costs.descriptor + size / costs.wire


def landing_seconds(costs: Costs, size: int, slot: int) -> float:
    """How long ``size`` bytes take through slots of ``slot`` bytes: gather, wire and scatter overlap."""
    parts = max(1, -(-size // slot))
    part = size / parts
    stages = part / costs.copy, part / costs.wire, part / costs.copy
    return sum(stages) + (parts - 1) * max(stages) + parts * costs.part


class Left(NamedTuple):
    """Which shares of a transfer are left when its prompt is computed, going directly and landing."""

    direct: float = 1.0
    landing: float = 1.0


ALL = Left()
LAYERED = 1 / 8
"""What is reckoned to be left where layers leave as they are written."""


def lands(costs: Costs, pieces: int, size: int, slot: int, left: Left = ALL) -> bool:
    """Whether landing is the way on which less time passes once the prompt is computed."""
    landing = landing_seconds(costs, ceil(size * left.landing), slot)
    return size > 0 and landing < direct_seconds(costs, ceil(pieces * left.direct), ceil(size * left.direct))


class Weight(NamedTuple):
    """Pieces and bytes of a transfer, as far as the consumer can tell, which knows its own blocks alone.

    There are ``fewest`` pieces where the producer's blocks follow each other wherever the consumer's do, and ``most``
    where they never do, as in an engine that has served for a while.
    """

    fewest: int
    most: int
    bytes: int

    @property
    def pieces(self) -> int:
        """What is reckoned with: that either may be so."""
        return (self.fewest + self.most) // 2


def weigh(template: PairTemplate, blocks: Sequence[BlockTable], tokens: Range) -> Weight:
    """What a transfer into ``blocks``, a table a group, weighs."""
    fewest = most = size = 0
    for span in template.owed(tokens):
        pair, table = template.pairs[span.group], blocks[span.group]
        if not len(table):
            continue
        layers = (span.layer_start, span.layer_stop)
        size += span_bytes(template, span)
        some = _pieces(pair, layers, span.token_stop - span.token_start, table)
        fewest, most = fewest + some[0], most + some[1]
    return Weight(fewest, most, size)


def _pieces(pair: GroupPair, layers: Range, tokens: int, table: BlockTable) -> tuple[int, int]:
    """The fewest and the most."""
    if pair.source.kind is Kind.STATE:
        return (len(pair.pieces(layers, block=True)),) * 2
    if whole_blocks_match(pair):
        # Blocks that follow each other merge only where a piece is a whole step from block to block.
        whole = pair.pieces(layers, block=True)
        steps = pair.source.strides.block, pair.target.strides.block
        merges = len(whole) > 0 and bool((whole.length == steps[0]).all() and (whole.length == steps[1]).all())
        blocks = -(-tokens // pair.target.block_size)
        return len(whole) * min(blocks, _stretches(table) if merges else blocks), len(whole) * blocks
    each = pair.pieces(layers, block=False)
    run = pair.source.strides.token
    if pair.target.strides.token == run and bool((each.length == run).all()):
        return (len(each) * -(-tokens // min(pair.source.block_size, pair.target.block_size)),) * 2
    return (len(each) * tokens,) * 2


def _stretches(table: BlockTable) -> int:
    """In how many stretches, ascending or descending, the blocks of the request follow each other."""
    steps = np.abs(np.diff(np.asarray(table.ids, np.int64)))
    return 1 + int((steps != 1).sum())
