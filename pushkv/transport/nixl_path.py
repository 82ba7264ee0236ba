"""What moves the bytes to a peer, and what a peer's death proves about its WRITEs.

UCX does not say which lane carries a WRITE, but what it may choose from can be bounded: a peer uses
only transports that our own agent offers it. ``docs/transports.md`` tells how each line was tried.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from pushkv.transport.base import Proof
from pushkv.transport.host import ProcessWatch
from pushkv.transport.sockets import Drain

_SAME_HOST = frozenset({"tcp", "cma", "self", "sm", "shm", "posix", "sysv"})
"""Names in UCX_TLS that, in error mode peer, leave WRITEs between host memories only cma and tcp."""

_WITH_CMA = frozenset({"cma", "sm", "shm", "all"})


@dataclass(frozen=True)
class Lanes:
    """What UCX may choose from here: ``allowed`` by UCX_TLS (empty: all) and the RDMA ``devices``."""

    allowed: frozenset[str]
    devices: tuple[str, ...]

    @classmethod
    def here(cls) -> Lanes:
        """Read the environment and the machine."""
        root = Path("/sys/class/infiniband")
        devices = tuple(sorted(device.name for device in root.iterdir())) if root.is_dir() else ()
        return cls.of(os.environ.get("UCX_TLS", "all"), devices)

    @classmethod
    def of(cls, tls: str, devices: tuple[str, ...]) -> Lanes:
        """By UCX_TLS and the names of the RDMA devices."""
        names = frozenset(name.strip() for name in tls.split(",") if name.strip())
        return cls(frozenset() if "all" in names else names, devices)

    @property
    def rdma(self) -> bool:
        """Whether RDMA may carry a WRITE: there is a device, and UCX_TLS does not leave it out."""
        return bool(self.devices) and not (self.allowed and self.allowed <= _SAME_HOST)

    @property
    def cma(self) -> bool:
        """Whether UCX may copy straight into a process of this machine."""
        negated = any(name.startswith("^") for name in self.allowed)
        return not negated and (not self.allowed or bool(self.allowed & _WITH_CMA))


class Evidence:
    """What a peer's death proves about its WRITEs: PROCESS_REAPED, or nothing.

    It takes all of these: the peer's whole process is dead by its pidfd; it ran in our network
    namespace; the backend is UCX and no RDMA device and no device memory is in play, so that cma and
    tcp alone can have carried a WRITE; and, looked at after its death, no TCP connection to a dead process of this
    machine is left here and every other local one has been seen empty. A copy by cma is a system call of the dead
    process, so it is over. What was sent over tcp has been read to its end, since UCX closes a connection only then.
    """

    def __init__(self, backend: str, lanes: Lanes) -> None:
        """Evidence for one agent over ``backend``, which may use ``lanes``."""
        self._backend = backend
        self._lanes = lanes
        self._searches: dict[str, _Search] = {}

    def of_death(self, peer: str, watch: ProcessWatch | None, *, device_memory: bool) -> Proof:
        """The proof so far; never waits. Ask again after NONE: two looks of some 20 ms each run elsewhere."""
        if watch is None or not watch.dead() or not watch.same_network:
            return Proof.NONE
        if self._backend != "UCX" or self._lanes.rdma or device_memory:
            return Proof.NONE
        search = self._searches.setdefault(peer, _Search())
        return Proof.PROCESS_REAPED if search.over() else Proof.NONE

    def forget(self, peer: str) -> None:
        """Drop what is known of a peer."""
        self._searches.pop(peer, None)


class _Search:
    """Looks at our connections until nothing of the dead is left.

    Each look runs on a thread of its own, since the kernel walks large tables for it.
    """

    def __init__(self) -> None:
        self._drain = Drain()
        self._over = threading.Event()
        self._looking: threading.Thread | None = None

    def over(self) -> bool:
        """Whether nothing is left; starts the next look if there may be something. Never waits."""
        if not self._over.is_set() and (self._looking is None or not self._looking.is_alive()):
            self._looking = threading.Thread(target=self._look, name="pushkv-look", daemon=True)
            self._looking.start()
        return self._over.is_set()

    def _look(self) -> None:
        if self._drain.look():
            self._over.set()


def describe(backend: str, lanes: Lanes, watch: ProcessWatch | None, *, device_memory: bool) -> str:
    """The path in words; what UCX keeps to itself is called possible, not certain."""
    if backend != "UCX":
        provider = os.environ.get("FI_PROVIDER", "not chosen, EFA where there is one")
        return f"{backend}: provider {provider}"
    if lanes.rdma:
        return f"UCX: RDMA ({', '.join(lanes.devices)}) or less; UCX does not say which"
    if device_memory:
        return "UCX: device memory; UCX does not say by what (cuda_ipc on one machine)"
    if watch is not None and watch.same_network and lanes.cma:
        return "UCX: cma, notifications over tcp"
    if watch is None and lanes.cma:
        return "UCX: tcp, or cma if the peer is on this machine"
    return "UCX: tcp"
