"""Parts that fit a slot: how what is owed is cut, and where the bytes of a part lie in a slot and in the blocks.

A part is packed span after span, each span in the ascending order of its bytes in the consumer's blocks. That order
is known to both: the producer plans the copy and reads off what to gather, the consumer needs no more than its own
geometry to read off what to scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec

from pushkv.core.copies import CopyPlan
from pushkv.core.geometry import BlockTable, Geometry, Kind, Layer, Place
from pushkv.core.laid import LaidCopy, LaidPlans, Tables, laid_copy
from pushkv.core.plan import assemble, stretches_of
from pushkv.core.span import Span
from pushkv.core.template import GroupPair, PairTemplate
from pushkv.errors import GeometryError

PartCopy = CopyPlan | LaidCopy
"""A copy of one span; where its rows are equal, in few numbers."""


def span_bytes(template: PairTemplate, span: Span) -> int:
    """How many bytes of a slot the span takes."""
    pair = template.pairs[span.group]
    return span.layers * pair.common.count(_tokens(span)) * _unit(pair)


def part_bytes(template: PairTemplate, spans: Iterable[Span]) -> int:
    """How many bytes of a slot the spans take together."""
    return sum(span_bytes(template, span) for span in spans)


def _tokens(span: Span) -> tuple[int, int]:
    return span.token_start, span.token_stop


def _unit(pair: GroupPair) -> int:
    """Bytes of one layer and token, or of one layer's slot of a state."""
    return pair.heads * pair.source.sides * pair.source.content * pair.source.itemsize


def least_slot(template: PairTemplate) -> int:
    """The smallest slot that every part can be cut to fit, in bytes; 0 where nothing is written."""
    return max((_unit(pair) for pair in template.pairs if pair.heads and pair.layers), default=0)


def cut(template: PairTemplate, spans: Sequence[Span], room: int) -> tuple[tuple[Span, ...], ...]:
    """The same spans in parts of at most ``room`` bytes, in order (stable).

    Cuts fall between the larger side's blocks where a slot holds several, so that whole blocks stay whole, and what
    is no whole block is a span of its own, so that the rows of a span are alike. Raises GeometryError where not even
    one token of one layer fits.
    """
    parts: list[tuple[Span, ...]] = []
    part: list[Span] = []
    left = room
    for span in (piece for one in spans for piece in _even_pieces(template.pairs[one.group], one, room)):
        size = span_bytes(template, span)
        if size > left and part:
            parts.append(tuple(part))
            part, left = [], room
        part.append(span)
        left -= size
    return (*parts, tuple(part)) if part else tuple(parts)


def _even_pieces(pair: GroupPair, span: Span, room: int) -> Iterator[Span]:
    """A span in rectangles that each fit, and that begin and end inside a block only at the span's own ends.

    Tokens are counted here as those that both sides hold, and told as a request's.
    """
    common, block = pair.common, min(pair.grids)
    counted = msgspec.structs.replace(
        span, token_start=common.before(span.token_start), token_stop=common.before(span.token_stop)
    )
    for piece in _pieces(pair, counted, room):
        start, stop = piece.token_start, piece.token_stop
        first, last = -(-start // block) * block, stop // block * block
        edges = (
            [start, stop] if first >= last or pair.source.kind is Kind.STATE else sorted({start, first, last, stop})
        )
        for one, other in pairwise(map(common.past, edges)):
            yield msgspec.structs.replace(piece, token_start=one, token_stop=other)


def _pieces(pair: GroupPair, span: Span, room: int) -> Iterator[Span]:
    """A span in rectangles that each fit."""
    unit = _unit(pair)
    if unit > room:
        raise GeometryError(
            f"One token of one layer of group {pair.number} has {unit} bytes and a slot {room}: set larger slots."
        )
    layers, tokens = span.layers, span.tokens
    state = pair.source.kind is Kind.STATE
    row = unit * (1 if state else tokens)
    if layers * row <= room:
        yield span
    elif state or (row <= room and layers * unit > room):
        for start, stop in _steps(span.layer_start, span.layer_stop, room // row, 1):
            yield Span(span.group, start, stop, span.token_start, span.token_stop)
    elif layers * unit <= room:
        for start, stop in _steps(span.token_start, span.token_stop, room // (layers * unit), max(pair.grids)):
            yield Span(span.group, span.layer_start, span.layer_stop, start, stop)
    else:
        for start, stop in _steps(span.layer_start, span.layer_stop, room // unit, 1):
            yield from _pieces(pair, Span(span.group, start, stop, span.token_start, span.token_stop), room)


def _steps(start: int, stop: int, most: int, grid: int) -> Iterator[tuple[int, int]]:
    """``start`` to ``stop`` in steps of at most ``most``, on multiples of ``grid`` where a step holds one."""
    edges = [start]
    while edges[-1] + most < stop:
        on_grid = (edges[-1] + most) // grid * grid
        edges.append(on_grid if on_grid > edges[-1] else edges[-1] + most)
    yield from pairwise([*edges, stop])


class PartPlans:
    """The copies of a rank pair's parts, into slots and out of them."""

    def __init__(self, template: PairTemplate) -> None:
        self.template = template
        self._gathers = LaidPlans(template)
        landed = (_landed(pair) if pair.heads and pair.layers else None for pair in template.pairs)
        self._scatters = tuple(None if one is None else LaidPlans(one) for one in landed)

    def gather(
        self,
        source_blocks: Sequence[BlockTable],
        target_blocks: Sequence[BlockTable],
        spans: Sequence[Span],
        end: int,
    ) -> tuple[PartCopy, ...]:
        """The copies of a part, span by span: their sources, one after the other, are what a slot is packed from.

        ``end`` is where the offered range ends. Raises GeometryError as :func:`pushkv.core.plan.plan_copy` does.
        """
        return tuple(_copy(self._gathers, (source_blocks, target_blocks), span, end) for span in spans)

    def scatter(self, target_blocks: Sequence[BlockTable], spans: Sequence[Span], end: int) -> tuple[PartCopy, ...]:
        """The same at the consumer: their targets are where a slot is unpacked to. Raises GeometryError."""
        copies = []
        for span in spans:
            plans = self._scatters[span.group] if span.group < len(self._scatters) else None
            if plans is None:
                raise GeometryError(f"{span} is of a group that this producer writes nothing of.")
            table = [target_blocks[span.group]]
            copies.append(_copy(plans, (table, table), msgspec.structs.replace(span, group=0), end))
        return tuple(copies)


def _copy(plans: LaidPlans, tables: Tables, span: Span, end: int) -> PartCopy:
    """The copy of one span, in few numbers where it can be."""
    if (laid := plans.copy(tables, span)) is not None:
        return laid
    template = plans.template
    stretches = stretches_of(
        template,
        tables,
        _tokens(span),
        layers=(span.layer_start, span.layer_stop),
        groups=(span.group,),
        end=end,
    )
    laid = laid_copy(template, stretches)
    return assemble(template, stretches) if laid is None else laid


def _landed(pair: GroupPair) -> PairTemplate:
    """The consumer's group narrowed to what this producer writes of it, as the source of a pair with the whole."""
    target = pair.target
    start = max(pair.source.head_start, target.head_start)
    skipped = (start - target.head_start) * target.strides.head
    places = {layer.name: layer.places for layer in target.layers}
    layers = tuple(
        Layer(name, tuple(Place(one.region, one.offset + skipped) for one in places[name])) for name in pair.layers
    )
    narrow = msgspec.structs.replace(
        target, layers=layers, head_start=start, head_stop=start + pair.heads, replica=0, replicas=1
    )
    template = PairTemplate(Geometry((narrow,)), Geometry((target,)))
    template.pairs = (replace(template.pairs[0], common=pair.common),)
    return template
