"""Registered memory, described as data."""

from __future__ import annotations

from typing import Literal

import msgspec

MemoryType = Literal["DRAM", "VRAM"]


class Region(msgspec.Struct, frozen=True):
    """A span of memory that a transport registers and a peer may WRITE into.

    ``address`` and ``length`` are in bytes, ``device`` is the device ordinal (0 for host memory)
    and ``memory`` is NIXL's memory type.
    """

    address: int
    length: int
    device: int = 0
    memory: MemoryType = "DRAM"

    @property
    def stop(self) -> int:
        """The first address past the region."""
        return self.address + self.length
