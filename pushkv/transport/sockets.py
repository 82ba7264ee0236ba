"""Whether a dead process's bytes may still be on their way to this one over TCP.

The kernel goes on delivering what a dead process had sent, and whoever reads our sockets goes on copying
it into memory. UCX closes a connection when it has read its end, so a connection that is gone has
nothing left to deliver. This looks at the connections themselves and asks nobody.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_MAPPED = "0" * 16 + "FFFF0000"
"""How /proc writes the front of an IPv4 address in an IPv6 one, word by word."""

End = tuple[str, str]
"""An address and a port as /proc/net/tcp writes them."""


@dataclass(frozen=True)
class Connection:
    """One line of /proc/net/tcp. ``inode`` is "0" when no process holds that end; the queues are in bytes."""

    local: End
    remote: End
    state: str
    inode: str
    unacknowledged: int = 0
    unread: int = 0


def connections(text: str) -> list[Connection]:
    """Parse the content of /proc/net/tcp or tcp6."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [_connection(row) for row in rows if len(row) > 9]


def _connection(row: list[str]) -> Connection:
    sent, _, unread = row[4].partition(":")
    return Connection(_end(row[1]), _end(row[2]), row[3], row[9], int(sent, 16), int(unread, 16))


def orphans(table: Iterable[Connection], ours: Container[str]) -> list[Connection]:
    """Our connections, by inode, whose other end was on this machine and belongs to no process any more.

    A connection in the queue of one of our listeners counts as ours.
    """
    table = list(table)
    listening = {one.local[1] for one in table if one.state == _LISTEN and one.inode in ours}
    living = {(one.local, one.remote) for one in table if one.inode != "0"}
    return [
        one
        for one in table
        if one.state != _LISTEN
        and (one.inode in ours or (one.inode == "0" and one.local[1] in listening and one.state in _MAY_DELIVER))
        and (one.remote, one.local) not in living
        and is_local(one.remote[0])
    ]


_MAY_DELIVER = {"01", "04", "05", "08"}
"""Established, FIN_WAIT1, FIN_WAIT2 and CLOSE_WAIT: states in which a connection may hold unread bytes."""


def carrying(before: Iterable[Connection], after: Iterable[Connection], ours: Container[str]) -> set[str]:
    """The inodes of our connections inside this machine that hold bytes on their way to us.

    Bytes wait at the sender until they are acknowledged, then here until they are read. The sender's queue is
    taken from the earlier look, so that what moves between the two is seen in one of them.
    """
    waiting = {(one.remote, one.local) for one in before if one.unacknowledged}
    return {one.inode for one in after if one.inode in ours and (one.unread or (one.local, one.remote) in waiting)}


class Drain:
    """Follows, after a death, this process's connections until nothing of the dead can come by them.

    Each must be closed if its other end died, and otherwise have been seen empty once: a child that the dead
    process forked may hold its connections open, and what the dead had sent is still delivered.
    """

    def __init__(self) -> None:
        self._empty: set[str] = set()
        self._clean_looks = 0

    def look(self) -> bool:
        """Look once, some 20 ms; True when two looks in a row found nothing.

        The second look gives a reader that had taken the last bytes the time to put them in their place. False, to be
        on the safe side, where /proc does not tell.
        """
        try:
            clean = self._look()
        except OSError:
            clean = False
        self._clean_looks = self._clean_looks + 1 if clean else 0
        return self._clean_looks >= 2

    def _look(self) -> bool:
        before, after, ours = _table(), _table(), _our_sockets()
        full = carrying(before, after, ours)
        self._empty |= {one.inode for one in after if one.inode in ours} - full
        listed = {one.inode for one in after}
        # The tables are read twice also because a line may be missed while they change.
        if orphans(before, ours) or orphans(after, ours) or full - self._empty:
            return False
        return not any(_was_reset(fd) for inode, fd in ours.items() if inode not in listed)


def _was_reset(fd: int) -> bool:
    """Whether this is a TCP socket that received something and is in no table any more.

    A reset takes a connection out of the tables at once, but what had come before can still be read.
    """
    try:
        probe = socket.socket(fileno=fd)
    except OSError:
        return False  # closed meanwhile, or no socket that Python knows
    try:
        if probe.proto != socket.IPPROTO_TCP:
            return False
        info = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
        return int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder) > 0
    except OSError:
        return True
    finally:
        probe.detach()  # it was never ours to close


_BYTES_RECEIVED = slice(128, 136)
"""Where the kernel's tcp_info has tcpi_bytes_received."""


def is_local(address: str) -> bool:
    """Whether this machine has the address, given as /proc writes it; yes where that cannot be told."""
    family = socket.AF_INET if len(address) == 8 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((socket.inet_ntop(family, _network_order(address)), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _network_order(address: str) -> bytes:
    raw = bytes.fromhex(address)
    words = [raw[i : i + 4] for i in range(0, len(raw), 4)]
    return b"".join(word[::-1] for word in words) if _LITTLE_ENDIAN else raw


_LITTLE_ENDIAN = socket.htons(1) != 1


def _end(text: str) -> End:
    address, _, port = text.partition(":")
    return address.removeprefix(_MAPPED), port


def _table() -> list[Connection]:
    table = connections(Path("/proc/self/net/tcp").read_text())
    six = Path("/proc/self/net/tcp6")
    return table + connections(six.read_text()) if six.exists() else table


def _our_sockets() -> dict[str, int]:
    """The sockets of this process, file descriptor by inode."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            sockets[target[8:-1]] = int(name)
    return sockets
