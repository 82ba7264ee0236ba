"""Plans by hand: what they copy, how few runs they need, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pushkv.core.covering import uncovered
from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Kind, Layer, Place, Strides
from pushkv.core.layouts import shard
from pushkv.core.plan import CopyPlan, plan_copy
from pushkv.core.span import Span
from pushkv.core.template import PairTemplate, writers
from pushkv.errors import GeometryError, GeometryMismatch

LAYERS, BLOCKS, HEADS, SIZE, CONTENT = 3, 12, 4, 8, 16
ROW = HEADS * SIZE * CONTENT * 2
HND = Strides(ROW, SIZE * CONTENT * 2, CONTENT * 2, 2)


def group(**changes: Any) -> CacheGroup:
    """A layer-outer group: K then V of a layer, each in blocks of (head, token, content)."""
    places = [(2 * layer * BLOCKS * ROW, (2 * layer + 1) * BLOCKS * ROW) for layer in range(LAYERS)]
    layers = tuple(Layer(f"layer.{i}", (Place(0, k), Place(0, v))) for i, (k, v) in enumerate(places))
    plain = CacheGroup(layers, BLOCKS, SIZE, HEADS, 0, HEADS, CONTENT, 2, "bfloat16", HND)
    return msgspec.structs.replace(plain, **changes)


def layer_outer(**changes: Any) -> Geometry:
    return Geometry((group(**changes),))


def block_outer(**changes: Any) -> Geometry:
    """All layers of a block side by side."""
    layers = tuple(Layer(f"layer.{i}", (Place(0, 2 * i * ROW), Place(0, (2 * i + 1) * ROW))) for i in range(LAYERS))
    strides = Strides(2 * LAYERS * ROW, HND.head, HND.token, HND.content)
    return layer_outer(layers=layers, strides=strides, **changes)


def spaced(**changes: Any) -> Geometry:
    """A region a layer, with K and V far apart, for block counts and head counts of any size."""
    layers = tuple(Layer(f"layer.{i}", (Place(i, 0), Place(i, 10**6))) for i in range(LAYERS))
    return layer_outer(**{"layers": layers, **changes})


def table(*ids: int, first: int = 0) -> BlockTable:
    return BlockTable(first, np.array(ids, np.int32))


def plan(
    source: Geometry, target: Geometry, ours: BlockTable, theirs: BlockTable, *tokens: int, **more: Any
) -> CopyPlan:
    return plan_copy(source, target, [ours], [theirs], (tokens[0], tokens[1]), **more)


def test_scattered_blocks_of_a_layer_outer_cache_are_one_run_each() -> None:
    made = plan(layer_outer(), layer_outer(), table(7, 2, 4), table(1, 9, 5), 0, 24)
    assert made.descriptors == made.descriptors_before == 3 * 2 * LAYERS
    assert made.run_bytes_p50 == ROW
    assert made.bytes == 3 * 2 * LAYERS * ROW


def test_consecutive_blocks_merge_in_whatever_order_they_were_handed_out() -> None:
    upward = plan(layer_outer(), layer_outer(), table(2, 3, 4), table(5, 6, 7), 0, 24)
    downward = plan(layer_outer(), layer_outer(), table(4, 3, 2), table(7, 6, 5), 0, 24)
    for made in (upward, downward):
        assert (made.descriptors, made.descriptors_before) == (2 * LAYERS, 3 * 2 * LAYERS)
        assert made.source_offset[0] == 2 * ROW
        assert made.target_offset[0] == 5 * ROW


def test_a_block_outer_cache_needs_one_run_a_block() -> None:
    made = plan(block_outer(), block_outer(), table(7, 2, 4), table(1, 9, 5), 0, 24)
    assert made.descriptors == made.descriptors_before == 3
    assert made.length.tolist() == [2 * LAYERS * ROW] * 3
    assert made.source_offset.tolist() == [2 * LAYERS * ROW * block for block in (7, 4, 2)]
    assert made.target_offset.tolist() == [2 * LAYERS * ROW * block for block in (1, 5, 9)]


def test_runs_do_not_merge_across_regions() -> None:
    apart = tuple(Layer(f"layer.{i}", (Place(i, 0), Place(i, BLOCKS * ROW))) for i in range(LAYERS))
    every = table(*range(BLOCKS))
    made = plan(layer_outer(layers=apart), layer_outer(layers=apart), every, every, 0, BLOCKS * SIZE)
    assert made.source_region.tolist() == made.target_region.tolist() == [0, 1, 2]
    assert made.length.tolist() == [2 * BLOCKS * ROW] * 3
    together = plan(layer_outer(), layer_outer(), every, every, 0, BLOCKS * SIZE)
    assert together.descriptors == 1


def test_a_partly_filled_last_block_is_copied_to_the_last_token() -> None:
    made = plan(block_outer(), block_outer(), table(3, 8), table(2, 6), 0, SIZE + 5)
    token_rows = 2 * LAYERS * HEADS
    assert made.descriptors == made.descriptors_before == 1 + token_rows
    assert made.bytes == 2 * LAYERS * ROW + token_rows * 5 * CONTENT * 2
    assert made.run_bytes_p50 == 5 * CONTENT * 2


def test_whole_blocks_rounds_the_ends_out() -> None:
    exact = plan(block_outer(), block_outer(), table(3, 8, 5), table(2, 6, 9), 4, 2 * SIZE + 1)
    rounded = plan(block_outer(), block_outer(), table(3, 8, 5), table(2, 6, 9), 4, 2 * SIZE + 1, whole_blocks=True)
    assert exact.source_index is None
    assert exact.descriptors == 1 + 2 * 2 * LAYERS * HEADS
    assert rounded.length.tolist() == [2 * LAYERS * ROW] * 3
    assert rounded.source_index is not None
    assert rounded.source_index.tolist() == [3, 8, 5]


def test_groups_of_whole_blocks_round_out_by_themselves() -> None:
    whole = Geometry((msgspec.structs.replace(block_outer().groups[0], whole_blocks=True),))
    made = plan(whole, whole, table(3, 8, 5), table(2, 6, 9), 4, 2 * SIZE + 1)
    assert made.length.tolist() == [2 * LAYERS * ROW] * 3
    group = whole.groups[0]
    windowed = Geometry((msgspec.structs.replace(group, kind=Kind.WINDOW, window=SIZE + 1),))
    made = plan(windowed, windowed, table(3, 8, 5), table(6, 9, first=1), 0, 2 * SIZE + 3)
    # The window begins with the second token but one of the second block; its first two tokens come along.
    assert made.length.tolist() == [2 * LAYERS * ROW] * 2


def test_a_cached_prefix_may_end_inside_a_block_of_the_other_size() -> None:
    source, target = layer_outer(), layer_outer(block_size=5, strides=Strides(ROW, 5 * CONTENT * 2, CONTENT * 2, 2))
    made = plan(source, target, table(1, 2), table(4, 5, first=2), 11, 16)
    # Tokens 11-14 are in the third block of five and 15 in the fourth: two runs a row and head.
    assert made.descriptors == 2 * 2 * LAYERS * HEADS
    assert sorted(set(made.length.tolist())) == [CONTENT * 2, 4 * CONTENT * 2]


@pytest.mark.parametrize(("ours", "theirs"), [(16, 24), (24, 16), (10, 6), (6, 10)])
def test_block_sizes_that_do_not_divide_merge_where_memory_is_contiguous(ours: int, theirs: int) -> None:
    def tokens_outer(size: int) -> Geometry:
        token = HEADS * CONTENT * 2
        return spaced(block_size=size, blocks=40, strides=Strides(size * token, CONTENT * 2, token, 2))

    upward = table(*range(20))
    made = plan(tokens_outer(ours), tokens_outer(theirs), upward, upward, 3, 100)
    assert made.length.tolist() == [97 * HEADS * CONTENT * 2] * (2 * LAYERS)
    assert made.descriptors_before > made.descriptors


def test_orders_that_differ_inside_a_block_show_in_the_median_run() -> None:
    token_outer = layer_outer(strides=Strides(ROW, CONTENT * 2, HEADS * CONTENT * 2, 2))
    made = plan(layer_outer(), token_outer, table(1, 0), table(2, 4), 0, 2 * SIZE)
    assert made.run_bytes_p50 == CONTENT * 2
    assert made.descriptors == 2 * 2 * LAYERS * HEADS * SIZE


def nixl_merge(template: PairTemplate, made: CopyPlan) -> list[tuple[int, int, int]]:
    """(source, target, length) after joining ascending neighbours in list order, as NIXL does with indices."""
    lattice = template.lattice()
    assert lattice is not None
    assert made.source_index is not None
    assert made.target_index is not None
    addresses = []
    for rows, index in ((lattice[0], made.source_index), (lattice[1], made.target_index)):
        every = np.concatenate(
            [o + s * np.arange(n) for o, s, n in zip(rows.offset, rows.stride, rows.units, strict=True)]
        )
        addresses.append(every[index].tolist())
    runs: list[tuple[int, int, int]] = []
    for source, target in zip(*addresses, strict=True):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (source, target):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + lattice[2])
        else:
            runs.append((source, target, lattice[2]))
    return runs


@pytest.mark.parametrize("make", [layer_outer, block_outer])
def test_indices_into_a_prepared_list_merge_to_exactly_the_runs(make: Callable[[], Geometry]) -> None:
    template = PairTemplate(make(), msgspec.structs.replace(make()))
    made = plan(make(), make(), table(3, 2, 9, 10), table(7, 6, 1, 2), 0, 4 * SIZE, template=template)
    runs = zip(made.source_offset.tolist(), made.target_offset.tolist(), made.length.tolist(), strict=True)
    assert nixl_merge(template, made) == list(runs)
    assert made.source_index is not None
    assert made.source_index.dtype == np.int32


def test_a_lattice_has_a_row_a_layer_and_side_or_one_for_whole_blocks() -> None:
    rows, theirs, unit = PairTemplate(layer_outer(), spaced(blocks=30)).lattice() or pytest.fail("no lattice")
    assert unit == ROW
    assert rows.units.tolist() == [BLOCKS] * 2 * LAYERS
    assert theirs.units.tolist() == [30] * 2 * LAYERS
    assert rows.first.tolist() == [row * BLOCKS for row in range(2 * LAYERS)]
    assert rows.stride.tolist() == [ROW] * 2 * LAYERS
    rows, _, unit = PairTemplate(block_outer(), block_outer()).lattice() or pytest.fail("no lattice")
    assert (unit, rows.offset.tolist(), rows.units.tolist()) == (2 * LAYERS * ROW, [0], [BLOCKS])


def test_pairs_that_are_not_uniform_have_no_lattice() -> None:
    other_size = layer_outer(block_size=4, strides=Strides(ROW, 4 * CONTENT * 2, CONTENT * 2, 2))
    assert PairTemplate(layer_outer(), other_size).lattice() is None
    made = plan(layer_outer(), other_size, table(1), table(2, 3), 0, SIZE)
    assert made.source_index is made.target_index is None
    latent = msgspec.structs.replace(latents(0, 1), content=CONTENT * 3)
    latent = msgspec.structs.replace(latent, strides=Strides(4096, 4096, 96, 2))
    mixed = Geometry((group(), latent))
    assert PairTemplate(mixed, mixed).lattice() is None


def test_a_range_of_layers_has_indices_where_units_do_not_span_layers() -> None:
    made = plan(layer_outer(), layer_outer(), table(3), table(4), 0, SIZE, layers=(1, 3))
    assert made.source_index is not None
    assert made.source_index.tolist() == [row * BLOCKS + 3 for row in (2, 3, 4, 5)]
    for layers in ((1, 3), (0, 2)):
        made = plan(block_outer(), block_outer(), table(3), table(4), 0, SIZE, layers=layers)
        assert made.source_index is None
        assert made.bytes == 2 * 2 * ROW


def test_each_side_numbers_units_by_its_own_blocks() -> None:
    made = plan(layer_outer(), spaced(blocks=30), table(3), table(4), 0, SIZE)
    assert made.source_index is not None
    assert made.target_index is not None
    assert made.source_index.tolist() == [row * BLOCKS + 3 for row in range(2 * LAYERS)]
    assert made.target_index.tolist() == [row * 30 + 4 for row in range(2 * LAYERS)]


def test_indices_of_groups_that_share_memory_are_in_order_of_target() -> None:
    other = group(layers=tuple(Layer(f"other.{i}", layer.places) for i, layer in enumerate(group().layers)))
    both = Geometry((group(), other))
    template = PairTemplate(both, both)
    ours, theirs = [table(4, 6), table(5, 7)], [table(1, 3), table(2, 4)]
    made = plan_copy(both, both, ours, theirs, (0, 2 * SIZE), template=template)
    runs = zip(made.source_offset.tolist(), made.target_offset.tolist(), made.length.tolist(), strict=True)
    assert made.descriptors == 2 * LAYERS
    assert nixl_merge(template, made) == list(runs)


def test_groups_of_one_unit_size_share_a_lattice() -> None:
    second = group(
        layers=tuple(Layer(f"w.{i}", (Place(1, 2 * i * ROW * 9), Place(1, (2 * i + 1) * ROW * 9))) for i in range(2))
    )
    second = msgspec.structs.replace(second, blocks=9, kind=Kind.WINDOW, window=SIZE)
    both = Geometry((group(), second))
    made = plan_copy(both, both, [table(5, 6), table(2, first=1)], [table(7, 8), table(1, first=1)], (0, 2 * SIZE))
    first = 2 * LAYERS * BLOCKS
    assert made.source_index is not None
    assert made.target_index is not None
    assert made.source_index[-4:].tolist() == [first + row * 9 + 2 for row in range(4)]
    assert made.target_index[-4:].tolist() == [first + row * 9 + 1 for row in range(4)]


def tensor_parallel(ranks: int, heads: int = HEADS) -> list[Geometry]:
    """The ranks of one engine; a block has room for all heads."""
    strides = Strides(heads * HND.head, HND.head, HND.token, HND.content)
    shares = [vars(shard(heads, rank, ranks)) for rank in range(ranks)]
    return [spaced(strides=strides, **share) for share in shares]


def latents(rank: int, ranks: int) -> CacheGroup:
    layers = tuple(Layer(f"mla.{i}", (Place(3, i * 10**6),)) for i in range(2))
    one = {"total_heads": 1, "head_stop": 1, "replica": rank, "replicas": ranks}
    return group(layers=layers, sides=1, kind=Kind.LATENT, strides=Strides(ROW, ROW, CONTENT * 2, 2), **one)


def test_who_writes_to_whom_follows_from_heads_and_copies() -> None:
    def table_of(producers: int, consumers: int, heads: int = 8) -> list[tuple[int, ...]]:
        sources = tensor_parallel(producers, heads)
        return [writers(sources, target) for target in tensor_parallel(consumers, heads)]

    assert table_of(8, 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert table_of(4, 8) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert table_of(1, 16, heads=4) == [(0,)] * 16
    assert table_of(16, 1, heads=4) == [(0, 4, 8, 12)]
    # Four heads in eight copies of two: copy i of a consumer's head takes it from copy i.
    assert table_of(8, 8, heads=4) == [(rank,) for rank in range(8)]
    assert table_of(8, 4, heads=4) == [(0,), (2,), (4,), (6,)]


def test_every_consumer_rank_gets_latents_from_one_producer_rank() -> None:
    producers = [Geometry((latents(rank, 2),)) for rank in range(2)]
    consumers = [Geometry((latents(rank, 4),)) for rank in range(4)]
    assert [writers(producers, consumer) for consumer in consumers] == [(0,), (1,), (0,), (1,)]


@pytest.mark.parametrize("producers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("consumers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 4, 8, 16])
def test_all_producer_ranks_together_cover_a_consumer_rank_once(producers: int, consumers: int, heads: int) -> None:
    sources = tensor_parallel(producers, heads)
    for target in tensor_parallel(consumers, heads):
        assert uncovered([PairTemplate(source, target) for source in sources]) == []


def test_what_nobody_writes_is_named() -> None:
    fewer = layer_outer(layers=group().layers[:2])
    lines = uncovered([PairTemplate(fewer, layer_outer())])
    assert lines == ["group 0, layer 'layer.2': heads [0, 4) are held, none would be written"]
    doubled = uncovered([PairTemplate(layer_outer(), layer_outer())] * 2)
    assert len(doubled) == LAYERS
    assert "[0, 4), [0, 4) would be written" in doubled[0]
    half = tensor_parallel(2)[0]
    assert "[0, 2) would be written" in uncovered([PairTemplate(half, layer_outer())])[0]


def test_pipeline_stages_are_matched_by_layer_name_in_the_producers_order() -> None:
    late = layer_outer(layers=group().layers[:0:-1])
    template = PairTemplate(late, layer_outer())
    assert template.pairs[0].layers == ("layer.2", "layer.1")
    assert template.owed((0, 20)) == (Span(0, 0, 2, 0, 20),)
    made = plan(late, layer_outer(), table(0), table(0), 0, SIZE, layers=(0, 1))
    assert made.target_offset.tolist() == [4 * BLOCKS * ROW, 5 * BLOCKS * ROW]


def test_layers_that_share_a_cache_are_written_once() -> None:
    shared = (*group().layers, Layer("layer.borrower", group().layers[0].places))
    template = PairTemplate(layer_outer(layers=shared), layer_outer(layers=shared))
    assert template.owed((0, 8)) == (Span(0, 0, LAYERS, 0, 8),)
    made = plan(layer_outer(layers=shared), layer_outer(layers=shared), table(0), table(0), 0, SIZE)
    assert made.bytes == 2 * LAYERS * ROW
    # A target with a cache for each takes both from the one the source has.
    own = (*group().layers, Layer("layer.borrower", (Place(1, 0), Place(1, 10**6))))
    made = plan(layer_outer(layers=shared), layer_outer(layers=own), table(0), table(0), 0, SIZE)
    assert made.bytes == 2 * (LAYERS + 1) * ROW
    assert uncovered([template]) == []


def hybrid() -> Geometry:
    window = group(layers=(Layer("window.0", (Place(1, 0), Place(1, 10**6))),), kind=Kind.WINDOW, window=10)
    state = group(
        layers=(Layer("state.0", (Place(2, 0),)),),
        kind=Kind.STATE,
        sides=1,
        block_size=32,
        strides=Strides(ROW, 64, 32, 2),
    )
    return Geometry((group(), window, state))


def test_a_window_keeps_its_tail_and_a_state_comes_with_the_end() -> None:
    template = PairTemplate(hybrid(), hybrid())
    assert template.owed((0, 40)) == (Span(0, 0, 3, 0, 40), Span(1, 0, 1, 30, 40), Span(2, 0, 1, 39, 40))
    assert template.owed((0, 24), end=40) == (Span(0, 0, 3, 0, 24),)
    assert template.owed((24, 40), end=40) == (Span(0, 0, 3, 24, 40), Span(1, 0, 1, 30, 40), Span(2, 0, 1, 39, 40))
    assert template.owed((36, 40), groups=[1]) == (Span(1, 0, 1, 36, 40),)
    assert template.owed((40, 40)) == ()


def test_a_window_takes_tables_that_start_at_different_blocks() -> None:
    tables = [table(9, 8, 7, 6, 5, first=0), table(3, 2, first=3), table(1)]
    theirs = [table(0, 1, 2, 3, 4), table(5, 6, 7, first=2), table(11)]
    made = plan_copy(hybrid(), hybrid(), tables, theirs, (0, 34), groups=[1])
    # Tokens 24 to 33 are in logical blocks 3 and 4, which neither side keeps at the same place of its table.
    assert made.bytes == 2 * 10 * HEADS * CONTENT * 2
    assert set((made.target_offset % 10**6 // ROW).tolist()) == {6, 7}
    with pytest.raises(GeometryError, match=r"logical blocks \[2, 4\) of 8 tokens; the source table holds \[3, 5\)"):
        plan_copy(hybrid(), hybrid(), tables, theirs, (0, 32), groups=[1])


def test_an_empty_target_table_leaves_its_group_out() -> None:
    tables = [table(0, 1), table(2, 3), table(4)]
    made = plan_copy(hybrid(), hybrid(), tables, [table(0, 1), table(), table()], (0, 16))
    assert made.bytes == 2 * 2 * LAYERS * ROW
    assert plan_copy(hybrid(), hybrid(), tables, [table()] * 3, (0, 16)).descriptors == 0


def test_an_empty_plan_is_whole_in_every_way() -> None:
    made = plan(layer_outer(), layer_outer(), table(), table(), 0, 0)
    assert (made.bytes, made.descriptors, made.run_bytes_p50, made.split(100)) == (0, 0, 0, ())
    assert made.gather_indices().row.size == made.scatter_indices().row.size == 0
    assert made.source_index is None


def test_parts_are_of_even_size_and_cut_alike_wherever_the_source_is() -> None:
    merged = plan(layer_outer(), layer_outer(), table(4, 5, 6), table(1, 2, 3), 0, 24)
    scattered = plan(layer_outer(), layer_outer(), table(9, 2, 7), table(1, 2, 3), 0, 24)
    assert merged.descriptors < scattered.descriptors
    assert merged.grain == scattered.grain == CONTENT * 2
    size = 2 * ROW + 3 * CONTENT * 2
    for left, right in zip(merged.split(size + 5), scattered.split(size + 5), strict=True):
        assert left.bytes == right.bytes
        assert not (left.length % left.grain).any()
        unit = left.grain
        assert left.scatter_indices(unit).row.tolist() == right.scatter_indices(unit).row.tolist()
    assert [part.bytes for part in merged.split(size + 5)][:-1] == [size] * (merged.bytes // size)


def test_gather_and_scatter_name_the_largest_units_that_fit() -> None:
    made = plan(layer_outer(), layer_outer(), table(4, 1), table(0, 5), 0, 2 * SIZE)
    gather, scatter = made.gather_indices(), made.scatter_indices()
    assert gather.unit == scatter.unit == ROW
    assert gather.row.tolist() == [BLOCKS * row + block for row in range(2 * LAYERS) for block in (4, 1)]
    assert scatter.row.tolist() == [BLOCKS * row + block for row in range(2 * LAYERS) for block in (0, 5)]
    assert made.gather_indices(ROW // 2).row.size == 2 * gather.row.size
    with pytest.raises(GeometryError, match=f"Units of {ROW * 2} bytes .* {ROW} bytes do"):
        made.gather_indices(ROW * 2)
    with pytest.raises(GeometryError, match="cannot hold one piece of 32"):
        made.split(31)


REFUSED = {
    "short source": (table(1), table(1, 2), "logical blocks .0, 2. of 8 tokens; the source table holds .0, 1."),
    "short target": (table(1, 2), table(1), "the target table holds .0, 1."),
    "late target": (table(1, 2), table(2, first=1), "the target table holds .1, 2."),
    "beyond": (table(1, 12), table(1, 2), r"source table of group 0 names block 12; the cache has blocks \[0, 12\)"),
    "negative": (table(1, 2), table(1, -1), "target table of group 0 names block -1"),
    "twice": (table(1, 2), table(3, 3), "target table of group 0 names block 3 twice"),
    "source twice": (table(4, 4), table(1, 3), "source table of group 0 names block 4 twice"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_tables_are_refused_with_the_numbers(case: str) -> None:
    ours, theirs, message = REFUSED[case]
    with pytest.raises(GeometryError, match=message):
        plan(layer_outer(), layer_outer(), ours, theirs, 0, 2 * SIZE)


def test_bad_ranges_are_refused_with_the_numbers() -> None:
    good = table(0, 1)
    with pytest.raises(GeometryError, match=r"Tokens \[5, 3\) of a request of 3"):
        plan(layer_outer(), layer_outer(), good, good, 5, 3)
    with pytest.raises(GeometryError, match=r"Tokens \[0, 9\) of a request of 8"):
        plan(layer_outer(), layer_outer(), good, good, 0, 9, end=8)
    with pytest.raises(GeometryError, match=r"layer range is \[2, 1\)"):
        plan(layer_outer(), layer_outer(), good, good, 0, 8, layers=(2, 1))
    with pytest.raises(GeometryError, match="2 source block tables for 1 groups"):
        plan_copy(layer_outer(), layer_outer(), [good, good], [good], (0, 8))
    with pytest.raises(GeometryError, match=r"shape \(2, 2\) and dtype int64"):
        BlockTable(0, np.zeros((2, 2), np.int64))
    with pytest.raises(GeometryError, match="starts at logical block -1"):
        table(1, first=-1)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([[0, 1]], [table(0, 1)], r"source table of group 0 is \[0, 1\]; give BlockTable\("),
        ([table(0, 1)], [np.arange(2)], r"target table of group 0 is array\(\[0, 1\]\); give BlockTable\("),
        ([table(0, 1)], [None], "target table of group 0 is None"),
        (7, [table(0, 1)], "source block tables are 7; give a list of 1, one a group"),
        ([table(0, 1)], table(0, 1), r"target block tables are BlockTable\(.*; give a list of 1, one a group"),
        ([table(0, 1)], [], "0 target block tables for 1 groups"),
    ],
)
def test_what_is_no_block_table_is_refused_by_name(ours: Any, theirs: Any, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        plan_copy(layer_outer(), layer_outer(), ours, theirs, (0, 8))


@pytest.mark.parametrize(
    ("first", "ids", "message"),
    [
        (0, [[1, 2], [3]], r"block table is \[\[1, 2\], \[3\]\]; give one row of integers"),
        (0, [1, None], "shape \\(2,\\) and dtype object; give one row"),
        (0, "12", "dtype <U2"),
        (0, [0.5], "dtype float64"),
        (None, [1], "starts at logical block None; give 0 or more"),
        ("0", [1], "starts at logical block '0'"),
        (0.0, [1], "starts at logical block 0.0"),
    ],
)
def test_a_block_table_of_anything_else_is_refused(first: Any, ids: Any, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        BlockTable(first, ids)


def test_a_block_table_takes_lists_and_numpys_numbers() -> None:
    assert BlockTable(np.int64(2), [1, 2]).ids.tolist() == [1, 2]  # type: ignore[arg-type]
    assert len(BlockTable(0, [])) == 0  # type: ignore[arg-type]


def test_groups_that_share_target_memory_must_not_share_a_block() -> None:
    other = group(layers=tuple(Layer(f"other.{i}", layer.places) for i, layer in enumerate(group().layers)))
    both = Geometry((group(), other))
    ours = [table(0), table(1)]
    assert plan_copy(both, both, ours, [table(2), table(3)], (0, SIZE)).bytes == 2 * 2 * LAYERS * ROW
    with pytest.raises(GeometryError, match=f"share byte {2 * ROW} of region 0"):
        plan_copy(both, both, ours, [table(2), table(2)], (0, SIZE))


def test_a_pair_that_differs_names_every_factor_with_both_values() -> None:
    other = group(dtype="float16", content=CONTENT // 2, kind=Kind.WINDOW, window=7)
    with pytest.raises(GeometryMismatch) as refused:
        PairTemplate(layer_outer(), Geometry((other,)))
    for line in (
        "group 0 dtype: 'bfloat16' against 'float16'",
        "group 0 content elements: '16' against '8'",
        "group 0 kind: 'attention' against 'window'",
        "group 0 window: '0' against '7'",
    ):
        assert line in str(refused.value)


def test_a_layer_in_another_group_is_a_difference() -> None:
    one, two = group(layers=group().layers[:1]), group(layers=group().layers[1:])
    with pytest.raises(GeometryMismatch, match=r"group of layer 'layer\.0': 0 against 1"):
        PairTemplate(Geometry((one, two)), Geometry((two, one)))
    with pytest.raises(GeometryMismatch, match="cache groups: '2' against '1'"):
        PairTemplate(Geometry((one, two)), layer_outer())


def test_a_plan_too_large_to_list_is_refused_before_it_is_made() -> None:
    # Content strides that differ make every element a piece of its own.
    layers = (Layer("layer.0", (Place(0, 0), Place(1, 0))),)
    huge: dict[str, Any] = {"content": 1 << 14, "blocks": 64, "layers": layers}
    near = layer_outer(**huge, strides=Strides(1 << 22, 1 << 19, 1 << 16, 2))
    far = layer_outer(**huge, strides=Strides(1 << 22, 1 << 19, 1 << 16, 4))
    with pytest.raises(GeometryError, match="plan fewer tokens or layers"):
        plan(near, far, table(*range(64)), table(*range(64)), 0, 64 * SIZE)
    assert plan(near, far, table(0), table(0), 0, 1).descriptors == 2 * HEADS << 14
