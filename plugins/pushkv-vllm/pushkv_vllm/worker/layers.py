"""Which layers of a step are queued, as numbers of first layers of each cache group, told every few layers."""

from __future__ import annotations

from pushkv.core.geometry import Geometry

TIMES = 8
"""How often a step tells of layers: a call costs the engine's thread microseconds for each prompt."""


class Layers:
    """Counts the layers of a cache, named in any order: one counts once all before it are there.

    Of steps whose KV is less than ``least`` bytes it tells nothing. It tells of as many layers at once as fit a slot
    of ``slot`` bytes, where that is not all of them TIMES over: a part more costs both sides half a millisecond.
    """

    def __init__(self, geometry: Geometry, least: int = 0, slot: int = 0) -> None:
        self._token = max(1, sum(group.token_bytes for group in geometry.groups))
        self._least, self._slot = -(-least // self._token), slot
        self._tells = True
        self._groups = [[_engines(layer.name) for layer in group.layers] for group in geometry.groups]
        self._names = {name for group in self._groups for name in group}
        self._every = self._share = -(-len(self._names) // TIMES)
        self._seen: set[str] = set()

    def begin(self, tokens: int) -> None:
        """A step begins that computes so many tokens."""
        self._seen.clear()
        self._tells = tokens >= self._least
        fit = self._slot * len(self._names) // max(1, tokens * self._token)
        self._every = min(self._share, fit) or self._share

    def queued(self, name: str) -> tuple[int, ...] | None:
        """A layer is queued; how many first layers of each group are, where it is time to tell. Not of the last ones:
        the step's end tells of all."""
        if not self._tells or name in self._seen or name not in self._names:
            return None
        self._seen.add(name)
        if len(self._seen) % self._every or len(self._seen) == len(self._names):
            return None
        return tuple(self._first(group) for group in self._groups)

    def _first(self, group: list[str]) -> int:
        for number, name in enumerate(group):
            if name not in self._seen:
                return number
        return len(group)


def _engines(name: str) -> str:
    """A layer's name as the engine has it: keys and values that are groups of their own have names of their own."""
    return name.removesuffix("/k").removesuffix("/v")
