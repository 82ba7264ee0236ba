"""Preemption on either side, and what is pinned while a WRITE may touch it."""

from __future__ import annotations

from typing import Any

import pytest
from cases import PROMPT, Balance, continued, counts, has_open, legs, pair, serve_eight
from fake_engine import FakeEngine, Scene, until


def preempt(engine: FakeEngine, name: str) -> None:
    """Have the scheduler preempt a running request, as it does when blocks run out."""
    request = engine.scheduler.requests[name]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)


def runs(engine: FakeEngine, name: str) -> bool:
    return any(request.request_id == name for request in engine.scheduler.running)


class TestPrefill:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("early", [True, False])
    def test_goes_on_from_the_first_unsent_token(self, scene: Scene, ranks: int, early: bool) -> None:
        """Whether decode has offered before the preemption or comes after it."""
        prefill, decode = pair(scene, {"batched": 16, "ranks": ranks, "caching": False})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        if early:
            decode.add("d", PROMPT, other, 3)
            until(lambda: all(has_open(producer) for producer in prefill.producers), decode)
        prefill.add("p", PROMPT, one)
        prefill.step()
        assert runs(prefill, "p")
        preempt(prefill, "p")
        prefill.add("q", PROMPT[::-1], legs(prefill, "other")[0])
        if not early:
            decode.add("d", PROMPT, other, 3)
        until(lambda: "d" in decode.finished, prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT, 3)
        assert decode.loaded["d"] == len(PROMPT) - 1
        decode.add("e", PROMPT[::-1], legs(prefill, "other")[1], 3)
        until(lambda: "e" in decode.finished, prefill, decode)
        balance.settle()
        assert counts(prefill)["preempted"] == 1

    def test_its_blocks_are_not_handed_out_while_they_are_read(self, scene: Scene) -> None:
        """Nor while it is computed again. No hook waits for that: one may come after blocks were zeroed."""
        prefill, decode = pair(scene, {"batched": 16, "caching": False})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        decode.add("d", PROMPT, other, 3)
        until(lambda: all(has_open(producer) for producer in prefill.producers), decode)
        held = _held_up(scene, prefill)
        prefill.add("p", PROMPT, one)
        prefill.step()
        until(lambda: prefill.producers[0].stats().get("writes"), decode)
        blocks = set(prefill.tables["p"][0])
        preempt(prefill, "p")
        prefill.add("q", PROMPT[::-1], None)
        until(lambda: {"p", "q"} <= prefill.finished.keys(), prefill)
        assert counts(prefill)["preempted"] == 1
        pool = prefill.scheduler.kv_cache_manager.block_pool
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        assert not blocks & free
        assert not blocks & {block for name in "pq" for block in prefill.tables[name][0]}
        held()
        until(lambda: "d" in decode.finished, prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT, 3)
        balance.settle()

    def test_and_aborted(self, scene: Scene) -> None:
        prefill, decode = pair(scene, {"batched": 16})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT, one)
        decode.add("d", PROMPT, other, 3)
        prefill.step()
        preempt(prefill, "p")
        prefill.abort("p")
        until(lambda: "d" in decode.finished, prefill, decode)
        assert str(decode.finished["d"]) == "error"
        balance.settle()


def test_decode_preempted_after_its_kv_came_computes_it_again(scene: Scene) -> None:
    prefill, decode = pair(scene, decode={"caching": False})
    balance = Balance(prefill, decode)
    one, other = legs(prefill, "t")
    prefill.add("p", PROMPT, one)
    decode.add("d", PROMPT, other, 8)
    until(lambda: runs(decode, "d") and len(decode.tokens["d"]) > len(PROMPT) + 2, prefill, decode)
    preempt(decode, "d")
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(PROMPT, 8)
    balance.settle()


def test_under_shortage_on_both_sides(scene: Scene) -> None:
    """So few blocks that both schedulers preempt by themselves."""
    prefill, decode = pair(scene, {"blocks": 40, "batched": 16}, {"blocks": 40})
    serve_eight(prefill, decode)


def _held_up(scene: Scene, engine: FakeEngine) -> Any:
    """Have no WRITE of the engine's get through; what is returned lets them."""
    agents = [producer.agent for producer in engine.producers]
    for agent in agents:
        scene.network.stall(agent)
    return scene.network.release
