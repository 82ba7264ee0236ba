"""Who has which blocks of a cache, and canaries in those that nobody has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pushkv.testing.broken import Broken, Rule
from pushkv.testing.patterns import HOLE, Bytes, canary


class Ledger:
    """The blocks of one cache, of which ``axis`` counts the blocks. The last given back is taken first."""

    def __init__(self, name: str, array: Bytes, axis: int) -> None:
        self.name = name
        self.blocks: Bytes = np.moveaxis(array, axis, 0)
        count = len(self.blocks)
        self.owner: list[object | None] = [None] * count
        self._free = list(range(count))
        self._generation = [0] * count
        self.blocks[:] = canary(0)

    def __len__(self) -> int:
        return len(self.owner)

    @property
    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    def take(self, count: int, owner: object) -> list[int] | None:
        """Hand blocks out, full of holes; None where there are too few. Raises Broken where one was touched."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._check(block)
            self.owner[block] = owner
        self.blocks[taken] = HOLE
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Take blocks back, and fill them with canaries at once."""
        for block in blocks:
            if self.owner[block] is None:
                raise Broken(Rule.ONCE, f"block {block} of {self.name} is given back twice")
            self.owner[block] = None
            self._generation[block] += 1
            self.blocks[block] = canary(self._generation[block])
            self._free.append(block)

    def check(self) -> None:
        """Look at every block that nobody has. Raises Broken."""
        for block in self._free:
            self._check(block)

    def owned(self) -> list[object]:
        """Who has blocks, each once."""
        return list({id(owner): owner for owner in self.owner if owner is not None}.values())

    def _check(self, block: int) -> None:
        expected = canary(self._generation[block])
        if not (self.blocks[block] == expected).all():
            found = sorted(set(np.unique(self.blocks[block]).tolist()) - {expected})
            raise Broken(Rule.CANARY, f"block {block} of {self.name} holds {found[:4]} and should hold {expected}")
