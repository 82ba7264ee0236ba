"""Whoever speaks to an endpoint and means no good: strangers at its port, forged and replayed frames, hostile peers.

What comes of it all: an answer, a count or nothing; never an error in one of the endpoint's threads, a byte in a
block that was not offered to the one who speaks, or a good peer that is not served.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv import Consumer, Outcome, Producer
from pushkv.core.messages import Hello, encode
from pushkv.errors import ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.keys import new_key
from runtime.hostility import LIVE, TOKEN, Good, anything, spoiled
from runtime.scene import WAIT, Pushed, Scene

FUZZ = settings(LIVE, max_examples=150)


@pytest.fixture
def good(scene: Scene) -> Good:
    return Good(scene)


# The control port


def control_frames(side: wire.Side) -> list[bytes]:
    """One of every kind, as a well-behaved endpoint would send it."""
    relayed = encode(TOKEN, Hello("somebody"))
    messages = (
        wire.Introduction(TOKEN, side), wire.Welcome(TOKEN, 1, side), wire.Refusal(TOKEN, "no"), wire.Relay(relayed),
        wire.Alive(TOKEN), wire.Bye(TOKEN), wire.Moved(TOKEN), wire.Fenced(True, ""),
    )  # fmt: skip
    return [wire.pack(message) for message in messages]


def side_of(endpoint: Producer | Consumer) -> wire.Side:
    assert endpoint._side.me is not None
    return endpoint._side.me


def test_what_a_control_frame_may_be(scene: Scene) -> None:
    """It decodes, or it is a ProtocolError."""
    frames = control_frames(side_of(scene.consumer()))
    tags = st.sampled_from([message["type"] for message in map(msgspec.msgpack.decode, frames)]) | st.text(max_size=8)
    tagged = st.builds(lambda tag, rest: msgspec.msgpack.encode({**rest, "type": tag}), tags, st.dictionaries(
        st.sampled_from(["token", "side", "version", "detail", "frame", "limit", "clear"]), anything))  # fmt: skip

    @FUZZ
    @given(st.binary(max_size=300) | spoiled(frames) | tagged | anything.map(msgspec.msgpack.encode))
    def decodes_or_not(frame: bytes) -> None:
        try:
            message = wire.unpack(frame)
        except ProtocolError:
            return
        assert wire.unpack(wire.pack(message)) == message or "nan" in repr(message)

    decodes_or_not()


@pytest.fixture
def stranger() -> Iterator[Callable[[str], zmq.Socket[bytes]]]:
    """Dials an address without being anybody."""
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def dial(address: str) -> zmq.Socket[bytes]:
        one = context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 0)
        one.connect(address)
        sockets.append(one)
        return one

    yield dial
    for one in sockets:
        one.close()
    context.term()


@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_frames_at_the_port(good: Good, scene: Scene, stranger: Callable[[str], Any], victim: str) -> None:
    """Of every kind, to either side, from somebody who was never introduced."""
    endpoint: Producer | Consumer = getattr(good, victim)
    frames = control_frames(side_of(scene.consumer("spare")))
    one = stranger(endpoint.address)

    @LIVE
    @given(st.lists(st.binary(max_size=100) | spoiled(frames), min_size=1, max_size=20))
    def bombarded(batch: list[bytes]) -> None:
        for frame in batch:
            one.send(frame)
        good.push()

    bombarded()
    one.send(wire.pack(wire.Alive(TOKEN)))
    good.unharmed()


def test_introductions_that_are_almost_right(
    good: Good, scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered, by a refusal or a welcome, and none costs more than its answer. Without the rate's bound."""
    spare = scene.consumer("spare")
    frame = wire.pack(wire.Introduction(TOKEN, side_of(spare)))
    answers: list[wire.Control] = []
    send = good.producer._control.send

    def listen(route: str | bytes, message: wire.Control) -> None:
        if route == b"?":
            if not isinstance(message, wire.Alive):  # a sign of life a second, on a slow machine between these too
                answers.append(message)
        else:
            send(route, message)

    monkeypatch.setattr(good.producer._control, "send", listen)
    slowest = 0.0

    @FUZZ
    @given(spoiled([frame]))
    def introduced(frame: bytes) -> None:
        nonlocal slowest
        try:
            message = wire.unpack(frame)
        except ProtocolError:
            return
        if not isinstance(message, wire.Introduction):
            return
        answers.clear()
        began = time.process_time()
        assert good.producer.ask(lambda side: str(side.introduced(b"?", message))) == "None"
        slowest = max(slowest, time.process_time() - began)
        assert [type(one) for one in answers] in ([wire.Welcome], [wire.Refusal])
        assert all(len(wire.pack(one)) < 10_000 for one in answers if isinstance(one, wire.Refusal))

    with caplog.at_level(logging.WARNING):
        introduced()
    unknown = [text[:300] for text in caplog.messages if "cannot be dealt with" in text]
    assert not unknown, "every reason is one that PushKV knows"
    longest = max(map(len, caplog.messages), default=0)
    assert longest < 3_000
    assert slowest < 5.0
    good.unharmed()


def test_a_refusal_is_short_however_much_differs(good: Good, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    me = side_of(scene.consumer("spare"))
    many = tuple((f"factor {number}", "x" * 1000) for number in range(2000))
    factors = msgspec.structs.replace(me.factors, items=many)
    message = wire.Introduction(TOKEN, msgspec.structs.replace(me, factors=factors))
    with caplog.at_level(logging.WARNING):
        good.producer.ask(lambda side: str(side.introduced(b"?", message)))
    refused = [text for text in caplog.messages if "Refused" in text]
    assert len(refused) == 1
    assert len(refused[0]) < 3_000, "not two megabytes in a log"
    good.unharmed()


# A thousand connections


MUTE = 1000
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(23, b"\x00") + bytes(32)
"""ZeroMQ's own, as a client says it first."""
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
"""And second, where no key is asked for."""


def guard(folder: Path) -> dict[str, Any]:
    """Settings for a cluster key."""
    file = folder / "key"
    file.write_text(new_key())
    file.chmod(0o600)
    return {"key_file": str(file)}


@pytest.mark.parametrize(
    "says", [b"", GREETING, b"GET / HTTP/1.1\r\n\r\n"], ids=["nothing", "a greeting", "something else"]
)
@pytest.mark.parametrize("guarded", [False, True], ids=["no key", "a key"])
def test_a_thousand_that_stay_mute(scene: Scene, tmp_path: Path, guarded: bool, says: bytes) -> None:
    """They cost a good handshake nothing, and are shown the door."""
    more = guard(tmp_path) if guarded else {}
    producer, consumer = scene.producer(**more), scene.consumer(**more)
    mute = crowd(producer, says)
    assert meet(producer, consumer) < 5.0
    for one in mute:
        assert shown_the_door(one)
        one.close()
    assert producer.stats()["errors"] == 0


def test_a_thousand_that_are_let_in_and_say_nothing(scene: Scene) -> None:
    """Without a key anybody on this machine is let in, and may stay."""
    producer, consumer = scene.producer(), scene.consumer()
    mute = crowd(producer, GREETING + READY)
    assert meet(producer, consumer) < 5.0
    for one in mute:
        one.close()
    assert producer.stats()["errors"] == 0


def crowd(producer: Producer, says: bytes) -> list[socket.socket]:
    """Connections that say this and no more."""
    host, port = producer.address.removeprefix("tcp://").split(":")
    mute = [socket.create_connection((host, int(port))) for _ in range(MUTE)]
    for one in mute:
        one.sendall(says)
    return mute


def meet(producer: Producer, consumer: Consumer) -> float:
    """How many seconds a good handshake takes; a push works after it."""
    began = time.monotonic()
    link = consumer.connect(producer.address, timeout=WAIT)
    took = time.monotonic() - began
    print(f"a handshake beside {MUTE} mute connections: {took:.3f} s")
    push = Pushed(producer, consumer, "r", [1], [2], 4)
    transfer = push.offer(link)
    push.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    return took


def shown_the_door(one: socket.socket) -> bool:
    one.settimeout(WAIT)
    try:
        while one.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True
