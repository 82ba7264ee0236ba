"""The parent: a router with a grudge, who sees to it that every rule holds for whoever survives."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from pushkv.core.outcome import Outcome
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.chaos.child import LIMITS, live
from pushkv.testing.chaos.script import Blow, Deed, Plan, blows, plans
from pushkv.testing.chaos.tasks import (
    Answer,
    Close,
    Closed,
    How,
    Know,
    Outcomes,
    Report,
    Skipped,
    State,
    Task,
    Up,
    Wrong,
)

GRACE = 25.0
"""Seconds in which everything must have ended, or have come back, once nothing is done any more."""
OPEN = 24
"""Requests that are open at once."""
RETRIES = 2
COUNTED = ("lives", "transfer threads given up", "gathers", "scatters", "bytes verified", "parts that differ")
"""What endpoints count that is told besides their proofs."""


@dataclass
class Child:
    """A process, at one of the four seats."""

    process: BaseProcess
    pipe: Connection
    up: bool = False
    stopped_until: float = 0.0
    open: dict[tuple[str, int], Plan] = field(default_factory=dict)
    """A consumer's attempts without an outcome, by transfer and number."""
    state: State | None = None
    """Its answer, where it was asked."""
    last: State | None = None
    """The last that it said."""
    closed: bool | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self.process.pid is not None
        return self.process.pid


@dataclass
class Figures:
    """What came of it."""

    seed: int
    tls: str
    offered: int = 0
    consumers: Counter[str] = field(default_factory=Counter)
    producers: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    proofs: Counter[str] = field(default_factory=Counter)
    late_bytes: int = 0
    waiting: int = 0
    """Blocks that waited for proof until one side was killed in the end."""
    seconds: float = 0.0
    failure: str = ""

    def report(self) -> str:
        """The figures in lines."""

        def counts(counter: Counter[str]) -> str:
            return ", ".join(f"{what} {count}" for what, count in counter.most_common())

        lines = {
            "seed": self.seed,
            "UCX_TLS": self.tls or "UCX's choice",
            "seconds": f"{self.seconds:.0f}",
            "transfers": self.offered,
            "outcomes at consumers": counts(self.consumers),
            "outcomes at producers": counts(self.producers),
            "apart (producer / consumer)": counts(self.apart),
            "done to them": counts(self.deeds),
            "proofs and other counts": counts(self.proofs),
            "bytes that landed late, in kept blocks": self.late_bytes,
            "blocks without proof until the end": self.waiting,
            "verdict": f"BROKEN: {self.failure}" if self.failure else "every rule held",
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items())


class Chaos:
    """Runs it. Seats 0 and 1 are producers, 2 and 3 consumers."""

    def __init__(self, figures: Figures, every: float = 1.5, how: How = How()) -> None:  # noqa: B008  # it is frozen
        self.figures, self._how = figures, how
        self._rng = random.Random(f"chaos {figures.seed}")
        self._blows: Iterator[Blow] = blows(figures.seed, every)
        self._plans: Iterator[Plan] = plans(figures.seed)
        self._context = multiprocessing.get_context("spawn")
        self._children: list[Child | None] = [None] * 4
        self._addresses = ["", ""]
        self._calm = False
        self._restart_at: dict[int, float] = {}
        self._outcomes: dict[tuple[str, str, int], str] = {}
        self._theirs: dict[tuple[str, str, int], list[str]] = {}

    def run(self, seconds: float) -> None:
        """Run for so long, then see that everything ends and comes back. Raises Broken."""
        started = time.monotonic()
        try:
            self._set_up()
            self._rage(seconds)
            self._calm_down()
            self._end()
        except Broken as error:
            self.figures.failure = str(error)
            raise
        finally:
            self.figures.seconds = time.monotonic() - started
            for seat in range(4):
                self._kill(seat)

    # Children

    def _start(self, seat: int) -> None:
        ours, theirs = self._context.Pipe()
        kind = "producer" if seat < 2 else "consumer"
        bind = self._addresses[seat].removeprefix("tcp://") if seat < 2 else ""
        engine = f"p{seat}" if seat < 2 else f"d{seat - 2}"
        process = self._context.Process(target=live, args=(theirs, kind, engine, bind, self._how), daemon=True)
        process.start()
        theirs.close()
        self._children[seat] = Child(process, ours)

    def _kill(self, seat: int) -> None:
        child = self._children[seat]
        self._children[seat] = None
        if child is not None:
            if child.last is not None:
                self._count(child.last)
            if child.process.is_alive():
                os.kill(child.pid, signal.SIGKILL)
            child.process.join()
            child.pipe.close()

    def _tell(self, child: Child, task: Task) -> None:
        try:
            child.pipe.send(task)
        except OSError:
            return  # its end is heard of when its pipe is read

    def _living(self, seats: range = range(4)) -> list[tuple[int, Child]]:
        return [(seat, child) for seat in seats if (child := self._children[seat]) is not None]

    def _set_up(self) -> None:
        for seat in range(4):
            self._start(seat)
        self._until(lambda: all(child.up for _, child in self._living()), "the start of the processes")

    # What comes from them

    def _listen(self, seconds: float) -> None:
        pipes = {child.pipe: (seat, child) for seat, child in self._living()}
        for pipe in wait(list(pipes), seconds):
            assert isinstance(pipe, Connection)
            seat, child = pipes[pipe]
            try:
                while pipe.poll():
                    self._heard(seat, child, pipe.recv())
            except (EOFError, OSError):
                if child.closed is None:
                    raise Broken(Rule.ERROR, f"seat {seat} has ended by itself") from None
                self._kill(seat)

    def _heard(self, seat: int, child: Child, answer: Answer) -> None:
        if isinstance(answer, Wrong):
            raise Broken(Rule[answer.rule], answer.detail)
        if isinstance(answer, Up):
            self._is_up(seat, child, answer)
        elif isinstance(answer, Outcomes):
            self._ended(seat, child, answer)
        elif isinstance(answer, Skipped):
            child.open.pop((answer.transfer, answer.attempt), None)
            self.figures.deeds["offers that found no blocks or no connection"] += 1
        elif isinstance(answer, State):
            child.last = answer
            if answer.asked:
                child.state = answer
        else:
            assert isinstance(answer, Closed)
            child.closed = answer.clear

    def _is_up(self, seat: int, child: Child, answer: Up) -> None:
        child.up = True
        if seat < 2:
            self._addresses[seat] = answer.address
        if all(self._addresses):
            for _, consumer in self._living(range(2, 4)):
                self._tell(consumer, Know(tuple(self._addresses)))

    def _ended(self, seat: int, child: Child, answer: Outcomes) -> None:
        key = (answer.transfer, answer.epoch, answer.attempt)
        if seat < 2:
            self.figures.producers[answer.outcome] += 1
            self._theirs.setdefault(key, []).append(answer.outcome)
            return
        self.figures.consumers[answer.outcome] += 1
        if key in self._outcomes:
            raise Broken(Rule.ONCE, f"{key} ends twice")
        self._outcomes[key] = answer.outcome
        plan = child.open.pop((answer.transfer, answer.attempt), None)
        failed = answer.outcome != Outcome.COMPLETE.value and answer.attempt < RETRIES
        if plan is not None and failed and not self._calm and self._rng.random() < 0.5:
            self._dispatch(plan, answer.attempt + 1)

    # What is done to them

    def _rage(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        blow = next(self._blows)
        due = time.monotonic() + blow.wait
        while time.monotonic() < end:
            self._listen(0.01)
            self._resume()
            if time.monotonic() >= due:
                self._strike(blow)
                blow = next(self._blows)
                due = time.monotonic() + blow.wait
            if sum(len(child.open) for _, child in self._living(range(2, 4))) < OPEN:
                self._dispatch(next(self._plans), 0)

    def _strike(self, blow: Blow) -> None:
        child = self._children[blow.victim]
        if child is None or not child.up or child.stopped_until:
            return
        self.figures.deeds[blow.deed.value] += 1
        if blow.deed is Deed.STOP:
            child.stopped_until = time.monotonic() + blow.seconds
            os.kill(child.pid, signal.SIGSTOP)
        else:
            self._kill(blow.victim)
            self._restart_at[blow.victim] = time.monotonic() + blow.seconds / 2

    def _resume(self) -> None:
        now = time.monotonic()
        for _, child in self._living():
            if child.stopped_until and now >= child.stopped_until:
                child.stopped_until = 0.0
                os.kill(child.pid, signal.SIGCONT)
        for seat, at in list(self._restart_at.items()):
            if now >= at:
                del self._restart_at[seat]
                self._start(seat)
                self.figures.deeds["restart"] += 1

    def _dispatch(self, plan: Plan, attempt: int) -> None:
        producer, consumer = self._children[plan.producer], self._children[2 + plan.consumer]
        if plan.staged and producer is not None and producer.up:
            self._tell(producer, plan.stage())
        if plan.offered and consumer is not None and consumer.up:
            consumer.open[plan.job.transfer, attempt] = plan
            self._tell(consumer, plan.offer(self._addresses[plan.producer], attempt))
            self.figures.offered += 1
            self.figures.deeds["cancel"] += plan.cancel is not None

    # The end

    def _until(self, condition: Callable[[], bool], what: str, limit: float = GRACE) -> None:
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                states = {seat: child.state for seat, child in self._living()}
                raise Broken(Rule.HANGS, f"{what} did not come within {limit:g} s: {states}")
            self._listen(0.05)
            self._resume()

    def _calm_down(self) -> None:
        self._calm = True
        for _, child in self._living():
            child.stopped_until = min(child.stopped_until, time.monotonic())
        for seat in self._restart_at:
            self._restart_at[seat] = 0.0
        self._until(lambda: all(child.up for _, child in self._living()), "the start of the last processes")
        ended = LIMITS.deadline + LIMITS.stage_deadline + GRACE
        self._until(self._all_ended, "the end of every transfer", ended)

    def _ask(self) -> list[State]:
        living = self._living()
        for _, child in living:
            child.state = None
            self._tell(child, Report())
        self._until(lambda: all(child.state for _, child in living), "an answer")
        return [child.state for _, child in living if child.state is not None]

    def _all_ended(self) -> bool:
        return not any(state.open for state in self._ask()) and not any(
            child.open for _, child in self._living(range(2, 4))
        )

    def _end(self) -> None:
        """Wait for proof; then kill one side, after which the other must have everything back."""
        end = time.monotonic() + 10.0
        while any(state.held for state in self._ask()) and time.monotonic() < end:
            self._listen(0.1)
        self.figures.waiting = sum(state.held for state in self._ask())
        if self._how.landing and self.figures.waiting:
            raise Broken(Rule.LOST, f"{self.figures.waiting} blocks wait for proof, which no WRITE can reach")
        self._check_agreement()
        for seat in self._rng.choice([(0, 1), (2, 3)]):
            self._kill(seat)
        self._until(lambda: not any(state.held for state in self._ask()), "the blocks of the survivors")
        survivors = self._living()
        for _, child in survivors:
            self._tell(child, Close())
        self._until(
            lambda: all(child.closed is not None for _, child in survivors), "the close of the survivors", 40.0
        )
        if not all(child.closed for _, child in survivors):
            raise Broken(Rule.LOST, "a survivor closes with memory in custody")

    def _count(self, state: State) -> None:
        self.figures.late_bytes += state.late_bytes
        for name, count in state.stats.items():
            if name.startswith("proof") or name in COUNTED:
                self.figures.proofs[name.removeprefix("proof: ")] += count

    def _check_agreement(self) -> None:
        for key, theirs in self._theirs.items():
            if len(theirs) > 1:
                raise Broken(Rule.ONCE, f"{key} ends {len(theirs)} times at its producer")
            mine = self._outcomes.get(key)
            if mine is None or mine == theirs[0]:
                continue
            if theirs[0] == Outcome.COMPLETE.value and Outcome(mine).rejected:
                raise Broken(Rule.AGREEMENT, f"{key} is {mine} at the consumer, complete at the producer")
            self.figures.apart[f"{theirs[0]} / {mine}"] += 1
