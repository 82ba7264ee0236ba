"""The control thread of an endpoint: ZeroMQ connections, signs of life, and the watch over the transfer thread.

It never touches the data mover or the protocol machine; it passes what it hears to the transfer thread's inbox.
A producer listens on one ROUTER; a consumer dials a DEALER a producer rank.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import zmq

from pushkv.errors import AddressError, ProtocolError
from pushkv.runtime.address import Address, url
from pushkv.runtime.wire import MAX_CONTROL_FRAME, Control, pack, unpack

log = logging.getLogger(__name__)

Route = str | bytes
"""Where a control message came from or goes to: a producer's URL at a consumer, a connection's id at a producer."""
TICK = 0.05
"""Seconds between looks at who is alive."""


class ControlThread:
    """Owns an endpoint's ZeroMQ sockets. ``heard`` gets each control message, ``tick`` is called about every TICK."""

    def __init__(self, name: str, heard: Callable[[Route, Control], None], tick: Callable[[], None]) -> None:
        self._heard = heard
        self._tick = tick
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._outbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._stopping = False
        self._closed = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def listen(self, bind: Address) -> Address:
        """Listen before the thread starts; the address with its real port. Raises AddressError."""
        router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            router.bind(url(bind))
        except zmq.ZMQError as error:
            router.close()
            raise AddressError(
                f"{url(bind)} cannot be bound: {error.strerror.lower()}; choose another, or port 0 for any free one."
            ) from error
        self._router = router
        self._poller.register(router, zmq.POLLIN)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return bind[0], int(endpoint.rpartition(":")[2])

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_FRAME)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def dial(self, address: Address) -> None:
        """Open a connection to a producer, whose route is its URL; idempotent, from any thread."""
        route = url(address)
        self._do(lambda: self._dial(route))

    def hang_up(self, route: str) -> None:
        """Close a connection; from any thread."""
        self._do(lambda: self._hang_up(route))

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
        ready = dict(self._poller.poll(int(wait * 1000) + 1))
        if ready.pop(self._wake, None):
            os.eventfd_read(self._wake)
        self._act()
        for socket in ready:
            if socket is self._router:
                self._take(self._router, 2)
            else:
                self._take(socket, 1)

    def _act(self) -> None:
        while True:
            try:
                action = self._outbox.get_nowait()
            except Empty:
                return
            action()

    def _take(self, socket: zmq.Socket[bytes], parts: int) -> None:
        """Take what has come on one socket, in a bounded batch so that no sender starves another."""
        for _ in range(64):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(frames) != parts:
                self.dropped += 1
                continue
            route = frames[0] if parts == 2 else self._route_of(socket)
            try:
                message = unpack(frames[-1])
            except ProtocolError as error:
                self.dropped += 1
                log.debug("Dropped from %r: %s", route, error)
                continue
            self._heard(route, message)

    def _route_of(self, socket: zmq.Socket[bytes]) -> str:
        return next((route for route, dealer in self._dealers.items() if dealer is socket), "")

    def _dial(self, route: str) -> None:
        if route in self._dealers:
            return
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            dealer.connect(route)
        except zmq.ZMQError:
            dealer.close()
            raise
        self._dealers[route] = dealer
        self._poller.register(dealer, zmq.POLLIN)

    def _hang_up(self, route: str) -> None:
        dealer = self._dealers.pop(route, None)
        if dealer is not None:
            self._poller.unregister(dealer)
            dealer.close()

    def _send(self, route: Route, message: Control) -> None:
        data = pack(message)
        try:
            if isinstance(route, bytes):
                if self._router is not None:
                    self._router.send_multipart((route, data), zmq.NOBLOCK)
            elif route in self._dealers:
                self._dealers[route].send(data, zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped += 1

    def _stop(self) -> None:
        self._stopping = True

    def _shut(self) -> None:
        self._act()
        for socket in (*self._dealers.values(), *([self._router] if self._router else [])):
            socket.close()
        self._dealers.clear()
        self._context.term()
        with self._closed:
            os.close(self._wake)
            self._wake = -1
