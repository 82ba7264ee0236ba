"""Prefill and decode with other ranks, block sizes and orders of axes than one another, as real processes over NIXL.

In the first model each rank has heads of its own; the second has so few that several ranks hold the same one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from pushkv.core.outcome import Outcome
from pushkv.demo.generate import SAFE_GAP
from pushkv.demo.prefilling import customers
from pushkv.demo.report import Judgement
from pushkv.demo.router import run_demo
from pushkv.demo.settings import DemoSettings, Layout
from pushkv.demo.weights import ModelConfig
from pushkv.demo.workload import Workload

SMALL = {"vocabulary": 256, "hidden": 128, "layers": 4, "head_dim": 16, "intermediate": 256}
FOUR_HEADS = ModelConfig(**SMALL, query_heads=8, kv_heads=4)
TWO_HEADS = ModelConfig(**SMALL, query_heads=8, kv_heads=2)
WORKLOAD = Workload(count=6, shortest=5, longest=150, new_tokens=6, vocabulary=256, seed=3)


def settings(model: ModelConfig, prefill: Layout, decode: Layout) -> DemoSettings:
    # Chunks end inside blocks of either side.
    return DemoSettings(
        model=model, workload=WORKLOAD, prefill=prefill, decode=decode, chunk=40, raw_repeats=0, limit=90.0
    )


@pytest.mark.processes
@pytest.mark.parametrize("landing", ["direct", "landing"])
@pytest.mark.parametrize(
    ("model", "prefill", "decode"),
    [
        pytest.param(FOUR_HEADS, Layout(2, 16, "HND"), Layout(4, 32, "NHD"), id="tp 2 to 4, block 16 to 32"),
        pytest.param(FOUR_HEADS, Layout(4, 32, "HND"), Layout(2, 16, "NHD"), id="tp 4 to 2, block 32 to 16"),
        pytest.param(TWO_HEADS, Layout(4, 16, "HND"), Layout(2, 32, "NHD"), id="tp 4 to 2, two copies to one"),
        pytest.param(TWO_HEADS, Layout(2, 32, "HND"), Layout(4, 16, "NHD"), id="tp 2 to 4, one copy to two"),
    ],
)
def test_tokens_are_equal_whatever_the_two_layouts(
    model: ModelConfig, prefill: Layout, decode: Layout, landing: Literal["direct", "landing"]
) -> None:
    run = run_demo(replace(settings(model, prefill, decode), landing=landing))
    judgement = Judgement(run)
    assert judgement.troubles == []
    assert judgement.tokens_equal
    assert judgement.least_gap >= SAFE_GAP
    for spec, report in run.reports.items():
        assert report.outcomes == {request.name: Outcome.COMPLETE for request in run.requests}, spec.name
    copies = max(1, decode.tp // model.kv_heads)
    token = model.layers * 2 * model.kv_heads * model.head_dim * 4 * copies
    assert judgement.stats["bytes"] == token * sum(len(request.prompt) - 1 for request in run.requests)


@pytest.mark.parametrize(
    ("kv_heads", "prefill", "decode", "expected"),
    [
        (4, 2, 4, [2, 2]),
        (4, 4, 2, [1, 1, 1, 1]),
        (2, 4, 2, [1, 0, 1, 0]),
        (2, 2, 4, [2, 2]),
        (2, 4, 4, [1, 1, 1, 1]),
        (4, 1, 1, [1]),
    ],
)
def test_each_prefill_rank_knows_how_many_decode_ranks_it_writes_to(
    kv_heads: int, prefill: int, decode: int, expected: list[int]
) -> None:
    model = ModelConfig(query_heads=8, kv_heads=kv_heads)
    chosen = settings(model, Layout(prefill), Layout(decode))
    assert [customers(chosen, rank) for rank in range(prefill)] == expected
