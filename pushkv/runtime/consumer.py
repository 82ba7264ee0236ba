"""The consumer endpoint: what a decode engine uses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command, Ended, Released
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.covering import uncovered
from pushkv.core.geometry import Geometry
from pushkv.core.messages import Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.prompt import DIGEST_BYTES
from pushkv.core.receiving import Order
from pushkv.core.template import Range
from pushkv.errors import AddressError, GeometryError, HandshakeError, ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.address import Address, parse_dialled
from pushkv.runtime.consuming import Consuming, Dial
from pushkv.runtime.control import Route
from pushkv.runtime.ending import Ending
from pushkv.runtime.endpoint import Endpoint, TransportFactory
from pushkv.runtime.forked import OfOneProcess
from pushkv.runtime.life import Life
from pushkv.runtime.pair import Pair
from pushkv.runtime.requests import MOST, check_request, check_tables, pack_blocks, whole
from pushkv.runtime.side import Shared
from pushkv.runtime.slots import pool_of
from pushkv.runtime.way import Way
from pushkv.trace import Trace

REDIAL, REDIAL_MOST = 1.0, 30.0
"""Seconds between introductions at the address of a rank that is away: at first, and at most."""


class Link(OfOneProcess):
    """A connected prefill engine: all of its ranks that hold KV for this consumer rank.

    It stays good: when a rank is lost or goes on with another agent, the consumer keeps introducing itself at its
    address, and the link is alive again once all ranks have answered.
    """

    def __init__(self, life: Callable[[], Life[Consuming]], routes: tuple[str, ...]) -> None:
        self._life = life
        self.routes = routes
        self._fitting: tuple[str, ...] = ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The present pairs; fewer than routes while some are away."""
        linked = self._life().side.linked
        return tuple(pair for route in self.routes if (pair := linked.get(route)) is not None)

    @property
    def agents(self) -> tuple[str, ...]:
        """The ranks' agent names."""
        return tuple(pair.agent for pair in self.pairs)

    @property
    def alive(self) -> bool:
        """Whether every rank is there."""
        pairs = self.pairs
        return len(pairs) == len(self.routes) and not any(pair.lost or pair.moved for pair in pairs)

    def fitting(self) -> tuple[Pair, ...]:
        """The pairs, all there and together owing everything. Raises HandshakeError where they do not."""
        pairs, agents = self.pairs, self.agents
        if len(pairs) < len(self.routes):
            raise HandshakeError(
                f"{len(pairs)} of {len(self.routes)} ranks at {', '.join(self.routes)} are connected"
            )
        if agents != self._fitting:
            if missing := uncovered([pair.template for pair in pairs]):
                where = ", ".join(self.routes)
                raise HandshakeError(f"the producers at {where} together do not fit: {'; '.join(missing[:8])}")
            self._fitting = agents
        return pairs


class Transfer(Ending):
    """One offered transfer: wait for its outcome, and for its blocks to be out of custody."""

    def __init__(self, key: TransferKey) -> None:
        super().__init__()
        self.key = key


class Consumer(Endpoint[Consuming]):
    """Receives KV: :meth:`connect` to a prefill engine, then :meth:`offer` blocks while it still computes.

    ``fellows`` are the geometries of the other ranks of this engine, none for an engine of one: with them each
    producer rank is told how many offers it will get (``Producer.stage(siblings=None)``), and one that no rank needs
    hears that from rank 0. Without, nothing is said.

    Raises ConfigError, TransportUnavailable and TransportError when it cannot start.
    """

    role = "decode"

    def __init__(
        self,
        config: EndpointConfig,
        cache: KVCache,
        *,
        transport: TransportFactory | None = None,
        trace: Trace | None = None,
        fellows: Sequence[Geometry] | None = None,
    ) -> None:
        self._fellows = None if fellows is None else tuple(fellows)
        self._transfers: dict[TransferKey, Transfer] = {}
        self._wanted: dict[str, Address] = {}
        self._redial_at: dict[str, tuple[float, float]] = {}
        """When a rank that is away is dialled next, and how long was waited for that."""
        self._redials: dict[str, Dial] = {}
        super().__init__(config, cache, transport=transport, trace=trace)
        self._way = Way(config, self._shared.slots, lambda: [life.side for life in self._lives], self._shared.stats)
        self._listen()

    def _make_side(self, shared: Shared) -> Consuming:
        return Consuming(shared, ConsumerMachine(shared.config.limits, slots=pool_of(shared.slots)))

    def connect(self, addresses: str | Sequence[str], timeout: float | None = None) -> Link:
        """Connect to the ranks of one prefill engine, ahead of time or again after a loss.

        One round trip a rank connects both sides, and a first WRITE opens the path. Raises AddressError,
        HandshakeRefused with the producer's reason, and HandshakeError where no answer or no WRITE comes in time
        or where the ranks together lack layers or heads.
        """
        urls = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not urls:
            raise AddressError("No address is given to connect to; give one a rank of the prefill engine.")
        life = self._life
        wait = self.config.connect_timeout if timeout is None else timeout
        deadline = time.monotonic() + wait
        self._check_new()
        dials = [self._dial(life, parse_dialled(one)) for one in urls]
        try:
            for dial in dials:
                _finished(dial, deadline, wait)
        finally:
            for dial in dials:
                life.submit(partial(_give_up, dial))
        link = Link(lambda: self._life, tuple(dial.route for dial in dials))
        link.fitting()
        self._wanted.update({dial.route: dial.address for dial in dials})
        return link

    def connect_engine(self, address: str, timeout: float | None = None) -> Link:
        """Connect to all ranks of the prefill engine that has a rank at ``address``; otherwise as :meth:`connect`.

        That rank tells where the others are (``Producer.introduce``); one that does not is all there is.
        """
        wait = self.config.connect_timeout if timeout is None else timeout
        deadline = time.monotonic() + wait
        self._check_open()
        life = self._life
        dial = self._dial(life, parse_dialled(address))
        try:
            _finished(dial, deadline, wait)
        finally:
            life.submit(partial(_give_up, dial))
        ranks = dial.pair.fellows if dial.pair is not None else ()
        return self.connect(ranks or address, max(0.1, deadline - time.monotonic()))

    def disconnect(self, link: Link) -> None:
        """Stop looking for the ranks of a link that are away; what is open goes on."""
        for route in link.routes:
            self._wanted.pop(route, None)

    def _dial(self, life: Life[Consuming], address: Address) -> Dial:
        dial = Dial(secrets.token_bytes(16), address, Future())
        life.submit(lambda side: side.dial(dial))
        return dial

    def offer(
        self,
        transfer: str,
        link: Link,
        blocks: object,
        *,
        prompt: bytes,
        prompt_tokens: int,
        start: int = 0,
        stop: int | None = None,
        first_block: int | Sequence[int] = 0,
        sibling: int = 0,
        siblings: int = 1,
        attempt: int = 0,
        deadline: float | None = None,
    ) -> Transfer:
        """Offer blocks for tokens ``start`` to ``stop`` (by default all) of a prompt; returns at once.

        ``transfer`` is the id that both engines were given for this dispatch of the request. ``blocks`` are ids of
        the prompt's blocks from number ``first_block`` on, one list for a cache of one group, else one a group
        (``first_block`` may be one a group, too). ``sibling`` of ``siblings`` is which of a request with n > 1 it is.
        A retry counts ``attempt`` up and takes other blocks, or waits for the first one's release. ``deadline`` in
        seconds from now bounds everything. Raises GeometryError for block ids or tokens out of range, and
        ProtocolError for an attempt that is open already and for an id, digest, deadline or number that cannot be.
        """
        self._check_new()
        check_request(transfer, prompt, deadline)
        prompt_tokens = whole(transfer, "prompt_tokens", prompt_tokens)
        start = whole(transfer, "start", start, -MOST)
        stop = prompt_tokens if stop is None else whole(transfer, "stop", stop, -MOST)
        if not 0 <= start <= stop <= prompt_tokens:
            raise GeometryError(f"{transfer} asks for tokens {start} to {stop} of {prompt_tokens}; stay inside.")
        if start % (grain := self.cache.geometry.grain):
            raise GeometryError(f"{transfer} asks for tokens from {start} on; blocks of {grain} are copied whole.")
        into = pack_blocks(self.cache, blocks, first_block, transfer)
        check_tables(into, start, stop)
        life = self._life
        sibling, attempt = whole(transfer, "sibling", sibling), whole(transfer, "attempt", attempt)
        key = TransferKey(transfer, self.config.engine, life.epoch, sibling, attempt)
        if key in self._transfers:
            raise ProtocolError(f"{key} is offered already; count attempt up and take other blocks.")
        handle = self._transfers[key] = Transfer(key)
        if crowded := self._crowded():
            self._emit(Ended(key, Outcome.REJECTED_BUSY, crowded))
            self._emit(Released(key))
            return handle

        def make() -> Order:
            pairs = link.fitting()
            owed = {pair.agent: pair.template.owed((start, stop)) for pair in pairs}
            told = {pair.agent: siblings * self._readers(pair, (start, stop)) for pair in pairs}
            lands = self._way.lands(pairs, into, (start, stop), self.address)
            target = Ring(into.tables) if lands else into
            return Order(key, target, prompt, prompt_tokens, start, stop, owed, deadline, told)

        life.submit(lambda side: side.offer(key, into, make))
        if self._unasked(link, (start, stop), siblings):
            self._decline(transfer, sibling, attempt, lambda: self._unasked(link, (start, stop), siblings))
        return handle

    def _unasked(self, link: Link, tokens: Range, siblings: int) -> dict[str, int]:
        """The producer ranks that no offer of a request comes to and that this rank tells so, with their siblings.

        Those that no rank of this engine needs hear it from rank 0, where it knows its fellows; else each rank tells
        those that owe it tokens of other requests.
        """
        if self._fellows is None:
            striped = (pair for pair in link.pairs if pair.template.striped and pair.template.writes)
            return {pair.agent: siblings for pair in striped if not pair.template.owed(tokens)}
        if self.config.rank > 0:
            return {}
        return {pair.agent: siblings for pair in link.pairs if self._readers(pair, tokens) == 0}

    def decline(
        self, transfer: str, link: Link, *, sibling: int = 0, siblings: int = 1, attempt: int = 0
    ) -> Transfer | None:
        """Tell the producer that nothing of a transfer is wanted, so that its stage may end; returns at once.

        For a request that has all of its KV already, or ended before it was offered. The transfer ends as cancelled.
        Raises ProtocolError for an id or number that cannot be.
        """
        self._check_open()
        check_request(transfer, bytes(DIGEST_BYTES), None)

        def told() -> dict[str, int]:
            readers = {pair.agent: self._readers(pair) for pair in link.pairs}
            mine = {pair.agent for pair in link.pairs if pair.template.writes}
            return {
                agent: siblings * max(1, count)
                for agent, count in readers.items()
                if agent in mine or (count == 0 and self.config.rank == 0 and self._fellows is not None)
            }

        return self._decline(transfer, sibling, attempt, told)

    def _decline(
        self, transfer: str, sibling: int, attempt: int, told: Callable[[], dict[str, int]]
    ) -> Transfer | None:
        """Tell these ranks, each how many siblings there are. Numbered from the top, apart from offers."""
        life = self._life
        key = TransferKey(transfer, self.config.engine, life.epoch, MOST - sibling, attempt)
        if key in self._transfers:
            return None
        handle = self._transfers[key] = Transfer(key)
        life.submit(lambda side: side.decline(key, told))
        return handle

    def stats(self) -> dict[str, int]:
        """As for every endpoint; where it has landing slots, also how many wait for nothing but proof now."""
        return super().stats() | self._way.figures()

    def _readers(self, pair: Pair, tokens: Range | None = None) -> int:
        """How many ranks of this engine offer a transfer to a producer rank; 0 also where nobody knows."""
        return 0 if self._fellows is None else pair.readers(self._fellows, tokens)

    def _crowded(self) -> str:
        """Why nothing more is offered: too much of the cache waits for proof; empty where it may be."""
        quarantined = sum(life.side.quarantined_blocks for life in self._lives)
        blocks = sum(group.blocks for group in self.cache.geometry.groups)
        if quarantined <= self.config.quarantine_limit * blocks:
            return ""
        return f"{quarantined} of {blocks} blocks are quarantined: run `pushkv fence {self.address}` for proof"

    def cancel(self, transfer: Transfer, detail: str = "cancelled by the engine") -> None:
        """End a transfer (the request was aborted). Its blocks are free once it is released, not before."""
        key = transfer.key
        self._submit_to_all(lambda side: side.cancel(key, Outcome.CANCELLED, detail))

    @property
    def held_blocks(self) -> int:
        """How many blocks were in custody (offered, draining or quarantined) when the transfer thread last looked."""
        return sum(life.side.held_blocks for life in self._lives)

    def _emit(self, event: Command) -> None:
        handle = self._transfers.get(event.key) if isinstance(event, (Ended, Released)) else None
        if handle is not None and isinstance(event, Ended):
            handle.end(event.outcome, event.detail)
        elif handle is not None and isinstance(event, Released):
            handle.release()
            self._transfers.pop(handle.key, None)
        super()._emit(event)

    def _wind_up(self, side: Consuming) -> None:
        side.end_open(Outcome.CANCELLED, "the consumer is shutting down")

    def _reconnect(self, old: Life[Consuming]) -> None:
        self._redial_at.clear()

    def _tick(self) -> None:
        super()._tick()
        if not (self._closing or self._asleep):
            self._redial(time.monotonic())

    def _peer_moved(self, pair: Pair) -> None:
        self._redial_at.pop(str(pair.route), None)

    def _redial(self, now: float) -> None:
        """Introduce ourselves again where a rank that we want is away, or has fallen silent: another may be there."""
        life = self._life
        for route, address in list(self._wanted.items()):
            pair = life.side.linked.get(route)
            away = pair is None or pair.lost or pair.moved or now - pair.heard > self.config.silence
            if away and now >= self._redial_at.get(route, (0.0, 0.0))[0] and not life.stalled:
                wait = min(max(2 * self._redial_at.get(route, (0.0, 0.0))[1], REDIAL), REDIAL_MOST)
                self._redial_at[route] = (now + wait, wait)
                if (earlier := self._redials.get(route)) is not None:
                    life.submit(partial(_give_up, earlier))
                self._redials[route] = self._dial(life, address)
            elif not away:
                self._redial_at.pop(route, None)

    def _end_the_rest(self) -> None:
        for handle in list(self._transfers.values()):
            handle.end(Outcome.CANCELLED, "the consumer is shutting down")
            handle.release()
        self._transfers.clear()

    def _control_message(self, route: Route, message: wire.Control) -> None:
        if isinstance(message, wire.Welcome):
            self._for_dial(message.token, lambda side: side.welcomed(message))
        elif isinstance(message, wire.Refusal):
            self._for_dial(message.token, lambda side: side.refused(message))
        else:
            super()._control_message(route, message)

    def _for_dial(self, token: bytes, action: Callable[[Consuming], None]) -> None:
        for life in self._lives:
            if token in life.side.dials:
                life.submit(action)


def _give_up(dial: Dial, side: Consuming) -> None:
    side.give_up(dial)


def _finished(dial: Dial, deadline: float, wait: float) -> Pair:
    try:
        return dial.done.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        if dial.pair is None:
            what = "does not answer: is the producer running, is the address right, and do both hold one cluster key"
        else:
            what = "shook hands, but its first WRITE has not arrived: does NIXL have a path between the two"
        raise HandshakeError(f"{dial.route!s} {what}? (waited {wait:g} s)") from None
