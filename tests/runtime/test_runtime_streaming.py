"""Streaming through endpoints: layers and chunks that leave while the prompt is computed, into blocks and slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pushkv import Consumer, KVCache, Outcome, Producer
from pushkv.core.layouts import Shard, shard
from pushkv.core.streaming import Ahead, Reach, Stream
from pushkv.core.template import PairTemplate
from pushkv.core.ways import Costs
from pushkv.errors import ConfigError, ProtocolError
from pushkv.runtime.streaming import WORTH, streaming_of
from pushkv.transport.memory import Faults, Network
from runtime.scene import (
    TOKENS,
    WAIT,
    Array,
    Gate,
    Pushed,
    Scene,
    array_of,
    blocks_for,
    cache_of,
    fill,
    memory_of,
    same_tokens,
    until,
)

LAYERS, COUNT = 4, 40
"""Of the caches, and tokens of the prompts: ten blocks."""
WAYS: dict[str, dict[str, Any]] = {
    "direct": {},
    "verified": {"verify": "checksum"},
    "landing": {"landing": "landing", "slot_bytes": 1024, "landing_bytes": 4096},
    "landing, verified": {"landing": "landing", "slot_bytes": 1024, "landing_bytes": 4096, "verify": "checksum"},
}
MakeScene = Callable[[Network], Scene]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def pushed(scene: Scene, **settings: Any) -> tuple[Pushed, Any]:
    """A prompt, not staged yet, and the link to its producer."""
    producer = scene.producer(cache=cache_of(fill(memory_of(layers=LAYERS))), **settings)
    consumer = scene.consumer(cache=cache_of(memory_of(layers=LAYERS)), **settings)
    link = consumer.connect(producer.address)
    return Pushed(producer, consumer, "r", blocks_for(COUNT), blocks_for(COUNT, 20)[::-1], COUNT), link


def there(push: Pushed, layers: slice, start: int, stop: int) -> bool:
    """Whether these layers of tokens ``start`` to ``stop`` have arrived."""
    ours, theirs = array_of(push.scene_producer)[layers], array_of(push.scene_consumer)[layers]
    return same_tokens(ours, push.source, theirs, push.target, start, stop)


def nothing(push: Pushed, layers: slice, block: int) -> bool:
    """Whether nothing has arrived of these layers in a block of the prompt."""
    return not array_of(push.scene_consumer)[layers, :, push.target[block]].any()


def test_layers_arrive_while_the_others_are_computed(scene: Scene, way: dict[str, Any]) -> None:
    push, link = pushed(scene, **way)
    transfer = push.offer(link)
    for start, stop in ((0, 16), (16, COUNT)):
        for layers in range(1, LAYERS):
            stage = push.stage(ready=stop, layers=layers)
            until(lambda layers=layers, stop=stop: there(push, slice(layers), 0, stop))  # type: ignore[misc]
            assert nothing(push, slice(layers, None), start // TOKENS), "it is not computed"
            assert transfer.outcome is None
        push.stage(ready=stop)
        until(lambda stop=stop: push.arrived(0, stop))  # type: ignore[misc]
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait(WAIT) is Outcome.COMPLETE
    assert transfer.wait_released(WAIT)
    assert stage.wait_released(WAIT)
    assert push.arrived()
    stats = push.scene_producer.stats()
    assert stats["bytes"] == COUNT * LAYERS * 2 * 2 * 4 * 4, "each byte once"


def test_all_that_is_there_goes_at_once_when_the_offer_comes(scene: Scene, way: dict[str, Any]) -> None:
    push, link = pushed(scene, **way)
    push.stage(ready=16)
    push.stage(ready=24, layers=2)
    transfer = push.offer(link)
    until(lambda: there(push, slice(None), 0, 16) and there(push, slice(2), 16, 24))
    assert nothing(push, slice(2, None), 16 // TOKENS)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()


@pytest.mark.parametrize("stream", ["auto", "request", "chunk"])
def test_what_leaves_by_the_setting(scene: Scene, stream: str) -> None:
    push, link = pushed(scene, stream=stream)
    transfer = push.offer(link)
    push.stage(ready=16, layers=3)
    push.stage(ready=16)
    if stream == "chunk":
        until(lambda: there(push, slice(None), 0, 16))
    push.stage(ready=COUNT, layers=3)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()
    assert push.scene_producer.stats()["writes"] == (2 if stream == "chunk" else 1), "auto keeps small parts together"


def test_auto_lets_go_what_is_large_enough(scene: Scene) -> None:
    content = WORTH // (LAYERS * 2 * 2 * 4 * 8 * TOKENS)
    caches = [cache_of(memory_of(layers=LAYERS, content=content)) for _ in range(2)]
    fill(caches[0].arrays[0])  # type: ignore[arg-type]
    producer = scene.producer(cache=caches[0], stream="auto")
    consumer = scene.consumer(cache=caches[1])
    link = consumer.connect(producer.address)
    push = Pushed(producer, consumer, "r", blocks_for(COUNT), blocks_for(COUNT, 20), COUNT)
    transfer = push.offer(link)
    push.stage(ready=16)
    push.stage(ready=COUNT - TOKENS, layers=1)
    push.stage(ready=COUNT - TOKENS)
    until(lambda: there(push, slice(None), 0, COUNT - TOKENS))
    assert producer.stats()["writes"] == 1
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()


def test_no_layer_is_read_before_its_fence(scene: Scene) -> None:
    push, link = pushed(scene)
    push.offer(link)
    gates = [Gate(), Gate()]
    push.stage(ready=16, layers=1, fence=gates[0])
    push.stage(ready=16, layers=3, fence=gates[1])
    until(lambda: len(push.scene_producer._side._fenced) == 2)
    assert nothing(push, slice(None), 0)
    gates[0].open = True
    until(lambda: there(push, slice(1), 0, 16))
    assert nothing(push, slice(1, None), 0)
    gates[1].open = True
    until(lambda: there(push, slice(3), 0, 16))


def test_blocks_of_layers_that_are_sent_come_back_after_a_preemption_once_nothing_reads_them(
    timed: MakeScene,
) -> None:
    network = Network(seed=3)
    push, link = pushed(timed(network))
    producer = push.scene_producer
    transfer = push.offer(link)
    until(lambda: producer.ask(lambda side: str(side.machine.open_transfers)) == "1", "the offer")
    network.faults = Faults(stall=1.0)
    stage = push.stage(ready=16, layers=2)
    until(lambda: producer.stats().get("writes", 0), "the WRITE")
    producer.preempt("r")
    assert not stage.wait_released(0.05), "a WRITE reads them"
    network.faults = Faults()
    network.release()
    assert stage.wait_released(WAIT)
    old = push.source
    assert same_tokens(array_of(producer)[:2], old, array_of(push.scene_consumer)[:2], push.target, 0, 16)
    array_of(producer)[:, :, old] = -1.0
    push.source = blocks_for(COUNT, 30)
    sent = array_of(push.scene_consumer).copy()
    push.stage(ready=8, layers=1)
    push.stage(ready=8)
    push.stage(ready=24, layers=3)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    arrived = array_of(push.scene_consumer)
    assert same_tokens(sent[:2], push.target, arrived[:2], push.target, 0, 16), "no part goes twice"
    assert there(push, slice(2, None), 0, COUNT)
    assert there(push, slice(None), 16, COUNT)


def test_a_cancel_between_layers_stops_the_others(scene: Scene, way: dict[str, Any]) -> None:
    push, link = pushed(scene, **way)
    transfer = push.offer(link)
    stage = push.stage(ready=16, layers=2)
    until(lambda: there(push, slice(2), 0, 16))
    push.scene_consumer.cancel(transfer, "the client left")
    assert transfer.wait(WAIT) is Outcome.CANCELLED
    assert transfer.wait_released(WAIT)
    until(lambda: stage.outcome is Outcome.CANCELLED and stage.released)
    assert push.stage() is stage
    assert push.scene_producer.ask(lambda side: str(side.machine.staged)) == "0"
    assert nothing(push, slice(2, None), 0)


def test_a_producer_that_dies_between_layers(scene: Scene) -> None:
    push, link = pushed(scene, silence=1.0)
    transfer = push.offer(link)
    push.stage(ready=16, layers=2)
    until(lambda: there(push, slice(2), 0, 16))
    scene.kill(push.scene_producer)
    assert transfer.wait(WAIT) is Outcome.PEER_LOST


@pytest.mark.parametrize(
    ("layers", "says"), [((1, 2), "one number a group"), (-1, "from 0"), ("x", "number a group|whole number")]
)
def test_layers_that_cannot_be(scene: Scene, layers: Any, says: str) -> None:
    push, _ = pushed(scene)
    with pytest.raises(ProtocolError, match=says):
        push.stage(ready=16, layers=layers if layers != "x" else [1.5])


def test_the_blocks_of_the_call_before(scene: Scene) -> None:
    push, link = pushed(scene)
    transfer = push.offer(link)
    with pytest.raises(ProtocolError, match="none has named any"):
        push.stage(blocks=None, ready=4)
    stage = push.stage(ready=16)
    assert push.stage(blocks=None, ready=24, layers=2) is stage
    until(lambda: there(push, slice(2), 16, 24))
    push.scene_producer.preempt("r")
    assert stage.wait_released(WAIT)
    with pytest.raises(ProtocolError, match="none has named any"):
        push.stage(blocks=None)
    push.stage(ready=24)
    push.stage(blocks=None)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()


def test_a_setting_that_there_is_not(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="stream is 'token'; choose 'auto' or"):
        scene.producer(stream="token")


class TestManyRanks:
    """Two producer ranks, two consumer ranks, other blocks and axes: every layer from each that owes it."""

    HEADS = 4

    @pytest.fixture(
        params=[("LSBHNC", 4, 1), ("LSBHNC", 8, 2), ("BLNHSC", 6, 2)], ids=lambda of: f"{of[0]}-{of[1]}x{of[2]}"
    )
    def theirs(self, request: pytest.FixtureRequest) -> tuple[str, int, int]:
        found: tuple[str, int, int] = request.param
        return found

    def array(self, axes: str, block: int, heads: int) -> Array:
        shape = {"L": LAYERS, "S": 2, "B": 64, "H": heads, "N": block, "C": 4}
        return np.zeros([shape[axis] for axis in axes], np.float32)

    def cache(self, array: Array, axes: str, share: Shard) -> Any:
        return KVCache.of(array, axes, shard=share, model="m")

    def test_layer_by_layer(self, scene: Scene, theirs: tuple[str, int, int], way: dict[str, Any]) -> None:
        axes, block, ranks = theirs
        sources = [fill(self.array("LSBHNC", TOKENS, self.HEADS // 2), seed) for seed in range(2)]
        targets = [self.array(axes, block, self.HEADS // ranks) for _ in range(ranks)]
        producers: list[Producer] = [
            scene.producer(f"p{rank}", self.cache(array, "LSBHNC", shard(self.HEADS, rank, 2)), rank=rank, **way)
            for rank, array in enumerate(sources)
        ]
        consumers: list[Consumer] = [
            scene.consumer(f"d{rank}", self.cache(array, axes, shard(self.HEADS, rank, ranks)), rank=rank, **way)
            for rank, array in enumerate(targets)
        ]
        blocks = list(np.random.default_rng(5).permutation(64)[: -(-COUNT // block)])
        asked: dict[str, Any] = {"prompt": bytes(32), "prompt_tokens": COUNT}
        transfers = [
            consumer.offer("r", consumer.connect([one.address for one in producers]), blocks, sibling=rank, **asked)
            for rank, consumer in enumerate(consumers)
        ]
        for ready in (13, COUNT):
            for layers in (1, 3, LAYERS):
                for producer in producers:
                    producer.stage("r", blocks_for(COUNT), ready=ready, layers=layers, **asked)
        assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
        ours = np.concatenate([self.tokens(array, "LSBHNC", blocks_for(COUNT)) for array in sources], axis=2)
        arrived = np.concatenate([self.tokens(array, axes, blocks) for array in targets], axis=2)
        assert (ours[..., :COUNT, :] == arrived[..., :COUNT, :]).all()

    def tokens(self, array: Array, axes: str, blocks: list[int]) -> Array:
        """Layers, sides, heads, tokens, content of a prompt."""
        chosen = np.transpose(array, [axes.index(axis) for axis in "LSHBNC"])[:, :, :, blocks]
        return chosen.reshape(*chosen.shape[:3], -1, chosen.shape[5])


@pytest.mark.parametrize(
    ("axes", "apart"), [("LSBNHC", True), ("LBSNHC", True), ("BLSNHC", False), ("BHLSNC", False)]
)
def test_layers_that_lie_side_by_side_go_together_but_for_those_that_land(axes: str, apart: bool) -> None:
    sizes = {"L": 3, "S": 2, "B": 8, "N": 4, "H": 2, "C": 8}
    cache = KVCache.of(np.zeros([sizes[axis] for axis in axes], np.float32), axes, heads=2)
    template = PairTemplate(cache.geometry, cache.geometry)
    for setting in ("layer", "auto"):
        streaming = streaming_of(setting, template)
        assert streaming.stream is Stream.LAYER
        some = Reach(4, Ahead(8, (2,)))
        assert streaming.reach(some, 12) == (some if apart else Reach(4))
        assert streaming.reach(some, 12, lands=True) == some
    assert streaming_of("request", template).stream is Stream.REQUEST


@pytest.mark.parametrize("landing", ["direct", "landing", "auto"])
def test_layers_of_blocks_outermost(scene: Scene, landing: str) -> None:
    """Directly they go when all are there, through slots as they come; `auto` lands what a producer tells layer by
    layer, though with these costs a transfer that is left whole would go directly."""

    def array() -> Array:
        return np.zeros((64, LAYERS, 2, TOKENS, 2, 4), np.float32)

    costs = Costs(part=1e-9, descriptor=1e-12, wire=1e9, copy=8e9)
    settings = {"landing": landing, "slot_bytes": 1024, "landing_bytes": 4096, "landing_costs": costs, "layers": True}
    producer = scene.producer(cache=KVCache.of(fill(array()), "BLSNHC", heads=2, model="m"), **settings)
    consumer = scene.consumer(cache=KVCache.of(array(), "BLSNHC", heads=2, model="m"), **settings)
    link = consumer.connect(producer.address)
    push = Pushed(producer, consumer, "r", blocks_for(COUNT), blocks_for(COUNT, 20)[::-1], COUNT)
    transfer = push.offer(link)
    push.stage(layers=2)
    blocks = array_of(consumer)[push.target]
    if landing != "direct":
        until(lambda: (array_of(consumer)[push.target, :2] == array_of(producer)[push.source, :2]).all())
    push.stage(layers=3)
    assert not array_of(consumer)[push.target, 3:].any()
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert (array_of(consumer)[push.target] == array_of(producer)[push.source]).all()
    assert not blocks.any()
    assert (producer.stats()["writes"] > 1) is (landing != "direct")


def test_auto_goes_directly_where_layers_are_not_told(scene: Scene) -> None:
    costs = Costs(part=1e-9, descriptor=1e-12, wire=1e9, copy=8e9)
    settings = {"landing": "auto", "slot_bytes": 1024, "landing_bytes": 4096, "landing_costs": costs}
    push, link = pushed(scene, **settings)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.scene_producer.stats()["writes"] == 1, "slots hold less"
