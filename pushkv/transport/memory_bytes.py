"""Real bytes on the in-process network: what is under way, and how it lands.

Addresses are checked against registered regions before anything is copied, so that a wrong one is an
error and not a crash. Memory must stay allocated until its agent is closed or dead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.transport.base import WriteResult

U64 = NDArray[np.uint64]


@dataclass(eq=False)
class Station:
    """One agent on the network. ``life`` tells two agents of one name apart."""

    agent: str
    life: int
    regions: list[Region] = field(default_factory=list)
    inbox: list[tuple[str, bytes]] = field(default_factory=list)
    writes: dict[int, Write] = field(default_factory=dict)
    """Its WRITEs whose end it has not been told."""
    died: float | None = None
    closed: bool = False

    @property
    def receives(self) -> bool:
        """Whether bytes and notifications still reach it."""
        return self.died is None and not self.closed


@dataclass(eq=False)
class Copy:
    """A part of a WRITE's bytes, under way. ``held`` are the bytes themselves once their source may go."""

    write: Write
    source: U64
    target: U64
    length: U64
    held: list[bytes] | None = None
    corrupt: int | None = None
    """Which of its bytes lands as another."""

    @property
    def bytes(self) -> int:
        """How many bytes it carries."""
        return int(self.length.sum())

    def hold(self) -> None:
        """Copy the bytes out of memory whose owner is about to be gone, as a socket's buffer does."""
        if self.held is None:
            pairs = zip(self.source, self.length, strict=True)
            self.held = [ctypes.string_at(int(source), int(length)) for source, length in pairs]

    def land(self, regions: Sequence[Region]) -> int:
        """Copy the bytes to their target where it is registered; returns how many were."""
        inside = np.flatnonzero(covered(self.target, self.length, regions))
        for i in inside:
            source = int(self.source[i]) if self.held is None else self.held[i]
            ctypes.memmove(int(self.target[i]), source, int(self.length[i]))
        self._corrupt(inside)
        return int(self.length[inside].sum())

    def _corrupt(self, landed: NDArray[np.intp]) -> None:
        if self.corrupt is None:
            return
        ends = np.cumsum(self.length)
        i = int(np.searchsorted(ends, self.corrupt, side="right"))
        if i in landed:
            within = self.corrupt - int(ends[i]) + int(self.length[i])
            ctypes.c_ubyte.from_address(int(self.target[i]) + within).value ^= 1 << self.corrupt % 8


@dataclass(eq=False)
class Write:
    """A WRITE: done when all its copies landed and its initiator polled."""

    number: int
    source: Station
    target: Station
    notification: bytes
    copies: list[Copy] = field(default_factory=list)
    result: WriteResult | None = None

    def deal(self, source: U64, target: U64, length: U64, parts: int) -> None:
        """Deal the pieces into copies that land apart; a single piece is halved."""
        if len(length) == 1 and parts > 1 and length[0] > 1:
            source, target, length = _halved(source, target, length)
        parts = min(parts, len(length))
        self.copies = [Copy(self, source[i::parts], target[i::parts], length[i::parts]) for i in range(parts)]


def covered(address: U64, length: U64, regions: Sequence[Region]) -> NDArray[np.bool_]:
    """For each piece, whether it lies inside one of the regions."""
    inside = np.zeros(len(address), dtype=np.bool_)
    for region in regions:
        fits = length <= np.uint64(region.length)
        room = np.uint64(region.length) - np.where(fits, length, 0).astype(np.uint64)
        start = np.uint64(region.address)
        inside |= fits & (address >= start) & (address - start <= room)
    return inside


def _halved(source: U64, target: U64, length: U64) -> tuple[U64, U64, U64]:
    half = length[0] // np.uint64(2)
    both = np.array([half, length[0] - half], dtype=np.uint64)
    step = np.array([0, half], dtype=np.uint64)
    return source[0] + step, target[0] + step, both
