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
from numpy.typing import NDArray

from pushkv.cache import KVCache
from pushkv.config import LONGEST, EndpointConfig
from pushkv.core.commands import Command
from pushkv.core.messages import Blocks, Table
from pushkv.core.prompt import DIGEST_BYTES
from pushkv.errors import ConfigError, EndpointClosed, GeometryError, ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.ending import Ending
from pushkv.runtime.keys import load_keys
from pushkv.runtime.lines import Lines
from pushkv.runtime.loop import TransferThread
from pushkv.runtime.pair import Pair
from pushkv.runtime.side import CLOSED, Shared, Side
from pushkv.runtime.turn import Turn
from pushkv.trace import Trace
from pushkv.transport.base import Transport

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Side)
E = TypeVar("E", bound="Endpoint[Any]")
__all__ = ["Ending", "Endpoint", "TransportFactory", "check_request", "pack_blocks"]

TransportFactory = Callable[[str], Transport]
SIGN_OF_LIFE = 1.0
"""Seconds between signs of life over a control connection."""
LONG_AWAY = 1.0
"""Seconds without a tick after which it was this process that was not there, and no peer's silence counts."""
MOST_EVENTS = 1 << 16
"""How many events wait to be taken: an engine that waits on transfers instead must not gather them for ever."""
_kept: list[object] = []
"""What is still in somebody's custody when its endpoint closes: it lives as long as the process."""


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
        factory = transport or _transport_factory(config)
        self.epoch = secrets.token_hex(8)
        self.agent = f"pushkv-{self.role}-{config.engine}-{config.rank}-{self.epoch}"
        self.stalled = ""
        """In which call of the data mover the transfer thread got stuck for good; empty while all is well."""
        self._events: deque[Command] = deque()
        self._closing = False
        self._closed: bool | None = None
        self._close_once = threading.Lock()
        keys = load_keys(config.key_file)
        lines = Lines(keys, config.allow, wire.MAX_CONTROL_FRAME)
        self._control = ControlThread(f"pushkv-{self.role}-control", lines, self._heard, self._tick)
        self.guarded = bool(keys)
        """Whether a cluster key guards the control plane."""
        self._turn = Turn()
        self._shared = Shared(
            config,
            cache,
            self.agent,
            self.epoch,
            factory,
            self._control,
            self._turn,
            self._emit,
            trace or Trace.disabled(),
        )
        self._side = self._make_side(self._shared)
        self._transfer = TransferThread(f"pushkv-{self.role}", self._side, config.idle_poll, config.due_poll)
        self._last_sign = 0.0
        self._last_tick = time.monotonic()

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
        counts.update(dict(self._side._base_machine.counts))  # a copy: the transfer thread goes on counting
        counts["control frames dropped"] = self._control.dropped
        counts["errors"] += self._transfer.errors
        return dict(counts)

    def path(self, peer: str) -> str:
        """What moves the bytes to or from a peer, in words."""
        return self.ask(lambda: self._side.transport.path(peer) if self._side.transport else "none: stuck")

    def ask(self, question: Callable[[], str]) -> str:
        """Have the transfer thread answer something, within the connect timeout."""
        answer: list[str] = []
        done = threading.Event()

        def answering() -> None:
            try:
                answer.append(question())
            finally:
                done.set()

        self._submit(answering)
        done.wait(self.config.connect_timeout)
        return answer[0] if answer else "unknown: no answer from the transfer thread"

    def close(self, timeout: float = 10.0) -> bool:
        """Take nothing new, end what is open, wait for custody to end, and stop; whether custody ended in time.

        Memory that a peer may still write into, or a WRITE still read, is kept registered and alive for the rest
        of the process's life.
        """
        with self._close_once:
            if self._closed is None:
                self._closed = self._shut(timeout)
        return self._closed

    def _shut(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._closing = True
        wound_up = threading.Event()
        self._transfer.submit(lambda: self._wind_up_and(wound_up.set))
        clear = wound_up.wait(timeout) and self._drained(deadline)
        if not clear:
            log.warning("%s closes with memory in custody: its cache stays registered.", self.agent)
        elif not self._transfer.stop(timeout):
            log.warning("%s closes while its transfer thread is stuck: its cache stays registered.", self.agent)
            clear = False
        if clear:
            for pair in list(self._side.agents.values()):
                self._control.send(pair.route, wire.Bye(pair.token))
            self._end_the_rest()
        else:
            _kept.append(self)
        self._control.close()
        if self.stalled:
            self._transfer.stop(timeout)
        return clear

    def _drained(self, deadline: float) -> bool:
        while self._in_custody():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _wind_up_and(self, done: Callable[[], None]) -> None:
        try:
            self._wind_up()
        finally:
            done()

    def _end_the_rest(self) -> None:
        """End what was handed over while the endpoint closed and has never been taken up."""
        raise NotImplementedError

    def _wind_up(self) -> None:
        """On the transfer thread: end what is open."""
        raise NotImplementedError

    def _in_custody(self) -> bool:
        """Whether anything is open or in custody."""
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closing:
            raise EndpointClosed(f"{self.agent} is closed; make another endpoint.")

    def _submit(self, action: Callable[[], None]) -> None:
        self._check_open()
        self._transfer.submit(action)

    def _emit(self, event: Command) -> None:
        self._events.append(event)
        if len(self._events) > MOST_EVENTS:
            self._events.popleft()
            self._shared.stats["events dropped"] += 1

    # The control thread's side

    def _heard(self, route: Route, message: wire.Control) -> None:
        now = time.monotonic()
        if isinstance(message, wire.Relay):
            self._relayed(route, message.frame)
        elif isinstance(message, wire.Alive):
            pair = self._side.pairs.get(message.token)
            if pair is not None:
                pair.heard = now
                if pair.lost or message.token == pair.coming or route != pair.route:
                    self._transfer.submit(lambda: self._side.alive(message.token, route))
        elif isinstance(message, wire.Bye):
            self._transfer.submit(lambda: self._side.peer_gone(message.token, CLOSED))
        else:
            self._control_message(route, message)

    def _relayed(self, route: Route, frame: bytes) -> None:
        """Strangers' frames end here, so that they cannot keep the transfer thread busy."""
        if self._side.knows(frame):
            self._transfer.submit(lambda: self._side.frame(frame, route))
        else:
            self._shared.stats["foreign frames"] += 1

    def _control_message(self, route: Route, message: wire.Control) -> None:
        raise NotImplementedError

    def _tick(self) -> None:
        now = time.monotonic()
        self._watch_thread()
        away, self._last_tick = now - self._last_tick, now
        for pair in list(self._side.agents.values()):
            if away > LONG_AWAY:
                pair.heard += away
            if not pair.lost:
                self._watch(pair, now)
        if now - self._last_sign >= SIGN_OF_LIFE:
            self._last_sign = now
            self._give_signs()

    def _watch(self, pair: Pair, now: float) -> None:
        side, token, silence = self._side, pair.token, self.config.silence
        if pair.watch is not None and pair.watch.dead():
            self._transfer.submit(lambda: side.peer_gone(token, "its process has ended"))
        elif now - pair.heard > silence:
            self._transfer.submit(lambda: side.peer_silent(token, f"not a word from it for {silence:g} s"))

    def _give_signs(self) -> None:
        for pair in list(self._side.agents.values()):
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
        # The data mover too: were it collected when the call returns at last, its memory would be deregistered.
        _kept.extend((self, self._side.transport))
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
        array = _ids(ids)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < group.blocks):
            raise GeometryError(
                f"Group {number} is given blocks {int(array.min())} to {int(array.max())}; it has {group.blocks}."
            )
        tables.append(Table(first, array.astype("<i4").tobytes()))
    return Blocks(tuple(tables))


def _ids(ids: object) -> NDArray[np.integer]:
    try:
        array = np.asarray(ids).reshape(-1)
    except ValueError as error:
        raise GeometryError(f"Block ids {ids!r:.80} are no list of numbers ({error}); give one.") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise GeometryError(f"Block ids {ids!r:.80} are no whole numbers; give a list of them.")
    return array.astype(np.int64) if array.size == 0 else array


def check_request(transfer: str, prompt: bytes, deadline: float | None) -> None:
    """What no peer would take is refused where the engine asks for it. Raises ProtocolError."""
    if not 0 < len(transfer) <= 512:
        raise ProtocolError(f"transfer id {transfer!r:.80} has {len(transfer)} characters; give 1 to 512.")
    if len(prompt) != DIGEST_BYTES:
        raise ProtocolError(f"{transfer}'s prompt digest has {len(prompt)} bytes; make it with pushkv.prompt_digest.")
    if deadline is not None and not 0 < deadline <= LONGEST:
        raise ProtocolError(f"{transfer}'s deadline is {deadline} s; give seconds above 0, at most a day.")


def _nested(blocks: object) -> bool:
    return isinstance(blocks, (list, tuple)) and bool(blocks) and not isinstance(blocks[0], (int, np.integer))
