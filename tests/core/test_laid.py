"""Copies in few numbers are the copies that a plan lists, and what they cannot be is left to the plan."""

from __future__ import annotations

import numpy as np
import pytest

from pushkv import KVCache
from pushkv.core.copies import CopyPlan
from pushkv.core.digest import plan_span
from pushkv.core.geometry import BlockTable
from pushkv.core.laid import LaidCopy, LaidPlans
from pushkv.core.parts import PartPlans, cut
from pushkv.core.runs import Runs
from pushkv.core.span import Span
from pushkv.core.template import PairTemplate
from pushkv.errors import GeometryError

LAYERS, BLOCKS, TOKENS = 3, 16, 4


def cache(axes: str = "LSBNHC", *, tokens: int = TOKENS, heads: int = 2) -> KVCache:
    """A cache of three layers, its axes in this order."""
    sizes = {"L": LAYERS, "S": 2, "B": BLOCKS, "N": tokens, "H": heads, "C": 8}
    return KVCache.of(np.zeros([sizes[axis] for axis in axes], np.float32), axes, heads=heads)


def template(source: str = "LSBNHC", target: str = "LSBNHC") -> PairTemplate:
    return PairTemplate(cache(source).geometry, cache(target).geometry)


def table(*ids: int, first: int = 0) -> list[BlockTable]:
    return [BlockTable(first, np.array(ids, np.int32))]


def listed(runs: Runs) -> list[tuple[int, int]]:
    """Every byte's place, run after run."""
    rows = zip(runs.region.tolist(), runs.offset.tolist(), runs.length.tolist(), strict=True)
    return [(region, byte) for region, offset, length in rows for byte in range(offset, offset + length, 4)]


OURS, THEIRS = table(9, 2, 14, 3), table(7, 8, 1, 12)
WHOLE = Span(0, 0, LAYERS, 0, 16)


@pytest.mark.parametrize("axes", ["LSBNHC", "BLSNHC", "SBLNHC", "BLSHNC", "LSBHNC"])
@pytest.mark.parametrize("span", [WHOLE, Span(0, 1, 2, 0, 16), Span(0, 0, 3, 4, 12)])
def test_a_laid_copy_is_what_the_plan_lists(axes: str, span: Span) -> None:
    pair = template(axes, axes)
    laid = LaidPlans(pair).copy((OURS, THEIRS), span)
    assert laid is not None
    plan = plan_span(pair, OURS, THEIRS, span, 16)
    assert listed(laid.reads) == listed(plan.reads)
    assert listed(laid.writes) == listed(plan.writes)
    assert laid.bytes == plan.bytes


def test_a_row_that_ends_where_the_next_begins_is_a_row_of_its_own() -> None:
    laid = LaidPlans(template()).copy((table(1, 2), table(4, 5)), Span(0, 0, 1, 0, 8))
    assert laid is not None
    assert (len(laid.writes), laid.writes.width) == (4, 256)


@pytest.mark.parametrize(
    ("pair", "span"),
    [
        (template(), Span(0, 0, 3, 0, 15)),
        (template(), Span(0, 0, 3, 1, 16)),
        (template(), Span(0, 0, 4, 0, 16)),
        (template(), Span(1, 0, 3, 0, 16)),
        (PairTemplate(cache(tokens=8).geometry, cache().geometry), WHOLE),
    ],
    ids=["part of the last block", "part of the first", "a layer too many", "no such group", "other blocks"],
)
def test_what_is_not_of_whole_blocks_is_left_to_the_plan(pair: PairTemplate, span: Span) -> None:
    assert LaidPlans(pair).copy((OURS, THEIRS), span) is None


@pytest.mark.parametrize(
    "tables",
    [
        (table(9, 2, 9, 3), THEIRS),
        (OURS, table(7, 8, 7, 12)),
        (table(9, 2, BLOCKS, 3), THEIRS),
        (OURS, table(7, -1, 1, 12)),
        (table(9, 2, 14), THEIRS),
        (OURS, table(7, 8, 1, 12, first=1)),
        (OURS * 2, THEIRS),
    ],
    ids=["twice", "target twice", "past the cache", "before it", "too short", "starts late", "two tables"],
)
def test_a_bad_table_is_refused_in_the_plans_words(tables: tuple[list[BlockTable], list[BlockTable]]) -> None:
    pair = template()
    assert LaidPlans(pair).copy(tables, WHOLE) is None
    with pytest.raises(GeometryError):
        PartPlans(pair).gather(*tables, (WHOLE,), 16)


def test_a_block_that_is_cut_is_a_span_of_its_own() -> None:
    pair = template()
    ((before, whole, after),) = cut(pair, pair.owed((2, 15)), 1 << 20)
    assert [(one.token_start, one.token_stop) for one in (before, whole, after)] == [(2, 4), (4, 12), (12, 15)]
    copies = PartPlans(pair).gather(OURS, THEIRS, (before, whole, after), 15)
    assert isinstance(copies[1], LaidCopy)
    assert all(isinstance(copy, LaidCopy | CopyPlan) for copy in copies)
