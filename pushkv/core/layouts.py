"""Cache groups read off what engines give: arrays with named axes, vLLM's orders, Neuron's.

An array is described by shape, byte strides, item size and where it starts; torch and numpy arrays are read by
:func:`read_array` without importing either. Axes are named by one letter a dimension, out of ``LSBHNC``; the same
letter on neighbouring dimensions folds them into one axis (a state of shape (B, H, P, D) is ``"BHCC"``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from pushkv.core.geometry import CacheGroup, Kind, Layer, Place, Strides, Stripe
from pushkv.core.memory import Region
from pushkv.errors import GeometryError

VLLM_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The physical orders that vLLM names, outermost axis first."""


ALL_TOKENS = Stripe()


class Packing(Enum):
    """How an array without an S axis keeps K and V."""

    SINGLE = "single"
    """It has one side only (MLA latents, states)."""
    CONTENT = "content"
    """Half of the content axis each: physically (…, N, S, C)."""
    ROWS = "rows"
    """All K rows of a block and head, then all V rows: physically (…, S, N, C), whatever the shape says."""


@dataclass(frozen=True)
class Array:
    """An array in region number ``region``; ``offset`` and ``strides`` in bytes, ``shape`` in elements."""

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


class Described(Protocol):
    """An array as a memory backend describes it, in a region of its own."""

    @property
    def region(self) -> Region: ...
    @property
    def offset(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class Shard:
    """A rank's heads ``[head_start, head_stop)`` of ``total_heads``, as copy ``replica`` of ``replicas``.

    With a ``stripe`` of several it holds those tokens alone, as others of the same heads hold the rest.
    """

    head_start: int
    head_stop: int
    total_heads: int
    replica: int = 0
    replicas: int = 1
    stripe: Stripe = ALL_TOKENS


def shard(total_heads: int, rank: int, ranks: int, *, stripes: int = 1, width: int = 1) -> Shard:
    """What tensor-parallel rank ``rank`` of ``ranks`` holds: an equal share of the heads, or a copy of one.

    MLA latents are one head: ``shard(1, rank, ranks)``. With ``stripes`` the ranks that would hold copies share the
    tokens out instead, in runs of ``width`` tokens and neighbours first, as vLLM's decode context parallel does.
    Raises GeometryError where the numbers do not divide.
    """
    if stripes > 1:
        return _striped(shard(total_heads, rank, ranks), stripes, width)
    if not 0 <= rank < ranks or total_heads < 1 or (total_heads % ranks and ranks % total_heads):
        raise GeometryError(
            f"{total_heads} heads cannot be shared out to rank {rank} of {ranks}; one number must divide the other."
        )
    if ranks <= total_heads:
        share = total_heads // ranks
        return Shard(rank * share, (rank + 1) * share, total_heads)
    copies = ranks // total_heads
    head = rank // copies
    return Shard(head, head + 1, total_heads, rank % copies, copies)


def _striped(whole: Shard, stripes: int, width: int) -> Shard:
    if whole.replicas % stripes:
        raise GeometryError(
            f"Each head is held {whole.replicas} times and its tokens cannot be shared out to {stripes} ranks; the "
            "latter must divide the former."
        )
    return replace(
        whole,
        replica=whole.replica // stripes,
        replicas=whole.replicas // stripes,
        stripe=Stripe(whole.replica % stripes, stripes, width),
    )


def read_array(array: Any, region: int = 0, offset: int | None = None) -> Array:
    """Describe anything with ``.shape`` and torch's ``.stride()`` (in elements) or numpy's ``.strides`` (in bytes).

    ``offset`` is the first element's, in bytes from the start of the region; by default torch's storage offset,
    which is right where the region is the array's storage, and 0 for numpy.
    """
    shape = tuple(int(size) for size in array.shape)
    if callable(getattr(array, "stride", None)):
        itemsize = int(array.element_size())
        strides = tuple(int(step) * itemsize for step in array.stride())
        start = int(array.storage_offset()) * itemsize
    else:
        itemsize, strides, start = int(array.itemsize), tuple(int(step) for step in array.strides), 0
    return Array(region, start if offset is None else offset, shape, strides, itemsize, _dtype_name(array.dtype))


def _dtype_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


def place_array(description: Described, regions: list[Region]) -> Array:
    """A backend's description with its region by number; a region not in ``regions`` yet is appended."""
    if description.region not in regions:
        regions.append(description.region)
    return Array(
        regions.index(description.region),
        description.offset,
        tuple(description.shape),
        tuple(description.strides),
        description.itemsize,
        description.dtype,
    )


@dataclass(frozen=True)
class _Axes:
    """An array seen by axis letter: (size, byte stride) each; an absent axis has size 1 and stride 0."""

    array: Array
    named: dict[str, tuple[int, int]]

    def __getitem__(self, letter: str) -> tuple[int, int]:
        return self.named.get(letter, (1, 0))

    @property
    def format(self) -> tuple[object, ...]:
        """What must be alike in all layers of a group."""
        return (self.array.dtype, self.array.itemsize, *(self[letter] for letter in "BHNC"))


def _name_axes(array: Array, axes: str) -> _Axes:
    if len(axes) != len(array.shape) or set(axes) - set("LSBHNC"):
        raise GeometryError(
            f"Axes {axes!r} do not name the {len(array.shape)} dimensions of shape {array.shape}; "
            "give one letter out of LSBHNC a dimension."
        )
    named: dict[str, tuple[int, int]] = {}
    for letter, size, stride in reversed(list(zip(axes, array.shape, array.strides, strict=True))):
        inner_size, inner_stride = named.get(letter, (1, stride))
        if inner_size == 1:
            inner_stride = stride
        if size > 1 and stride != inner_size * inner_stride:
            raise GeometryError(
                f"The dimensions named {letter!r} of shape {array.shape} and byte strides {array.strides} are not "
                "one axis: the outer does not step over exactly the inner."
            )
        named[letter] = (size * inner_size, inner_stride)
    return _Axes(array, named)


def group_of_layers(
    arrays: Mapping[str, Array | tuple[Array, Array]],
    axes: str,
    shard: Shard,
    *,
    packing: Packing = Packing.SINGLE,
    kind: Kind = Kind.ATTENTION,
    window: int = 0,
    slot_tokens: int = 1,
    whole_blocks: bool = False,
) -> CacheGroup:
    """A group with an array a layer, or a (K, V) pair of arrays; ``axes`` names the dimensions of each.

    ``packing`` says where K and V are if neither an S axis nor a pair tells them apart. ``slot_tokens`` is
    how many tokens a slot of a STATE group stands for; ``whole_blocks`` says that a kernel packs a block's tokens in
    an order of its own. Raises GeometryError where layers differ in shape.
    """
    if "L" in axes:
        raise GeometryError(f"Axes {axes!r} name an L axis of arrays that are one a layer; give one layer an array.")
    layers: list[Layer] = []
    first: _Axes | None = None
    for name, given in arrays.items():
        sides = [_name_axes(array, axes) for array in (given if isinstance(given, tuple) else (given,))]
        first = first or sides[0]
        for side in sides:
            if side.format != first.format:
                raise GeometryError(
                    f"Layer {name!r} has dtype, item size and axes B, H, N, C {side.format}, another of its group "
                    f"{first.format}; put them in groups of their own."
                )
        layers.append(Layer(name, tuple(place for side in sides for place in _places(side, packing))))
    if first is None:
        raise GeometryError("A group read off arrays needs at least one; describe an empty one with CacheGroup.")
    return _group(layers, first, shard, packing, kind, window, slot_tokens, whole_blocks)


def group_of_tensor(
    names: Sequence[str],
    array: Array,
    axes: str,
    shard: Shard,
    *,
    packing: Packing = Packing.SINGLE,
    kind: Kind = Kind.ATTENTION,
    window: int = 0,
    slot_tokens: int = 1,
    whole_blocks: bool = False,
) -> CacheGroup:
    """A group whose layers are the L axis of one array, ``names`` in its order; otherwise as group_of_layers."""
    whole = _name_axes(array, axes)
    count, stride = whole["L"]
    if count != len(names):
        raise GeometryError(f"There are {len(names)} layer names for an L axis of size {count}; give one a layer.")
    places = _places(whole, packing)
    layers = [
        Layer(name, tuple(Place(place.region, place.offset + number * stride) for place in places))
        for number, name in enumerate(names)
    ]
    return _group(layers, whole, shard, packing, kind, window, slot_tokens, whole_blocks)


def _places(axes: _Axes, packing: Packing) -> tuple[Place, ...]:
    """Where each side of the (first) layer starts."""
    if not isinstance(packing, Packing):
        raise GeometryError(f"The packing is {packing!r}; give a member of Packing.")
    if "S" in axes.named and packing is not Packing.SINGLE:
        raise GeometryError(f"An S axis tells K and V apart, and so would packing {packing.value!r}; give one.")
    array, (sides, stride) = axes.array, axes["S"]
    if packing is not Packing.SINGLE:
        content, tokens = axes["C"], axes["N"]
        if content[0] % 2:
            raise GeometryError(f"A content axis of {content[0]} elements does not hold K and V; it must be even.")
        half = content[0] // 2 * content[1]
        sides, stride = 2, half if packing is Packing.CONTENT else half * tokens[0]
        if packing is Packing.ROWS and (content[1], tokens[1]) != (array.itemsize, 2 * half):
            raise GeometryError(
                f"Token and content strides of {tokens[1]} and {content[1]} bytes leave gaps in a block and head; "
                f"K rows then V rows need {2 * half} and {array.itemsize}."
            )
    return tuple(Place(array.region, array.offset + side * stride) for side in range(sides))


def _group(
    layers: list[Layer],
    axes: _Axes,
    shard: Shard,
    packing: Packing,
    kind: Kind,
    window: int,
    slot_tokens: int,
    whole_blocks: bool,
) -> CacheGroup:
    if not isinstance(kind, Kind):
        raise GeometryError(f"The kind is {kind!r}; give a member of Kind.")
    (blocks, block), (heads, head), (tokens, token), (content, element) = (axes[letter] for letter in "BHNC")
    if heads != shard.head_stop - shard.head_start:
        raise GeometryError(
            f"The arrays have {heads} heads; this rank's share is [{shard.head_start}, {shard.head_stop})."
        )
    if packing is not Packing.SINGLE:
        content //= 2
        token = token if packing is Packing.CONTENT else token // 2
    return CacheGroup(
        layers=tuple(layers),
        blocks=blocks,
        block_size=slot_tokens if kind is Kind.STATE else tokens,
        total_heads=shard.total_heads,
        head_start=shard.head_start,
        head_stop=shard.head_stop,
        content=content,
        itemsize=axes.array.itemsize,
        dtype=axes.array.dtype,
        strides=Strides(block, head, token, element),
        sides=len(layers[0].places) if layers else 1,
        kind=kind,
        window=window,
        replica=shard.replica,
        replicas=shard.replicas,
        whole_blocks=whole_blocks,
        stripe=shard.stripe,
    )


def dense_array(order: str, sizes: Mapping[str, int], itemsize: int, dtype: str, region: int = 0) -> Array:
    """A contiguous array with its axes in ``order``, outermost first; absent sizes are 1."""
    shape = tuple(sizes.get(letter, 1) for letter in order)
    strides, step = [], itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Array(region, 0, shape, tuple(reversed(strides)), itemsize, dtype)


def vllm_layers(
    arrays: Mapping[str, Array], shard: Shard, *, kind: Kind = Kind.ATTENTION, window: int = 0
) -> CacheGroup:
    """vLLM's tensor a layer, in any of its orders (the strides tell which).

    Nominal shapes: (B, H, N, C) with K and V in the content; (B, N, C) for latents; and, from before the named
    orders, (2, B, N, H, C). Others, as (B, 2, N, H, C), name their axes with :func:`group_of_layers`.
    """
    dimensions = {len(array.shape) for array in arrays.values()}
    known = {3: ("BNC", Packing.SINGLE), 4: ("BHNC", Packing.CONTENT), 5: ("SBNHC", Packing.SINGLE)}
    if len(dimensions) != 1 or not dimensions <= known.keys():
        raise GeometryError(f"vLLM's caches have 3, 4 or 5 dimensions, one number a group; these have {dimensions}.")
    axes, packing = known[dimensions.pop()]
    kind = Kind.LATENT if axes == "BNC" and kind is Kind.ATTENTION else kind
    return group_of_layers(arrays, axes, shard, packing=packing, kind=kind, window=window)


def vllm_cross_layer(names: Sequence[str], array: Array, shard: Shard, axes: str = "LBHNC") -> CacheGroup:
    """vLLM's one tensor for all layers, nominally (L, B, H, N, C) with K and V in the content, or as in ``axes``."""
    packing = Packing.SINGLE if "S" in axes else Packing.CONTENT
    return group_of_tensor(names, array, axes, shard, packing=packing)


def vllm_cpu(
    arrays: Mapping[str, Array], shard: Shard, *, kind: Kind = Kind.ATTENTION, window: int = 0
) -> tuple[CacheGroup, CacheGroup]:
    """vLLM's CPU cache, nominally (B, H, N, 2 x head size), as a group of keys and a group of values.

    Of each block and head its kernels keep the keys first and transposed, (C, N), then the values, (N, C): two groups
    that share a block table, their layers named with ``/k`` and ``/v`` after. Raises GeometryError for blocks that
    are not contiguous.
    """
    keys, values = {}, {}
    for name, array in arrays.items():
        keys[f"{name}/k"], values[f"{name}/v"] = _keys_and_values(name, array)
    return (
        group_of_layers(keys, "BHNC", shard, kind=kind, window=window),
        group_of_layers(values, "BHNC", shard, kind=kind, window=window),
    )


def _keys_and_values(name: str, array: Array) -> tuple[Array, Array]:
    """The two halves of each block and head of a CPU cache, both as (B, H, N, C)."""
    if (
        len(array.shape) != 4
        or array.shape[3] % 2
        or array.strides[2:] != (array.shape[3] * array.itemsize, array.itemsize)
    ):
        raise GeometryError(
            f"Layer {name!r} has shape {array.shape} and byte strides {array.strides}; vLLM's CPU cache is (B, H, N, "
            "2 x head size) with the last two dimensions contiguous."
        )
    blocks, heads, tokens, both = array.shape
    size, shape = both // 2, (blocks, heads, tokens, both // 2)
    outer, item = array.strides[:2], array.itemsize
    values = array.offset + tokens * size * item
    return (
        replace(array, shape=shape, strides=(*outer, item, tokens * item)),
        replace(array, shape=shape, strides=(*outer, size * item, item), offset=values),
    )


def neuron_layers(
    arrays: Mapping[str, Array], shard: Shard, *, kind: Kind = Kind.ATTENTION, window: int = 0, packed: bool = False
) -> CacheGroup:
    """vLLM-Neuron's tensor a layer, (2, B, H, N, C). ``packed``: K interleaves two tokens, so blocks stay whole."""
    return group_of_layers(arrays, "SBHNC", shard, kind=kind, window=window, whole_blocks=packed)
