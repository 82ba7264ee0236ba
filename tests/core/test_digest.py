"""The order of bytes that two ranks agree on: whatever the layouts, what was read and what has landed are equal."""

from __future__ import annotations

import numpy as np
import pytest
from elementwise import Rank, execute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_plan_brute_force import Case, cases

from pushkv.core.digest import plan_span, source_bytes, target_bytes
from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Layer, Place, Strides
from pushkv.core.runs import Runs
from pushkv.core.span import Span
from pushkv.core.template import PairTemplate
from pushkv.errors import GeometryError


def read(stretches: Runs, rank: Rank) -> NDArray[np.uint8]:
    columns = (column.tolist() for column in (stretches.region, stretches.offset, stretches.length))
    pieces = [rank.regions[region][start : start + length] for region, start, length in zip(*columns, strict=True)]
    return np.concatenate([np.zeros(0, np.uint8), *pieces])


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(cases(), st.integers(0, 26), st.integers(0, 26))
def test_what_was_sent_is_what_has_landed(case: Case, one: int, other: int) -> None:
    """Any part of a request: any layouts, block sizes, ranks, windows and states; several spans in one part."""
    start, stop = sorted(max(case.tokens[0], min(cut, case.end)) for cut in (one, other))
    for producer in case.producers:
        for group in case.groups:
            producer.fill(group, group.moved(case.tokens, case.end))
    consumer = case.consumers[case.seed % len(case.consumers)]
    for producer in case.producers:
        template = PairTemplate(producer.geometry, consumer.geometry)
        spans = template.owed((start, stop), end=case.end)
        theirs = [
            BlockTable(0, np.zeros(0, np.int32)) if number in case.left_out else table
            for number, table in enumerate(consumer.tables)
        ]
        plans = [plan_span(template, producer.tables, theirs, span, case.end) for span in spans]
        hits = [np.zeros_like(region) for region in consumer.regions]
        for plan in plans:
            execute(plan, producer, consumer, hits)
        sent, landed = source_bytes(plans), target_bytes(template, theirs, spans, case.end)
        np.testing.assert_array_equal(read(sent, producer), read(landed, consumer))
        assert int(landed.length.sum()) == sum(plan.bytes for plan in plans) == sum(map(np.count_nonzero, hits))


def group(blocks: int, block_size: int = 4) -> CacheGroup:
    """One layer of ``block_size`` tokens of 8 bytes a block."""
    layers = (Layer("l", (Place(0, 0),)),)
    strides = Strides(block_size * 8, 8, 8, 8)
    return CacheGroup(layers, blocks, block_size, 1, 0, 1, 1, 8, "u8", strides, sides=1)


def table(*ids: int) -> BlockTable:
    return BlockTable(0, np.array(ids, np.int32))


def test_the_order_is_the_targets() -> None:
    template = PairTemplate(Geometry((group(9),)), Geometry((group(9),)))
    span = Span(0, 0, 1, 0, 12)
    sent = source_bytes([plan_span(template, [table(1, 2, 3)], [table(8, 0, 4)], span, 12)])
    assert sent.offset.tolist() == [2 * 32, 3 * 32, 1 * 32]
    landed = target_bytes(template, [table(8, 0, 4)], [span], 12)
    assert landed.offset.tolist() == [0, 4 * 32, 8 * 32]


def test_a_source_that_is_smaller_than_the_prompt_before_the_part() -> None:
    """Its blocks are not known here, and those of the first tokens may be gone: a part needs its own alone."""
    template = PairTemplate(Geometry((group(2),)), Geometry((group(64),)))
    landed = target_bytes(template, [table(*range(64))], [Span(0, 0, 1, 200, 208)], 256)
    assert (landed.offset.tolist(), landed.length.tolist()) == ([50 * 32], [64])


def test_a_part_that_the_source_could_not_hold_is_refused() -> None:
    template = PairTemplate(Geometry((group(2),)), Geometry((group(64),)))
    with pytest.raises(GeometryError, match=r"source table holds \[0, 2\)"):
        target_bytes(template, [table(*range(64))], [Span(0, 0, 1, 0, 12)], 256)


def test_no_spans_are_no_bytes() -> None:
    template = PairTemplate(Geometry((group(2),)), Geometry((group(2),)))
    assert target_bytes(template, [table(0)], [], 4).length.size == 0
    assert source_bytes([]).length.size == 0
