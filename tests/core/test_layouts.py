"""Geometries read off arrays: each element lies where the engine would read it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Kind, Place
from pushkv.core.layouts import (
    VLLM_ORDERS,
    Array,
    Packing,
    Shard,
    dense_array,
    group_of_layers,
    group_of_tensor,
    neuron_layers,
    place_array,
    read_array,
    shard,
    vllm_cpu,
    vllm_cross_layer,
    vllm_layers,
)
from pushkv.core.memory import Region
from pushkv.core.plan import plan_copy
from pushkv.core.template import PairTemplate
from pushkv.errors import GeometryError

SIZES = {"L": 3, "S": 2, "B": 4, "H": 2, "N": 5, "C": 6}
NAMES = [f"layer.{i}" for i in range(3)]
ALL = Shard(0, 2, 2)


def numbers(order: str, **sizes: int) -> NDArray[np.int32]:
    """A different number in each element, contiguous in ``order``."""
    shape = [{**SIZES, **sizes}[letter] for letter in order]
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def element(group: CacheGroup, memory: NDArray[Any], layer: int, side: int, b: int, h: int, n: int, c: int) -> int:
    """What lies where the group says an element is; memory is region 0."""
    strides, place = group.strides, group.layers[layer].places[side]
    at = place.offset + b * strides.block + h * strides.head + n * strides.token + c * strides.content
    return int(memory.reshape(-1).view(np.uint8)[at : at + 4].view(np.int32)[0])


def every() -> product[tuple[int, ...]]:
    return product(*(range(SIZES[letter]) for letter in "LSBHNC"))


@pytest.mark.parametrize("order", ["".join(order) for order in permutations("LSBHNC")][::37])
def test_a_tensor_with_all_axes_in_any_order(order: str) -> None:
    memory = numbers(order)
    group = group_of_tensor(NAMES, read_array(memory), order, ALL)
    Geometry((group,)).check([Region(0, memory.nbytes)])
    for index in every():
        at = dict(zip("LSBHNC", index, strict=True))
        assert element(group, memory, *index) == memory[tuple(at[letter] for letter in order)]


@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_vllms_orders_seen_through_the_nominal_shape(order: str) -> None:
    memory = numbers(order, C=12)
    nominal = memory.transpose([order.index(letter) for letter in "LBHNC"])
    arrays = {name: read_array(nominal[i], offset=i * nominal.strides[0]) for i, name in enumerate(NAMES)}
    group = vllm_layers(arrays, ALL)
    assert group == vllm_cross_layer(NAMES, read_array(nominal), ALL)
    Geometry((group,)).check([Region(0, memory.nbytes)])
    for layer, side, b, h, n, c in every():
        assert element(group, memory, layer, side, b, h, n, c) == nominal[layer, b, h, n, side * 6 + c]


@pytest.mark.parametrize("order", VLLM_ORDERS)
def test_vllms_orders_with_k_and_v_apart_go_to_those_with_both_in_a_block(order: str) -> None:
    apart = group_of_tensor(NAMES, read_array(numbers("S" + order)), "S" + order, ALL)
    packed = group_of_tensor(NAMES, read_array(numbers(order, C=12)), order, ALL, packing=Packing.CONTENT)
    table = [BlockTable(0, np.array([2, 0], np.int32))]
    made = plan_copy(Geometry((apart,)), Geometry((packed,)), table, table, (0, 10))
    assert made.bytes == 2 * packed.token_bytes * 5
    assert made.run_bytes_p50 == 6 * 4


def test_the_older_cross_layer_tensor_names_its_own_axes() -> None:
    memory = numbers("BLSNHC")
    group = vllm_cross_layer(NAMES, read_array(memory.transpose(1, 2, 0, 3, 4, 5)), ALL, axes="LSBNHC")
    assert group == group_of_tensor(NAMES, read_array(memory), "BLSNHC", ALL)
    assert PairTemplate(Geometry((group,)), Geometry((group,))).lattice() is not None


def test_the_older_tensor_a_layer() -> None:
    memory = numbers("SBNHC")
    group = vllm_layers({"layer.0": read_array(memory)}, ALL)
    for _, side, b, h, n, c in every():
        assert element(group, memory, 0, side, b, h, n, c) == memory[side, b, n, h, c]


def test_rows_of_k_then_rows_of_v() -> None:
    memory = numbers("BHNC", C=12)
    group = group_of_layers({"layer.0": read_array(memory)}, "BHNC", ALL, packing=Packing.ROWS, whole_blocks=True)
    seen = memory.reshape(4, 2, 2, 5, 6)
    for _, side, b, h, n, c in every():
        assert element(group, memory, 0, side, b, h, n, c) == seen[b, h, side, n, c]
    assert group.whole_blocks
    assert not vllm_layers({"layer.0": read_array(memory)}, ALL).whole_blocks
    Geometry((group,)).check([Region(0, memory.nbytes)])


def test_vllms_cpu_cache_is_columns_of_k_then_rows_of_v() -> None:
    memory = numbers("BHNC", C=12)
    keys, values = vllm_cpu({"layer.0": read_array(memory)}, ALL)
    seen = memory.reshape(4, 2, 2, 30)
    for _, _, b, h, n, c in every():
        assert element(keys, memory, 0, 0, b, h, n, c) == seen[b, h, 0].reshape(6, 5)[c, n]
        assert element(values, memory, 0, 0, b, h, n, c) == seen[b, h, 1].reshape(5, 6)[n, c]
    Geometry((keys, values)).check([Region(0, memory.nbytes)])
    assert [layer.name for group in (keys, values) for layer in group.layers] == ["layer.0/k", "layer.0/v"]


@pytest.mark.parametrize(("ours", "theirs"), [(4, 8), (8, 4), (4, 6)])
def test_vllms_cpu_blocks_of_two_sizes_move_a_column_of_keys_at_once(ours: int, theirs: int) -> None:
    """Between blocks of two sizes keys leave by the content element, not by the element and token."""
    source, target = (numbers("BHNC", B=8, N=size, C=12) for size in (ours, theirs))
    target[:] = -1
    sides = [Geometry(vllm_cpu({"layer.0": read_array(memory)}, ALL)) for memory in (source, target)]
    ids = [np.random.default_rng(size).permutation(8).astype(np.int32)[: -(-21 // size)] for size in (ours, theirs)]
    tables = [[BlockTable(0, one)] * 2 for one in ids]
    plan = plan_copy(sides[0], sides[1], tables[0], tables[1], (0, 21))
    segments = len({start // ours + start // theirs * 100 for start in range(21)})
    assert plan.descriptors <= segments * 2 * (6 + 1)
    here, there = (memory.reshape(-1).view(np.uint8) for memory in (source, target))
    for left, right, size in zip(plan.source_offset, plan.target_offset, plan.length, strict=True):
        there[right : right + size] = here[left : left + size]
    for group, token, h, c in product((0, 1), range(21), range(2), range(6)):
        left, right = (
            element(side.groups[group], memory, 0, 0, int(one[token // size]), h, token % size, c)
            for side, memory, one, size in zip(sides, (source, target), ids, (ours, theirs), strict=True)
        )
        assert left == right


def test_neurons_cache() -> None:
    memory = numbers("SBHNC")
    group = neuron_layers({"layer.0": read_array(memory)}, ALL)
    for _, side, b, h, n, c in every():
        assert element(group, memory, 0, side, b, h, n, c) == memory[side, b, h, n, c]


def test_latents_have_one_head_and_one_side() -> None:
    memory = numbers("BNC")
    group = vllm_layers({"layer.0": read_array(memory)}, shard(1, 2, 4))
    assert (group.kind, group.sides, group.heads, group.replica, group.replicas) == (Kind.LATENT, 1, 1, 2, 4)
    assert element(group, memory, 0, 0, 3, 0, 2, 1) == memory[3, 2, 1]


def test_a_page_padded_view_into_a_larger_storage() -> None:
    storage = np.arange(1000, dtype=np.int32)
    page = np.lib.stride_tricks.as_strided(storage[40:], (4, 2, 5, 12), (200 * 4, 60 * 4, 12 * 4, 4))
    group = vllm_layers({"layer.0": read_array(page, offset=160)}, ALL)
    assert group.strides.block == 800
    assert element(group, storage, 0, 1, 3, 1, 4, 5) == page[3, 1, 4, 11]
    Geometry((group,)).check([Region(0, storage.nbytes)])
    with pytest.raises(GeometryError, match="spans bytes"):
        Geometry((group,)).check([Region(0, 160 + 3 * 800 + 479)])


def test_k_and_v_in_arrays_of_their_own() -> None:
    keys, values = dense_array("BHNC", SIZES, 4, "int32"), dense_array("BHNC", SIZES, 4, "int32", region=1)
    group = group_of_layers({"layer.0": (keys, values)}, "BHNC", ALL)
    assert group.sides == 2
    assert group.layers[0].places == (Place(0, 0), Place(1, 0))


def test_layers_that_share_one_array() -> None:
    memory = numbers("BHNC", C=12)
    group = vllm_layers({"layer.0": read_array(memory), "layer.5": read_array(memory)}, ALL)
    Geometry((group,)).check([Region(0, memory.nbytes)])
    template = PairTemplate(Geometry((group,)), Geometry((group,)))
    assert template.pairs[0].layers == ("layer.0",)


def test_a_state_folds_the_dimensions_of_its_content() -> None:
    memory = np.zeros((4, 2, 3, 7), np.float32)
    group = group_of_layers({"m": read_array(memory)}, "BHCC", ALL, kind=Kind.STATE, slot_tokens=1000)
    assert (group.content, group.block_size, group.tokens, group.sides) == (21, 1000, 1, 1)
    assert group.strides.head == 84
    Geometry((group,)).check([Region(0, memory.nbytes)])
    one = group_of_layers(
        {"m": read_array(np.zeros((4, 2, 1, 7), np.float32)[:, :, :, ::2])}, "BHCC", ALL, kind=Kind.STATE
    )
    assert (one.content, one.strides.content) == (4, 8)
    thin = group_of_layers({"m": read_array(memory[..., :1])}, "BHCC", ALL, kind=Kind.STATE)
    assert (thin.content, thin.strides.content) == (3, 28)
    with pytest.raises(GeometryError, match=r"named 'C' .* are not one axis"):
        group_of_layers({"m": read_array(memory[..., :5])}, "BHCC", ALL, kind=Kind.STATE)


@dataclass
class TorchLike:
    """The part of torch's interface that is read."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: str = "torch.bfloat16"

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def element_size(self) -> int:
        return 2

    def storage_offset(self) -> int:
        return 10


def test_torch_counts_strides_in_elements_and_numpy_in_bytes() -> None:
    read = read_array(TorchLike((4, 2), (3, 1)), region=5)
    assert read == Array(5, 20, (4, 2), (6, 2), 2, "bfloat16")
    assert read_array(TorchLike((4, 2), (3, 1)), offset=0).offset == 0
    assert read_array(np.zeros((4, 2), np.float32)[1:]) == Array(0, 0, (3, 2), (8, 4), 4, "float32")


def test_real_torch_tensors_are_read_alike() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(480, dtype=torch.int32).reshape(4, 5, 2, 12).permute(0, 2, 1, 3)
    memory = numbers("BNHC", C=12)
    assert read_array(tensor) == read_array(memory.transpose(0, 2, 1, 3))
    assert read_array(tensor[1:]).offset == 4 * 120
    assert read_array(torch.zeros(3, dtype=torch.bfloat16)).dtype == "bfloat16"


@dataclass(frozen=True)
class Description:
    """An array as a memory backend tells it."""

    region: Region
    offset: int = 8
    shape: tuple[int, ...] = (2, 2)
    strides: tuple[int, ...] = (4, 2)
    itemsize: int = 2
    dtype: str = "float16"


def test_a_backends_description_gets_its_region_by_number() -> None:
    regions: list[Region] = []
    first, second = Region(4096, 100), Region(8192, 100)
    placed = [place_array(Description(region), regions).region for region in (first, second, first)]
    assert placed == [0, 1, 0]
    assert regions == [first, second]
    assert place_array(Description(second), regions) == Array(1, 8, (2, 2), (4, 2), 2, "float16")


def test_heads_are_shared_out_or_copied() -> None:
    assert [shard(8, rank, 2) for rank in range(2)] == [Shard(0, 4, 8), Shard(4, 8, 8)]
    assert [shard(2, rank, 4) for rank in range(4)] == [
        Shard(0, 1, 2, 0, 2),
        Shard(0, 1, 2, 1, 2),
        Shard(1, 2, 2, 0, 2),
        Shard(1, 2, 2, 1, 2),
    ]
    with pytest.raises(GeometryError, match="6 heads cannot be shared out to rank 0 of 4"):
        shard(6, 0, 4)
    with pytest.raises(GeometryError, match="rank 4 of 4"):
        shard(8, 4, 4)


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    good = dense_array("BHNC", SIZES, 4, "int32")
    with pytest.raises(GeometryError, match="Axes 'BHN' do not name the 4 dimensions"):
        group_of_layers({"a": good}, "BHN", ALL)
    with pytest.raises(GeometryError, match="Axes 'BHNX'"):
        group_of_layers({"a": good}, "BHNX", ALL)
    with pytest.raises(GeometryError, match=r"Layer 'b' has .*'float32'.*'int32'"):
        group_of_layers({"a": good, "b": dense_array("BHNC", SIZES, 4, "float32")}, "BHNC", ALL)
    with pytest.raises(GeometryError, match=r"have 2 heads; this rank's share is \[0, 4\)"):
        group_of_layers({"a": good}, "BHNC", Shard(0, 4, 8))
    with pytest.raises(GeometryError, match="at least one"):
        group_of_layers({}, "BHNC", ALL)
    with pytest.raises(GeometryError, match="2 layer names for an L axis of size 3"):
        group_of_tensor(["a", "b"], dense_array("LBHNC", SIZES, 4, "int32"), "LBHNC", ALL)
    odd = dense_array("BHNC", {**SIZES, "C": 7}, 4, "int32")
    with pytest.raises(GeometryError, match="content axis of 7"):
        vllm_layers({"a": odd}, ALL)
    gaps = read_array(numbers("BNHC", C=6).transpose(0, 2, 1, 3))
    with pytest.raises(GeometryError, match="K rows then V rows need 24 and 4"):
        group_of_layers({"a": gaps}, "BHNC", ALL, packing=Packing.ROWS)
    with pytest.raises(GeometryError, match="last two dimensions contiguous"):
        vllm_cpu({"a": gaps}, ALL)
    with pytest.raises(GeometryError, match="3, 4 or 5 dimensions"):
        vllm_layers({"a": dense_array("BC", SIZES, 4, "int32")}, ALL)
