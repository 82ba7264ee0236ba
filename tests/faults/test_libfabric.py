"""The same faults over NIXL's LIBFABRIC backend with provider tcp: the code path of EFA, without EFA.

Run by ``make test-libfabric``, which first installs what it takes (:mod:`faults.libfabric`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from faults.cast import LARGE, SMALL, Cast, Player, connect, offered, posted, push
from faults.children import Place
from faults.namespaces import DATA, TwoNetworks
from runtime.scene import until

FOLDER = os.environ.get("PUSHKV_LIBFABRIC", "")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="make test-libfabric installs what this takes, and runs it"),
]
STALL = 2.0


@pytest.fixture
def place(networks: TwoNetworks, monkeypatch: pytest.MonkeyPatch) -> Place:
    """One machine of the two, since the provider does not take the loopback interface."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{FOLDER}/lib")
    environment = {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": DATA}
    return Place(networks.network(0), environment=environment, site=f"{FOLDER}/site", backend="LIBFABRIC")


@pytest.fixture
def elsewhere(place: Place) -> Place:
    """A place whose deaths nobody sees."""
    return replace(place, elsewhere=True)


class TestNixl:
    """What NIXL does, and where it differs from UCX."""

    def in_flight(self, writer: Player, target: Player) -> int:
        target.stop()
        number: int = writer.ask("post", 0, LARGE)
        assert writer.ask("status", number, 0.5) == "in progress"
        return number

    def test_bytes_land_after_their_handle_was_released(self, cast: Cast, place: Place) -> None:
        writer, target = cast.movers(place, place)
        writer.ask("release", self.in_flight(writer, target))
        target.go_on()
        until(lambda: target.blocks.hold(0, LARGE, 0), "the last byte")

    def test_a_stopped_target_leaves_the_write_in_progress(self, cast: Cast, place: Place) -> None:
        writer, target = cast.movers(place, place)
        number = self.in_flight(writer, target)
        target.go_on()
        assert writer.ask("status", number, 30.0) == "done"

    def test_a_link_that_loses_everything_leaves_the_write_in_progress(
        self, cast: Cast, place: Place, networks: TwoNetworks
    ) -> None:
        writer, target = cast.movers(place, replace(place, network=networks.network(1)))
        networks.lose(DATA)
        number = writer.ask("post", 0, LARGE)
        assert writer.ask("status", number, 2.0) == "in progress"
        networks.heal(DATA)
        assert writer.ask("status", number, 30.0) == "done"
        assert target.blocks.hold(0, LARGE, 0)

    def test_bytes_land_after_their_peer_was_removed(self, cast: Cast, place: Place) -> None:
        writer, target = cast.movers(place, place)
        number = self.in_flight(writer, target)
        writer.ask("remove")
        assert writer.ask("status", number, 10.0) == "failed"
        target.go_on()
        until(lambda: len(target.blocks.touched()) > 1, "some of it")

    def test_a_write_lands_whose_sender_the_target_has_removed(self, cast: Cast, place: Place) -> None:
        writer, target = cast.movers(place, place)
        target.ask("remove")
        assert writer.ask("status", writer.ask("post", 0, LARGE), 10.0) == "done"
        assert target.blocks.hold(0, LARGE, 0)

    def test_a_write_into_deregistered_memory_neither_lands_nor_ends(self, cast: Cast, place: Place) -> None:
        writer, target = cast.movers(place, place)
        target.ask("deregister")
        assert writer.ask("status", writer.ask("post", 0, LARGE), 2.0) == "in progress"
        assert target.blocks.touched() == set()


def test_pushes(cast: Cast, place: Place) -> None:
    producer, consumer = cast.producer("p", place), cast.consumer("d", place)
    connect(consumer, producer)
    for number in range(5):
        push(producer, consumer, f"small {number}")
    consumer.ask("offer", "large", 0, LARGE)
    producer.ask("stage", "large", 5, LARGE)
    assert consumer.ask("outcome", "large") == producer.ask("outcome", "large") == "complete"
    assert consumer.ask("wait_released", "large")
    assert producer.ask("wait_released", "large")
    assert consumer.blocks.hold(0, LARGE, 5)
    assert consumer.blocks.touched() == set(range(LARGE))
    assert consumer.ask("shut_and_unmap", 10.0)
    assert producer.ask("shut_and_unmap", 10.0)


def test_a_consumer_that_died_on_this_machine_is_not_written_to(cast: Cast, place: Place) -> None:
    """NIXL is not asked, so that it cannot hang. There is no proof over LIBFABRIC: what it reads is not free."""
    producer, victim, other = cast.producer("p", place), cast.consumer("d", place), cast.consumer("e", place)
    for consumer in (victim, other):
        connect(consumer, producer)
    victim.ask("offer", "before", 120, SMALL)
    victim.ask("offer", "during", 0, LARGE)
    offered(producer, 2)
    victim.stop()
    producer.ask("stage", "during", 0, LARGE)
    posted(producer, 1)
    victim.child.kill()
    assert producer.ask("outcome", "during") == "peer lost"
    producer.ask("stage", "before", 0, SMALL)
    push(producer, other, "meanwhile")
    assert not producer.ask("released", "during")
    assert producer.ask("stalled") == ""


def test_a_consumer_that_died_unseen_in_the_middle_of_a_write_is_lost_by_its_silence(
    cast: Cast, place: Place, elsewhere: Place
) -> None:
    """NIXL says nothing: the WRITE stays in progress."""
    producer, victim, other = cast.producer("p", place), cast.consumer("d", elsewhere), cast.consumer("e", place)
    for consumer in (victim, other):
        connect(consumer, producer)
    victim.ask("offer", "during", 0, LARGE)
    offered(producer, 1)
    victim.stop()
    producer.ask("stage", "during", 0, LARGE)
    posted(producer, 1)
    victim.child.kill()
    push(producer, other, "meanwhile")
    assert producer.ask("outcome", "during") == "peer lost"
    push(producer, other, "on")
    assert not producer.ask("released", "during")
    assert producer.ask("stalled") == ""


def test_a_post_to_a_peer_that_died_unseen_hangs_and_the_watchdog_replaces_the_agent(
    cast: Cast, place: Place, elsewhere: Place
) -> None:
    producer = cast.producer("p", place, stall=STALL, silence=60.0)
    victim, other = cast.consumer("d", elsewhere), cast.consumer("e", place)
    for consumer in (victim, other):
        connect(consumer, producer)
        push(producer, consumer, f"to {consumer.child.process.pid}")
    victim.ask("offer", "dead", 0, LARGE)
    other.ask("offer", "waits", 0, LARGE)
    offered(producer, 2)
    victim.child.kill()
    time.sleep(1.0)  # until libfabric has noticed: what is posted before stays in progress
    producer.ask("stage", "dead", 0, LARGE)
    assert producer.ask("outcome", "dead") == "transport error"
    assert "did not return for 2 s" in producer.ask("stalled")
    assert other.ask("outcome", "waits") == "transport error"
    assert "did not return" in other.ask("detail", "waits")
    assert other.ask("wait_released", "waits"), "drained over the control connection"
    assert not producer.ask("released", "dead"), "NIXL may read it for ever"
    assert other.blocks.touched() == set()
    until(lambda: other.ask("reaches"), "a new agent in the place of the stuck one")
    push(producer, other, "goes on")
