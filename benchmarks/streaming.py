"""Streaming between two processes of this host: how much of a transfer is hidden, and what the engine pays a step.

``python benchmarks/streaming.py [--json] [--repeats N] [--tls tcp] [--landing]``

*Hidden*: a prompt of 16 chunks; a chunk's computation is a sleep of twice the time that its bytes take on the wire,
as a device that computes needs no processor. *Left* is from the last ``stage`` to the outcome on the consumer's
engine thread, for whole requests, chunks, and layers a quarter at a time, in turns. Hidden is what streaming saves of
what whole requests leave.

*Engine step*: 64 transfers in flight; the engine's thread stages a chunk of one of them, or of eight, and takes the
events, beside a transfer thread that is busy with all of them. On the decode side it takes the events alone.
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

CHUNKS, CHUNK, BLOCK = 16, 1024, 16
"""Of a prompt; tokens of a chunk, and of a block."""
TOKENS = CHUNKS * CHUNK
LAYERS, HEADS, CONTENT = 8, 8, 64
"""Two bytes an element, K and V: 16 KiB a token, 256 MiB a prompt."""
FLIGHT = 64
STEPS = 100
PROMPT = b"\0" * 32
STREAMS = ("request", "chunk", "layer")
PACE = 2.0
"""How long a chunk's computation takes, in times of its transfer."""


def make_cache(blocks: int) -> Any:
    """Layers outermost: a descriptor a layer and block, of 32 KiB."""
    import numpy as np

    from pushkv import KVCache

    return KVCache.of(np.ones((LAYERS, blocks, 2, HEADS, BLOCK, CONTENT), np.float16), "LBSHNC", model="m")


def settings(engine: str, landing: bool, **more: Any) -> Any:
    """An endpoint's."""
    from pushkv import EndpointConfig

    slots = {"landing": "landing", "landing_bytes": 128 << 20, "slot_bytes": 16 << 20} if landing else {}
    return EndpointConfig(engine=engine, **slots, **more)


def scattered(blocks: int, seed: int = 0) -> list[int]:
    """Blocks in the order in which a pool that has run for a while hands them out: another on each side, so that
    what lies side by side on both is chance."""
    import numpy as np

    return [int(one) for one in np.random.default_rng(seed).permutation(blocks)]


# The prefill engine's process


def prefill(pipe: Connection, landing: bool) -> None:
    """Serve with an endpoint for each setting of ``stream`` over one cache."""
    from pushkv import Producer

    cache = make_cache(TOKENS // BLOCK)
    producers = {one: Producer(settings(f"p-{one}", landing, stream=one), cache) for one in STREAMS}
    pipe.send({one: producer.address for one, producer in producers.items()})
    while (asked := pipe.recv()) is not None:
        what, stream, *rest = asked
        pipe.send(globals()[what](producers[stream], *rest))
    for producer in producers.values():
        producer.close(20)


def compute(producer: Any, name: str, pace: float, groups: int) -> float:
    """Compute a prompt in chunks, each of ``pace`` seconds and told of in so many groups of layers; when it ended."""
    blocks, done = scattered(TOKENS // BLOCK), time.monotonic()
    asked = {"prompt": PROMPT, "prompt_tokens": TOKENS}
    for chunk in range(CHUNKS):
        for group in range(1, groups + 1):
            done += pace / groups
            time.sleep(max(0.0, done - time.monotonic()))
            layers = None if group == groups else group * LAYERS // groups
            ended = time.monotonic()
            ending = producer.stage(name, blocks, ready=(chunk + 1) * CHUNK, layers=layers, **asked)
    ending.wait(60)
    return ended


def steps(producer: Any, staged: int, names: list[str]) -> list[tuple[float, float]]:
    """Microseconds of clock and processor of many steps that stage a chunk of some prompts, all of them in flight."""
    blocks, ready, taken = scattered(TOKENS // BLOCK), dict.fromkeys(names, BLOCK), []
    asked = {"prompt": PROMPT, "prompt_tokens": TOKENS, "deadline": 600.0}
    for name in names:
        producer.stage(name, blocks, ready=BLOCK, **asked)
    for step in range(STEPS):
        due = [names[(step * staged + place) % len(names)] for place in range(staged)]
        ready.update({name: min(ready[name] + BLOCK, TOKENS - BLOCK) for name in due})
        told = [(name, ready[name]) for name in due]
        time.sleep(0.003)
        began, worked = time.perf_counter(), time.thread_time()
        for name, tokens in told:
            producer.stage(name, None, ready=tokens, **asked)
        producer.events()
        taken.append(((time.perf_counter() - began) * 1e6, (time.thread_time() - worked) * 1e6))
    for name in names:
        producer.unstage(name)
    return taken


# The decode engine's process, which measures


class Decode:
    """The consumer, its links to the producers of the other process, and what it asks of that."""

    def __init__(self, landing: bool) -> None:
        from pushkv import Consumer

        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=prefill, args=(theirs, landing), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of that process is seen here
        self.count = 0
        self.consumer = Consumer(settings("decode", landing, quarantine_limit=1.0), make_cache(FLIGHT * 16))
        self.links = {one: self.consumer.connect(address) for one, address in self.pipe.recv().items()}
        self.path = self.consumer.path(self.links["chunk"].agents[0])

    def left(self, stream: str, pace: float) -> float:
        """Seconds from the last stage to the outcome here."""
        self.count += 1
        name, asked = f"r{self.count}", {"prompt": PROMPT, "prompt_tokens": TOKENS}
        transfer = self.consumer.offer(name, self.links[stream], scattered(TOKENS // BLOCK, 1), **asked)
        time.sleep(0.05)
        self.pipe.send(("compute", stream, name, pace, 4 if stream == "layer" else 1))
        outcome = transfer.wait(60)
        done = time.monotonic()
        assert outcome is not None, "nothing has come within a minute"
        assert outcome.value == "complete", transfer.detail
        staged = float(self.pipe.recv())
        transfer.wait_released(60)
        return done - staged

    def steps(self, staged: int) -> tuple[list[Any], list[Any]]:
        """Microseconds of the producer's steps, and of taking the events here meanwhile, with all in flight."""
        self.count += 1
        asked = {"prompt": PROMPT, "prompt_tokens": TOKENS, "start": 0, "stop": TOKENS, "deadline": 600.0}
        names = [f"s{self.count}-{number}" for number in range(FLIGHT)]
        blocks = scattered(TOKENS // BLOCK)
        transfers = [self._one(name, blocks, number, asked) for number, name in enumerate(names)]
        self.pipe.send(("steps", "chunk", staged, names))
        mine: list[tuple[float, float]] = []
        while not self.pipe.poll(0.003):
            began, worked = time.perf_counter(), time.thread_time()
            self.consumer.events()
            mine.append(((time.perf_counter() - began) * 1e6, (time.thread_time() - worked) * 1e6))
        theirs = self.pipe.recv()
        assert all(transfer.wait(60) is not None for transfer in transfers)
        assert all(transfer.wait_released(60) for transfer in transfers)
        return theirs, mine

    def _one(self, name: str, blocks: list[int], number: int, asked: dict[str, Any]) -> Any:
        table = [number * 16 + block % 16 for block in range(16)]
        asked = {**asked, "stop": 16 * BLOCK}
        return self.consumer.offer(name, self.links["chunk"], table, **asked)

    def close(self) -> None:
        """End both."""
        self.pipe.send(None)
        self.process.join(30)
        self.consumer.close(20)


def hidden(decode: Decode, repeats: int) -> dict[str, Any]:
    """What is left of a transfer, by the setting, at a pace that the wire can follow."""
    wire = statistics.median(decode.left("request", 0.0) for _ in range(3))
    pace = PACE * wire / CHUNKS
    left: dict[str, list[float]] = {one: [] for one in STREAMS}
    for _ in range(repeats):
        for stream, taken in left.items():
            taken.append(decode.left(stream, pace))
    median = {one: statistics.median(taken) for one, taken in left.items()}
    shares = {
        one: [1 - mine / all_ for mine, all_ in zip(left[one], left["request"], strict=True)] for one in STREAMS[1:]
    }
    return {
        "path": decode.path,
        "chunk_compute_ms": pace * 1e3,
        "left_ms_p50": {one: seconds * 1e3 for one, seconds in median.items()},
        "hidden_of_medians": {one: 1 - median[one] / median["request"] for one in STREAMS[1:]},
        "hidden_p50_of_pairs": {one: statistics.median(each) for one, each in shares.items()},
    }


def overhead(decode: Decode, repeats: int) -> dict[str, Any]:
    """The engine thread's cost of a step: the median of the runs' medians, and the 99th percentile of all."""
    made: dict[str, Any] = {}
    for staged in (1, 8):
        runs = [decode.steps(staged) for _ in range(repeats)]
        for side, index in (("prefill", 0), ("decode", 1)):
            clock, worked = (
                statistics.median(statistics.median(one[which] for one in run[index]) for run in runs)
                for which in (0, 1)
            )
            every = sorted(sample for run in runs for sample, _ in run[index])
            name = f"{side}, {staged} staged a step"
            made[name] = {"p50_us": clock, "p99_us": every[len(every) * 99 // 100], "processor_p50_us": worked}
    return {"in_flight": FLIGHT, "engine_step_overhead_us": made}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tls", default="", help="what UCX may use (default: its choice, which is cma on one host)")
    parser.add_argument("--landing", action="store_true", help="through landing slots")
    options = parser.parse_args()
    if options.tls:
        os.environ["UCX_TLS"] = options.tls
    decode = Decode(options.landing)
    result = {"repeats": options.repeats, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    result |= hidden(decode, options.repeats) | overhead(decode, options.repeats)
    decode.close()
    if options.json:
        print(json.dumps(result))
        return
    print(f"over {result['path']}, a chunk computed in {result['chunk_compute_ms']:.1f} ms")
    for one, left in result["left_ms_p50"].items():
        share = result["hidden_of_medians"].get(one)
        print(f"{one:>8}: {left:8.2f} ms left" + (f", {share:.1%} hidden" if share is not None else ""))
    for name, taken in result["engine_step_overhead_us"].items():
        print(
            f"{name}: {taken['p50_us']:.1f} us a step (p99 {taken['p99_us']:.0f}; on the processor "
            f"{taken['processor_p50_us']:.1f}), {FLIGHT} transfers in flight"
        )


if __name__ == "__main__":
    main()
