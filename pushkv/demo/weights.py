"""The size of the demo's model and its seeded weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pushkv.errors import ConfigError

Float = NDArray[np.float32]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder-only transformer with grouped queries.

    ``sharpness`` scales the queries so that attention picks few tokens: a KV block that is lost or
    swapped then changes what is generated. ``logit_scale`` is the spread of the logits; it keeps
    the two best ones far apart, compared with float32 rounding. Raises ConfigError.
    """

    vocabulary: int = 512
    hidden: int = 256
    layers: int = 6
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 768
    rope_base: float = 10_000.0
    sharpness: float = 3.0
    logit_scale: float = 8.0

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"{self.query_heads} query heads do not divide among {self.kv_heads} KV heads; use a multiple"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd and cannot be rotated in pairs; use an even one")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers, in order, as an engine would give them."""
        return tuple(f"model.layers.{index}.attn" for index in range(self.layers))


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``query``, ``key``, ``value``, ``gate`` and ``up`` are (hidden, out); the others (in, hidden)."""

    attention_norm: Float
    query: Float
    key: Float
    value: Float
    output: Float
    mlp_norm: Float
    gate: Float
    up: Float
    down: Float


@dataclass(frozen=True)
class Weights:
    """A whole model: ``embedding`` (vocabulary, hidden), ``unembedding`` (hidden, vocabulary)."""

    embedding: Float
    layers: tuple[LayerWeights, ...]
    final_norm: Float
    unembedding: Float

    @classmethod
    def seeded(cls, config: ModelConfig, seed: int = 0) -> Weights:
        """Random weights, the same for the same configuration and seed in every process."""
        draw = _Draw(seed)
        return cls(
            embedding=draw.matrix(config.vocabulary, config.hidden, 1.0),
            layers=tuple(_layer(config, draw) for _ in range(config.layers)),
            final_norm=draw.norm(config.hidden),
            unembedding=draw.matrix(config.hidden, config.vocabulary, config.logit_scale * config.hidden**-0.5),
        )


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, scale: float) -> Float:
        drawn: Float = self._random.standard_normal((rows, columns), dtype=np.float32)
        drawn *= np.float32(scale)
        return drawn

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> Float:
        return self.matrix(rows, columns, gain * rows**-0.5)

    def norm(self, size: int) -> Float:
        drawn: Float = 1 + np.float32(0.1) * self._random.standard_normal(size, dtype=np.float32)
        return drawn


def _layer(config: ModelConfig, draw: _Draw) -> LayerWeights:
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    return LayerWeights(
        attention_norm=draw.norm(config.hidden),
        query=draw.linear(config.hidden, queries, config.sharpness),
        key=draw.linear(config.hidden, keys),
        value=draw.linear(config.hidden, keys),
        output=draw.linear(queries, config.hidden),
        mlp_norm=draw.norm(config.hidden),
        gate=draw.linear(config.hidden, config.intermediate),
        up=draw.linear(config.hidden, config.intermediate),
        down=draw.linear(config.intermediate, config.hidden),
    )
