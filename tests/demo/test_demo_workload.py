"""The requests of the demo and their reference run."""

from __future__ import annotations

import numpy as np
import pytest

from pushkv.demo.generate import SAFE_GAP, DecodeLoop, generate_alone, settled
from pushkv.demo.model import Model
from pushkv.demo.paged import BlockPool
from pushkv.demo.weights import ModelConfig, Weights
from pushkv.demo.workload import Workload
from pushkv.errors import ConfigError

CONFIG = ModelConfig()
MODEL = Model(CONFIG, Weights.seeded(CONFIG))


def test_lengths_are_mixed_and_hold_both_ends():
    requests = Workload().requests()
    lengths = [len(request.prompt) for request in requests]
    assert len(requests) == 16
    assert (min(lengths), max(lengths)) == (12, 512)
    assert len(set(lengths)) > 10
    assert len({request.name for request in requests}) == 16
    assert all(0 <= token < 512 for request in requests for token in request.prompt)


def test_requests_are_the_same_each_time_and_differ_by_seed():
    assert Workload().requests() == Workload().requests()
    assert Workload(seed=1).requests() != Workload(seed=2).requests()


def test_a_redrawn_request_keeps_name_and_length():
    workload = Workload()
    request = workload.requests()[4]
    other = workload.redrawn(request)
    assert (other.name, other.draw, len(other.prompt)) == (request.name, 1, len(request.prompt))
    assert len({request.prompt, other.prompt, workload.redrawn(other).prompt}) == 3


@pytest.mark.parametrize(
    "setting", [{"count": 1}, {"shortest": 0}, {"shortest": 9, "longest": 8}, {"new_tokens": 0}, {"vocabulary": 1}]
)
def test_settings_that_draw_nothing_are_refused(setting):
    with pytest.raises(ConfigError, match="draws nothing useful"):
        Workload(**setting)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_token_of_the_default_workload_leads_clearly(dtype):
    blocks = 400
    pool = BlockPool(blocks, seed=1)
    found = generate_alone(MODEL, MODEL.cache(blocks, dtype=dtype), pool, Workload().requests())
    assert min(generation.least_gap for generation in found.values()) >= SAFE_GAP
    assert all(len(generation.tokens) == len(generation.gaps) == 32 for generation in found.values())
    assert pool.free_count == blocks


def test_requests_with_a_close_call_get_another_prompt():
    workload = Workload(count=4, longest=40, new_tokens=8, seed=3)
    cache, pool = MODEL.cache(40), BlockPool(40)
    requests, found = settled(MODEL, cache, pool, workload, least_gap=0.2)
    assert min(generation.least_gap for generation in found.values()) >= 0.2
    assert any(request.draw for request in requests)
    assert [len(request.prompt) for request in requests] == [len(request.prompt) for request in workload.requests()]
    assert tokens(found) == tokens(generate_alone(MODEL, cache, pool, requests))
    with pytest.raises(ConfigError, match="after 2 draws"):
        settled(MODEL, cache, pool, workload, least_gap=1e9, draws=2)


def tokens(found):
    return {name: generation.tokens for name, generation in found.items()}


def test_sequences_join_and_leave_the_loop():
    loop = DecodeLoop(MODEL, MODEL.cache(4))
    assert loop.step() == {}
    loop.add("a", token=1, position=0, table=np.array([0], np.int32), count=1)
    loop.add("b", token=2, position=0, table=np.array([1], np.int32), count=2)
    with pytest.raises(ConfigError, match="'b' runs already"):
        loop.add("b", token=2, position=0, table=np.array([2], np.int32), count=2)
    assert loop.running == ("a", "b")
    assert set(loop.step()) == {"a"}
    assert set(loop.step()) == {"b"}
    assert loop.running == ()
    with pytest.raises(ConfigError, match="wants 0 tokens"):
        loop.add("c", token=2, position=0, table=np.array([2], np.int32), count=0)
