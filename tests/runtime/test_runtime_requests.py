"""What an engine may ask for: nothing that a peer would drop gets as far as a message, where it would never end."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.errors import GeometryError, ProtocolError
from runtime.scene import WAIT, Scene, cache_of, memory_of, until

ASKED: dict[str, Any] = {"prompt": bytes(32), "prompt_tokens": 10}


@pytest.fixture
def producer(scene: Scene) -> Producer:
    return scene.producer()


@pytest.fixture
def consumer(scene: Scene) -> Consumer:
    return scene.consumer()


@pytest.fixture
def link(producer: Producer, consumer: Consumer) -> Link:
    return consumer.connect(producer.address)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": None}, "prompt digest is None; make it with"),
        ({"prompt": "x" * 32}, "prompt digest is 'xxx"),
        ({"deadline": "soon"}, "deadline is 'soon' s"),
        ({"transfer": 7}, "transfer id 7 is no text"),
        ({"transfer": b"r"}, "transfer id b'r' is no text"),
    ],
)
def test_what_is_of_another_type(
    producer: Producer, consumer: Consumer, link: Link, wrong: dict[str, Any], message: str
) -> None:
    asked = {"transfer": "r", "blocks": [1, 2, 3], **ASKED, **wrong}
    with pytest.raises(ProtocolError, match=message):
        consumer.offer(link=link, **asked)
    with pytest.raises(ProtocolError, match=message):
        producer.stage(**asked)
    assert not consumer._transfers
    assert not producer._stages


def test_tokens_without_a_block_do_not_count_as_complete(consumer: Consumer, link: Link) -> None:
    with pytest.raises(GeometryError, match="No block is given for tokens 2 to 10"):
        consumer.offer("r", link, [], **ASKED, start=2)
    assert consumer.offer("none", link, [], **ASKED, start=10).wait(WAIT) is Outcome.COMPLETE


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([1.0, 2], "no whole numbers"),
        ([None, 2], "no whole numbers"),
        ({1, 2}, "no whole numbers"),
        ([[1], [2, 3]], "2 block tables were given for 1"),
        (np.ones((2, 2), int), "2 block tables were given for 1"),
        ([[[1, 2]]], r"of shape \(1, 2\) are given for one cache group; give one row"),
        ([[[1], [2, 3]]], "no list of numbers"),
    ],
)
def test_what_is_no_list_of_blocks(producer: Producer, blocks: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        producer.stage("r", blocks, **ASKED)


def test_blocks_of_a_call_before_that_was_not(producer: Producer) -> None:
    with pytest.raises(ProtocolError, match="none has named any"):
        producer.stage("r", None, **ASKED)


def test_what_is_no_list_of_tables(scene: Scene) -> None:
    one, other = cache_of(memory_of()), cache_of(memory_of())
    groups = (*one.geometry.groups, *_renamed(other))
    cache = type(one).from_groups(groups, one.regions, one.backend, one.arrays, model="m")
    for blocks, message in (
        (5, "Block tables 5 are no list"),
        (iter([[1], [2]]), "are no list"),
        ([1, 2, 3], "3 block"),
    ):
        with pytest.raises(GeometryError, match=message):
            scene.producer("two", cache).stage("r", blocks, **ASKED)


def _renamed(cache: Any) -> tuple[Any, ...]:
    (group,) = cache.geometry.groups
    layers = tuple(msgspec.structs.replace(layer, name=f"other {layer.name}") for layer in group.layers)
    return (msgspec.structs.replace(group, layers=layers),)


def test_a_stage_that_trips_the_machine_ends(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours is an end too: who waits without a limit would wait for ever."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("by zero")

    with monkeypatch.context() as patched:
        patched.setattr(producer._side.machine, "stage", fails)
        ending = producer.stage("r", [1, 2, 3], **ASKED)
        assert ending.wait(WAIT) is Outcome.REJECTED_TOKENS
    assert ending.detail == "by zero"
    assert ending.wait_released(WAIT)
    until(lambda: "r" not in producer._stages)


def test_cancelling_what_is_no_transfer_raises_here(consumer: Consumer, link: Link) -> None:
    with pytest.raises(AttributeError):
        consumer.cancel("r")  # type: ignore[arg-type]
    assert consumer.stats()["errors"] == 0
