"""What a router and a decode engine do with one request: offer, cancel, retry, take another producer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pushkv.core.commands import Ended, Released
from pushkv.core.messages import Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from pushkv.runtime.requests import pack_blocks
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.patterns import HOLE, Bytes
from pushkv.testing.soak.lives import ConsumerLife, ProducerLife, Seat
from pushkv.testing.soak.settings import MOST_TOKENS
from pushkv.testing.soak.stagings import RETRY, Staging

PATIENCE = 100
"""How often a decode engine tries to get blocks and a connection."""
MOST_ATTEMPTS = 3


class Desk(Protocol):
    """What a request needs of the episode."""

    rng: random.Random
    calm: bool
    """Whether the end is near: no more retries."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done later."""

    def kv(self, prompt: int) -> Bytes:
        """The KV of a prompt: tokens, layers, sides, heads, content."""

    def producer_seats(self) -> list[list[Seat]]:
        """The ranks of each prefill engine."""

    def producer(self, seat: Seat) -> ProducerLife | None:
        """Who lives there, if anybody does."""

    def consumer(self, number: int) -> ConsumerLife | None:
        """One of the decode engines."""

    def offered(self, transfer: Offered) -> None:
        """An attempt is about to be offered."""

    def staged(self, staging: Staging) -> None:
        """A stage is about to be made."""

    def staging(self, life: ProducerLife, name: str) -> Staging | None:
        """The stage of this transfer id at a producer, if there is one."""


class Request:
    """One request, dispatched under one transfer id."""

    def __init__(self, desk: Desk, number: int) -> None:
        rng = desk.rng
        self.desk = desk
        self.name = f"r{number}"
        self.tokens = rng.randint(1, MOST_TOKENS)
        self.chunk = rng.choice([self.tokens, rng.randint(1, self.tokens)])
        self.kv = desk.kv(number)
        self.mismatch = rng.random() < 0.02
        self.stuck = rng.random() < 0.02
        """Prefill stops half-way and never says so."""
        self._waiting: set[str] = set()
        self.engine = rng.randrange(len(desk.producer_seats()))
        count = rng.choice([1, 1, 1, 1, 2, 3])
        self.siblings = [Chain(self, rng.randrange(2), number) for number in range(count)]
        self._begin(rng)

    def _begin(self, rng: random.Random) -> None:
        if rng.random() < 0.98:  # otherwise it never reaches the prefill engine
            self.desk.after(rng.uniform(0.0, 0.3), self.stage)
        for chain in self.siblings:
            if rng.random() < 0.98:
                self.desk.after(rng.uniform(0.0, 0.3), chain.offer)
            else:
                chain.done = True

    @property
    def over(self) -> bool:
        """Whether the decode engines are done with it."""
        return all(chain.over for chain in self.siblings)

    @property
    def seats(self) -> list[Seat]:
        """The ranks of the prefill engine that serves it."""
        return self.desk.producer_seats()[self.engine]

    def prompt(self) -> bytes:
        """The digest that the decode engine computes."""
        return hashlib.blake2b(self.name.encode(), digest_size=32).digest()

    def staged_prompt(self, seat: Seat) -> bytes:
        """The digest that the prefill rank computes."""
        if self.mismatch and seat.rank == len(self.seats) - 1:
            return hashlib.blake2b(self.name.encode() + b"!", digest_size=32).digest()
        return self.prompt()

    def stage(self) -> None:
        """Have every rank of the prefill engine that does not yet compute it do so."""
        for seat in self.seats:
            self._stage_at(seat)

    def _stage_at(self, seat: Seat) -> None:
        life = self.desk.producer(seat)
        if life is None or life.closing or seat.name in self._waiting:
            return
        known = self.desk.staging(life, self.name)
        if known is None or known.over:
            staging = Staging(self, life)
            self.desk.staged(staging)
            staging.go()
        elif known.ending.outcome is not None:  # its blocks are still read: that id is taken until then
            self._waiting.add(seat.name)
            self.desk.after(RETRY, lambda: self._again(seat))

    def _again(self, seat: Seat) -> None:
        self._waiting.discard(seat.name)
        if not self.over:
            self._stage_at(seat)


class Chain:
    """One sibling of a request, over its attempts."""

    def __init__(self, request: Request, consumer: int, sibling: int) -> None:
        self.request = request
        self.sibling = sibling
        self.done = False
        self._consumer = consumer
        self._attempt = 0
        self._tries = 0
        self._life: ConsumerLife | None = None
        self._current: Offered | None = None

    @property
    def over(self) -> bool:
        """Whether there will be no other attempt, nor an outcome of the last."""
        return self.done or (self._life is not None and not self._life.alive)

    def offer(self) -> None:
        """Make the next attempt, as soon as there are blocks and connections."""
        desk = self.request.desk
        life = self._life = self._life or desk.consumer(self._consumer)
        self._tries += 1
        if life is None or not life.alive or life.closing or self._tries > PATIENCE:
            self.done = True
            return
        offered = None if life.paused else self._offered(life)
        if offered is None:
            desk.after(RETRY, self.offer)
            return
        self._tries, self._attempt, self._current = 0, self._attempt + 1, offered
        desk.offered(offered)
        offered.go()
        self._maybe_interfere(offered, desk.rng)

    def _offered(self, life: ConsumerLife) -> Offered | None:
        request, size, rng = self.request, life.tokens, self.request.desk.rng
        if not all(life.linked(seat) for seat in request.seats):
            return None
        start = rng.choice([0, 0, rng.randint(0, request.tokens)])
        stop = rng.choice([request.tokens, request.tokens, rng.randint(start, request.tokens)])
        first = start // size
        key = TransferKey(request.name, life.seat.engine, life.name, self.sibling, self._attempt)
        offered = Offered(self, life, key, start, stop, first)
        taken = life.ledger.take(-(-stop // size) - first if stop > start else 0, offered)
        if taken is None:
            return None
        offered.blocks = taken
        return offered

    def _maybe_interfere(self, offered: Offered, rng: random.Random) -> None:
        roll = rng.random()
        if roll < 0.06:
            wait = rng.choice([0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, 0.6)])
            self.request.desk.after(wait, offered.cancel)
        elif roll < 0.09:
            self.request.desk.after(rng.uniform(0.0, 0.6), lambda: self._supersede(offered))

    def _supersede(self, offered: Offered) -> None:
        """The router retries although the attempt is open."""
        if offered is self._current and offered.outcome is None and offered.life.alive:
            self._retry()

    def ended(self, offered: Offered, outcome: Outcome) -> None:
        """An attempt has its outcome."""
        if offered is not self._current:
            return
        desk = self.request.desk
        again = outcome is not Outcome.COMPLETE and self._attempt < MOST_ATTEMPTS and not desk.calm
        if again and desk.rng.random() < 0.6:
            desk.after(desk.rng.uniform(0.0, 0.1), self._retry)
        else:
            self.done = True

    def _retry(self) -> None:
        if self._attempt >= MOST_ATTEMPTS or self.request.desk.calm:
            self.done = True
            return
        self._current = None
        rng = self.request.desk.rng
        if rng.random() < 0.4:
            self.request.engine = rng.randrange(len(self.request.desk.producer_seats()))
        self.request.stage()
        self.offer()


@dataclass(eq=False)
class Offered:
    """One attempt: its blocks, and what they are to hold."""

    chain: Chain
    life: ConsumerLife
    key: TransferKey
    start: int
    stop: int
    first: int
    blocks: list[int] | None = None
    outcome: Outcome | None = None
    released: bool = False
    owers: tuple[str, ...] = ()
    """The agents that owe something."""

    def go(self) -> None:
        """Offer it."""
        life, request, key = self.life, self.chain.request, self.key
        pairs = [life.links[seat.name] for seat in request.seats]
        into = pack_blocks(life.side.shared.cache, self.blocks, self.first)

        def make() -> Order:
            owed = {pair.agent: pair.template.owed((self.start, self.stop)) for pair in pairs}
            self.owers = tuple(agent for agent, spans in owed.items() if spans)
            target = Ring(into.tables) if life.around.settings.landing else into
            return Order(key, target, request.prompt(), request.tokens, self.start, self.stop, owed)

        life.side.offer(key, into, make)

    def cancel(self) -> None:
        """The decode engine gives it up."""
        if self.life.alive and self.outcome is None and not self.life.paused:
            self.life.side.cancel(self.key, Outcome.CANCELLED, "aborted")

    def happened(self, event: Ended | Released) -> None:
        """An event of the endpoint about it."""
        if isinstance(event, Ended):
            if self.outcome is not None:
                raise Broken(Rule.ONCE, f"{self.key} ends twice, last {event.outcome.value}")
            self.outcome = event.outcome
            if event.outcome is Outcome.COMPLETE and self.chain.request.mismatch and self.owers:
                raise Broken(Rule.BYTES, f"{self.key} is complete with another prompt's KV")
            self.check()
            self.chain.ended(self, event.outcome)
        else:
            self._released()

    def check(self) -> None:
        """Look at the bytes: KV inside the range (all of it, where complete), holes elsewhere. Raises Broken."""
        assert self.blocks is not None
        size = self.life.tokens
        tokens = np.arange(self.first * size, (self.first + len(self.blocks)) * size)
        if not len(tokens):
            return
        places = np.array(self.blocks, np.intp)[tokens // size - self.first], tokens % size
        found = self.life.ledger.blocks[places[0], :, :, :, places[1]]
        inside = (tokens >= self.start) & (tokens < self.stop)
        expected = self.chain.request.kv[tokens[inside]]
        right = found[inside] == expected
        if self.outcome is not Outcome.COMPLETE:
            right |= found[inside] == HOLE
            right |= self._spoilt(found[inside] ^ expected)
        if not right.all() or not (found[~inside] == HOLE).all():
            outcome = "open" if self.outcome is None else self.outcome.value
            raise Broken(Rule.BYTES, f"{self.key} ({outcome}) holds bytes that are not its own")

    def _spoilt(self, flipped: Bytes) -> Bytes | bool:
        """Where one bit differs, of a part that is verified in its blocks; one in a slot never gets into a block."""
        settings = self.life.around.settings
        return (flipped & (flipped - 1)) == 0 if settings.verify and not settings.landing else False

    def _released(self) -> None:
        if self.released or self.blocks is None:
            raise Broken(Rule.ONCE, f"{self.key} is released twice")
        if self.outcome is None:
            raise Broken(Rule.ONCE, f"{self.key} is released without an outcome")
        self.check()
        self.released = True
        self.life.ledger.give_back(self.blocks)
