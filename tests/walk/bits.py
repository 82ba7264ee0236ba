"""Sets as bit masks."""

from __future__ import annotations

from typing import Any


class Bits:
    """Things by bit number."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._bits: dict[Any, int] = {}

    def of(self, thing: Any) -> int:
        """The mask with this thing's bit."""
        known = self._bits.get(thing)
        return self.add(thing) if known is None else known

    def add(self, thing: Any) -> int:
        """Give a new thing the next bit."""
        bit = self._bits[thing] = 1 << len(self.things)
        self.things.append(thing)
        return bit

    def each(self, mask: int) -> list[tuple[int, Any]]:
        """The things in a mask, each with its bit."""
        found = []
        while mask:
            bit = mask & -mask
            found.append((bit, self.things[bit.bit_length() - 1]))
            mask ^= bit
        return found

    def where(self, mask: int, wanted: Any) -> int:
        """The mask of those for which ``wanted`` holds."""
        return sum(bit for bit, thing in self.each(mask) if wanted(thing))
