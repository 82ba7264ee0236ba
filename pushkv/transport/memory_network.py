"""An in-process network with a clock of its own, which moves real bytes at chosen times.

Everything that happens is an event with a time. Nothing happens by itself: :meth:`Network.advance` and
:meth:`Network.step` make it happen, or, on an immediate network, every poll of a transport does.
One seed gives one run. All methods may be called from any thread.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from pushkv.errors import PeerLost, TransportError
from pushkv.transport.base import Proof, WriteResult, WriteStatus
from pushkv.transport.memory_bytes import U64, Copy, Station, Write
from pushkv.transport.memory_faults import Cut, Faults, OnDeath


class _Kind(Enum):
    """What an event moves; a ``LOCAL`` one crosses no link, so no cut holds it."""

    MESSAGE = "message"
    BYTES = "bytes"
    LOCAL = "local"


@dataclass(frozen=True)
class _Event:
    sender: str
    receiver: str
    kind: _Kind
    happen: Callable[[], None]
    stalled: bool = False


class Network:
    """What connects :class:`~pushkv.transport.memory.MemoryTransport` objects."""

    def __init__(
        self,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        on_death: OnDeath = OnDeath.CMA,
        immediate: bool = False,
        parts: int = 2,
        detection: float = 0.0,
        proofs: bool = True,
    ) -> None:
        """Make a network.

        ``parts`` is into how many copies, landing apart, a WRITE's pieces are dealt; ``detection`` is how long a
        death goes unnoticed, in seconds; without ``proofs`` nothing is ever proven, as over most real links.
        """
        self.faults = faults or Faults()
        self.on_death = on_death
        self.immediate = immediate
        self.now = 0.0
        self.landed_bytes = 0
        self.lost_bytes = 0
        self._parts = parts
        self._detection = detection
        self._proofs = proofs
        self._random = random.Random(seed)
        self._corruption = random.Random(f"corrupt {seed}")
        """Drawn from apart, so that runs without this fault are what they were before there was one."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stations: dict[str, Station] = {}
        self._under_way: dict[int, Write] = {}
        self._events: list[tuple[float, int, _Event]] = []
        self._waiting: list[_Event] = []
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._partitions: set[Cut] = set()
        self._stalls: set[Cut] = set()
        self._blocks: set[Cut] = set()
        self._counter = 0

    # -- the clock -------------------------------------------------------------

    def advance(self, seconds: float) -> int:
        """Let time pass and everything due in it happen; returns how many events that was."""
        with self._lock:
            until, happened = self.now + seconds, 0
            while self._events and self._events[0][0] <= until:
                happened += self._next_event()
            self.now = until
            return happened

    def step(self) -> bool:
        """Let the next event happen, at its time. False when none is due."""
        with self._lock:
            return bool(self._events) and bool(self._next_event())

    def settle(self) -> int:
        """Step until nothing is due; what is cut or stalled stays. Returns how many events happened."""
        with self._lock:
            happened = 0
            while self.step():
                happened += 1
            return happened

    @property
    def pending(self) -> int:
        """Events that are due, or held by a cut or a stall."""
        with self._lock:
            return len(self._events) + len(self._waiting)

    def _next_event(self) -> int:
        at, _, event = heapq.heappop(self._events)
        self.now = max(self.now, at)
        if self._holds(event):
            self._waiting.append(event)
        else:
            event.happen()
        return 1

    def _holds(self, event: _Event) -> bool:
        if event.kind is _Kind.LOCAL:
            return False
        if event.stalled or any(cut.touches(event.sender, event.receiver) for cut in self._partitions):
            return True
        return event.kind is _Kind.BYTES and any(cut.covers(event.sender, event.receiver) for cut in self._stalls)

    def _schedule(self, at: float, event: _Event) -> None:
        heapq.heappush(self._events, (at, self._number(), event))

    def _number(self) -> int:
        self._counter += 1
        return self._counter

    def _chance(self, probability: float) -> bool:
        # Drawn even where the fault is off, so that turning one fault on does not move the others.
        return self._random.random() < probability

    def _arrival(self) -> float:
        return self.now + self._random.uniform(*self.faults.delay)

    # -- faults on demand --------------------------------------------------------

    def partition(self, agent: str, peer: str | None = None) -> None:
        """Cut an agent from a peer, or from all: what is sent is held and nothing fails."""
        self._change(self._partitions.add, Cut(agent, peer))

    def heal(self) -> None:
        """Undo every partition; what was held is due now."""
        self._change(self._partitions.clear)

    def stall(self, agent: str, peer: str | None = None) -> None:
        """Hold the bytes that ``agent`` WRITEs, while its notifications go on."""
        self._change(self._stalls.add, Cut(agent, peer))

    def release(self) -> None:
        """Undo every stall, the random ones too; what was held is due now."""
        with self._lock:
            self._waiting = [replace(event, stalled=False) for event in self._waiting]
            self._events = [(at, number, replace(event, stalled=False)) for at, number, event in self._events]
            self._change(self._stalls.clear)

    def block_posts(self, agent: str, peer: str | None = None) -> None:
        """Let calls that WRITE or send not return, as LIBFABRIC's to a dead peer. Needs real threads."""
        self._change(self._blocks.add, Cut(agent, peer))

    def unblock_posts(self) -> None:
        """Let blocked calls go on."""
        self._change(self._blocks.clear)

    def _change(self, change: Callable[..., None], *cut: Cut) -> None:
        with self._lock:
            change(*cut)
            waiting, self._waiting = self._waiting, []
            for event in waiting:
                self._schedule(self.now, event)
            self._changed.notify_all()

    def die(self, agent: str) -> None:
        """Kill an agent's process. Over tcp its bytes that are under way still land, up to ``late`` from now."""
        with self._lock:
            station = self._station(agent)
            if station.died is not None:
                return
            station.died = self.now
            station.inbox.clear()
            for write in list(self._under_way.values()):
                if write.source is station:
                    self._orphan(write)
                elif write.target is station:
                    self._fail_later(write, self.now + self._detection)

    def _orphan(self, write: Write) -> None:
        copies = list(write.copies)
        if self.on_death is OnDeath.CMA:
            for copy in copies:
                self._end(copy, landed=0)
            return
        for copy in copies:
            copy.hold()
            # Due a second time, later; whichever comes first lands it.
            self._schedule(self.now + self._random.uniform(0.0, self.faults.late), self._landing(copy))

    # -- agents ----------------------------------------------------------------

    def join(self, agent: str) -> Station:
        """Put an agent on the network; a name may live again once its agent is dead or closed."""
        with self._lock:
            known = self._stations.get(agent)
            if known is not None and known.receives:
                raise TransportError(f"Agent {agent} is on this network already; put the epoch into the name.")
            self._stations[agent] = Station(agent, self._number())
            return self._stations[agent]

    def leave(self, station: Station) -> None:
        """Take an agent off. Its WRITEs in flight go on, from a copy of their bytes; others' to it are lost."""
        with self._lock:
            station.closed = True
            for write in self._under_way.values():
                if write.source is station:
                    for copy in write.copies:
                        copy.hold()

    def station(self, agent: str, life: int) -> Station:
        """The agent of that name and life. Raises TransportError where there is another or none."""
        with self._lock:
            station = self._station(agent)
            if station.life != life:
                raise TransportError(f"Agent {agent} lives again since that metadata was made; fetch it anew.")
            return station

    def noticed_dead(self, station: Station) -> bool:
        """Whether the agent is dead and that has been noticed."""
        with self._lock:
            return station.died is not None and self.now >= station.died + self._detection

    def proof(self, ours: Station, theirs: Station) -> Proof:
        """Whether the peer can start nothing any more and nothing between the two is under way."""
        with self._lock:
            gone = theirs.closed or self.noticed_dead(theirs)
            pair = {ours, theirs}
            busy = any({write.source, write.target} == pair for write in self._under_way.values())
            return Proof.MEMORY_TRANSPORT if self._proofs and gone and not busy else Proof.NONE

    def _station(self, agent: str) -> Station:
        station = self._stations.get(agent)
        if station is None:
            raise TransportError(f"There is no agent {agent} on this network; make its transport first.")
        return station

    # -- notifications -----------------------------------------------------------

    def send(self, sender: Station, receiver: Station, payload: bytes) -> None:
        """Put a notification under way. Raises PeerLost once the receiver's death was noticed."""
        with self._lock:
            self._reach(sender, receiver)
            self._send(sender, receiver, payload)

    def _send(self, sender: Station, receiver: Station, payload: bytes) -> None:
        dropped, twice = self._chance(self.faults.drop), self._chance(self.faults.duplicate)
        at, early = self._arrival(), self._chance(self.faults.reorder)
        if dropped:
            return
        link = (sender.agent, receiver.agent)
        if not early:
            at = self._last_arrival[link] = max(at, self._last_arrival.get(link, 0.0))
        event = _Event(*link, _Kind.MESSAGE, lambda: self._arrive(sender, receiver, payload))
        for _ in range(2 if twice else 1):
            self._schedule(at, event)

    def _arrive(self, sender: Station, receiver: Station, payload: bytes) -> None:
        if receiver.receives:
            receiver.inbox.append((sender.agent, payload))

    def _reach(self, sender: Station, receiver: Station) -> None:
        self._changed.wait_for(lambda: not any(cut.covers(sender.agent, receiver.agent) for cut in self._blocks))
        if receiver.closed or self.noticed_dead(receiver):
            raise PeerLost(f"Peer {receiver.agent} is gone; connect to its successor.")

    def take(self, station: Station) -> list[tuple[str, bytes]]:
        """Take what came for an agent."""
        with self._lock:
            self._settle_if_immediate()
            came, station.inbox = station.inbox, []
            return came

    def _settle_if_immediate(self) -> None:
        if self.immediate:
            self.settle()

    # -- WRITEs ------------------------------------------------------------------

    def post(self, ours: Station, peer: Station, pieces: tuple[U64, U64, U64], notification: bytes) -> int:
        """Put a WRITE under way and return its number.

        ``pieces`` are source addresses, target addresses and lengths, checked by the caller.
        """
        with self._lock:
            self._reach(ours, peer)
            write = Write(self._number(), ours, peer, notification)
            write.deal(*pieces, self._parts)
            ours.writes[write.number] = write
            if write.copies:
                self._under_way[write.number] = write
                self._send_off(write)
            return write.number

    def _send_off(self, write: Write) -> None:
        stalled, fails = self._chance(self.faults.stall), self._chance(self.faults.fail)
        arrivals = [self._arrival() for _ in write.copies]
        if self._corruption.random() < self.faults.corrupt:
            self._spoil(write)
        if fails:
            failed_at = self._arrival()
            self._fail_later(write, failed_at)
            arrivals = [failed_at + self._random.uniform(0.0, self.faults.late) for _ in write.copies]
        for copy, at in zip(list(write.copies), arrivals, strict=True):
            self._schedule(at, self._landing(copy, stalled=stalled))

    def _spoil(self, write: Write) -> None:
        if copies := [copy for copy in write.copies if copy.bytes]:
            copy = self._corruption.choice(copies)
            copy.corrupt = self._corruption.randrange(copy.bytes)

    def _landing(self, copy: Copy, *, stalled: bool = False) -> _Event:
        link = (copy.write.source.agent, copy.write.target.agent)
        return _Event(*link, _Kind.BYTES, lambda: self._land(copy), stalled)

    def _land(self, copy: Copy) -> None:
        write = copy.write
        if copy not in write.copies:
            return  # it landed before, or ended with its process
        if not write.target.receives:
            self._fail(write)
            self._end(copy, landed=0)
        else:
            self._end(copy, landed=copy.land(write.target.regions))

    def _end(self, copy: Copy, *, landed: int) -> None:
        self.landed_bytes += landed
        self.lost_bytes += copy.bytes - landed
        copy.write.copies.remove(copy)
        if not copy.write.copies:
            self._under_way.pop(copy.write.number, None)

    def _fail_later(self, write: Write, at: float) -> None:
        self._schedule(at, _Event(write.source.agent, write.target.agent, _Kind.LOCAL, lambda: self._fail(write)))

    def _fail(self, write: Write) -> None:
        if write.result is None and write.copies:
            lost = not write.target.receives
            why = (
                f"Peer {write.target.agent} is gone."
                if lost
                else "The network failed it; its bytes may still travel."
            )
            write.result = WriteResult(write.number, WriteStatus.FAILED, why, peer_lost=lost)

    def ended(self, station: Station) -> list[WriteResult]:
        """The agent's WRITEs that ended since it asked last; their notifications leave here, as UCX's do."""
        with self._lock:
            self._settle_if_immediate()
            for write in station.writes.values():
                if write.result is None and not write.copies:
                    write.result = WriteResult(write.number, WriteStatus.DONE)
                    if write.notification:
                        self._send(station, write.target, write.notification)
            results = [write.result for write in station.writes.values() if write.result is not None]
            for result in results:
                del station.writes[result.write]
            return results

    def forget(self, station: Station, peer: Station) -> None:
        """End the agent's WRITEs to a peer as FAILED; their bytes go on."""
        with self._lock:
            for write in station.writes.values():
                if write.target is peer and write.result is None:
                    why = f"Peer {peer.agent} was removed while the WRITE was in flight."
                    write.result = WriteResult(write.number, WriteStatus.FAILED, why)
