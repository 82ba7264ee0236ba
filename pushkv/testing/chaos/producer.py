"""A prefill engine's child."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from pushkv.core.commands import Command, Ended, StageEnded, StageReleased
from pushkv.runtime.producer import Producer
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.chaos.child import Child, config, digest, places
from pushkv.testing.chaos.tasks import TOKENS, How, Outcomes, Stage, State, Task, Up

RETRY = 0.02


@dataclass(eq=False)
class Work:
    """One stage: its task, its blocks and how far it is."""

    task: Stage
    blocks: list[int] = field(default_factory=list)
    ready: int = 0
    ended: bool = False
    preempted: bool = False
    preempting: bool = False


class ProducerChild(Child):
    """Computes, stages, is preempted, aborts."""

    def __init__(self, pipe: Connection, engine: str, bind: str, how: How) -> None:
        super().__init__(pipe, engine)
        self._producer = Producer(config(engine, bind, how), self.cache)
        self._works: dict[str, Work] = {}
        self.say(Up(self._producer.address))

    @property
    def end(self) -> Producer:
        """The endpoint."""
        return self._producer

    def task(self, task: Task) -> None:
        """Begin to compute; an id that is still read cannot be staged anew."""
        assert isinstance(task, Stage)
        if task.job.transfer not in self._works:
            work = self._works[task.job.transfer] = Work(task)
            self._compute(work)

    def _compute(self, work: Work) -> None:
        task = work.task
        job = task.job
        if work.ended or work.preempting:
            return
        ready = min(job.tokens, work.ready + task.chunk)
        taken = self.ledger.take(-(-ready // TOKENS) - len(work.blocks), work)
        if taken is None:
            self.after(RETRY, lambda: self._compute(work))
            return
        work.blocks += taken
        tokens = np.arange(work.ready, ready)
        block, slot = places(work.blocks, 0, tokens)
        self.ledger.blocks[block, :, slot] = self.kv(job)[tokens]
        work.ready = ready
        self._producer.stage(
            job.transfer, work.blocks, prompt=digest(job, job.mismatch), prompt_tokens=job.tokens, ready=ready
        )
        self._go_on(work, ready)

    def _go_on(self, work: Work, ready: int) -> None:
        task = work.task
        if task.preempt and not work.preempted and ready * 2 >= task.job.tokens:
            work.preempted = work.preempting = True
            self._producer.preempt(task.job.transfer)
        elif task.abort and ready * 2 >= task.job.tokens:
            self._producer.unstage(task.job.transfer)
        elif ready < task.job.tokens:
            self.after(task.pause, lambda: self._compute(work))

    def happened(self, event: Command) -> None:
        """Events of stages, and of single offers."""
        if isinstance(event, Ended):
            key = event.key
            self.say(Outcomes(key.transfer, key.epoch, key.attempt, event.outcome.value))
            return
        assert isinstance(event, (StageEnded, StageReleased))
        work = self._works.get(event.transfer)
        if work is None:
            raise Broken(Rule.ONCE, f"{event} comes for a stage that is over")
        if isinstance(event, StageEnded):
            if work.ended:
                raise Broken(Rule.ONCE, f"{event.transfer} ends twice")
            work.ended = True
        else:
            self._release(work)
        if work.ended and not work.blocks:
            del self._works[event.transfer]

    def _release(self, work: Work) -> None:
        tokens = np.arange(work.ready)
        block, slot = places(work.blocks, 0, tokens)
        if not (self.ledger.blocks[block, :, slot] == self.kv(work.task.job)[tokens]).all():
            raise Broken(Rule.BYTES, f"the staged KV of {work.task.job.transfer} has changed")
        self.ledger.give_back(work.blocks)
        work.blocks, work.ready = [], 0
        if work.preempting and not work.ended:
            work.preempting = False
            self.after(work.task.pause, lambda: self._compute(work))

    def state(self) -> State:
        """How it is."""
        return State(
            open=sum(not work.ended for work in self._works.values()),
            held=len(self.ledger) - self.ledger.free,
            stats=self._producer.stats(),
            held_for=tuple(name for name, work in self._works.items() if work.blocks)[:8],
        )
