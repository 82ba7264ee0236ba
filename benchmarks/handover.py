"""Handover between two processes on this host: latency by size, how soon an offer is seen, what idling costs.

``python benchmarks/handover.py [--json] [--repeats N]``. The producer stages, the clock runs until the consumer's
engine thread has the outcome; the raw NIXL WRITE of the same bytes is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("UCX_LOG_LEVEL", "error")

BLOCK_BYTES = 32 * 1024
SIZES = (64 << 10, 1 << 20, 16 << 20)
PROMPT = b"\0" * 32
IDLE_SECONDS = 5.0


def make_cache(size: int) -> Any:
    """One layer, K and V together, blocks of 16 tokens of 2 KiB."""
    import numpy as np

    from pushkv import KVCache

    blocks = max(1, size // BLOCK_BYTES)
    return KVCache.of(np.ones((blocks, 16, BLOCK_BYTES // 16), np.uint8), "BNC", layers=("all",), heads=1)


def prefill(pipe: Connection, size: int) -> None:
    """Stage whenever asked; answer with when, and when the offer was seen."""
    from pushkv import EndpointConfig, Producer
    from pushkv.trace import Trace

    cache, trace = make_cache(size), Trace("prefill")
    with Producer(EndpointConfig(engine="prefill"), cache, trace=trace) as producer:
        pipe.send(producer.address)
        blocks = list(range(cache.geometry.groups[0].blocks))
        while (asked := pipe.recv()) is not None:
            if asked == "idle":
                pipe.send(idle_share())
                continue
            at = time.monotonic_ns()
            producer.stage(asked, blocks, prompt=PROMPT, prompt_tokens=len(blocks) * 16).wait(30)
            seen = [event[4] for event in trace.recording().events if event[1] == "offer seen"][-1]
            pipe.send((at, seen))


def idle_share() -> float:
    """The share of a core that this process uses while nothing happens."""
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - cpu) / (time.monotonic() - wall)


def decode(size: int, repeats: int, measure_idle: bool) -> dict[str, Any]:
    """Offer, have the other side stage, and take the times."""
    from pushkv import Consumer, EndpointConfig, Outcome

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, size), daemon=True)
    process.start()
    cache = make_cache(size)
    blocks = list(range(cache.geometry.groups[0].blocks))
    handover, seen = [], []
    with Consumer(EndpointConfig(engine="decode"), cache) as consumer:
        link = consumer.connect(pipe.recv())
        for number in range(repeats + 2):
            time.sleep(0.03)  # the producer has gone idle
            name, offered = f"r{number}", time.monotonic_ns()
            transfer = consumer.offer(name, link, blocks, prompt=PROMPT, prompt_tokens=len(blocks) * 16)
            time.sleep(0.03)
            pipe.send(name)
            assert transfer.wait(30) is Outcome.COMPLETE, transfer.detail
            done = time.monotonic_ns()
            staged, saw = pipe.recv()
            handover.append((done - staged) / 1e6)
            seen.append((saw - offered) / 1e6)
            transfer.wait_released(30)
        result: dict[str, Any] = {"path": consumer.path(link.agents[0])}
        if measure_idle:
            pipe.send("idle")
            result["idle consumer"], result["idle producer"] = idle_share(), pipe.recv()
    pipe.send(None)
    process.join(20)
    return result | {"handover": handover[2:], "offer seen": seen[2:]}


def run(repeats: int) -> dict[str, Any]:
    """All sizes, raw NIXL beside them."""
    from pushkv.demo.raw import measure

    raw = measure(SIZES, repeats)
    rows: list[dict[str, Any]] = []
    idle: dict[str, float] = {}
    for size in SIZES:
        got = decode(size, repeats, measure_idle=size == SIZES[0])
        idle |= {key: value for key, value in got.items() if key.startswith("idle")}
        raw_ms = [seconds * 1e3 for seconds in raw[size]]
        rows.append(
            {
                "bytes": size,
                "raw_write_ms_p50": statistics.median(raw_ms),
                "handover_ms_p50": statistics.median(got["handover"]),
                "handover_ms_max": max(got["handover"]),
                "beyond_raw_ms_p50": statistics.median(got["handover"]) - statistics.median(raw_ms),
                "offer_seen_ms_p50": statistics.median(got["offer seen"]),
                "offer_seen_ms_max": max(got["offer seen"]),
                "path": got["path"],
            }
        )
    return {"sizes": rows, "idle_share_of_a_core": idle, "repeats": repeats, "cores": os.cpu_count()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    result = run(options.repeats)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'bytes':>10} {'raw ms':>8} {'handover ms':>12} {'beyond raw':>11} {'offer seen ms (max)':>20}  path")
    for row in result["sizes"]:
        print(
            f"{row['bytes']:>10} {row['raw_write_ms_p50']:>8.3f} {row['handover_ms_p50']:>12.3f} "
            f"{row['beyond_raw_ms_p50']:>11.3f} {row['offer_seen_ms_p50']:>12.2f} ({row['offer_seen_ms_max']:.2f})"
            f"  {row['path']}"
        )
    for name, share in result["idle_share_of_a_core"].items():
        print(f"{name}: {share:.2%} of a core")


if __name__ == "__main__":
    main()
