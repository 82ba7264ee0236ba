"""The control thread of an endpoint: ZeroMQ connections, signs of life, and the watch over the transfer thread.

It never touches the data mover or the protocol machine; it passes what it hears to the transfer thread's inbox.
A producer listens on one port; a consumer dials a line a producer rank.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

from pushkv.errors import ProtocolError
from pushkv.runtime.address import Address, url
from pushkv.runtime.lines import Lines, Route
from pushkv.runtime.wire import Control, pack, unpack

__all__ = ["ControlThread", "Route"]

log = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between looks at who is alive."""


class ControlThread:
    """Owns an endpoint's ZeroMQ sockets. ``heard`` gets each control message, ``tick`` is called about every TICK."""

    def __init__(
        self, name: str, lines: Lines, heard: Callable[[Route, Control], None], tick: Callable[[], None]
    ) -> None:
        self._lines = lines
        self._heard = heard
        self._tick = tick
        self._outbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        lines.poller.register(self._wake, zmq.POLLIN)
        self._stopping = False
        self._closed = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self, bind: Address) -> Address:
        """Listen before the thread starts; the address with its real port. Raises AddressError."""
        return self._lines.listen(bind)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def dial(self, address: Address) -> None:
        """Open a connection to a producer, whose route is its URL; idempotent, from any thread."""
        route = url(address)
        self._do(lambda: self._lines.dial(route))

    def hang_up(self, route: str) -> None:
        """Close a connection; from any thread."""
        self._do(lambda: self._lines.hang_up(route))

    def send(self, route: Route, message: Control) -> None:
        """Send a control message; from any thread. What cannot be delivered is dropped: senders resend."""
        self._do(lambda: self._send(route, message))

    def close(self) -> None:
        """Send what waits, close everything and end the thread."""
        self._do(self._stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        elif not self._thread.ident:
            self._shut()

    # On the control thread

    def _do(self, action: Callable[[], None]) -> None:
        with self._closed:
            if self._wake >= 0:
                self._outbox.put(action)
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        due = time.monotonic() + TICK
        while not self._stopping:
            try:
                self._turn(max(0.0, due - time.monotonic()))
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK
                    self._tick()
            except Exception:
                log.exception("The control thread goes on after an error.")
        self._shut()

    def _turn(self, wait: float) -> None:
        ready = dict(self._lines.poller.poll(int(wait * 1000) + 1))
        if ready.pop(self._wake, None):
            os.eventfd_read(self._wake)
        self._act()
        for item in self._lines.receive(ready):
            if item is None:
                self.dropped += 1
            else:
                self._take(*item)

    def _act(self) -> None:
        while True:
            try:
                action = self._outbox.get_nowait()
            except Empty:
                return
            action()

    def _take(self, route: Route, data: bytes) -> None:
        try:
            message = unpack(data)
        except ProtocolError as error:
            self.dropped += 1
            log.debug("Dropped from %r: %s", route, error)
            return
        self._heard(route, message)

    def _send(self, route: Route, message: Control) -> None:
        self.dropped += not self._lines.send(route, pack(message))

    def _stop(self) -> None:
        self._stopping = True

    def _shut(self) -> None:
        self._act()
        self._lines.close()
        with self._closed:
            os.close(self._wake)
            self._wake = -1
