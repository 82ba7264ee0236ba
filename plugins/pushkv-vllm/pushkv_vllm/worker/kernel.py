"""How the CPU's attention kernels keep keys and values, found out by having one write a block.

Which of its kernels vLLM takes depends on the machine and the dtype; some keep keys in pieces that no strides
describe (AMX for bfloat16 does). Moving a part of such a block would move something else.
"""

from __future__ import annotations

from typing import Any

from pushkv.errors import GeometryError


def check_cpu_kernel(vllm_config: Any, spec: Any) -> None:
    """Refuse a kernel that does not keep a block's keys as (content, token) and its values as (token, content).

    Raises GeometryError naming it. ``spec`` is one of the engine's cache specs. Latent rows (MLA) lie token by token.
    """
    if any(base.__name__ == "MLAAttentionSpec" for base in type(spec).__mro__):
        return
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    tokens, size = int(spec.block_size), int(spec.head_size)
    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    isa = cpu_attn._get_attn_isa(dtype, tokens, size, cache_dtype)
    cache = torch.zeros(1, 1, 2 * tokens, size, dtype=spec.dtype)
    keys, values = cache.chunk(2, dim=2)
    numbers = torch.arange(tokens * size).reshape(tokens, 1, size) % 251 + 1
    ops.cpu_attn_reshape_and_cache(
        numbers.to(dtype), -numbers.to(dtype), keys, values, torch.arange(tokens, dtype=torch.int64), isa
    )
    flat, half = cache.flatten().float(), tokens * size
    expected = numbers[:, 0].float()
    if torch.equal(flat[:half], expected.T.flatten()) and torch.equal(flat[half:], -expected.flatten()):
        return
    raise GeometryError(
        f"vLLM's CPU kernel {isa!r} for {dtype} keeps keys and values in an order that cannot be moved by tokens; "
        "use --dtype float32."
    )
