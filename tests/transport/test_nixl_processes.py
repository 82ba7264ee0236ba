"""Two real processes over NIXL, one of them killed: what the survivor is told, and when there is proof."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from pushkv.core.memory import Region
from pushkv.errors import PeerLost, TransportError
from pushkv.testing.transport_contract import Side
from pushkv.transport.base import Host, Proof, WriteResult, WriteStatus
from pushkv.transport.host import this_host
from pushkv.transport.nixl import NixlSettings, NixlTransport

pytestmark = pytest.mark.processes

SIZE = 256 << 20
STRIDE = 4096
WAIT_S = 10.0

Pipe = multiprocessing.connection.Connection
Address = tuple[bytes, Host, int]


def open_side(agent: str, fill: int, *, progress_thread: bool = True) -> Side:
    transport = NixlTransport(NixlSettings(agent, progress_thread=progress_thread))
    transport.claim()
    side = Side(transport, np.full(SIZE, fill, dtype=np.uint8))
    transport.register([Region(side.address, SIZE)])
    return side


def meet(side: Side, pipe: Pipe) -> tuple[str, int]:
    """Exchange metadata; returns the peer's agent and where its memory starts."""
    pipe.send((side.transport.metadata(), this_host(), side.address))
    metadata, host, address = pipe.recv()
    return side.transport.add_peer(metadata, host), address


def at(side: Side, address: int) -> Side:
    """The peer's memory as a side, to make pieces of it."""

    class Far(Side):
        @property
        def address(self) -> int:
            return address

    return Far(side.transport, side.memory)


def post(side: Side, peer: str, address: int, length: int) -> int:
    return side.transport.write(peer, side.pieces((0, length)), at(side, address).pieces((0, length)), b"done")


def consume(pipe: Pipe) -> None:
    """The child as consumer: receive until killed."""
    side = open_side("decode", 0)
    meet(side, pipe)
    pipe.send("ready")
    while True:
        side.transport.receive()


def produce(pipe: Pipe) -> None:
    """The child as producer: a small WRITE, then, when told, large ones until killed."""
    side = open_side("prefill", 1)
    peer, address = meet(side, pipe)
    post(side, peer, address, 64)
    while not side.transport.poll():
        pass
    pipe.send("ready")
    pipe.recv()
    while True:
        post(side, peer, address, SIZE)
        while not side.transport.poll():
            pass


@dataclass
class Child:
    process: multiprocessing.process.BaseProcess
    pipe: Pipe

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Pipe], None]], Child]]:
    children: list[Child] = []

    def start_one(target: Callable[[Pipe], None]) -> Child:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs,), daemon=True)
        process.start()
        children.append(Child(process, ours))
        return children[-1]

    yield start_one
    for child in children:
        child.process.kill()
        child.process.join()
        child.pipe.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {WAIT_S} s"


def poll_one(side: Side) -> WriteResult:
    results: list[WriteResult] = []
    until(lambda: bool(results.extend(side.transport.poll()) or results))
    return results[0]


def landed(side: Side) -> int:
    return int(np.count_nonzero(side.memory[::STRIDE])) * STRIDE


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_a_consumer_killed_between_writes(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    child = start(consume)
    side = open_side("prefill", 1)
    peer, address = meet(side, child.pipe)
    child.pipe.recv()
    post(side, peer, address, 1 << 20)
    assert poll_one(side).status is WriteStatus.DONE
    assert side.transport.path(peer) in {"all": ("UCX: cma, notifications over tcp",), "tcp": ("UCX: tcp",)}[tls]
    assert side.transport.writes_ended(peer) is Proof.NONE
    child.kill()
    child.process.join()
    with pytest.raises(PeerLost):
        post(side, peer, address, 1 << 20)
    with pytest.raises(PeerLost):
        side.transport.send(peer, b"x")
    until(lambda: side.transport.writes_ended(peer) is Proof.PROCESS_REAPED)
    side.transport.close()


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_a_consumer_killed_during_writes(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    child = start(consume)
    side = open_side("prefill", 1)
    peer, address = meet(side, child.pipe)
    child.pipe.recv()
    posted, ended = set(), {}
    end = time.monotonic() + WAIT_S
    lost = False
    while not lost or len(ended) < len(posted):
        assert time.monotonic() < end, "a WRITE never ended"
        if len(ended) >= 3 and child.process.is_alive():
            assert side.transport.writes_ended(peer) is Proof.NONE
            child.kill()
        try:
            if not lost and len(posted) - len(ended) < 4:
                posted.add(post(side, peer, address, 16 << 20))
        except PeerLost:
            lost = True
        ended.update({result.write: result for result in side.transport.poll()})
    assert set(ended) == posted
    failed = [result for result in ended.values() if result.status is WriteStatus.FAILED]
    assert all(result.peer_lost and result.reached for result in failed)
    assert any(result.status is WriteStatus.DONE for result in ended.values())
    until(lambda: side.transport.writes_ended(peer) is Proof.PROCESS_REAPED)
    side.transport.close()


@pytest.mark.parametrize("progress_thread", [True, False], ids=["thread", "nobody reads"])
@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_after_proof_of_a_producers_death_not_one_byte_lands(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch, tls: str, progress_thread: bool
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    child = start(produce)
    side = open_side("decode", 0, progress_thread=progress_thread)
    peer, _ = meet(side, child.pipe)
    until(lambda: bool(side.transport.receive() or child.pipe.poll(0)))
    until(lambda: bool(side.transport.receive()) or child.pipe.poll(0))
    child.pipe.recv()
    child.pipe.send("go")
    until(lambda: bool(side.transport.receive() or side.memory[8 << 20]))
    assert side.transport.writes_ended(peer) is Proof.NONE
    if not progress_thread:
        time.sleep(0.2)  # the kernel's buffers fill up
    child.kill()
    child.process.join()
    at_death = landed(side)
    if not progress_thread:
        # Our side of the connections is still open and may hold bytes, so there cannot be proof.
        for _ in range(20):
            assert side.transport.writes_ended(peer) is Proof.NONE
            time.sleep(0.01)
    until(lambda: bool(side.transport.receive() or side.transport.writes_ended(peer) is Proof.PROCESS_REAPED))
    late = landed(side) - at_death
    assert late == 0 if tls == "all" else (progress_thread or late > 0), "over tcp, bytes land after death"
    side.memory[:] = 0  # reused by somebody else
    for _ in range(30):
        side.transport.receive()
        time.sleep(0.01)
    assert landed(side) == 0
    side.transport.close()


def test_a_restarted_peer_is_another_agent(start: Callable[..., Child]) -> None:
    child = start(consume)
    side = open_side("prefill", 1)
    meet(side, child.pipe)
    child.pipe.recv()
    child.kill()
    child.process.join()
    again = start(consume)
    # The name is the same on purpose: NIXL refuses a second life under it until the first is removed.
    metadata, host, _ = again.pipe.recv()
    with pytest.raises(TransportError, match="another life"):
        side.transport.add_peer(metadata, host)
    side.transport.remove_peer("decode")
    assert side.transport.add_peer(metadata, host) == "decode"
    side.transport.close()
