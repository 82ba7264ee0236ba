"""Handover between two processes on this host: latency by size, how soon an offer is seen, what idling costs.

The producer stages, and the clock runs until the consumer's engine thread has the outcome; the raw NIXL WRITE of the
same bytes is measured in the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pushkv.bench.processes import Pipe, start, stop
from pushkv.demo import raw
from pushkv.demo.environment import belong_to_parent
from pushkv.errors import BenchError

BLOCK_BYTES = 32 * 1024
BLOCK_TOKENS = 16
PROMPT = b"\0" * 32
WAIT = 30.0
WARM_UP = 2
QUIET = 0.03
"""After so many seconds without work both sides have gone idle."""


@dataclass(frozen=True)
class HandoverSettings:
    """What is measured: bytes a request, how often, and for how many seconds idling is watched (0: not)."""

    sizes: tuple[int, ...] = (64 << 10, 1 << 20, 16 << 20)
    repeats: int = 30
    idle_seconds: float = 5.0


def measure(settings: HandoverSettings, told: Callable[[dict[str, Any]], None] = lambda row: None) -> dict[str, Any]:
    """A row a size; ``told`` hears each when it is there. Raises BenchError and TransportUnavailable."""
    floor = raw.measure(settings.sizes, settings.repeats)
    rows: list[dict[str, Any]] = []
    idle: dict[str, float] = {}
    for number, size in enumerate(settings.sizes):
        got = _decode(size, settings.repeats, 0.0 if number else settings.idle_seconds)
        idle |= got.pop("idle")
        rows.append(_row(size, [seconds * 1e3 for seconds in floor[size]], got))
        told(rows[-1])
    return {
        "bench": "handover",
        "settings": asdict(settings),
        "rows": rows,
        "idle_share_of_a_core": idle,
        "cores": os.cpu_count(),
    }


def _row(size: int, floor: list[float], got: dict[str, Any]) -> dict[str, Any]:
    middle = statistics.median(got["handover"])
    return {
        "bytes": size,
        "raw_write_ms_p50": statistics.median(floor),
        "handover_ms_p50": middle,
        "handover_ms_max": max(got["handover"]),
        "beyond_raw_ms_p50": middle - statistics.median(floor),
        "offer_seen_ms_p50": statistics.median(got["offer seen"]),
        "offer_seen_ms_max": max(got["offer seen"]),
        "path": got["path"],
    }


def _cache(size: int) -> Any:
    """One layer, K and V together, blocks of 16 tokens of 2 KiB."""
    from pushkv import KVCache

    blocks = max(1, size // BLOCK_BYTES)
    shape = (blocks, BLOCK_TOKENS, BLOCK_BYTES // BLOCK_TOKENS)
    return KVCache.of(np.ones(shape, np.uint8), "BNC", layers=("all",), heads=1)


def _blocks(cache: Any) -> list[int]:
    return list(range(cache.geometry.groups[0].blocks))


def _prefill(pipe: Pipe, size: int) -> None:
    """Stage whenever asked; answer with when, and when the offer was seen."""
    from pushkv import EndpointConfig, Producer
    from pushkv.trace import Trace

    belong_to_parent()
    cache, trace = _cache(size), Trace("prefill")
    with Producer(EndpointConfig(engine="prefill"), cache, trace=trace) as producer:
        pipe.send(producer.address)
        blocks = _blocks(cache)
        while (asked := pipe.recv()) is not None:
            if isinstance(asked, float):
                pipe.send(_idle_share(asked))
                continue
            at = time.monotonic_ns()
            producer.stage(asked, blocks, prompt=PROMPT, prompt_tokens=len(blocks) * BLOCK_TOKENS).wait(WAIT)
            seen = [event[4] for event in trace.recording().events if event[1] == "offer seen"][-1]
            pipe.send((at, seen))


def _idle_share(seconds: float) -> float:
    """The share of a core that this process uses while nothing happens."""
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - wall)


def _decode(size: int, repeats: int, idle_seconds: float) -> dict[str, Any]:
    """Offer, have the other side stage, and take the times."""
    from pushkv import Consumer, EndpointConfig

    pipe, process = start(multiprocessing.get_context("spawn"), _prefill, size)
    try:
        cache = _cache(size)
        with Consumer(EndpointConfig(engine="decode"), cache) as consumer:
            link = consumer.connect(pipe.recv())
            taken = [_one(consumer, link, pipe, f"r{number}", cache) for number in range(repeats + WARM_UP)]
            idle = _idle(pipe, idle_seconds) if idle_seconds else {}
            path = consumer.path(link.agents[0])
        pipe.send(None)
    except (EOFError, BrokenPipeError):
        raise BenchError("The prefill process of the benchmark ended; see what it wrote.") from None
    finally:
        stop(process)
    handover, seen = zip(*taken[WARM_UP:], strict=True)
    return {"path": path, "handover": list(handover), "offer seen": list(seen), "idle": idle}


def _one(consumer: Any, link: Any, pipe: Pipe, name: str, cache: Any) -> tuple[float, float]:
    """One handover, and after what time its offer was seen, in milliseconds."""
    from pushkv import Outcome

    blocks = _blocks(cache)
    time.sleep(QUIET)
    offered = time.monotonic_ns()
    transfer = consumer.offer(name, link, blocks, prompt=PROMPT, prompt_tokens=len(blocks) * BLOCK_TOKENS)
    time.sleep(QUIET)
    pipe.send(name)
    if transfer.wait(WAIT) is not Outcome.COMPLETE:
        raise BenchError(f"A push ended as {transfer.outcome}: {transfer.detail}")
    done = time.monotonic_ns()
    staged, saw = pipe.recv()
    transfer.wait_released(WAIT)
    return (done - staged) / 1e6, (saw - offered) / 1e6


def _idle(pipe: Pipe, seconds: float) -> dict[str, float]:
    pipe.send(seconds)
    return {"consumer": _idle_share(seconds), "producer": pipe.recv()}
