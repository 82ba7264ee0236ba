"""What ``verify="checksum"`` costs: pushes with it and without, in turns, between two processes on this host.

``python benchmarks/verify.py [--repeats N]``. The producer stages, the clock runs until the outcome is on the
consumer's engine thread. Only the ratios mean something on a machine that does other things.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("UCX_LOG_LEVEL", "error")

SETTINGS = ("off", "checksum")
BLOCK_BYTES = 32 << 10
LAYERS = 32
SIZES = (1 << 20, 16 << 20, 64 << 20)
PROMPT = b"\0" * 32


def make_cache() -> Any:
    """Layers outside of blocks, so that a push is of many pieces of 32 KiB."""
    import numpy as np

    from pushkv import KVCache

    blocks = 2 * SIZES[-1] // (LAYERS * BLOCK_BYTES)
    array = np.random.default_rng(0).integers(0, 256, (LAYERS, blocks, 16, BLOCK_BYTES // 16), dtype=np.uint8)
    return KVCache.of(array, "LBNC", heads=1)


def chosen(size: int) -> list[int]:
    """Every other block, so that none merge."""
    return list(range(0, 2 * size // (LAYERS * BLOCK_BYTES), 2))


def prefill(pipe: Connection) -> None:
    """Stage whenever asked; answer with when."""
    from pushkv import EndpointConfig, Producer

    cache = make_cache()
    producers = {one: Producer(EndpointConfig(engine=one, verify=one), cache) for one in SETTINGS}
    pipe.send({one: producer.address for one, producer in producers.items()})
    while (asked := pipe.recv()) is not None:
        setting, name, size = asked
        blocks, at = chosen(size), time.monotonic_ns()
        producers[setting].stage(name, blocks, prompt=PROMPT, prompt_tokens=len(blocks) * 16).wait_released(60)
        pipe.send(at)
    for producer in producers.values():
        producer.close()


def measure(repeats: int) -> dict[int, dict[str, float]]:
    """The median time of a push in ms, by size and setting."""
    from pushkv import Consumer, EndpointConfig, Outcome

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    cache, addresses = make_cache(), pipe.recv()
    consumers = {one: Consumer(EndpointConfig(engine=one, verify=one), cache) for one in SETTINGS}
    links = {one: consumer.connect(addresses[one]) for one, consumer in consumers.items()}
    taken: dict[int, dict[str, list[float]]] = {size: {one: [] for one in SETTINGS} for size in SIZES}
    for number in range(repeats + 1):
        for size in SIZES:
            for one, consumer in consumers.items():
                name, blocks = f"{size}.{number}", chosen(size)
                transfer = consumer.offer(name, links[one], blocks, prompt=PROMPT, prompt_tokens=len(blocks) * 16)
                pipe.send((one, name, size))
                outcome, ended = transfer.wait(60), time.monotonic_ns()
                assert outcome is Outcome.COMPLETE, f"{outcome}: {transfer.detail}"
                assert transfer.wait_released(60)
                taken[size][one].append((ended - pipe.recv()) / 1e6)
    for consumer in consumers.values():
        consumer.close()
    pipe.send(None)
    process.join(30)
    return {size: {one: statistics.median(times[1:]) for one, times in by.items()} for size, by in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    for size, by in measure(parser.parse_args().repeats).items():
        off, on = (by[one] for one in SETTINGS)
        print(f"{size >> 20:3d} MiB: off {off:.2f} ms, checksum {on:.2f} ms, {on / off:.1f} times as long")


if __name__ == "__main__":
    main()
