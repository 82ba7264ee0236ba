"""A digest of memory, worked out a little at a time, so that no thread is away for long.

It is CRC-32 (zlib's): the fastest that the standard library has, and enough against corruption. Against somebody who
wants to deceive it is nothing: who may WRITE is a matter of the handshake.
"""

from __future__ import annotations

import time
import zlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.answers import asked
from pushkv.cache import KVCache
from pushkv.core.runs import Runs
from pushkv.errors import BackendError

CHUNK = 1 << 20
"""Bytes that are read and hashed at once: about a millisecond's work for a processor core."""


class Readable(Protocol):
    """Memory that can be read back: a cache's, or slots."""

    def read(self, runs: Runs) -> NDArray[np.uint8]:
        """The bytes of the runs, one after the other, until the next call. Raises BackendError."""


class Reader:
    """Reads a cache's memory back, up to CHUNK bytes at a time; on one thread.

    Raises BackendError where the cache's backend cannot.
    """

    def __init__(self, cache: KVCache) -> None:
        self._backend = cache.backend
        try:
            backend, device = cache.backend, cache.regions[0].device
            self._packer = asked(backend, "cannot make a packer", lambda: backend.packer(cache.regions, cache.arrays))
            self._slot = asked(backend, "cannot allocate a slot", lambda: backend.allocate(CHUNK, device))
        except BackendError as error:
            raise BackendError(
                f"verify='checksum' reads memory back, which cannot be done here; leave it at 'off' ({error})"
            ) from error

    def read(self, runs: Runs) -> NDArray[np.uint8]:
        """The bytes of the runs, one after the other, until the next call. Raises BackendError."""
        self._packer.gather(runs, self._slot).wait()
        return self._backend.to_host(self._slot[: runs.bytes])


class Digest:
    """The CRC-32 of stretches of memory, in their order.

    The bytes are those that are there when :meth:`work` comes to them. Everything is called on one thread.
    """

    def __init__(self, reader: Readable, runs: Runs) -> None:
        self._reader = reader
        self._runs = runs
        self._ends = np.cumsum(runs.length)
        self._at = 0
        self._crc = 0
        self.bytes = int(self._ends[-1]) if self._ends.size else 0

    @property
    def done(self) -> bool:
        """Whether all bytes have been taken in."""
        return self._at >= self.bytes

    @property
    def value(self) -> bytes:
        """The digest of what has been taken in, 4 bytes."""
        return self._crc.to_bytes(4, "big")

    def work(self, seconds: float) -> bool:
        """Go on for about as long, and for one chunk at least; whether it is done. Raises BackendError."""
        stop = time.perf_counter() + seconds
        while not self.done:
            self._take_in(min(self._at + CHUNK, self.bytes))
            if time.perf_counter() >= stop:
                break
        return self.done

    def _take_in(self, stop: int) -> None:
        first = int(np.searchsorted(self._ends, self._at, side="right"))
        past = int(np.searchsorted(self._ends, stop, side="left")) + 1
        runs = self._runs
        region, offset, length = (column[first:past] for column in (runs.region, runs.offset, runs.length))
        starts = self._ends[first:past] - length
        skipped = np.maximum(self._at - starts, 0)
        length = np.minimum(stop - starts, length) - skipped
        self._crc = zlib.crc32(self._reader.read(Runs(region, offset + skipped, length)).data, self._crc)
        self._at = stop
