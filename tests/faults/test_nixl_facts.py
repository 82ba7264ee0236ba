"""What NIXL itself does in each fault, on the data mover alone: the facts that PushKV's rules lean on.

Deaths between and during WRITEs are in tests/transport/test_nixl_processes.py. Should one of these tests fail with
a new NIXL, a rule may have become cheaper; docs/faults.md says which.
"""

from __future__ import annotations

import signal

import pytest

from faults.cast import LARGE, Cast, Player
from faults.children import Place
from faults.namespaces import DATA, TwoNetworks
from runtime.scene import until

pytestmark = pytest.mark.processes
WAIT_S = 30.0
LANES = pytest.mark.parametrize("tls", ["all", "tcp"], indirect=True)


def in_flight(writer: Player, target: Player) -> int:
    """A WRITE that cannot end, because its target is stopped."""
    target.stop()
    number: int = writer.ask("post", 0, LARGE)
    assert writer.ask("status", number, 0.3) == "in progress"
    return number


def test_a_stopped_target_leaves_the_write_in_progress(cast: Cast, tls: str) -> None:
    writer, target = cast.movers()
    number = in_flight(writer, target)
    assert writer.ask("status", number, 1.0) == "in progress"
    target.go_on()
    assert writer.ask("status", number, WAIT_S) == "done"
    assert target.blocks.hold(0, LARGE, 0)


def test_bytes_land_after_their_handle_was_released(cast: Cast, tls: str) -> None:
    writer, target = cast.movers()
    number = in_flight(writer, target)
    writer.ask("release", number)
    assert target.blocks.touched() == set()
    target.go_on()
    until(lambda: target.blocks.hold(0, LARGE, 0), "the last byte")


def test_bytes_land_after_their_peer_was_removed(cast: Cast, tls: str) -> None:
    writer, target = cast.movers()
    number = in_flight(writer, target)
    writer.ask("remove")
    assert writer.ask("status", number, WAIT_S) == "failed"
    assert target.blocks.touched() == set()
    target.go_on()
    until(lambda: len(target.blocks.touched()) > 1, "some of it")


@LANES
def test_a_write_lands_whose_target_has_removed_its_sender_and_deregistered_its_memory(cast: Cast, tls: str) -> None:
    writer, target = cast.movers()
    for forget in ("remove", "deregister"):
        target.ask(forget)
        assert writer.ask("status", writer.ask("post", 0, LARGE), WAIT_S) == "done"
        assert target.blocks.hold(0, LARGE, 0)
        target.blocks.paint(0, LARGE)


@LANES
def test_a_write_into_freed_memory(cast: Cast, tls: str) -> None:
    """Over tcp the target copies by itself and dies of it; over cma the kernel refuses the writer."""
    writer, target = cast.movers()
    target.ask("deregister")
    target.ask("unmap")
    number = writer.ask("post", 0, LARGE)
    assert writer.ask("status", number, WAIT_S) == "failed"
    if tls == "tcp":
        target.child.process.join(WAIT_S)
        assert target.child.process.exitcode == -signal.SIGSEGV
    else:
        assert target.ask("heard") >= 0, "it lives"


def test_a_link_that_loses_everything_leaves_the_write_in_progress(
    cast: Cast, networks: TwoNetworks, tls: str
) -> None:
    places = [Place(networks.network(side), environment={"UCX_NET_DEVICES": DATA}) for side in range(2)]
    writer, target = cast.movers(*places)
    networks.lose(DATA)
    number = writer.ask("post", 0, LARGE)
    assert writer.ask("status", number, 2.0) == "in progress"
    assert writer.ask("send") == "", "nor does a notification know"
    networks.heal(DATA)
    assert writer.ask("status", number, WAIT_S) == "done"
    assert target.blocks.hold(0, LARGE, 0)
