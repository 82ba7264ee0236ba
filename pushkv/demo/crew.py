"""The demo's processes, started and ended by the one that plays the router."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import NoReturn, TypeVar

from pushkv.demo.environment import ONE_THREAD, environment
from pushkv.demo.group import Pipe, star
from pushkv.demo.rank import run_rank
from pushkv.demo.settings import RankSpec, Side
from pushkv.demo.words import Failure, FromRank, Report, ToRank
from pushkv.errors import PushKVError

W = TypeVar("W")
END_S = 5.0


class RankFailed(PushKVError):
    """A process of the demo failed, ended before its time, or said nothing for too long."""


@dataclass
class _Member:
    """A rank's process and the router's end of the pipe to it."""

    spec: RankSpec
    process: SpawnProcess
    pipe: Pipe
    reported: bool = False


class Crew:
    """All ranks of both sides; leaving the context ends those that still run, whatever happened.

    ``limit`` seconds bound the whole. Raises RankFailed for a rank that says it failed, that ends too early, or
    that is not done by the limit.
    """

    def __init__(self, specs: Sequence[RankSpec], limit: float) -> None:
        self._deadline = time.monotonic() + limit
        self._limit = limit
        self._members: list[_Member] = []
        context = multiprocessing.get_context("spawn")
        try:
            with environment(ONE_THREAD):
                for side in Side:
                    ranks = [spec for spec in specs if spec.side is side]
                    for spec, pipes in zip(ranks, star(context, len(ranks)), strict=True):
                        ours, theirs = context.Pipe()
                        process = context.Process(
                            target=run_rank, args=(spec, theirs, pipes), name=f"pushkv demo {spec.name}", daemon=True
                        )
                        self._members.append(_Member(spec, process, ours))
                        process.start()
                        for pipe in (theirs, *pipes):
                            pipe.close()
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            for member in self._members:
                member.process.join(END_S)
        self._kill()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes' ids."""
        return tuple(member.process.pid or 0 for member in self._members)

    def tell(self, side: Side, word: ToRank, *, all_ranks: bool = False) -> None:
        """Tell rank 0 of a side, or every rank."""
        for member in self._members:
            if member.spec.side is side and (all_ranks or member.spec.rank == 0):
                try:
                    member.pipe.send(word)
                except OSError:
                    self._hear_death(member)

    def hear(self) -> list[tuple[RankSpec, FromRank]]:
        """Wait for words of any rank."""
        present = [member for member in self._members if not member.reported]
        left = self._deadline - time.monotonic()
        ready = wait([member.pipe for member in present], max(0.0, left))
        if not ready:
            names = ", ".join(member.spec.name for member in present)
            raise RankFailed(f"the demo is not done after {self._limit:g} s; still at work: {names}")
        return [(member.spec, self._word(member)) for member in present if member.pipe in ready]

    def gather(self, kind: type[W], *sides: Side) -> dict[RankSpec, W]:
        """Wait until each rank of the sides has said a word of this kind; other words are not expected meanwhile."""
        expected = sum(member.spec.side in sides for member in self._members)
        heard: dict[RankSpec, W] = {}
        while len(heard) < expected:
            for spec, word in self.hear():
                if not isinstance(word, kind) or spec.side not in sides:
                    raise RankFailed(f"{spec.name} says {word!r} where a {kind.__name__} is due")
                heard[spec] = word
        return heard

    def _word(self, member: _Member) -> FromRank:
        try:
            word: FromRank = member.pipe.recv()
        except (EOFError, OSError):
            self._hear_death(member)
        if isinstance(word, Failure):
            raise RankFailed(f"{member.spec.name} failed: {word.detail}")
        member.reported = isinstance(word, Report)
        return word

    def _hear_death(self, member: _Member) -> NoReturn:
        # A rank whose fellow has failed ends too; the one that says why is the one to report.
        for other in self._members:
            while other is not member and _readable(other.pipe):
                self._word_before_death(other)
        member.process.join(END_S)
        code = member.process.exitcode
        raise RankFailed(f"{member.spec.name} ended with exit code {code} before it was done; see above for why")

    def _word_before_death(self, member: _Member) -> None:
        word = member.pipe.recv()
        if isinstance(word, Failure):
            raise RankFailed(f"{member.spec.name} failed: {word.detail}")

    def _kill(self) -> None:
        for member in self._members:
            if member.process.pid is not None and member.process.is_alive():
                member.process.kill()
            if member.process.pid is not None:
                member.process.join()
            member.pipe.close()


def _readable(pipe: Pipe) -> bool:
    """Whether a word waits in the pipe; no is also the answer for one that is closed."""
    try:
        return pipe.poll()
    except OSError:
        return False
