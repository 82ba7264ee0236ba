"""The in-process data mover: real bytes, a virtual clock, every fault; for tests and for trying things out.

It obeys the same contract as the real one (``pushkv.testing.transport_contract``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.errors import TransportError
from pushkv.transport import lists
from pushkv.transport.base import Host, Lattice, Pieces, Proof, Transport, WriteResult
from pushkv.transport.memory_bytes import U64, Station, covered
from pushkv.transport.memory_faults import Faults, OnDeath
from pushkv.transport.memory_network import Network
from pushkv.transport.owner import Owner

__all__ = ["Faults", "MemoryTransport", "Network", "OnDeath"]


class _Metadata(msgspec.Struct, frozen=True):
    """What a peer loads: the name, which life of it, and the memory it may WRITE into."""

    agent: str
    life: int
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class _Peer:
    station: Station
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class _Prepared:
    peer: str
    source: U64
    target: U64
    size: int


class MemoryTransport(Transport):
    """One agent on a :class:`Network`. Registered memory must stay allocated until it is closed."""

    name = "memory"

    def __init__(self, network: Network, agent: str) -> None:
        """Join the network. Raises TransportError where the name is taken."""
        self.agent = agent
        self._network = network
        self._owner = Owner(agent)
        self._station = network.join(agent)
        self._peers: dict[str, _Peer] = {}
        self._prepared: dict[int, _Prepared] = {}
        self._counts = lists.DescriptorCounts()
        self._next = 0

    def claim(self) -> None:
        """Make the calling thread the owner."""
        self._owner.claim()

    def _owned(self) -> None:
        if self._station.closed:
            raise TransportError(f"Agent {self.agent} is closed; make another one.")
        if self._station.died is not None:
            raise TransportError(f"Agent {self.agent} died on this network; make another one.")
        self._owner.check()

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory; may be called again, after which peers need the new metadata."""
        self._owned()
        for region in regions:
            if region.length <= 0 or region.address <= 0 or region.memory != "DRAM":
                raise TransportError(f"{region} is no host memory; register the cache after it is allocated.")
            self._station.regions.append(region)

    def metadata(self) -> bytes:
        """What a peer's :meth:`add_peer` needs, as of the last :meth:`register`; from any thread."""
        station = self._station
        return msgspec.msgpack.encode(_Metadata(self.agent, station.life, tuple(station.regions)))

    def add_peer(self, metadata: bytes, host: Host | None) -> str:
        """Load a peer's metadata; idempotent for one life of it."""
        self._owned()
        try:
            loaded = msgspec.msgpack.decode(metadata, type=_Metadata)
        except msgspec.MsgspecError as error:
            raise TransportError(f"{len(metadata)} bytes are no metadata of this transport ({error}).") from error
        known = self._peers.get(loaded.agent)
        if known is not None and known.station.life != loaded.life:
            raise TransportError(f"Peer {loaded.agent} is another life of a known one; remove the peer first.")
        station = self._network.station(loaded.agent, loaded.life)
        self._peers[loaded.agent] = _Peer(station, loaded.regions)
        return loaded.agent

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. WRITEs in flight end as FAILED and their bytes go on: this is no fence."""
        self._owned()
        known = self._peers.pop(peer, None)
        if known is not None:
            self._network.forget(self._station, known.station)
            self._prepared = {n: kept for n, kept in self._prepared.items() if kept.peer != peer}

    def _peer(self, peer: str) -> _Peer:
        self._owned()
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"Peer {peer} is unknown; add it first.")
        return known

    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification. Raises PeerLost once the peer's death was noticed."""
        self._network.send(self._station, self._peer(peer).station, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """Take the notifications that came."""
        self._owned()
        return self._network.take(self._station)

    def prepare(self, peer: str, source: Lattice, target: Lattice) -> int:
        """Prepare both lists of a rank pair; they live until the peer is removed."""
        known = self._peer(peer)
        ours, theirs = lists.flat_rows(source), lists.flat_rows(target)
        if len(ours) and len(theirs) and source.size != target.size:
            raise TransportError(f"Pieces of {source.size} and {target.size} bytes do not fit; prepare equal ones.")
        self._check(ours[:, 0], ours[:, 1], self._station.regions, self.agent)
        self._check(theirs[:, 0], theirs[:, 1], known.regions, peer)
        self._next += 1
        self._prepared[self._next] = _Prepared(peer, ours[:, 0], theirs[:, 0], source.size)
        return self._next

    def _check(self, address: U64, length: U64, regions: Sequence[Region], agent: str) -> None:
        """Raise TransportError unless every piece lies in registered memory."""
        outside = np.flatnonzero(~covered(address, length, regions))
        if len(outside):
            first = outside[0]
            raise TransportError(
                f"Piece {first} at {int(address[first]):#x} of {int(length[first])} bytes is not in memory that "
                f"{agent} registered; register it and send the metadata again."
            )

    def write_indexed(
        self, prepared: int, source: NDArray[np.int32], target: NDArray[np.int32], notification: bytes
    ) -> int:
        """WRITE pieces by index in the prepared lists."""
        chosen = self._prepared.get(prepared)
        if chosen is None:
            raise TransportError(f"There are no prepared lists number {prepared}; prepare the peer again.")
        lists.check_indices(source, target)
        for indices, side in ((source, chosen.source), (target, chosen.target)):
            if len(indices) and (indices.min() < 0 or indices.max() >= len(side)):
                raise TransportError(f"An index lies outside the {len(side)} prepared pieces; plan the WRITE again.")
        length = np.full(len(source), chosen.size, dtype=np.uint64)
        return self._post(chosen.peer, (chosen.source[source], chosen.target[target], length), notification)

    def write(self, peer: str, source: Pieces, target: Pieces, notification: bytes) -> int:
        """WRITE arbitrary pieces."""
        known = self._peer(peer)
        lists.check_pieces(source, target)
        self._check(source.address, source.length, self._station.regions, self.agent)
        self._check(target.address, target.length, known.regions, peer)
        return self._post(peer, (source.address, target.address, source.length), notification)

    def _post(self, peer: str, pieces: tuple[U64, U64, U64], notification: bytes) -> int:
        number = self._network.post(self._station, self._peer(peer).station, pieces, notification)
        self._counts.add(number, lists.merged_count(*pieces))
        return number

    def poll(self) -> list[WriteResult]:
        """Take the WRITEs that ended; their notifications leave from here."""
        self._owned()
        return self._network.ended(self._station)

    def descriptors(self, write: int) -> int | None:
        """Descriptors after merging neighbours, for the last few thousand WRITEs."""
        return self._counts.get(write)

    def writes_ended(self, peer: str) -> Proof:
        """By the network's own books: the peer is gone and nothing between the two is under way."""
        self._owned()
        known = self._peers.get(peer)
        return Proof.NONE if known is None else self._network.proof(self._station, known.station)

    def path(self, peer: str) -> str:
        """Always a copy inside this process."""
        return "memory: a copy in this process"

    def close(self) -> None:
        """Leave the network; closing twice is fine."""
        if not self._station.closed:
            self._network.leave(self._station)
