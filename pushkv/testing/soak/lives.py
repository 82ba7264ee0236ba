"""One life of an endpoint in the soak: a side of the runtime without its threads, and its cache."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.layouts import Shard
from pushkv.core.messages import TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.runtime import wire
from pushkv.runtime.address import Address, url
from pushkv.runtime.consuming import Consuming, Dial
from pushkv.runtime.control import Route
from pushkv.runtime.copying import Copier, Job, Told
from pushkv.runtime.pair import Pair
from pushkv.runtime.producer import CLOSING
from pushkv.runtime.producing import Producing
from pushkv.runtime.side import CLOSED, Shared, Side
from pushkv.runtime.slots import pool_of, slots_of
from pushkv.runtime.turn import Turn
from pushkv.testing.ledger import Ledger
from pushkv.testing.soak.lines import Exchange, Line
from pushkv.testing.soak.settings import CONTENT, LAYERS, SIDES, SLOT_BYTES, SLOTS, SOURCE_TOKENS, Settings
from pushkv.testing.soak.witness import Served, witnessed
from pushkv.trace import Trace
from pushkv.transport.memory import MemoryTransport, Network

DIAL_AGAIN = 1.0
"""Seconds after which a handshake is given up."""


@dataclass(frozen=True)
class Seat:
    """Where lives follow each other: an engine's rank, at an address."""

    name: str
    engine: str
    rank: int
    address: Address
    shard: Shard

    @property
    def url(self) -> str:
        """The address as a route."""
        return url(self.address)


@dataclass
class Surroundings:
    """What all lives of an episode share. ``happened`` is told of every event of an endpoint."""

    settings: Settings
    network: Network
    exchange: Exchange
    clock: Callable[[], float]
    rng: random.Random
    happened: Callable[[Life, Command], None]
    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine


class LazyCopier(Copier):
    """Copies now or some looks later, in one thread."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._jobs: deque[tuple[Job, Told]] = deque()

    def _start(self, job: Job, told: Told) -> None:
        self._jobs.append((job, told))

    def poll(self) -> list[Callable[[], object]]:
        """Perhaps some of them."""
        while self._jobs and self._rng.random() < 0.6:
            self.run(*self._jobs.popleft())
        return super().poll()


class Life:
    """From the start to the end of one process."""

    role = ""
    tokens = SOURCE_TOKENS
    """Tokens a block."""
    machine: Any

    def __init__(self, around: Surroundings, seat: Seat, number: int) -> None:
        self.around = around
        self.seat = seat
        self.name = f"{seat.name}.{number}"
        self.agent = f"pushkv-{self.role}-{seat.engine}-{seat.rank}-{self.name}"
        self.alive = True
        self.paused_until = 0.0
        self.closing = False
        self._mail: list[tuple[Route, wire.Control]] = []
        self._was_away = False
        cache = self._cache()
        self.side = self._make_side(self._shared(cache))
        self.side.open()
        assert self.side.me is not None
        self.side.me = msgspec.structs.replace(self.side.me, host=None)
        around.exchange.join(self.agent, self._deliver, seat.url if self.role == "prefill" else "")

    def _cache(self) -> KVCache:
        heads = self.seat.shard.head_stop - self.seat.shard.head_start
        shape = (LAYERS, SIDES, self.around.settings.blocks, heads, self.tokens, CONTENT)
        array = np.zeros(shape, np.uint8)
        self.base = array.__array_interface__["data"][0]
        self.block_bytes = heads * self.tokens * CONTENT
        self.ledger = Ledger(self.name, array, 2)
        return KVCache.of(array, "LSBHNC", shard=self.seat.shard, model="soak")

    def _shared(self, cache: KVCache) -> Shared:
        around = self.around
        config = EndpointConfig(
            engine=self.seat.engine,
            rank=self.seat.rank,
            limits=around.settings.limits,
            transport="memory",
            landing="landing" if around.settings.landing else "direct",
            verify="checksum" if around.settings.verify else "off",
            landing_bytes=SLOTS * SLOT_BYTES,
            slot_bytes=SLOT_BYTES,
            stream="layer",
        )
        return Shared(
            config=config,
            cache=cache,
            agent=self.agent,
            epoch=self.name,
            make_transport=lambda agent: MemoryTransport(around.network, agent),
            control=Line(around.exchange, self.agent),
            turn=Turn(),
            emit=lambda command: around.happened(self, command),
            trace=Trace.disabled(),
            clock=around.clock,
            slots=slots_of(config, cache),
            make_copier=lambda _name, _prepare: LazyCopier(around.rng),
        )

    def _make_side(self, shared: Shared) -> Any:
        raise NotImplementedError

    def blocks_at(self, address: int, length: int) -> list[int]:
        """The blocks that bytes of our memory lie in."""
        first, last = address - self.base, address - self.base + length - 1
        count = len(self.ledger)
        return [one % count for one in range(first // self.block_bytes, last // self.block_bytes + 1)]

    # The control connection

    def _deliver(self, route: Route, message: wire.Control) -> None:
        if self.paused:
            self._mail.append((route, message))
        else:
            self._heard(route, message)

    def _heard(self, route: Route, message: wire.Control) -> None:
        side: Side = self.side
        if isinstance(message, wire.Relay):
            if side.knows(message.frame):
                side.frame(message.frame, route)
        elif isinstance(message, wire.Alive):
            pair = side.pairs.get(message.token)
            if pair is not None:
                pair.heard = self.around.clock()
                if pair.lost or message.token == pair.coming or route != pair.route:
                    side.alive(message.token, route)
        elif isinstance(message, wire.Bye):
            side.peer_gone(message.token, CLOSED)
        else:
            self._introduced(route, message)

    def _introduced(self, route: Route, message: wire.Control) -> None:
        raise NotImplementedError

    # Time

    @property
    def paused(self) -> bool:
        """Whether the process is stopped."""
        return self.around.clock() < self.paused_until

    def pause(self, seconds: float) -> None:
        """Stop the process for a while."""
        self.paused_until = self.around.clock() + seconds
        self._was_away = True

    def turn(self) -> None:
        """The process gets the processor for one look."""
        if self._was_away:
            self._was_away = False
            for pair in self.side.agents.values():
                pair.heard = self.around.clock()
            mail, self._mail = self._mail, []
            for route, message in mail:
                self._heard(route, message)
        self.side.look(self.around.clock())

    def watch_peers(self, dead: Callable[[str], bool]) -> None:
        """What a control thread does now and then: signs of life, and looking for them."""
        now, side = self.around.clock(), self.side
        for pair in list(side.agents.values()):
            if not pair.lost and self.around.settings.watched and dead(pair.agent):
                side.peer_gone(pair.token, "its process has ended")
            elif not pair.lost and now - pair.heard > self.around.settings.silence:
                side.peer_silent(pair.token, "not a word from it")
        for pair in list(side.agents.values()):
            self.side.shared.control.send(pair.route, wire.Alive(pair.token))

    # The end

    def die(self) -> None:
        """End as SIGKILL does."""
        self.alive = False
        self.around.exchange.leave(self.agent)
        self.around.network.die(self.agent)
        for pair in self.side.agents.values():
            assert pair.watch is None

    def ground(self) -> None:
        """Its data mover gets stuck for good, and the runtime goes on without."""
        self.side.transport = None
        self.side.grounded = "a call did not return"
        self.side.open()

    def wind_up(self) -> None:
        """Begin to close in good order."""
        raise NotImplementedError

    def leave(self) -> None:
        """Close, custody having ended."""
        self.alive = False
        for pair in self.side.agents.values():
            self.side.shared.control.send(pair.route, wire.Bye(pair.token))
        self.side.close()
        self.around.exchange.leave(self.agent)
        if self.side.grounded:
            # Its data mover was given up, not closed: that one ends with the process, which is what others may see.
            self.around.network.die(self.agent)


class ProducerLife(Life):
    """A producer's."""

    role = "prefill"
    served: dict[TransferKey, Served]
    """The offers that were taken in."""

    def _make_side(self, shared: Shared) -> Producing:
        machine = witnessed(self.around.producer)(
            shared.config.rank, shared.epoch, shared.config.limits, slots=pool_of(shared.slots)
        )
        self.machine: ProducerMachine = machine
        return Producing(shared, machine)

    def _introduced(self, route: Route, message: wire.Control) -> None:
        if not isinstance(message, wire.Introduction):
            return
        if self.closing:
            self.side.shared.control.send(route, wire.Refusal(message.token, CLOSING))
        else:
            self.side.introduced(route, message)

    def wind_up(self) -> None:
        """End what is open and refuse what comes."""
        self.closing = True
        self.side.end_all(self.around.clock(), Outcome.REJECTED_CLOSING, CLOSING)


class ConsumerLife(Life):
    """A consumer's. ``links`` are the pairs with the producers, by the name of their seat."""

    role = "decode"

    def __init__(self, around: Surroundings, seat: Seat, number: int) -> None:
        self.tokens = around.settings.target_tokens
        self.keys: dict[bytes, TransferKey] = {}
        """Of the offers' nonces."""
        self.links: dict[str, Pair] = {}
        self._dials: dict[str, tuple[float, Dial]] = {}
        super().__init__(around, seat, number)

    def _make_side(self, shared: Shared) -> Consuming:
        self.machine = self.around.consumer(shared.config.limits, self._nonce, slots=pool_of(shared.slots))
        return Consuming(shared, self.machine)

    def _nonce(self, key: TransferKey, _peer: str) -> bytes:
        nonce = self.around.rng.randbytes(16)
        self.keys[nonce] = key
        return nonce

    def _introduced(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Welcome):
            self.side.welcomed(message)
        elif isinstance(message, wire.Refusal):
            self.side.refused(message)

    def connect(self, seats: list[Seat]) -> None:
        """Have a connection to every producer, or one under way."""
        for seat in seats:
            if seat.name in self._dials:
                self._look_at_dial(seat)
            elif not self.linked(seat):
                dial = Dial(self.around.rng.randbytes(16), seat.address, Future())
                self._dials[seat.name] = (self.around.clock(), dial)
                self.side.dial(dial)

    def linked(self, seat: Seat) -> bool:
        """Whether there is a connection that is not lost."""
        pair = self.links.get(seat.name)
        return pair is not None and not pair.lost

    def _look_at_dial(self, seat: Seat) -> None:
        since, dial = self._dials[seat.name]
        if dial.done.done() and dial.done.exception() is None:
            self.links[seat.name] = dial.done.result()
        elif not dial.done.done() and self.around.clock() < since + DIAL_AGAIN:
            return
        del self._dials[seat.name]
        self.side.give_up(dial)

    def wind_up(self) -> None:
        """End what is open."""
        self.closing = True
        for key in self.machine.transfers():
            self.machine.cancel(key, self.around.clock(), detail="the consumer is shutting down")
        self.side.run_commands()
