"""What ``pushkv bench serve`` serves, and how its two engines are built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np

from pushkv.errors import ConfigError


class Mode(Enum):
    """How the KV cache crosses from prefill to decode."""

    NONE = "none"
    """Not at all: decode starts as soon as prefill is done. What TPOT is held against."""
    PULL = "pull"
    """After prefill decode READs, posted and polled on its engine's thread, as stock connectors do it."""
    PULL_DEFAULT = "pull-default"
    """The same with the agent of NIXL's Python API: a progress thread without pause, four workers."""
    PUSH = "push"
    """PushKV: decode offers as the request comes in, prefill pushes once the whole prompt is computed."""
    STREAM = "stream"
    """PushKV: what each chunk of the prompt has computed is pushed while the next one is."""


@dataclass(frozen=True)
class ServeSettings:
    """``requests`` of a cell, a length and a rate, are what comes in ``seconds``, at least ``fewest``.

    A prefill step computes up to ``chunk`` tokens of one prompt at ``prefill_us`` microseconds each, a decode step
    takes ``decode_ms`` and gives every running request a token. Of a step ``held`` is computed in Python, with the
    GIL; the rest waits without it, as for a device. KV is ``token_bytes`` a token, in blocks of ``block`` tokens that
    are handed out scattered, with room for ``room`` of the longest prompts on either side. One of ``regions`` is a
    cache with blocks outermost; with more each layer is a region, and a block as many pieces. ``landing`` is the way
    that pushes take (:class:`pushkv.EndpointConfig`).
    """

    lengths: tuple[int, ...] = (1024, 4096, 16384)
    rates: tuple[float, ...] = (1, 2, 4, 8)
    modes: tuple[Mode, ...] = (Mode.NONE, Mode.PULL, Mode.PUSH, Mode.STREAM)
    seconds: float = 8.0
    fewest: int = 8
    new_tokens: int = 32
    prefill_us: float = 5.0
    chunk: int = 2048
    decode_ms: float = 10.0
    held: float = 0.5
    token_bytes: int = 4096
    regions: int = 1
    landing: Literal["direct", "landing", "auto"] = "direct"
    block: int = 16
    room: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("lengths", "rates", "modes", "seconds", "fewest", "prefill_us", "chunk", "decode_ms",
                     "regions", "block", "room"):  # fmt: skip
            value = getattr(self, name)
            least = min(value, default=0) if isinstance(value, tuple) and name != "modes" else value
            if not least or (name != "modes" and least <= 0):
                raise ConfigError(f"{name} is {value}; give at least one, above 0.")
        if self.new_tokens < 2:
            raise ConfigError(f"new_tokens is {self.new_tokens}; give 2 or more, as TPOT is the time between them.")
        if self.landing not in ("direct", "landing", "auto"):
            raise ConfigError(f"landing is {self.landing!r}; choose 'direct', 'landing' or 'auto'.")
        if not 0 <= self.held <= 1:
            raise ConfigError(f"held is {self.held}; give the share of a step that holds the GIL, 0 to 1.")
        if self.token_bytes % (8 * self.regions) or self.token_bytes <= 0:
            raise ConfigError(
                f"token_bytes is {self.token_bytes}; give a multiple of 8 times {self.regions} regions."
            )

    @property
    def blocks(self) -> int:
        """How many blocks either side has."""
        return self.room * -(-max(self.lengths) // self.block)

    @property
    def piece(self) -> int:
        """Bytes of a block in one region."""
        return self.block * self.token_bytes // self.regions

    def count(self, rate: float) -> int:
        """How many requests a cell has."""
        return max(self.fewest, round(rate * self.seconds))

    def arrivals(self, length: int, rate: float) -> list[float]:
        """When they come, in seconds from the start: gaps drawn from an exponential distribution, the same ones in
        every mode."""
        generator = np.random.default_rng([self.seed, length, round(rate * 1000)])
        gaps = generator.exponential(1 / rate, self.count(rate))
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]


@dataclass(frozen=True)
class Request:
    """One request; ``arrived`` on the clock that the processes share (``time.monotonic``)."""

    number: int
    tokens: int
    arrived: float

    @property
    def name(self) -> str:
        """Its transfer id."""
        return f"r{self.number}"

    @property
    def digest(self) -> bytes:
        """What stands for its prompt's digest."""
        return self.number.to_bytes(32, "big")


@dataclass(frozen=True)
class Prefilled:
    """A prompt is computed, into these blocks."""

    request: Request
    blocks: tuple[int, ...]
    began: float
    ended: float


@dataclass(frozen=True)
class Served:
    """A request has all of its tokens; when it had the first and the last one, and when its KV was there."""

    request: Request
    loaded: float
    first: float
    last: float
    tokens: int
