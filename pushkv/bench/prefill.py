"""The prefill engine of ``pushkv bench serve``: prompts in their order, a chunk a step, on its main thread."""

from __future__ import annotations

import time
from collections import deque

from pushkv.bench.engine import Blocks, Memory, step
from pushkv.bench.movers import Source, source_of
from pushkv.bench.processes import Pipe, engine, ready
from pushkv.bench.workload import Mode, Prefilled, Request, ServeSettings

IDLE_S = 0.05
BUSY_S = 0.001
"""How long an engine without work to compute waits between two steps, without anything open and with."""


def prefill(pipe: Pipe, decode: Pipe, settings: ServeSettings, mode: Mode, core: int | None) -> None:
    """The process: serves until ``pipe`` says None or closes. What goes wrong is told as a text."""
    with engine(pipe, "prefill", core):
        memory = Memory(settings)
        source = source_of(mode, memory, settings)
        decode.send(source.where)
        source.meet(decode.recv())
        pipe.send("ready")
        PrefillEngine(pipe, decode, settings, memory, source).run()
        source.close()


class PrefillEngine:
    """A queue, a prompt that is being computed, and blocks that are still read."""

    def __init__(self, pipe: Pipe, decode: Pipe, settings: ServeSettings, memory: Memory, source: Source) -> None:
        self._pipe, self._decode, self._settings = pipe, decode, settings
        self._memory, self._source = memory, source
        self._blocks = Blocks(settings.blocks, settings.seed)
        self._queue: deque[Request] = deque()
        self._held: dict[str, tuple[int, ...]] = {}
        self._open = True

    def run(self) -> None:
        """Take, compute and release, until there is nothing more to come."""
        while self._open:
            self._take()
            self._release()
            if self._queue:
                self._compute()

    def _take(self) -> None:
        """New requests; with nothing to compute, wait for them."""
        pause = 0.0 if self._queue else BUSY_S if self._held else IDLE_S
        while ready([self._pipe], pause):
            asked = self._pipe.recv()
            if asked is None:
                self._open = False
                return
            self._queue.append(asked)
            pause = 0.0

    def _release(self) -> None:
        for name in self._source.released():
            self._blocks.give(self._held.pop(name))

    def _compute(self) -> None:
        """The first prompt of the queue, a chunk at a time; a step that finds no blocks free computes nothing."""
        request = self._queue[0]
        blocks = self._blocks.take(-(-request.tokens // self._settings.block))
        if blocks is None:
            time.sleep(BUSY_S)
            return
        self._queue.popleft()
        self._held[request.name] = blocks
        began, done = time.monotonic(), 0
        while done < request.tokens:
            done = self._chunk(request, blocks, done)
        self._finish(Prefilled(request, blocks, began, time.monotonic()))

    def _chunk(self, request: Request, blocks: tuple[int, ...], done: int) -> int:
        """One step; gives how many tokens are computed after it."""
        size, until = self._settings.block, min(request.tokens, done + self._settings.chunk)
        step((until - done) * self._settings.prefill_us / 1e6, self._settings.held)
        first = done // size
        self._memory.stamp(request, blocks[first : -(-until // size)], first)
        self._source.computed(request, blocks, until)
        self._release()
        return until

    def _finish(self, done: Prefilled) -> None:
        if self._source.finished(done):
            self._blocks.give(self._held.pop(done.request.name))
        self._decode.send(done)
        self._pipe.send(done)
