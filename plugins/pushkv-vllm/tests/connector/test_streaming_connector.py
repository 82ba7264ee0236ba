"""Streaming through vLLM's scheduler: chunks after each step, layers within it, and what stays right meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import PROMPT, Balance, continued, has_open, legs, pair, serve_eight
from fake_engine import FakeEngine, Scene, until

from pushkv import KVCache
from pushkv.errors import ConfigError
from pushkv_vllm import PushKVConnector
from pushkv_vllm.settings import read_settings
from pushkv_vllm.worker.layers import Layers


def streaming(stream: str, **more: Any) -> dict[str, Any]:
    """A prefill engine with this setting."""
    return {"batched": 16, "settings": (("stream", stream),), **more}


def offered(decode: FakeEngine, prefill: FakeEngine, prompt: list[int], tokens: int = 3) -> None:
    """Have decode offer ahead of prefill."""
    decode.add("d", prompt, legs(prefill, "t")[1], tokens)
    until(lambda: all(has_open(producer) for producer in prefill.producers), decode)


def writes(engine: FakeEngine) -> int:
    return sum(int(one.stats().get("writes", 0)) for one in engine.producers)


@pytest.mark.parametrize(("stream", "parts"), [("request", 1), ("auto", 1), ("chunk", 3), ("layer", 3 * 3)])
def test_what_leaves_in_how_many_parts(scene: Scene, stream: str, parts: int) -> None:
    """Three steps of 16 tokens; of three layers each is told of but the last, whose end is the step's."""
    prefill, decode = pair(scene, streaming(stream))
    offered(decode, prefill, PROMPT)
    prefill.add("p", PROMPT, legs(prefill, "t")[0])
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(PROMPT, 3)
    assert decode.loaded["d"] == len(PROMPT) - 1
    groups = len(prefill.producers[0].cache.geometry.groups)
    assert writes(prefill) == parts * (groups if stream == "layer" else 1)


def test_layers_of_the_step_that_runs_have_left_before_it_ends(scene: Scene) -> None:
    prefill, decode = pair(scene, streaming("layer"))
    offered(decode, prefill, PROMPT)
    prefill.add("p", PROMPT, legs(prefill, "t")[0])
    seen: list[int] = []
    compute = prefill._compute

    def watching(worker: Any, name: str, group: int, layer: str, *rest: Any) -> None:
        if layer == "layers.2":
            until(lambda: writes(prefill) > sum(seen))
            seen.append(writes(prefill) - sum(seen))
        compute(worker, name, group, layer, *rest)

    prefill._compute = watching  # type: ignore[method-assign]
    prefill.step()
    assert seen, "the first layers had left when the last was computed"
    prefill._compute = compute  # type: ignore[method-assign]
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(PROMPT, 3)


@pytest.mark.parametrize("stream", ["chunk", "layer"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"ranks": 2}, {"ranks": 1}),
        ({"block_size": 8}, {"block_size": 4}),
        ({"block_size": 4}, {"block_size": 8}),
        ({"window": 6}, {"window": 6}),
    ],
    ids=str,
)
def test_many_prompts(scene: Scene, stream: str, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    source, target = pair(scene, streaming(stream, **prefill), decode)
    balance = Balance(source, target)
    prompts = {f"r{number}": [number + 3, *PROMPT[: 9 + 5 * number]] for number in range(6)}
    for name, prompt in prompts.items():
        one, other = legs(source, name)
        target.add(f"d-{name}", prompt, other, 3)
        source.add(f"p-{name}", prompt, one)
        source.step()
        target.step()
    until(lambda: len(target.finished) == len(prompts), source, target)
    for name, prompt in prompts.items():
        assert target.tokens[f"d-{name}"] == continued(prompt, 3)
    balance.settle()


@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_under_shortage_prefill_is_preempted_between_parts(scene: Scene, stream: str) -> None:
    prefill, decode = pair(scene, streaming(stream, blocks=40), {"blocks": 40})
    serve_eight(prefill, decode)


@pytest.mark.parametrize("stream", ["chunk", "layer"])
def test_aborted_between_parts(scene: Scene, stream: str) -> None:
    prefill, decode = pair(scene, streaming(stream))
    balance = Balance(prefill, decode)
    offered(decode, prefill, PROMPT)
    prefill.add("p", PROMPT, legs(prefill, "t")[0])
    prefill.step()
    until(lambda: writes(prefill))
    decode.abort("d")
    prefill.abort("p")
    balance.settle()


def test_layers_are_no_reason_to_cut_graphs() -> None:
    assert not any(PushKVConnector.requires_piecewise_for_cudagraph({"stream": one}) for one in ("auto", "layer"))
    with pytest.raises(ConfigError, match="stream"):
        read_settings({"stream": "token"})


def test_layers_count_from_the_first_on_whatever_their_order(scene: Scene) -> None:
    geometry = pair(scene)[0].producers[0].cache.geometry
    layers = Layers(geometry)
    width = len(geometry.groups)
    assert layers.queued("layers.1") == (0,) * width
    assert layers.queued("layers.1") is None
    assert layers.queued("drafter") is None
    assert layers.queued("layers.0") == (2,) * width
    assert layers.queued("layers.2") is None, "the step's end tells of all"
    layers.begin(1)
    assert layers.queued("layers.0") == (1,) * width


def test_layers_of_small_steps_are_not_told(scene: Scene) -> None:
    geometry = pair(scene)[0].producers[0].cache.geometry
    token = sum(group.token_bytes for group in geometry.groups)
    layers = Layers(geometry, 10 * token - 1)
    layers.begin(9)
    assert layers.queued("layers.0") is None
    layers.begin(10)
    assert layers.queued("layers.0") == (1,) * len(geometry.groups)


def test_as_many_layers_are_told_at_once_as_fit_a_slot() -> None:
    tensor = np.zeros((36, 2, 8, 4, 2, 8), np.float16)
    geometry = KVCache.of(tensor, "LSBNHC", heads=2, model="m").geometry
    layer = sum(group.token_bytes for group in geometry.groups) // 36

    def told(tokens: int, slot: int) -> int:
        layers = Layers(geometry, 0, slot)
        layers.begin(tokens)
        return sum(layers.queued(name.name) is not None for name in geometry.groups[0].layers)

    assert told(100, 0) == told(100, 500 * layer) == told(100, 10_000 * layer) == 7, "every five of 36"
    assert told(100, 499 * layer) == told(100, 400 * layer) == 8, "every four"
    assert told(100, 100 * layer) == 35
    assert told(100, 99 * layer) == 7, "what fits no slot is cut by tokens, too"


def test_auto_tells_of_layers_on_gpus_alone() -> None:
    told = {(stream, device): read_settings({"stream": stream}).endpoint("e", 0, 0, device).layers
            for stream in ("auto", "chunk", "layer") for device in ("cuda", "cpu")}  # fmt: skip
    assert [which for which, layers in told.items() if layers] == [
        ("auto", "cuda"), ("layer", "cuda"), ("layer", "cpu")
    ]  # fmt: skip


def test_dual_batch_overlap_is_refused(scene: Scene) -> None:
    prefill, _ = pair(scene, streaming("layer"))
    config = replace(prefill.config, parallel_config=replace(prefill.config.parallel_config))
    config.parallel_config.enable_dbo = True
    with pytest.raises(ConfigError, match="dual-batch"):
        PushKVConnector(config, prefill.workers[0].connector.role, prefill.cache_config)
    transfer = replace(config.kv_transfer_config, kv_connector_extra_config={"port": 0, "stream": "auto"})
    config.kv_transfer_config = transfer
    connector = PushKVConnector(config, prefill.workers[0].connector.role, prefill.cache_config)
    assert not connector._worker._settings.layers("cuda")
    connector.shutdown()
