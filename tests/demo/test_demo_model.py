"""The demo's model against a plain one without pages, and against itself in every other arrangement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pushkv.demo.generate import SAFE_GAP, DecodeLoop, Generation, generate_alone
from pushkv.demo.model import DecodeInput, Model, choose, head_slice
from pushkv.demo.paged import BlockPool, OutOfBlocks, PagedCache, blocks_for
from pushkv.demo.weights import ModelConfig, Weights
from pushkv.demo.workload import Request, Workload
from pushkv.errors import ConfigError

CONFIG = ModelConfig()
WEIGHTS = Weights.seeded(CONFIG)
MODEL = Model(CONFIG, WEIGHTS)
BLOCKS = 120
REQUESTS = Workload(count=5, longest=200, new_tokens=12, seed=7).requests()


def reference_logits(tokens: Sequence[int], kv_dtype: str = "float32") -> np.ndarray:
    """Logits after every token, in float64, head by head, with complex rotations and no cache at all."""
    hidden = WEIGHTS.embedding[list(tokens)].astype(np.float64)
    count, size = len(tokens), CONFIG.head_dim
    speed = CONFIG.rope_base ** (-np.arange(size // 2) * 2.0 / size)
    turn = np.exp(1j * np.arange(count)[:, None] * speed)

    def norm(x, weight):
        return x * weight / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6)

    def rope(x):
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * turn
        return np.hstack([turned.real, turned.imag])

    def stored(x):
        return x.astype(kv_dtype).astype(np.float64)

    for layer in WEIGHTS.layers:
        x = norm(hidden, layer.attention_norm)
        heads = []
        for head in range(CONFIG.query_heads):
            own = slice(head * size, (head + 1) * size)
            shared = head // (CONFIG.query_heads // CONFIG.kv_heads)
            kv = slice(shared * size, (shared + 1) * size)
            query, key = rope(x @ layer.query[:, own]), stored(rope(x @ layer.key[:, kv]))
            weight = np.tril(np.exp(query @ key.T / np.sqrt(size)))
            heads.append(weight @ stored(x @ layer.value[:, kv]) / weight.sum(axis=1, keepdims=True))
        hidden = hidden + np.hstack(heads) @ layer.output
        x = norm(hidden, layer.mlp_norm)
        gate = x @ layer.gate
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ layer.up)) @ layer.down
    return norm(hidden, WEIGHTS.final_norm) @ WEIGHTS.unembedding


def generations(requests: Sequence[Request] = REQUESTS, **cache: Any) -> dict[str, Generation]:
    made = MODEL.cache(BLOCKS, **cache)
    return generate_alone(MODEL, made, BlockPool(BLOCKS, seed=4), requests)


def tokens_of(found: dict[str, Generation]) -> dict[str, tuple[int, ...]]:
    assert min(generation.least_gap for generation in found.values()) >= SAFE_GAP
    return {name: generation.tokens for name, generation in found.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    return tokens_of(generations())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_tokens_are_those_of_a_plain_model_without_pages(dtype):
    for request in REQUESTS:
        found = generations([request], dtype=dtype)[request.name]
        logits = reference_logits([*request.prompt, *found.tokens[:-1]], dtype)[len(request.prompt) - 1 :]
        assert found.tokens == tuple(logits.argmax(axis=1))
        best = np.sort(logits, axis=1)
        # float16 may round a key the other way when float32 and float64 differ in the last bit.
        tolerance = 1e-3 if dtype == "float32" else 0.1
        np.testing.assert_allclose(found.gaps, best[:, -1] - best[:, -2], atol=tolerance)


def test_prefill_logits_are_those_of_the_plain_model():
    prompt = REQUESTS[0].prompt
    logits = MODEL.prefill(MODEL.cache(20), prompt, np.arange(20, dtype=np.int32))
    np.testing.assert_allclose(logits, reference_logits(prompt)[-1], atol=5e-4)


@pytest.mark.parametrize("order", ["LSBHNC", "LSBNHC", "BLSHNC", "BLHNSC", "LHBSNC", "CNHBSL"])
def test_axis_order_and_block_ids_change_not_one_bit(order):
    request = REQUESTS[1]
    results = []
    for chosen, seed in (("LSBHNC", None), (order, 1), (order, 2)):
        cache = MODEL.cache(BLOCKS, order=chosen)
        table = BlockPool(BLOCKS, seed=seed).allocate(blocks_for(request.length, 16))
        logits = MODEL.prefill(cache, request.prompt, table)
        step = MODEL.decode(cache, [DecodeInput(int(logits.argmax()), len(request.prompt), table)])
        results.append((logits, step[0]))
    for logits, step in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(step, results[0][1])


@pytest.mark.parametrize("block_size", [1, 10, 16, 24, 64])
def test_block_size_changes_no_token(expected, block_size):
    blocks = sum(blocks_for(request.length, block_size) for request in REQUESTS)
    cache = MODEL.cache(blocks, block_size)
    assert tokens_of(generate_alone(MODEL, cache, BlockPool(blocks, seed=1), REQUESTS)) == expected


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunked_prefill_gives_the_same_logits(chunk):
    prompt = REQUESTS[2].prompt
    table = np.arange(BLOCKS, dtype=np.int32)[::-1]
    whole = MODEL.prefill(MODEL.cache(BLOCKS), prompt, table)
    chunked = MODEL.prefill(MODEL.cache(BLOCKS), prompt, table, chunk=chunk)
    np.testing.assert_allclose(chunked, whole, atol=5e-4)


def test_prefill_goes_on_where_an_earlier_call_stopped():
    prompt, table, cache = REQUESTS[2].prompt, np.arange(BLOCKS, dtype=np.int32), MODEL.cache(BLOCKS)
    whole = MODEL.prefill(MODEL.cache(BLOCKS), prompt, table)
    MODEL.prefill(cache, prompt[:21], table)
    resumed = MODEL.prefill(cache, prompt[21:], table, start=21)
    np.testing.assert_allclose(resumed, whole, atol=5e-4)


def test_prefill_then_feeding_its_token_equals_feeding_the_last_prompt_token_again(expected):
    for request in REQUESTS:
        cache = MODEL.cache(BLOCKS)
        table = np.arange(BLOCKS, dtype=np.int32)
        first = int(choose(MODEL.prefill(cache, request.prompt, table)).tokens[0])
        count = request.new_tokens - 1
        rest = run(MODEL, cache, request, table, token=first, position=len(request.prompt), count=count)
        again = run(MODEL, cache, request, table)
        assert (first, *rest) == again == expected[request.name]


def test_memory_never_written_may_hold_nan(expected):
    array = np.full(MODEL.cache(BLOCKS).array.shape, np.nan, np.float32)
    assert tokens_of(generations(array=array)) == expected


@pytest.mark.parametrize(("order", "dtype"), [("LSBHNC", "float32"), ("LSBNHC", "float16"), ("BLSHNC", "float32")])
def test_decode_from_copied_bytes_gives_exactly_the_tokens_of_one_process(order, dtype):
    alone = tokens_of(generations(order=order, dtype=dtype))
    source, target = MODEL.cache(BLOCKS, order=order, dtype=dtype), MODEL.cache(BLOCKS, order=order, dtype=dtype)
    source_pool, target_pool = BlockPool(BLOCKS, seed=5), BlockPool(BLOCKS, seed=6)
    loop = DecodeLoop(MODEL, target)
    for request in REQUESTS:
        *known, last = request.prompt
        count = blocks_for(len(known), 16)
        filled, table = source_pool.allocate(count), target_pool.allocate(blocks_for(request.length, 16))
        MODEL.prefill(source, known, filled)
        copy_bytes(source, target, filled.tolist(), table[:count].tolist())
        loop.add(request.name, token=last, position=len(known), table=table, count=request.new_tokens)
    assert tokens_of(drained(loop)) == alone


def copy_bytes(source: PagedCache, target: PagedCache, sources: list[int], targets: list[int]) -> None:
    axis = source.order.index("B")
    bytes_from, bytes_to = (np.moveaxis(cache.array.view(np.uint8), axis, 0) for cache in (source, target))
    bytes_to[targets] = bytes_from[sources]


def test_a_lost_block_is_noticed():
    for request in REQUESTS[:3]:
        cache, table = MODEL.cache(BLOCKS), np.arange(BLOCKS, dtype=np.int32)
        MODEL.prefill(cache, request.prompt, table)
        right = run(MODEL, cache, request, table)
        cache.view[:, :, table[len(request.prompt) // 32]] = 0
        assert run(MODEL, cache, request, table) != right


@pytest.mark.parametrize(
    ("producers", "consumers", "block_sizes", "orders"),
    [
        (1, 1, (16, 16), ("LSBHNC", "LSBNHC")),
        (2, 4, (16, 32), ("LSBHNC", "LSBNHC")),
        (4, 2, (24, 10), ("BLSHNC", "LSBHNC")),
        (8, 1, (16, 16), ("LSBHNC", "BLSHNC")),
    ],
)
def test_ranks_of_another_size_continue_with_the_same_tokens(expected, producers, consumers, block_sizes, orders):
    request = REQUESTS[3]
    table = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
    *known, last = request.prompt

    def produce(model: Model) -> PagedCache:
        cache = model.cache(BLOCKS, block_sizes[0], order=orders[0])
        model.prefill(cache, known, table)
        return cache

    filled = together(producers, produce)

    def consume(model: Model) -> tuple[int, ...]:
        cache = model.cache(BLOCKS, block_sizes[1], order=orders[1])
        into = cache.slots(table[::-1].copy(), 0, len(known))
        for rank, source in enumerate(filled):
            copy_shared_heads(source, head_slice(CONFIG, rank, producers), table, cache, model.head_slice, into)
        return run(model, cache, request, table[::-1].copy(), token=last, position=len(known))

    assert together(consumers, consume) == [expected[request.name]] * consumers


def copy_shared_heads(source, held, table, target, wanted, into) -> None:
    blocks, offsets = source.slots(table, 0, len(into[0]))
    for head in range(max(held.start, wanted.start), min(held.stop, wanted.stop)):
        found = source.view[:, :, blocks, head - held.start, offsets]
        target.view[:, :, into[0], head - wanted.start, into[1]] = found


def together(size: int, work: Callable[[Model], object]) -> list:
    """Run all ranks of a group, each in its thread, their partial sums added in order of rank."""
    partial: list = [None] * size
    barrier = threading.Barrier(size, timeout=30)

    def rank_of(rank: int) -> object:
        def all_reduce(array: np.ndarray) -> np.ndarray:
            partial[rank] = array
            barrier.wait()
            total = np.sum(partial, axis=0)
            barrier.wait()
            return total

        return work(Model(CONFIG, WEIGHTS, rank=rank, size=size, all_reduce=all_reduce))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_of, range(size)))


def run(model: Model, cache: PagedCache, request: Request, table, *, token=None, position=None, count=None):
    """Decode one request alone, from its last prompt token unless told otherwise."""
    loop = DecodeLoop(model, cache)
    loop.add(
        request.name,
        token=request.prompt[-1] if token is None else token,
        position=len(request.prompt) - 1 if position is None else position,
        table=table,
        count=count or request.new_tokens,
    )
    return drained(loop)[request.name].tokens


def drained(loop: DecodeLoop) -> dict[str, Generation]:
    done: dict[str, Generation] = {}
    while loop.running:
        done.update(loop.step())
    return done


def test_seeded_weights_are_the_same_each_time_and_differ_by_seed():
    again, other = Weights.seeded(CONFIG), Weights.seeded(CONFIG, seed=1)
    np.testing.assert_array_equal(again.layers[-1].down, WEIGHTS.layers[-1].down)
    assert not np.array_equal(other.unembedding, WEIGHTS.unembedding)


def test_choose_tells_the_lead_over_the_second_best():
    choice = choose(np.array([[1.0, 5.0, 4.5], [7.0, -1.0, 7.0]], np.float32))
    assert choice.tokens.tolist() == [1, 0]
    assert choice.gaps.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_head_slices_cover_all_heads(size):
    slices = [head_slice(CONFIG, rank, size) for rank in range(size)]
    held = [head for own in slices for head in range(own.start, own.stop)]
    assert sorted(held) == sorted(list(range(CONFIG.kv_heads)) * max(1, size // CONFIG.kv_heads))


@pytest.mark.parametrize(("rank", "size"), [(0, 3), (2, 2), (0, 16), (-1, 2)])
def test_a_rank_that_cannot_hold_a_share_is_refused(rank, size):
    with pytest.raises(ConfigError, match=rf"rank {rank} of {size} cannot hold"):
        Model(CONFIG, WEIGHTS, rank=rank, size=size)


@pytest.mark.parametrize(("setting", "said"), [({"kv_heads": 3}, "8 query heads"), ({"head_dim": 31}, "head_dim 31")])
def test_sizes_that_do_not_fit_are_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**setting)


def test_calls_that_make_no_sense_are_refused():
    cache, table = MODEL.cache(4), np.arange(4, dtype=np.int32)
    with pytest.raises(ConfigError, match="prefill of 0 tokens"):
        MODEL.prefill(cache, [], table)
    with pytest.raises(ConfigError, match="decode of 0 sequences"):
        MODEL.decode(cache, [])
    with pytest.raises(ConfigError, match=r"token ids 5\.\.512 are outside"):
        MODEL.prefill(cache, [5, 512], table)
    with pytest.raises(OutOfBlocks, match="token 64 has no block"):
        MODEL.prefill(cache, [1] * 65, table)
