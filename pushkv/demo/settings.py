"""What a run of the demo is: the model, the requests, and how each side keeps its cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from pushkv.demo.model import head_slice
from pushkv.demo.paged import AXES, blocks_for
from pushkv.demo.weights import ModelConfig
from pushkv.demo.workload import Request, Workload
from pushkv.errors import ConfigError

ORDERS = {"block-outer": "BLSNHC", "HND": AXES, "NHD": "LSBNHC"}
"""Names of axis orders, outermost axis first; any other order of the same letters does too."""


class Side(Enum):
    """The two halves of the system."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Layout:
    """How one side keeps its KV: ranks (``tp``), tokens a block, and the order of axes, by name or by letters.

    Raises ConfigError.
    """

    tp: int = 1
    block_size: int = 16
    order: str = "block-outer"

    def __post_init__(self) -> None:
        if self.tp < 1 or self.block_size < 1:
            raise ConfigError(f"{self.tp} ranks with blocks of {self.block_size} tokens hold nothing; use at least 1")
        if sorted(self.axes) != sorted(AXES):
            known = ", ".join(ORDERS)
            raise ConfigError(f"axis order {self.order!r} is not known; use {known}, or an order of {AXES}")

    @property
    def axes(self) -> str:
        """The order of axes in letters."""
        return ORDERS.get(self.order, self.order)


@dataclass(frozen=True)
class DemoSettings:
    """A run. Prefill computes ``chunk`` tokens at a time and stages each chunk; ``weights_seed`` draws the model.

    ``landing`` is both sides', as in their :class:`pushkv.EndpointConfig`; ``stream`` prefill's: with ``layer`` it
    stages a chunk layer by layer. (A chunk here is less than ``auto`` lets go early.)

    Raises ConfigError where a side's ranks cannot share the model out.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    workload: Workload = field(default_factory=Workload)
    prefill: Layout = field(default_factory=Layout)
    decode: Layout = field(default_factory=Layout)
    chunk: int = 128
    weights_seed: int = 0
    raw_repeats: int = 20
    limit: float = 120.0
    landing: Literal["direct", "landing", "auto"] = "direct"
    stream: Literal["auto", "request", "chunk", "layer"] = "chunk"

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ConfigError(f"a chunk of {self.chunk} tokens computes nothing; use at least 1")
        if self.workload.vocabulary > self.model.vocabulary:
            raise ConfigError(f"prompts of {self.workload.vocabulary} words need a model that knows as many")
        for layout in (self.prefill, self.decode):
            head_slice(self.model, 0, layout.tp)

    def layout(self, side: Side) -> Layout:
        """A side's layout."""
        return self.prefill if side is Side.PREFILL else self.decode

    def blocks(self, side: Side, requests: tuple[Request, ...]) -> int:
        """A side's pool: decode holds all requests at once, prefill half of them, so that blocks must return."""
        size = self.layout(side).block_size
        if side is Side.DECODE:
            return sum(blocks_for(request.length, size) for request in requests)
        prompts = [blocks_for(len(request.prompt), size) for request in requests]
        return max(max(prompts), sum(prompts) // 2)


@dataclass(frozen=True)
class RankSpec:
    """What one process is."""

    settings: DemoSettings
    side: Side
    rank: int
    blocks: int

    @property
    def layout(self) -> Layout:
        """Its side's layout."""
        return self.settings.layout(self.side)

    @property
    def name(self) -> str:
        """How people call it."""
        return f"{self.side.value} rank {self.rank}" if self.layout.tp > 1 else self.side.value
