"""The decode engine: it offers blocks for the requests it is told of, and generates once their KV is there.

A thread of its own takes requests in and makes the offers, as an engine whose compute runs on a device does while
that is busy. Here the compute holds the engine's thread for a whole step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from pushkv import Consumer, Ended, Link, Outcome, Released, prompt_digest
from pushkv.core.commands import Command
from pushkv.demo.engine import Engine, News, Place
from pushkv.demo.generate import DecodeLoop
from pushkv.demo.model import Model
from pushkv.demo.paged import BlockIds, PagedCache, blocks_for
from pushkv.demo.words import Dispatch, Generated, Offered, ToRank
from pushkv.demo.workload import Request
from pushkv.errors import PushKVError
from pushkv.trace import now


@dataclass
class _Taken:
    """A request with blocks: ``joined`` is when its KV was seen to be complete, ``started`` when its
    first step began; in nanoseconds, None before.
    """

    request: Request
    table: BlockIds
    joined: int | None = None
    started: int | None = None
    done: bool = False


class Decode(Engine):
    """Generates a token a step for every request whose KV has come."""

    def __init__(self, place: Place, model: Model, cache: PagedCache, consumer: Consumer, link: Link) -> None:
        super().__init__(place, model, cache)
        self._consumer, self._link = consumer, link
        self._loop = DecodeLoop(model, cache)
        self._taken: dict[str, _Taken] = {}
        self._admission = threading.Lock()
        self._offered: SimpleQueue[_Taken] = SimpleQueue()
        self._words: SimpleQueue[ToRank | Exception] = SimpleQueue()
        self.keys: dict[str, str] = {}
        threading.Thread(target=self._take_in, name="decode intake", daemon=True).start()

    def words(self) -> Iterator[ToRank]:
        """What the intake has left over; raises what it ended with."""
        while not self._words.empty():
            word = self._words.get()
            if isinstance(word, Exception):
                raise word
            yield word

    def events(self) -> list[Command]:
        """What the consumer has seen."""
        return self._consumer.events()

    def note(self, events: Iterable[Command], news: News) -> None:
        """Transfers end, and their blocks are out of reach."""
        for event in events:
            if isinstance(event, Ended):
                news.ended.append((event.key.transfer, event.outcome, event.detail))
            elif isinstance(event, Released):
                news.released.append(event.key.transfer)

    def compute(self) -> bool:
        """Let in what has come, generate, and free what is done."""
        while not self._offered.empty():
            taken = self._offered.get()
            self._taken[taken.request.name] = taken
        for name, taken in self._taken.items():
            if taken.joined is None and not taken.done and (ended := self.ended(name)) is not None:
                self._start(taken, *ended)
        busy = self._generate()
        for name in [name for name, taken in self._taken.items() if taken.done and self.released(name)]:
            with self._admission:
                self.pool.free(self._taken.pop(name).table)
            self._admit(())
        return busy

    def _take_in(self) -> None:
        """On the intake's thread: offer blocks for requests the moment the router names them."""
        try:
            while True:
                word = self.place.pipe.recv()
                if isinstance(word, Dispatch):
                    self._admit(word.requests)
                else:
                    self._words.put(word)
        except (PushKVError, EOFError, OSError) as error:
            self._words.put(error)

    def _admit(self, requests: Sequence[Request]) -> None:
        with self._admission:
            self.waiting.extend(requests)
            while self.waiting and self._fits(self.waiting[0]):
                self._offer(self.waiting.popleft())

    def _fits(self, request: Request) -> bool:
        return blocks_for(request.length, self.cache.block_size) <= self.pool.free_count

    def _offer(self, request: Request) -> None:
        table = self.pool.allocate(blocks_for(request.length, self.cache.block_size))
        # The prompt's last token is the first that decode computes itself: nobody sends its KV.
        wanted = len(request.prompt) - 1
        transfer = self._consumer.offer(
            request.name,
            self._link,
            table[: blocks_for(wanted, self.cache.block_size)],
            prompt=prompt_digest(request.prompt),
            prompt_tokens=len(request.prompt),
            stop=wanted,
        )
        self.keys[request.name] = str(transfer.key)
        self._offered.put(_Taken(request, table))
        self.tell_alone(Offered(request.name))

    def _start(self, taken: _Taken, outcome: Outcome, detail: str) -> None:
        request = taken.request
        self.outcomes[request.name] = outcome
        if outcome is not Outcome.COMPLETE:
            taken.done = True
            self.tell(Generated(request.name, outcome, detail))
            return
        taken.joined = now()
        *known, last = request.prompt
        self._loop.add(request.name, token=last, position=len(known), table=taken.table, count=request.new_tokens)

    def _generate(self) -> bool:
        running = self._loop.running
        if not running:
            return False
        started = now()
        finished = self._loop.step()
        ended = now()
        self.place.trace.span("decode step", "engine", "", started, ended, requests=len(running))
        for name in running:
            self._stepped(name, started, ended)
        for name, generation in finished.items():
            taken = self._taken[name]
            self.place.trace.span("decode", "requests", name, taken.started or started, ended)
            taken.done = True
            self.tell(Generated(name, Outcome.COMPLETE, "", generation))
        return True

    def _stepped(self, name: str, started: int, ended: int) -> None:
        taken = self._taken[name]
        if taken.started is None:
            taken.started = started
            self.place.trace.span("waits for a step", "requests", name, taken.joined or started, started)
            self.place.trace.instant("first token", "requests", name, ended)
