"""Transfers that go as they should, and those that the engine or the other side ends, over an immediate network."""

from __future__ import annotations

import numpy as np
import pytest

from pushkv import Consumer, Limits, Link, Outcome, Producer, prompt_digest
from pushkv.core.commands import Ended, Released, StageEnded, StageReleased
from pushkv.core.layouts import shard
from pushkv.errors import GeometryError, ProtocolError
from runtime.scene import (
    QUICK,
    TOKENS,
    WAIT,
    Gate,
    Pushed,
    Scene,
    array_of,
    cache_of,
    fill,
    knows,
    memory_of,
    same_tokens,
    until,
)


@pytest.fixture
def producer(scene: Scene) -> Producer:
    return scene.producer()


@pytest.fixture
def consumer(scene: Scene) -> Consumer:
    return scene.consumer()


@pytest.fixture
def link(producer: Producer, consumer: Consumer) -> Link:
    return consumer.connect(producer.address)


def pushed(producer: Producer, consumer: Consumer, name: str = "r", tokens: int = 10, **more: int) -> Pushed:
    count = -(-tokens // TOKENS)
    source, target = more.get("source", 5), more.get("target", 40)
    return Pushed(producer, consumer, name, list(range(source, source + count))[::-1],
                  list(range(target, target + count)), tokens)  # fmt: skip


def test_an_offer_that_waits_for_its_prompt(producer: Producer, consumer: Consumer, link: Link) -> None:
    push = pushed(producer, consumer)
    transfer = push.offer(link)
    until(lambda: producer.stats().get("transfers complete", 0) == 0 and consumer.held_blocks == 3)
    stage = push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert transfer.wait_released(WAIT)
    assert push.arrived()
    assert stage.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait_released(WAIT)
    until(lambda: consumer.held_blocks == 0)


def test_a_prompt_that_waits_for_its_offer(producer: Producer, consumer: Consumer, link: Link) -> None:
    push = pushed(producer, consumer)
    stage = push.stage()
    assert stage.outcome is None
    transfer = push.offer(link)
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived()


def test_only_the_missing_suffix_moves(producer: Producer, consumer: Consumer, link: Link) -> None:
    push = pushed(producer, consumer, tokens=16)
    push.target = list(range(40, 44))
    transfer = push.offer(link, start=8, blocks=push.target[2:], first_block=2)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived(8, 16)
    assert not array_of(consumer)[:, :, push.target[:2]].any()


def test_many_at_once_each_with_its_own_bytes(scene: Scene) -> None:
    producer = scene.producer(cache=cache_of(fill(memory_of(512))))
    consumer = scene.consumer(cache=cache_of(memory_of(512)))
    link = consumer.connect(producer.address)
    order = np.random.default_rng(1).permutation(512)
    cuts = [slice(3 * number, 3 * number + 3) for number in range(160)]
    pushes = [
        Pushed(producer, consumer, f"r{n}", order[cut].tolist(), order[::-1][cut].tolist(), 9 + n % 4)
        for n, cut in enumerate(cuts)
    ]
    half = len(pushes) // 2
    transfers = [push.offer(link) for push in pushes[:half]]
    stages = [push.stage() for push in pushes]
    transfers += [push.offer(link) for push in pushes[half:]]
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
    assert all(push.arrived() for push in pushes)
    assert all(stage.wait_released(WAIT) for stage in stages)
    assert producer.stats()["transfers complete"] == consumer.stats()["transfers complete"] == 160
    assert producer.stats()["bytes"] == sum(push.tokens for push in pushes) * 2 * 2 * 2 * 4 * 4


def test_parts_arrive_as_more_blocks_are_ready(producer: Producer, consumer: Consumer, link: Link) -> None:
    push = pushed(producer, consumer, tokens=12)
    transfer = push.offer(link)
    ours = array_of(producer)
    for ready in (3, 6, 9):
        stage = push.stage(ready=ready)
        until(lambda ready=ready: push.arrived(0, ready // TOKENS * TOKENS))  # type: ignore[misc]
        assert transfer.outcome is None
    before = ours[:, :, push.source[0], :, 0].copy()
    ours[:, :, push.source[0], :, 0] = 7  # what has been sent is not sent again
    assert push.stage() is stage
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert (array_of(consumer)[:, :, push.target[0], :, 0] == before).all()
    assert push.arrived(1, 12)
    assert producer.stats()["writes"] == 3


def test_blocks_that_are_copied_whole_wait_until_they_are(scene: Scene) -> None:
    """Each block is written once, when all of it is there; the last one with what lies behind the prompt's end."""
    producer = scene.producer(cache=cache_of(fill(memory_of()), whole_blocks=True))
    consumer = scene.consumer(cache=cache_of(memory_of(), whole_blocks=True))
    link = consumer.connect(producer.address)
    push = pushed(producer, consumer, tokens=11)
    transfer = push.offer(link)
    ours, theirs = array_of(producer), array_of(consumer)
    for ready in (3, 6, 9, 10):
        push.stage(ready=ready)
        until(lambda ready=ready: push.arrived(0, ready // TOKENS * TOKENS))  # type: ignore[misc]
        ours[:, :, push.source[ready // TOKENS]] = 7 + ready  # it was not complete: nothing of it has gone
        assert not theirs[:, :, push.target[ready // TOKENS]].any()
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert (ours[:, :, push.source] == theirs[:, :, push.target]).all()
    assert producer.stats()["bytes"] == 3 * ours[:, :, 0].nbytes
    with pytest.raises(GeometryError, match="blocks of 4 are copied whole"):
        consumer.offer("other", link, [50, 51], prompt=prompt_digest([1]), prompt_tokens=8, start=3)


@pytest.mark.parametrize(("free", "start"), [(True, 0), (True, 4), (True, 2), (False, 0)])
def test_a_last_block_whose_rest_is_free_is_copied_whole(scene: Scene, free: bool, start: int) -> None:
    """With one that begins in a block it is not: the tokens before may be others'."""
    producer = scene.producer(cache=cache_of(fill(memory_of())))
    consumer = scene.consumer(cache=cache_of(memory_of()), free_tail=free)
    link = consumer.connect(producer.address)
    push = pushed(producer, consumer, tokens=11)
    first = start // TOKENS
    transfer = push.offer(link, start=start, first_block=first, blocks=push.target[first:], stop=10)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    assert push.arrived(start, 10)
    theirs = array_of(consumer)[:, :, push.target]
    whole = free and start % TOKENS == 0
    assert (array_of(producer)[:, :, push.source[2]] == theirs[:, :, 2]).all() == whole
    assert theirs[:, :, 2, :, 2:].any() == whole
    assert not theirs[:, :, :first].any()
    assert not theirs[:, :, first, :, : start % TOKENS].any()
    tokens = 3 * TOKENS - start if whole else 10 - start
    assert producer.stats()["bytes"] == tokens * theirs[:, :, 0, :, 0].nbytes


class TestFences:
    def test_nothing_is_read_before_the_fence(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push, other = pushed(producer, consumer), pushed(producer, consumer, "other", source=20, target=50)
        gate = Gate()
        transfer = push.offer(link)
        push.stage(fence=gate)
        after = other.offer(link)
        other.stage()
        assert after.wait(WAIT) is Outcome.COMPLETE, "one fence does not hold up another prompt"
        assert transfer.outcome is None
        assert not array_of(consumer)[:, :, push.target].any()
        fill(array_of(producer), 9)
        gate.open = True
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived()

    def test_calls_for_one_prompt_keep_their_order(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push, gate = pushed(producer, consumer, tokens=12), Gate()
        transfer = push.offer(link)
        knows(producer, 1)
        push.stage(fence=gate, ready=4)
        push.stage()
        until(lambda: producer.ask(lambda _: "x") == "x")
        assert transfer.outcome is None
        gate.open = True
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert producer.stats()["writes"] == 2
        assert push.arrived()

    def test_a_fence_that_fails_costs_its_prompt_alone(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        push, other = pushed(producer, consumer), pushed(producer, consumer, "other", source=20, target=50)
        transfer = push.offer(link)
        stage = push.stage(fence=Gate(error="the kernel faulted"))
        assert stage.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "the kernel faulted" in stage.detail
        assert stage.wait_released(WAIT)
        after = other.offer(link)
        other.stage()
        assert after.wait(WAIT) is Outcome.COMPLETE
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR, "long before its deadline"
        assert "the kernel faulted" in transfer.detail
        assert transfer.wait_released(WAIT)

    def test_no_fence_ends_the_thread(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        """Whatever the methods of somebody's plug-in do."""

        class Leaves(Gate):
            def done(self) -> bool:
                raise SystemExit(3)

        for name, fence in (("leaves", Leaves()), ("is none", object())):
            push = pushed(producer, consumer, name)
            transfer = push.offer(link)
            assert push.stage(fence=fence).wait(WAIT) is Outcome.TRANSPORT_ERROR
            assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
            assert "its fence failed" in transfer.detail
            assert transfer.wait_released(WAIT)
        other = pushed(producer, consumer)
        after = other.offer(link)
        other.stage()
        assert after.wait(WAIT) is Outcome.COMPLETE

    @pytest.mark.parametrize("how", ["preempt", "unstage"])
    def test_taken_back_before_the_fence(self, producer: Producer, consumer: Consumer, link: Link, how: str) -> None:
        push, gate = pushed(producer, consumer), Gate()
        transfer = push.offer(link)
        stage = push.stage(fence=gate)
        back = producer.preempt("r") if how == "preempt" else producer.unstage("r")
        assert back is stage
        assert stage.wait_released(WAIT), "nothing has read these blocks"
        if how == "unstage":
            assert stage.wait(WAIT) is Outcome.CANCELLED
        gate.open = True
        push.source = push.source[::-1]
        assert push.stage().wait(WAIT) is Outcome.COMPLETE
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived()


class TestPreemption:
    def test_it_goes_on_from_the_first_unsent_token(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer, tokens=12)
        transfer = push.offer(link)
        stage = push.stage(ready=6)
        until(lambda: push.arrived(0, 4))
        assert producer.preempt("r") is stage
        assert stage.wait_released(WAIT)
        assert stage.outcome is None
        sent = array_of(consumer).copy()
        push.source = [30, 31, 32]
        assert push.stage(ready=3) is stage
        assert not stage.released
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert stage.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived(4, 12)
        assert same_tokens(sent, push.target, array_of(consumer), push.target, 0, 4), "no part goes twice"
        assert producer.stats()["writes"] == 2

    def test_without_coming_back(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer, tokens=12)
        transfer = push.offer(link)
        stage = push.stage(ready=6)
        until(lambda: push.arrived(0, 4))
        producer.preempt("r")
        assert stage.wait_released(WAIT)
        producer.unstage("r")
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert transfer.wait_released(WAIT)
        assert stage.wait(WAIT) is Outcome.CANCELLED
        assert stage.released
        until(lambda: not producer._stages)

    def test_of_something_unknown(self, producer: Producer) -> None:
        assert producer.preempt("x") is None
        assert producer.unstage("x") is None
        assert producer.events() == []


class TestEndings:
    def test_unstaging_cancels(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        stage = push.stage(ready=4)
        until(lambda: push.arrived(0, 4))
        producer.unstage("r")
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert "producer's engine" in transfer.detail
        assert stage.wait(WAIT) is Outcome.CANCELLED
        assert transfer.wait_released(WAIT)
        assert stage.wait_released(WAIT)

    @pytest.mark.parametrize("ready", [None, 0, 4])
    def test_cancelling_before_and_during(
        self, producer: Producer, consumer: Consumer, link: Link, ready: int | None
    ) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        stage = None if ready is None else push.stage(ready=ready)
        consumer.cancel(transfer, "the client left")
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert transfer.detail == "the client left"
        assert transfer.wait_released(WAIT)
        stage = stage or push.stage()
        assert stage.wait(WAIT) is Outcome.CANCELLED
        assert stage.wait_released(WAIT)

    def test_cancelling_what_is_over(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait_released(WAIT)
        consumer.cancel(transfer)
        assert pushed(producer, consumer, "s").stage() is not None
        assert transfer.outcome is Outcome.COMPLETE

    def test_a_stage_that_goes_on_after_its_end_reads_nothing(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        push, gate = pushed(producer, consumer), Gate()
        transfer = push.offer(link)
        stage = push.stage(ready=4)
        until(lambda: push.arrived(0, 4))
        assert push.stage(ready=8, fence=gate) is stage
        consumer.cancel(transfer)
        assert stage.wait(WAIT) is Outcome.CANCELLED
        gate.open = True
        assert stage.wait_released(WAIT)
        until(lambda: not producer._side._fenced)
        assert producer.ask(lambda _: str(producer._side.machine.staged)) == "0"
        assert producer.stats()["writes"] == 1

    def test_by_the_deadline(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link, deadline=0.05)
        assert transfer.wait(WAIT) is Outcome.EXPIRED
        assert transfer.wait_released(WAIT)
        stage = push.stage(deadline=0.05)
        assert stage.wait(WAIT) is Outcome.EXPIRED
        assert stage.wait_released(WAIT)

    def test_another_prompt(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link, prompt=prompt_digest([1], salt="mine"))
        push.stage(prompt=prompt_digest([1], salt="theirs"))
        assert transfer.wait(WAIT) is Outcome.REJECTED_PROMPT
        assert transfer.wait_released(WAIT)
        assert not array_of(consumer).any()

    def test_another_number_of_tokens(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link, prompt_tokens=9)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.REJECTED_PROMPT
        assert "9 tokens" in transfer.detail
        assert "10" in transfer.detail

    @pytest.mark.parametrize("side", ["source", "target"])
    def test_blocks_that_do_not_reach_fail_alone(
        self, producer: Producer, consumer: Consumer, link: Link, side: str
    ) -> None:
        push, other = pushed(producer, consumer), pushed(producer, consumer, "other", source=20, target=50)
        fine = other.offer(link)
        transfer = push.offer(link, blocks=push.target[:2] if side == "target" else push.target)
        stage = push.stage(blocks=push.source[:2] if side == "source" else push.source)
        assert transfer.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert transfer.wait_released(WAIT)
        assert stage.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert f"the {side} table holds [0, 2)" in stage.detail == transfer.detail
        other.stage()
        assert fine.wait(WAIT) is Outcome.COMPLETE
        assert other.arrived()

    def test_numbers_that_contradict_an_earlier_call_end_the_stage(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        stage = push.stage(ready=8)
        until(lambda: push.arrived(0, 8))
        assert push.stage(ready=4) is stage
        assert stage.wait(WAIT) is Outcome.REJECTED_TOKENS
        assert "goes back from 8 to 4" in stage.detail
        assert stage.wait_released(WAIT)
        assert transfer.wait(WAIT) is Outcome.REJECTED_TOKENS

    def test_another_number_of_siblings_than_at_first_ends_the_stage(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        """With the one it would end early, with the other it would wait in vain."""
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        stage = push.stage(ready=4, siblings=2)
        until(lambda: push.arrived(0, 4))
        assert push.stage(ready=8) is stage
        assert stage.wait(WAIT) is Outcome.REJECTED_TOKENS
        assert stage.detail == "r waits for siblings: 2, and now 1: say the same in every call"
        assert transfer.wait(WAIT) is Outcome.REJECTED_TOKENS
        assert stage.wait_released(WAIT)

    def test_a_stage_beyond_the_limit_ends_alone(self, scene: Scene) -> None:
        producer = scene.producer(limits=Limits(unmatched=2))
        stages = [producer.stage(f"r{n}", [n], prompt=bytes(32), prompt_tokens=4) for n in range(3)]
        assert stages[2].wait(WAIT) is Outcome.REJECTED_TOKENS
        assert stages[2].wait_released(WAIT)
        assert not stages[0].released

    def test_an_offer_too_large_for_a_frame_fails_alone(self, scene: Scene) -> None:
        array = np.zeros((1, 2, 1 << 20, 1, 1, 1), np.float32)
        producer, consumer = scene.producer(cache=cache_of(array)), scene.consumer(cache=cache_of(array.copy()))
        link = consumer.connect(producer.address)
        large = consumer.offer("large", link, np.arange(1 << 20), prompt=bytes(32), prompt_tokens=1 << 20)
        assert large.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert "offer fewer blocks" in large.detail
        assert large.wait_released(WAIT)
        small = consumer.offer("small", link, np.arange(8), prompt=bytes(32), prompt_tokens=8)
        producer.stage("small", np.arange(8), prompt=bytes(32), prompt_tokens=8)
        assert small.wait(WAIT) is Outcome.COMPLETE


class TestAttempts:
    def test_a_later_one_supersedes(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        first = push.offer(link)
        fresh = [56, 57, 58]
        second = push.offer(link, attempt=1, blocks=fresh)
        assert first.wait(WAIT) is Outcome.SUPERSEDED
        assert first.wait_released(WAIT)
        stage = push.stage()
        assert second.wait(WAIT) is Outcome.COMPLETE
        assert stage.wait(WAIT) is Outcome.COMPLETE
        assert same_tokens(array_of(producer), push.source, array_of(consumer), fresh, 0, 10)
        assert not array_of(consumer)[:, :, push.target].any()

    def test_one_on_held_blocks_is_refused_alone_and_not_released_before_them(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        push = pushed(producer, consumer)
        first = push.offer(link)
        second = push.offer(link, attempt=1)
        assert second.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert "lacks proof" in second.detail
        assert first.outcome is None
        assert not second.released, "its blocks are the first one's, who has them in custody"
        assert Released(second.key) not in consumer.events()
        push.stage()
        assert first.wait(WAIT) is Outcome.COMPLETE
        assert second.wait_released(WAIT)

    def test_an_earlier_one_is_refused_alone(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        newer = push.offer(link, attempt=3)
        older = push.offer(link, attempt=2, blocks=[56, 57, 58])
        assert older.wait(WAIT) is Outcome.SUPERSEDED
        assert older.wait_released(WAIT)
        push.stage()
        assert newer.wait(WAIT) is Outcome.COMPLETE

    def test_the_same_one_again_is_refused_to_the_caller(
        self, producer: Producer, consumer: Consumer, link: Link
    ) -> None:
        push = pushed(producer, consumer)
        first = push.offer(link)
        with pytest.raises(ProtocolError, match="count attempt up"):
            push.offer(link, blocks=[56, 57, 58])
        push.stage()
        assert first.wait(WAIT) is Outcome.COMPLETE


def test_siblings_of_one_prompt(producer: Producer, consumer: Consumer, link: Link) -> None:
    push = pushed(producer, consumer)
    stage = push.stage(siblings=2)
    first = push.offer(link, sibling=0)
    assert first.wait(WAIT) is Outcome.COMPLETE
    assert stage.outcome is None
    second = push.offer(link, sibling=1, blocks=[56, 57, 58])
    assert second.wait(WAIT) is Outcome.COMPLETE
    assert stage.wait(WAIT) is Outcome.COMPLETE
    assert same_tokens(array_of(consumer), push.target, array_of(consumer), [56, 57, 58], 0, 10)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2), (2, 1), (4, 2)])
def test_several_ranks(scene: Scene, ours: int, theirs: int) -> None:
    """Each consumer rank gets its heads from whichever producer ranks have them."""
    heads, whole = 4, fill(memory_of(heads=4))
    producers, consumers = [], []
    for rank in range(ours):
        part = whole[:, :, :, rank * heads // ours : (rank + 1) * heads // ours].copy()
        cache = cache_of(part, shard(heads, rank, ours))
        producers.append(scene.producer(cache=cache, rank=rank))
    for rank in range(theirs):
        cache = cache_of(memory_of(heads=heads // theirs), shard(heads, rank, theirs))
        consumers.append(scene.consumer(cache=cache, rank=rank))
    links = [consumer.connect([producer.address for producer in producers]) for consumer in consumers]
    digest, source, target = prompt_digest(range(10)), [9, 3, 5], [1, 60, 2]
    asked = {"prompt": digest, "prompt_tokens": 10}
    transfers = [
        consumer.offer("r", link, target, sibling=rank, **asked)
        for rank, (consumer, link) in enumerate(zip(consumers, links, strict=True))
    ]
    readers = [sum(bool(pair.template.owed((0, 10))) for link in links for pair in link.pairs if
               pair.agent == producer.agent) for producer in producers]  # fmt: skip
    for producer, siblings in zip(producers, readers, strict=True):
        producer.stage("r", source, siblings=siblings, **asked)
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
    for rank, consumer in enumerate(consumers):
        part = whole[:, :, :, rank * heads // theirs : (rank + 1) * heads // theirs]
        assert same_tokens(part, source, array_of(consumer), target, 0, 10)


class TestWhatTheEngineSees:
    def test_events_and_counts(self, producer: Producer, consumer: Consumer, link: Link) -> None:
        push = pushed(producer, consumer)
        transfer = push.offer(link)
        stage = push.stage()
        assert transfer.wait_released(WAIT)
        assert stage.wait_released(WAIT)
        until(lambda: producer.stats().get("transfers complete") == 1)
        assert consumer.events() == [Ended(transfer.key, Outcome.COMPLETE), Released(transfer.key)]
        assert consumer.events() == []
        assert {StageEnded("r", Outcome.COMPLETE), StageReleased("r")} <= set(producer.events())
        stats = producer.stats()
        assert stats["writes"] == 1
        assert stats["bytes"] == 10 * 2 * 2 * 2 * 4 * 4
        assert stats["descriptors"] <= stats["descriptors before"]
        assert stats["errors"] == consumer.stats()["errors"] == 0
        assert consumer.path(link.agents[0]) == "memory: a copy in this process"

    @pytest.mark.parametrize(
        ("blocks", "message"),
        [
            ([1, 64], "1 to 64; it has 64"),
            ([-1], "-1 to -1"),
            ([1 << 40], "it has 64"),
            ([1.5], "no whole numbers"),
            (["x"], "no whole numbers"),
            ([[1], [2]], "2 block tables were given for 1"),
        ],
    )
    def test_blocks_that_are_none_raise(
        self, producer: Producer, consumer: Consumer, link: Link, blocks: list[object], message: str
    ) -> None:
        with pytest.raises(GeometryError, match=message):
            consumer.offer("r", link, blocks, prompt=bytes(32), prompt_tokens=4)
        with pytest.raises(GeometryError, match=message):
            producer.stage("r", blocks, prompt=bytes(32), prompt_tokens=4)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"transfer": ""}, "has 0 characters"),
            ({"transfer": "x" * 600}, "has 600 characters"),
            ({"prompt": b"short"}, "has 5 bytes; make it with pushkv.prompt_digest"),
            ({"deadline": 0}, "deadline is 0 s"),
            ({"deadline": float("nan")}, "deadline is nan s"),
            ({"deadline": 90_000}, "at most a day"),
        ],
    )
    def test_what_no_peer_would_take_raises(
        self, producer: Producer, consumer: Consumer, link: Link, wrong: dict[str, object], message: str
    ) -> None:
        asked = {"transfer": "r", "prompt": bytes(32), "prompt_tokens": 4, "blocks": [1], **wrong}
        with pytest.raises(ProtocolError, match=message):
            producer.stage(**asked)  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match=message):
            consumer.offer(link=link, **asked)  # type: ignore[arg-type]

    def test_tokens_out_of_range_raise(self, consumer: Consumer, link: Link) -> None:
        with pytest.raises(GeometryError, match="tokens 3 to 9 of 8"):
            consumer.offer("r", link, [1, 2], prompt=bytes(32), prompt_tokens=8, start=3, stop=9)

    def test_thousands_of_transfers_leave_nothing_behind(self, scene: Scene) -> None:
        producer = scene.producer(limits=QUICK)
        consumer = scene.consumer(limits=QUICK)
        link = consumer.connect(producer.address)
        for first in range(0, 3_000, 50):
            transfers = []
            for number in range(50):
                asked = {"prompt": bytes(32), "prompt_tokens": 4}
                transfers.append(consumer.offer(f"r{first + number}", link, [number], **asked))
                if number % 5:
                    producer.stage(f"r{first + number}", [number], **asked)
            for transfer in transfers[::5]:
                consumer.cancel(transfer)
            assert all(transfer.wait_released(WAIT) for transfer in transfers)

        def small() -> bool:  # the producer's stages end a moment after the consumer's transfers
            return all(size <= 8 for end in (producer, consumer) for size in sizes_of(end).values())

        until(small, "an end of everything")


def sizes_of(endpoint: Producer | Consumer) -> dict[str, int]:
    """How much each container of an endpoint holds, those apart that are bounded by a number of their own."""
    side = endpoint._side
    bounded = {"_events", "_early", "_untold", "dead"}
    owners = [endpoint, side, side.machine, *vars(side.machine).get("_customers", {}).values(),
              *vars(side.machine).get("_pairings", {}).values()]  # fmt: skip
    sizes = {}
    for owner in owners:
        slots = {name: getattr(owner, name) for name in getattr(type(owner), "__slots__", ())}
        for name, value in {**slots, **getattr(owner, "__dict__", {})}.items():
            if isinstance(value, (dict, list, set)) or type(value).__name__ == "deque":
                sizes[f"{type(owner).__name__}.{name}"] = len(value)
    return {name: size for name, size in sizes.items() if name.rpartition(".")[2] not in bounded}
