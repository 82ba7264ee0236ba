"""Time against the shape of blocks: raw NIXL, direct and through landing slots, between two processes of this host.

``python benchmarks/descriptors.py [--tls tcp] [--repeats N] [--json] [--pieces 512,2048] [--regions N]``. The cache
is layer-outer: a region a layer, and the blocks of each in an order of its own on either side, so that hardly any two
neighbours can be one descriptor. Raw NIXL has its lists prepared, and its time is from building the request to the
arrival of its notification; the others' is from staging to the outcome at the consumer. All in one run, interleaved,
so that the ratios are of the same machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

PROMPT = b"\0" * 32
PIECES = (512, 2 << 10, 8 << 10, 32 << 10, 256 << 10, 4 << 20)
TOTAL = 64 << 20
"""Bytes a request, where ``--regions`` and ``--count`` do not say otherwise."""
WAIT = 120.0
WAYS = ("direct", "landing", "auto")


def make_cache(regions: int, blocks: int, piece: int, value: int) -> Any:
    """``regions`` layers of ``blocks`` blocks of one token of ``piece`` bytes."""
    import numpy as np

    from pushkv import KVCache

    arrays = {f"l{number}": np.full((blocks, 1, piece), value, np.uint8) for number in range(regions)}
    return KVCache.of(arrays, "BNC", heads=1, bench="descriptors")


def scattered(blocks: int, seed: int) -> list[int]:
    """All blocks in an order in which hardly any two follow each other."""
    import numpy as np

    return [int(block) for block in np.random.default_rng(seed).permutation(blocks)]


def config(engine: str, way: str, slots: tuple[int, int]) -> Any:
    """An endpoint's settings."""
    from pushkv import EndpointConfig

    return EndpointConfig(engine=f"{engine}-{way}", landing=way, landing_bytes=slots[0], slot_bytes=slots[1])


def prefill(pipe: Connection, shape: tuple[int, int, int], slots: tuple[int, int]) -> None:
    """Serve both ways, and be raw NIXL's initiator, on request."""
    from pushkv import Producer

    cache = make_cache(*shape, value=7)
    raw = Raw("initiator", cache)
    producers = {way: Producer(config("prefill", way, slots), cache) for way in WAYS}
    pipe.send(({way: producer.address for way, producer in producers.items()}, raw.metadata))
    raw.meet(pipe.recv(), scattered(shape[1], 1), scattered(shape[1], 2))
    while (asked := pipe.recv()) is not None:
        way, name = asked
        if way == "raw":
            pipe.send(raw.write())
            continue
        at = time.perf_counter()
        blocks = scattered(shape[1], 1)
        ending = producers[way].stage(name, blocks, prompt=PROMPT, prompt_tokens=len(blocks))
        pipe.send(at)
        ending.wait(WAIT)
    for producer in producers.values():
        producer.close()


class Raw:
    """NIXL alone, over the regions of a cache."""

    def __init__(self, name: str, cache: Any) -> None:
        from pushkv.transport.nixl_import import find_nixl

        self.nixl: Any = find_nixl().bindings
        settings = self.nixl.nixlAgentConfig()
        settings.useProgThread, settings.syncMode = True, self.nixl.NIXL_THREAD_SYNC_RW
        settings.pthrDelay = 1000
        self.agent = self.nixl.nixlAgent(f"raw-{name}", settings)
        self.agent.createBackend("UCX", {})
        rows = [(region.address, region.length, 0, "") for region in cache.regions]
        self.agent.registerMem(self.nixl.nixlRegDList(self.nixl.DRAM_SEG, rows), [])
        self.metadata = self.agent.getLocalMD(), rows

    def meet(self, theirs: Any, source: list[int], target: list[int]) -> None:
        """Prepare both lists: for every region, its blocks in their order."""
        metadata, regions = theirs
        self.peer = self.agent.loadRemoteMD(metadata).decode()
        self.lists = [
            self._list(agent, of, blocks)
            for agent, of, blocks in (
                (self.nixl.NIXL_INIT_AGENT, self.metadata[1], source),
                (self.peer, regions, target),
            )
        ]
        import numpy as np

        self.every = np.arange(len(source) * len(regions), dtype=np.int32)

    def _list(self, agent: Any, regions: Any, blocks: list[int]) -> int:
        import numpy as np

        size = regions[0][1] // len(blocks)
        order = np.array(blocks, np.uint64) * np.uint64(size)
        rows = np.zeros((len(regions), len(blocks), 3), np.uint64)
        rows[:, :, 0] = np.array([region[0] for region in regions], np.uint64)[:, None] + order
        rows[:, :, 1] = size
        listed = self.nixl.nixlXferDList(self.nixl.DRAM_SEG, np.ascontiguousarray(rows.reshape(-1, 3)))
        return int(self.agent.prepXferDlist(agent, listed, []))

    def write(self) -> float:
        """WRITE everything; when it began."""
        began = time.perf_counter()
        every = self.every
        handle = self.agent.makeXferReq(self.nixl.NIXL_WRITE, self.lists[0], every, self.lists[1], every, b"done")
        self.agent.postXferReq(handle, b"done")
        while self.agent.getXferStatus(handle) == self.nixl.NIXL_IN_PROG:
            pass
        self.agent.releaseXferReq(handle)
        return began

    def arrived(self) -> float:
        """Wait for the notification; when it came."""
        while not self.agent.getNotifs({}, []):
            time.sleep(20e-6)
        return time.perf_counter()


def measure(shape: tuple[int, int, int], repeats: int, slots: tuple[int, int]) -> dict[str, list[float]]:
    """Milliseconds, by way."""
    from pushkv import Consumer, Outcome

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, shape, slots), daemon=True)
    process.start()
    cache = make_cache(*shape, value=0)
    raw, (addresses, metadata) = Raw("target", cache), pipe.recv()
    pipe.send(raw.metadata)
    raw.agent.loadRemoteMD(metadata[0])
    consumers = {way: Consumer(config("decode", way, slots), cache) for way in WAYS}
    links = {way: consumers[way].connect(addresses[way]) for way in WAYS}
    blocks, times = scattered(shape[1], 2), {way: [] for way in ("raw", *WAYS)}
    for number in range(repeats + 1):
        pipe.send(("raw", ""))
        came = raw.arrived()
        times["raw"].append(came - pipe.recv())
        for way in WAYS:
            name = f"{way}{number}"
            for array in cache.arrays:
                array[:] = 0
            asked = {"prompt": PROMPT, "prompt_tokens": len(blocks)}
            transfer = consumers[way].offer(name, links[way], blocks, **asked)
            time.sleep(0.02)
            pipe.send((way, name))
            assert transfer.wait(WAIT) is Outcome.COMPLETE, transfer.detail
            times[way].append(time.perf_counter() - pipe.recv())
            assert all((array == 7).all() for array in cache.arrays), "every byte has come"
            transfer.wait_released(WAIT)
    pipe.send(None)
    for consumer in consumers.values():
        consumer.close()
    process.join(30)
    return {way: [seconds * 1e3 for seconds in taken[1:]] for way, taken in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", default=",".join(map(str, PIECES)), help="bytes, separated by commas")
    parser.add_argument("--regions", type=int, default=128)
    parser.add_argument("--count", type=int, help=f"pieces a region (default: {TOTAL >> 20} MiB in all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slot", type=int, default=16 << 20, help="bytes a slot, of 16")
    parser.add_argument("--tls", help="UCX_TLS for both processes: tcp, or by default UCX's choice")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    rows = []
    for piece in map(int, options.pieces.split(",")):
        regions = min(options.regions, max(1, TOTAL // piece // 4))
        count = options.count or max(4, TOTAL // regions // piece)
        times = measure((regions, count, piece), options.repeats, (16 * options.slot, options.slot))
        middle = {way: statistics.median(taken) for way, taken in times.items()}
        row: dict[str, Any] = {"piece": piece, "regions": regions, "pieces_a_region": count}
        row |= {f"{way}_ms": taken for way, taken in middle.items()}
        row |= {f"{way}_over_landing": middle[way] / middle["landing"] for way in ("raw", "direct")}
        row["auto_over_best"] = middle["auto"] / min(middle["direct"], middle["landing"])
        rows.append(row)
        if not options.json:
            told = ", ".join(f"{way} {taken:8.1f} ms" for way, taken in middle.items())
            print(
                f"{regions:>4} x {count:>5} x {piece:>8} B: {told}; raw / landing {row['raw_over_landing']:.2f}",
                flush=True,
            )
    if options.json:
        json.dump({"tls": options.tls or "UCX's choice", "cores": os.cpu_count(), "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
