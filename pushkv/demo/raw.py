"""The floor to compare with: a WRITE with its notification over NIXL alone, between two processes of this machine.

One time is from just before the request is built to the arrival of its notification in the other process, on
the clock that both share. No code of PushKV runs in between.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pushkv.demo.environment import belong_to_parent
from pushkv.transport.nixl_import import find_nixl

SIZES = (32 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
WARM_UP = 3
WAIT_S = 30.0

Pipe: TypeAlias = "Connection[Any, Any]"
Bytes = NDArray[np.uint8]


def measure(sizes: Sequence[int] = SIZES, repeats: int = 20, *, module: str = "") -> dict[int, list[float]]:
    """Seconds from request to arrival of its notification, ``repeats`` times for each size in bytes.

    Starts one process and ends it. ``module`` is the flavour of NIXL, by default the one PushKV would use.
    Raises TransportUnavailable where there is none.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    target = context.Process(target=_receive, args=(theirs, max(sizes), module), daemon=True)
    target.start()
    theirs.close()
    try:
        times = _send(ours, sizes, repeats, module)
        ours.close()
        target.join(WAIT_S)
    finally:
        target.kill()
        target.join()
    return times


def _agent(name: str, size: int, module: str) -> tuple[Any, Any, Bytes]:
    """An agent over UCX that has registered ``size`` bytes, its bindings and the memory."""
    found = find_nixl(installed=lambda name: name == module) if module else find_nixl()
    nixl: Any = found.bindings
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
    belong_to_parent()
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


def _one(nixl: Any, agent: Any, peer: str, rows: list[NDArray[np.uint64]], pipe: Pipe) -> float:
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
