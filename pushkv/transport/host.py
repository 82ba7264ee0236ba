"""Telling a peer's death from its silence: which process it is, and a watch on that process.

A pid alone proves nothing, since pids are reused. A :class:`~pushkv.transport.base.Host` also names the
kernel's boot, the pid namespace and the start time, and the watch holds a pidfd, which stays
bound to one process for ever.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from pushkv.transport.base import Host

_NOT_RUNNING = frozenset("TZXx")
"""Letters in /proc/PID/stat of a process that is stopped or dead. One that is traced (t) is not: a profiler stops a
process for a moment at each look, again and again."""
_STARTED_FIELD = 19
"""Index of ``starttime`` among the fields of /proc/PID/stat after the command's name."""


def this_host() -> Host:
    """Where this process runs. Called again after a fork: it is not inherited."""
    return Host(machine=_machine(), pid=os.getpid(), started=_started(os.getpid()) or 0)


class ProcessWatch:
    """Knows whether one process of this machine is dead.

    A readable pidfd means that every thread of the process has exited: none of them is inside a
    system call that writes into another process, or ever will be.
    """

    def __init__(self, pidfd: int | None, *, same_network: bool = False, pid: int = 0) -> None:
        """Watch the process behind ``pidfd``, which is ``pid``; None where it was gone before the watch began."""
        self.same_network = same_network
        """Whether it runs in our network namespace, so that both ends of its connections to us can be seen."""
        self._pid = pid
        self._pidfd = pidfd
        self._dead = pidfd is None
        self._poll = select.poll()
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)

    @classmethod
    def on(cls, host: Host) -> ProcessWatch | None:
        """Watch the process, or None where its death cannot be seen from here.

        It cannot be seen on another machine, in another pid namespace, on a kernel without pidfd, and
        where /proc does not show when it started.
        """
        machine = _machine()
        if not machine or host.machine != machine or not host.started or not hasattr(os, "pidfd_open"):
            return None
        try:
            pidfd = os.pidfd_open(host.pid)
        except ProcessLookupError:
            return cls(None)
        except OSError:
            return None
        return cls._matched(pidfd, host)

    @classmethod
    def _matched(cls, pidfd: int, host: Host) -> ProcessWatch | None:
        # The start time is read after the pidfd is open: when it fits, the pidfd is bound to this
        # very process, because a successor of its pid would have started later.
        started = _started(host.pid)
        watch = cls(pidfd, same_network=_same_network(host.pid), pid=host.pid)
        if started == host.started or (started is None and watch.dead()):
            return watch
        watch.close()
        return None if started is None else cls(None)

    def dead(self) -> bool:
        """Whether the whole process has exited; costs a microsecond and never waits."""
        if not self._dead and self._pidfd is not None:
            self._dead = bool(self._poll.poll(0))
        return self._dead

    def running(self) -> bool:
        """Whether it is another process, not dead and not stopped: one that says nothing waits for a processor.

        Or for Python's lock. Of our own process nothing is said: it always runs where it asks.
        """
        if self._pid in (0, os.getpid()) or self.dead():
            return False
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in _NOT_RUNNING

    def close(self) -> None:
        """Give the pidfd back; what :meth:`dead` said last stays said."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _machine() -> str:
    """The boot id with the pid namespace; empty where the kernel does not tell, which matches nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _same_network(pid: int) -> bool:
    """Whether the process runs in our network namespace; no where the kernel does not tell."""
    try:
        return os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), os.stat("/proc/self/ns/net"))
    except OSError:
        return False


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name may hold spaces and brackets, so count from the last bracket.
    return int(stat.rpartition(")")[2].split()[_STARTED_FIELD])
