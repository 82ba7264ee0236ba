"""A link between two machines that loses everything without a word, and what NIXL then leaves in progress.

Each machine is a network namespace with two links, so that the path of the bytes can be lost alone.
"""

from __future__ import annotations

import time

import pytest

from faults.cast import LARGE, Cast, connect, offered, posted, push
from faults.children import Place
from faults.namespaces import CONTROL, DATA, LINKS, TwoNetworks
from runtime.scene import until

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("tls")]


class Apart:
    """A producer on one machine, a consumer on the other, and a second consumer beside the producer."""

    def __init__(self, cast: Cast, networks: TwoNetworks) -> None:
        self.cast, self.networks = cast, networks
        near, self.far = (Place(networks.network(n), environment={"UCX_NET_DEVICES": DATA}) for n in range(2))
        bind = f"{networks.address(0, CONTROL)}:0"
        self.producer = cast.producer("p", near, bind=bind, listen_to_the_network_without_a_key=True, stall=3.0)
        self.consumer, self.neighbour = cast.consumer("d", self.far), cast.consumer("e", near)
        for consumer in (self.consumer, self.neighbour):
            connect(consumer, self.producer)
        push(self.producer, self.consumer, "before")

    def stuck(self, *links: str, deadline: float = 60.0) -> None:
        """A large WRITE posted into links that have just begun to lose everything."""
        self.consumer.ask("offer_by", "large", 0, LARGE, deadline)
        offered(self.producer, 1)
        for link in links:
            self.networks.lose(link)
        writes = self.producer.ask("stats").get("writes", 0)
        self.producer.ask("stage", "large", 0, LARGE)
        posted(self.producer, writes + 1)

    def nothing_but(self, first: int, count: int) -> None:
        """No block is touched but these, whose owner has not got them back."""
        assert self.consumer.blocks.touched() <= set(range(first, first + count))


@pytest.fixture
def apart(cast: Cast, networks: TwoNetworks) -> Apart:
    return Apart(cast, networks)


def test_both_paths_are_lost(apart: Apart) -> None:
    """Both sides end by the silence, and neither takes it for a proof."""
    apart.stuck(*LINKS)
    for side in (apart.consumer, apart.producer):
        assert side.ask("outcome", "large") == "peer lost"
    assert "not a word from it" in apart.consumer.ask("detail", "large")
    push(apart.producer, apart.neighbour, "meanwhile")
    assert not apart.producer.ask("released", "large"), "the WRITE reads its blocks"
    assert apart.consumer.ask("held") == LARGE
    assert apart.producer.ask("custody") == 1
    apart.nothing_but(0, LARGE)
    for link in LINKS:
        apart.networks.heal(link)
    regained(apart)


def test_the_path_of_the_bytes_is_lost_alone(apart: Apart) -> None:
    """Both sides hear each other over the control connection: the consumer's deadline ends it, for both."""
    apart.stuck(DATA, deadline=3.0)
    assert apart.consumer.ask("outcome", "large") == "expired"
    assert apart.producer.ask("outcome", "large") == "expired"
    push(apart.producer, apart.neighbour, "meanwhile")
    assert not apart.producer.ask("released", "large"), "the WRITE reads its blocks"
    assert apart.consumer.ask("held") == LARGE
    apart.networks.heal(DATA)
    regained(apart)


def regained(apart: Apart) -> None:
    """What is in flight goes on where it was, and its end is what ends the custody."""
    assert apart.consumer.ask("wait_released", "large")
    assert apart.producer.ask("wait_released", "large")
    assert apart.consumer.blocks.hold_what_came(0, LARGE, 0), "all that was in flight: its handles were kept"
    apart.consumer.blocks.paint(0, LARGE)
    until(lambda: apart.consumer.ask("reaches"), "a sign of life")
    push(apart.producer, apart.consumer, "goes on")
    assert apart.consumer.blocks.touched() == set()


def test_a_peer_is_removed_while_its_write_is_stuck(apart: Apart) -> None:
    """A handshake afresh removes the peer from NIXL: the WRITE fails there, and its bytes land nevertheless.

    Nobody can tell when they have, so the blocks are never free while both live.
    """
    apart.stuck(DATA)
    apart.producer.ask("lose", "d")
    assert apart.producer.ask("outcome", "large") == "peer lost"
    apart.consumer.child.tell("connect", apart.producer.ask("address"))
    until(lambda: apart.producer.ask("kept_handles") > 0, "the removal")
    push(apart.producer, apart.neighbour, "meanwhile")
    apart.networks.heal(DATA)
    assert apart.consumer.child.answer() is None
    for number in range(3):
        push(apart.producer, apart.consumer, f"afresh {number}")
    assert apart.consumer.ask("outcome", "large") == "peer lost", "the producer has told it"
    assert not apart.consumer.ask("released", "large")
    assert apart.consumer.ask("held") == LARGE
    assert not apart.producer.ask("released", "large")
    apart.nothing_but(0, LARGE)


def test_a_path_of_the_bytes_that_never_was(apart: Apart) -> None:
    """As behind a firewall that drops: the handshake fails by its timeout and holds nobody else up."""
    apart.networks.lose(DATA)
    late = apart.cast.consumer("f", apart.far)
    late.child.tell("connect_by", apart.producer.ask("address"), 5.0)
    for number in range(4):
        push(apart.producer, apart.neighbour, f"meanwhile {number}")
        time.sleep(1.0)
    assert "its first WRITE has not arrived" in late.child.answer()
    assert apart.producer.ask("stalled") == late.ask("stalled") == ""
    apart.networks.heal(DATA)
    connect(late, apart.producer)
    push(apart.producer, late, "healed")
