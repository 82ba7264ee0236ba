"""Children of the fault tests: endpoints, and data movers alone, at a place where something goes wrong.

They die with the process that started them, stopped or not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

import pushkv.runtime.side
from faults.blocks import BLOCKS, Blocks
from pushkv import Consumer, KVCache, Producer, drain_on_sigterm
from pushkv.config import NixlConfig
from pushkv.core.memory import Region
from pushkv.errors import PushKVError
from pushkv.runtime.turn import WatchedTransport
from pushkv.transport.base import Host, Pieces
from pushkv.transport.host import this_host
from pushkv.transport.nixl import NixlSettings, NixlTransport
from runtime.actors import BLOCK, Pipe, Role, obey
from runtime.scene import WAIT, until

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Place:
    """Where a child runs.

    ``network`` is a process whose network namespace it enters; ``elsewhere`` has it say that it runs on another
    machine, so that nobody can watch its process; ``environment`` is set before NIXL is loaded, which is looked for
    in the folder ``site`` first and used with ``backend``.
    """

    network: int = 0
    elsewhere: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    site: str = ""
    backend: Literal["UCX", "LIBFABRIC"] = "UCX"

    def enter(self) -> None:
        """Called first in the child, while it has one thread."""
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.environ.update(self.environment)
        sys.path[:0] = [self.site] if self.site else []
        if self.network:
            _enter_network(self.network)
        if self.elsewhere:
            pushkv.runtime.side.this_host = lambda: replace(this_host(), machine="another machine")


def _enter_network(process: int) -> None:
    """Enter a network namespace, with a /sys that shows its devices, since UCX looks for them there."""
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    _must(_libc.setns(namespace, CLONE_NEWNET), "enter the network namespace")
    os.close(namespace)
    _must(_libc.unshare(CLONE_NEWNS), "have mounts of its own")
    _must(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "keep its mounts to itself")
    _must(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


def _must(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), f"the child cannot {what}")


def unmap(array: np.ndarray) -> None:
    """Take memory away as freeing it does. The array must not be used any more."""
    _must(_libc.munmap(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)), "unmap its memory")


class Endpointed(Role):
    """An endpoint over shared blocks, and what only these tests ask of it."""

    def __init__(self, kind: str, engine: str, blocks: Blocks, settings: dict[str, Any]) -> None:
        super().__init__(kind, engine, settings, KVCache.of(blocks.array, "LBNC", model="m"))

    def stats(self) -> dict[str, int]:
        return self.end.stats()

    def custody(self) -> int:
        return self.end._side.in_custody

    def held(self) -> int:
        assert isinstance(self.end, Consumer)
        return self.end.held_blocks

    def released(self, name: str) -> bool:
        return {**self.stages, **self.transfers}[name].released

    def wait_released(self, name: str) -> bool:
        return {**self.stages, **self.transfers}[name].wait_released(WAIT)

    def detail(self, name: str) -> str:
        return {**self.stages, **self.transfers}[name].detail

    def reaches(self) -> bool:
        """Whether it takes its producer for alive."""
        assert self.link is not None
        return self.link.alive

    def stalled(self) -> str:
        return self.end.stalled

    def ready(self, name: str, first: int, count: int, ready: int) -> None:
        """Stage the first blocks of a prompt whose rest is still computed."""
        assert isinstance(self.end, Producer)
        blocks = list(range(first, first + count))
        self.stages[name] = self.end.stage(name, blocks, prompt=bytes(32), prompt_tokens=count, ready=ready)

    def offer_by(self, name: str, first: int, count: int, deadline: float) -> None:
        assert isinstance(self.end, Consumer)
        assert self.link is not None
        blocks = list(range(first, first + count))
        self.transfers[name] = self.end.offer(
            name, self.link, blocks, prompt=bytes(32), prompt_tokens=count, deadline=deadline
        )

    def connect_by(self, address: str, timeout: float) -> None:
        assert isinstance(self.end, Consumer)
        self.link = self.end.connect(address, timeout)

    def lose(self, engine: str) -> None:
        """Have it believe that a peer is gone for good, so that the next handshake with it starts afresh."""
        (pair,) = (one for one in self.end._side.agents.values() if one.theirs.engine == engine)
        self.end._transfer.submit(lambda: self.end._side.peer_gone(pair.token, "the test says so"))

    def kept_handles(self) -> int:
        """How many WRITEs have failed whose handles are kept."""
        transport = self.end._side.transport
        assert isinstance(transport, WatchedTransport)
        assert isinstance(transport._transport, NixlTransport)
        return len(transport._transport._failed)

    def drain_on_sigterm(self, limit: float, exit_code: int | None = None) -> None:
        """With a code: after a handler that exits with it."""
        if exit_code is not None:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code))
        self.drains = drain_on_sigterm(self.end, limit=limit)

    def draining(self) -> bool:
        return self.end.draining

    def get_stuck(self) -> None:
        """From the signal on the main thread is in a call that does not return, and that no signal interrupts."""
        until(lambda: self.drains.begun)
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            _libc.pthread_mutex_lock(mutex)

    def fork_and_terminate(self) -> tuple[int, bool]:
        """Fork a process that does nothing, and send it SIGTERM: how it ended, and whether that has reached us."""
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"x")  # a signal that came earlier would be lost to Python
            time.sleep(WAIT)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), self.drains.begun

    def shut_and_unmap(self, timeout: float) -> bool:
        """What an engine does at its end: free the cache if close() says that it may."""
        closed = self.end.close(timeout)
        if closed:
            unmap(self.array)
        return closed


class Twofold:
    """Two producers in one process, drained together."""

    def __init__(self, blocks: Blocks) -> None:
        self.producers = [Endpointed("producer", name, blocks, {}) for name in ("one", "two")]

    def each(self, number: int, name: str, *arguments: Any) -> Any:
        return getattr(self.producers[number], name)(*arguments)

    def drain_on_sigterm(self, limit: float) -> None:
        drain_on_sigterm(*(producer.end for producer in self.producers), limit=limit)


def play_two(pipe: Pipe, place: Place, blocks: Blocks) -> None:
    """The child's work: two endpoints."""
    place.enter()
    obey(pipe, Twofold(blocks))


def play(pipe: Pipe, place: Place, kind: str, engine: str, blocks: Blocks, settings: dict[str, Any]) -> None:
    """The child's work: one endpoint at a place."""
    place.enter()
    nixl = NixlConfig(backend=place.backend)
    obey(pipe, Endpointed(kind, engine, blocks, {"nixl": nixl, **settings}))


class Mover:
    """A data mover alone, to see what NIXL does."""

    def __init__(self, agent: str, backend: str, blocks: Blocks) -> None:
        self.transport = NixlTransport(NixlSettings(agent, backend=backend))
        self.transport.claim()
        self.array = blocks.array
        self.address = self.array.ctypes.data
        self.transport.register([Region(self.address, BLOCKS * BLOCK)])
        self.peer, self.far = "", 0
        self.ended: dict[int, str] = {}

    def introduction(self) -> tuple[bytes, Host, int]:
        return self.transport.metadata(), this_host(), self.address

    def meet(self, metadata: bytes, host: Host, address: int) -> None:
        self.peer, self.far = self.transport.add_peer(metadata, host), address

    def _pieces(self, address: int, first: int, count: int) -> Pieces:
        return Pieces(np.array([address + first * BLOCK], np.uint64), np.array([count * BLOCK], np.uint64))

    def post(self, first: int, count: int) -> int:
        """WRITE blocks into the same blocks of the peer."""
        ours, theirs = self._pieces(self.address, first, count), self._pieces(self.far, first, count)
        return self.transport.write(self.peer, ours, theirs, b"done")

    def status(self, number: int, wait: float) -> str:
        """How a WRITE ended; ``in progress`` if it has not within these seconds."""
        end = time.monotonic() + wait
        while True:
            self.ended.update({one.write: one.status.value for one in self.transport.poll()})
            if number in self.ended or time.monotonic() >= end:
                return self.ended.get(number, "in progress")

    def heard(self) -> int:
        return len(self.transport.receive())

    def send(self) -> str:
        """What comes of a notification: nothing, or the error's name."""
        try:
            self.transport.send(self.peer, b"x")
        except PushKVError as error:
            return type(error).__name__
        return ""

    def release(self, number: int) -> None:
        """Release a handle in flight, which the transport itself never does."""
        flight = self.transport._flights.pop(number)
        self.transport._agent.releaseXferReq(flight.handle)

    def remove(self) -> None:
        self.transport.remove_peer(self.peer)

    def deregister(self) -> None:
        for listed in self.transport._registered:
            self.transport._agent.deregisterMem(listed, [])
        self.transport._registered.clear()

    def unmap(self) -> None:
        unmap(self.array)


def move(pipe: Pipe, place: Place, agent: str, blocks: Blocks) -> None:
    """The child's work: a data mover at a place."""
    place.enter()
    obey(pipe, Mover(agent, place.backend, blocks))
