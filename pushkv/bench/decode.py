"""The decode engine of ``pushkv bench serve``: a token a step for every running request, on its main thread."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from pushkv.bench.engine import Blocks, Memory, step
from pushkv.bench.movers import Target, target_of
from pushkv.bench.prefill import BUSY_S, IDLE_S
from pushkv.bench.processes import Pipe, engine, ready
from pushkv.bench.workload import Mode, Prefilled, Request, Served, ServeSettings


def decode(pipe: Pipe, prefill: Pipe, settings: ServeSettings, mode: Mode, core: int | None) -> None:
    """The process: serves until ``pipe`` says None or closes. What goes wrong is told as a text."""
    with engine(pipe, "decode", core):
        memory = Memory(settings)
        target = target_of(mode, memory, settings)
        source = prefill.recv()
        prefill.send(target.where)
        target.meet(source)
        pipe.send("ready")
        DecodeEngine(pipe, prefill, settings, memory, target).run()
        target.close()


@dataclass
class Running:
    """A request that has blocks; ``loaded`` and ``first`` are 0 until then."""

    request: Request
    blocks: tuple[int, ...]
    loaded: float = 0.0
    first: float = 0.0
    tokens: int = 0


class DecodeEngine:
    """What waits for blocks, what waits for its KV, and what runs."""

    def __init__(self, pipe: Pipe, prefill: Pipe, settings: ServeSettings, memory: Memory, target: Target) -> None:
        self._pipe, self._prefill, self._settings = pipe, prefill, settings
        self._memory, self._target = memory, target
        self._blocks = Blocks(settings.blocks, settings.seed + 1)
        self._queue: deque[tuple[Request, tuple[int, ...]]] = deque()
        self._loading: dict[str, Running] = {}
        self._running: list[Running] = []
        self._open = True

    def run(self) -> None:
        """Take, load and compute, until there is nothing more to come."""
        while self._open:
            self._take()
            self._load()
            self._take_in()
            if self._running:
                step(self._settings.decode_ms / 1e3, self._settings.held)
                self._give_tokens()

    def _take(self) -> None:
        """New requests, of the router or, once computed, of prefill; with nothing to run, wait for them."""
        busy = self._queue or self._loading
        pause = 0.0 if self._running else BUSY_S if busy else IDLE_S
        for connection in ready([self._pipe, self._prefill], pause):
            asked = connection.recv()
            if asked is None:
                self._open = False
            elif isinstance(asked, Request):
                self._queue.append((asked, ()))
            elif isinstance(asked, Prefilled) and not self._target.early:
                self._queue.append((asked.request, asked.blocks))

    def _load(self) -> None:
        """Ask for the KV of as many as there are blocks for."""
        while self._queue:
            request, theirs = self._queue[0]
            blocks = self._blocks.take(-(-request.tokens // self._settings.block))
            if blocks is None:
                return
            self._queue.popleft()
            self._loading[request.name] = Running(request, blocks)
            self._target.load(request, blocks, theirs)

    def _take_in(self) -> None:
        for name in self._target.loaded():
            one = self._loading.pop(name)
            one.loaded = time.monotonic()
            self._running.append(one)

    def _give_tokens(self) -> None:
        now = time.monotonic()
        for one in self._running:
            one.tokens += 1
            one.first = one.first or now
        for one in [one for one in self._running if one.tokens >= self._settings.new_tokens]:
            self._finish(one, now)

    def _finish(self, one: Running, now: float) -> None:
        self._running.remove(one)
        if self._target.checks:
            self._memory.check(one.request, one.blocks)
        self._blocks.give(one.blocks)
        self._pipe.send(Served(one.request, one.loaded, one.first, now, one.tokens))
