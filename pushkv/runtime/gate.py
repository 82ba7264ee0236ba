"""Who is let in at the control port: ZeroMQ's authentication protocol (ZAP, RFC 27), answered in the control thread.

With cluster keys only CURVE clients that dial with one of them pass; without, anybody who reaches the port does
(the port is then this machine's alone, unless it was opened on purpose). In either case an allow-list of
addresses can narrow it further. ZeroMQ asks before a connection may say anything.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import zmq
from zmq.utils import z85

from pushkv.errors import ConfigError
from pushkv.runtime.keys import ClusterKey

log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"pushkv"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Gate:
    """Decides about connections. ``counts`` tallies what was refused and why."""

    def __init__(self, keys: Sequence[ClusterKey] = (), allow: Iterable[str] = ()) -> None:
        """``allow``: addresses or networks (``10.1.0.0/16``) that may connect; empty for all. Raises ConfigError."""
        self.counts: Counter[str] = Counter()
        self._clients = {z85.decode(key.pair("dial").public) for key in keys}
        self._networks = tuple(_network(text) for text in allow)

    def listen(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """The socket on which ZeroMQ asks; whoever polls it calls :meth:`answer`. Bind it before any other."""
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(ENDPOINT)
        return socket

    def answer(self, socket: zmq.Socket[bytes]) -> None:
        """Answer what has been asked."""
        while True:
            try:
                request = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            socket.send_multipart(self.decide(request))

    def decide(self, request: Sequence[bytes]) -> list[bytes]:
        """The ZAP reply to a ZAP request."""
        if len(request) < 6 or request[0] != b"1.0":
            return _reply(request, b"500", b"not a ZAP 1.0 request")
        address, mechanism, credentials = request[3].decode("ascii", "replace"), request[5], request[6:]
        reason = self._objection(address, mechanism, credentials)
        if not reason:
            return _reply(request, b"200", b"OK")
        self.counts[reason] += 1
        log.debug("Refused a connection from %s: %s", address, reason)
        return _reply(request, b"400", reason.encode())

    def _objection(self, address: str, mechanism: bytes, credentials: Sequence[bytes]) -> str:
        if self._networks and not any(_inside(address, network) for network in self._networks):
            return "address not allowed"
        if not self._clients:
            return "" if mechanism == b"NULL" else "no key is set here"
        if mechanism != b"CURVE" or len(credentials) != 1:
            return "no cluster key"
        return "" if credentials[0] in self._clients else "another cluster key"


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"allow holds {text!r}: {error}; write an address or a network such as 10.1.0.0/16."
        ) from error


def _inside(address: str, network: Network) -> bool:
    try:
        one = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(one, "ipv4_mapped", None)
    return (mapped or one) in network


def _reply(request: Sequence[bytes], status: bytes, text: bytes) -> list[bytes]:
    number = request[1] if len(request) > 1 else b""
    return [b"1.0", number, status, text, b"", b""]
