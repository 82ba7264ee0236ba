"""A decoder-only transformer in numpy over a paged KV cache.

Grouped-query attention, rotary positions, RMSNorm and SwiGLU, in float32. Keys and values are
always read back from the cache, also those just computed, so that a float16 cache rounds the same
whatever the chunking. One rank of a tensor-parallel group computes its heads and its slice of the
MLP; the caller's ``all_reduce`` sums the partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pushkv.demo.paged import AXES, BlockIds, PagedCache, blocks_for
from pushkv.demo.weights import LayerWeights, ModelConfig, Weights
from pushkv.errors import ConfigError

Float = NDArray[np.float32]
AllReduce = Callable[[Float], Float]
Attend = Callable[[int, Float], Float]

NORM_EPSILON = np.float32(1e-6)


@dataclass(frozen=True)
class DecodeInput:
    """One sequence of a decode step: ``token`` stands at ``position``; KV of all before it is cached."""

    token: int
    position: int
    table: BlockIds


@dataclass(frozen=True)
class Choice:
    """Greedy tokens of a batch, and for each how far the second best logit lies behind."""

    tokens: NDArray[np.int64]
    gaps: Float


def choose(logits: Float) -> Choice:
    """The best token of each row of ``logits`` (sequences, vocabulary) or of a single row."""
    rows = np.atleast_2d(logits)
    best_two = np.partition(rows, -2, axis=-1)[:, -2:]
    return Choice(rows.argmax(axis=-1), best_two[:, 1] - best_two[:, 0])


def one_rank(array: Float) -> Float:
    """The sum over a group of one rank."""
    return array


@dataclass(frozen=True)
class _RankLayer:
    attention_norm: Float
    query_key_value: Float
    output: Float
    mlp_norm: Float
    gate_up: Float
    down: Float


class Model:
    """Rank ``rank`` of ``size`` of a model; ``size`` 1 is the whole.

    ``head_slice`` are the KV heads it holds; with more ranks than KV heads several hold the same one.
    ``all_reduce`` sums an array over the ranks, two times a layer. Raises ConfigError where ``size`` does
    not divide the heads.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, *, rank: int = 0, size: int = 1, all_reduce: AllReduce = one_rank
    ) -> None:
        self.config = config
        self.rank, self.size = rank, size
        self.head_slice = head_slice(config, rank, size)
        self._all_reduce = all_reduce
        self._weights = weights
        self._query_heads = config.query_heads // size
        self._kv_heads = self.head_slice.stop - self.head_slice.start
        self._layers = [_rank_layer(layer, config, rank, size, self.head_slice) for layer in weights.layers]
        half = config.head_dim // 2
        self._frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
        self._scale = np.float32(config.head_dim**-0.5)

    def cache(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        order: str = AXES,
        dtype: DTypeLike = np.float32,
        array: NDArray[np.floating] | None = None,
    ) -> PagedCache:
        """A cache of the right shape for this rank; arguments as :class:`PagedCache`."""
        return PagedCache(
            layers=self.config.layers,
            heads=self._kv_heads,
            head_dim=self.config.head_dim,
            blocks=blocks,
            block_size=block_size,
            order=order,
            dtype=dtype,
            array=array,
        )

    def prefill(
        self,
        cache: PagedCache,
        tokens: Sequence[int],
        table: BlockIds,
        *,
        start: int = 0,
        chunk: int | None = None,
        written: Callable[[int], object] | None = None,
    ) -> Float:
        """Compute the KV of ``tokens``, which stand at ``start`` on; returns the last one's logits (vocabulary,).

        KV of all tokens before ``start`` is in the cache. At most ``chunk`` tokens go through at a time.
        ``table`` holds the request's block ids from its first token on. ``written`` is called with the number of a
        layer once a chunk's KV of that layer is in the cache. Raises ConfigError for no tokens.
        """
        if not len(tokens):
            raise ConfigError("prefill of 0 tokens has no last token; pass at least one")
        ids = self._checked(tokens)
        size = chunk or len(ids)
        for first in range(0, len(ids), size):
            last = self._prefill_chunk(cache, ids[first : first + size], table, start + first, written)
        return self._logits(last)

    def decode(self, cache: PagedCache, batch: Sequence[DecodeInput]) -> Float:
        """One step for many sequences: stores each token's KV and returns logits (sequences, vocabulary).

        Every table needs a block for its position. Raises ConfigError for an empty batch.
        """
        if not batch:
            raise ConfigError("decode of 0 sequences has nothing to do; pass at least one")
        positions = np.array([entry.position for entry in batch])
        spots = [cache.slots(entry.table, entry.position, entry.position + 1) for entry in batch]
        blocks, offsets = (np.concatenate(part) for part in zip(*spots, strict=True))
        groups = [_Group.of(cache, batch, members) for members in _similar_lengths(positions)]

        def attend(layer: int, projected: Float) -> Float:
            query, key, value = self._split(projected, positions)
            cache.write(layer, blocks, offsets, key, value)
            mixed = np.empty((len(batch), self._query_heads * self.config.head_dim), np.float32)
            for group in groups:
                mixed[group.members] = self._attend_group(
                    query[group.members], group.read(cache, layer), group.unseen
                )
            return mixed

        return self._logits(self._run(self._checked([entry.token for entry in batch]), attend))

    def _prefill_chunk(
        self,
        cache: PagedCache,
        ids: NDArray[np.int64],
        table: BlockIds,
        start: int,
        written: Callable[[int], object] | None,
    ) -> Float:
        stop = start + len(ids)
        positions = np.arange(start, stop)
        blocks, offsets = cache.slots(table, start, stop)
        used = table[: blocks_for(stop, cache.block_size)]
        unseen = np.arange(stop) > positions[:, None]

        def attend(layer: int, projected: Float) -> Float:
            query, key, value = self._split(projected, positions)
            cache.write(layer, blocks, offsets, key, value)
            if written is not None:
                written(layer)
            return self._attend_causal(query, cache.read(layer, used)[:, :, :stop], unseen)

        last: Float = self._run(ids, attend)[-1]
        return last

    def _run(self, ids: NDArray[np.int64], attend: Attend) -> Float:
        """The layers over tokens (count, hidden); ``attend`` gets a layer's projections and mixes the values."""
        hidden = self._weights.embedding[ids]
        for index, layer in enumerate(self._layers):
            mixed = attend(index, _normed(hidden, layer.attention_norm) @ layer.query_key_value)
            hidden = hidden + self._all_reduce(mixed @ layer.output)
            gate, up = np.split(_normed(hidden, layer.mlp_norm) @ layer.gate_up, 2, axis=-1)
            hidden = hidden + self._all_reduce(_silu(gate) * up @ layer.down)
        return hidden

    def _logits(self, hidden: Float) -> Float:
        logits: Float = _normed(hidden, self._weights.final_norm) @ self._weights.unembedding
        return logits

    def _split(self, projected: Float, positions: NDArray[np.int64]) -> tuple[Float, Float, Float]:
        """Queries, keys and values, each (tokens, heads, head_dim), the first two rotated."""
        heads = projected.reshape(len(projected), -1, self.config.head_dim)
        turned = self._query_heads + self._kv_heads
        rotated = self._rotate(heads[:, :turned], positions)
        return rotated[:, : self._query_heads], rotated[:, self._query_heads :], heads[:, turned:]

    def _rotate(self, heads: Float, positions: NDArray[np.int64]) -> Float:
        angles = np.outer(positions, self._frequencies)
        cosine, sine = np.cos(angles).astype(np.float32)[:, None], np.sin(angles).astype(np.float32)[:, None]
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

    def _attend_causal(self, query: Float, cached: Float, unseen: NDArray[np.bool_]) -> Float:
        """Attention of one sequence: query (tokens, heads, C), cached (2, heads, seen, C)."""
        count, size = len(query), self.config.head_dim
        grouped = query.transpose(1, 0, 2).reshape(self._kv_heads, -1, size)
        scores = grouped @ cached[0].transpose(0, 2, 1)
        per_head = scores.reshape(self._query_heads, count, -1)
        mixed = _softmax(per_head, unseen, self._scale).reshape(scores.shape) @ cached[1]
        by_token: Float = mixed.reshape(self._query_heads, count, size).transpose(1, 0, 2)
        return by_token.reshape(count, -1)

    def _attend_group(self, query: Float, cached: Float, unseen: NDArray[np.bool_]) -> Float:
        """Attention of a batch of one token each: query (batch, heads, C), cached (2, heads, batch, seen, C)."""
        count = len(query)
        grouped = query.reshape(count, self._kv_heads, -1, self.config.head_dim).transpose(1, 0, 2, 3)
        scores = grouped @ cached[0].transpose(0, 1, 3, 2)
        mixed = _softmax(scores, unseen[:, None], self._scale) @ cached[1]
        by_token: Float = mixed.transpose(1, 0, 2, 3)
        return by_token.reshape(count, -1)

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.config.vocabulary:
            raise ConfigError(
                f"token ids {ids.min()}..{ids.max()} are outside the vocabulary; use 0..{self.config.vocabulary - 1}"
            )
        return ids


@dataclass(frozen=True)
class _Group:
    """Sequences of one decode step that are padded to one length, and what each must not see."""

    members: NDArray[np.int64]
    tables: BlockIds
    length: int
    unseen: NDArray[np.bool_]
    padding: tuple[NDArray[np.int64], NDArray[np.int64]]

    @classmethod
    def of(cls, cache: PagedCache, batch: Sequence[DecodeInput], members: NDArray[np.int64]) -> _Group:
        lengths = np.array([batch[index].position + 1 for index in members])
        length = int(lengths.max())
        width = blocks_for(length, cache.block_size)
        tables = np.empty((len(members), width), np.int32)
        for row, index in enumerate(members):
            used = batch[index].table[:width]
            tables[row, : len(used)] = used
            tables[row, len(used) :] = used[0]
        unseen = np.arange(length) >= lengths[:, None]
        rows, columns = np.nonzero(unseen)
        return cls(members, tables, length, unseen, (rows, columns))

    def read(self, cache: PagedCache, layer: int) -> Float:
        cached = cache.read(layer, self.tables)[:, :, :, : self.length]
        # A slot never written may hold anything, NaN too, and NaN times weight 0 is NaN.
        rows, columns = self.padding
        cached[:, :, rows, columns] = 0
        return cached


def _similar_lengths(positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split a batch, longest first, so that no sequence is padded to more than about twice its length."""
    order = np.argsort(-positions, kind="stable")
    groups: list[list[int]] = []
    longest = 0
    for index in order.tolist():
        if not groups or 2 * positions[index] + 32 < longest:
            groups.append([])
            longest = int(positions[index])
        groups[-1].append(index)
    return [np.array(group) for group in groups]


def head_slice(config: ModelConfig, rank: int, size: int) -> slice:
    """The KV heads of a rank, as a slice with start and stop. Raises ConfigError where ``size`` does not fit."""
    even = config.kv_heads % size == 0 or size % config.kv_heads == 0
    if not 0 <= rank < size or config.query_heads % size or config.intermediate % size or not even:
        raise ConfigError(
            f"rank {rank} of {size} cannot hold a share of {config.query_heads} query heads, {config.kv_heads} "
            f"KV heads and an MLP of {config.intermediate}; use a size that divides them and a rank below it"
        )
    start = rank * config.kv_heads // size
    return slice(start, start + max(1, config.kv_heads // size))


def _rank_layer(layer: LayerWeights, config: ModelConfig, rank: int, size: int, heads: slice) -> _RankLayer:
    queries = _share(config.query_heads * config.head_dim, rank, size)
    keys = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    inner = _share(config.intermediate, rank, size)
    return _RankLayer(
        attention_norm=layer.attention_norm,
        query_key_value=np.concatenate([layer.query[:, queries], layer.key[:, keys], layer.value[:, keys]], axis=1),
        output=layer.output[queries],
        mlp_norm=layer.mlp_norm,
        gate_up=np.concatenate([layer.gate[:, inner], layer.up[:, inner]], axis=1),
        down=layer.down[inner],
    )


def _share(whole: int, rank: int, size: int) -> slice:
    part = whole // size
    return slice(rank * part, (rank + 1) * part)


def _normed(hidden: Float, weight: Float) -> Float:
    mean_square = np.mean(hidden * hidden, axis=-1, keepdims=True, dtype=np.float32)
    normed: Float = hidden / np.sqrt(mean_square + NORM_EPSILON) * weight
    return normed


def _silu(array: Float) -> Float:
    # The usual x / (1 + exp(-x)) overflows for large negative x; tanh does not.
    activated: Float = np.float32(0.5) * array * (1 + np.tanh(np.float32(0.5) * array))
    return activated


def _softmax(scores: Float, unseen: NDArray[np.bool_], scale: np.float32) -> Float:
    """Softmax over the last axis, in place, with nothing for what is ``unseen``."""
    scores *= scale
    np.copyto(scores, -np.inf, where=unseen)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
