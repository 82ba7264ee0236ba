"""Geometries: compact on the wire, and refused from a stranger when they cannot be true."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Kind, Layer, Place, Strides
from pushkv.core.memory import Region
from pushkv.errors import GeometryError

REGION = [Region(0x1000, 4096)]


def group(**changes: Any) -> CacheGroup:
    """Two layers, K and V apart, 4 blocks of 4 tokens, 2 heads of 8 two-byte elements: 4 x 512 bytes."""
    layers = tuple(Layer(f"layer.{i}", (Place(0, 1024 * i), Place(0, 1024 * i + 512))) for i in range(2))
    plain = CacheGroup(layers, 4, 4, 2, 0, 2, 8, 2, "float16", Strides(128, 64, 16, 2))
    return msgspec.structs.replace(plain, **changes)


def check(*groups: CacheGroup, regions: list[Region] | None = None) -> None:
    Geometry(groups).check(REGION if regions is None else regions)


def test_it_travels_in_msgpack_and_stays_small() -> None:
    layers = tuple(Layer(f"model.layers.{i}", (Place(i, 0), Place(i, 1 << 30))) for i in range(64))
    geometry = Geometry((group(layers=layers, kind=Kind.WINDOW, window=128),))
    wire = msgspec.msgpack.encode(geometry)
    assert msgspec.msgpack.decode(wire, type=Geometry) == geometry
    assert len(wire) < 64 * 40


def test_what_it_says_of_itself() -> None:
    assert group().heads == 2
    assert group().extent == 512
    assert group().token_bytes == 2 * 2 * 2 * 8 * 2
    assert group(kind=Kind.STATE, block_size=1000).tokens == 1
    check(group())


def rows(*offsets: int) -> tuple[Layer, ...]:
    return tuple(Layer(f"layer.{i}", (Place(0, offset),)) for i, offset in enumerate(offsets))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no blocks": ({"blocks": 0}, "has blocks 0; it must be between 1"),
    "negative block size": ({"block_size": -4}, "has block_size -4"),
    "absurd blocks": ({"blocks": 1 << 40}, f"has blocks {1 << 40}"),
    "no content": ({"content": 0}, "has content 0"),
    "heads outside": ({"head_stop": 3}, r"holds heads \[0, 3\) of 2"),
    "heads reversed": ({"head_start": 1, "head_stop": 1}, r"holds heads \[1, 1\) of 2"),
    "negative head": ({"head_start": -1}, r"holds heads \[-1, 2\)"),
    "replica": ({"replica": 2, "replicas": 2}, "replica 2 of 2"),
    "sides": ({"sides": 3}, "has 3 sides"),
    "window": ({"window": 5}, "of kind attention with a window of 5"),
    "no window": ({"kind": Kind.WINDOW}, "of kind window with a window of 0"),
    "long dtype": ({"dtype": "x" * 300}, "dtype name of 300 characters"),
    "negative stride": ({"strides": Strides(128, -64, 16, 2)}, "head stride of -64 bytes"),
    "absurd stride": ({"strides": Strides(1 << 60, 64, 16, 2)}, f"block stride of {1 << 60} bytes"),
    "absurd span": ({"blocks": 1 << 30, "strides": Strides(1 << 40, 64, 16, 2)}, "bytes a layer; at most"),
    "zero stride": ({"strides": Strides(128, 64, 0, 2)}, "one token is 0 bytes from the next .* spans 2 bytes"),
    "overlapping tokens": ({"strides": Strides(128, 64, 14, 2)}, "one token is 14 bytes .* spans 16 bytes"),
    "overlapping heads": ({"strides": Strides(128, 60, 16, 2)}, "one head is 60 bytes .* spans 64 bytes"),
    "overlapping blocks": ({"strides": Strides(96, 64, 16, 2)}, "one block is 96 bytes .* spans 128 bytes"),
    "one place": ({"layers": rows(0, 512)}, "layer 'layer.0' has 1 places; the group has 2 sides"),
    "no such region": ({"layers": (Layer("x", (Place(0, 0), Place(1, 0))),)}, "in region 1; there are 1 regions"),
    "negative region": ({"layers": (Layer("x", (Place(0, 0), Place(-1, 0))),)}, "byte 0 of region -1"),
    "negative offset": ({"layers": (Layer("x", (Place(0, 0), Place(0, -2))),)}, "byte -2 of region 0"),
    "past the end": (
        {"layers": (Layer("x", (Place(0, 0), Place(0, 3586))),)},
        r"spans bytes \[3586, 4098\) of region 0, which has 4096 bytes",
    ),
    "same name": ({"layers": (group().layers[0], Layer("layer.0", group().layers[1].places))}, "listed twice"),
    "long name": ({"layers": (Layer("x" * 300, group().layers[0].places),)}, "name has 300 characters"),
    "K is V": ({"layers": (Layer("x", (Place(0, 0), Place(0, 0))),)}, "'x' and 'x' overlap: 0 bytes"),
    "rows overlap": ({"sides": 1, "layers": rows(0, 510)}, "overlap"),
    "rows collide in a block": ({"sides": 1, "layers": rows(0, 128)}, "'layer.0' and 'layer.1' overlap"),
    "half an element apart": (
        {"sides": 1, "layers": rows(0, 1), "strides": Strides(256, 128, 32, 4)},
        "1 bytes apart within one element of 2 bytes",
    ),
    "too many layers": ({"sides": 1, "layers": rows(*range(5000))}, "5000 layers; at most 4096"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_true_is_refused_with_the_numbers(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(GeometryError, match=message):
        check(group(**changes))


def test_groups_are_counted_and_layers_named_once_over_all_of_them() -> None:
    with pytest.raises(GeometryError, match="0 cache groups"):
        check()
    with pytest.raises(GeometryError, match="65 cache groups"):
        check(*[group(layers=())] * 65)
    with pytest.raises(GeometryError, match=r"'layer\.0' is listed twice, in groups 0 and 1"):
        check(group(), group())
    check(group(), group(layers=()))


def test_layers_of_one_group_may_share_all_of_a_cache_and_groups_any_of_it() -> None:
    first, second = group().layers
    check(group(layers=(first, second, Layer("borrower", first.places))))
    check(
        group(),
        group(layers=(Layer("other", first.places),), block_size=2, content=16, strides=Strides(128, 64, 32, 2)),
    )


@pytest.mark.parametrize(
    ("strides", "offsets"),
    [
        (Strides(256, 64, 16, 2), (0, 128)),  # layers inside a block
        (Strides(512, 128, 16, 2), (64, 0)),  # inside a head
        (Strides(256, 128, 32, 2), (0, 16)),  # inside a token
        (Strides(256, 128, 32, 4), (2, 0)),  # inside an element's step
        (Strides(512, 256, 32, 2), (0, 16, 128)),  # one pair close, the third in the gap
        (Strides(300, 64, 16, 2), (290, 120)),  # a phase that wraps round the block
    ],
)
def test_layers_may_interleave_at_any_axis(strides: Strides, offsets: tuple[int, ...]) -> None:
    check(group(sides=1, layers=rows(*offsets), strides=strides))


def test_absurd_sizes_cost_nothing() -> None:
    absurd = group(blocks=1 << 31, block_size=1 << 31, strides=Strides(1 << 15, 1 << 14, 1, 1), content=1, itemsize=1)
    tracemalloc.start()
    with pytest.raises(GeometryError):
        check(absurd)
    with pytest.raises(GeometryError):
        Geometry((group(blocks=1 << 31, block_size=1 << 20, strides=Strides(1 << 40, 1 << 32, 1 << 10, 2)),)).check()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@st.composite
def wild_groups(draw: st.DrawFn) -> CacheGroup:
    """Small strides and offsets near those of real layouts: about half overlap somewhere."""
    sizes = {name: draw(st.integers(1, 3)) for name in ("blocks", "block_size", "total_heads", "content")}
    itemsize = draw(st.sampled_from([1, 2]))
    steps = []
    step = itemsize
    for size in draw(st.permutations(list(sizes))):
        steps.append((size, step + draw(st.sampled_from([0, 0, 0, 1, 2, 5]))))
        step = steps[-1][1] * sizes[size] * draw(st.sampled_from([1, 1, 1, 2, 3]))
    strides = dict(steps)
    layers = draw(st.lists(st.lists(st.integers(0, 24), min_size=2, max_size=2), min_size=1, max_size=3))
    named = tuple(Layer(f"layer.{i}", tuple(Place(0, at) for at in offsets)) for i, offsets in enumerate(layers))
    order = Strides(*(strides[name] for name in ("blocks", "total_heads", "block_size", "content")))
    return group(layers=named, head_stop=sizes["total_heads"], itemsize=itemsize, strides=order, **sizes)


def touched(group: CacheGroup, places: tuple[Place, ...]) -> list[int]:
    """Every byte of the elements of a layer, one by one."""
    strides = group.strides
    return [
        place.offset + b * strides.block + h * strides.head + n * strides.token + c * strides.content + byte
        for place in places
        for b, h, n, c in product(range(group.blocks), range(group.heads), range(group.tokens), range(group.content))
        for byte in range(group.itemsize)
    ]


@settings(max_examples=600, deadline=None)
@given(wild_groups())
def test_what_is_accepted_has_every_element_to_itself_and_inside(wild: CacheGroup) -> None:
    length = 200
    taken = [at for places in {layer.places for layer in wild.layers} for at in touched(wild, places)]
    try:
        check(wild, regions=[Region(0, length)])
    except GeometryError:
        return
    assert len(set(taken)) == len(taken)
    assert max(taken) < length


def test_a_block_table_takes_any_row_of_integers() -> None:
    assert len(BlockTable(0, np.array([], np.float64))) == 0
    assert BlockTable(2, np.array([5, 3], np.uint16)).ids.tolist() == [5, 3]
    with pytest.raises(GeometryError, match="dtype float64"):
        BlockTable(0, np.array([1.0]))


def test_a_block_of_several_kernel_blocks_divides() -> None:
    divided = BlockTable(3, np.array([7, 2], np.int32)).divided(4)
    assert divided.first == 12
    assert divided.ids.tolist() == [28, 29, 30, 31, 8, 9, 10, 11]
