"""The real data mover: a NIXL agent with one backend, used by one thread.

What was measured about NIXL is built in here; ``docs/transports.md`` lists it, fact by fact.
The compiled bindings are used directly: NIXL's Python layer fixes the progress thread's delay at 0,
which burns most of a core while idle, and releases handles from ``__del__``, which may freeze the interpreter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.errors import PeerLost, TransportError
from pushkv.transport import lists as lists_of
from pushkv.transport import nixl_path
from pushkv.transport.base import Host, Lattice, Pieces, Proof, Transport, WriteResult, WriteStatus
from pushkv.transport.host import ProcessWatch
from pushkv.transport.nixl_agent import NixlSettings, make_agent
from pushkv.transport.nixl_errors import is_peer_lost, nixl_errors, translate
from pushkv.transport.nixl_import import NixlModule, find_nixl
from pushkv.transport.owner import Owner

__all__ = ["NixlSettings", "NixlTransport"]

log = logging.getLogger(__name__)


_Chosen = tuple[int, NDArray[np.int32]]
"""A prepared list and the indices chosen from it."""


@dataclass(frozen=True)
class _Prepared:
    """The lists of a rank pair; a side without pieces has no list."""

    peer: str
    source: int | None
    target: int | None

    @property
    def lists(self) -> tuple[int, ...]:
        """The lists there are."""
        return tuple(one for one in (self.source, self.target) if one is not None)


@dataclass(frozen=True)
class _Flight:
    """A WRITE that was posted, with the lists that were made for it alone."""

    peer: str
    handle: int
    lists: tuple[int, ...] = ()


class NixlTransport(Transport):
    """A NIXL agent with one backend.

    The thread that calls :meth:`claim` owns it. A WRITE that failed is never posted again and its handle is
    kept until :meth:`close`: a released handle's bytes still travel, and nothing would be left that knows of them.
    """

    name = "nixl"

    def __init__(self, settings: NixlSettings, *, module: NixlModule | None = None) -> None:
        """Make the agent and load its backend. Raises TransportUnavailable saying what to install or change."""
        self.agent = settings.agent
        self._settings = settings
        self._module = module or find_nixl()
        self._nixl: Any = self._module.bindings
        self._errors = nixl_errors(self._module.bindings)
        self._strided = self._module.strided
        self._lanes = nixl_path.Lanes.here()
        self._evidence = nixl_path.Evidence(settings.backend, self._lanes)
        self._device_memory = False
        self._owner = Owner(settings.agent)
        self._closed = False
        self._registered: list[Any] = []
        self._peers: dict[str, ProcessWatch | None] = {}
        self._lost: set[str] = set()
        self._prepared: dict[int, _Prepared] = {}
        self._flights: dict[int, _Flight] = {}
        self._ended: list[WriteResult] = []
        self._failed: list[_Flight] = []
        self._counts = lists_of.DescriptorCounts()
        self._complaints: set[str] = set()
        self._next = 0
        self._agent: Any = make_agent(self._module, settings)
        self._metadata = bytes(self._agent.getLocalMD())

    def claim(self) -> None:
        """Make the calling thread the owner; see :meth:`Transport.claim`."""
        self._owner.claim()

    def _owned(self) -> None:
        if self._closed:
            raise TransportError(f"Agent {self.agent} is closed; make another one.")
        self._owner.check()

    @contextmanager
    def _doing(self, action: str, peer: str | None = None) -> Iterator[None]:
        """Put what NIXL raises into PushKV's words and remember a peer that is gone."""
        try:
            yield
        except self._errors as error:
            if peer is not None and is_peer_lost(error):
                self._lost.add(peer)
            raise translate(error, action) from error

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory; may be called again, after which peers need the new metadata."""
        self._owned()
        for region in regions:
            self._register(region)
        with self._doing("describe itself"):
            self._metadata = bytes(self._agent.getLocalMD())

    def _register(self, region: Region) -> None:
        if region.length <= 0 or region.address <= 0:
            raise TransportError(f"{region} holds no memory; register the cache after it is allocated.")
        rows = [(region.address, region.length, region.device, "")]
        with self._doing(f"register {region}"):
            listed = self._nixl.nixlRegDList(self._segment(region.memory), rows)
            self._agent.registerMem(listed, [])
        self._registered.append(listed)

    def _segment(self, memory: str) -> Any:
        self._device_memory |= memory == "VRAM"
        return self._nixl.VRAM_SEG if memory == "VRAM" else self._nixl.DRAM_SEG

    def metadata(self) -> bytes:
        """What a peer's :meth:`add_peer` needs, as of the last :meth:`register`; from any thread."""
        return self._metadata

    def add_peer(self, metadata: bytes, host: Host | None) -> str:
        """Load a peer's metadata and watch its process where that can be done; idempotent."""
        self._owned()
        # Watched before it is loaded, so that no WRITE of it can be older than the watch.
        watch = ProcessWatch.on(host) if host is not None else None
        try:
            with self._doing(f"load a peer's metadata of {len(metadata)} bytes"):
                peer = str(self._agent.loadRemoteMD(metadata), "utf-8")
        except BaseException:
            _close(watch)
            raise
        known = self._peers.get(peer)
        self._peers[peer] = known or watch
        _close(watch if known else None)
        return peer

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Its WRITEs in flight end as FAILED and their bytes go on: this is no fence."""
        self._owned()
        if peer not in self._peers:
            return
        for number in [n for n, flight in self._flights.items() if flight.peer == peer]:
            self._fail(number, f"Peer {peer} was removed while the WRITE was in flight.", peer_lost=False)
        for number in [n for n, prepared in self._prepared.items() if prepared.peer == peer]:
            self._release_lists(self._prepared.pop(number).lists)
        _close(self._peers.pop(peer))
        self._lost.discard(peer)
        self._evidence.forget(peer)
        self._quietly(f"remove {peer}", self._agent.invalidateRemoteMD, peer)

    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification. Raises PeerLost, or TransportError for an unknown peer."""
        self._reach(peer)
        with self._doing(f"send a notification to {peer}", peer):
            self._agent.genNotif(peer, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        """Take the notifications that came, as (claimed sender, payload), in NIXL's order a sender.

        A sender whose name is not UTF-8 costs the batch it came in: the binding has dropped it by then.
        """
        self._owned()
        try:
            came = self._agent.getNotifs({}, [])
        except UnicodeDecodeError:
            self._complain(
                "A notification from an agent whose name is not UTF-8 was dropped, with what came beside it."
            )
            return []
        except self._errors as error:
            self._complain(str(translate(error, "take notifications")))
            return []
        return [(sender, bytes(payload)) for sender, payloads in came.items() for payload in payloads]

    def prepare(self, peer: str, source: Lattice, target: Lattice) -> int:
        """Prepare both lists of a rank pair; they live until the peer is removed."""
        self._reach(peer)
        ours = self._lattice(self._nixl.NIXL_INIT_AGENT, source)
        try:
            theirs = self._lattice(peer, target)
        except TransportError:
            self._release_lists([] if ours is None else [ours])
            raise
        number = self._number()
        self._prepared[number] = _Prepared(peer, ours, theirs)
        return number

    def _lattice(self, agent: str, lattice: Lattice) -> int | None:
        if not lists_of.piece_count(lattice):
            return None
        if self._strided:
            try:
                return self._list(agent, lists_of.strided_rows(lattice), lattice.memory)
            except TypeError:
                self._strided = False  # an older build than its version says
        return self._list(agent, lists_of.flat_rows(lattice), lattice.memory)

    def _list(self, agent: str, rows: lists_of.Rows, memory: str) -> int:
        segment = self._segment(memory)
        with self._doing(f"prepare {len(rows)} rows of {memory} for {agent or 'itself'}", agent):
            if rows.shape[1] == 5:
                return int(self._agent.prepXferDlist(agent, segment, rows, []))
            return int(self._agent.prepXferDlist(agent, self._nixl.nixlXferDList(segment, rows), []))

    def write_indexed(
        self, prepared: int, source: NDArray[np.int32], target: NDArray[np.int32], notification: bytes
    ) -> int:
        """WRITE pieces by index; NIXL merges neighbours that follow each other on both sides."""
        lists = self._prepared.get(prepared)
        if lists is None:
            raise TransportError(f"There are no prepared lists number {prepared}; prepare the peer again.")
        self._reach(lists.peer)
        lists_of.check_indices(source, target)
        if not len(source):
            return self._notify_alone(lists.peer, notification)
        if lists.source is None or lists.target is None:
            raise TransportError(f"The prepared lists number {prepared} are empty; an index cannot be in them.")
        handle = self._request(lists.peer, (lists.source, source), (lists.target, target), notification)
        return self._post(_Flight(lists.peer, handle), notification)

    def write(self, peer: str, source: Pieces, target: Pieces, notification: bytes) -> int:
        """WRITE arbitrary pieces, over lists made for this WRITE and released with it."""
        self._reach(peer)
        lists_of.check_pieces(source, target)
        if not len(source.address):
            return self._notify_alone(peer, notification)
        lists: list[int] = []
        try:
            lists.append(self._list(self._nixl.NIXL_INIT_AGENT, lists_of.piece_rows(source), source.memory))
            lists.append(self._list(peer, lists_of.piece_rows(target), target.memory))
            every = np.arange(len(source.address), dtype=np.int32)
            handle = self._request(peer, (lists[0], every), (lists[1], every), notification)
        except TransportError:
            self._release_lists(lists)
            raise
        return self._post(_Flight(peer, handle, tuple(lists)), notification)

    def _request(self, peer: str, source: _Chosen, target: _Chosen, notification: bytes) -> int:
        ours, theirs = (np.ascontiguousarray(indices, dtype=np.int32) for indices in (source[1], target[1]))
        write = self._nixl.NIXL_WRITE
        with self._doing(f"build a WRITE of {len(ours)} pieces to {peer}", peer):
            return int(self._agent.makeXferReq(write, source[0], ours, target[0], theirs, notification))

    def _post(self, flight: _Flight, notification: bytes) -> int:
        """Post it. An error here is a result, not an exception: some of its descriptors may be under way."""
        number = self._number()
        self._flights[number] = flight
        try:
            self._agent.postXferReq(flight.handle, notification)
        except self._errors as error:
            self._fail_with(number, error)
        return number

    def _notify_alone(self, peer: str, notification: bytes) -> int:
        """A WRITE of nothing is its notification."""
        self.send(peer, notification)
        number = self._number()
        self._counts.add(number, 0)
        self._ended.append(WriteResult(number, WriteStatus.DONE))
        return number

    def _reach(self, peer: str) -> None:
        """Raise PeerLost for a peer that is known to be gone, before NIXL is asked and may hang on it."""
        self._owned()
        if peer not in self._peers:
            raise TransportError(f"Peer {peer} is unknown; add it first.")
        watch = self._peers[peer]
        if peer in self._lost or (watch is not None and watch.dead()):
            self._lost.add(peer)
            raise PeerLost(f"Peer {peer} is gone; connect to its successor.")

    def poll(self) -> list[WriteResult]:
        """Advance what is in flight; UCX sends a WRITE's notification from here, so keep calling."""
        self._owned()
        for number, flight in list(self._flights.items()):
            self._advance(number, flight)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, number: int, flight: _Flight) -> None:
        try:
            status = self._agent.getXferStatus(flight.handle)
        except self._errors as error:
            return self._fail_with(number, error)
        if status == self._nixl.NIXL_SUCCESS:
            return self._finish(number, flight)
        watch = self._peers.get(flight.peer)
        # LIBFABRIC leaves a WRITE to a dead peer in progress for ever; UCX says so by itself.
        if watch is not None and watch.dead():
            self._lost.add(flight.peer)
            self._fail(number, f"Peer {flight.peer} died while the WRITE was in flight.", peer_lost=True)
        return None

    def _finish(self, number: int, flight: _Flight) -> None:
        del self._flights[number]
        if self._settings.capture_telemetry:
            self._quietly("read telemetry", self._count_descriptors, number, flight.handle)
        self._release(flight)
        self._ended.append(WriteResult(number, WriteStatus.DONE))

    def _fail_with(self, number: int, error: Exception) -> None:
        peer = self._flights[number].peer
        if is_peer_lost(error):
            self._lost.add(peer)
        self._fail(number, str(translate(error, f"WRITE to {peer}")), peer_lost=is_peer_lost(error))

    def _fail(self, number: int, error: str, *, peer_lost: bool) -> None:
        self._failed.append(self._flights.pop(number))
        self._ended.append(WriteResult(number, WriteStatus.FAILED, error, peer_lost))

    def descriptors(self, write: int) -> int | None:
        """Descriptors after merging, known once the WRITE is done and for a few thousand WRITEs after."""
        return self._counts.get(write)

    def _count_descriptors(self, number: int, handle: int) -> None:
        self._counts.add(number, int(self._agent.getXferTelemetry(handle).descCount))

    def writes_ended(self, peer: str) -> Proof:
        """By the peer's death alone; :class:`pushkv.transport.nixl_path.Evidence` says what counts and why.

        Asked again until it says PROCESS_REAPED; a peer that was removed proves nothing any more.
        """
        self._owned()
        return self._evidence.of_death(peer, self._peers.get(peer), device_memory=self._device_memory)

    def path(self, peer: str) -> str:
        """What moves the bytes, as far as it can be told; it says so where it cannot."""
        watch, backend = self._peers.get(peer), self._settings.backend
        return nixl_path.describe(backend, self._lanes, watch, device_memory=self._device_memory)

    def close(self) -> None:
        """Release every handle, list and registration. What still travels goes on travelling."""
        if self._closed:
            return
        self._owned()
        for flight in [*self._flights.values(), *self._failed]:
            self._release(flight)
        self._flights.clear()
        self._failed.clear()
        for peer in list(self._peers):
            self.remove_peer(peer)
        for listed in self._registered:
            self._quietly("deregister memory", self._agent.deregisterMem, listed, [])
        self._closed = True
        self._agent = None

    def _release(self, flight: _Flight) -> None:
        self._quietly("release a request", self._agent.releaseXferReq, flight.handle)
        self._release_lists(flight.lists)

    def _release_lists(self, lists: Sequence[int]) -> None:
        for one in lists:
            self._quietly("release a list", self._agent.releasedDlistH, one)

    def _quietly(self, action: str, call: Callable[..., object], *arguments: object) -> None:
        """Do what nothing depends on; a failure is worth a line in the log."""
        try:
            call(*arguments)
        except self._errors as error:
            log.debug("%s", translate(error, action))

    def _complain(self, what: str) -> None:
        """Warn once: it may happen at every poll."""
        log.log(logging.DEBUG if what in self._complaints else logging.WARNING, "%s", what)
        self._complaints.add(what)

    def _number(self) -> int:
        self._next += 1
        return self._next


def _close(watch: ProcessWatch | None) -> None:
    if watch is not None:
        watch.close()
