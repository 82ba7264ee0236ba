"""What PushKV needs of a data mover.

One thread owns a transport: whoever calls :meth:`Transport.claim` first. Every other method is
called from that thread alone (asserted when ``__debug__``), except :meth:`Transport.metadata`
once the owner has registered its memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region

Addresses = NDArray[np.uint64]


@dataclass(frozen=True)
class Pieces:
    """The pieces of one side of a WRITE: ``address[i]``, ``length[i]`` in bytes, all on one device."""

    address: Addresses
    length: Addresses
    device: int = 0
    memory: str = "DRAM"


@dataclass(frozen=True)
class Lattice:
    """Equal pieces on a regular grid, for a list that is prepared once and used by index.

    Row ``r`` has ``count[r]`` pieces of ``size`` bytes, the first at ``address[r]`` and the next
    ``stride[r]`` bytes on. Pieces are numbered row by row.
    """

    address: Addresses
    stride: Addresses
    count: Addresses
    size: int
    device: int = 0
    memory: str = "DRAM"


class WriteStatus(Enum):
    """How a WRITE ended. ``FAILED`` says nothing about its bytes: they may still travel."""

    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class WriteResult:
    """The end of the WRITE ``write``; ``error`` tells why where it failed.

    ``reached`` is False where the transport knows that not one byte was handed over
    (the request could not even be built), so its memory needs no proof.
    """

    write: int
    status: WriteStatus
    error: str = ""
    peer_lost: bool = False
    reached: bool = True


class Proof(Enum):
    """How it is known that no WRITE of a peer can touch memory any more (see ``writes_ended``)."""

    NONE = "no proof"
    PROCESS_REAPED = "process reaped"
    AGENT_REBUILT = "dead and our agent rebuilt"
    MEMORY_TRANSPORT = "the in-process transport's own books"


@dataclass(frozen=True)
class Host:
    """Where a process runs, so that the other side can tell its death from its silence.

    ``machine`` is the kernel's boot id with the pid namespace, ``pid`` and ``started`` (clock ticks since boot,
    from /proc) name one process for ever.
    """

    machine: str
    pid: int
    started: int


class Transport(ABC):
    """A data mover: WRITEs with a notification, and notifications alone."""

    name: str
    """``"nixl"`` or ``"memory"``."""
    agent: str
    """This side's agent name; it contains the epoch, so a restart is another agent."""

    @abstractmethod
    def claim(self) -> None:
        """Make the calling thread the owner; called once, before anything else."""

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Register memory; called before :meth:`metadata`. Raises TransportError naming the region."""

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer's :meth:`add_peer` needs. Loaded only from an authenticated peer."""

    @abstractmethod
    def add_peer(self, metadata: bytes, host: Host | None) -> str:
        """Load a peer's metadata and return its agent name. Idempotent for one incarnation."""

    @abstractmethod
    def remove_peer(self, peer: str) -> None:
        """Forget a peer. What is in flight goes on: this is no fence. Unknown peers are ignored."""

    @abstractmethod
    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification. Raises PeerLost or TransportError."""

    @abstractmethod
    def receive(self) -> list[tuple[str, bytes]]:
        """Take the notifications that came, as (claimed sender, payload); never raises for what they hold."""

    @abstractmethod
    def prepare(self, peer: str, source: Lattice, target: Lattice) -> int:
        """Prepare the two lists of a rank pair and return a number for :meth:`write_indexed`."""

    @abstractmethod
    def write_indexed(
        self,
        prepared: int,
        source: NDArray[np.int32],
        target: NDArray[np.int32],
        notification: bytes,
    ) -> int:
        """WRITE pieces by index in the prepared lists; returns the write's number. An empty notification is none.

        The caller sorts pairs so that neighbours merge. Raises PeerLost or TransportError only when
        nothing was handed over; once handed over, failures come by :meth:`poll`.
        """

    @abstractmethod
    def write(self, peer: str, source: Pieces, target: Pieces, notification: bytes) -> int:
        """WRITE arbitrary pieces (source[i] to target[i], equal lengths); as :meth:`write_indexed`."""

    @abstractmethod
    def poll(self) -> list[WriteResult]:
        """Advance what is in flight and take the WRITEs that ended, each exactly once."""

    @abstractmethod
    def descriptors(self, write: int) -> int | None:
        """How many descriptors the WRITE had after merging, None where the transport cannot tell."""

    @abstractmethod
    def writes_ended(self, peer: str) -> Proof:
        """By the transport's own evidence: can no WRITE between us and that agent touch memory any more?"""

    @abstractmethod
    def path(self, peer: str) -> str:
        """What moves the bytes to this peer, in words, for people (``"UCX: cma, tcp"``)."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. The caller has seen custody end first."""
