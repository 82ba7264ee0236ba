"""What of a server's configuration this connector can serve on Trainium, asked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pushkv.errors import ConfigError
from pushkv_vllm.context import Context

BLOCK_SIZES = (32, 64, 128)
"""Tokens a block that vLLM-Neuron's kernels have."""
HBM = ("cuda", "neuron")
"""``kv_buffer_device``: to vLLM-Neuron "cuda" means device memory."""


def require(vllm_config: Any) -> None:
    """Raise ConfigError for what cannot be served, with the value and what to do."""
    _require_block_size(int(vllm_config.cache_config.block_size))
    _require_buffer(str(getattr(vllm_config.kv_transfer_config, "kv_buffer_device", None) or "neuron"))
    _require_context(vllm_config)
    _refuse_layers(getattr(vllm_config.kv_transfer_config, "kv_connector_extra_config", None) or {})


def _require_block_size(size: int) -> None:
    if size not in BLOCK_SIZES:
        known = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"The block size is {size}; vLLM-Neuron has {known}: set --block-size to one of them.")


def _require_buffer(device: str) -> None:
    if device not in HBM:
        raise ConfigError(
            f"kv_buffer_device is {device!r}; this connector pushes from HBM to HBM: set it to 'cuda', which is how "
            "vLLM-Neuron spells it."
        )


def _require_context(vllm_config: Any) -> None:
    """Ranks share tokens out as vLLM's do; before release 2.32 of Neuron prefill engines could do so otherwise."""
    context = Context.of(vllm_config.parallel_config)
    size = int(vllm_config.cache_config.block_size)
    if size % context.width:
        raise ConfigError(
            f"cp_kv_cache_interleave_size is {context.width} and the block size {size}; the former must divide the "
            "latter: set --cp-kv-cache-interleave-size to the block size."
        )
    if context.size > 1 and _neuron_config(vllm_config).get("apply_prefill_dcp"):
        raise ConfigError(
            "neuron_config has apply_prefill_dcp, with which an older vLLM-Neuron deals heads and tokens out to "
            "ranks in another order; leave it out, decode_context_parallel_size is enough."
        )


def _refuse_layers(extra: Mapping[str, Any]) -> None:
    if extra.get("stream") == "layer":
        raise ConfigError(
            "stream is 'layer', and on Trainium the model is one compiled graph that calls no hook a layer: set it "
            "to 'chunk', which streams a step at a time."
        )


def packed(vllm_config: Any) -> bool:
    """Whether K is stored packed: in the kernels' order, two tokens interleaved, with as many bytes as plain K."""
    return bool(_neuron_config(vllm_config).get("fp8_packed_kv", False))


def _neuron_config(vllm_config: Any) -> dict[str, Any]:
    told = getattr(vllm_config, "additional_config", None)
    config = told.get("neuron_config") if isinstance(told, dict) else None
    return config if isinstance(config, dict) else {}
