"""A data mover for fake devices whose memory is host memory under other addresses.

The push path runs on it as on the real device: regions, descriptors and messages have the device's addresses and
memory type, and only below, where bytes are moved, do they become addresses of the host. Each side tells
the other, with its metadata, where its device memory really is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.errors import TransportError
from pushkv.transport.base import Addresses, Host, Lattice, Pieces, Proof, Transport, WriteResult

Resolve = Callable[[Region], int]
"""The host address of a device region. Raises TransportError as a data mover does that cannot register it."""


class Backing(msgspec.Struct, frozen=True):
    """Device addresses ``[start, stop)`` are host addresses from ``host`` on."""

    start: int
    stop: int
    host: int


class _Metadata(msgspec.Struct, frozen=True):
    backing: list[Backing]
    inner: bytes


class HostBackedTransport(Transport):
    """``inner`` moves the bytes; ``resolve`` tells where a device region lies in host memory."""

    def __init__(self, inner: Transport, resolve: Resolve) -> None:
        self.name = inner.name
        self.agent = inner.agent
        self._inner = inner
        self._resolve = resolve
        self._backing: list[Backing] = []
        self._peers: dict[str, list[Backing]] = {}

    def claim(self) -> None:
        """Make the calling thread the owner."""
        self._inner.claim()

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory, device memory by its host memory."""
        self._inner.register([self._host_region(region) for region in regions])

    def _host_region(self, region: Region) -> Region:
        if region.memory != "VRAM":
            return region
        if region.length <= 0 or region.address <= 0:
            raise TransportError(f"{region} holds no memory; register the cache after it is allocated.")
        host = self._resolve(region)
        self._backing.append(Backing(region.address, region.stop, host))
        return Region(host, region.length)

    def metadata(self) -> bytes:
        """The inner metadata with where our device memory is."""
        return msgspec.msgpack.encode(_Metadata(self._backing, self._inner.metadata()))

    def add_peer(self, metadata: bytes, host: Host | None) -> str:
        """Load a peer's metadata."""
        try:
            told = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"A peer's metadata cannot be read ({error}); use the same data mover there."
            ) from error
        peer = self._inner.add_peer(told.inner, host)
        self._peers[peer] = told.backing
        return peer

    def remove_peer(self, peer: str) -> None:
        """Forget a peer."""
        self._peers.pop(peer, None)
        self._inner.remove_peer(peer)

    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification."""
        self._inner.send(peer, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """Take the notifications that came."""
        return self._inner.receive()

    def prepare(self, peer: str, source: Lattice, target: Lattice) -> int:
        """Prepare both lists over host memory."""
        ours, theirs = self._lattice(source, self._backing), self._lattice(target, self._peers.get(peer, []))
        return self._inner.prepare(peer, ours, theirs)

    def write_indexed(
        self, prepared: int, source: NDArray[np.int32], target: NDArray[np.int32], notification: bytes
    ) -> int:
        """WRITE pieces by index."""
        return self._inner.write_indexed(prepared, source, target, notification)

    def write(self, peer: str, source: Pieces, target: Pieces, notification: bytes) -> int:
        """WRITE arbitrary pieces."""
        ours, theirs = self._pieces(source, self._backing), self._pieces(target, self._peers.get(peer, []))
        return self._inner.write(peer, ours, theirs, notification)

    @staticmethod
    def _lattice(lattice: Lattice, backing: Sequence[Backing]) -> Lattice:
        if lattice.memory != "VRAM":
            return lattice
        return replace(lattice, address=in_host_memory(lattice.address, backing), device=0, memory="DRAM")

    @staticmethod
    def _pieces(pieces: Pieces, backing: Sequence[Backing]) -> Pieces:
        if pieces.memory != "VRAM":
            return pieces
        return replace(pieces, address=in_host_memory(pieces.address, backing), device=0, memory="DRAM")

    def poll(self) -> list[WriteResult]:
        """Advance what is in flight."""
        return self._inner.poll()

    def descriptors(self, write: int) -> int | None:
        """Descriptors after merging."""
        return self._inner.descriptors(write)

    def writes_ended(self, peer: str) -> Proof:
        """By the inner transport's evidence: it alone moves bytes."""
        return self._inner.writes_ended(peer)

    def path(self, peer: str) -> str:
        """The inner path, and that the device is none."""
        return f"a fake device's host memory by {self._inner.path(peer)}"

    def close(self) -> None:
        """Release everything."""
        self._inner.close()


def in_host_memory(address: Addresses, backing: Sequence[Backing]) -> Addresses:
    """Host addresses for device addresses. Raises TransportError for an address that is not registered."""
    if not len(address):
        return address
    table = np.array(sorted((one.start, one.stop, one.host) for one in backing), np.uint64).reshape(-1, 3)
    row = np.searchsorted(table[:, 0], address, side="right") - 1
    bad = (row < 0) | (address > table[row, 1]) if len(table) else np.ones(len(address), bool)
    if bad.any():
        raise TransportError(
            f"Device address {int(address[bad][0]):#x} is not registered; register its region first."
        )
    return np.asarray(address - table[row, 0] + table[row, 2], np.uint64)
