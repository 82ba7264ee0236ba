"""What the two engines have in common: steps that hold the GIL for a while, blocks, a cache with bytes to check."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pushkv.bench.workload import Request, ServeSettings
from pushkv.cache import KVCache
from pushkv.errors import BenchError

LOOPS = 200
"""Between two looks at the clock, about 5 µs."""


def step(seconds: float, held: float) -> None:
    """An engine's step: ``held`` of it computes in Python with the GIL, the rest waits without.

    What is computed is an amount of work, this thread's CPU time: whatever takes the core or the GIL away meanwhile
    makes the step longer, as it does an engine's.
    """
    until = time.thread_time() + seconds * held
    while time.thread_time() < until:
        for _ in range(LOOPS):
            pass
    time.sleep(seconds * (1 - held))


class Blocks:
    """The blocks of a cache that are free, in the scattered order that a busy engine's come to have."""

    def __init__(self, count: int, seed: int) -> None:
        self._free = deque(int(block) for block in np.random.default_rng(seed).permutation(count))

    def take(self, count: int) -> tuple[int, ...] | None:
        """So many of them; None where there are not as many."""
        if count > len(self._free):
            return None
        return tuple(self._free.popleft() for _ in range(count))

    def give(self, blocks: Sequence[int]) -> None:
        """They are free again."""
        self._free.extend(blocks)


class Memory:
    """A rank's KV in ``regions`` layers of (block, token, bytes); each block is stamped with whose it is."""

    def __init__(self, settings: ServeSettings) -> None:
        width = settings.token_bytes // settings.regions
        self.arrays = [np.zeros((settings.blocks, settings.block, width), np.uint8) for _ in range(settings.regions)]
        self._ends = [array.reshape(settings.blocks, -1).view(np.int64) for array in self.arrays]
        for array in self.arrays:
            array[:] = 1  # every page is there before anything is timed

    @property
    def cache(self) -> KVCache:
        """As PushKV is told of it."""
        named = {f"layer.{number}": array for number, array in enumerate(self.arrays)}
        return KVCache.of(named, "BNC", heads=1, bench="serve")

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Its regions as addresses and bytes."""
        return [(array.ctypes.data, array.nbytes) for array in self.arrays]

    def stamp(self, request: Request, blocks: Sequence[int], first: int = 0) -> None:
        """Write the first and last bytes of a prompt's blocks from number ``first`` on."""
        ids, values = list(blocks), self._values(request, len(blocks), first)
        for number, ends in enumerate(self._ends):
            ends[ids, 0] = ends[ids, -1] = values + number

    def check(self, request: Request, blocks: Sequence[int]) -> None:
        """Raise BenchError where a block does not have what was stamped at the other side."""
        ids, values = list(blocks), self._values(request, len(blocks), 0)
        for number, ends in enumerate(self._ends):
            if (ends[ids, 0] != values + number).any() or (ends[ids, -1] != values + number).any():
                raise BenchError(f"{request.name} has KV that is not its own in layer {number}.")

    @staticmethod
    def _values(request: Request, count: int, first: int) -> NDArray[np.int64]:
        return (np.arange(first, first + count, dtype=np.int64) << 32) + request.number * 64
