"""How a transfer or a stage ends, for whoever waits for it."""

from __future__ import annotations

import threading

from pushkv.core.messages import Blocks
from pushkv.core.outcome import Outcome
from pushkv.runtime.forked import OfOneProcess


class Ending(OfOneProcess):
    """How one transfer or stage ends, for whoever waits for it; from any thread."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.detail = ""
        self.known = False
        """Whether somebody has waited and been told the outcome."""
        self.blocks: Blocks | None = None
        """A stage's, of the last call that named them, until they are asked back."""
        self.asked: tuple[bytes, float | None] = b"", None
        """The prompt and the deadline of a stage's last call, which were checked then."""
        self.holds = False
        """Whether it has blocks in custody and no outcome, so that there is nothing for :meth:`hold` to do."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._released = threading.Event()

    @property
    def released(self) -> bool:
        """Whether its blocks are out of everybody's custody."""
        return self._released.is_set()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Wait for the outcome; None if it is not there in time."""
        self._ended.wait(timeout)
        self.known |= self.outcome is not None
        return self.outcome

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until its blocks may be reused; whether they may."""
        released = self._released.wait(timeout)
        self.known |= released and self.outcome is not None
        return released

    def end(self, outcome: Outcome, detail: str) -> None:
        """Called by the endpoint; the first outcome stands."""
        with self._lock:
            if self.outcome is not None:
                return
            self.detail = detail
            self.outcome = outcome
            self.holds = False
        self._ended.set()

    def hold(self) -> bool:
        """Called by the endpoint: it is to have blocks in custody (again). Not once it has ended: then False."""
        with self._lock:
            if self.outcome is not None:
                return False
            self._released.clear()
            self.holds = True
        return True

    def release(self) -> None:
        """Called by the endpoint."""
        with self._lock:
            self.holds = False
            self._released.set()
