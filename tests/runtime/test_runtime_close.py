"""Closing: what it waits for, what it refuses, and what it keeps."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest

from pushkv import Consumer, Link, Outcome, Producer
from pushkv.errors import EndpointClosed, HandshakeRefused, TransportUnavailable
from pushkv.runtime import life as life_module
from pushkv.transport.base import Transport
from pushkv.transport.memory import Network
from runtime.scene import WAIT, Pushed, Scene, cache_of, fill, knows, memory_of, until


def made(scene: Scene) -> tuple[Producer, Consumer, Link, Pushed]:
    producer, consumer = scene.producer(cache=cache_of(fill(memory_of()))), scene.consumer()
    return producer, consumer, consumer.connect(producer.address), Pushed(producer, consumer, "r", [1, 2], [3, 4], 8)


def test_a_closed_endpoint_takes_nothing_and_may_be_closed_again(scene: Scene) -> None:
    producer, consumer, link, push = made(scene)
    assert producer.close()
    assert producer.close()
    assert consumer.close()
    assert consumer.close()
    for call in (
        push.stage,
        lambda: push.offer(link),
        lambda: producer.preempt("r"),
        lambda: producer.unstage("r"),
        lambda: consumer.connect(producer.address),
        lambda: consumer.path(link.agents[0]),
    ):
        with pytest.raises(EndpointClosed, match="is closed; make another endpoint"):
            call()
    assert not producer._stages
    assert not consumer._transfers
    assert producer.stats()["errors"] == 0


def test_as_a_context_manager(scene: Scene) -> None:
    with scene.producer() as producer, scene.consumer() as consumer:
        assert consumer.connect(producer.address).alive
    assert not producer._transfer._thread.is_alive()
    assert not consumer._control._thread.is_alive()


def test_a_producer_ends_what_is_open(scene: Scene) -> None:
    producer, _, link, push = made(scene)
    transfer = push.offer(link)
    knows(producer, 1)
    stage = producer.stage("other", [9], prompt=bytes(32), prompt_tokens=4)
    assert producer.close(WAIT)
    assert transfer.wait(WAIT) is Outcome.REJECTED_CLOSING
    assert transfer.wait_released(WAIT)
    assert stage.wait(WAIT) is Outcome.REJECTED_CLOSING
    assert stage.wait_released(WAIT)


def test_a_consumer_waits_for_custody_of_what_was_just_offered(scene: Scene) -> None:
    """Handed over and not yet taken up is open, too."""
    for number in range(20):
        producer, consumer, link, push = made(scene)
        transfer = push.offer(link)
        assert consumer.close(WAIT)
        assert transfer.outcome is Outcome.CANCELLED
        assert transfer.released
        until(lambda producer=producer: not producer._side.in_custody, f"drained {number}")  # type: ignore[misc]
        producer.close(WAIT)


def test_good_bye_is_noticed_at_once(scene: Scene) -> None:
    """The fixture's silence is longer than these waits."""
    producer, consumer, link, _ = made(scene)
    assert producer.close(WAIT)
    until(lambda: not link.alive)
    other = scene.producer("other")
    consumer.connect(other.address)
    consumer.close(WAIT)
    until(lambda: consumer.agent not in other._side.agents)


def test_memory_in_custody_stays_registered(timed: Callable[[Network], Scene]) -> None:
    scene = timed(Network())
    producer, consumer, link, push = made(scene)
    scene.network.stall(producer.agent)
    transfer, stage = push.offer(link), push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    kept = len(life_module._kept)
    assert consumer.close(0.2) is False
    assert consumer in life_module._kept[kept:]
    assert not transfer.released
    assert producer.close(0.2) is False
    assert not stage.released
    with pytest.raises(EndpointClosed):
        push.stage()
    gc.collect()
    scene.network.release()
    until(lambda: push.arrived(), "a late WRITE lands in memory that is still there")


def test_a_closing_producer_refuses_introductions(timed: Callable[[Network], Scene]) -> None:
    scene = timed(Network())
    producer, _, link, push = made(scene)
    scene.network.stall(producer.agent)
    push.offer(link)
    push.stage()
    until(lambda: producer.stats().get("writes") == 1)
    closing = threading.Thread(target=producer.close, args=(WAIT,))
    closing.start()
    until(lambda: producer._closing)
    other = scene.consumer("other")
    with pytest.raises(HandshakeRefused, match="shutting down; connect to another"):
        other.connect(producer.address)
    scene.network.release()
    closing.join(WAIT)
    assert not closing.is_alive()


def test_two_threads_may_close_at_once(scene: Scene) -> None:
    producer, *_ = made(scene)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(producer.close(WAIT))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert answers == [True] * 4


def test_what_is_submitted_while_it_closes_ends_all_the_same(scene: Scene) -> None:
    for _ in range(10):
        producer, consumer, link, _ = made(scene)
        transfers, stages = [], []
        go = threading.Barrier(2)

        def keep_on(
            producer: Producer = producer, consumer: Consumer = consumer, link: Link = link,
            transfers: list[object] = transfers, stages: list[object] = stages, go: threading.Barrier = go,
        ) -> None:  # fmt: skip
            go.wait()
            for number in range(1000):
                try:
                    transfers.append(
                        consumer.offer(f"r{number}", link, [number % 64], prompt=bytes(32), prompt_tokens=4)
                    )
                    stages.append(producer.stage(f"s{number}", [number % 64], prompt=bytes(32), prompt_tokens=4))
                except EndpointClosed:
                    return

        thread = threading.Thread(target=keep_on)
        thread.start()
        go.wait()
        assert consumer.close(WAIT)
        assert producer.close(WAIT)
        thread.join()
        assert all(one.wait(WAIT) for one in [*transfers, *stages])  # type: ignore[attr-defined]
        assert all(one.wait_released(WAIT) for one in [*transfers, *stages])  # type: ignore[attr-defined]


def test_nothing_is_left_of_an_endpoint_that_did_not_start(scene: Scene) -> None:
    def broken(agent: str) -> Transport:
        raise TransportUnavailable("there is none; install one")

    scene.producer("first").close()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        with pytest.raises(TransportUnavailable, match="install one"):
            Producer(scene._config("p", {}), cache_of(memory_of()), transport=broken)
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 2, "file descriptors given back")
    until(lambda: threading.active_count() <= before[1] + 1)


def test_descriptors_and_threads_are_given_back(scene: Scene) -> None:
    producer = scene.producer()
    scene.consumer("first").connect(producer.address)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(10):
        consumer = scene.consumer(f"d{number}")
        consumer.connect(producer.address)
        consumer.connect(producer.address)
        consumer.close(WAIT)
    until(lambda: len(producer._side.agents) == 1)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 3, "file descriptors given back")
    assert threading.active_count() <= before[1] + 1
