"""What workers count is told whole, and costs a step without news nothing."""

from __future__ import annotations

from typing import Any

from cases import PROMPT, pair, serve
from fake_engine import FakeEngine, Scene

from pushkv_vllm.stats import PushKVStats
from pushkv_vllm.worker.half import LOOKS

PROMPTS = {"a": PROMPT, "b": PROMPT[:20]}


def collect(engine: FakeEngine, told: PushKVStats) -> Any:
    """Add up what an engine's worker tells from now on; returns what asks it once more."""
    connector = engine.workers[0].connector
    ask = connector.get_kv_connector_stats
    seen = [told]

    def asked() -> PushKVStats | None:
        stats = ask()
        if stats is not None:
            seen[0] = seen[0].aggregate(stats)
            told.data.update(seen[0].data)
        return stats

    connector.get_kv_connector_stats = asked
    return asked


def test_all_that_is_counted_is_told_by_the_third_step_after(scene: Scene) -> None:
    prefill, decode = pair(scene)
    sent, got = PushKVStats(), PushKVStats()
    asks = collect(prefill, sent), collect(decode, got)
    serve(prefill, decode, PROMPTS, 3)
    for ask in asks:
        for _ in range(LOOKS):
            ask()
        assert ask() is None
    counted = prefill.producers[0].stats()
    assert sent.data["counts"] == {name: counted[name] for name in ("bytes", "writes", "descriptors")}
    assert len(got.data["seconds"]) == len(PROMPTS)
    assert sent.data["gauges"]["open"] == got.data["gauges"]["open"] == 0


def test_what_is_quarantined_after_all_has_ended_is_told_and_so_is_its_end(scene: Scene) -> None:
    prefill, decode = pair(scene)
    sent = PushKVStats()
    ask = collect(prefill, sent)
    serve(prefill, decode, PROMPTS, 3)
    for _ in range(LOOKS + 1):
        ask()
    side = prefill.producers[0]._life.side
    side.quarantined = 1  # as where a slot's WRITE has failed after its stage was over
    ask()
    assert sent.data["gauges"]["quarantined"] == 1
    side.quarantined = 0
    ask()
    assert sent.data["gauges"]["quarantined"] == 0


def test_a_step_with_nothing_open_asks_no_endpoint(scene: Scene) -> None:
    prefill, decode = pair(scene)
    serve(prefill, decode, PROMPTS, 3)
    half = prefill.workers[0].connector._worker
    for _ in range(LOOKS + 1):
        half.stats()
    half._prefill.written = None  # to call it would be an error
    assert half.stats() is None
    assert half.finished() == (set(), set())
    assert half.reports() is None
