"""What no message could hold is refused on the engine's own thread; numpy's numbers are as good as any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scene import Scene

from pushkv import Outcome, prompt_digest
from pushkv.errors import GeometryError, ProtocolError

PROMPT = prompt_digest(range(20))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"prompt_tokens": 2**40}, "r's prompt_tokens is 1099511627776; give a whole number from 0 to 2147483647."),
        ({"prompt_tokens": 20.0}, r"r's prompt_tokens is 20\.0; give a whole number"),
        ({"first_block": -1}, "r's first_block is -1"),
        ({"attempt": -1}, "r's attempt is -1"),
        ({"sibling": 2**31}, "r's sibling is 2147483648"),
        ({"start": 1.5}, r"r's start is 1\.5"),
        ({"stop": "all"}, "r's stop is 'all'"),
        ({"transfer": "r\ud800"}, "half a surrogate pair"),
    ],
)
def test_an_offer_that_no_message_could_hold(scene: Scene, numbers: dict[str, Any], message: str) -> None:
    consumer = scene.consumer()
    link = consumer.connect(scene.producer().address)
    asked = {"transfer": "r", "link": link, "blocks": [1, 2], "prompt": PROMPT, "prompt_tokens": 20} | numbers
    with pytest.raises(ProtocolError, match=message):
        consumer.offer(**asked)
    assert consumer.held_blocks == 0
    assert consumer.stats()["errors"] == 0


def test_tokens_outside_the_prompt_are_the_geometrys(scene: Scene) -> None:
    consumer = scene.consumer()
    link = consumer.connect(scene.producer().address)
    with pytest.raises(GeometryError, match="asks for tokens -1 to 20 of 20"):
        consumer.offer("r", link, [1, 2], prompt=PROMPT, prompt_tokens=20, start=-1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"siblings": 0}, "r's siblings is 0; give a whole number from 1 to 2147483647."),
        ({"siblings": 1.0}, r"r's siblings is 1\.0"),
        ({"prompt_tokens": -1}, "r's prompt_tokens is -1"),
        ({"ready": 2**31}, "r's ready is 2147483648"),
    ],
)
def test_a_stage_that_could_never_end(scene: Scene, numbers: dict[str, Any], message: str) -> None:
    producer = scene.producer()
    with pytest.raises(ProtocolError, match=message):
        producer.stage(**{"transfer": "r", "blocks": [1, 2], "prompt": PROMPT, "prompt_tokens": 20} | numbers)
    assert producer.stats()["errors"] == 0


def test_numbers_of_numpy(scene: Scene) -> None:
    """They come out of block tables and token counts that engines keep in arrays."""
    producer, consumer = scene.producer(), scene.consumer()
    link, one, tokens = consumer.connect(producer.address), np.int64(1), np.int32(20)
    transfer = consumer.offer(
        "r",
        link,
        np.arange(5, 10),
        prompt=PROMPT,
        prompt_tokens=tokens,
        start=one,
        attempt=one,
    )
    producer.stage("r", np.arange(1, 6), prompt=PROMPT, prompt_tokens=tokens, siblings=one)
    assert transfer.wait(10) is Outcome.COMPLETE
