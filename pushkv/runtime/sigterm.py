"""SIGTERM: take nothing new, finish, drain, exit by a limit.

The handler itself only wakes a thread that has waited since it was installed: the main thread may be anywhere when
the signal comes, also inside a lock, and goes on with the engine's work, so that prompts under way can be finished.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from pushkv.errors import ConfigError
from pushkv.runtime.endpoint import Endpoint

log = logging.getLogger(__name__)

Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers"
EXIT_CODE = 128 + signal.SIGTERM
"""What a shell calls the end of a process by SIGTERM: 143."""
SHARE = 0.15
"""How much of the limit is kept for ending what has not finished by itself, so that peers hear of it."""
GRACE = 0.05
"""And how much of it for the main thread to come to its signal handler."""


def drain_on_sigterm(*endpoints: Endpoint[Any], limit: float = 30.0) -> DrainOnSigterm:
    """From now on SIGTERM drains these endpoints and ends the process ``limit`` seconds later at the latest.

    At the signal every endpoint takes nothing new: ``offer``, ``connect`` and new prompts in ``stage`` raise
    EndpointClosed, and peers' offers and introductions are refused as closing. What is open goes on; the engine may
    stage more of prompts that have met their offer. When all has ended and custody with it, or shortly before the
    limit, the endpoints are closed, which ends what is left and tells the peers. Then the handler that was there
    before is called in the main thread; where there was none the process dies of the signal, as it would have.

    Call it from the main thread; use it as a context manager, or call :meth:`DrainOnSigterm.undo`, to take it back.
    Raises ConfigError for no endpoint, for a limit that is no time, in another thread, and where SIGTERM has a
    handler that Python does not know of.
    """
    return DrainOnSigterm(endpoints, limit)


class DrainOnSigterm:
    """An installed handler. ``begun`` once the signal has come, for an engine that wants to know."""

    def __init__(self, endpoints: Iterable[Endpoint[Any]], limit: float) -> None:
        self.endpoints = tuple(endpoints)
        self.limit = limit
        self.begun = False
        self._process = os.getpid()
        self._over = False
        self._left = False
        self._previous = self._check()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._wait, name="pushkv-sigterm", daemon=True)
        self._thread.start()
        signal.signal(signal.SIGTERM, self._signalled)

    def _check(self) -> Handler:
        if not self.endpoints:
            raise ConfigError("No endpoint is given to drain at SIGTERM; give those of this process.")
        if not 0 < self.limit <= threading.TIMEOUT_MAX:
            raise ConfigError(f"limit is {self.limit!r} s; give seconds above 0.")
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise ConfigError(f"drain_on_sigterm is called in thread {name}; call it in the main thread.")
        previous = signal.getsignal(signal.SIGTERM)
        if previous is None:
            raise ConfigError("SIGTERM has a handler of another library's; call endpoint.drain() from that one.")
        return previous

    def undo(self) -> None:
        """Have SIGTERM do again what it did before; in the main thread. Not once it has come: that goes on."""
        if self._idle() and signal.getsignal(signal.SIGTERM) == self._signalled:
            signal.signal(signal.SIGTERM, self._previous)
        if self._idle():  # it may have come just before
            self._over = True
            os.eventfd_write(self._bell, 1)
            self._thread.join()

    def _idle(self) -> bool:
        return not (self.begun or self._over)

    def __enter__(self) -> DrainOnSigterm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo; where the signal has come, wait for what it does, which may end the process."""
        self.undo()
        while self.begun and not self._left:
            time.sleep(0.01)

    # On the main thread, between any two of its instructions: so nothing here takes a lock.

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._over or os.getpid() != self._process:  # a child that was forked has none of our threads
            self._left = True
            self._pass_on(number, frame)
        elif not self.begun:
            self.begun = True
            os.eventfd_write(self._bell, 1)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous
        if signal.getsignal(number) == self._signalled:
            signal.signal(number, previous)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # On the thread that waits for it

    def _wait(self) -> None:
        os.eventfd_read(self._bell)
        if self.begun:
            end = time.monotonic() + self.limit
            try:
                self._wind_up(end)
            except Exception:
                log.exception("Draining at SIGTERM went wrong; the process ends nevertheless.")
            self._leave(end)
        os.close(self._bell)

    def _wind_up(self, end: float) -> None:
        names = ", ".join(one.agent for one in self.endpoints)
        log.warning("SIGTERM: %s take nothing new, and end within %g s.", names, self.limit)
        close_at, leave_at = end - self.limit * (SHARE + GRACE), end - self.limit * GRACE
        if not _all(Endpoint.drain, self.endpoints, close_at):
            log.warning("SIGTERM: not everything has finished; what has not is ended now.")
        if not _all(Endpoint.close, self.endpoints, leave_at):
            log.warning("SIGTERM: the process ends with memory in custody; peers see its end.")

    def _leave(self, end: float) -> None:
        """Have the main thread pass the signal on, or exit if it does not come to it."""
        self._over = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)
        while not self._left and time.monotonic() < end:
            time.sleep(0.005)
        if not self._left:
            log.critical("SIGTERM: the main thread does not come to its handler; the process exits.")
            os._exit(EXIT_CODE)


def _all(call: Callable[[Endpoint[Any], float], bool], endpoints: Sequence[Endpoint[Any]], end: float) -> bool:
    """Call it for all of them at once, with the seconds that are left; whether all came to True by the end."""
    done: dict[int, bool] = {}

    def calling(number: int, one: Endpoint[Any]) -> None:
        done[number] = call(one, max(0.0, end - time.monotonic()))

    threads = [threading.Thread(target=calling, args=item, daemon=True) for item in enumerate(endpoints)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return len(done) == len(threads) and all(done.values())
