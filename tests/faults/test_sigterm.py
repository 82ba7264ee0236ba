"""SIGTERM to real processes: what has begun finishes, what is new is refused, and the limit is kept."""

from __future__ import annotations

import signal
import time

import pytest

from faults.cast import LARGE, SMALL, Cast, Player, connect, offered, posted, push
from runtime.scene import WAIT, until

pytestmark = pytest.mark.processes
LIMIT, TIGHT = 2 * WAIT, 4.0
"""Seconds: far off, so that what ends before it has ended by itself; and soon over."""
TLS = pytest.mark.parametrize("tls", ["tcp", "cma,tcp"], indirect=True)


def terminate(player: Player, limit: float = LIMIT, *more: int) -> None:
    player.ask("drain_on_sigterm", limit, *more)
    player.child.signal(signal.SIGTERM)


def exit_of(player: Player, limit: float = LIMIT) -> int | None:
    """How its process ended; by its limit, give or take what a busy machine takes."""
    player.child.process.join(limit + WAIT)
    return player.child.process.exitcode


def refusal(player: Player, name: str, *arguments: object) -> str:
    """What it raises at being told this."""
    player.child.tell(name, *arguments)
    answer = player.child.answer()
    assert isinstance(answer, str)
    return answer


@TLS
def test_a_producer_finishes_what_has_begun_and_refuses_the_rest(cast: Cast, tls: str) -> None:
    producer, consumer, stranger = cast.producer("p", stream="chunk"), cast.consumer("d"), cast.consumer("e")
    connect(consumer, producer)
    consumer.ask("offer", "begun", 0, 2 * SMALL)
    offered(producer, 1)
    producer.ask("ready", "begun", 7, 2 * SMALL, SMALL)
    until(lambda: consumer.blocks.hold(0, SMALL, 7), "the first part")
    consumer.ask("offer", "unmet", 20, SMALL)
    offered(producer, 2)
    terminate(producer)
    until(lambda: producer.ask("draining"), "the signal")
    for name in ("unmet", "late"):
        if name == "late":
            consumer.ask("offer", name, 30, SMALL)
        assert consumer.ask("outcome", name) == "rejected: closing"
        assert "shutting down" in consumer.ask("detail", name)
        assert consumer.ask("wait_released", name)
    assert "EndpointClosed" in refusal(producer, "stage", "new", 40, SMALL)
    assert "HandshakeRefused" in refusal(stranger, "connect_by", producer.ask("address"), WAIT)
    producer.child.signal(signal.SIGTERM)  # once more changes nothing
    producer.ask("stage", "begun", 7, 2 * SMALL)
    assert consumer.ask("outcome", "begun") == "complete"
    assert consumer.ask("wait_released", "begun")
    assert consumer.blocks.hold(0, 2 * SMALL, 7)
    assert exit_of(producer) == -signal.SIGTERM
    assert consumer.blocks.touched() == set(range(2 * SMALL))


@TLS
def test_a_consumer_finishes_what_it_has_offered(cast: Cast, tls: str) -> None:
    producer, consumer = cast.producer("p"), cast.consumer("d")
    connect(consumer, producer)
    consumer.ask("offer", "r", 0, LARGE)
    offered(producer, 1)
    terminate(consumer)
    until(lambda: consumer.ask("draining"), "the signal")
    assert "EndpointClosed" in refusal(consumer, "offer", "late", 120, SMALL)
    assert "EndpointClosed" in refusal(consumer, "connect", producer.ask("address"))
    producer.ask("stage", "r", 0, LARGE)
    assert producer.ask("outcome", "r") == "complete"
    assert exit_of(consumer) == -signal.SIGTERM
    assert consumer.blocks.hold(0, LARGE, 0)
    assert consumer.blocks.touched() == set(range(LARGE))
    until(lambda: producer.ask("stats").get("peers lost") == 1, "its good-bye")
    other = cast.consumer("e")
    connect(other, producer)
    push(producer, other, "and others go on")


@pytest.mark.usefixtures("tls")
class TestByTheLimit:
    """The peer is stopped, so that nothing ends by itself."""

    def test_a_producer_in_the_middle_of_a_write(self, cast: Cast) -> None:
        producer, consumer = cast.producer("p"), cast.consumer("d")
        connect(consumer, producer)
        consumer.ask("offer", "large", 0, LARGE)
        offered(producer, 1)
        consumer.stop()
        producer.ask("stage", "large", 0, LARGE)
        posted(producer, 1)
        terminate(producer, TIGHT)
        began = time.monotonic()
        assert exit_of(producer, TIGHT) == -signal.SIGTERM
        assert time.monotonic() - began > TIGHT / 2, "it has waited for the WRITE"
        consumer.go_on()
        assert consumer.ask("outcome", "large") in ("peer lost", "rejected: closing")
        assert consumer.ask("wait_released", "large"), "its process is gone, which is proof"

    def test_a_consumer_whose_producer_says_nothing(self, cast: Cast) -> None:
        producer, consumer = cast.producer("p"), cast.consumer("d")
        connect(consumer, producer)
        consumer.ask("offer", "r", 0, SMALL)
        offered(producer, 1)
        producer.stop()
        terminate(consumer, TIGHT)
        assert exit_of(consumer, TIGHT) == -signal.SIGTERM
        producer.go_on()
        producer.ask("stage", "r", 7, SMALL)
        assert producer.ask("outcome", "r") != "complete", "the offer ended with its consumer"
        assert consumer.blocks.touched() == set()

    def test_a_producer_whose_engine_does_not_go_on(self, cast: Cast) -> None:
        """Half a prompt is there and the rest never comes: its consumer is told why before the process ends."""
        producer, consumer = cast.producer("p"), cast.consumer("d")
        connect(consumer, producer)
        consumer.ask("offer", "half", 0, 2 * SMALL)
        offered(producer, 1)
        producer.ask("ready", "half", 7, 2 * SMALL, SMALL)
        terminate(producer, TIGHT)
        assert consumer.ask("outcome", "half") == "rejected: closing"
        assert exit_of(producer, TIGHT) == -signal.SIGTERM
        assert consumer.ask("wait_released", "half")

    def test_a_main_thread_that_is_stuck(self, cast: Cast) -> None:
        producer = cast.producer("p")
        producer.ask("drain_on_sigterm", TIGHT)
        producer.child.tell("get_stuck")
        producer.child.signal(signal.SIGTERM)
        assert exit_of(producer, TIGHT) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("tls")
class TestInCompany:
    def test_the_handler_that_was_there_has_the_last_word(self, cast: Cast) -> None:
        producer = cast.producer("p")
        terminate(producer, LIMIT, 7)
        assert exit_of(producer) == 7

    def test_a_forked_child_has_a_sigterm_of_its_own(self, cast: Cast) -> None:
        producer = cast.producer("p")
        producer.ask("drain_on_sigterm", LIMIT)
        assert producer.ask("fork_and_terminate") == (-signal.SIGTERM, False)

    def test_two_endpoints_of_one_process_end_together(self, cast: Cast) -> None:
        both, consumers = cast.two_producers(), [cast.consumer("d"), cast.consumer("e")]
        for number, consumer in enumerate(consumers):
            consumer.ask("connect", both.ask("each", number, "address"))
            consumer.ask("offer", f"r{number}", 0, 2 * SMALL)
            until(lambda number=number: both.ask("each", number, "custody") == 1, "the offer")  # type: ignore[misc]
            both.ask("each", number, "ready", f"r{number}", 7, 2 * SMALL, SMALL)
        both.ask("drain_on_sigterm", LIMIT)
        both.child.signal(signal.SIGTERM)
        for number, consumer in enumerate(consumers):
            assert both.child.process.is_alive(), "neither ends before the other has finished"
            both.ask("each", number, "stage", f"r{number}", 7, 2 * SMALL)
            assert consumer.ask("outcome", f"r{number}") == "complete"
            assert consumer.blocks.hold(0, 2 * SMALL, 7)
        assert exit_of(both) == -signal.SIGTERM
