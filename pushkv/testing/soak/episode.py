"""One episode of the soak: requests among mischief, then calm, then proof, and every rule checked on the way."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pushkv.core.commands import Command, Ended, Released, StageEnded, StageReleased
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.layouts import Shard
from pushkv.core.messages import TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.patterns import Bytes, Prompts
from pushkv.testing.soak import verdict
from pushkv.testing.soak.landings import Landings
from pushkv.testing.soak.lines import Exchange
from pushkv.testing.soak.lives import ConsumerLife, Life, ProducerLife, Seat, Surroundings
from pushkv.testing.soak.mischief import Mischief
from pushkv.testing.soak.network import Agenda, WatchedNetwork
from pushkv.testing.soak.requests import Offered, Request
from pushkv.testing.soak.settings import CONTENT, HEADS, LAYERS, MOST_TOKENS, SIDES, SIGN, TICK, Settings
from pushkv.testing.soak.stagings import Staging
from pushkv.testing.soak.witness import Served
from pushkv.transport.memory import Faults

PROMPTS = Prompts((LAYERS, SIDES, HEADS, CONTENT), MOST_TOKENS)
PATIENCE = 30.0
"""Seconds of virtual time in which everything must have ended once nothing goes wrong any more."""

SETTLING = 3.0
"""Seconds of virtual time in which whatever can be proven is."""


@dataclass
class Tally:
    """What came of an episode."""

    transfers: int = 0
    consumer: Counter[str] = field(default_factory=Counter)
    producer: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    proofs: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
    """Blocks that waited for proof when nothing went wrong any more."""
    stuck: int = 0
    """Source blocks that did."""
    late_bytes: int = 0
    landed_bytes: int = 0
    seconds: float = 0.0
    fingerprint: str = ""


class Episode:
    """Runs one. ``producer`` and ``consumer`` are the machines, which a test may break."""

    def __init__(
        self,
        settings: Settings,
        producer: type[ProducerMachine] = ProducerMachine,
        consumer: type[ConsumerMachine] = ConsumerMachine,
    ) -> None:
        self.settings = settings
        self.rng = random.Random(f"script {settings.seed}")
        self.calm = False
        self.tally = Tally()
        self.agenda = Agenda()
        self.transfers: dict[TransferKey, Offered] = {}
        self.served: list[Served] = []
        self.recent: deque[str] = deque(maxlen=40)
        self._hash = hashlib.blake2b(digest_size=16)
        self._requests: list[Request] = []
        self._numbers = 0
        self._stagings: dict[tuple[str, str], Staging] = {}
        self._lives: dict[str, Life] = {}
        self._life_numbers: Counter[str] = Counter()
        self._started: set[str] = set()
        self.landings = Landings(self)
        self.network = WatchedNetwork(
            self.landings, seed=self.rng.getrandbits(64), faults=settings.faults, on_death=settings.on_death,
            detection=settings.detection,
        )  # fmt: skip
        self.exchange = Exchange(self.rng, self.clock, self.agenda, settings.control_loss)
        self._around = Surroundings(
            settings, self.network, self.exchange, self.clock, self.rng, self._happened, producer, consumer
        )
        self._seats = _seats(settings.split)
        self.mischief = Mischief(self, settings.trouble)

    # What requests and mischief ask

    def clock(self) -> float:
        """Seconds of virtual time."""
        return self.network.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done later."""
        self.agenda.add(self.clock() + seconds, action)

    def kv(self, prompt: int) -> Bytes:
        """The KV of a prompt."""
        return PROMPTS.kv(prompt)

    def producer_seats(self) -> list[list[Seat]]:
        """The ranks of each prefill engine."""
        one, other = self._seats[:2]
        return [[one, other]] if self.settings.split else [[one], [other]]

    def producer(self, seat: Seat) -> ProducerLife | None:
        """Who lives there."""
        life = self._lives.get(seat.name)
        assert life is None or isinstance(life, ProducerLife)
        return life

    def consumer(self, number: int) -> ConsumerLife | None:
        """One of the decode engines."""
        life = self._lives.get(self._seats[2 + number].name)
        assert life is None or isinstance(life, ConsumerLife)
        return life

    def lives(self) -> list[Life]:
        """Who lives."""
        return list(self._lives.values())

    def life_of(self, agent: str) -> Life | None:
        """The life of this agent, where it lives."""
        return next((life for life in self._lives.values() if life.agent == agent), None)

    def staging(self, life: ProducerLife, name: str) -> Staging | None:
        """The stage of this transfer id."""
        return self._stagings.get((life.name, name))

    def staged(self, staging: Staging) -> None:
        """A stage is about to be made."""
        self._stagings[staging.life.name, staging.request.name] = staging

    def offered(self, transfer: Offered) -> None:
        """An attempt is about to be offered."""
        self.transfers[transfer.key] = transfer
        self.tally.transfers += 1

    # Lives

    def end(self, life: Life) -> None:
        """End a process, unless it has ended, and have another follow it."""
        if self._lives.get(life.seat.name) is not life:
            return
        verdict.check_life(self, life)
        if life.alive:
            life.die()
        del self._lives[life.seat.name]
        self._note(f"{life.name} ends")
        self._stagings = {key: one for key, one in self._stagings.items() if key[0] != life.name}
        if not self.calm:
            self.after(self.rng.uniform(0.05, 1.0), partial(self.start, life.seat))

    def start(self, seat: Seat) -> None:
        """Begin a life at a seat."""
        if self.calm and seat.name in self._started:
            return
        self._started.add(seat.name)
        self._life_numbers[seat.name] += 1
        kind = ProducerLife if seat in self._seats[:2] else ConsumerLife
        life = kind(self._around, seat, self._life_numbers[seat.name])
        self._lives[seat.name] = life
        if isinstance(life, ProducerLife):
            self._bear_witness(life)
        self._note(f"{life.name} starts")

    def _bear_witness(self, life: ProducerLife) -> None:
        mine: dict[TransferKey, Served] = {}

        def admitted(key: TransferKey) -> None:
            if key in mine:
                raise Broken(Rule.ONCE, f"{key} is taken in twice at {life.name}")
            mine[key] = Served(life.agent, key)
            self.served.append(mine[key])

        def decided(key: TransferKey, alone: bool) -> None:
            mine[key].alone = alone

        life.machine.admitted, life.machine.decided = admitted, decided  # type: ignore[attr-defined]
        life.served = mine

    # Events

    def _note(self, what: str) -> None:
        line = f"{self.clock():.3f} {what}"
        self.recent.append(line)
        self._hash.update(line.encode())

    def _happened(self, life: Life, event: Command) -> None:
        assert isinstance(event, (Ended, Released, StageEnded, StageReleased))
        outcome = event.outcome.value if isinstance(event, (Ended, StageEnded)) else ""
        name = event.key if isinstance(event, (Ended, Released)) else event.transfer
        self._note(f"{life.name} {type(event).__name__} {name} {outcome}")
        if isinstance(event, (StageEnded, StageReleased)):
            self._stagings[life.name, event.transfer].happened(event)
        elif isinstance(life, ConsumerLife):
            transfer = self.transfers[event.key]
            if isinstance(event, Ended):
                self.landings.check_blame(event)
            transfer.happened(event)
            if outcome:
                self.tally.consumer[outcome] += 1
        else:
            assert isinstance(life, ProducerLife)
            assert isinstance(event, Ended)
            self._served(life.served[event.key], event)

    def _served(self, served: Served, event: Ended) -> None:
        if served.outcome is not None:
            raise Broken(Rule.ONCE, f"{event.key} ends twice at {served.producer}, last {event.outcome.value}")
        served.outcome = event.outcome
        self.tally.producer[event.outcome.value] += 1

    # The run

    def run(self) -> Tally:
        """Run to the end. Raises Broken."""
        for seat in self._seats:
            self.start(seat)
        self.after(0.0, self._watch_peers)
        self.until(self._enough, float("inf"), "requests")
        self._calm_down()
        self.until(self._quiet, PATIENCE, "the end of every transfer")
        for _ in range(round(SETTLING / TICK)):
            self._tick()
        verdict.check_calm(self)
        self._prove()
        verdict.check_end(self)
        self._count()
        return self.tally

    def _enough(self) -> bool:
        self._requests = [request for request in self._requests if not request.over]
        if self.tally.transfers >= self.settings.transfers:
            return True
        if len(self._requests) < self.settings.requests:
            self._numbers += 1
            self._requests.append(Request(self, self._numbers))
        return False

    def _calm_down(self) -> None:
        self.calm = self.mischief.stopped = True
        self.tally.faults.update(self.network.struck())
        self.network.faults = Faults(delay=(0.0, 0.01))
        self.network.heal()
        self.network.release()
        self.exchange.cut.clear()
        self.tally.faults["control message lost"] += self.exchange.lost
        self.exchange.loss = 0.0
        for life in self.lives():
            life.paused_until = self.clock()

    def _quiet(self) -> bool:
        self._requests = [request for request in self._requests if not request.over]
        return (
            not self._requests
            and all(verdict.at_rest(life) for life in self.lives())
            and all(one.over or one.life.machine.reading for one in self._stagings.values())
        )

    def _prove(self) -> None:
        """End one of the two sides: that is proof for the other, which must have everything back."""
        role = self.rng.choice(["prefill", "decode"])
        for life in self.lives():
            if life.role == role:
                self.end(life)
        self.until(self._all_back, PATIENCE, "the blocks of the living")

    def _all_back(self) -> bool:
        return not any(life.ledger.owned() or any(verdict.tables(life).values()) for life in self.lives())

    def until(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        """Let time pass until something holds. Raises Broken where it takes too long."""
        end = self.clock() + limit
        while not condition():
            if self.clock() >= end:
                raise Broken(Rule.HANGS, f"{what} did not come within {limit:g} s: {verdict.open_ends(self)}")
            self._tick()

    def _tick(self) -> None:
        self.network.advance(TICK)
        self.agenda.run(self.clock())
        lives = self.lives()
        self.rng.shuffle(lives)
        for life in lives:
            if life.alive and not life.paused and self.rng.random() < 0.8:
                life.turn()

    def _watch_peers(self) -> None:
        producers = self._seats[:2]
        for life in self.lives():
            if life.alive and not life.paused:
                life.watch_peers(lambda agent: self.life_of(agent) is None)
                if isinstance(life, ConsumerLife) and not life.closing:
                    life.connect(producers)
        self.after(SIGN, self._watch_peers)

    def _count(self) -> None:
        tally, network = self.tally, self.network
        tally.faults.update(self.mischief.done)
        tally.landed_bytes, tally.seconds = network.landed_bytes, self.clock()
        tally.late_bytes = self.landings.late_bytes
        tally.fingerprint = self._hash.hexdigest()


def _seats(split: bool) -> list[Seat]:
    whole = Shard(0, HEADS, HEADS)
    halves = [Shard(0, 1, HEADS), Shard(1, HEADS, HEADS)] if split else [whole, whole]
    producers = [
        Seat(f"p{number}", "p" if split else f"p{number}", number if split else 0, ("127.0.0.1", 7000 + number), half)
        for number, half in enumerate(halves)
    ]
    return producers + [Seat(f"d{n}", f"d{n}", 0, ("127.0.0.1", 7100 + n), whole) for n in range(2)]
