"""What cannot be served on Trainium is refused before anything is made, and what is made goes over LIBFABRIC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.errors import ConfigError
from pushkv_vllm_neuron.requirements import packed, require


def config(**changes: Any) -> SimpleNamespace:
    told = {
        "block_size": 32,
        "kv_buffer_device": "cuda",
        "decode": 1,
        "prefill": 1,
        "interleave": 1,
        "neuron_config": {},
        "extra": None,
        **changes,
    }
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=told["block_size"], cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(
            kv_buffer_device=told["kv_buffer_device"], kv_connector_extra_config=told["extra"]
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=told["decode"],
            prefill_context_parallel_size=told["prefill"],
            cp_kv_cache_interleave_size=told["interleave"],
        ),
        additional_config={"neuron_config": told["neuron_config"]},
    )


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("device", ["cuda", "neuron", None])
def test_what_vllm_neuron_has_is_served(size: int, device: str | None) -> None:
    require(config(block_size=size, kv_buffer_device=device, extra={"stream": "chunk"}))
    require(config(block_size=size, kv_buffer_device=device, decode=4, interleave=size))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"block_size": 16}, "block size is 16; vLLM-Neuron has 32, 64, 128: set --block-size"),
        ({"kv_buffer_device": "cpu"}, "kv_buffer_device is 'cpu'; .* set it to 'cuda'"),
        ({"decode": 2, "interleave": 24}, "interleave_size is 24 and the block size 32; .* set --cp-kv-cache"),
        ({"decode": 2, "neuron_config": {"apply_prefill_dcp": True}}, "older vLLM-Neuron .* leave it out"),
        ({"prefill": 2}, "prefill_context_parallel_size is 2, .* set it to 1"),
        ({"extra": {"stream": "layer"}}, "stream is 'layer'.* set it to 'chunk'"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        require(config(**changes))


@pytest.mark.parametrize("told", [None, {}, {"neuron_config": None}, "text"])
def test_a_configuration_that_says_nothing_is_not_packed(told: object) -> None:
    assert not packed(SimpleNamespace(additional_config=told))
