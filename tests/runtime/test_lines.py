"""Connections: who gets in, with which key, and what comes through."""

from __future__ import annotations

import socket
import time
from itertools import pairwise

import pytest
import zmq

from pushkv.errors import AddressError, ConfigError
from pushkv.runtime.address import url
from pushkv.runtime.keys import ClusterKey, new_key, parse_key
from pushkv.runtime.lines import Lines

ANYWHERE = ("127.0.0.1", 0)


def key() -> ClusterKey:
    return parse_key(new_key())


def lines(*keys: ClusterKey, allow: tuple[str, ...] = (), largest: int = 1 << 16) -> Lines:
    return Lines(keys, allow, largest)


def heard(ends: list[Lines], seconds: float = 5.0) -> tuple[Lines, bytes | str, bytes] | None:
    """The first message that any of the ends hears."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for end in ends:
            for item in end.receive(dict(end.poller.poll(5))):
                if item is not None:
                    return end, *item
    return None


def talk(server: Lines, client: Lines, seconds: float = 5.0) -> bool:
    """Whether a word of the client and its answer get through."""
    route = url(server.listen(ANYWHERE))
    client.dial(route)
    client.send(route, b"hello")
    asked = heard([server, client], seconds)
    if asked is None:
        return False
    server.send(asked[1], b"welcome")
    assert heard([server, client]) == (client, route, b"welcome")
    assert len(client._lines[route]) == 1
    return True


def closed(*ends: Lines) -> None:
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("serving", "calling"),
    [((), ()), ((0,), (0,)), ((0, 1), (0,)), ((0, 1), (1, 0)), ((1, 0), (0, 1)), ((0,), (1, 0)), ((1,), (0, 1))],
)
def test_sides_with_a_common_key_talk(serving: tuple[int, ...], calling: tuple[int, ...]) -> None:
    keys = key(), key()
    server, client = lines(*(keys[i] for i in serving)), lines(*(keys[i] for i in calling))
    assert talk(server, client)
    closed(server, client)


@pytest.mark.parametrize(("serving", "calling"), [((0,), ()), ((), (0,)), ((0,), (1,)), ((0, 1), (1,))])
def test_sides_without_one_do_not(serving: tuple[int, ...], calling: tuple[int, ...]) -> None:
    """The last: a producer listens with its first key alone, so who has only the second cannot be sure of it."""
    keys = key(), key()
    server, client = lines(*(keys[i] for i in serving)), lines(*(keys[i] for i in calling))
    assert not talk(server, client, 0.7)
    closed(server, client)


def test_rotation_step_by_step_never_cuts_anybody_off() -> None:
    old, new = key(), key()
    steps = [(old,), (old, new), (new, old), (new,)]
    for before, after in pairwise(steps):
        for serving, calling in ((before, after), (after, before)):
            server, client = lines(*serving), lines(*calling)
            assert talk(server, client)
            closed(server, client)


def test_an_address_that_is_not_allowed_hears_nothing() -> None:
    shared = key()
    server, client = lines(shared, allow=("10.0.0.0/8",)), lines(shared)
    assert not talk(server, client, 0.7)
    assert server.gate.counts["address not allowed"]
    closed(server, client)
    plain, open_client = lines(allow=("127.0.0.0/8",)), lines()
    assert talk(plain, open_client)
    closed(plain, open_client)


def test_what_is_said_cannot_be_read_on_the_wire() -> None:
    """A man in the middle that copies bytes both ways sees neither the word nor its answer."""
    shared = key()
    server, client = lines(shared), lines(shared)
    host, port = server.listen(ANYWHERE)
    seen = bytearray()
    with socket.create_server((host, 0)) as trap:
        route = url((host, trap.getsockname()[1]))
        client.dial(route)
        client.send(route, b"a secret word")
        inside, _ = trap.accept()
        outside = socket.create_connection((host, port))
        for end in (inside, outside):
            end.setblocking(False)
        asked = None
        until = time.monotonic() + 5
        while asked is None and time.monotonic() < until:
            for source, sink in ((inside, outside), (outside, inside)):
                try:
                    data = source.recv(65536)
                except BlockingIOError:
                    continue
                seen += data
                sink.sendall(data)
            asked = heard([server], 0.02)
        assert asked is not None
        assert asked[2] == b"a secret word"
        assert b"secret" not in seen
        inside.close()
        outside.close()
    closed(server, client)


def test_oversized_and_malformed_messages_cost_their_sender_alone() -> None:
    server, good = lines(largest=1000), lines()
    route = url(server.listen(ANYWHERE))
    bad = zmq.Context()
    with bad.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(route)
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(b"x" * 2000)
        good.dial(route)
        good.send(route, b"fine")
        assert heard([server]) is not None
    bad.term()
    closed(server, good)


def test_a_busy_port_and_a_bad_allow_list_are_named() -> None:
    one, other = lines(), lines()
    address = one.listen(ANYWHERE)
    with pytest.raises(AddressError, match=rf"{address[1]} cannot be bound: address already in use"):
        other.listen(address)
    with pytest.raises(ConfigError, match="allow holds 'nowhere'"):
        lines(allow=("nowhere",))
    closed(one, other)


def test_silent_connections_are_dropped_and_do_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pushkv.runtime.lines.HANDSHAKE_MS", 300)
    shared = key()
    server, client = lines(shared), lines(shared)
    address = server.listen(ANYWHERE)
    mute = [socket.create_connection(address) for _ in range(200)]
    route = url(address)
    client.dial(route)
    client.send(route, b"hello")
    assert heard([server, client]) is not None
    mute[0].settimeout(5)
    greeting = mute[0].recv(4096)
    assert greeting  # ZeroMQ's own
    assert mute[0].recv(4096) == b""  # and then it was shown the door
    for one in mute:
        one.close()
    closed(server, client)
