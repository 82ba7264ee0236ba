"""A cache in memory that the test shares with the child, so that it is seen whatever becomes of the child."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.actors import BLOCK

BLOCKS = 136
"""Blocks of 1 MiB, one token each."""
CANARY = 255
"""What an untouched block of a consumer holds; no producer's block holds it."""


def contents(first: int, count: int) -> NDArray[np.uint8]:
    """The byte that each of a producer's blocks is filled with."""
    return (1 + np.arange(first, first + count) % 250).astype(np.uint8)


@dataclass(frozen=True)
class Blocks:
    """One layer of blocks behind a path that any process can open; ``array`` has the axes L, B, N, C."""

    path: str

    @classmethod
    def make(cls, *, filled: bool) -> Blocks:
        """Fresh memory, filled as a producer's or painted with the canary as a consumer's."""
        descriptor = os.memfd_create("blocks")
        os.ftruncate(descriptor, BLOCKS * BLOCK)
        made = cls(f"/proc/{os.getpid()}/fd/{descriptor}")
        made.array[:] = contents(0, BLOCKS)[None, :, None, None] if filled else CANARY
        return made

    def free(self) -> None:
        """Give the descriptor back; whoever has the memory open keeps it."""
        os.close(int(self.path.rpartition("/")[2]))

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory, mapped anew."""
        return np.asarray(np.memmap(self.path, np.uint8, "r+", shape=(1, BLOCKS, 1, BLOCK)))

    def touched(self) -> set[int]:
        """The blocks that hold a byte other than the canary."""
        rows = self.array[0, :, 0, :]
        return {block for block in range(BLOCKS) if (rows[block] != CANARY).any()}

    def paint(self, first: int, count: int) -> None:
        """Put the canary into blocks."""
        self.array[0, first : first + count] = CANARY

    def hold_what_came(self, first: int, count: int, source: int) -> bool:
        """Whether a front part of the blocks, not none, holds what the producer's blocks do, and the rest nothing."""
        came = self.touched()
        return (
            0 < len(came) <= count
            and came == set(range(first, first + len(came)))
            and self.hold(first, len(came), source)
        )

    def hold(self, first: int, count: int, source: int) -> bool:
        """Whether blocks hold, to the last byte, what the producer's blocks from ``source`` on do."""
        rows = self.array[0, first : first + count, 0, :]
        return bool((rows == contents(source, count)[:, None]).all())
