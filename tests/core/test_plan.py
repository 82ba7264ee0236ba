"""Plans by hand: what they copy, how few runs they need, and what they refuse."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Layer, Place, Strides
from pushkv.core.plan import CopyPlan, plan_copy

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
    assert made.descriptors == 3
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
