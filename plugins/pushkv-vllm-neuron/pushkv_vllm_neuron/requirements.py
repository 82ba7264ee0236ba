"""What of a server's configuration this connector can serve on Trainium, asked before anything is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pushkv.errors import ConfigError

BLOCK_SIZES = (32, 64, 128)
"""Tokens a block that vLLM-Neuron's kernels have."""
HBM = ("cuda", "neuron")
"""``kv_buffer_device``: to vLLM-Neuron "cuda" means device memory."""


def require(vllm_config: Any) -> None:
    """Raise ConfigError for what cannot be served, with the value and what to do."""
    _require_block_size(int(vllm_config.cache_config.block_size))
    _require_buffer(str(getattr(vllm_config.kv_transfer_config, "kv_buffer_device", None) or "neuron"))
    _refuse_context_parallel(vllm_config.parallel_config)
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


def _refuse_context_parallel(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            raise ConfigError(
                f"{name} is {size}: each rank then holds every {size}th block alone, which no geometry here "
                "describes; set it to 1, or use vLLM-Neuron's NeuronNixlConnector."
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
