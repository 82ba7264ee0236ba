"""verify="checksum" between two processes, over NIXL: what was written into on either side fails its transfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, Link, Outcome, Transfer
from runtime.actors import BLOCK, Actor, make_cache, make_config, start
from runtime.scene import WAIT

pytestmark = pytest.mark.processes
COUNT = 64
"""Blocks of 1 MiB in a push: many slices, and many looks."""


@pytest.fixture(params=["", "tcp"], ids=["default", "tcp"])
def producer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    actor = start("producer", "p", verify="checksum", silence=WAIT)
    yield actor
    actor.kill()
    actor.pipe.close()


@pytest.fixture
def consumer(producer: Actor) -> Iterator[Consumer]:
    consumer = Consumer(make_config("d", verify="checksum", silence=WAIT), make_cache(0))
    yield consumer
    assert consumer.close(WAIT)


def push(consumer: Consumer, link: Link, producer: Actor, name: str, first: int) -> Transfer:
    """Blocks ``first`` and on, into themselves."""
    blocks = list(range(first, first + COUNT))
    transfer = consumer.offer(name, link, blocks, prompt=bytes(32), prompt_tokens=COUNT)
    producer.ask("stage", name, first, COUNT)
    transfer.wait(WAIT)
    assert transfer.wait_released(WAIT)
    return transfer


def landed(consumer: Consumer, first: int) -> list[bool]:
    """Of each block, whether it holds what the source's did at first."""
    array = consumer.cache.arrays[0]
    assert isinstance(array, np.ndarray)
    return [bool((array[0, block, 0] == 1 + block % 250).all()) for block in range(first, first + COUNT)]


def test_a_source_that_is_written_into_while_it_is_sent(producer: Actor, consumer: Consumer) -> None:
    link = consumer.connect(producer.ask("address"))
    assert push(consumer, link, producer, "sound", 0).outcome is Outcome.COMPLETE
    assert all(landed(consumer, 0))
    assert consumer.stats()["bytes verified"] == COUNT * BLOCK
    producer.ask("spoil", 2 * COUNT - 1)
    failed = push(consumer, link, producer, "spoilt", COUNT)
    assert failed.outcome is Outcome.TRANSPORT_ERROR
    assert f"part 0 (tokens 0 to {COUNT}) of producer rank 0 was sent with the digest" in failed.detail
    assert landed(consumer, COUNT) == [True] * (COUNT - 1) + [False], "and that it was"
    assert push(consumer, link, producer, "another", 2 * COUNT).outcome is Outcome.COMPLETE
    assert all(landed(consumer, 2 * COUNT))


def test_a_target_that_is_written_into_before_it_is_looked_at(producer: Actor, consumer: Consumer) -> None:
    link = consumer.connect(producer.ask("address"))
    side: Any = consumer._side
    array: Any = consumer.cache.arrays[0]
    part = side.part

    def spoiling(*given: Any) -> None:
        array[0, 5, 0, BLOCK // 2] ^= 1
        part(*given)

    side.part = spoiling
    failed = push(consumer, link, producer, "spoilt", 0)
    assert failed.outcome is Outcome.TRANSPORT_ERROR
    assert landed(consumer, 0).count(False) == 1
    side.part = part
    assert push(consumer, link, producer, "sound", COUNT).outcome is Outcome.COMPLETE
    assert all(landed(consumer, COUNT))
