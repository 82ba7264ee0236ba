"""Engines whose ranks share a request's tokens out push to each other, and to engines whose ranks do not.

Each rank's memory is looked at token by token, in the place that a loop over tokens gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, Outcome, Producer, Shard, prompt_digest
from pushkv.core.geometry import Stripe
from pushkv.errors import HandshakeError
from runtime.scene import TOKENS, WAIT, Array, Scene, cache_of, memory_of, until

PROMPT = 45
ASKED = {"prompt": prompt_digest(range(PROMPT)), "prompt_tokens": PROMPT}


@dataclass(frozen=True)
class Dealt:
    """An engine of ``count`` ranks that share tokens out in runs of ``width``."""

    count: int
    width: int = TOKENS

    def share(self, rank: int) -> Shard:
        return Shard(0, 2, 2, stripe=Stripe(rank, self.count, self.width))

    def places(self, rank: int, tokens: int) -> list[tuple[int, int]]:
        """(token, its place among the rank's tokens), counted one by one."""
        held = [token for token in range(tokens) if token // self.width % self.count == rank]
        return [(token, place) for place, token in enumerate(held)]


def number(token: int) -> float:
    return float(token + 1)


def write(memory: Array, blocks: list[int], places: list[tuple[int, int]]) -> None:
    """Put a token's KV, which tells its number and its place in the array, where the rank keeps it."""
    for token, place in places:
        memory[:, :, blocks[place // TOKENS], :, place % TOKENS] = number(token) * 1000 + elements(memory)


def elements(memory: Array) -> Array:
    layers, sides, _, heads, _, content = memory.shape
    return np.arange(layers * sides * heads * content, dtype=np.float32).reshape(layers, sides, heads, content)


def arrived(memory: Array, blocks: list[int], places: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether exactly the tokens from ``start`` to ``stop`` are there, element by element, and nothing else."""
    expected = np.zeros_like(memory)
    write(expected, blocks, [(token, place) for token, place in places if start <= token < stop])
    return bool((memory == expected).all())


@dataclass
class Engines:
    """A prefill and a decode engine, each rank with blocks of its own table; the table is one for all of a side."""

    scene: Scene
    ours: Dealt
    theirs: Dealt

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.sources, self.targets = (rng.permutation(64)[:24].tolist() for _ in range(2))
        self.memory: list[Array] = []
        self.producers = [self._producer(rank) for rank in range(self.ours.count)]
        for producer in self.producers:
            producer.introduce([one.address for one in self.producers])
        self.received: list[Array] = [memory_of() for _ in range(self.theirs.count)]
        caches = [cache_of(memory, self.theirs.share(rank)) for rank, memory in enumerate(self.received)]
        self.consumers = [
            self.scene.consumer(cache=cache, rank=rank, fellows=[one.geometry for one in caches if one is not cache])
            for rank, cache in enumerate(caches)
        ]

    def _producer(self, rank: int) -> Producer:
        memory = memory_of()
        self.memory.append(memory)
        return self.scene.producer(cache=cache_of(memory, self.ours.share(rank)), rank=rank, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def compute(self, tokens: int) -> None:
        """Prefill has computed so many tokens: every rank writes those that are its own."""
        for rank, memory in enumerate(self.memory):
            write(memory, self.sources, self.ours.places(rank, tokens))

    def stage(self, ready: int = PROMPT) -> list[Any]:
        return [one.stage("r", self.sources, siblings=None, ready=ready, **ASKED) for one in self.producers]

    def offer(self, start: int = 0, stop: int = PROMPT) -> list[Any]:
        return [self._offer(consumer, start, stop) for consumer in self.consumers]

    def _offer(self, consumer: Consumer, start: int, stop: int) -> Any:
        link = consumer.connect_engine(self.producers[0].address)
        first = start // (TOKENS * self.theirs.count)
        blocks = self.targets[first : -(-stop // (TOKENS * self.theirs.count))]
        return consumer.offer("r", link, blocks, first_block=first, start=start, stop=stop, **ASKED)

    def right(self, start: int = 0, stop: int = PROMPT) -> bool:
        return all(
            arrived(memory, self.targets, self.theirs.places(rank, PROMPT), start, stop)
            for rank, memory in enumerate(self.received)
        )


PAIRS = [
    (Dealt(2), Dealt(1)),
    (Dealt(1), Dealt(2)),
    (Dealt(4), Dealt(2)),
    (Dealt(2), Dealt(4)),
    (Dealt(2), Dealt(2)),
    (Dealt(3), Dealt(2)),
    (Dealt(2, 1), Dealt(1)),
    (Dealt(1), Dealt(2, 1)),
    (Dealt(2, 1), Dealt(2)),
    (Dealt(4, 2), Dealt(2, 1)),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, PROMPT), (0, 44), (17, PROMPT), (16, 33), (0, 1), (5, 6)])
def test_every_token_comes_to_the_rank_that_holds_it(
    scene: Scene, ours: Dealt, theirs: Dealt, start: int, stop: int
) -> None:
    """Also of prompts of which some ranks have nothing; and every stage ends, whether it was needed or not."""
    engines = Engines(scene, ours, theirs)
    engines.compute(PROMPT)
    stages = engines.stage()
    assert {one.wait(WAIT) for one in engines.offer(start, stop)} == {Outcome.COMPLETE}
    assert engines.right(start, stop)
    assert all(stage.wait_released(WAIT) for stage in stages)
    needed = [any(start <= token < stop for token, _ in ours.places(rank, PROMPT)) for rank in range(ours.count)]
    assert [stage.outcome is Outcome.COMPLETE for stage in stages] == needed


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=str)
def test_chunks_leave_as_they_are_computed(scene: Scene, ours: Dealt, theirs: Dealt) -> None:
    engines = Engines(scene, ours, theirs)
    transfers, stages = engines.offer(), []
    for ready in (3, 10, 16, 17, 32, 40, PROMPT):
        engines.compute(ready)
        stages = engines.stage(ready)
        if ready == 40:
            # A part is sent as soon as the blocks of both sides are full that it lies in.
            until(lambda: any((memory != 0).any() for memory in engines.received), "a part before the end")
    assert {one.wait(WAIT) for one in transfers} == {Outcome.COMPLETE}
    assert engines.right()
    assert all(stage.wait_released(WAIT) for stage in stages)


@pytest.mark.parametrize(("ours", "theirs"), [PAIRS[0], PAIRS[1], PAIRS[3], PAIRS[6], PAIRS[9]], ids=str)
@pytest.mark.parametrize("slot", [512, 4096])
def test_through_slots(scene: Scene, ours: Dealt, theirs: Dealt, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import scene as scenery

    landing = {"landing": "landing", "landing_bytes": 8 * slot, "slot_bytes": slot, "verify": "checksum"}
    monkeypatch.setattr(scenery, "SETTINGS", {**scenery.SETTINGS, **landing})
    engines = Engines(scene, ours, theirs)
    engines.compute(PROMPT)
    stages = engines.stage()
    assert {one.wait(WAIT) for one in engines.offer(9)} == {Outcome.COMPLETE}
    assert engines.right(9)
    assert all(stage.wait_released(WAIT) for stage in stages)


@pytest.mark.parametrize(("ours", "theirs"), [PAIRS[0], PAIRS[1], PAIRS[8]], ids=str)
def test_bytes_are_verified(scene: Scene, ours: Dealt, theirs: Dealt, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime import scene as scenery

    monkeypatch.setattr(scenery, "SETTINGS", {**scenery.SETTINGS, "verify": "checksum"})
    engines = Engines(scene, ours, theirs)
    engines.compute(PROMPT)
    engines.stage()
    assert {one.wait(WAIT) for one in engines.offer(3)} == {Outcome.COMPLETE}
    assert engines.right(3)
    assert sum(consumer.stats().get("bytes verified", 0) for consumer in engines.consumers) > 0


@pytest.mark.parametrize(("ours", "theirs"), [*PAIRS, (Dealt(2, 2), Dealt(2, 2))], ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 42), (12, 42), (17, 42), (6, 9)])
def test_a_tail_that_is_free_takes_nothing_of_what_is_before(
    scene: Scene, ours: Dealt, theirs: Dealt, start: int, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are copied whole end past the offer, and begin where it does."""
    from runtime import scene as scenery

    monkeypatch.setattr(scenery, "SETTINGS", {**scenery.SETTINGS, "free_tail": True})
    engines = Engines(scene, ours, theirs)
    engines.compute(PROMPT)
    engines.stage()
    assert {one.wait(WAIT) for one in engines.offer(start, stop)} == {Outcome.COMPLETE}
    for rank, memory in enumerate(engines.received):
        places = engines.theirs.places(rank, PROMPT)
        whole = np.zeros_like(memory)
        write(whole, engines.targets, [(token, place) for token, place in places if token >= start])
        wanted = np.zeros_like(memory)
        write(wanted, engines.targets, [(token, place) for token, place in places if start <= token < stop])
        assert (memory[wanted != 0] == wanted[wanted != 0]).all()
        assert ((memory == wanted) | (memory == whole)).all()


def test_a_consumer_without_fellows_tells_those_that_owe_it_nothing(scene: Scene) -> None:
    """One rank, that nobody told it is alone: the stage of the rank that a short prompt does not reach ends too."""
    producers = [scene.producer(cache=cache_of(memory_of(), Dealt(2).share(rank)), rank=rank) for rank in range(2)]
    consumer = scene.consumer()
    link = consumer.connect([one.address for one in producers])
    stages = [one.stage("r", [1, 2, 3, 4, 5, 6], **ASKED) for one in producers]
    assert consumer.offer("r", link, [9], stop=3, **ASKED).wait(WAIT) is Outcome.COMPLETE
    assert all(stage.wait_released(WAIT) for stage in stages)
    assert [stage.outcome for stage in stages] == [Outcome.COMPLETE, Outcome.CANCELLED]


def test_a_stripe_that_nobody_has_is_refused(scene: Scene) -> None:
    producer = scene.producer(cache=cache_of(memory_of(), Dealt(2).share(0)))
    consumer = scene.consumer()
    with pytest.raises(HandshakeError, match=r"held, \[0, 2\) of stripe 0 of 2, 4 tokens wide would be written"):
        consumer.connect(producer.address)
