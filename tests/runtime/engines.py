"""A prefill and a decode engine of several ranks, in any two layouts, over the in-process network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pushkv import KVCache, Link, Outcome
from pushkv.core.layouts import shard
from pushkv.errors import BackendError
from runtime.scene import WAIT, Array, Pushed, Scene, fill

HEADS, LAYERS, CONTENT = 4, 2, 4


@dataclass(frozen=True)
class Layout:
    """How one side lays its cache out, and over how many ranks."""

    axes: str = "LSBHNC"
    block: int = 4
    ranks: int = 1

    def memory(self) -> Array:
        sizes = {"L": LAYERS, "S": 2, "B": 64, "H": HEADS // self.ranks, "N": self.block, "C": CONTENT}
        return np.zeros([sizes[axis] for axis in self.axes], np.float32)

    def cache(self, array: Array, rank: int) -> KVCache:
        return KVCache.of(array, self.axes, shard=shard(HEADS, rank, self.ranks), model="m")

    def tokens(self, arrays: Sequence[Array], blocks: Sequence[int]) -> Array:
        """Layers, sides, tokens of these blocks, heads of all ranks, content."""
        parts = []
        for array in arrays:
            chosen = array.transpose([self.axes.index(axis) for axis in "LSBNHC"])[:, :, list(blocks)]
            parts.append(chosen.reshape(LAYERS, 2, -1, *chosen.shape[4:]))
        return np.concatenate(parts, axis=3)


@dataclass
class Engines:
    """A prefill and a decode engine of several ranks each, and one prompt of 22 tokens pushed between them."""

    scene: Scene
    ours: Layout
    theirs: Layout
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = {"verify": "checksum", **self.settings}
        self.sources = [fill(self.ours.memory(), rank) for rank in range(self.ours.ranks)]
        self.targets = [self.theirs.memory() for _ in range(self.theirs.ranks)]
        self.producers = [
            self.scene.producer(cache=self.ours.cache(array, rank), rank=rank, **self.settings)
            for rank, array in enumerate(self.sources)
        ]
        self.consumers = [
            self.scene.consumer(cache=self.theirs.cache(array, rank), rank=rank, **self.settings)
            for rank, array in enumerate(self.targets)
        ]
        addresses = [producer.address for producer in self.producers]
        self.links = [consumer.connect(addresses) for consumer in self.consumers]
        self.asked = {"prompt": bytes(32), "prompt_tokens": 22}
        self.source = list(np.random.default_rng(1).permutation(64)[: -(-22 // self.ours.block)])
        self.target = list(np.random.default_rng(2).permutation(64)[: -(-22 // self.theirs.block)])

    def offer(self, start: int = 0) -> list[Any]:
        first = start // self.theirs.block
        blocks = self.target[first:]
        return [
            consumer.offer("r", link, blocks, start=start, first_block=first, sibling=rank, **self.asked)
            for rank, (consumer, link) in enumerate(zip(self.consumers, self.links, strict=True))
        ]

    def stage(self, ready: int = 22, ranks: Sequence[int] | None = None) -> None:
        siblings = max(1, self.theirs.ranks // self.ours.ranks)
        for rank in range(self.ours.ranks) if ranks is None else ranks:
            self.producers[rank].stage("r", self.source, ready=ready, siblings=siblings, **self.asked)

    def arrived(self, start: int = 0) -> bool:
        ours = self.ours.tokens(self.sources, self.source)[:, :, start:22]
        theirs = self.theirs.tokens(self.targets, self.target)[:, :, start:22]
        return bool((ours == theirs).all())

    def stat(self, name: str) -> int:
        return sum(consumer.stats().get(name, 0) for consumer in self.consumers)


def fails_while_unreadable(
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    victim: Callable[[object], bool],
    pushes: tuple[Pushed, Pushed],
    link: Link,
) -> None:
    """The first transfer fails, as one ``read`` of this kind does; with that mended the second is complete."""
    push, other = pushes
    read = kind.read

    def fail(self: object, runs: Any) -> Any:
        if victim(self):
            raise BackendError("the device is gone; restart the process")
        return read(self, runs)

    monkeypatch.setattr(kind, "read", fail)
    transfer = push.offer(link)
    stage = push.stage()
    assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
    assert "the device is gone" in transfer.detail
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    monkeypatch.setattr(kind, "read", read)
    good = other.offer(link)
    other.stage()
    assert good.wait(WAIT) is Outcome.COMPLETE


LAYOUTS = [
    pytest.param(Layout(), Layout(), id="alike"),
    pytest.param(Layout(), Layout(block=8), id="larger blocks"),
    pytest.param(Layout(block=6), Layout(block=4), id="blocks that do not divide"),
    pytest.param(Layout("LSBHNC"), Layout("BLNHSC"), id="other axes"),
    pytest.param(Layout("LBNHSC", block=8), Layout("SLBHNC"), id="other axes and blocks"),
    pytest.param(Layout(ranks=2), Layout(), id="two ranks to one"),
    pytest.param(Layout(), Layout(ranks=2), id="one rank to two"),
    pytest.param(Layout("BLHNSC", 8, ranks=4), Layout("LSBNHC", 4, ranks=2), id="all of it"),
]
BYTES = LAYERS * 2 * HEADS * CONTENT * 4
"""Of a token."""
