"""Seeded requests of mixed lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pushkv.errors import ConfigError

DEFAULT_SEED = 26
"""With it no token of the default workload leads by less than 0.02; other settings: see ``generate.settled``."""


@dataclass(frozen=True)
class Request:
    """One request: its prompt's token ids, and how many tokens to generate.

    ``draw`` counts how often its prompt was drawn anew (see :meth:`Workload.redrawn`).
    """

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    draw: int = 0

    @property
    def length(self) -> int:
        """How many tokens' KV the request has in the end; the last generated token has none."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass(frozen=True)
class Workload:
    """What to draw: ``count`` prompts of ``shortest`` to ``longest`` tokens, each answered with ``new_tokens``.

    Lengths are spread evenly in their logarithm, the shortest and the longest are always there.
    Raises ConfigError.
    """

    count: int = 16
    shortest: int = 12
    longest: int = 512
    new_tokens: int = 32
    vocabulary: int = 512
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        if self.count < 2 or not 1 <= self.shortest <= self.longest or self.new_tokens < 1 or self.vocabulary < 2:
            raise ConfigError(
                f"{self} draws nothing useful; ask for at least 2 requests, lengths with 1 <= shortest <= longest, "
                "and at least 1 new token"
            )

    def requests(self) -> tuple[Request, ...]:
        """The requests, the same in every process."""
        return tuple(
            Request(f"request-{index}", self._prompt(index, length, 0), self.new_tokens)
            for index, length in enumerate(self._lengths())
        )

    def redrawn(self, request: Request) -> Request:
        """The request with other tokens and the same name and length."""
        index = int(request.name.rpartition("-")[2])
        prompt = self._prompt(index, len(request.prompt), request.draw + 1)
        return Request(request.name, prompt, request.new_tokens, request.draw + 1)

    def _lengths(self) -> list[int]:
        random = np.random.default_rng(self.seed)
        middle = np.exp(random.uniform(np.log(self.shortest), np.log(self.longest + 1), self.count - 2)).astype(int)
        lengths = np.concatenate([[self.shortest, self.longest], np.minimum(middle, self.longest)])
        shuffled: list[int] = random.permutation(lengths).tolist()
        return shuffled

    def _prompt(self, index: int, length: int, draw: int) -> tuple[int, ...]:
        random = np.random.default_rng([self.seed, index, draw])
        return tuple(random.integers(0, self.vocabulary, length).tolist())
