"""One request between two GPUs of a host, direct and through landing slots, every byte checked.

``python benchmarks/gpu_push.py [--source cuda:0] [--target cuda:1] [--gib 4] [--slot-mib 128] …``.
``cpu`` as a device runs the same on host memory. The time is from staging, on the producer's engine thread, to the
outcome on the consumer's. A cache of layers outermost, its blocks scattered on both sides, has a descriptor a block
and layer; one of blocks outermost has one a block.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("UCX_LOG_LEVEL", "error")

PROMPT = b"\0" * 32
PIECE = 32 << 10
LAYERS = 64
WAIT = 120.0
WAYS = ("direct", "landing")
AXES = {"layers outermost": "LBNC", "blocks outermost": "BLNC"}


def make(device: str, shape: str, blocks: int, *, filled: bool) -> tuple[Any, Any]:
    """A cache and its tensor; a block and layer of a filled one has a number of its own in every element."""
    import torch

    from pushkv import KVCache

    lead = (LAYERS, blocks) if shape == "layers outermost" else (blocks, LAYERS)
    if filled:
        numbers = torch.arange(LAYERS * blocks, dtype=torch.int32, device=device).reshape(LAYERS, blocks)
        numbers = numbers if shape == "layers outermost" else numbers.T
        tensor = numbers[:, :, None, None].expand(*lead, 1, PIECE // 4).contiguous()
    else:
        tensor = torch.full((*lead, 1, PIECE // 4), -1, dtype=torch.int32, device=device)
    return KVCache.of(tensor, AXES[shape], heads=1, bench="gpu_push"), tensor


def exact(tensor: Any, shape: str, source: Sequence[int], target: Sequence[int]) -> bool:
    """Whether every element is that of the block it was pushed from."""
    import torch

    layers = tensor if shape == "layers outermost" else tensor.transpose(0, 1)
    blocks = tensor.shape[1] if shape == "layers outermost" else tensor.shape[0]
    expected = torch.arange(LAYERS, device=tensor.device)[:, None] * blocks + torch.tensor(
        source, device=tensor.device
    )
    return bool((layers[:, torch.tensor(target, device=tensor.device), 0, :] == expected[:, :, None]).all())


def config(engine: str, way: str, options: argparse.Namespace) -> Any:
    """An endpoint's settings."""
    from pushkv import EndpointConfig

    slot = options.slot_mib << 20
    return EndpointConfig(engine=engine, landing=way, landing_bytes=options.slots * slot, slot_bytes=slot)


def blocks_of(options: argparse.Namespace) -> int:
    """How many blocks the request has."""
    return max(1, int(options.gib * (1 << 30)) // (LAYERS * PIECE))


def order(blocks: int, seed: int) -> list[int]:
    """All blocks, scattered."""
    import numpy as np

    return [int(block) for block in np.random.default_rng(seed).permutation(blocks)]


def prefill(pipe: Connection, shape: str, way: str, options: argparse.Namespace) -> None:
    """Stage whenever asked, and answer with when that was."""
    from pushkv import Producer

    blocks = blocks_of(options)
    cache, _ = make(options.source, shape, blocks, filled=True)
    with Producer(config("prefill", way, options), cache) as producer:
        pipe.send(producer.address)
        while (name := pipe.recv()) is not None:
            at = time.monotonic()
            producer.stage(name, order(blocks, 1), prompt=PROMPT, prompt_tokens=blocks).wait_released(WAIT)
            pipe.send((at, producer.stats()))


def measure(options: argparse.Namespace, shape: str, way: str) -> dict[str, Any]:
    """One way for one shape: a warm-up, then the repeats."""
    from pushkv import Consumer, Outcome

    blocks = blocks_of(options)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, shape, way, options), daemon=True)
    process.start()
    cache, tensor = make(options.target, shape, blocks, filled=False)
    times, right = [], True
    with Consumer(config("decode", way, options), cache) as consumer:
        link = consumer.connect(pipe.recv())
        for number in range(options.repeats + 1):
            tensor.fill_(-1)
            name, target = f"r{number}", order(blocks, 2)
            if options.target != "cpu":
                import torch

                torch.cuda.synchronize(options.target)
            transfer = consumer.offer(name, link, target, prompt=PROMPT, prompt_tokens=blocks)
            time.sleep(0.1)
            pipe.send(name)
            assert transfer.wait(WAIT) is Outcome.COMPLETE, transfer.detail
            done = time.monotonic()
            transfer.wait_released(WAIT)
            staged, stats = pipe.recv()
            times.append(done - staged)
            right &= exact(tensor, shape, order(blocks, 1), target)
        path = consumer.path(link.agents[0])
    pipe.send(None)
    process.join(20)
    moved = LAYERS * blocks * PIECE
    median = statistics.median(times[1:])
    return {
        "shape": shape,
        "way": way,
        "bytes": moved,
        "descriptors": stats["descriptors"] // (options.repeats + 1),
        "seconds_p50": median,
        "seconds": times[1:],
        "gb_per_s": moved / median / 1e9,
        "exact": right,
        "path": path,
    }


def main() -> int:
    """Measure and print; 1 where a byte is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="cuda:0")
    parser.add_argument("--target", default="cuda:1")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--slot-mib", type=int, default=128)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shapes", default=",".join(AXES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        for way in options.ways.split(","):
            try:
                rows.append(measure(options, shape, way))
            except Exception as error:
                rows.append({"shape": shape, "way": way, "error": f"{type(error).__name__}: {error}"})
            if not options.json:
                print(in_words(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))
    return int(not all(row.get("exact") for row in rows))


def in_words(row: dict[str, Any]) -> str:
    """A row as a line."""
    lead = f"{row['shape']:>17} {row['way']:>8}"
    if "error" in row:
        return f"{lead}  {row['error']}"
    bytes_right = "every byte right" if row["exact"] else "WRONG BYTES"
    return (
        f"{lead} {row['bytes'] / (1 << 30):6.2f} GiB {row['descriptors']:>8} descriptors "
        f"{row['seconds_p50'] * 1e3:9.1f} ms {row['gb_per_s']:7.1f} GB/s  {bytes_right}  {row['path']}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
