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


class Prices(NamedTuple):
    """What moving bytes costs between two endpoints.

    ``descriptor`` and ``part`` in seconds each (a part: asking for its slot, and the calls), ``wire`` and ``copy`` in
    bytes a second (``copy``: the slower of gather and scatter).
    """

    descriptor: float = 6e-6
    part: float = 0.5e-3
    wire: float = 3e9
    copy: float = 3e9


ASSUMED = Prices()
"""What is reckoned with until it is measured."""


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of :class:`Prices`. None for ``descriptor`` and ``wire``, and 0 for ``copy``, has it measured."""

    descriptor: float | None = None
    part: float = 0.5e-3
    wire: float | None = None
    copy: float = 0.0

    def prices(self, measured: Sequence[Prices] = ()) -> Prices:
        """With what is not set as ``measured``, the dearest of several."""
        descriptor = max((one.descriptor for one in measured), default=ASSUMED.descriptor)
        wire = min((one.wire for one in measured), default=ASSUMED.wire)
        return Prices(
            descriptor if self.descriptor is None else self.descriptor,
            self.part,
            wire if self.wire is None else self.wire,
            self.copy or ASSUMED.copy,
        )


class Meter:
    """Measures a descriptor and the wire between two endpoints by the WRITEs that cross it, one at a time.

    Of a few large pieces nearly all is the wire, of many small ones what the wire does not account for is theirs.
    """

    LARGE, SIZE, MANY = 256 << 10, 1 << 20, 64
    """Bytes of a large piece, bytes that tell of the wire, pieces that tell of descriptors."""
    FRESH = 0.3
    """The share that the newest counts, but for the first."""
    CHANGE = 1.25

    def __init__(self) -> None:
        self.descriptor: float | None = None
        self.wire: float | None = None
        self._told = ASSUMED

    def learn(self, pieces: int, size: int, seconds: float) -> None:
        """A WRITE that had the way to itself took so long."""
        if seconds <= 0 or pieces <= 0:
            return
        if size >= self.SIZE and size >= pieces * self.LARGE:
            self.wire = self._mixed(self.wire, size / seconds)
        elif pieces >= self.MANY and size < pieces * self.LARGE:
            rest = max(0.0, seconds - size / self.prices.wire)
            self.descriptor = self._mixed(self.descriptor, max(rest / pieces, 1e-9))

    def _mixed(self, known: float | None, fresh: float) -> float:
        return fresh if known is None else known + self.FRESH * (fresh - known)

    @property
    def prices(self) -> Prices:
        """As measured by now."""
        return ASSUMED._replace(
            descriptor=ASSUMED.descriptor if self.descriptor is None else self.descriptor,
            wire=ASSUMED.wire if self.wire is None else self.wire,
        )

    def news(self) -> Prices | None:
        """The prices, where they differ from those last told by enough to tell of."""
        now, told = self.prices, self._told
        ratios = (now.descriptor / told.descriptor, now.wire / told.wire)
        if all(1 / self.CHANGE < ratio < self.CHANGE for ratio in ratios):
            return None
        self._told = now
        return now


def direct_seconds(costs: Prices, pieces: int, size: int) -> float:
    """How long ``size`` bytes in so many pieces take into the blocks themselves."""
    return pieces * costs.descriptor + size / costs.wire


def landing_seconds(costs: Prices, size: int, slot: int) -> float:
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


def lands(costs: Prices, pieces: int, size: int, slot: int, left: Left = ALL) -> bool:
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
        some = _pieces(pair, layers, pair.common.count((span.token_start, span.token_stop)), table)
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
        return (len(each) * -(-tokens // pair.longest),) * 2
    return (len(each) * tokens,) * 2


def _stretches(table: BlockTable) -> int:
    """In how many stretches, ascending or descending, the blocks of the request follow each other."""
    steps = np.abs(np.diff(np.asarray(table.ids, np.int64)))
    return 1 + int((steps != 1).sum())
