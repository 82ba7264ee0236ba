"""The engine's cache as PushKV describes one.

A cache group of vLLM's has one block table; its layers may differ in shape and then become several groups of ours,
which use the same table. Axis B counts the kernel's blocks, several of which may make up one of the engine's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv import Kind, KVCache, Shard
from pushkv.backends.base import device_type_of
from pushkv.core.geometry import CacheGroup
from pushkv.core.layouts import Array, Packing, group_of_layers, group_of_tensor, place_array, vllm_cpu
from pushkv.core.memory import Region
from pushkv.errors import GeometryError
from pushkv.plugins import backend_for
from pushkv_vllm.context import Context
from pushkv_vllm.worker.ranks import Ranks

Ids = NDArray[np.int32]
ALONE = Context()
"""No ranks that share tokens out."""


@dataclass(frozen=True)
class Layout:
    """What a layer's cache is, apart from its memory: layers of one are a group. ``heads`` are this rank's, and
    ``size`` is how many elements a head's key has. ``dealt``: ranks of the same heads share its tokens out."""

    group: int
    kind: Kind
    window: int
    heads: int
    size: int = 0
    dealt: bool = False

    def packing(self, content: int) -> Packing:
        """How K and V share a content axis of so many elements.

        Told apart where that is sure, so that an engine which has them in two tensors is served too; scales beside
        them, or values of another size, stay where they are.
        """
        alike = self.kind is not Kind.LATENT and self.size and content == 2 * self.size
        return Packing.CONTENT if alike else Packing.SINGLE


@dataclass(frozen=True)
class EngineCache:
    """The described cache. For each group of ours: which group of the engine's has its table, and how many of the
    kernel's blocks one of the engine's is."""

    cache: KVCache
    owners: tuple[int, ...]
    ratios: tuple[int, ...]

    @property
    def device(self) -> str:
        """The type of the device that the cache lies on."""
        return device_type_of(self.cache.arrays[0]) if self.cache.arrays else ""

    def tables(self, tables: Sequence[Sequence[int]]) -> list[Ids]:
        """The engine's block tables as tables of our groups, in blocks of the kernel's."""
        return [_divided(tables[owner], ratio) for owner, ratio in zip(self.owners, self.ratios, strict=True)]

    def firsts(self, firsts: Sequence[int]) -> list[int]:
        """The number of each of our tables' first block."""
        return [firsts[owner] * ratio for owner, ratio in zip(self.owners, self.ratios, strict=True)]

    def __str__(self) -> str:
        groups = self.cache.geometry.groups
        told = ", ".join(
            f"{len(group.layers)} {group.kind.value} layers of {group.blocks} blocks of {group.block_size} tokens, "
            f"heads {group.head_start}-{group.head_stop} of {group.total_heads}, block stride {group.strides.block}"
            for group in groups
        )
        return f"{told}; {sum(region.length for region in self.cache.regions) / 2**20:.0f} MiB"


def _divided(table: Sequence[int], ratio: int) -> Ids:
    ids: Ids = np.asarray(table, np.int32)
    if ratio == 1:
        return ids
    return np.asarray(np.add.outer(ids * ratio, np.arange(ratio, dtype=np.int32)).ravel(), np.int32)


def describe(
    tensors: Mapping[str, Any],
    kv_cache_config: Any,
    ranks: Ranks,
    total_heads: int,
    context: Context = ALONE,
    **factors: str,
) -> EngineCache:
    """Describe what ``register_kv_caches`` is given: a tensor a layer.

    Raises GeometryError for a kind of cache that cannot be moved, naming it.
    """
    first = next(iter(tensors.values()))
    backend = backend_for(_tensor(first))
    regions: list[Region] = []
    groups: list[CacheGroup] = []
    owners: list[int] = []
    ratios: list[int] = []
    for layout, names in _layouts(kv_cache_config, tensors, context):
        placed = {name: place_array(backend.describe(_tensor(tensors[name])), regions) for name in names}
        ratio = _ratio(kv_cache_config, layout, placed)
        made = _groups(placed, layout, _share(layout, ranks, total_heads, context), str(first.device.type))
        groups += made
        owners += [layout.group] * len(made)
        ratios += [ratio] * len(made)
    cache = KVCache.from_groups(groups, regions, backend, list(tensors.values()), **factors)
    return EngineCache(cache, tuple(owners), tuple(ratios))


def describe_cross_layer(
    tensor: Any,
    kv_cache_config: Any,
    ranks: Ranks,
    total_heads: int,
    context: Context = ALONE,
    *,
    heads_first: bool,
    **factors: str,
) -> EngineCache:
    """Describe the one tensor of ``register_cross_layers_kv_cache``, in physical order.

    That is (B, H, L, N, C) with heads first (HND), else (B, L, N, H, C). It has one group.
    """
    backend = backend_for(tensor)
    regions: list[Region] = []
    array = place_array(backend.describe(tensor), regions)
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    layout = Layout(0, Kind.ATTENTION, 0, spec.num_kv_heads, _head_size(spec), context.deals_out(spec))
    share = _share(layout, ranks, total_heads, context)
    axes = ("BHLNC" if heads_first else "BLNHC")[: len(array.shape)]
    packing = layout.packing(array.shape[-1])
    made = group_of_tensor(list(group.layer_names), array, axes, share, packing=packing)
    cache = KVCache.from_groups([made], regions, backend, [tensor], **factors)
    return EngineCache(cache, (0,), (max(1, made.blocks // int(kv_cache_config.num_blocks)),))


def _tensor(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        raise GeometryError(
            "A layer's cache is several tensors (recurrent state); this connector moves attention caches only."
        )
    return given


def _layouts(
    kv_cache_config: Any, tensors: Mapping[str, Any], context: Context
) -> Iterator[tuple[Layout, list[str]]]:
    """The layers, by what their caches are; in the order of the engine's groups, which all ranks agree on."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        found: dict[Layout, list[str]] = {}
        for name in group.layer_names:
            if name in tensors:
                spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
                layout = replace(_layout(number, spec), dealt=context.deals_out(spec))
                found.setdefault(layout, []).append(name)
        yield from found.items()


def _layout(group: int, spec: Any) -> Layout:
    bases = {base.__name__ for base in type(spec).__mro__}
    if "SlidingWindowSpec" in bases:
        # A query sees itself and window - 1 tokens before; the blocks of no others are kept.
        heads = 1 if "SlidingWindowMLASpec" in bases else int(spec.num_kv_heads)
        return Layout(group, Kind.WINDOW, max(1, int(spec.sliding_window) - 1), heads, _head_size(spec))
    if "MLAAttentionSpec" in bases:
        return Layout(group, Kind.LATENT, 0, 1)
    if "FullAttentionSpec" in bases:
        return Layout(group, Kind.ATTENTION, 0, int(spec.num_kv_heads), _head_size(spec))
    raise GeometryError(
        f"A cache of {type(spec).__name__} cannot be moved; this connector moves full, sliding-window and latent "
        "(MLA) attention."
    )


def _head_size(spec: Any) -> int:
    """How many elements a head's key has; 0 where its value has another number."""
    size = int(getattr(spec, "head_size", 0))
    return size if int(getattr(spec, "head_size_v", None) or size) == size else 0


def _ratio(kv_cache_config: Any, layout: Layout, placed: Mapping[str, Array]) -> int:
    """How many of the kernel's blocks make up one of the engine's."""
    counts = {array.shape[0] for array in placed.values()}
    blocks = int(kv_cache_config.num_blocks)
    if len(counts) != 1 or (count := counts.pop()) % blocks:
        raise GeometryError(
            f"Group {layout.group} has layers of {sorted(counts) or [count]} blocks where the engine counts {blocks}."
        )
    return int(count // blocks)


def _share(layout: Layout, ranks: Ranks, total_heads: int, context: Context) -> Shard:
    """This rank's heads of the model's. Layers may have another number of them than the model says."""
    if layout.kind is Kind.LATENT or (layout.kind is Kind.WINDOW and layout.heads == 1 and total_heads == 1):
        total = 1
    else:
        total = total_heads if layout.heads == max(1, total_heads // ranks.tps) else layout.heads * ranks.tps
    return context.share(total, ranks.tp, ranks.tps, dealt=layout.dealt)


def _groups(placed: Mapping[str, Array], layout: Layout, share: Shard, device: str) -> tuple[CacheGroup, ...]:
    """One group, or one of keys and one of values where those lie in other orders (on the CPU)."""
    dimensions = {len(array.shape) for array in placed.values()}
    axes = {3: "BNC", 4: "BHNC"}.get(next(iter(dimensions)), "") if len(dimensions) == 1 else ""
    if not axes:
        raise GeometryError(
            f"Layers of group {layout.group} have caches of {sorted(dimensions)} dimensions; (blocks, heads, tokens, "
            "content) and (blocks, tokens, content) are known."
        )
    if device == "cpu" and axes == "BHNC" and layout.kind is not Kind.LATENT:
        return vllm_cpu(placed, share, kind=layout.kind, window=layout.window)
    packing = layout.packing(next(iter(placed.values())).shape[-1])
    return (group_of_layers(placed, axes, share, packing=packing, kind=layout.kind, window=layout.window),)


def model_digest(vllm_config: Any) -> str:
    """A digest of what must be equal for two engines' KV to mean the same, as far as a configuration can tell."""
    model = vllm_config.model_config
    config = getattr(model, "hf_text_config", None) or model.hf_config
    told = config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"):
        told.pop(name, None)
    text = json.dumps([told, str(model.dtype)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
