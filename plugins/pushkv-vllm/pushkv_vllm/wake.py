"""Waking the scheduler: it may sleep in a step without tokens, and a worker with news cuts that short.

A datagram to an abstract UNIX socket of this host. It carries nothing: whoever sends one makes the scheduler take a
step a few milliseconds early. Workers on other hosts do not reach it, and their news waits for the sleep's end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket


class Alarm:
    """The scheduler's end."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.address = b"\0pushkv-%d-" % os.getpid() + secrets.token_hex(8).encode()
        self._socket.bind(self.address)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def sleep(self, seconds: float) -> bool:
        """Sleep for at most ``seconds``, in whole milliseconds; whether it was cut short."""
        woken = bool(self._poll.poll(int(seconds * 1000)))
        with contextlib.suppress(BlockingIOError):
            while woken:
                self._socket.recv(16)
        return woken

    def close(self) -> None:
        """Stop listening."""
        self._poll.unregister(self._socket)
        self._socket.close()


class Bell:
    """A worker's end; rung from any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.address = b""

    def ring(self) -> None:
        """Wake the scheduler, if it is known and on this host; a full queue has woken it already."""
        if self.address:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"", self.address)

    def close(self) -> None:
        """Ring no more."""
        self.address = b""
        self._socket.close()
