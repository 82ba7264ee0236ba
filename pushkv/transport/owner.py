"""The one thread that may use a transport."""

from __future__ import annotations

import threading

from pushkv.errors import TransportError


class Owner:
    """Remembers which thread claimed a transport, and asserts that it is the one that calls."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._thread: int | None = None

    def claim(self) -> None:
        """Make the calling thread the owner. Raises TransportError where there is one already."""
        if self._thread is not None:
            raise TransportError(f"Agent {self._agent} has an owner already; make one agent a thread.")
        self._thread = threading.get_ident()

    def check(self) -> None:
        """Raise AssertionError on any other thread; free under ``python -O``."""
        assert self._thread == threading.get_ident(), (
            f"agent {self._agent} belongs to the thread that claimed it, not to {threading.current_thread().name}"
        )
