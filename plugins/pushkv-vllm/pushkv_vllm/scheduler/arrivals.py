"""Loads that all ranks have told of before a step's output does (see :mod:`pushkv_vllm.wake`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count


class Arrivals:
    """Every load is reported to the engine once: early where all ``ranks`` have told of it, else by a step's output.

    A load has a number of its own, so that late news of one is never taken for another of the same request id.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._numbers = count(1)
        self._requests: dict[int, str] = {}
        self._loads: dict[str, int] = {}
        self._told: dict[str, set[int]] = {}
        self._early: set[str] = set()

    def expect(self, request: str) -> int:
        """A load begins; its number."""
        number = self._loads[request] = next(self._numbers)
        self._requests[number] = request
        self._told[request] = set()
        return number

    @property
    def expected(self) -> bool:
        """Whether there is a load that no rank's news, or no output, has told of."""
        return bool(self._requests)

    def tell(self, rank: int, load: int) -> None:
        """A rank's load has ended well. What is not expected any more is nothing."""
        request = self._requests.get(load)
        if request is not None and rank < self._ranks:
            self._told[request].add(rank)

    def received(self, reported: Iterable[str]) -> set[str]:
        """Which loads the engine is to hear of, where a step's output has ``reported`` some."""
        reported = set(reported)
        news = reported - self._early
        self._early -= reported
        for request in reported:
            self._forget(request)
        early = {request for request, ranks in self._told.items() if len(ranks) == self._ranks}
        for request in early:
            self._forget(request)
        self._early |= early
        return news | early

    def _forget(self, request: str) -> None:
        self._told.pop(request, None)
        self._requests.pop(self._loads.pop(request, 0), None)
