"""Blocks that the engine must not hand out: references of our own, next to those of the requests.

vLLM frees a request's blocks when it is preempted, aborted or its load has failed. A WRITE that reads or fills them
may still be under way then, so that everything a WRITE may touch is held here until there is proof that none does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Pins:
    """References to blocks of the engine's pool, by whoever holds them. The null block is never held."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._held: dict[object, dict[int, Any]] = {}

    def bind(self, pool: Any) -> None:
        """Take the engine's block pool."""
        self._pool = pool

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __contains__(self, holder: object) -> bool:
        return holder in self._held

    def hold(self, holder: object, ids: Iterable[int]) -> None:
        """Hold these blocks too for ``holder``; those that it holds already are held once."""
        held = self._held.setdefault(holder, {})
        blocks = [self._pool.blocks[number] for number in dict.fromkeys(ids) if number not in held]
        fresh = [block for block in blocks if not block.is_null]
        self._pool.touch(fresh)
        held.update({block.block_id: block for block in fresh})

    def pass_on(self, holder: object, heir: object) -> None:
        """Have ``heir`` hold what ``holder`` held."""
        held = self._held.pop(holder, {})
        assert heir not in self._held
        if held:
            self._held[heir] = held

    def let_go(self, holder: object) -> None:
        """Give back everything that ``holder`` holds, the last blocks first, as the engine does."""
        held = self._held.pop(holder, {})
        if held:
            self._pool.free_blocks(list(held.values())[::-1])
