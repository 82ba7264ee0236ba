"""Decode context parallelism through vLLM's scheduler: ranks share tokens out, a block is of as many as they hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cases import PROMPT, counts, pair, serve
from fake_engine import Scene, Shape

from pushkv.core.geometry import Stripe
from pushkv.errors import ConfigError
from pushkv_vllm.context import Context

DEALT = {"heads": 1, "ranks": 2, "context": 2}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (DEALT, {"heads": 1}),
        ({"heads": 1}, DEALT),
        ({"heads": 1, "ranks": 4, "context": 4, "interleave": 1}, {**DEALT, "interleave": 2}),
        ({"heads": 2, "ranks": 4, "context": 2}, {"heads": 2, "ranks": 2, "block_size": 8}),
        ({**DEALT, "batched": 16}, {**DEALT, "block_size": 16}),
        ({**DEALT, "latent": True}, {"heads": 1, "latent": True}),
        ({"heads": 1, "latent": True, "stages": 2}, {**DEALT, "latent": True, "interleave": 1}),
    ],
    ids=str,
)
def test_either_side_may_share_tokens_out(scene: Scene, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    source, target = pair(scene, prefill, decode)
    prompts = {f"r{n}": [n + 3, *PROMPT[: tokens - 1]] for n, tokens in enumerate((2, 5, 9, 16, 41))}
    serve(source, target, prompts, 12)
    for name, prompt in prompts.items():
        assert target.loaded[f"d-{name}"] == len(prompt) - 1
    assert counts(target) == {"received": len(prompts)}


def parallel(**changes: int) -> SimpleNamespace:
    told = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "cp_kv_cache_interleave_size": 1}
    return SimpleNamespace(**{**told, **changes})


def test_a_connector_of_prefill_context_parallel_ranks_is_refused(scene: Scene) -> None:
    engine = scene.engine(Shape(role="kv_producer"))
    engine.config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ConfigError, match=r"prefill_context_parallel_size is 2, .* set it to 1"):
        engine.workers[0].connect()


def test_what_a_configuration_says() -> None:
    assert Context.of(SimpleNamespace()) == Context.of(parallel(cp_kv_cache_interleave_size=16)) == Context()
    context = Context.of(parallel(decode_context_parallel_size=4, cp_kv_cache_interleave_size=16))
    assert context == Context(4, 16)
    whole, dealt, older = (
        SimpleNamespace(block_size=16, dcp_sharded=False),
        SimpleNamespace(block_size=16, dcp_sharded=True),
        SimpleNamespace(block_size=16),
    )
    assert [context.tokens_a_block(spec) for spec in (whole, dealt, older)] == [16, 64, 64]
    assert [Context().tokens_a_block(spec) for spec in (whole, dealt, older)] == [16, 16, 16]
    share = context.share(2, 9, 16, dealt=True)
    assert (share.head_start, share.replica, share.replicas, share.stripe) == (1, 0, 2, Stripe(1, 4, 16))
    assert context.share(2, 9, 16, dealt=False).replicas == 8
