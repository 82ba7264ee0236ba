"""PushKVConnector beside vLLM's own push and pull connectors: TTFT, TPOT and handoff, in the same run.

``python vllm_side_by_side.py`` in the environment of the end-to-end tests. There is a pair of servers for each
connector, each pair with the same router in front; they take turns, round by round, so that whatever else the machine
does meets all of them, and stand still while it is another's turn. Prompts are random and answered greedily, prefix
caching is off: all KV moves. The stock connectors get the two changes in ``stock_on_cpu.py``, without which they
stall on a machine of few cores.

*TTFT* is from sending a request to its first token, *prefill* the duration of its prefill leg, and *handoff* the
difference of the two by the router's clock, the mean of a round. *TPOT* is the mean time from token to token after
the first. Medians of all rounds are printed, as a table and as JSON; equal answers are checked. A request that is not
answered within :data:`PATIENCE` seconds is an error, and is in no median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "e2e"))

from e2e_cluster import CONNECTORS, Cluster, Side, running
from e2e_load import Prompt, at_once, body, session, stream
from e2e_model import FULL, VOCABULARY
from e2e_server import Router, until

PATIENCE = 60.0
MEASURES = ("ttft", "prefill", "handoff", "tpot")


@dataclass(frozen=True)
class Cell:
    """What is asked: prompts of ``tokens``, ``at_once`` requests at a time."""

    tokens: int
    at_once: int

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {self.at_once} at a time"


@dataclass
class Seen:
    """What was measured of one connector in one cell, in seconds; ``answers`` by prompt."""

    ttft: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    handoff: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    answers: dict[Prompt, Prompt] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def main() -> None:
    """Run all cells and print what was seen."""
    options = arguments()
    cells = [Cell(*map(int, text.split("x"))) for text in options.cells.split(",")]
    with ExitStack() as stack:
        folder = Path(options.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        model = FULL.write(folder / "model")
        routers = {}
        clusters = {}
        for name in options.connectors.split(","):
            logs = folder / name
            logs.mkdir(exist_ok=True)
            cluster = Cluster(CONNECTORS[name], model, logs, Side(), Side())
            clusters[name] = stack.enter_context(running(cluster))
            mode = "push" if cluster.connector.push else "sequential"
            routers[name] = stack.enter_context(cluster.router(mode=mode))
            print(f"{name} is up", file=sys.stderr)
        seen = asyncio.run(measure(clusters, routers, cells, options))
    report(seen, cells, options.json)


def arguments() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--connectors", default="pushkv,stock-push", help=f"of {', '.join(CONNECTORS)}")
    made.add_argument("--cells", default="512x1,2048x1,4000x1,1024x4", help="tokens x requests at a time")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--limit", type=float, default=3600.0, help="begin no round after so many seconds")
    made.add_argument("--requests", type=int, default=8, help="requests a round")
    made.add_argument("--answer", type=int, default=32, help="tokens an answer")
    made.add_argument("--json", type=Path, help="also write what was seen to this file")
    made.add_argument("--logs", help="keep the servers' logs in this folder")
    return made.parse_args()


async def measure(
    clusters: dict[str, Cluster], routers: dict[str, Router], cells: list[Cell], options: argparse.Namespace
) -> dict[str, dict[Cell, Seen]]:
    """Let the connectors take turns; the first round of each is for warming up and not kept."""
    seen = {name: {cell: Seen() for cell in cells} for name in routers}
    end = time.monotonic() + options.limit
    async with session() as client:
        for number in range(options.rounds + 1):
            for cell in cells:
                chance = random.Random(hash((number, cell)))
                requests = options.requests if number else cell.at_once
                prompts = [
                    tuple(chance.randrange(3, VOCABULARY) for _ in range(cell.tokens)) for _ in range(requests)
                ]
                for name in chance.sample(list(routers), len(routers)):
                    kept = seen[name][cell] if number else Seen()
                    with alone(name, clusters):
                        await served(routers[name], clusters[name])
                        await one_round(client, routers[name], cell, prompts, options.answer, kept)
            print(f"round {number} of {options.rounds}", file=sys.stderr)
            if time.monotonic() > end:
                break
    return seen


@contextmanager
def alone(name: str, clusters: dict[str, Cluster]) -> Iterator[None]:
    """Have all pairs but one stand still."""
    others = [server for other, cluster in clusters.items() if other != name for server in cluster.servers]
    for server in others:
        server.pause()
    try:
        yield
    finally:
        for server in others:
            server.go_on()


async def served(router: Router, cluster: Cluster) -> None:
    """Wait until a router has seen that its servers, which stood still, go on."""

    def up() -> bool:
        return router.metrics().sum("pushkv_router_server_up") == len(cluster.servers)

    await asyncio.to_thread(until, up, PATIENCE, f"{cluster.connector.name}'s servers go on")


async def one_round(client: Any, router: Router, cell: Cell, prompts: list[Prompt], answer: int,
                    seen: Seen) -> None:  # fmt: skip
    """All prompts through the router."""

    async def through(prompt: Prompt) -> None:
        began, times, tokens = time.perf_counter(), [], []
        async for event in stream(client, router.url, body(prompt) | {"max_tokens": answer}):
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            if new:
                times.append(time.perf_counter() - began)
                tokens += new
        seen.ttft.append(times[0])
        seen.tpot.append((times[-1] - times[0]) / max(1, len(tokens) - 1))
        seen.answers[prompt] = tuple(tokens)

    async def limited(prompt: Prompt) -> None:
        await asyncio.wait_for(through(prompt), PATIENCE)

    before = router.metrics()
    done = await at_once([lambda prompt=prompt: limited(prompt) for prompt in prompts], cell.at_once)
    seen.errors += [repr(one) for one in done if isinstance(one, BaseException)]
    after = router.metrics()
    first, leg = (
        (after.sum(f"{name}_sum") - before.sum(f"{name}_sum"))
        / max(1, after.sum(f"{name}_count") - before.sum(f"{name}_count"))
        for name in ("pushkv_router_time_to_first_token_seconds", "pushkv_router_prefill_leg_seconds")
    )
    if not any(isinstance(one, BaseException) for one in done):
        seen.prefill.append(leg)
        seen.handoff.append(first - leg)


def report(seen: dict[str, dict[Cell, Seen]], cells: list[Cell], file: Path | None) -> None:
    """Print a table, then the same as JSON, with the numbers of requests and the errors."""
    names = list(seen)
    print("| | " + " | ".join(f"{name} {measure}" for measure in MEASURES for name in names) + " |")
    print("|---" * (1 + len(names) * len(MEASURES)) + "|")
    told = []
    for cell in cells:
        medians = {name: {one: median(getattr(seen[name][cell], one)) for one in MEASURES} for name in names}
        row = [f"{medians[name][one]:.2f}" for one in MEASURES for name in names]
        print(f"| {cell.name} | " + " | ".join(row) + " |")
        answers = [seen[name][cell].answers for name in names]
        told.append({
            "cell": cell.name,
            "milliseconds": medians,
            "requests": {name: len(seen[name][cell].ttft) for name in names},
            "errors": {name: seen[name][cell].errors[:5] for name in names},
            "answers equal": all(one == answers[0] for one in answers),
        })  # fmt: skip
    print("\nMedians in ms.\n")
    text = json.dumps({"load": os.getloadavg()[0], "cells": told}, indent=1)
    print(text)
    if file is not None:
        file.write_text(text)


def median(values: list[float]) -> float:
    """In milliseconds; not a number where nothing was measured."""
    return round(statistics.median(values) * 1e3, 2) if values else float("nan")


if __name__ == "__main__":
    main()
