"""Time against the shape of blocks: raw NIXL, direct and through landing slots, between two processes of this host.

The cache is layer-outer: a region a layer, and the blocks of each in an order of its own on either side, so that
hardly any two neighbours can be one descriptor. Raw NIXL has its lists prepared, and its time is from building the
request to the arrival of its notification; the others' is from staging to the outcome at the consumer. All in one
run, interleaved, so that the ratios are of the same machine.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from pushkv.bench.alone import Alone
from pushkv.bench.processes import Pipe, start, stop
from pushkv.demo.environment import belong_to_parent
from pushkv.errors import BenchError

PROMPT = b"\0" * 32
WAIT = 120.0
Way = Literal["direct", "landing", "auto"]
WAYS: tuple[Way, ...] = ("direct", "landing", "auto")

Row = dict[str, Any]


@dataclass(frozen=True)
class DescriptorSettings:
    """What is measured. ``total`` bytes a request in at most ``regions`` regions, unless ``count`` says how many
    pieces a region has; sixteen slots of ``slot`` bytes each."""

    pieces: tuple[int, ...] = (512, 2 << 10, 8 << 10, 32 << 10, 256 << 10, 4 << 20)
    regions: int = 128
    count: int | None = None
    total: int = 64 << 20
    repeats: int = 5
    slot: int = 16 << 20

    def shape(self, piece: int) -> Shape:
        """Regions and pieces a region for pieces of so many bytes."""
        regions = min(self.regions, max(1, self.total // piece // 4))
        return Shape(regions, self.count or max(4, self.total // regions // piece), piece, self.slot)


@dataclass(frozen=True)
class Shape:
    """``regions`` of ``count`` pieces of ``piece`` bytes."""

    regions: int
    count: int
    piece: int
    slot: int


def measure(settings: DescriptorSettings, told: Callable[[Row], None] = lambda row: None) -> Row:
    """A row a piece size; ``told`` hears each when it is there. Raises BenchError and TransportUnavailable."""
    rows = []
    for piece in settings.pieces:
        shape = settings.shape(piece)
        rows.append(_row(shape, _times(shape, settings.repeats)))
        told(rows[-1])
    return {"bench": "descriptors", "settings": asdict(settings), "rows": rows}


def _row(shape: Shape, times: dict[str, list[float]]) -> Row:
    middle = {way: statistics.median(taken) for way, taken in times.items()}
    row: Row = {"piece": shape.piece, "regions": shape.regions, "pieces_a_region": shape.count}
    row |= {f"{way}_ms": taken for way, taken in middle.items()}
    row |= {f"{way}_over_landing": middle[way] / middle["landing"] for way in ("raw", "direct")}
    row["auto_over_best"] = middle["auto"] / min(middle["direct"], middle["landing"])
    return row


def _cache(shape: Shape, value: int) -> Any:
    """Layers of blocks of one token."""
    from pushkv import KVCache

    arrays = {
        f"l{number}": np.full((shape.count, 1, shape.piece), value, np.uint8) for number in range(shape.regions)
    }
    return KVCache.of(arrays, "BNC", heads=1, bench="descriptors")


def _scattered(count: int, seed: int) -> list[int]:
    """All blocks in an order in which hardly any two follow each other."""
    return [int(block) for block in np.random.default_rng(seed).permutation(count)]


def _config(engine: str, way: Way, slot: int) -> Any:
    from pushkv import EndpointConfig

    return EndpointConfig(engine=f"{engine}-{way}", landing=way, landing_bytes=16 * slot, slot_bytes=slot)


class _Raw(Alone):
    """NIXL alone over the regions of a cache, scattered as the request is."""

    def __init__(self, name: str, cache: Any) -> None:
        super().__init__(f"raw-{name}", [(region.address, region.length) for region in cache.regions])

    def prepare(self, theirs: tuple[bytes, Any], shape: Shape) -> None:
        """Both lists: for every region, its blocks in their order."""
        metadata, regions = theirs
        peer = self.meet(metadata)
        every = np.arange(shape.count * shape.regions, dtype=np.int32)
        self._ours = self.listed(self.regions, shape.piece, order=_scattered(shape.count, 1)), every
        self._theirs = self.listed(regions, shape.piece, peer=peer, order=_scattered(shape.count, 2)), every

    def write(self) -> float:
        """WRITE everything; when it began."""
        began = time.perf_counter()
        handle = self.post("WRITE", self._ours, self._theirs, b"done")
        while not self.over(handle):
            pass
        return began


def _prefill(pipe: Pipe, shape: Shape) -> None:
    """Serve every way, and be raw NIXL's initiator, on request."""
    from pushkv import Producer

    belong_to_parent()
    cache = _cache(shape, value=7)
    raw = _Raw("initiator", cache)
    producers = {way: Producer(_config("prefill", way, shape.slot), cache) for way in WAYS}
    pipe.send(({way: producer.address for way, producer in producers.items()}, raw.metadata))
    raw.prepare(pipe.recv(), shape)
    while (asked := pipe.recv()) is not None:
        way, name = asked
        if way == "raw":
            pipe.send(raw.write())
            continue
        at, blocks = time.perf_counter(), _scattered(shape.count, 1)
        ending = producers[way].stage(name, blocks, prompt=PROMPT, prompt_tokens=len(blocks))
        pipe.send(at)
        ending.wait(WAIT)
    for producer in producers.values():
        producer.close()


def _times(shape: Shape, repeats: int) -> dict[str, list[float]]:
    """Milliseconds, by way; the first round warms up and does not count."""
    pipe, process = start(multiprocessing.get_context("spawn"), _prefill, shape)
    try:
        target = _Target(pipe, shape)
        times = [target.round(number) for number in range(repeats + 1)][1:]
        pipe.send(None)
        target.close()
    except (EOFError, BrokenPipeError):
        raise BenchError("The prefill process of the benchmark ended; see what it wrote.") from None
    finally:
        stop(process)
    return {way: [one[way] * 1e3 for one in times] for way in times[0]}


class _Target:
    """The side that is written to."""

    def __init__(self, pipe: Pipe, shape: Shape) -> None:
        from pushkv import Consumer

        self._pipe, self._shape = pipe, shape
        self._cache = _cache(shape, value=0)
        self._raw = _Raw("target", self._cache)
        addresses, metadata = pipe.recv()
        pipe.send(self._raw.metadata)
        self._raw.meet(metadata[0])
        self._consumers = {way: Consumer(_config("decode", way, shape.slot), self._cache) for way in WAYS}
        self._links = {way: self._consumers[way].connect(addresses[way]) for way in WAYS}

    def round(self, number: int) -> dict[str, float]:
        """Every way once, in seconds."""
        self._pipe.send(("raw", ""))
        came = self._raw.arrived()
        return {"raw": came - self._pipe.recv()} | {way: self._push(way, f"{way}{number}") for way in WAYS}

    def _push(self, way: Way, name: str) -> float:
        from pushkv import Outcome

        for array in self._cache.arrays:
            array[:] = 0
        blocks = _scattered(self._shape.count, 2)
        consumer, link = self._consumers[way], self._links[way]
        transfer = consumer.offer(name, link, blocks, prompt=PROMPT, prompt_tokens=len(blocks))
        time.sleep(0.02)
        self._pipe.send((way, name))
        if transfer.wait(WAIT) is not Outcome.COMPLETE:
            raise BenchError(f"A push ({way}) ended as {transfer.outcome}: {transfer.detail}")
        seconds: float = time.perf_counter() - self._pipe.recv()
        if not all((array == 7).all() for array in self._cache.arrays):
            raise BenchError(f"A push ({way}) has left bytes that are wrong.")
        transfer.wait_released(WAIT)
        return seconds

    def close(self) -> None:
        """Let go of everything."""
        for consumer in self._consumers.values():
            consumer.close()
