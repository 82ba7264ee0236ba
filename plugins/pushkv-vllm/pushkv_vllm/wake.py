"""Ringing for the scheduler: it may sleep in a step without tokens, and a worker with news cuts that short.

What a step's output tells of a load was taken when the step was queued, and is read when it is over; with a step
queued ahead, and others of their own requests running, two steps go by before the scheduler knows. So workers on its
host also say at once whose load has ended well. It is news of the same load: the output's own comes later.

A datagram to an abstract UNIX socket of this host, whose name anybody may list: so each bears a secret, and what has
none wakes nobody. A stranger may fill the queue nevertheless, so that news is lost: it waits for a step's output, or
for the sleep's end, as does the news of workers on other hosts. No look takes more than :data:`MOST` off the queue.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from dataclasses import dataclass, field

_SECRET = 16
_NEWS = struct.Struct(f"<{_SECRET}sHQ")
"""The secret, the rank, and the number of the load, 0 where there is news of none."""
MOST = 1024
"""How many datagrams are taken off the queue in one look; Linux queues 10, unless told to queue more."""


@dataclass(frozen=True)
class Doorbell:
    """Where to ring, and what proves who does."""

    address: bytes = b""
    secret: bytes = field(default=b"", repr=False)


NOBODY = Doorbell()


class Alarm:
    """The scheduler's end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        name = b"\0pushkv-%d-" % os.getpid() + secrets.token_hex(8).encode()
        self.doorbell = Doorbell(name, secrets.token_bytes(_SECRET))
        self._socket.bind(name)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._news: list[tuple[int, int]] = []

    def sleep(self, seconds: float) -> bool:
        """Sleep for at most ``seconds``, in whole milliseconds; whether a worker cut it short."""
        deadline = time.monotonic() + seconds
        while not self._listen():
            left = int((deadline - time.monotonic()) * 1000)
            if left <= 0 or not self._poll.poll(left):
                return False
        return True

    def news(self) -> list[tuple[int, int]]:
        """What has been told since the last call: (rank, load)."""
        self._listen()
        news, self._news = self._news, []
        return news

    def _listen(self) -> bool:
        """Take what has come; whether any of it was a worker's."""
        rung = False
        for _ in range(MOST):
            try:
                told = self._socket.recv(_NEWS.size + 1)
            except BlockingIOError:
                break
            if len(told) != _NEWS.size:
                continue
            secret, rank, load = _NEWS.unpack(told)
            if hmac.compare_digest(secret, self.doorbell.secret):
                rung = True
                if load:
                    self._news.append((rank, load))
        return rung

    def close(self) -> None:
        """Stop listening."""
        self._poll.unregister(self._socket)
        self._socket.close()


class Bell:
    """A worker's end; rung from any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.doorbell = NOBODY

    def ring(self) -> None:
        """Wake the scheduler, if it is known and on this host; a full queue has woken it already."""
        self.tell(0, 0)

    def tell(self, rank: int, load: int) -> None:
        """Wake it, and tell it that a load has ended well on this rank."""
        bell = self.doorbell
        if bell.address:
            with contextlib.suppress(OSError):
                self._socket.sendto(_NEWS.pack(bell.secret, rank, load), bell.address)

    def close(self) -> None:
        """Ring no more."""
        self.doorbell = NOBODY
        self._socket.close()
