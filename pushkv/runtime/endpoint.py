"""What a Producer and a Consumer have in common: threads, events, the watch over peers and the transfer thread."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command
from pushkv.core.messages import Blocks, Table
from pushkv.core.outcome import Outcome
from pushkv.errors import ConfigError, EndpointClosed, GeometryError
from pushkv.runtime import wire
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.loop import TransferThread
from pushkv.runtime.side import Shared, Side
from pushkv.runtime.turn import Turn
from pushkv.trace import Trace
from pushkv.transport.base import Transport

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Side)
E = TypeVar("E", bound="Endpoint[Any]")
TransportFactory = Callable[[str], Transport]
SIGN_OF_LIFE = 1.0
"""Seconds between signs of life over a control connection."""
_kept: list[object] = []
"""What is still in somebody's custody when its endpoint closes: it lives as long as the process."""


class Ending:
    """How one transfer or stage ends, for whoever waits for it; from any thread."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.detail = ""
        self._ended = threading.Event()
        self._released = threading.Event()

    @property
    def released(self) -> bool:
        """Whether its blocks are out of everybody's custody."""
        return self._released.is_set()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """Wait for the outcome; None if it is not there in time."""
        self._ended.wait(timeout)
        return self.outcome

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait until its blocks may be reused; whether they may."""
        return self._released.wait(timeout)

    def end(self, outcome: Outcome, detail: str) -> None:
        """Called by the endpoint, once."""
        self.outcome, self.detail = outcome, detail
        self._ended.set()

    def hold(self) -> None:
        """Called by the endpoint: it has blocks in custody (again)."""
        self._released.clear()

    def release(self) -> None:
        """Called by the endpoint."""
        self._released.set()


class Endpoint(Generic[S]):
    """Base of Producer and Consumer. Close it, or use it as a context manager."""

    role = ""

    def __init__(
        self,
        config: EndpointConfig,
        cache: KVCache,
        *,
        transport: TransportFactory | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.epoch = secrets.token_hex(8)
        self.agent = f"pushkv-{self.role}-{config.engine}-{config.rank}-{self.epoch}"
        self.stalled = ""
        """In which call of the data mover the transfer thread got stuck for good; empty while all is well."""
        self._events: deque[Command] = deque()
        self._closing = False
        self._closed = False
        self._control = ControlThread(f"pushkv-{self.role}-control", self._heard, self._tick)
        self._turn = Turn()
        self._shared = Shared(
            config,
            cache,
            self.agent,
            self.epoch,
            transport or _transport_factory(config),
            self._control,
            self._turn,
            self._emit,
            trace or Trace.disabled(),
        )
        self._side = self._make_side(self._shared)
        self._transfer = TransferThread(f"pushkv-{self.role}", self._side, config.idle_poll, config.due_poll)
        self._last_sign = 0.0

    def _make_side(self, shared: Shared) -> S:
        raise NotImplementedError

    def _start(self) -> None:
        """Start both threads; nothing is left behind where the data mover does not start."""
        try:
            self._transfer.start()
        except BaseException:
            self._control.close()
            raise
        self._control.start()

    def __enter__(self: E) -> E:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The engine's side

    def events(self) -> list[Command]:
        """Take what has happened: Ended and Released (consumer), also StageEnded and StageReleased (producer)."""
        taken: list[Command] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def stats(self) -> dict[str, int]:
        """Counters since the start: bytes, descriptors, outcomes, what was dropped."""
        counts = Counter(self._shared.stats)
        counts.update(self._side._base_machine.counts)
        counts["control frames dropped"] = self._control.dropped
        counts["errors"] = self._transfer.errors
        return dict(counts)

    def path(self, peer: str) -> str:
        """What moves the bytes to or from a peer, in words."""
        return self.ask(lambda: self._side.transport.path(peer) if self._side.transport else "none: stuck")

    def ask(self, question: Callable[[], str]) -> str:
        """Have the transfer thread answer something, within the connect timeout."""
        answer: list[str] = []
        done = threading.Event()

        def answering() -> None:
            answer.append(question())
            done.set()

        self._submit(answering)
        done.wait(self.config.connect_timeout)
        return answer[0] if answer else "unknown: no answer from the transfer thread"

    def close(self, timeout: float = 10.0) -> bool:
        """Take nothing new, end what is open, wait for custody to end, and stop; whether custody ended in time.

        Memory that a peer may still write into, or a WRITE still read, is kept registered and alive for the rest
        of the process's life.
        """
        if self._closed:
            return True
        self._closing = True
        self._transfer.submit(self._wind_up)
        clear = self._drained(time.monotonic() + timeout)
        self._closed = True
        if not clear:
            log.warning("%s closes with memory in custody: its cache stays registered.", self.agent)
            _kept.append(self)
        elif not self._transfer.stop(timeout):
            log.warning("%s closes while its transfer thread is stuck: its cache stays registered.", self.agent)
            _kept.append(self)
            clear = False
        self._control.close()
        return clear

    def _drained(self, deadline: float) -> bool:
        while time.monotonic() < deadline:
            if not self._in_custody():
                return True
            time.sleep(0.005)
        return not self._in_custody()

    def _wind_up(self) -> None:
        """On the transfer thread: end what is open."""
        raise NotImplementedError

    def _in_custody(self) -> bool:
        """Whether anything is open or in custody."""
        raise NotImplementedError

    def _submit(self, action: Callable[[], None]) -> None:
        if self._closing:
            raise EndpointClosed(f"{self.agent} is closed; make another endpoint.")
        self._transfer.submit(action)

    def _emit(self, event: Command) -> None:
        self._events.append(event)

    # The control thread's side

    def _heard(self, route: Route, message: wire.Control) -> None:
        now = time.monotonic()
        if isinstance(message, wire.Relay):
            self._transfer.submit(lambda: self._side.frame(message.frame, relayed=True))
        elif isinstance(message, wire.Alive):
            pair = self._side.pairs.get(message.token)
            if pair is not None:
                pair.heard = now
                if pair.lost and not pair.broken:
                    self._transfer.submit(lambda: self._side.heard_again(message.token))
        else:
            self._control_message(route, message)

    def _control_message(self, route: Route, message: wire.Control) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        now = time.monotonic()
        self._watch_thread()
        for pair in list(self._side.pairs.values()):
            if pair.lost:
                continue
            if pair.watch is not None and pair.watch.dead():
                pair.broken = True
                self._report_loss(pair.token, "its process has ended")
            elif now - pair.heard > self.config.silence:
                self._report_loss(pair.token, f"not a word from it for {self.config.silence:g} s")
        if now - self._last_sign >= SIGN_OF_LIFE:
            self._last_sign = now
            self._give_signs()

    def _report_loss(self, token: bytes, detail: str) -> None:
        self._transfer.submit(lambda: self._side.peer_silent(token, detail))

    def _give_signs(self) -> None:
        for pair in list(self._side.pairs.values()):
            self._control.send(pair.route, wire.Alive(pair.token))

    def _watch_thread(self) -> None:
        """Go on without the data mover where a call into it does not return."""
        doing = self._turn.seize(self.config.stall)
        if doing is None:
            return
        detail = f"{doing} did not return for {self.config.stall:g} s"
        log.error("%s: %s; its transfer thread is given up and its memory stays registered.", self.agent, detail)
        self.stalled = detail
        self._shared.stats["transfer threads given up"] += 1
        _kept.append(self)
        self._side.transport = None
        self._side.grounded = detail
        self._transfer = self._transfer.successor(self._side)
        self._transfer.start()


def _transport_factory(config: EndpointConfig) -> TransportFactory:
    if config.transport != "nixl":
        raise ConfigError(
            "transport 'memory' works inside one process: pass transport=lambda a: MemoryTransport(net, a)"
        )

    def make(agent: str) -> Transport:
        from pushkv.transport.nixl import NixlSettings, NixlTransport

        nixl = config.nixl
        return NixlTransport(
            NixlSettings(
                agent,
                backend=nixl.backend,
                parameters=nixl.parameters,
                progress_thread_delay_us=nixl.progress_thread_delay_us,
            )
        )

    return make


def pack_blocks(cache: KVCache, blocks: object, first: int = 0) -> Blocks:
    """Block ids as a message holds them: one list for a cache of one group, or one a group.

    ``first`` is the logical block (in the request) of the first id. Raises GeometryError for ids out of range.
    """
    groups = cache.geometry.groups
    lists = [blocks] if len(groups) == 1 and not _nested(blocks) else list(blocks)  # type: ignore[call-overload]
    if len(lists) != len(groups):
        raise GeometryError(f"{len(lists)} block tables were given for {len(groups)} cache groups; give one a group.")
    tables = []
    for number, (ids, group) in enumerate(zip(lists, groups, strict=True)):
        array = np.asarray(ids, dtype="<i4").reshape(-1)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < group.blocks):
            raise GeometryError(
                f"Group {number} is given blocks {int(array.min())} to {int(array.max())}; it has {group.blocks}."
            )
        tables.append(Table(first, array.tobytes()))
    return Blocks(tuple(tables))


def _nested(blocks: object) -> bool:
    return isinstance(blocks, (list, tuple)) and bool(blocks) and not isinstance(blocks[0], (int, np.integer))
