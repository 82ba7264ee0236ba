"""What happens to whole processes and links in the soak."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from pushkv.core.states import Source, Target
from pushkv.testing.soak.lines import Exchange
from pushkv.testing.soak.lives import ConsumerLife, Life, ProducerLife
from pushkv.testing.soak.network import WatchedNetwork

PRESSED = 0.3
"""Share of a cache that waits for proof from which an operator restarts a peer."""


class Stage(Protocol):
    """What mischief is done to."""

    rng: random.Random
    network: WatchedNetwork
    exchange: Exchange

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done later."""

    def lives(self) -> list[Life]:
        """Who lives."""

    def end(self, life: Life) -> None:
        """End a process and have another follow it."""


class Mischief:
    """Does something bad every now and then. ``done`` counts what."""

    def __init__(self, stage: Stage, every: float) -> None:
        self.done: Counter[str] = Counter()
        self.stopped = False
        self._stage = stage
        self._every = every
        self._kinds: list[tuple[int, Callable[[Life], None]]] = [
            (4, self.kill), (1, self.close), (1, self.ground), (3, self.pause), (3, self.partition),
            (2, self.stall), (2, self.cut),
        ]  # fmt: skip
        self._next()
        self._stage.after(0.5, self._relieve)
        self._stage.after(2.0, self._release)

    def _next(self) -> None:
        self._stage.after(self._stage.rng.expovariate(1 / self._every), self._strike)

    def _strike(self) -> None:
        if self.stopped:
            return
        rng, lives = self._stage.rng, self._stage.lives()
        if lives:
            kinds = [kind for _, kind in self._kinds]
            kind = rng.choices(kinds, [weight for weight, _ in self._kinds])[0]
            kind(rng.choice(lives))
            self.done[kind.__name__] += 1
        self._next()

    def kill(self, life: Life) -> None:
        """SIGKILL."""
        self._stage.end(life)

    def close(self, life: Life) -> None:
        """An end in good order, unless that takes too long."""
        if life.closing or life.paused:
            return
        life.wind_up()
        self._try_to_leave(life, tries=40)

    def _try_to_leave(self, life: Life, tries: int) -> None:
        if not life.alive:
            return
        if not life.side.in_custody and not life.paused:
            life.leave()
            self._stage.end(life)
        elif tries:
            self._stage.after(0.05, lambda: self._try_to_leave(life, tries - 1))
        else:
            self._stage.end(life)

    def ground(self, life: Life) -> None:
        """A call into the data mover does not return; somebody restarts the process later."""
        if life.side.transport is not None and not life.paused:
            life.ground()
            self._stage.after(self._stage.rng.uniform(0.2, 2.0), lambda: self._stage.end(life))

    def pause(self, life: Life) -> None:
        """SIGSTOP and SIGCONT."""
        life.pause(self._stage.rng.uniform(0.05, 3.0))

    def partition(self, life: Life) -> None:
        """Cut the data path to one peer or to all; often the control connections too."""
        rng = self._stage.rng
        if rng.random() < 0.5:
            self.cut(life)
        other = rng.choice([None, *(one.agent for one in self._stage.lives() if one.role != life.role)])
        self._stage.network.partition(life.agent, other)
        self._stage.after(rng.uniform(0.1, 3.0), self._stage.network.heal)

    def stall(self, life: Life) -> None:
        """Hold the bytes that it WRITEs."""
        self._stage.network.stall(life.agent)
        self._stage.after(self._stage.rng.uniform(0.1, 3.0), self._stage.network.release)

    def cut(self, life: Life) -> None:
        """Cut its control connections."""
        self._stage.exchange.cut.add(life.agent)
        self._stage.after(
            self._stage.rng.uniform(0.1, 3.0), lambda: self._stage.exchange.cut.discard(life.agent)
        )  # fmt: skip

    def _release(self) -> None:
        """Single WRITEs that stall do so for a while."""
        if not self.stopped:
            self._stage.network.release()
            self._stage.after(2.0, self._release)

    def _relieve(self) -> None:
        """Where much waits for proof, restart a peer: only that proves anything."""
        if self.stopped:
            return
        for life in self._stage.lives():
            if self._pressed(life):
                peers = [one for one in self._stage.lives() if one.role != life.role]
                if peers:
                    self._stage.end(self._stage.rng.choice(peers))
                    self.done["restart for proof"] += 1
        self._stage.after(0.5, self._relieve)

    @staticmethod
    def _pressed(life: Life) -> bool:
        share = PRESSED * len(life.ledger)
        if isinstance(life, ConsumerLife):
            return bool(life.machine.held_blocks(Target.QUARANTINED) > share)
        assert isinstance(life, ProducerLife)
        return life.machine.custody()[Source.STUCK] > 0 and life.ledger.free < share
