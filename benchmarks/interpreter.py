"""What the lock of Python costs both sides: a transfer thread that waits for it, and an engine that it is taken from.

``python benchmarks/interpreter.py [--json] [--repeats N]``

The engine's thread computes in Python without a pause, the worst there is. *Stands* is the share of the time in which
that thread did not run (clock against processor time) beside no transfer thread, and beside one that is idle, that
has an offer open for which nothing comes, or a prompt staged behind a fence that does not pass; medians. *Waits* is
from handing the transfer thread something until it does it, meanwhile. Both at Python's own switch interval, and at
the one that vLLM's workers get (``switch_interval`` in the connector's settings).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("UCX_LOG_LEVEL", "error")

INTERVALS = (0.005, 0.0002)
WORK = 400_000
"""Rounds of the engine's loop: some 20 ms."""
TURNS = 15
WAITS = 40
TOKENS, BLOCK = 256, 16
PROMPT = {"prompt": b"\0" * 32, "prompt_tokens": TOKENS}


class Never:
    """A fence that does not pass."""

    def done(self) -> bool:
        """No."""
        return False

    def wait(self) -> None:
        """Not called."""
        raise AssertionError("nobody waits for this fence")


def endpoint(kind: str, engine: str) -> Any:
    """A producer or a consumer over a small cache."""
    import numpy as np

    import pushkv

    cache = pushkv.KVCache.of(np.ones((2, 64, 2, 2, BLOCK, 8), np.float16), "LBSHNC", model="m")
    return getattr(pushkv, kind)(pushkv.EndpointConfig(engine=engine), cache)


def serve(pipe: Connection) -> None:
    """The peer: a producer that is never told of a prompt."""
    producer = endpoint("Producer", "peer")
    pipe.send(producer.address)
    pipe.recv()
    producer.close(20)


def stands() -> float:
    """The share of the time in which a thread that computes does not run."""
    began, ran, total = time.perf_counter(), time.thread_time(), 0
    for number in range(WORK):
        total += number & 7
    took = time.perf_counter() - began
    return (took - (time.thread_time() - ran)) / took


def waited(side: Any) -> float:
    """Seconds until a transfer thread does what it is handed, while this thread goes on computing."""
    seen: list[float] = []
    began = time.perf_counter()
    side._life.submit(lambda _: seen.append(time.perf_counter()))
    while not seen:
        sum(range(50))
    return seen[0] - began


Ends = Callable[[], object]
"""What ends what has been begun."""


def idle(consumer: Any, address: str) -> Ends:
    """Nothing but a connection."""
    consumer.connect(address)
    return lambda: None


def offered(consumer: Any, address: str) -> Ends:
    """Offer blocks for which nothing comes."""
    transfer = consumer.offer("o", consumer.connect(address), list(range(TOKENS // BLOCK)), deadline=600.0, **PROMPT)
    time.sleep(0.1)

    def end() -> object:
        consumer.cancel(transfer)
        return transfer.wait_released(30)

    return end


def staged(producer: Any, address: str) -> Ends:
    """Stage behind a fence that does not pass."""
    producer.stage("s", list(range(TOKENS // BLOCK)), deadline=600.0, fence=Never(), **PROMPT)
    time.sleep(0.1)
    return lambda: producer.unstage("s")


BEGIN = {"idle": idle, "awaits a peer": offered, "awaits a fence": staged}


def measure(repeats: int) -> list[dict[str, Any]]:
    """Both figures, for each state of a transfer thread and each interval."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=serve, args=(theirs,), daemon=True)
    peer.start()
    address = pipe.recv()
    alone: list[float] = []
    stood: dict[tuple[float, str], list[float]] = {(i, one): [] for i in INTERVALS for one in BEGIN}
    waits: dict[tuple[float, str], list[float]] = {key: [] for key in stood}
    for count in range(repeats):
        for interval, state in stood:
            sys.setswitchinterval(interval)
            alone += [stands() for _ in range(TURNS)]
            side = endpoint("Producer" if state == "awaits a fence" else "Consumer", f"e{count}")
            end = BEGIN[state](side, address)
            stood[interval, state] += [stands() for _ in range(TURNS)]
            waits[interval, state] += [waited(side) for _ in range(WAITS)]
            end()
            side.close(20)
    pipe.send(None)
    peer.join(30)
    return [row(*key, alone, stood[key], waits[key]) for key in stood]


def row(interval: float, state: str, alone: list[float], stood: list[float], waits: list[float]) -> dict[str, Any]:
    """One line of the result."""
    waits.sort()
    return {
        "switch_interval_ms": interval * 1e3,
        "transfer thread": state,
        "stands_p50": statistics.median(stood),
        "stands_alone_p50": statistics.median(alone),
        "waits_ms_p50": statistics.median(waits) * 1e3,
        "waits_ms_p99": waits[len(waits) * 99 // 100] * 1e3,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = measure(options.repeats)
    if options.json:
        print(json.dumps({"load": os.getloadavg()[0], "rows": rows}))
        return
    for one in rows:
        print(
            f"switch interval {one['switch_interval_ms']:g} ms, {one['transfer thread']:>14}: the engine stands "
            f"{one['stands_p50']:.1%} of the time ({one['stands_alone_p50']:.1%} alone), the transfer thread waits "
            f"{one['waits_ms_p50']:.2f} ms (p99 {one['waits_ms_p99']:.2f})"
        )


if __name__ == "__main__":
    main()
