"""Rule 1 where it is hardest to keep: bytes that land when their sender is dead, given up, or forgotten."""

from __future__ import annotations

import time

import pytest

from faults.cast import LARGE, SMALL, Cast, Player, connect, offered, posted, push
from runtime.scene import until

pytestmark = pytest.mark.processes
WAITING = 120
"""Where the blocks of a transfer that never starts are."""


def caught(producer: Player, consumer: Player) -> None:
    """A large WRITE whose target is stopped before its first byte landed, and a small offer beside it."""
    connect(consumer, producer)
    consumer.ask("offer", "waits", WAITING, SMALL)
    consumer.ask("offer", "large", 0, LARGE)
    offered(producer, 2)
    consumer.stop()
    producer.ask("stage", "large", 0, LARGE)
    posted(producer, 1)


def test_bytes_of_a_killed_producer_land_in_quarantine_only(cast: Cast, tls: str) -> None:
    producer, consumer, other = cast.producer("p"), cast.consumer("d"), cast.producer("q")
    caught(producer, consumer)
    time.sleep(0.3)  # the kernel's buffers fill up
    producer.child.kill()
    assert consumer.blocks.touched() == set(), "nothing has landed before the death"
    consumer.go_on()
    seen: set[int] = set()
    while not consumer.ask("released", "large"):
        assert consumer.ask("held") in (0, LARGE + SMALL), "all of it until there is proof"
        seen |= consumer.blocks.touched()
    seen |= consumer.blocks.touched()
    assert seen, "bytes have landed after the death"
    assert seen <= set(range(LARGE)), "in the blocks that were in custody"
    assert {consumer.ask("outcome", name) for name in ("large", "waits")} == {"peer lost"}
    assert consumer.ask("wait_released", "waits")
    assert consumer.ask("stats")["proof: process reaped"] == 1
    consumer.blocks.paint(0, LARGE)  # reused by somebody else
    connect(consumer, other)
    for number in range(5):
        push(other, consumer, f"next {number}")
        time.sleep(0.05)
    assert consumer.blocks.touched() == set()


def test_a_stopped_consumer_is_lost_and_its_write_keeps_the_producers_blocks(cast: Cast, tls: str) -> None:
    producer, consumer, other = cast.producer("p"), cast.consumer("d"), cast.consumer("e")
    connect(other, producer)
    caught(producer, consumer)
    push(producer, other, "meanwhile")
    assert producer.ask("outcome", "large") == "peer lost"
    push(producer, other, "still")
    assert not producer.ask("released", "large"), "the WRITE reads its blocks"
    consumer.go_on()
    assert producer.ask("wait_released", "large")
    producer.ask("stage", "waits", 3, SMALL)
    for name in ("large", "waits"):
        assert consumer.ask("outcome", name) == "peer lost", "it has been told, long before its deadline"
        assert consumer.ask("wait_released", name)
    assert consumer.blocks.hold_what_came(0, LARGE, 0), "all that was in flight: its handles were kept"
    consumer.blocks.paint(0, LARGE)
    until(lambda: consumer.ask("reaches"), "a sign of life")
    push(producer, consumer, "goes on")
    assert consumer.blocks.touched() == set()


def test_a_producer_that_closes_during_a_write_lets_it_finish(cast: Cast, tls: str) -> None:
    """close() says that its memory is still read, and releases no handle and no registration."""
    producer, consumer = cast.producer("p"), cast.consumer("d")
    caught(producer, consumer)
    assert producer.ask("shut_and_unmap", 1.0) is False
    assert producer.ask("outcome", "large") in ("rejected: closing", "peer lost")
    assert not producer.ask("released", "large")
    consumer.go_on()
    assert producer.ask("wait_released", "large")
    assert consumer.ask("outcome", "large") != ""
    assert consumer.ask("wait_released", "large")
    assert consumer.ask("outcome", "waits") in ("rejected: closing", "peer lost")
    assert consumer.ask("wait_released", "waits")
    assert consumer.blocks.hold_what_came(0, LARGE, 0), "all that was in flight: its handles were kept"


def caught_sending(producer: Player, consumer: Player) -> None:
    """A large WRITE whose sender is stopped before its last byte has landed."""
    connect(consumer, producer)
    consumer.ask("offer", "large", 0, LARGE)
    offered(producer, 1)
    consumer.stop()
    producer.ask("stage", "large", 0, LARGE)
    posted(producer, 1)
    time.sleep(0.1)
    producer.stop()
    consumer.go_on()


def test_a_consumer_frees_its_cache_only_when_nobody_writes_into_it(cast: Cast, tls: str) -> None:
    """NIXL's target would die of SIGSEGV; close() waits for custody, and says so where that takes too long."""
    producer, consumer = cast.producer("p"), cast.consumer("d")
    caught_sending(producer, consumer)
    assert consumer.ask("shut_and_unmap", 1.0) is False
    assert consumer.ask("outcome", "large") == "cancelled"
    assert not consumer.ask("released", "large")
    producer.go_on()
    assert consumer.ask("wait_released", "large")
    assert producer.ask("outcome", "large") != ""
    assert producer.ask("wait_released", "large")
    assert consumer.blocks.touched() <= set(range(LARGE))
    assert consumer.child.process.is_alive()


@pytest.mark.parametrize("tls", ["all", "tcp"], indirect=True)
def test_a_cache_is_freed_right_after_close_while_a_producer_sends(cast: Cast, tls: str) -> None:
    producer = cast.producer("p")
    for number, pause in enumerate((0.0, 0.02)):
        consumer = cast.consumer(f"d{number}")
        connect(consumer, producer)
        consumer.ask("offer", f"r{number}", 0, LARGE)
        offered(producer, 1)
        producer.ask("stage", f"r{number}", 0, LARGE)
        time.sleep(pause)
        assert consumer.ask("shut_and_unmap", 30.0) is True
        assert producer.ask("outcome", f"r{number}") in ("complete", "cancelled")
        assert producer.ask("wait_released", f"r{number}")
        assert consumer.ask("outcome", f"r{number}") in ("complete", "cancelled"), "it lives"
        offered(producer, 0)


def test_forgetting_a_producer_does_not_end_its_custody(cast: Cast, tls: str) -> None:
    """A handshake afresh removes the peer from NIXL and adds it again, and what it had sent still lands."""
    producer, consumer, other = cast.producer("p"), cast.consumer("d"), cast.producer("q")
    address = producer.ask("address")
    caught_sending(producer, consumer)
    consumer.ask("lose", "p")
    assert consumer.ask("outcome", "large") == "peer lost"
    consumer.child.tell("connect", address)
    until(lambda: len(consumer.blocks.touched()) > 0, "bytes from the kernel's buffers")
    producer.go_on()
    assert consumer.child.answer() is None
    assert consumer.ask("wait_released", "large"), "the producer has drained"
    assert producer.ask("outcome", "large") != ""
    assert producer.ask("wait_released", "large")
    assert "proof: process reaped" not in consumer.ask("stats")
    landed = consumer.blocks.touched()
    assert landed <= set(range(LARGE))
    consumer.blocks.paint(0, LARGE)
    push(producer, consumer, "afresh")
    connect(consumer, other)
    push(other, consumer, "another")
    assert consumer.blocks.touched() == set(), "nothing has landed since the release"
