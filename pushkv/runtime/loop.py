"""The transfer thread: the one thread that owns a data mover and runs a protocol machine.

It sleeps until somebody puts something into its inbox or the next look at the notifications is due: after anything
has happened it looks often, and ever more seldom the longer it is quiet. A peer that sends to it then knocks over the
control connection, which puts something into the inbox.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import IntEnum
from queue import Empty, SimpleQueue

from pushkv.runtime.turn import Abandoned

log = logging.getLogger(__name__)

QUICK = 50e-6
"""Seconds between looks right after something happened, and while a copy runs."""
SOON = 200e-6
"""Seconds, at most, between looks while a WRITE or the engine's own work is waited for. Each look takes the
interpreter from the engine's thread, and what is waited for takes milliseconds."""
CALM = 4
"""A pause is this part of how long it has been quiet."""
AWAKE = 0.002
"""For as many seconds after something happened a thread pauses for less than AWAKE / CALM."""
BURST = 0.005
"""For as many seconds after something happened the next WRITE into a slot may come at any moment."""
BATCH = 256
"""How much of the inbox is done before the next look, so that no flood of commands keeps the thread from looking."""


class Urgency(IntEnum):
    """What a transfer thread waits for, the more urgent the higher."""

    NOTHING = 0
    PEER = 1
    """Which knocks."""
    SLOT = 2
    """Or a peer's WRITE into a slot, which many may follow: for :data:`BURST` seconds."""
    WRITE = 3
    """Or the engine's own work, before a fence."""
    COPY = 4
    NO_ONE = 5
    """There is work to do."""


class Work(ABC):
    """What a transfer thread does: one side of the protocol."""

    @abstractmethod
    def open(self) -> None:
        """Called first on the thread: make the data mover and register memory. Its error ends the endpoint."""

    @abstractmethod
    def look(self, now: float) -> bool:
        """Take what the data mover has and fire due timers; whether anything happened."""

    @abstractmethod
    def next_due(self) -> float | None:
        """When the machine's next timer is due, on the monotonic clock."""

    @abstractmethod
    def urgency(self) -> Urgency:
        """What it waits for."""

    @abstractmethod
    def close(self) -> None:
        """Called last on the thread."""


class TransferThread:
    """Runs one :class:`Work` until it is stopped or abandoned."""

    def __init__(self, name: str, work: Work, idle_poll: float, due_poll: float) -> None:
        self._work = work
        self._idle_poll, self._due_poll = idle_poll, due_poll
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.submit: Callable[[Callable[[], object]], None] = self._inbox.put
        """Have the thread do something; from any thread, in microseconds."""
        self._stopping = threading.Event()
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.errors = 0

    def start(self) -> None:
        """Start, and wait until the data mover is there. Raises what :meth:`Work.open` raised."""
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    def successor(self, work: Work) -> TransferThread:
        """A thread that goes on with what has been and will be submitted to this one, which is stuck for good."""
        heir = TransferThread(self._thread.name + "-2", work, self._idle_poll, self._due_poll)
        heir._inbox, heir.submit, heir._stopping = self._inbox, self.submit, self._stopping
        heir.errors = self.errors
        return heir

    def stop(self, timeout: float) -> bool:
        """End the thread after what it has been given; whether it ended in time."""
        self.submit(self.end)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def end(self) -> None:
        """End after this round; called on the thread itself."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            self._work.open()
        except BaseException as error:  # handed to whoever waits in start()
            self._failure = error
            self._opened.set()
            return
        self._opened.set()
        try:
            self._loop()
            self._work.close()
        except Abandoned:
            log.error("A call into the data mover returned after its thread had been given up; the thread ends.")

    def _loop(self) -> None:
        quiet_since = time.monotonic()
        while not self._stopping.is_set():
            action = self._next_action(self._pause(time.monotonic() - quiet_since))
            if self._step(action):
                quiet_since = time.monotonic()

    def _step(self, action: Callable[[], object] | None) -> bool:
        """One round: what was asked, then what came. An error costs what raised it and nothing else."""
        busy = action is not None
        try:
            left = BATCH
            while action is not None:
                action()
                left -= 1
                action = self._next_action(0.0) if left else None
        except Exception:
            self._count_error()
        try:
            busy |= self._work.look(time.monotonic())
        except Exception:
            self._count_error()
        return busy

    def _count_error(self) -> None:
        self.errors += 1
        if self.errors.bit_count() == 1:  # the first, second, fourth, …: an error may come with every look
            log.exception("The transfer thread goes on after an error (number %d).", self.errors)

    def _next_action(self, wait: float) -> Callable[[], object] | None:
        try:
            return self._inbox.get(timeout=wait) if wait > 0 else self._inbox.get_nowait()
        except Empty:
            return None

    def _pause(self, quiet: float) -> float:
        """How long to sleep, having heard nothing for ``quiet`` seconds."""
        urgency = self._work.urgency()
        most = (self._idle_poll, self._due_poll, self._due_poll, SOON, QUICK, 0.0)[urgency]
        if urgency is Urgency.SLOT and quiet < BURST:
            most = QUICK
        pause = min(max(quiet / CALM, QUICK), most)
        due = self._work.next_due()
        return pause if due is None else min(pause, max(0.0, due - time.monotonic()))
