"""The ranks of one side, as processes that compute in step: sums of arrays, and what each of them has to tell.

Rank 0 sits in the middle of a star of pipes. That is no fast way to sum, but a simple one, and all ranks get
the same bits, so that they decide alike and no rank has to lead.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Pipe: TypeAlias = "Connection[Any, Any]"
Float = NDArray[np.float32]
T = TypeVar("T")


class Group:
    """One rank's place among the ``size`` ranks of its side.

    ``pipes`` lead to all other ranks in order (rank 0), or to rank 0 alone (any other). Every rank makes the same
    calls in the same order; where one of them is gone, they raise EOFError or OSError.
    """

    def __init__(self, rank: int, size: int, pipes: Sequence[Pipe] = ()) -> None:
        self.rank, self.size = rank, size
        self._pipes = tuple(pipes)

    def all_reduce(self, array: Float) -> Float:
        """The sum of all ranks' arrays, which are of one shape; summed in the order of ranks."""
        if self.size == 1:
            return array
        mine = np.ascontiguousarray(array)
        if self.rank:
            self._pipes[0].send_bytes(mine.data)
            total: Float = np.frombuffer(self._pipes[0].recv_bytes(), np.float32).reshape(array.shape)
            return total
        total = mine.copy()
        for pipe in self._pipes:
            total += np.frombuffer(pipe.recv_bytes(), np.float32).reshape(array.shape)
        for pipe in self._pipes:
            pipe.send_bytes(total.data)
        return total

    def all_gather(self, mine: T) -> list[T]:
        """What every rank passed, in the order of ranks."""
        if self.size == 1:
            return [mine]
        if self.rank:
            self._pipes[0].send(mine)
            gathered: list[T] = self._pipes[0].recv()
            return gathered
        everyone = [mine, *(pipe.recv() for pipe in self._pipes)]
        for pipe in self._pipes:
            pipe.send(everyone)
        return everyone


def star(context: SpawnContext, size: int) -> list[list[Pipe]]:
    """The pipes of a group of ``size`` ranks, one list a rank as :class:`Group` takes it."""
    pairs = [context.Pipe() for _ in range(1, size)]
    return [[center for center, _ in pairs], *([ray] for _, ray in pairs)]
