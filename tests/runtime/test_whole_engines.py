"""Engines of several ranks: who is told how many offers come, who is not needed, and where all ranks are."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from pushkv import Consumer, Kind, KVCache, Link, Outcome, Producer, prompt_digest
from pushkv.core.commands import Command
from pushkv.core.layouts import shard
from pushkv.errors import GeometryError
from runtime.scene import WAIT, Scene, array_of, cache_of, fill, memory_of, same_tokens, until

HEADS = 4
DIGEST = prompt_digest(range(10))
ASKED = {"prompt": DIGEST, "prompt_tokens": 10}
SOURCE, TARGET = [9, 3, 5], [1, 60, 2]


def share(rank: int, ranks: int) -> KVCache:
    memory = memory_of(heads=max(1, HEADS // ranks))
    return cache_of(fill(memory, rank), shard(HEADS, rank, ranks))


def producers_of(scene: Scene, ranks: int) -> list[Producer]:
    made = [scene.producer(cache=share(rank, ranks), rank=rank) for rank in range(ranks)]
    for producer in made:
        producer.introduce([one.address for one in made])
    return made


def consumers_of(scene: Scene, ranks: int) -> list[Consumer]:
    caches = [share(rank, ranks) for rank in range(ranks)]
    return [
        scene.consumer(cache=cache, rank=rank, fellows=[one.geometry for one in caches if one is not cache])
        for rank, cache in enumerate(caches)
    ]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (1, 2), (2, 1), (2, 4), (8, 2)])
def test_a_stage_waits_for_as_many_offers_as_the_consumers_say(scene: Scene, ours: int, theirs: int) -> None:
    """With 8 ranks and 4 heads every head is there twice, and half of the producer ranks are not needed."""
    producers, consumers = producers_of(scene, ours), consumers_of(scene, theirs)
    links = [consumer.connect_engine(producers[-1].address) for consumer in consumers]
    stages = [producer.stage("r", SOURCE, siblings=None, **ASKED) for producer in producers]
    transfers = [links_offer(consumer, link) for consumer, link in zip(consumers, links, strict=True)]
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
    assert all(stage.wait_released(WAIT) for stage in stages)
    needed = {producer.agent for producer in producers for link in links for pair in link.pairs
              if pair.agent == producer.agent and pair.template.writes}  # fmt: skip
    for producer, stage in zip(producers, stages, strict=True):
        assert stage.outcome is (Outcome.COMPLETE if producer.agent in needed else Outcome.CANCELLED)


def links_offer(consumer: Consumer, link: Link):  # type: ignore[no-untyped-def]
    return consumer.offer("r", link, TARGET, **ASKED)


def test_a_stage_does_not_end_with_the_first_of_two_ranks(scene: Scene) -> None:
    (producer,), consumers = producers_of(scene, 1), consumers_of(scene, 2)
    links = [consumer.connect_engine(producer.address) for consumer in consumers]
    stage = producer.stage("r", SOURCE, siblings=None, **ASKED)
    assert links_offer(consumers[0], links[0]).wait(WAIT) is Outcome.COMPLETE
    assert stage.outcome is None
    assert links_offer(consumers[1], links[1]).wait(WAIT) is Outcome.COMPLETE
    assert stage.wait(WAIT) is Outcome.COMPLETE
    part = array_of(producer)[:, :, :, 2:]
    assert same_tokens(part, SOURCE, array_of(consumers[1]), TARGET, 0, 10)


def test_a_request_with_n_above_one(scene: Scene) -> None:
    (producer,), (consumer,) = producers_of(scene, 1), consumers_of(scene, 1)
    link = consumer.connect_engine(producer.address)
    stage = producer.stage("r", SOURCE, siblings=None, **ASKED)
    assert consumer.offer("r", link, TARGET, siblings=2, **ASKED).wait(WAIT) is Outcome.COMPLETE
    assert stage.outcome is None
    assert consumer.offer("r", link, [7, 8, 9], sibling=1, siblings=2, **ASKED).wait(WAIT) is Outcome.COMPLETE
    assert stage.wait(WAIT) is Outcome.COMPLETE


class TestDeclined:
    @pytest.mark.parametrize("staged_first", [True, False])
    def test_its_stage_ends_at_once(self, scene: Scene, staged_first: bool) -> None:
        (producer,), consumers = producers_of(scene, 1), consumers_of(scene, 2)
        links = [consumer.connect_engine(producer.address) for consumer in consumers]
        stage = producer.stage("r", SOURCE, siblings=None, **ASKED) if staged_first else None
        for consumer, link in zip(consumers, links, strict=True):
            declined = consumer.decline("r", link)
            assert declined is not None
            assert declined.wait_released(WAIT)
            assert declined.outcome is Outcome.CANCELLED
        stage = stage or producer.stage("r", SOURCE, siblings=None, **ASKED)
        assert stage.wait_released(WAIT)
        assert stage.outcome is Outcome.CANCELLED

    def test_by_one_sibling_the_other_is_served(self, scene: Scene) -> None:
        (producer,), (consumer,) = producers_of(scene, 1), consumers_of(scene, 1)
        link = consumer.connect_engine(producer.address)
        stage = producer.stage("r", SOURCE, siblings=None, **ASKED)
        declined = consumer.decline("r", link, sibling=0, siblings=2)
        assert declined is not None
        assert declined.wait_released(WAIT)
        assert stage.outcome is None
        assert consumer.offer("r", link, TARGET, sibling=1, siblings=2, **ASKED).wait(WAIT) is Outcome.COMPLETE
        assert stage.wait_released(WAIT)

    def test_to_a_producer_that_is_gone_it_holds_nothing(self, scene: Scene) -> None:
        (producer,), consumer = producers_of(scene, 1), scene.consumer(cache=share(0, 1), silence=1.0)
        link = consumer.connect_engine(producer.address)
        scene.kill(producer)
        until(lambda: not link.alive)
        declined = consumer.decline("r", link)
        assert declined is not None
        assert declined.wait_released(WAIT)
        assert consumer.held_blocks == 0


def test_a_first_block_a_group(scene: Scene) -> None:
    """A window group has no blocks for what it has forgotten."""
    caches = []
    for _ in range(2):
        memory = fill(memory_of())
        wide, narrow = memory[:1], memory[1:]
        one = KVCache.of(wide, "LSBHNC", layers=["wide"])
        other = KVCache.of(narrow, "LSBHNC", layers=["narrow"], kind=Kind.WINDOW, window=1)
        assert one.regions == other.regions
        groups = (*one.geometry.groups, *other.geometry.groups)
        caches.append(KVCache.from_groups(groups, one.regions, one.backend, [wide, narrow]))
    producer, consumer = scene.producer(cache=caches[0]), scene.consumer(cache=caches[1])
    link = consumer.connect(producer.address)
    with pytest.raises(GeometryError, match="1 first blocks are given for 2 cache groups"):
        consumer.offer("r", link, [[1, 2], [3]], first_block=[0], **ASKED)
    transfer = consumer.offer("r", link, [[1, 60, 2], [17]], first_block=[0, 2], stop=9, **ASKED)
    producer.stage("r", [[9, 3, 5], [20, 21, 22]], **ASKED)
    assert transfer.wait(WAIT) is Outcome.COMPLETE


def test_whoever_waits_for_events_is_woken(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    woken: SimpleQueue[Command] = SimpleQueue()
    consumer.on_event = woken.put
    link = consumer.connect(producer.address)
    producer.stage("r", SOURCE, **ASKED)
    consumer.offer("r", link, TARGET, **ASKED)
    told = woken.get(timeout=WAIT)
    assert told in consumer.events()
