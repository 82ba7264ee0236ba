"""The cost model: which way a transfer goes, and what a consumer can tell of its pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Layer, Place, Strides
from pushkv.core.plan import plan_copy
from pushkv.core.template import PairTemplate
from pushkv.core.ways import ASSUMED, Costs, Left, Meter, Prices, direct_seconds, landing_seconds, lands, weigh

NVLINK = Prices(descriptor=6e-6, wire=250e9, copy=1.2e12, part=0.1e-3)
TCP = Prices(descriptor=20e-6, wire=1e9, copy=3e9)
CMA = Prices(descriptor=5e-6, wire=4e9, copy=4e9)
GIB, SLOT = 1 << 30, 16 << 20
LAYERS, BLOCKS, HEADS, CONTENT = 3, 32, 2, 8


class TestModel:
    @pytest.mark.parametrize("costs", [NVLINK, TCP, CMA])
    def test_a_few_large_pieces_go_directly(self, costs: Prices) -> None:
        assert not lands(costs, 1, GIB, SLOT)
        assert not lands(costs, GIB // (16 << 20), GIB, SLOT)

    @pytest.mark.parametrize("costs", [NVLINK, TCP, CMA])
    def test_many_small_pieces_land(self, costs: Prices) -> None:
        assert lands(costs, GIB // 2048, GIB, SLOT)

    def test_what_was_measured_on_nvlink(self) -> None:
        """4 GiB in pieces of 32 KiB took 821 ms directly and about 18 ms through slots of 256 MiB; whole, 16 ms."""
        assert direct_seconds(NVLINK, 131_072, 4 * GIB) == pytest.approx(0.82, rel=0.1)
        assert landing_seconds(NVLINK, 4 * GIB, 256 << 20) == pytest.approx(0.019, rel=0.2)
        assert direct_seconds(NVLINK, 1, 4 * GIB) == pytest.approx(0.017, rel=0.1)

    def test_nothing_lands_nowhere(self) -> None:
        assert not lands(TCP, 0, 0, SLOT)

    def test_what_counts_is_what_is_left_when_the_prompt_is_computed(self) -> None:
        pieces = 4 * GIB // (64 << 20)
        assert not lands(NVLINK, pieces, 4 * GIB, 256 << 20)
        assert lands(NVLINK, pieces, 4 * GIB, 256 << 20, Left(1.0, 1 / 8))
        assert not lands(NVLINK, pieces, 4 * GIB, 256 << 20, Left(1 / 8, 1 / 8))

    def test_more_pieces_never_make_direct_better(self) -> None:
        ways = [lands(CMA, pieces, 64 << 20, SLOT) for pieces in (1, 10, 100, 1000, 10_000, 100_000)]
        assert ways == sorted(ways)


class TestMeter:
    def test_nothing_is_known_but_what_is_assumed(self) -> None:
        meter = Meter()
        assert meter.prices == ASSUMED
        assert meter.news() is None

    def test_a_large_piece_tells_of_the_wire_and_many_small_ones_of_descriptors(self) -> None:
        meter = Meter()
        meter.learn(4, 64 << 20, 0.064)
        assert meter.prices.wire == pytest.approx((64 << 20) / 0.064)
        size = 1000 * 2048
        meter.learn(1000, size, size / meter.prices.wire + 1000 * 20e-6)
        assert meter.prices.descriptor == pytest.approx(20e-6)
        assert meter.news() == meter.prices
        assert meter.news() is None, "it is told"

    def test_later_ones_count_for_less_and_small_changes_are_not_told(self) -> None:
        meter = Meter()
        meter.learn(1, 10 << 20, (10 << 20) / 1e9)
        assert meter.news() is not None
        meter.learn(1, 10 << 20, (10 << 20) / 1.5e9)
        assert 1e9 < meter.prices.wire < 1.2e9
        assert meter.news() is None
        for _ in range(20):
            meter.learn(1, 10 << 20, (10 << 20) / 1.5e9)
        told = meter.news()
        assert told is not None
        assert told.wire == pytest.approx(1.5e9, rel=0.01)

    @pytest.mark.parametrize(
        ("pieces", "size", "seconds"), [(1, 4096, 0.1), (63, 63 * 512, 0.1), (0, 0, 1.0), (1, 1 << 30, 0.0)]
    )
    def test_what_tells_of_nothing(self, pieces: int, size: int, seconds: float) -> None:
        meter = Meter()
        meter.learn(pieces, size, seconds)
        assert meter.prices == ASSUMED

    def test_descriptors_never_cost_less_than_nothing(self) -> None:
        meter = Meter()
        meter.learn(1000, 1000 * 2048, 1e-6)
        assert 0 < meter.prices.descriptor < 1e-6

    def test_settings_go_before_what_is_measured_and_the_dearest_of_several_counts(self) -> None:
        some = [Prices(descriptor=1e-6, wire=1e9), Prices(descriptor=9e-6, wire=5e9)]
        assert Costs().prices(some) == Prices(9e-6, Costs().part, 1e9, ASSUMED.copy)
        assert Costs(descriptor=0.0, wire=7e9, copy=2e9).prices(some) == Prices(0.0, Costs().part, 7e9, 2e9)
        assert Costs().prices() == ASSUMED._replace(part=Costs().part)


def geometry(size: int, order: str = "HN", block_outer: bool = False) -> Geometry:
    """K and V together; layers far apart or side by side in a block; heads or tokens outer."""
    row = size * HEADS * CONTENT
    strides = (size * CONTENT, CONTENT) if order == "HN" else (CONTENT, HEADS * CONTENT)
    block, step = (row * LAYERS, row) if block_outer else (row, row * BLOCKS)
    layers = tuple(Layer(f"l{number}", (Place(0, number * step),)) for number in range(LAYERS))
    group = CacheGroup(
        layers, BLOCKS, size, HEADS, 0, HEADS, CONTENT, 1, "uint8", Strides(block, *strides, 1), sides=1
    )
    return Geometry((group,))


def table(*ids: int) -> BlockTable:
    return BlockTable(0, np.array(ids, np.int32))


SCATTERED, ROW = (9, 2, 30, 5), (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("source", "target", "ours", "theirs"),
    [
        pytest.param(geometry(4), geometry(4), SCATTERED, (1, 8, 3, 20), id="scattered"),
        pytest.param(geometry(4), geometry(4), ROW, (10, 11, 12, 13), id="in a row"),
        pytest.param(
            geometry(4, block_outer=True), geometry(4, block_outer=True), SCATTERED, (1, 8, 3, 20), id="wide"
        ),
        pytest.param(geometry(4), geometry(4, "NH"), SCATTERED, (1, 8, 3, 20), id="other axes"),
        pytest.param(geometry(4, "NH"), geometry(8, "NH"), SCATTERED, (1, 8), id="other blocks"),
        pytest.param(geometry(4), geometry(8), SCATTERED, (1, 8), id="other blocks of heads"),
    ],
)
def test_the_pieces_and_bytes_of_a_plan(
    source: Geometry, target: Geometry, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    template = PairTemplate(source, target)
    plan = plan_copy(source, target, [table(*ours)], [table(*theirs)], (0, 16), template=template)
    weight = weigh(template, [table(*theirs)], (0, 16))
    assert (weight.fewest, weight.bytes) == (plan.descriptors, plan.bytes)
    strewn = plan_copy(source, target, [table(*SCATTERED)], [table(*theirs)], (0, 16), template=template)
    assert weight.most == strewn.descriptors
    assert weight.fewest <= weight.pieces <= weight.most


def test_blocks_in_disorder_are_scattered_though_they_are_neighbours() -> None:
    """A request that holds all of a cache, in any order: sorted they are one stretch, and still no two can merge."""
    template = PairTemplate(geometry(4), geometry(4))
    ids = tuple(int(block) for block in np.random.default_rng(1).permutation(BLOCKS))
    close = sum(abs(a - b) == 1 for a, b in pairwise(ids))
    assert weigh(template, [table(*ids)], (0, 4 * BLOCKS)).fewest == LAYERS * (BLOCKS - close)
    falling = tuple(range(BLOCKS - 1, -1, -1))
    assert weigh(template, [table(*falling)], (0, 4 * BLOCKS)).fewest == LAYERS


def test_a_group_without_blocks_weighs_nothing() -> None:
    assert weigh(PairTemplate(geometry(4), geometry(4)), [table()], (0, 16)) == (0, 0, 0)
