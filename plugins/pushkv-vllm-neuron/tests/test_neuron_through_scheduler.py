"""Whole requests through vLLM's scheduler on both sides, with caches on the fake device that are late."""

from __future__ import annotations

import random
from typing import Any

import pytest
from cases import PROMPT, Balance, continued, counts, legs, pair
from fake_engine import Shape, until

from pushkv.backends.base import PassedFence
from pushkv.backends.neuron import NeuronBackend
from pushkv.errors import HandshakeError

LONG = [5 + number * 11 % 700 for number in range(150)]
BLOCK = {"block_size": 32, "blocks": 64}


@pytest.mark.parametrize("tokens", [2, 31, 32, 33, 150])
def test_both_legs_at_once(scene: Any, tokens: int) -> None:
    prefill, decode = pair(scene, BLOCK, BLOCK)
    balance = Balance(prefill, decode)
    one, other = legs(prefill, "t")
    prefill.add("p", LONG[:tokens], one)
    decode.add("d", LONG[:tokens], other, 3)
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(LONG[:tokens], 3)
    assert decode.loaded["d"] == tokens - 1
    balance.settle()
    assert counts(decode) == {"received": 1}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"ranks": 2}, {}),
        ({}, {"ranks": 2}),
        ({"block_size": 64}, {}),
        ({}, {"block_size": 128}),
        ({"batched": 32}, {}),
        ({"window": 40, "batched": 32}, {"window": 40}),
    ],
    ids=str,
)
def test_a_mix_of_requests(scene: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    source, target = pair(scene, {**BLOCK, **prefill}, {**BLOCK, **decode})
    rng = random.Random(3)
    prompts = {
        f"r{n}": LONG[: rng.choice([0, 32, 64])] + rng.choices(range(3, 900), k=rng.randrange(2, 60))
        for n in range(5)
    }
    for name, prompt in prompts.items():
        source.add(f"p-{name}", prompt, legs(source, name)[0])
        target.add(f"d-{name}", prompt, legs(source, name)[1], 2)
    until(lambda: len(target.finished) == len(prompts), source, target)
    for name, prompt in prompts.items():
        assert target.tokens[f"d-{name}"] == continued(prompt, 2)
    told = counts(target)
    assert told.get("failed", 0) == 0
    assert told["received"] + told.get("declined", 0) == len(prompts)


def with_a_gpu(scene: Any, trainium: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Serve a prompt with Trainium in this role, and a GPU in the other."""
    gpu = "kv_consumer" if trainium == "kv_producer" else "kv_producer"
    engines = {trainium: scene.engine(Shape(role=trainium, **ours)), gpu: scene.gpu(Shape(role=gpu, **theirs))}
    prefill, decode = engines["kv_producer"], engines["kv_consumer"]
    one, other = legs(prefill, "t")
    prefill.add("p", LONG, one)
    decode.add("d", LONG, other, 3)
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(LONG, 3)
    assert decode.loaded["d"] == len(LONG) - 1


@pytest.mark.parametrize("trainium", ["kv_producer", "kv_consumer"])
def test_a_gpu_on_the_other_side(scene: Any, trainium: str) -> None:
    """Another order, another block size, K and V in one block against apart, and twice the ranks."""
    with_a_gpu(scene, trainium, BLOCK, {"block_size": 16, "ranks": 2})


@pytest.mark.parametrize("tokens", [32, 33, 150])
def test_packed_keys_go_in_whole_blocks(scene: Any, tokens: int) -> None:
    prefill = scene.engine(Shape(role="kv_producer", **BLOCK), packed=True)
    decode = scene.engine(Shape(role="kv_consumer", **BLOCK), packed=True)
    one, other = legs(prefill, "t")
    prefill.add("p", LONG[:tokens], one)
    decode.add("d", LONG[:tokens], other, 3)
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(LONG[:tokens], 3)
    assert decode.loaded["d"] == tokens - 1


@pytest.mark.parametrize(
    ("prefill", "decode", "size", "told"),
    [
        (True, False, 32, "packed K: 'two tokens interleaved' against 'not given'"),
        (False, True, 32, "packed K: 'not given' against 'two tokens interleaved'"),
        (True, True, 64, "tokens of whole blocks: '32' against '64'"),
    ],
)
def test_packed_keys_meet_no_others(scene: Any, prefill: bool, decode: bool, size: int, told: str) -> None:
    """They have as many bytes, so that nothing but the digest of the two caches' factors can tell."""
    source = scene.engine(Shape(role="kv_producer", **BLOCK), packed=prefill)
    target = scene.engine(Shape(role="kv_consumer", **{**BLOCK, "block_size": size}), packed=decode)
    (consumer,) = target.endpoints
    with pytest.raises(HandshakeError, match=told):
        consumer.connect(source.producers[0].address)


def test_the_null_block_is_never_written(scene: Any) -> None:
    shape = {**BLOCK, "window": 40, "batched": 32}
    prefill, decode = pair(scene, shape, shape)
    one, other = legs(prefill, "t")
    prefill.add("p", LONG, one)
    decode.add("d", LONG, other, 2)
    until(lambda: "d" in decode.finished, prefill, decode)
    for worker in (*prefill.workers, *decode.workers):
        for cache in worker.caches.values():
            assert not cache[:, 0].cpu().any()


DEALT = {"heads": 1, "ranks": 2, "context": 2}
"""Two ranks hold the one head and share its tokens out, block by block."""


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (DEALT, {"heads": 1}),
        ({"heads": 1}, DEALT),
        (DEALT, DEALT),
        ({"heads": 1, "ranks": 4, "context": 4}, DEALT),
        (DEALT, {"heads": 1, "ranks": 4, "context": 4}),
        ({"heads": 2, "ranks": 4, "context": 2}, {"heads": 2, "ranks": 2}),
        ({"heads": 1, "ranks": 4, "context": 2}, {"heads": 1, "block_size": 64}),
        ({**DEALT, "block_size": 64, "interleave": 32}, DEALT),
        ({**DEALT, "interleave": 1}, {"heads": 1}),
        ({"heads": 1}, {**DEALT, "interleave": 8}),
    ],
    ids=str,
)
def test_ranks_that_share_tokens_out(scene: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """Context parallel against none and other counts, either way; of short prompts some ranks have nothing."""
    source, target = pair(scene, {**BLOCK, **prefill}, {**BLOCK, **decode})
    balance = Balance(source, target)
    prompts = {f"r{n}": [n + 3, *LONG[: tokens - 1]] for n, tokens in enumerate((2, 32, 33, 66, 97, 150))}
    # One begins as another does, so that decode has its first blocks, and only the rest is pushed.
    prompts["again"] = [*prompts["r5"][:130], 7, 8, 9]
    for name, prompt in prompts.items():
        if name == "again":
            until(lambda: len(target.finished) == len(prompts) - 1, source, target)
        source.add(f"p-{name}", prompt, legs(source, name)[0])
        target.add(f"d-{name}", prompt, legs(source, name)[1], 40)
    until(lambda: len(target.finished) == len(prompts), source, target)
    for name, prompt in prompts.items():
        assert target.tokens[f"d-{name}"] == continued(prompt, 40)
    balance.settle()
    assert counts(target) == {"received": len(prompts)}


def test_ranks_that_share_tokens_out_stream_and_pack(scene: Any) -> None:
    """A step at a time, and with keys that go in whole blocks."""
    prefill = scene.engine(Shape(role="kv_producer", **BLOCK, **DEALT, batched=64), packed=True)
    decode = scene.engine(Shape(role="kv_consumer", **BLOCK, heads=1), packed=True)
    for name, tokens in (("short", 33), ("long", 150)):
        one, other = legs(prefill, name)
        prefill.add(f"p-{name}", LONG[:tokens], one)
        decode.add(f"d-{name}", LONG[:tokens], other, 3)
    until(lambda: len(decode.finished) == 2, prefill, decode)
    assert decode.tokens["d-long"] == continued(LONG, 3)
    assert decode.tokens["d-short"] == continued(LONG[:33], 3)


@pytest.mark.parametrize("trainium", ["kv_producer", "kv_consumer"])
def test_a_gpu_against_ranks_that_share_tokens_out(scene: Any, trainium: str) -> None:
    """The GPU's too, in runs of 4 tokens; another order of axes and another block size."""
    dealt = {"heads": 1, "ranks": 2, "context": 2}
    with_a_gpu(scene, trainium, {**BLOCK, **dealt}, {"block_size": 16, "interleave": 4, **dealt})


def test_without_the_fence_what_arrives_is_not_kv(scene: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that shows that the tests above can fail."""
    monkeypatch.setattr(NeuronBackend, "fence", lambda self, array=None: PassedFence())
    prefill, decode = pair(scene, BLOCK, BLOCK)
    one, other = legs(prefill, "t")
    prefill.add("p", PROMPT, one)
    decode.add("d", PROMPT, other, 2)
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.wrong
    decode.wrong.clear()
