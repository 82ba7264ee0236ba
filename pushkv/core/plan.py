"""Which bytes to copy for one request, in how few runs.

A plan starts from the template's pieces of one block (or of one token), lays them over the request's blocks, sorts
by target and merges neighbours. Everything is arrays: no loop runs over blocks or layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pushkv.core.copies import CopyPlan, Index, Indices
from pushkv.core.geometry import BlockTable, Geometry, Kind
from pushkv.core.pieces import Int64, Pieces, ascending, check_count, concatenate, is_ascending, merge, overlap
from pushkv.core.template import GroupPair, PairTemplate, Range, Segments, check_tokens, whole_blocks_match
from pushkv.errors import GeometryError

__all__ = ["CopyPlan", "Indices", "Stretch", "assemble", "pieces_across", "plan_copy", "stretches_of"]


@dataclass(frozen=True)
class Stretch:
    """Pieces laid at several places: ``pieces`` relative to a base, once a base, bases ascending on the target.

    ``tokens[i]`` multiplies the lengths at base ``i``. ``blocks`` are the block ids behind the bases and ``firsts``
    the first units of the pieces, where both are whole units.
    """

    pieces: Pieces
    source_base: Int64
    target_base: Int64
    tokens: Int64
    width: int
    blocks: tuple[Int64, Int64] | None = None
    firsts: Callable[[], tuple[Int64, Int64] | None] | None = None

    def lay(self, per_piece: Int64, per_base: Int64) -> Int64:
        """Their sums, in the order of the stretch."""
        return (per_piece.reshape(-1, 1, self.width) + per_base.reshape(1, -1, 1)).ravel()

    def laid(self) -> Pieces:
        """Every piece at every base."""
        lengths = self.pieces.length.reshape(-1, 1, self.width) * self.tokens.reshape(1, -1, 1)
        return Pieces(
            self.lay(self.pieces.source, self.source_base),
            self.lay(self.pieces.target, self.target_base),
            lengths.ravel(),
        )


def plan_copy(
    source: Geometry,
    target: Geometry,
    source_blocks: Sequence[BlockTable],
    target_blocks: Sequence[BlockTable],
    tokens: Range,
    *,
    template: PairTemplate | None = None,
    layers: Range | None = None,
    groups: Collection[int] | None = None,
    end: int | None = None,
    whole_blocks: bool = False,
) -> CopyPlan:
    """Plan the copy of exactly the elements that ``template.owed`` names for the same arguments (stable).

    ``source_blocks`` and ``target_blocks`` hold one table a group; a group whose target table is empty is left out.
    ``tokens`` is (start, stop) in the request and ``end`` how many tokens the request has, by default stop.
    ``layers`` and ``groups`` plan a part. ``whole_blocks`` rounds the tokens of a group out to whole blocks where
    both sides' blocks are of one size, as groups may ask for themselves: the target's whole blocks must then be free
    for it.

    Raises GeometryError, with the numbers, for a table that does not cover the tokens or names a block out of
    range or twice, and GeometryMismatch for geometries that cannot be paired.
    """
    template = PairTemplate(source, target) if template is None else template
    tables = source_blocks, target_blocks
    return assemble(
        template,
        stretches_of(template, tables, tokens, layers=layers, groups=groups, end=end, whole_blocks=whole_blocks),
    )


def stretches_of(
    template: PairTemplate,
    tables: tuple[Sequence[BlockTable], Sequence[BlockTable]],
    tokens: Range,
    *,
    layers: Range | None = None,
    groups: Collection[int] | None = None,
    end: int | None = None,
    whole_blocks: bool = False,
) -> list[Stretch]:
    """What :func:`plan_copy` plans for the same arguments, before it is put in order. Raises as that does."""
    source_blocks, target_blocks = tables
    end = check_tokens(tokens, end)
    _check_tables("source", source_blocks, len(template.pairs))
    _check_tables("target", target_blocks, len(template.pairs))
    stretches: list[Stretch] = []
    for pair, ours, theirs in zip(template.pairs, source_blocks, target_blocks, strict=True):
        if not len(theirs) or (groups is not None and pair.number not in groups):
            continue
        span, wanted = pair.layer_range(layers), pair.token_range(tokens, end)
        if span[0] < span[1] and wanted[0] < wanted[1]:
            stretches += _group_stretches(template, pair, span, wanted, (ours, theirs), whole_blocks)
    return stretches


def _check_tables(side: str, tables: Sequence[BlockTable], groups: int) -> None:
    """Refuse what is not one table a group, naming what is there instead."""
    if not isinstance(tables, Sequence):
        raise GeometryError(f"The {side} block tables are {tables!r:.80}; give a list of {groups}, one a group.")
    if len(tables) != groups:
        raise GeometryError(f"There are {len(tables)} {side} block tables for {groups} groups; give one a group.")
    for number, table in enumerate(tables):
        if not isinstance(table, BlockTable):
            raise GeometryError(
                f"The {side} table of group {number} is {table!r:.80}; give BlockTable(first logical block, ids)."
            )


def _group_stretches(
    template: PairTemplate,
    pair: GroupPair,
    layers: Range,
    tokens: Range,
    tables: tuple[BlockTable, BlockTable],
    whole_blocks: bool,
) -> list[Stretch]:
    sides = pair.source, pair.target
    if pair.source.kind is Kind.STATE:
        slots = [_blocks(pair, side, table, tokens) for side, table in zip(("source", "target"), tables, strict=True)]
        return [_whole(template, pair, layers, slots[0], slots[1])]
    rounded = (whole_blocks or pair.source.whole_blocks) and whole_blocks_match(pair)
    ids = [_blocks(pair, side, table, tokens) for side, table in zip(("source", "target"), tables, strict=True)]
    cut = pair.segments(tokens, rounded=rounded)
    places = cut.source, cut.target
    blocks = [
        held[place // group.block_size - place[0] // group.block_size]
        for held, place, group in zip(ids, places, sides, strict=True)
    ]
    whole = cut.counts == pair.source.block_size if whole_blocks_match(pair) else np.zeros(cut.counts.size, bool)
    stretches = []
    if whole.any():
        stretches.append(_whole(template, pair, layers, blocks[0][whole], blocks[1][whole]))
    if not whole.all():
        rest = Segments(*(column[~whole] for column in cut))
        stretches.append(_partial(pair, layers, (blocks[0][~whole], blocks[1][~whole]), rest))
    return stretches


def _blocks(pair: GroupPair, side: str, table: BlockTable, tokens: Range) -> Int64:
    """The ids of the logical blocks that hold ``tokens``; refuses a table that lacks one or names a bad one."""
    group = pair.source if side == "source" else pair.target
    first, last = (group.stripe.before(token) // group.block_size for token in pair.common.ends(tokens))
    stop = last + 1
    if first < table.first or stop > table.first + len(table):
        raise GeometryError(
            f"Tokens [{tokens[0]}, {tokens[1]}) of group {pair.number} lie in logical blocks [{first}, {stop}) of "
            f"{group.block_size} tokens; the {side} table holds [{table.first}, {table.first + len(table)})."
        )
    ids = table.ids[first - table.first : stop - table.first].astype(np.int64)
    bad = (ids < 0) | (ids >= group.blocks)
    if bad.any():
        raise GeometryError(
            f"The {side} table of group {pair.number} names block {ids[bad][0]}; the cache has blocks "
            f"[0, {group.blocks})."
        )
    ordered = np.sort(ids)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        raise GeometryError(
            f"The {side} table of group {pair.number} names block {ordered[1:][twice][0]} twice; a block holds one "
            "stretch of tokens."
        )
    return ids


def _whole(
    template: PairTemplate, pair: GroupPair, layers: Range, source_blocks: Int64, target_blocks: Int64
) -> Stretch:
    order = np.argsort(target_blocks)
    source_blocks, target_blocks = source_blocks[order], target_blocks[order]
    pieces = pair.pieces(layers, block=True)
    return Stretch(
        pieces,
        source_blocks * pair.source.strides.block,
        target_blocks * pair.target.strides.block,
        np.ones(order.size, np.int64),
        pieces_across(pieces, pair.target.strides.block),
        (source_blocks, target_blocks),
        partial(template.first_units, pair, layers),
    )


def _partial(pair: GroupPair, layers: Range, blocks: tuple[Int64, Int64], cut: Segments) -> Stretch:
    """Segments of blocks. Where the tokens of a piece follow each other on both sides, a segment is one piece."""
    source, target = pair.source, pair.target
    pieces = pair.pieces(layers, block=False)
    run, (ours, theirs, counts) = source.strides.token, cut
    if target.strides.token != run or (pieces.length != run).any():
        blocks = np.repeat(blocks[0], counts), np.repeat(blocks[1], counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        step = np.arange(before.size) - before
        ours, theirs = np.repeat(ours, counts) + step, np.repeat(theirs, counts) + step
        counts = np.ones(step.size, np.int64)
    source_base = blocks[0] * source.strides.block + ours % source.block_size * run
    target_base = blocks[1] * target.strides.block + theirs % target.block_size * target.strides.token
    order = np.argsort(target_base)
    width = pieces_across(pieces, target.strides.block)
    return Stretch(pieces, source_base[order], target_base[order], counts[order], width)


def pieces_across(pieces: Pieces, step: int) -> int:
    """How many pieces in a row lie within one step of the bases.

    Laying such a row base by base, and row after row, comes out in ascending order for all usual layouts; where it
    does not, the plan is sorted.
    """
    width = int(np.searchsorted(pieces.target, pieces.target[0] + step))
    return width if width and len(pieces) % width == 0 else len(pieces)


def assemble(template: PairTemplate, stretches: list[Stretch]) -> CopyPlan:
    """The plan of these stretches. Raises GeometryError where two groups' target blocks overlap."""
    if not stretches:
        none = np.zeros(0, np.int64)
        return CopyPlan(none, none, none, none, none, 0, template.grain)
    check_count(sum(len(stretch.pieces) * stretch.target_base.size for stretch in stretches))
    laid = concatenate([stretch.laid() for stretch in stretches])
    runs = merge(ascending(laid))
    if (clash := overlap(runs)) is not None:
        region, offset = (int(values[0]) for values in template.target_flat.locate(np.array([clash])))
        raise GeometryError(
            f"Two groups' target blocks share byte {offset} of region {region}; offer each block once."
        )
    return CopyPlan(
        *template.source_flat.locate(runs.source),
        *template.target_flat.locate(runs.target),
        runs.length,
        len(laid),
        template.grain,
        partial(_unit_index, stretches) if all(stretch.firsts is not None for stretch in stretches) else None,
    )


def _unit_index(stretches: list[Stretch]) -> Index | None:
    """The units behind a plan's pieces, in ascending order of target; None where they are not whole units."""
    firsts = [stretch.firsts() for stretch in stretches if stretch.firsts is not None]
    targets = np.concatenate([stretch.lay(stretch.pieces.target, stretch.target_base) for stretch in stretches])
    order = slice(None) if is_ascending(targets) else np.argsort(targets, kind="stable")
    sides = []
    for side in (0, 1):
        numbers = [
            stretch.lay(first[side], stretch.blocks[side])
            for stretch, first in zip(stretches, firsts, strict=True)
            if first is not None and stretch.blocks is not None
        ]
        if len(numbers) < len(stretches):
            return None
        sides.append(np.concatenate(numbers)[order].astype(np.int32))
    return sides[0], sides[1]
