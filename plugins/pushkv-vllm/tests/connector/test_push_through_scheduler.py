"""Whole requests through vLLM's scheduler on both sides: what arrives is right, and every block comes back."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from cases import PROMPT, Balance, continued, counts, legs, pair
from fake_engine import Scene, until


@pytest.mark.parametrize(
    ("setting", "before", "then"), [(0.001, 0.005, 0.001), (0.0, 0.005, 0.005), (0.002, 0.001, 0.001)]
)
def test_pythons_threads_take_turns_as_set(scene: Scene, setting: float, before: float, then: float) -> None:
    known = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        pair(scene, {"settings": (("switch_interval", setting),)}, {"settings": (("switch_interval", setting),)})
        assert sys.getswitchinterval() == pytest.approx(then)
    finally:
        sys.setswitchinterval(known)


class TestPushed:
    @pytest.mark.parametrize("tokens", [2, 3, 4, 5, 8, 41])
    def test_both_legs_at_once(self, scene: Scene, tokens: int) -> None:
        prefill, decode = pair(scene)
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT[:tokens], one)
        decode.add("d", PROMPT[:tokens], other, 6)
        until(lambda: "d" in decode.finished, prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT[:tokens], 6)
        assert decode.loaded["d"] == tokens - 1
        balance.settle()
        assert counts(decode) == {"received": 1}
        assert counts(prefill) == {"sent": 1}

    def test_prefill_first_by_its_answer(self, scene: Scene) -> None:
        prefill, decode = pair(scene)
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        prefill.add("p", PROMPT, {"do_remote_decode": True, "do_remote_prefill": False, **unknown})
        until(lambda: "p" in prefill.finished, prefill)
        answer = prefill.answers["p"]
        assert answer is not None
        decode.add("d", PROMPT, {**answer, **prefill.where}, 4)
        until(lambda: "d" in decode.finished, prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT, 4)
        assert decode.loaded["d"] == len(PROMPT) - 1

    def test_an_engine_that_does_both(self, scene: Scene) -> None:
        both, other = pair(scene, {"role": "kv_both"}, {"role": "kv_both"})
        balance = Balance(both, other)
        for name, (one, two) in {"a": (both, other), "b": (other, both)}.items():
            p, d = legs(one, name)
            one.add(f"p-{name}", PROMPT, p)
            two.add(f"d-{name}", PROMPT, d, 3)
        until(lambda: "d-a" in other.finished and "d-b" in both.finished, both, other)
        assert other.tokens["d-a"] == both.tokens["d-b"] == continued(PROMPT, 3)
        balance.settle()

    @pytest.mark.parametrize(
        ("prefill", "decode"),
        [
            ({"ranks": 2}, {"ranks": 1}),
            ({"ranks": 1}, {"ranks": 2}),
            ({"ranks": 2}, {"ranks": 2}),
            ({"block_size": 8}, {"block_size": 4}),
            ({"block_size": 4}, {"block_size": 8}),
            ({"batched": 16}, {}),
            ({"window": 6}, {"window": 6}),
            ({"window": 5, "batched": 16, "ranks": 2}, {"window": 5}),
            ({"window": 6, "batched": 16}, {"window": 6, "block_size": 8}),
            ({"caching": False}, {"caching": False}),
            ({"latent": True}, {"latent": True}),
            ({"latent": True, "ranks": 2}, {"latent": True}),
            ({"latent": True}, {"latent": True, "ranks": 2, "block_size": 8}),
            ({"stages": 2}, {}),
            ({}, {"stages": 2}),
            ({"stages": 3, "batched": 16}, {"stages": 2, "ranks": 2}),
            ({"stages": 2, "latent": True}, {"latent": True, "ranks": 2}),
        ],
        ids=str,
    )
    def test_a_mix_of_requests(self, scene: Scene, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
        """Prompts that share beginnings, so that both sides hit their caches, in any order on the two sides."""
        source, target = pair(scene, prefill, decode)
        balance = Balance(source, target)
        rng = random.Random(3)
        prompts = {}
        for number in range(12):
            shared = rng.choice([0, 8, 16, 24])
            prompts[f"r{number}"] = PROMPT[:shared] + [rng.randrange(3, 900) for _ in range(rng.randrange(2, 40))]
        order = rng.sample(sorted(prompts), len(prompts))
        for left, right in zip(sorted(prompts), order, strict=True):
            source.add(f"p-{left}", prompts[left], legs(source, left)[0])
            target.add(f"d-{right}", prompts[right], legs(source, right)[1], 3)
            source.step()
            target.step()
        until(lambda: len(target.finished) == len(prompts), source, target)
        for name, prompt in prompts.items():
            assert target.tokens[f"d-{name}"] == continued(prompt, 3)
        balance.settle()
        told = counts(target)
        assert told.get("failed", 0) == 0
        assert told["received"] + told.get("declined", 0) == len(prompts)
