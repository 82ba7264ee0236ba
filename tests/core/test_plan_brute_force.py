"""Every plan equals an elementwise copy: arbitrary pairs of layouts of one logical cache, byte by byte.

PUSHKV_PLAN_CASES sets how many cases are drawn in all (2,000 by default).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
from elementwise import LogicalGroup, Rank, Share, execute, execute_through_a_slot, lay_out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pushkv.core.copies import CopyPlan
from pushkv.core.covering import uncovered
from pushkv.core.geometry import BlockTable, Kind, Stripe
from pushkv.core.memory import Region
from pushkv.core.parts import PartCopy, PartPlans, cut, least_slot, span_bytes
from pushkv.core.plan import plan_copy
from pushkv.core.span import Span
from pushkv.core.template import PairTemplate, writers

pytestmark = pytest.mark.timeout(600)  # hundreds of cases each, on whatever else the machine does

CASES = int(os.environ.get("PUSHKV_PLAN_CASES", "2000"))
WAYS = ("whole", "parts", "split", "slot")
VLLM = ("LBHNSC", "LBNHSC", "LHBNSC", "BLHNSC", "BLNHSC", "BHLNSC", "LSBHNC", "SLBNHC", "BLSNHC", "LBHSNC")


@dataclass(frozen=True)
class Case:
    groups: list[LogicalGroup]
    producers: list[Rank]
    consumers: list[Rank]
    tokens: tuple[int, int]
    end: int
    left_out: frozenset[int]
    seed: int


def head_shares(heads: int, ranks: int, uneven: bool, rng: np.random.Generator) -> list[tuple[range, int, int]]:
    """(heads, replica, replicas) by rank: equal shares, copies where ranks outnumber heads, or uneven cuts."""
    if ranks > heads:
        copies = ranks // heads
        return [(range(rank // copies, rank // copies + 1), rank % copies, copies) for rank in range(ranks)]
    if uneven:
        inner = sorted(rng.choice(np.arange(1, heads), ranks - 1, replace=False).tolist()) if ranks > 1 else []
        cuts = [0, *inner, heads]
    else:
        cuts = [rank * heads // ranks for rank in range(ranks + 1)]
    return [(range(start, stop), 0, 1) for start, stop in pairwise(cuts)]


def block_table(first_needed: int, stop_needed: int, blocks: int, rng: np.random.Generator) -> BlockTable:
    """Random distinct blocks for at least the needed logical blocks, often more; sometimes in falling order."""
    first = int(rng.integers(0, first_needed + 1))
    count = stop_needed - first
    ids = rng.permutation(blocks)[:count]
    style = rng.integers(4)
    if style == 0:
        ids = np.sort(ids)[::-1]
    elif style == 1:
        start = int(rng.integers(0, blocks - count + 1))
        ids = np.arange(start, start + count)
    return BlockTable(first, ids.astype(np.int32))


def draw_side(
    draw: st.DrawFn, groups: list[LogicalGroup], tokens: tuple[int, int], end: int, rng: np.random.Generator
) -> list[Rank]:
    """All ranks of one engine: one layout and one set of tables for all of them, pipeline by tensor parallel."""
    tensor, pipeline = draw(st.sampled_from([1, 1, 2, 2, 4, 8, 16])), draw(st.sampled_from([1, 1, 2]))
    stripes = draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4])) if tensor < 8 else 1
    orders = [draw(st.sampled_from(VLLM) | st.permutations("LSBHNC").map("".join)) for _ in groups]
    block_sizes = [draw(st.sampled_from([1, 2, 3, 4, 5, 6, 8])) for _ in groups]
    uneven = draw(st.booleans())
    # Of an engine that shares tokens out some groups may be held whole by every rank, and states always are.
    dealt = [stripes if group.kind is not Kind.STATE and rng.integers(4) else 1 for group in groups]
    widths = [int(rng.choice([width for width in range(1, size + 1) if size % width == 0])) for size in block_sizes]
    tables, sizes = [], []
    for group, block_size, count in zip(groups, block_sizes, dealt, strict=True):
        moved, span = group.moved(tokens, end), block_size * count
        first, stop = (moved[0] // span, moved[-1] // span + 1) if moved else (0, 0)
        blocks = stop + int(rng.integers(1, 4))
        tables.append(block_table(first, stop, blocks, rng))
        sizes.append((block_size, blocks))
    heads = [head_shares(group.heads, tensor, uneven, rng) for group in groups]
    cuts = [
        sorted([0, *rng.integers(0, len(group.layers) + 1, pipeline - 1).tolist(), len(group.layers)])
        for group in groups
    ]
    ranks = []
    for stage in range(pipeline):
        for rank, index in product(range(tensor), range(stripes)):
            shares = [
                share_of(group.layers[cut[stage] : cut[stage + 1]], share[rank], (index, stripes), count, width)
                for group, cut, share, count, width in zip(groups, cuts, heads, dealt, widths, strict=True)
            ]
            geometry, lengths = lay_out(groups, shares, orders, sizes, rng)
            regions = [rng.integers(0, 256, length, dtype=np.uint8) for length in lengths]
            counts = [np.zeros(length, np.uint8) for length in lengths]
            ranks.append(Rank(geometry, regions, tables, shares, counts))
    return ranks


def share_of(
    layers: tuple[str, ...], share: tuple[range, int, int], rank: tuple[int, int], count: int, width: int
) -> Share:
    """A stripe of a share of the heads, or where tokens are not dealt out one more copy of it."""
    (heads, replica, replicas), (index, ranks) = share, rank
    if count > 1:
        return Share(layers, heads, replica, replicas, Stripe(index, count, width))
    return Share(layers, heads, replica * ranks + index, replicas * ranks)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(seed := draw(st.integers(0, 2**32 - 1)))
    groups = []
    for number in range(draw(st.sampled_from([1, 1, 2, 3]))):
        kind = draw(st.sampled_from([Kind.ATTENTION, Kind.ATTENTION, *Kind]))
        layers = tuple(f"{number}.{layer}" for layer in range(draw(st.integers(1, 3))))
        sides = 1 if kind is Kind.LATENT else draw(st.sampled_from([2, 2, 1]))
        heads = 1 if kind is Kind.LATENT else draw(st.sampled_from([1, 2, 4]))
        content, itemsize = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
        window = draw(st.integers(1, 12)) if kind is Kind.WINDOW else 0
        groups.append(LogicalGroup(number, layers, sides, heads, content, itemsize, kind, window))
    end = draw(st.integers(0, 26))
    tokens = (draw(st.integers(0, end)), end)
    left_out = draw(st.frozensets(st.integers(0, len(groups) - 1), max_size=1)) if len(groups) > 1 else frozenset()
    producers = draw_side(draw, groups, tokens, end, rng)
    consumers = draw_side(draw, groups, tokens, end, rng)
    return Case(groups, producers, consumers, tokens, end, left_out, seed)


def plans_of(case: Case, producer: Rank, consumer: Rank, way: str, rng: np.random.Generator) -> list[CopyPlan]:
    """The plan of the request from one rank to another, or plans of parts that make it up."""
    template = PairTemplate(producer.geometry, consumer.geometry)
    theirs = [
        BlockTable(0, np.zeros(0, np.int32)) if group.number in case.left_out else table
        for group, table in zip(case.groups, consumer.tables, strict=True)
    ]
    held = [group.number for group in case.groups if group.number not in case.left_out]
    ranges: list[tuple[tuple[int, int], tuple[int, int] | None]] = [(case.tokens, None)]
    if way == "parts":
        middle = int(rng.integers(case.tokens[0], case.tokens[1] + 1))
        layer = int(rng.integers(0, 4))
        ranges = [
            (tokens, layers)
            for tokens in ((case.tokens[0], middle), (middle, case.end))
            for layers in ((0, layer), (layer, 4))
        ]
    plans = []
    for tokens, layers in ranges:
        plan = plan_copy(
            producer.geometry, consumer.geometry, producer.tables, theirs, tokens,
            template=template, end=case.end, layers=layers,
        )  # fmt: skip
        spans = template.owed(tokens, end=case.end, layers=layers, groups=held)
        assert sum(bytes_of(producer, consumer, span) for span in spans) == plan.bytes
        assert_maximal(plan)
        plans += plan.split(int(rng.integers(max(plan.grain, 1), 64 + plan.grain))) if way == "split" else [plan]
    return plans


def bytes_of(producer: Rank, consumer: Rank, span: Span) -> int:
    """Of a span, in the heads and the tokens that both hold."""
    cache, shares = producer.geometry.groups[span.group], [rank.shares[span.group] for rank in (producer, consumer)]
    heads = set(shares[0].heads) & set(shares[1].heads)
    tokens = shares[1].held(shares[0].held(list(range(span.token_start, span.token_stop))))
    each = len(heads) * cache.sides * cache.content * cache.itemsize
    return (span.layer_stop - span.layer_start) * len(tokens) * each


def assert_maximal(plan: CopyPlan) -> None:
    columns = (plan.source_region, plan.source_offset, plan.target_region, plan.target_offset)
    starts = set(zip(*(column.tolist() for column in columns), strict=True))
    ends = (
        plan.source_region,
        plan.source_offset + plan.length,
        plan.target_region,
        plan.target_offset + plan.length,
    )
    assert not starts & set(zip(*(column.tolist() for column in ends), strict=True))
    assert (plan.length > 0).all()


def expect(case: Case, consumer: Rank) -> list[NDArray[np.uint8]]:
    """The consumer's memory as it must be afterwards."""
    expected = [region.copy() for region in consumer.regions]
    for group in case.groups:
        if group.number not in case.left_out:
            for layer in consumer.shares[group.number].layers:
                consumer.mark(group, layer, group.moved(case.tokens, case.end), expected)
    return expected


def run(case: Case, way: str) -> None:
    rng = np.random.default_rng(case.seed + 1)
    for producer in case.producers:
        producer.geometry.check([Region(0, region.size) for region in producer.regions])
        for group in case.groups:
            producer.fill(group, group.moved(case.tokens, case.end))
    for number in {0, len(case.consumers) - 1, case.seed % len(case.consumers)}:
        consumer = case.consumers[number]
        consumer.geometry.check([Region(0, region.size) for region in consumer.regions])
        expected = expect(case, consumer)
        hits = [np.zeros_like(region) for region in consumer.regions]
        chosen = writers([producer.geometry for producer in case.producers], consumer.geometry)
        if way == "whole":
            assert not uncovered([PairTemplate(one.geometry, consumer.geometry) for one in case.producers])
        for rank, producer in enumerate(case.producers):
            for plan in plans_of(case, producer, consumer, way, rng):
                assert rank in chosen or plan.descriptors == 0
                (execute_through_a_slot if way == "slot" else execute)(plan, producer, consumer, hits)
        for got, wanted, times, once in zip(consumer.regions, expected, hits, consumer.counts, strict=True):
            np.testing.assert_array_equal(times, once)
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_plan_copies_what_an_elementwise_copy_would(way: str) -> None:
    @settings(
        max_examples=-(-CASES // len(WAYS)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(cases())
    def check(case: Case) -> None:
        run(case, way)

    check()


def land(case: Case, producer: Rank, consumer: Rank, hits: list[NDArray[np.uint8]]) -> None:
    """Everything that one rank owes another, part by part through slots, each side planning for itself."""
    rng = np.random.default_rng(case.seed + 2)
    template = PairTemplate(producer.geometry, consumer.geometry)
    held = [group.number for group in case.groups if group.number not in case.left_out]
    owed = template.owed(case.tokens, end=case.end, groups=held)
    room = least_slot(template) + int(rng.choice([0, rng.integers(0, 64), rng.integers(0, 4096)]))
    parts = cut(template, owed, room) if owed else ()
    assert sum(span.area for part in parts for span in part) == sum(span.area for span in owed)
    assert all(any(span.within(one) for one in owed) for part in parts for span in part)
    plans = PartPlans(template)
    for part in parts:
        sources = plans.gather(producer.tables, consumer.tables, part, case.end)
        targets = plans.scatter(consumer.tables, part, case.end)
        size = sum(span_bytes(template, span) for span in part)
        assert size == sum(plan.bytes for plan in sources) == sum(plan.bytes for plan in targets) <= room
        slot = np.concatenate([piece for plan in sources for piece in pieces_of(plan, producer, source=True)])
        at = 0
        for plan in targets:
            for piece, times in zip(pieces_of(plan, consumer), pieces_of(plan, consumer, memory=hits), strict=True):
                piece[:] = slot[at : at + piece.size]
                times += 1
                at += piece.size


def pieces_of(
    plan: PartCopy, rank: Rank, *, source: bool = False, memory: list[NDArray[np.uint8]] | None = None
) -> list[NDArray[np.uint8]]:
    """Views of a plan's runs on one side, in order."""
    runs = plan.reads if source else plan.writes
    regions = rank.regions if memory is None else memory
    columns = zip(runs.region.tolist(), runs.offset.tolist(), runs.length.tolist(), strict=True)
    return [regions[number][start : start + length] for number, start, length in columns]


@settings(
    max_examples=-(-CASES // len(WAYS)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(cases())
def test_parts_through_slots_copy_the_same(case: Case) -> None:
    for producer in case.producers:
        for group in case.groups:
            producer.fill(group, group.moved(case.tokens, case.end))
    for consumer in case.consumers[:3]:
        expected = expect(case, consumer)
        hits = [np.zeros_like(region) for region in consumer.regions]
        for producer in case.producers:
            land(case, producer, consumer, hits)
        for got, wanted, times, once in zip(consumer.regions, expected, hits, consumer.counts, strict=True):
            np.testing.assert_array_equal(times, once)
            np.testing.assert_array_equal(got, wanted)
