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


MOST_A_LOOK = 0.25
"""Seconds that one look of the watchdog adds at most to how long a call has taken: when the process itself was
stopped, or the watchdog got no processor, the call is not to blame."""


class Abandoned(BaseException):
    """Raised in a transfer thread whose work somebody else goes on with; only the thread's end may catch it."""


class Turn:
    """The right to run an endpoint's machine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._away = False
        self._doing = ""
        self._watched = 0
        self._stuck_for = 0.0
        self._looked = time.monotonic()
        self._abandoned = False

    def away(self, doing: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make a call that may not return. Raises Abandoned where the machine was taken over meanwhile."""
        with self._lock:
            if self._abandoned:
                raise Abandoned
            self._calls += 1
            self._away, self._doing = True, doing
        try:
            return call(*args, **kwargs)
        finally:
            with self._lock:
                self._away = False
                if self._abandoned:
                    raise Abandoned

    def seize(self, limit: float) -> str | None:
        """Take over from a thread that has been in one call for ``limit`` seconds; says in which, None if in none.

        Called by the watchdog at short intervals.
        """
        with self._lock:
            now = time.monotonic()
            since, self._looked = min(now - self._looked, MOST_A_LOOK), now
            if self._abandoned or not self._away:
                return None
            if self._watched != self._calls:
                self._watched, self._stuck_for = self._calls, 0.0
                return None
            self._stuck_for += since
            if self._stuck_for < limit:
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
