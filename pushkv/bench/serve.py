"""Serving with prefill and decode apart: TTFT and TPOT against length and load, for each way that KV can cross.

Two processes act as the engines, each with one core to itself where there are two: their steps take the times they
are given and hold the GIL for a part of them, and KV of real bytes crosses over real NIXL. This process is the
router. The cells of one length are measured one mode after the other, with the same arrivals.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from pushkv.bench.decode import decode
from pushkv.bench.prefill import prefill
from pushkv.bench.processes import Pipe, cores, ready, start, stop
from pushkv.bench.workload import Mode, Prefilled, Request, Served, ServeSettings
from pushkv.errors import BenchError

START_S = 120.0
EARLY = (Mode.PUSH, Mode.STREAM)
"""Modes in which decode hears of a request as prefill does."""

Cell = dict[str, Any]


def measure(settings: ServeSettings, told: Callable[[Cell], None] = lambda cell: None) -> dict[str, Any]:
    """A cell for each length, mode and rate; ``told`` hears each when it is there.

    Raises BenchError where a process fails, a byte is wrong or no end comes, and TransportUnavailable.
    """
    cells: list[Cell] = []
    for length in settings.lengths:
        for mode in settings.modes:
            with engines(settings, mode) as served:
                for rate in settings.rates:
                    cells.append(cell_of(settings, mode, length, rate, *served.run(length, rate)))
                    told(cells[-1])
    chosen = asdict(settings) | {"modes": [mode.value for mode in settings.modes]}
    return {"bench": "serve", "settings": chosen, "cores": len(cores()), "cells": with_ratios(cells)}


@contextmanager
def engines(settings: ServeSettings, mode: Mode) -> Iterator[Engines]:
    """Both engines, started and connected; ended on leaving."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    mine: list[int | None] = [*cores()[:2]] if len(cores()) > 1 else [None, None]
    started = [
        start(context, target, between, settings, mode, core)
        for target, between, core in zip((prefill, decode), (ours, theirs), mine, strict=True)
    ]
    pipes = [pipe for pipe, _ in started]
    try:
        made = Engines(settings, mode, *pipes)
        made.await_ready()
        yield made
        for pipe in pipes:
            pipe.send(None)
    except BaseException as error:
        for _, process in started:
            process.kill()
        if isinstance(error, (EOFError, BrokenPipeError)):
            raise BenchError(f"An engine of the benchmark ({mode.value}) has ended; see what it wrote.") from None
        raise
    finally:
        for _, process in started:
            stop(process)


class Engines:
    """The router: sends requests when they are due, and takes in what the engines say."""

    def __init__(self, settings: ServeSettings, mode: Mode, to_prefill: Pipe, to_decode: Pipe) -> None:
        self._settings, self._mode = settings, mode
        self._prefill, self._decode = to_prefill, to_decode
        self._number = 0

    def await_ready(self) -> None:
        """Wait until both say so."""
        for pipe in (self._prefill, self._decode):
            if not pipe.poll(START_S):
                raise BenchError(f"The engines ({self._mode.value}) were not ready within {START_S:.0f} s.")
            self._take(pipe.recv())

    def run(self, length: int, rate: float) -> tuple[list[Prefilled], list[Served]]:
        """One cell: what became of each request. A first request, alone, warms up and does not count."""
        self._serve([(0.0, length)])
        return self._serve([(at, length) for at in self._settings.arrivals(length, rate)])

    def _serve(self, due: list[tuple[float, int]]) -> tuple[list[Prefilled], list[Served]]:
        prefilled: list[Prefilled] = []
        served: list[Served] = []
        began = time.monotonic() + 0.05
        end = began + 60 + 10 * (due[-1][0] + len(due))
        waiting = [(began + at, tokens) for at, tokens in due]
        while len(served) < len(due) or len(prefilled) < len(due):
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                self._send(*waiting.pop(0))
            if now > end:
                raise BenchError(f"{len(served)} of {len(due)} requests ({self._mode.value}) came to an end in time.")
            pause = waiting[0][0] - now if waiting else 1.0
            for pipe in ready([self._prefill, self._decode], pause):
                said = self._take(pipe.recv())
                if isinstance(said, Prefilled):
                    prefilled.append(said)
                elif isinstance(said, Served):
                    served.append(said)
        return prefilled, served

    def _send(self, at: float, tokens: int) -> None:
        """A request, which arrived when it was due."""
        self._number += 1
        request = Request(self._number, tokens, at)
        self._prefill.send(request)
        if self._mode in EARLY:
            self._decode.send(request)

    def _take(self, said: object) -> object:
        if isinstance(said, str) and said != "ready":
            raise BenchError(f"In mode {self._mode.value} {said}")
        return said


def cell_of(
    settings: ServeSettings, mode: Mode, length: int, rate: float, prefilled: list[Prefilled], served: list[Served]
) -> Cell:
    """A cell's figures, in milliseconds: TTFT from arrival to the first token, TPOT between a request's tokens."""
    done = {one.request.number: one.ended for one in prefilled}
    ttft = [(one.first - one.request.arrived) * 1e3 for one in served]
    tpot = [(one.last - one.first) * 1e3 / (one.tokens - 1) for one in served]
    return {
        "length": length,
        "rate": rate,
        "mode": mode.value,
        "requests": len(served),
        "load": rate * length * settings.prefill_us / 1e6,
        "ttft_ms_p50": median(ttft),
        "ttft_ms_mean": fmean(ttft),
        "ttft_ms_max": max(ttft),
        "tpot_ms_p50": median(tpot),
        "tpot_ms_mean": fmean(tpot),
        "tpot_ms_max": max(tpot),
        "prefill_ms_p50": median((one.ended - one.request.arrived) * 1e3 for one in prefilled),
        "prefill_ms_mean": fmean((one.ended - one.began) * 1e3 for one in prefilled),
        "loaded_after_prefill_ms_p50": median((one.loaded - done[one.request.number]) * 1e3 for one in served),
    }


def with_ratios(cells: list[Cell]) -> list[Cell]:
    """The cells, each with its mean TPOT over that of the same cell without any transfer, where that was measured."""
    alone = {(cell["length"], cell["rate"]): cell for cell in cells if cell["mode"] == Mode.NONE.value}
    for cell in cells:
        if (base := alone.get((cell["length"], cell["rate"]))) is not None:
            cell["tpot_over_none"] = cell["tpot_ms_mean"] / base["tpot_ms_mean"]
            cell["ttft_beyond_none_ms"] = cell["ttft_ms_p50"] - base["ttft_ms_p50"]
    return cells
