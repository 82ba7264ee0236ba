"""What a Producer and a Consumer have in common: threads, events, the watch over peers and the transfer thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command
from pushkv.errors import EndpointClosed
from pushkv.runtime import wire
from pushkv.runtime.address import check_guarded, parse, url
from pushkv.runtime.control import ControlThread, Route
from pushkv.runtime.ending import Ending
from pushkv.runtime.factory import TransportFactory, transport_factory
from pushkv.runtime.forked import ClosedOnLeaving
from pushkv.runtime.keys import load_keys
from pushkv.runtime.life import Life, keep
from pushkv.runtime.lines import Lines
from pushkv.runtime.loop import TransferThread
from pushkv.runtime.pair import Pair
from pushkv.runtime.side import Shared, Side
from pushkv.runtime.slots import slots_of
from pushkv.runtime.turn import Turn
from pushkv.runtime.vetting import vet
from pushkv.runtime.watch import OfPairs, Watch
from pushkv.trace import Trace

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Side)
__all__ = ["Ending", "Endpoint", "TransportFactory"]

MOST_EVENTS = 1 << 16
"""How many events wait to be taken: an engine that waits on transfers instead must not gather them for ever."""
AGAIN = 1.0
"""Seconds between tries to go on with a fresh agent."""


class Endpoint(ClosedOnLeaving, Generic[S]):
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
        vet(config, cache)
        factory = transport or transport_factory(config)
        slots = slots_of(config, cache)
        keys = load_keys(config.key_file)
        lines = Lines(keys, config.allow, wire.MAX_CONTROL_FRAME)
        self._control = ControlThread(f"pushkv-{self.role}-control", lines, self._heard, self._tick)
        self.guarded = bool(keys)
        """Whether a cluster key guards the control plane."""
        self._events: deque[Command] = deque()
        self.on_event: Callable[[Command], object] | None = None
        """Called with what was just put among the events, on whatever thread that is: to wake whoever takes them."""
        self._closing = False
        self.draining = False
        """Whether it takes nothing new, while what is open goes on to its end: see :meth:`drain`."""
        self._asleep = False
        self._closed: bool | None = None
        self._close_once = threading.Lock()
        self._again = 0.0
        self._shared = Shared(
            config, cache, "", "", factory, self._control, Turn(), self._emit, trace or Trace.disabled(), slots
        )
        self._renewal = threading.Lock()
        self._fencing = threading.Lock()
        self._past: list[Life[S]] = []
        self._life = self._new_life()
        self._watch: Watch[S] = Watch(
            lambda: self._lives,
            self._control,
            config.silence,
            config.limits.deadline,
            self._shared.stats,
            self._peer_moved,
        )

    def _new_life(self) -> Life[S]:
        return Life(self.role, self._shared, self._make_side)

    def _make_side(self, shared: Shared) -> S:
        raise NotImplementedError

    @property
    def epoch(self) -> str:
        """The present life's epoch."""
        return self._life.epoch

    @property
    def agent(self) -> str:
        """The present life's agent name."""
        return self._life.agent

    @property
    def stalled(self) -> str:
        """In which call of the data mover a transfer thread got stuck for good; empty while all is well."""
        return next((life.stalled for life in (self._life, *self._past) if life.stalled), "")

    @property
    def _side(self) -> S:
        return self._life.side

    @property
    def _transfer(self) -> TransferThread:
        return self._life.transfer

    @property
    def _lives(self) -> list[Life[S]]:
        return [self._life, *self._past]

    def _start(self) -> None:
        """Start both threads; nothing is left behind where the data mover does not start."""
        try:
            self._transfer.start()
        except BaseException:
            self._control.close()
            raise
        self._control.start()

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
        for life in self._lives:
            counts.update(dict(life.side._base_machine.counts))  # a copy: the transfer thread goes on counting
            counts["errors"] += life.transfer.errors
        counts["control frames dropped"] = self._control.dropped
        return dict(counts)

    def path(self, peer: str) -> str:
        """What moves the bytes to or from a peer, in words."""
        return self.ask(lambda side: side.transport.path(peer) if side.transport else "none: stuck")

    def ask(self, question: Callable[[S], str]) -> str:
        """Have the transfer thread answer something, within the connect timeout."""
        answer: list[str] = []
        done = threading.Event()

        def answering(side: S) -> None:
            try:
                answer.append(question(side))
            finally:
                done.set()

        self._submit(answering)
        done.wait(self.config.connect_timeout)
        return answer[0] if answer else "unknown: no answer from the transfer thread"

    def fence(self, timeout: float = 10.0) -> bool:
        """Rebuild the data mover's agent to get proof about lost peers; whether nothing is quarantined afterwards.

        What is open on the old agent ends with ``transport error`` and drains; then the agent is closed, after which
        nothing of a peer on another host, nor of one whose process has ended, can reach its memory. New work goes to
        a fresh agent at once. Memory that a living process of this host may write into stays quarantined.
        """
        with self._renewal:
            self._check_open()
            old = self._begin_again("its agent is rebuilt by fence")
            old.retire(timeout / 2, "its agent was rebuilt by fence")
        deadline = time.monotonic() + timeout
        while old in self._past and time.monotonic() < deadline:
            time.sleep(0.01)
        return old not in self._past

    def sleep(self, timeout: float = 10.0) -> bool:
        """Let go of the cache's memory (an engine's sleep mode, ``unregister_kv_caches``); whether it may be freed.

        What is open ends as by :meth:`close`; when custody has ended within ``timeout`` the agent is closed, which
        deregisters the memory. Otherwise the endpoint goes on awake, and the memory must stay where it is.
        """
        with self._renewal:
            self._check_open()
            self._asleep = True
            deadline = time.monotonic() + timeout
            if not (all([life.do(self._wind_up, deadline) for life in self._lives]) and self._drained(deadline)):
                self._begin_again("it could not sleep with memory in custody")
                self._asleep = False
                return False
            for life in self._lives:
                for pair in list(life.side.agents.values()):
                    self._control.send(pair.route, wire.Bye(pair.token))
            return all([life.transfer.stop(timeout) for life in self._lives])

    def wake(self) -> None:
        """Serve again after :meth:`sleep`, with the cache where it was; peers meet the fresh agent by themselves."""
        with self._renewal:
            if not self._asleep:
                return
            self._begin_again("it wakes")
            self._past = []
            self._asleep = False

    def _begin_again(self, why: str) -> Life[S]:
        """Begin another life; the last one goes on with what is in its custody. Raises what the data mover raises."""
        life, old = self._new_life(), self._life
        life.transfer.start()
        self._past = [*self._past, old]
        self._life = life
        self._shared.stats["lives"] += 1
        log.warning("%s goes on as %s: %s.", old.agent, life.agent, why)
        self._reconnect(old)
        return old

    def _reconnect(self, old: Life[S]) -> None:
        """Have the peers of the old life meet the new one."""
        raise NotImplementedError

    def drain(self, timeout: float = 30.0) -> bool:
        """Take nothing new, let what is open finish, and wait for custody to end; whether it did in time.

        Nothing is cut short here, also not by the timeout. Close the endpoint afterwards.
        """
        deadline = time.monotonic() + timeout
        with self._renewal:
            self.draining = True
            if self._asleep:
                return True
        if self._closing:
            return self.close(timeout)
        return all([life.do(self._refuse_new, deadline) for life in self._lives]) and self._drained(deadline)

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
        with self._renewal:
            self._closing = True
            if self._asleep:
                self._end_the_rest()
                self._control.close()
                return True
        clear = all([life.do(self._wind_up, deadline) for life in self._lives])
        clear = self._drained(deadline) and clear
        if not clear:
            log.warning("%s closes with memory in custody: its cache stays registered.", self.agent)
        elif not all([life.transfer.stop(timeout) for life in self._lives]):
            log.warning("%s closes while its transfer thread is stuck: its cache stays registered.", self.agent)
            clear = False
        if clear:
            for life in self._lives:
                for pair in list(life.side.agents.values()):
                    self._control.send(pair.route, wire.Bye(pair.token))
            self._end_the_rest()
        else:
            keep(self)
        self._control.close()
        for life in self._lives:
            if life.stalled:
                life.transfer.stop(timeout)
        return clear

    def _drained(self, deadline: float) -> bool:
        while any(life.side.in_custody for life in self._lives):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def _end_the_rest(self) -> None:
        """End what was handed over while the endpoint closed and has never been taken up."""
        raise NotImplementedError

    def _wind_up(self, side: S) -> None:
        """On the transfer thread: end what is open."""
        raise NotImplementedError

    def _refuse_new(self, side: S) -> None:
        """On the transfer thread: refuse what peers begin from now on."""

    def _check_new(self) -> None:
        self._check_open()
        if self.draining:
            raise EndpointClosed(f"{self.agent} is shutting down and takes nothing new; use another endpoint.")

    def _check_open(self) -> None:
        if self._closing:
            raise EndpointClosed(f"{self.agent} is closed; make another endpoint.")
        if self._asleep:
            raise EndpointClosed(f"{self.agent} sleeps; wake it first.")

    def _submit(self, action: Callable[[S], object]) -> None:
        """Have the present life's transfer thread do something."""
        self._check_open()
        self._life.submit(action)

    def _submit_to_all(self, action: Callable[[S], object]) -> None:
        """Have the transfer threads of all lives do something: what it is about may be in any."""
        self._check_open()
        for life in self._lives:
            life.submit(action)

    def _emit(self, event: Command) -> None:
        self._events.append(event)
        if len(self._events) > MOST_EVENTS:
            self._events.popleft()
            self._shared.stats["events dropped"] += 1
        if self.on_event is not None:
            self.on_event(event)

    @property
    def quarantined(self) -> int:
        """How many transfers wait for nothing but proof that their memory is out of reach."""
        return sum(life.side.quarantined for life in self._lives)

    # What comes in over the control port

    def _heard(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, OfPairs):
            self._watch.heard(route, message)
        else:
            self._control_message(route, message)

    def _peer_moved(self, pair: Pair) -> None:
        """A peer goes on with another agent."""

    def _tick(self) -> None:
        now = time.monotonic()
        self._watch.tick(now)
        self._watch_lives(now)

    def _watch_lives(self, now: float) -> None:
        """Give up what is stuck, begin again where that was the present life, and drop the lives that are over."""
        for life in self._lives:
            life.give_up_if_stuck()
        if self._life.stalled and not self._closing and now >= self._again and self._renewal.acquire(blocking=False):
            self._again = now + AGAIN
            try:
                self._begin_again(self._life.stalled)
            except Exception as error:
                log.error("%s cannot go on with a fresh agent yet: %s", self.agent, error)
            finally:
                self._renewal.release()
        over = [life for life in self._past if life.tick(now)]
        if over:
            self._past = [life for life in self._past if life not in over]

    def _control_message(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Fence) and not self._fencing.acquire(blocking=False):
            self._control.send(route, wire.Fenced(False, "another fence is under way; ask again after it"))
        elif isinstance(message, wire.Fence):
            name = f"pushkv-{self.role}-fence"
            threading.Thread(target=self._fence_for, args=(route, message.limit), name=name, daemon=True).start()

    def _fence_for(self, route: Route, limit: float) -> None:
        """Fence because an operator asked for it, and answer."""
        try:
            clear = self.fence(limit)
            detail = f"{self.agent} goes on; {self.quarantined} transfers are quarantined"
        except Exception as error:
            clear, detail = False, str(error)
        self._fencing.release()
        self._control.send(route, wire.Fenced(clear, detail[:2000]))

    def _listen(self) -> None:
        """Listen as the config says, and start. Raises AddressError."""
        bind = parse(self.config.bind)
        try:
            check_guarded(bind, self.guarded, self.config.listen_to_the_network_without_a_key)
            host, port = self._control.listen(bind)
        except BaseException:
            self._control.close()
            raise
        told = parse(self.config.advertise) if self.config.advertise else (host, port)
        self.address = url((told[0], told[1] or port))
        """Where this endpoint is reached: consumers connect to a producer's, operators to anybody's."""
        self._start()
