"""What a prefill engine does with one request at one producer: stage it in chunks, be preempted, go on, abort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pushkv.core.commands import StageEnded, StageReleased
from pushkv.runtime.ending import Ending
from pushkv.runtime.requests import pack_blocks
from pushkv.runtime.staging import Call
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.patterns import Bytes
from pushkv.testing.soak.lives import ProducerLife

if TYPE_CHECKING:
    from pushkv.testing.soak.requests import Request

RETRY = 0.02
"""Seconds until an engine without free blocks tries again."""


@dataclass
class TimedFence:
    """A fence that passes at a time, or fails."""

    clock: Callable[[], float]
    at: float
    fails: bool = False

    def done(self) -> bool:
        """Whether it has passed."""
        if self.fails:
            raise RuntimeError("the device reports an error")
        return self.clock() >= self.at

    def wait(self) -> None:
        """Nobody waits."""


@dataclass(eq=False)
class Lot:
    """The blocks that one computation of a prompt fills; after a preemption it is another lot."""

    staging: Staging
    blocks: list[int] = field(default_factory=list)
    released: bool = False


class Staging:
    """One stage of a request at one life of a producer."""

    def __init__(self, request: Request, life: ProducerLife) -> None:
        self.request = request
        self.life = life
        self.ending = Ending()
        self.lot = Lot(self)
        self.preempting = False
        self._ready = 0
        self._begun = 0
        """Tokens of which the first layer is there too, where layers are staged apart."""
        self._holding = False
        self._rng = life.around.rng

    def go(self) -> None:
        """Begin to compute."""
        self._next_chunk()

    @property
    def over(self) -> bool:
        """Whether it has its outcome and its blocks, or its process is gone."""
        return not self.life.alive or (self.ending.outcome is not None and not self.lot.blocks)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.request.desk.after(seconds, lambda: action() if self.life.alive else None)

    def _next_chunk(self) -> None:
        """Compute some more tokens, and stage them."""
        if self.ending.outcome is not None or self.preempting or self.life.closing:
            return
        if self.life.paused:
            self._later(RETRY, self._next_chunk)
            return
        request, size = self.request, self.life.tokens
        ready = min(request.tokens, self._ready + self._rng.randint(0, request.chunk))
        need = -(-ready // size) - len(self.lot.blocks)
        taken = self.life.ledger.take(max(need, 0), self.lot)
        if taken is None:
            self._later(RETRY, self._next_chunk)
            return
        self.lot.blocks += taken
        if self.life.around.settings.layers and ready > self._ready:
            self._first_layer(ready)
        else:
            self._rest(ready)

    def _first_layer(self, ready: int) -> None:
        """Stage a chunk's first layer; the other follows, unless the engine is stopped in between."""
        self._fill(self._ready, ready, slice(1))
        self._begun = ready
        self._call(ready, (1,))
        if self._rng.random() < 0.05:
            self._later(self._rng.uniform(0.0, 0.05), self.preempt)
        self._later(self._rng.uniform(0.0, 0.05), lambda: self._other_layers(ready))

    def _other_layers(self, ready: int) -> None:
        if self._begun == ready and self.ending.outcome is None and not self.preempting and not self.life.closing:
            self._rest(ready)

    def _rest(self, ready: int) -> None:
        self._fill(self._ready, ready)
        self._ready = self._begun = ready
        self._call(ready)
        self._go_on(ready)

    def _go_on(self, ready: int) -> None:
        roll = self._rng.random()
        if roll < 0.05:
            self._later(self._rng.uniform(0.0, 0.1), self.preempt)
        elif roll < 0.07:
            self._later(self._rng.uniform(0.0, 0.2), self.abort)
        if ready < self.request.tokens and not self.request.stuck:
            self._later(self._rng.uniform(0.0, 0.08), self._next_chunk)

    def _call(self, ready: int, layers: tuple[int, ...] | None = None) -> None:
        request, now = self.request, self.life.around.clock()
        wait = self._rng.choice([0.0, 0.0, self._rng.uniform(0.0, 0.2)])
        fence = TimedFence(self.life.around.clock, now + wait, self._rng.random() < 0.002)
        blocks = pack_blocks(self.life.side.shared.cache, self.lot.blocks)
        self._holding = True
        self.ending.hold()
        self.life.side.stage(
            Call(
                request.name,
                blocks,
                request.staged_prompt(self.life.seat),
                request.tokens,
                ready,
                len(request.siblings),
                None,
                fence,
                self.ending,
                layers,
            )
        )

    def _places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.arange(start, stop)
        return np.array(self.lot.blocks, np.intp)[tokens // self.life.tokens], tokens % self.life.tokens

    def _kv(self, start: int, stop: int) -> Bytes:
        shard = self.life.seat.shard
        return self.request.kv[start:stop, :, :, shard.head_start : shard.head_stop]

    def _fill(self, start: int, stop: int, layers: slice = slice(None)) -> None:
        if start < stop:
            block, slot = self._places(start, stop)
            self.life.ledger.blocks[block, layers, :, :, slot] = self._kv(start, stop)[:, layers]

    def preempt(self) -> None:
        """The engine wants the blocks back; it goes on later with others."""
        if self.ending.outcome is None and self._holding and not self.preempting and not self.life.closing:
            self.preempting = True
            self.life.side.preempt(self.request.name)

    def abort(self) -> None:
        """The engine gives the request up."""
        if self.ending.outcome is None and not self.life.closing:
            self.life.side.unstage(self.request.name, self.life.around.clock())

    def happened(self, event: StageEnded | StageReleased) -> None:
        """An event of the endpoint about this stage."""
        if isinstance(event, StageEnded):
            if self.ending.outcome is not None:
                raise Broken(
                    Rule.ONCE, f"{event.transfer} at {self.life.name} ends twice, last {event.outcome.value}"
                )
            self.ending.end(event.outcome, event.detail)
        else:
            self.ending.release()
            self._released()

    def _released(self) -> None:
        if self._ready:
            block, slot = self._places(0, self._ready)
            if not (self.life.ledger.blocks[block, :, :, :, slot] == self._kv(0, self._ready)).all():
                raise Broken(Rule.BYTES, f"the staged KV of {self.request.name} at {self.life.name} has changed")
        self.lot.released = True
        self.life.ledger.give_back(self.lot.blocks)
        self.lot, self._ready, self._begun, self._holding = Lot(self), 0, 0, False
        if self.preempting and self.ending.outcome is None:
            self.preempting = False
            self._later(self._rng.uniform(0.0, 0.2), self._next_chunk)
