"""What decode's EngineCore costs while requests do nothing but wait for KV, and how soon it takes a new one.

``python vllm_waiting.py`` in the environment of the end-to-end tests. A prefill server, and two decode servers: one
with the connector's ``idle_wait`` and one with 0, as an engine of vLLM's steps by itself. Both are sent requests
whose prefill leg never comes; meanwhile processor time is read from ``/proc`` for EngineCore and for its worker, and
requests of one token that need no KV from elsewhere are timed, as they are before anybody waits. One JSON object is
printed; shares are of one processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from e2e_cluster import OURS, Cluster, Side, running
from e2e_load import body, post, session
from e2e_model import FULL
from e2e_server import VllmServer

TICK = os.sysconf("SC_CLK_TCK")
PROMPT = tuple(range(5, 517))


def main() -> None:
    """Start the servers, measure, print."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=20.0, help="for how long to look")
    made.add_argument("--waiting", type=int, default=4, help="requests that wait")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = FULL.write(Path(name) / "model")
        sides = Side(), Side(extra={"idle_wait": 0.0})
        with running(Cluster(OURS, model, Path(name), Side(), *sides)) as cluster:
            seen = asyncio.run(measure(cluster, options.seconds, options.waiting))
    print(json.dumps(seen, indent=1))


async def measure(cluster: Cluster, seconds: float, waiting: int) -> dict[str, Any]:
    """One decode server after the other, so that neither takes the other's processor."""
    seen: dict[str, Any] = {"load at the start": os.getloadavg()[0]}
    async with session() as client:
        for server, what in zip(cluster.decodes, ("idle_wait 0.003", "idle_wait 0"), strict=True):
            idle = await short_requests(client, server, 20)
            legs = [asyncio.create_task(waits(client, cluster, server)) for _ in range(waiting)]
            await asyncio.sleep(3)
            shares = await over(server, seconds)
            busy = await short_requests(client, server, 20)
            for leg in legs:
                leg.cancel()
            seen[what] = shares | {"short request, nobody waits, ms": idle, "short request, others wait, ms": busy}
            await asyncio.gather(*legs, return_exceptions=True)
            await asyncio.to_thread(server.all_free)
    return seen


async def waits(client: Any, cluster: Cluster, server: VllmServer) -> None:
    """A decode leg that nobody sends KV for."""
    params = {"do_remote_prefill": True, "transfer_id": uuid.uuid4().hex, **cluster.address}
    await post(client, server.url, body(PROMPT, kv_transfer_params=params))


async def short_requests(client: Any, server: VllmServer, count: int) -> float:
    """The median time of requests of one token, in ms."""
    times = []
    for number in range(count):
        began = time.perf_counter()
        await post(client, server.url, body((number + 5, 6)) | {"max_tokens": 1})
        times.append((time.perf_counter() - began) * 1e3)
    return round(statistics.median(times), 2)


async def over(server: VllmServer, seconds: float) -> dict[str, float]:
    """The share of a processor that each of the server's processes takes."""
    pids = processes(server)
    before, began = {name: used(pid) for name, pid in pids.items()}, time.monotonic()
    await asyncio.sleep(seconds)
    passed = time.monotonic() - began
    return {name: round((used(pid) - before[name]) / passed, 3) for name, pid in pids.items()}


def processes(server: VllmServer) -> dict[str, int]:
    """The engine's processes by the names that they log under."""
    found = re.findall(r"\((EngineCore|Worker) pid=(\d+)\)", server.log.read_text(errors="replace"))
    return {name: int(pid) for name, pid in found}


def used(pid: int) -> float:
    """A process's processor time in seconds, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


if __name__ == "__main__":
    main()
