"""Streaming over NIXL between processes that are killed, preempt, or cancel between two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, KVCache, Outcome, Producer, Transfer
from runtime.actors import Actor, Pipe, Role, launch, make_config, obey
from runtime.scene import WAIT, Array, until

pytestmark = pytest.mark.processes

LAYERS, BLOCKS, TOKENS = 4, 32, 128
"""Tokens of the prompt, 64 KiB each in all layers: 16 blocks of eight."""
SIDES, BLOCK, CONTENT = 2, 8, (64 << 10) // (4 * 2 * 4)
WAYS: dict[str, dict[str, Any]] = {
    "direct": {"stream": "layer"},
    "landing": {"stream": "layer", "landing": "landing", "slot_bytes": 4 << 20, "landing_bytes": 16 << 20},
}
Start = Callable[..., Actor]


def layered(kind: str) -> KVCache:
    """A cache of layers, sides, blocks, tokens; a producer's bytes tell layer, block and token."""
    array = np.zeros((LAYERS, SIDES, BLOCKS, BLOCK, CONTENT), np.float32)
    if kind == "producer":
        fill(array)
    return KVCache.of(array, "LSBNC", model="m")


def fill(array: Array) -> None:
    """Numbers of their own for each layer, side, block and token."""
    array[:] = np.arange(1, array[..., 0].size + 1, dtype=np.float32).reshape(*array.shape[:-1], 1)


class Layered(Role):
    """A process that stages layers."""

    def begin(self, name: str, ready: int, layers: int | None = None, first: int = 0) -> None:
        assert isinstance(self.end, Producer)
        blocks = list(range(first, first + TOKENS // BLOCK))
        asked: dict[str, Any] = {"prompt": bytes(32), "prompt_tokens": TOKENS}
        self.stages[name] = self.end.stage(name, blocks, ready=ready, layers=layers, **asked)

    def preempt(self, name: str) -> bool:
        """Whether the blocks came back; they are computed anew in others."""
        assert isinstance(self.end, Producer)
        ending = self.end.preempt(name)
        assert ending is not None
        back, array = ending.wait_released(WAIT), self.array
        array[:, :, 16:32] = array[:, :, :16]
        array[:, :, :16] = -1.0
        return back

    def released(self, name: str) -> bool:
        """Whether what was staged is nobody's any more."""
        return self.stages[name].wait_released(WAIT)

    def ask_for(self, name: str) -> None:
        """Offer blocks for the prompt."""
        assert isinstance(self.end, Consumer)
        assert self.link is not None
        blocks = list(range(TOKENS // BLOCK))
        self.transfers[name] = self.end.offer(name, self.link, blocks, prompt=bytes(32), prompt_tokens=TOKENS)

    def has_first_layer(self, stop: int) -> bool:
        """Whether the first layer has arrived."""
        return bool(self.array[0, :, : stop // BLOCK].all())


def serve_layered(pipe: Pipe, kind: str, engine: str, settings: dict[str, Any]) -> None:
    """The child's work: one endpoint with a cache of layers."""
    obey(pipe, Layered(kind, engine, settings, layered(kind)))


@pytest.fixture
def begin() -> Iterator[Start]:
    actors: list[Actor] = []

    def begin_one(kind: str, engine: str, **settings: Any) -> Actor:
        actors.append(launch(serve_layered, kind, engine, settings))
        return actors[-1]

    yield begin_one
    for actor in actors:
        actor.kill()
        actor.pipe.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture
def consumer(way: dict[str, Any]) -> Iterator[Consumer]:
    consumer = Consumer(make_config("d", **way), layered("consumer"))
    yield consumer
    assert consumer.close(WAIT)


def offer(consumer: Consumer, producer: Actor) -> Transfer:
    link = consumer.connect(producer.ask("address"), WAIT)
    return consumer.offer("r", link, list(range(TOKENS // BLOCK)), prompt=bytes(32), prompt_tokens=TOKENS)


def target(consumer: Consumer) -> Array:
    array = consumer.cache.arrays[0]
    assert isinstance(array, np.ndarray)
    return array


def arrived(consumer: Consumer, layers: int, stop: int) -> bool:
    """Whether these layers of the first tokens are as in the producer's cache."""
    expected = np.empty_like(target(consumer))
    fill(expected)
    blocks = stop // BLOCK
    return bool((target(consumer)[:layers, :, :blocks] == expected[:layers, :, :blocks]).all())


def test_layers_cross_while_the_prompt_is_computed(begin: Start, consumer: Consumer, way: dict[str, Any]) -> None:
    producer = begin("producer", "p", **way)
    transfer = offer(consumer, producer)
    for stop in (TOKENS // 2, TOKENS):
        for layers in range(1, LAYERS + 1):
            producer.ask("begin", "r", stop, layers)
            until(lambda layers=layers, stop=stop: arrived(consumer, layers, stop))  # type: ignore[misc]
            assert not target(consumer)[layers:, :, (stop - 1) // BLOCK].any(), "it is not staged"
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert producer.ask("outcome", "r") == "complete"
    assert producer.ask("released", "r")


def test_preempted_between_parts_it_goes_on_from_other_blocks(
    begin: Start, consumer: Consumer, way: dict[str, Any]
) -> None:
    producer = begin("producer", "p", **way)
    transfer = offer(consumer, producer)
    producer.ask("begin", "r", TOKENS // 2, 2)
    until(lambda: arrived(consumer, 2, TOKENS // 2), "the first part")
    assert producer.ask("preempt", "r"), "the blocks come back, and are overwritten at once"
    producer.ask("begin", "r", TOKENS // 4, None, 16)
    producer.ask("begin", "r", TOKENS, None, 16)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert arrived(consumer, LAYERS, TOKENS)


def test_cancelled_between_parts(begin: Start, consumer: Consumer, way: dict[str, Any]) -> None:
    producer = begin("producer", "p", **way)
    transfer = offer(consumer, producer)
    producer.ask("begin", "r", TOKENS // 2, 1)
    until(lambda: arrived(consumer, 1, TOKENS // 2))
    consumer.cancel(transfer)
    assert transfer.wait(WAIT) is Outcome.CANCELLED
    assert transfer.wait_released(WAIT)
    assert producer.ask("outcome", "r") == "cancelled"
    assert producer.ask("released", "r")
    assert not target(consumer)[1:].any()


def test_a_producer_that_is_killed_between_parts(begin: Start, consumer: Consumer, way: dict[str, Any]) -> None:
    producer = begin("producer", "p", **way)
    transfer = offer(consumer, producer)
    producer.ask("begin", "r", TOKENS // 2, 1)
    until(lambda: arrived(consumer, 1, TOKENS // 2))
    producer.kill()
    assert transfer.wait(WAIT) is Outcome.PEER_LOST, "a part is not the whole"
    assert transfer.wait_released(WAIT)
    again = begin("producer", "p", **way)
    second = offer(consumer, again)
    again.ask("begin", "r", TOKENS)
    assert second.wait(WAIT) is Outcome.COMPLETE
    assert arrived(consumer, LAYERS, TOKENS)


def test_a_consumer_that_is_killed_between_parts(begin: Start, way: dict[str, Any]) -> None:
    producer, victim = begin("producer", "p", **way), begin("consumer", "d", **way)
    victim.ask("connect", producer.ask("address"))
    victim.ask("ask_for", "r")
    producer.ask("begin", "r", TOKENS // 2, 1)
    until(lambda: victim.ask("has_first_layer", TOKENS // 2))
    victim.kill()
    producer.ask("begin", "r", TOKENS)
    assert producer.ask("outcome", "r") == "peer lost"
    assert producer.ask("released", "r")
