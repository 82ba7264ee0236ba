"""What a seed fixes: the requests in their order, and what is done to which process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pushkv.testing.chaos.tasks import MOST_TOKENS, Job, Offer, Stage


class Deed(Enum):
    """What is done to a process."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"


@dataclass(frozen=True)
class Blow:
    """A deed, ``wait`` seconds after the one before, to the seat ``victim``; a stop lasts ``seconds``."""

    wait: float
    deed: Deed
    victim: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """One request: where it is decoded and prefilled (numbers), and what happens to it."""

    job: Job
    consumer: int
    producer: int
    start: int
    chunk: int
    pause: float
    preempt: bool
    abort: bool
    cancel: float | None
    staged: bool
    offered: bool

    def stage(self) -> Stage:
        """What the producer is told."""
        return Stage(self.job, self.chunk, self.pause, self.preempt, self.abort)

    def offer(self, address: str, attempt: int = 0) -> Offer:
        """What the consumer is told."""
        return Offer(self.job, address, self.start, attempt, self.cancel)


def blows(seed: int, every: float) -> Iterator[Blow]:
    """What is done to the four seats, for ever."""
    rng = random.Random(f"blows {seed}")
    while True:
        deed = rng.choice([Deed.KILL, Deed.STOP])
        yield Blow(rng.expovariate(1 / every), deed, rng.randrange(4), rng.choice([0.05, 0.5, rng.uniform(0.5, 4.0)]))


def plans(seed: int) -> Iterator[Plan]:
    """The requests, for ever."""
    rng, number = random.Random(f"plans {seed}"), 0
    while True:
        number += 1
        tokens = rng.choice([rng.randint(1, 8), rng.randint(8, MOST_TOKENS)])
        job = Job(f"c{number}", number, tokens, rng.random() < 0.03)
        yield Plan(
            job=job,
            consumer=rng.randrange(2),
            producer=rng.randrange(2),
            start=rng.choice([0, 0, rng.randrange(tokens)]),
            chunk=rng.choice([tokens, rng.randint(1, tokens)]),
            pause=rng.uniform(0.0, 0.05),
            preempt=rng.random() < 0.1,
            abort=rng.random() < 0.05,
            cancel=rng.choice([0.0, rng.uniform(0.0, 0.3)]) if rng.random() < 0.15 else None,
            staged=rng.random() < 0.97,
            offered=rng.random() < 0.97,
        )
