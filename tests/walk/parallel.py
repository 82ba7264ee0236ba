"""The same search by many processes, for what is too much for one core or its memory.

A world belongs to the process that its producers' states say, so that most moves stay at home. What a world is made
of (machine states, messages, WRITEs, environments) has numbers that are the same for all: a log that everybody reads
and, one at a time, adds to. How it ends: as soon as all wait and as many worlds have been taken as were sent.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any

from walk.bits import Bits
from walk.errors import Violation
from walk.machines import Machines, freeze
from walk.moves import Moves
from walk.rules import Net, Rules
from walk.search import Covered, Walked
from walk.world import Bounds, Env, Seat, World, one_of_a_kind

Wire = tuple[int, ...]
BATCH = 2000
"""Worlds that travel together."""
REMEMBERED = 4_000_000
"""Worlds sent that a process remembers, so as not to send them again."""
LOOK = 0.2
"""Seconds between looks at whether all is over."""
VISITS = 500
"""Worlds visited between looks at what has come."""
TOLD = 10.0
"""Seconds between words about the progress."""
_SIZE = struct.Struct("<I")


class Log:
    """Things that have been given numbers, in order: a file that everybody appends to under one lock."""

    def __init__(self, path: str, lock: Any) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        self._at, self._rest = 0, b""
        self._lock = lock
        self.learn: dict[str, Callable[[Any], None]] = {}

    def number(self, kind: str, thing: Any, known: Callable[[], int | None]) -> int:
        """The number of a thing that this process does not know: from another, or a new one."""
        with self._lock:
            self.read()
            if known() is None:
                record = pickle.dumps((kind, thing))
                os.write(self._file, _SIZE.pack(len(record)) + record)
                self.read()
        number = known()
        assert number is not None
        return number

    def read(self) -> None:
        """Take in what others have added."""
        while new := os.pread(self._file, 1 << 24, self._at):
            self._at += len(new)
            data, at = self._rest + new, 0
            while at + 4 <= len(data) and at + 4 + (size := _SIZE.unpack_from(data, at)[0]) <= len(data):
                kind, thing = pickle.loads(data[at + 4 : at + 4 + size])
                self.learn[kind](thing)
                at += 4 + size
            self._rest = data[at:]


class SharedMachines(Machines[Any]):
    """Machine states whose numbers all processes agree on."""

    def share(self, log: Log, kind: str) -> None:
        """From now on."""
        self._log, self._kind = log, kind
        log.learn[kind] = self._learn

    def _learn(self, pickled: bytes) -> None:
        self._numbers[freeze(pickle.loads(pickled))] = len(self._pickles)
        self._pickles.append(pickled)

    def number(self, machine: Any) -> int:
        """See Machines."""
        self._check(machine)
        frozen = freeze(machine)
        known = self._numbers.get(frozen)
        if known is None:
            known = self._log.number(self._kind, pickle.dumps(machine), lambda: self._numbers.get(frozen))
        return known


class _Agreed(Bits):
    """Bit numbers that all processes agree on."""

    def share(self, log: Log, kind: str) -> None:
        """From now on."""
        self._log, self._kind = log, kind
        log.learn[kind] = self.add

    def of(self, thing: Any) -> int:
        """See Bits."""
        known = self._bits.get(thing)
        return self._log.number(self._kind, thing, lambda: self._bits.get(thing)) if known is None else known


class SharedBits(_Agreed):
    """Of WRITEs."""


class SharedNet(_Agreed, Net):
    """Of messages."""


class Kinds:
    """What there is one of a kind of, by number: seats and environments."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._numbers: dict[Seat | Env, int] = {}
        self._things: list[Any] = []
        log.learn["kind"] = self._learn

    def _learn(self, record: tuple[type[Seat | Env], tuple[Any, ...]]) -> None:
        kind, fields = record
        thing = one_of_a_kind(kind(*fields))
        self._numbers[thing] = len(self._things)
        self._things.append(thing)

    def number(self, thing: Seat | Env) -> int:
        """The number of a thing."""
        known = self._numbers.get(thing)
        if known is None:
            known = self._log.number("kind", (type(thing), tuple(thing)), lambda: self._numbers.get(thing))
        return known

    def wire(self, w: World) -> Wire:
        """A world as numbers."""
        seats = (self.number(seat) for seat in w.seats)
        return (*w.ps, *w[1:8], *seats, self.number(w.env))

    def world(self, wire: Wire) -> World:
        """The world that numbers stand for."""
        ranks = (len(wire) - 8) // 2
        *seats, env = (self._things[number] for number in wire[ranks + 7 :])
        return World(wire[:ranks], *wire[ranks : ranks + 7], tuple(seats), env)


@dataclass
class Shared:
    """What the processes share: queues for worlds, counters for the end, and the log."""

    bounds: Bounds
    rules: type[Rules]
    path: str
    lock: Any
    inboxes: list[Queue[list[Wire]]]
    reports: Queue[Any]
    sent: Any
    taken: Any
    idle: Any
    waiting: Any
    visited: Any
    over: Any


@dataclass
class Part:
    """One process's part of the search."""

    me: int
    shared: Shared
    seen: Walked = field(default_factory=Walked)

    def __post_init__(self) -> None:
        self.log = Log(self.shared.path, self.shared.lock)
        self.kinds = Kinds(self.log)
        self.rules = shared_rules(self.shared, self.log)
        self.moves, self.covered = Moves(self.rules), Covered(self.rules)
        self.queue: deque[World] = deque()
        self.out: list[list[Wire]] = [[] for _ in self.shared.inboxes]
        self.told: set[Wire] = set()

    def owner(self, w: World) -> int:
        """Whose world this is: of all that have the same core one process's."""
        number = w.c * 104_729 if -1 in w.ps else 0
        for p in w.ps:
            number = number * 31 + p * 7919
        return number % len(self.shared.inboxes)

    def put(self, w: World) -> None:
        """A world that was reached."""
        if (owner := self.owner(w)) == self.me:
            if self.covered.add(w):
                self.queue.append(w)
            return
        wire = self.kinds.wire(w)
        if wire in self.told:
            return
        if len(self.told) > REMEMBERED:
            self.told.clear()
        self.told.add(wire)
        self.out[owner].append(wire)
        if len(self.out[owner]) >= BATCH:
            self.send(owner)

    def send(self, owner: int) -> None:
        """Send what is collected for another."""
        if self.out[owner]:
            self.shared.sent[self.me] += len(self.out[owner])
            self.shared.inboxes[owner].put(self.out[owner])
            self.out[owner] = []

    def take(self, wait: bool) -> bool:
        """Take a batch that others have sent."""
        try:
            batch = (
                self.shared.inboxes[self.me].get(timeout=LOOK) if wait else self.shared.inboxes[self.me].get_nowait()
            )
        except Empty:
            return False
        self.shared.idle[self.me] = 0
        self.log.read()
        for wire in batch:
            self.put(self.kinds.world(wire))
        self.shared.taken[self.me] += len(batch)
        return True

    def work(self) -> None:
        """Until all is over."""
        shared = self.shared
        if self.me == 0:
            start = self.rules.start()
            self.covered.add(start)
            self.queue.append(start)
        shared.taken[self.me] += 1  # the sum is even with what was sent once every process has begun
        while not shared.over.value:
            while self.take(wait=False):
                pass
            for _ in range(min(VISITS, len(self.queue))):
                self.visit(self.queue.popleft())
            shared.waiting[self.me], shared.visited[self.me] = len(self.queue), self.seen.states
            if not self.queue:
                for owner in range(len(self.out)):
                    self.send(owner)
                shared.idle[self.me] = 1
                if self.take(wait=True):
                    shared.idle[self.me] = 0

    def visit(self, world: World) -> None:
        """Make every move from a world."""
        if world not in self.covered:
            return
        self.seen.states += 1
        for _, made in self.moves.of(world):
            self.seen.transitions += 1
            self.put(self.rules.normal(made))


def shared_rules(shared: Shared, log: Log) -> Rules:
    """Rules whose numbers all processes agree on."""
    rules = shared.rules(shared.bounds)
    for machines, kind in ((rules.ps, "p"), (rules.cs, "c")):
        machines.__class__ = SharedMachines
        machines.share(log, kind)  # type: ignore[attr-defined]
    for bits, shared_bits, kind in (
        (rules.net, SharedNet, "message"),
        (rules.effects.flights, SharedBits, "flight"),
        (rules.effects.copies, SharedBits, "copy"),
    ):
        bits.__class__ = shared_bits
        bits.share(log, kind)  # type: ignore[attr-defined]
    return rules


def _run(me: int, shared: Shared) -> None:
    gc.disable()
    part = Part(me, shared)
    try:
        part.work()
    except Violation as violation:
        part.seen.broken = f"{violation}"
        shared.over.value = 1
    except BaseException as error:
        part.seen.broken = f"{type(error).__name__}: {error}"
        shared.over.value = 1
    part.seen.uncovered = len(part.covered)
    part.seen.producer_states, part.seen.consumer_states = len(part.rules.ps), len(part.rules.cs)
    shared.reports.put(part.seen)
    for inbox in shared.inboxes:
        inbox.cancel_join_thread()


def walk(
    bounds: Bounds,
    processes: int,
    *,
    rules: type[Rules] = Rules,
    told: Callable[[str], None] | None = None,
    limit: float = math.inf,
) -> Walked:
    """As :func:`walk.search.walk`, by many processes. ``told`` hears of the progress; ``limit`` in seconds.

    How many worlds are visited depends on who comes first, as one that another covers need not be; the verdict and
    the machines' states do not.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile() as file:
        counters = [context.Array("q", processes, lock=False) for _ in range(5)]
        inboxes: list[Any] = [context.Queue() for _ in range(processes)]
        reports: Any = context.Queue()
        shared = Shared(bounds, rules, file.name, context.Lock(), inboxes, reports, *counters, context.Value("b", 0))
        workers = [context.Process(target=_run, args=(me, shared), daemon=True) for me in range(processes)]
        for worker in workers:
            worker.start()
        ended = _watch(shared, processes, told, limit)
        shared.over.value = 1
        parts = [reports.get() for _ in workers]
        for worker in workers:
            worker.join()
    whole = Walked(whole=ended)
    for part in parts:
        whole.states += part.states
        whole.transitions += part.transitions
        whole.uncovered += part.uncovered
        whole.broken = whole.broken or part.broken
        whole.producer_states = max(whole.producer_states, part.producer_states)
        whole.consumer_states = max(whole.consumer_states, part.consumer_states)
    return whole


def _watch(shared: Shared, processes: int, told: Callable[[str], None] | None, limit: float) -> bool:
    """Wait for the end; whether it came before the limit."""
    began, last, last_told = time.monotonic(), (-1, -1), 0.0
    while not shared.over.value:
        time.sleep(LOOK)
        now = (sum(shared.sent) + processes, sum(shared.taken))
        if all(shared.idle) and now[0] == now[1] and now == last:
            return True
        last = now
        spent = time.monotonic() - began
        if told is not None and spent - last_told >= TOLD:
            last_told = spent
            told(f"{spent:.0f} s: {sum(shared.visited):,} visited, {sum(shared.waiting):,} wait, {now[0]:,} sent")
        if spent > limit:
            return False
    return False
