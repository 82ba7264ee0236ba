"""Who may run the protocol machine: the transfer thread, until it is stuck in the data mover.

A call into a data mover may never return (LIBFABRIC to a dead peer). While the transfer thread is inside one it
touches nothing of ours, so a watchdog can take the machine over; should the call return after all, the
thread finds itself abandoned and ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.transport.base import Host, Lattice, Pieces, Proof, Transport, WriteResult

P = ParamSpec("P")
R = TypeVar("R")


class Abandoned(BaseException):
    """Raised in a transfer thread whose work somebody else goes on with; only the thread's end may catch it."""


class Turn:
    """The right to run an endpoint's machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._away_since: float | None = None
        self._doing = ""
        self._abandoned = False

    def away(self, doing: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call that may not return. Raises Abandoned where the machine was taken over meanwhile."""
        with self._lock:
            if self._abandoned:
                raise Abandoned
            self._away_since, self._doing = time.monotonic(), doing
        try:
            return call(*args, **kwargs)
        finally:
            with self._lock:
                self._away_since = None
                if self._abandoned:
                    raise Abandoned

    def seize(self, limit: float) -> str | None:
        """Take over from a thread that has been in one call for ``limit`` seconds; says in which, None if in none."""
        with self._lock:
            if self._abandoned or self._away_since is None or time.monotonic() - self._away_since < limit:
                return None
            self._abandoned = True
            return self._doing


class WatchedTransport(Transport):
    """A transport whose calls are made away from the machine, so that one which never returns can be survived."""

    def __init__(self, transport: Transport, turn: Turn) -> None:
        self._transport = transport
        self._away = turn.away
        self.name = transport.name
        self.agent = transport.agent

    def claim(self) -> None:
        """See Transport."""
        self._away("claim", self._transport.claim)

    def register(self, regions: Sequence[Region]) -> None:
        """See Transport."""
        self._away("register", self._transport.register, regions)

    def metadata(self) -> bytes:
        """See Transport."""
        return self._away("metadata", self._transport.metadata)

    def add_peer(self, metadata: bytes, host: Host | None) -> str:
        """See Transport."""
        return self._away("add_peer", self._transport.add_peer, metadata, host)

    def remove_peer(self, peer: str) -> None:
        """See Transport."""
        self._away(f"remove_peer {peer}", self._transport.remove_peer, peer)

    def send(self, peer: str, payload: bytes) -> None:
        """See Transport."""
        self._away(f"send to {peer}", self._transport.send, peer, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """See Transport."""
        return self._away("receive", self._transport.receive)

    def prepare(self, peer: str, source: Lattice, target: Lattice) -> int:
        """See Transport."""
        return self._away(f"prepare for {peer}", self._transport.prepare, peer, source, target)

    def write_indexed(
        self, prepared: int, source: NDArray[np.int32], target: NDArray[np.int32], notification: bytes
    ) -> int:
        """See Transport."""
        return self._away("a WRITE", self._transport.write_indexed, prepared, source, target, notification)

    def write(self, peer: str, source: Pieces, target: Pieces, notification: bytes) -> int:
        """See Transport."""
        return self._away(f"a WRITE to {peer}", self._transport.write, peer, source, target, notification)

    def poll(self) -> list[WriteResult]:
        """See Transport."""
        return self._away("poll", self._transport.poll)

    def descriptors(self, write: int) -> int | None:
        """See Transport."""
        return self._away("descriptors", self._transport.descriptors, write)

    def writes_ended(self, peer: str) -> Proof:
        """See Transport."""
        return self._away(f"writes_ended {peer}", self._transport.writes_ended, peer)

    def path(self, peer: str) -> str:
        """See Transport."""
        return self._away("path", self._transport.path, peer)

    def close(self) -> None:
        """See Transport."""
        self._away("close", self._transport.close)
