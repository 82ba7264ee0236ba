"""vLLM-Neuron's cache as PushKV describes one: a tensor a layer, (2, B, H, N, C), K and V apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pushkv import KVCache
from pushkv.core.layouts import Array, neuron_layers, place_array
from pushkv.core.memory import Region
from pushkv.errors import GeometryError
from pushkv.plugins import backend_for
from pushkv_vllm.context import Context
from pushkv_vllm.worker.geometry import ALONE, EngineCache, _layouts, _share
from pushkv_vllm.worker.ranks import Ranks


def describe(
    tensors: Mapping[str, Any],
    kv_cache_config: Any,
    ranks: Ranks,
    total_heads: int,
    context: Context = ALONE,
    *,
    packed: bool = False,
    **factors: str,
) -> EngineCache:
    """Describe what ``register_kv_caches`` is given. Layers may share a raw tensor.

    ``packed`` says that K has two tokens interleaved: then blocks are copied whole, and an engine that keeps K
    otherwise, or has blocks of another size, is refused at the handshake.

    Raises GeometryError for a layer that is none of (2, blocks, heads, tokens, content).
    """
    backend = backend_for(next(iter(tensors.values())))
    regions: list[Region] = []
    groups, owners, ratios = [], [], []
    for layout, names in _layouts(kv_cache_config, tensors, context):
        placed = {name: place_array(backend.describe(tensors[name]), regions) for name in names}
        ratio = _ratio(placed, int(kv_cache_config.num_blocks))
        share = _share(layout, ranks, total_heads, context)
        groups.append(neuron_layers(placed, share, kind=layout.kind, window=layout.window, packed=packed))
        owners.append(layout.group)
        ratios.append(ratio)
    if packed:
        factors["packed K"] = "two tokens interleaved"
    cache = KVCache.from_groups(groups, regions, backend, list(tensors.values()), **factors)
    return EngineCache(cache, tuple(owners), tuple(ratios))


def _ratio(placed: Mapping[str, Array], blocks: int) -> int:
    """How many of the kernel's blocks make up one of the engine's."""
    for name, array in placed.items():
        if len(array.shape) != 5 or array.shape[0] != 2 or array.shape[1] % blocks:
            raise GeometryError(
                f"Layer {name} has a cache of shape {array.shape} where the engine counts {blocks} blocks; "
                "(2, blocks, heads, tokens, content) is known."
            )
    return int(next(iter(placed.values())).shape[1] // blocks)
