"""ZeroMQ connections of one endpoint: a port to listen on, lines to dial, and who is let in. Single-threaded.

With cluster keys everything is CURVE; see :mod:`pushkv.runtime.keys` for what two keys mean. A line is then dialled
with every key at once, and the first one that is answered is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import zmq

from pushkv.errors import AddressError
from pushkv.runtime.address import Address, url
from pushkv.runtime.gate import DOMAIN, Gate
from pushkv.runtime.keys import ClusterKey

Route = str | bytes
"""Where a control message came from or goes to: a producer's URL at a consumer, a connection's id at a producer."""
Socket = zmq.Socket[bytes]
HANDSHAKE_MS = 5000
"""How long a connection may take to say who it is."""
LINGER_MS = 200
BATCH = 64
"""How many messages are taken off a connection before another's turn."""


class Lines:
    """The sockets. Everything happens on one thread; :attr:`poller` tells it when to call :meth:`receive`."""

    def __init__(self, keys: Sequence[ClusterKey], allow: Iterable[str], largest: int) -> None:
        """``largest``: bytes of the largest message taken from anybody. Raises ConfigError for a bad ``allow``."""
        self.gate = Gate(keys, allow)
        self.poller = zmq.Poller()
        self._keys = tuple(keys)
        self._largest = largest
        self._context = zmq.Context()
        self._doorbell: Socket | None = None
        self._port: Socket | None = None
        self._lines: dict[str, dict[ClusterKey | None, Socket]] = {}

    @property
    def routes(self) -> tuple[str, ...]:
        """The producers that are dialled."""
        return tuple(self._lines)

    def listen(self, bind: Address) -> Address:
        """Listen; the address with its real port. Raises AddressError."""
        self._doorbell = self.gate.listen(self._context)
        port = self._socket(zmq.ROUTER)
        port.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if self._keys:
            port.curve_server = True
            port.curve_secretkey = self._keys[0].pair("listen").secret
        try:
            port.bind(url(bind))
        except zmq.ZMQError as error:
            port.close()
            raise AddressError(
                f"{url(bind)} cannot be bound: {error.strerror.lower()}; choose another, or port 0 for any free one."
            ) from error
        self._port = port
        self.poller.register(port, zmq.POLLIN)
        self.poller.register(self._doorbell, zmq.POLLIN)
        return bind[0], int(port.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, self._largest)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def dial(self, route: str) -> None:
        """Dial a producer, or dial it again with the keys that are not connected. Raises ZMQError for a bad URL."""
        held = self._lines.get(route, {})
        missing = [key for key in self._keys or (None,) if key not in held]
        self._lines[route] = held | {key: self._dial(route, key) for key in missing}

    def _dial(self, route: str, key: ClusterKey | None) -> Socket:
        line = self._socket(zmq.DEALER)
        line.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if key is not None:
            mine = key.pair("dial")
            line.curve_publickey, line.curve_secretkey = mine.public, mine.secret
            line.curve_serverkey = key.pair("listen").public
        try:
            line.connect(route)
        except zmq.ZMQError:
            line.close()
            raise
        self.poller.register(line, zmq.POLLIN)
        return line

    def hang_up(self, route: str) -> None:
        """Close the line to a producer."""
        for line in self._lines.pop(route, {}).values():
            self._close(line)

    def _close(self, socket: Socket) -> None:
        if socket in self.poller:
            self.poller.unregister(socket)
        socket.close()

    def send(self, route: Route, data: bytes) -> bool:
        """Send; whether the message was taken (not whether it arrives)."""
        try:
            if isinstance(route, bytes):
                if self._port is None:
                    return False
                self._port.send_multipart((route, data), zmq.NOBLOCK)
                return True
            for line in self._lines.get(route, {}).values():
                line.send(data, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return route in self._lines

    def receive(self, ready: Iterable[object]) -> Iterator[tuple[Route, bytes] | None]:
        """What has come on sockets that the poller found ready; None for what is malformed."""
        for socket in ready:
            if socket is self._doorbell and self._doorbell is not None:
                self.gate.answer(self._doorbell)
            elif socket is self._port and self._port is not None:
                yield from self._take(self._port)
            else:
                yield from self._take_line(socket)

    def _take(self, port: Socket) -> Iterator[tuple[Route, bytes] | None]:
        for frames in _frames(port):
            yield (frames[0], frames[1]) if len(frames) == 2 else None

    def _take_line(self, socket: object) -> Iterator[tuple[Route, bytes] | None]:
        for route, lines in list(self._lines.items()):
            for key, line in lines.items():
                if line is socket:
                    yield from self._take_answers(route, key, line)
                    return

    def _take_answers(self, route: str, key: ClusterKey | None, line: Socket) -> Iterator[tuple[Route, bytes] | None]:
        # This key was answered: the others are not the producer's.
        for other in self._lines[route].values():
            if other is not line:
                self._close(other)
        self._lines[route] = {key: line}
        for frames in _frames(line):
            yield (route, frames[0]) if len(frames) == 1 else None

    def close(self) -> None:
        """Send what waits, for a moment, and close everything."""
        for socket in (
            *(line for lines in self._lines.values() for line in lines.values()),
            self._port,
            self._doorbell,
        ):
            if socket is not None:
                self._close(socket)
        self._lines.clear()
        self._port = self._doorbell = None
        self._context.term()


def _frames(socket: Socket) -> Iterator[list[bytes]]:
    for _ in range(BATCH):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
