"""The step loop that the engines of both sides share: take events, schedule, compute.

All ranks of a side run it in step. Each begins a step by telling the others what it has heard, so that all know the
same and decide the same. An engine's thread calls the public API of its endpoint and nothing below.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pushkv import Outcome
from pushkv.core.commands import Command
from pushkv.core.outcome import worst
from pushkv.demo.group import Group, Pipe
from pushkv.demo.model import Model
from pushkv.demo.paged import BlockPool, PagedCache
from pushkv.demo.settings import RankSpec
from pushkv.demo.words import Dispatch, Finish, FromRank, ToRank
from pushkv.demo.workload import Request
from pushkv.errors import PushKVError
from pushkv.trace import Trace

IDLE_S = 300e-6
"""How long a step that found nothing to do sleeps."""
RETURN_S = 15.0
"""How long blocks may take to come back after the last request."""


class RouterGone(PushKVError):
    """The process that started this one is gone, or says what makes no sense."""


@dataclass
class News:
    """What one rank has heard since its last step."""

    requests: list[Request] = field(default_factory=list)
    ended: list[tuple[str, Outcome, str]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    finish: bool = False


@dataclass(frozen=True)
class Place:
    """Where an engine runs: its spec, its side's group, the pipe to the router, and the trace."""

    spec: RankSpec
    group: Group
    pipe: Pipe
    trace: Trace


class Engine(ABC):
    """One rank's engine."""

    def __init__(self, place: Place, model: Model, cache: PagedCache) -> None:
        self.place, self.model, self.cache = place, model, cache
        self.pool = BlockPool(cache.blocks)
        self.waiting: deque[Request] = deque()
        self.outcomes: dict[str, Outcome] = {}
        self._endings: defaultdict[str, list[tuple[Outcome, str]]] = defaultdict(list)
        self._releases: Counter[str] = Counter()
        self._finish_by: float | None = None
        self._telling = threading.Lock()

    def run(self) -> None:
        """Step until the router says that there is no more and all blocks are back, or do not come back."""
        while not self._over():
            if not self.step():
                time.sleep(IDLE_S)

    def step(self) -> bool:
        """One step; whether there was anything to do."""
        busy = False
        for news in self.place.group.all_gather(self._listen()):
            busy |= bool(news.requests or news.ended or news.released)
            self.waiting.extend(news.requests)
            for name, outcome, detail in news.ended:
                self._endings[name].append((outcome, detail))
            self._releases.update(news.released)
            if news.finish:
                self._finish_by = time.monotonic() + RETURN_S
        return self.compute() or busy

    def tell(self, word: FromRank) -> None:
        """Tell the router; rank 0 speaks for its side."""
        if self.place.spec.rank == 0:
            self.tell_alone(word)

    def tell_alone(self, word: FromRank) -> None:
        """Tell the router, for this rank; from any thread."""
        with self._telling:
            self.place.pipe.send(word)

    def words(self) -> Iterator[ToRank]:
        """What the router has said since the last call; by default it speaks to rank 0 alone."""
        while self.place.spec.rank == 0 and self.place.pipe.poll():
            yield self.place.pipe.recv()

    def ended(self, name: str, parties: int = 0) -> tuple[Outcome, str] | None:
        """A transfer's outcome over all ranks, the worst of theirs; None while one of ``parties`` is missing."""
        endings = self._endings[name]
        if len(endings) < (parties or self.place.group.size):
            return None
        outcome = worst(one for one, _ in endings)
        return outcome, next(detail for one, detail in endings if one is outcome)

    def released(self, name: str, parties: int = 0) -> bool:
        """Whether the blocks of a transfer are out of custody on all ranks."""
        return self._releases[name] >= (parties or self.place.group.size)

    @abstractmethod
    def compute(self) -> bool:
        """Schedule and compute; whether there was anything to do."""

    @abstractmethod
    def events(self) -> list[Command]:
        """What the endpoint has seen since the last call."""

    @abstractmethod
    def note(self, events: Iterable[Command], news: News) -> None:
        """Sort the endpoint's events into this rank's news."""

    def _listen(self) -> News:
        news = News()
        for word in self.words():
            if isinstance(word, Dispatch):
                news.requests.extend(word.requests)
            elif isinstance(word, Finish):
                news.finish = True
            else:
                raise RouterGone(f"{self.place.spec.name} was sent {word!r}; it takes requests and the end")
        self.note(self.events(), news)
        return news

    def _over(self) -> bool:
        # Each rank has a clock of its own, so that they agree on the end by telling one another.
        if self._finish_by is None:
            return False
        back = self.pool.free_count == self.pool.blocks
        late = time.monotonic() > self._finish_by
        ranks = self.place.group.all_gather((back, late))
        return all(back for back, _ in ranks) or any(late for _, late in ranks)
