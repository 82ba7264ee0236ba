"""The floor to compare with: a WRITE with its notification over NIXL alone, between two processes of this machine.

One time is from just before the request is built to the arrival of its notification in the other process, on
the clock that both share. No PushKV code runs. ``python benchmarks/raw_nixl_cpu.py --json``
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

SIZES = (32 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
WARM_UP = 3
FLAVOURS = ("nixl_cu12", "nixl_cu13", "nixl_rocm")
WAIT_S = 30.0

Pipe = multiprocessing.connection.Connection


def measure(sizes: Sequence[int] = SIZES, repeats: int = 20, *, module: str = "") -> dict[int, list[float]]:
    """Seconds from request to arrival of its notification, ``repeats`` times for each size in bytes.

    Starts one process and ends it. ``module`` is the flavour of NIXL, by default the first that is installed;
    raises ImportError where there is none.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    target = context.Process(target=_receive, args=(theirs, max(sizes), module), daemon=True)
    target.start()
    try:
        return _send(ours, sizes, repeats, module)
    finally:
        ours.close()
        target.join(WAIT_S)
        if target.is_alive():
            target.kill()
            target.join()


def _bindings(module: str) -> Any:
    for name in (module,) if module else FLAVOURS:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(f"{name}._bindings")
    raise ImportError(f"none of {module or ', '.join(FLAVOURS)} is installed; pip install --no-deps nixl-cu12 numpy")


def _agent(name: str, size: int, module: str) -> tuple[Any, Any, np.ndarray]:
    """An agent over UCX that has registered ``size`` bytes, its bindings and the memory."""
    nixl: Any = _bindings(module)
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.syncMode = nixl.NIXL_THREAD_SYNC_RW
    config.pthrDelay = 1000
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    memory = np.ones(size, dtype=np.uint8)
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(memory.ctypes.data, size, 0, "")]), [])
    return nixl, agent, memory


def _receive(pipe: Pipe, size: int, module: str) -> None:
    """The target: says when each notification came, until the pipe is closed."""
    _, agent, memory = _agent("raw-target", size, module)
    pipe.send((agent.getLocalMD(), memory.ctypes.data))
    try:
        agent.loadRemoteMD(pipe.recv())
        while True:
            pipe.recv()
            pipe.send(_arrival(agent))
    except EOFError:
        return


def _arrival(agent: Any) -> float:
    end = time.monotonic() + WAIT_S
    while not agent.getNotifs({}, []):
        if time.monotonic() > end:
            raise TimeoutError(f"no notification came in {WAIT_S} s; is the initiator alive?")
    return time.perf_counter()


def _send(pipe: Pipe, sizes: Sequence[int], repeats: int, module: str) -> dict[int, list[float]]:
    nixl, agent, memory = _agent("raw-initiator", max(sizes), module)
    metadata, address = pipe.recv()
    peer = agent.loadRemoteMD(metadata).decode()
    pipe.send(agent.getLocalMD())
    times: dict[int, list[float]] = {}
    for size in sizes:
        rows = [np.array([[start, size, 0]], dtype=np.uint64) for start in (memory.ctypes.data, address)]
        times[size] = [_one(nixl, agent, peer, rows, pipe) for _ in range(WARM_UP + repeats)][WARM_UP:]
    return times


def _one(nixl: Any, agent: Any, peer: str, rows: list[np.ndarray], pipe: Pipe) -> float:
    pipe.send("listen")
    time.sleep(0.002)  # the other process polls by now
    ours, theirs = (nixl.nixlXferDList(nixl.DRAM_SEG, side) for side in rows)
    began = time.perf_counter()
    handle = agent.createXferReq(nixl.NIXL_WRITE, ours, theirs, peer, b"done", [])
    status = agent.postXferReq(handle, b"done")
    while status == nixl.NIXL_IN_PROG:
        status = agent.getXferStatus(handle)
    came = pipe.recv()
    agent.releaseXferReq(handle)
    return float(came - began)


def main() -> None:
    """Print a line a size, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, separated by commas")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--module", default="", help="the flavour of NIXL, by default the first installed")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    times = measure([int(size) for size in chosen.sizes.split(",")], chosen.repeats, module=chosen.module)
    if chosen.json:
        print(json.dumps({str(size): taken for size, taken in times.items()}))
        return
    for size, taken in times.items():
        median, worst = statistics.median(taken) * 1e6, max(taken) * 1e6
        print(f"{size:>12,} B  median {median:9.0f} µs  worst {worst:9.0f} µs  {size / median / 1e3:6.2f} GB/s")


if __name__ == "__main__":
    main()
