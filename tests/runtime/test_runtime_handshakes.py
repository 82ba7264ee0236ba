"""Connecting: who is refused and in which words, and strangers who say anything at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pushkv import Consumer, EndpointConfig, Outcome, Producer
from pushkv.core.layouts import shard
from pushkv.core.memory import Region
from pushkv.core.messages import MAX_FRAME, Cancel, TransferKey, encode
from pushkv.errors import AddressError, ConfigError, HandshakeError, HandshakeRefused
from pushkv.runtime import address, wire
from pushkv.runtime.address import parse, parse_dialled
from pushkv.runtime.consuming import Consuming
from runtime.scene import WAIT, Pushed, Scene, cache_of, fill, memory_of, until


class TestRefusals:
    """Every one names what differs, with both values."""

    def refused(self, scene: Scene, consumer: Consumer, producer: Producer) -> str:
        with pytest.raises(HandshakeRefused) as error:
            consumer.connect(producer.address)
        assert producer.address in str(error.value)
        assert producer.stats()["handshakes refused"] == 1
        assert not producer._side.agents
        assert not consumer._side.agents
        assert not consumer._side.dials
        assert scene.consumer("fine").connect(producer.address).alive
        return str(error.value)

    def test_another_model(self, scene: Scene) -> None:
        producer = scene.producer()
        consumer = scene.consumer(cache=cache_of(memory_of(), model="other", revision=3))
        text = self.refused(scene, consumer, producer)
        assert "model: 'm' against 'other'" in text
        assert "revision: 'not given' against '3'" in text

    def test_another_dtype_and_head_size(self, scene: Scene) -> None:
        producer = scene.producer()
        array = np.zeros((2, 2, 64, 2, 4, 8), np.float16)
        text = self.refused(scene, scene.consumer(cache=cache_of(array)), producer)  # type: ignore[arg-type]
        assert "dtype: '<f4' against '<f2'" in text or "dtype: 'float32' against 'float16'" in text
        assert "content elements: '4' against '8'" in text

    def test_another_version(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer = scene.producer()
        consumer = scene.consumer()
        assert consumer._side.me is not None
        old = consumer._side.me
        consumer._side.me = msgspec.structs.replace(old, oldest=7, newest=9)
        text = self.refused(scene, consumer, producer)
        assert "versions 1 to 1, the other 7 to 9: upgrade the older one" in text

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"metadata": b"\x93rubbish"}, "no metadata of this transport"),
            ({"regions": ()}, "there are 0 regions"),
            ({"regions": (Region(4096, 64),)}, "which has 64 bytes"),
            ({"regions": (Region(-5, 1 << 30),)}, "bytes at address -5 of device 0; there is no such memory"),
            ({"regions": (Region((1 << 64) - 9, 1 << 30),)}, "bytes at address 18446744073709551607 of"),
            ({"regions": (Region(4096, 1 << 30), Region(0, 9, 1))}, "an endpoint serves one device"),
            ({"agent": "somebody-else"}, "metadata is agent"),
        ],
    )
    def test_an_introduction_that_contradicts_itself(
        self, scene: Scene, change: dict[str, Any], message: str
    ) -> None:
        producer = scene.producer()
        consumer = scene.consumer()
        assert consumer._side.me is not None
        consumer._side.me = msgspec.structs.replace(consumer._side.me, **change)
        with pytest.raises(HandshakeError, match=message):
            consumer.connect(producer.address, timeout=1.0)
        assert not producer._side.agents
        assert scene.consumer("fine").connect(producer.address).alive

    def test_a_stranger_who_uses_the_name_of_a_connected_consumer(self, scene: Scene) -> None:
        """Its memory would be written to with what the other has offered for."""
        producer, consumer = scene.producer(), scene.consumer()
        link = consumer.connect(producer.address)
        stranger = scene.consumer("stranger")
        assert consumer._side.me is not None
        assert stranger._side.me is not None
        for known in ({"metadata": consumer._side.me.metadata}, {"metadata": b"rubbish"}):
            stranger._side.me = msgspec.structs.replace(stranger._side.me, agent=consumer.agent, **known)
            with pytest.raises(HandshakeRefused, match=f"{consumer.agent} is connected already, and says something"):
                stranger.connect(producer.address)
        push = Pushed(producer, consumer, "r", [1, 2, 3], [4, 5, 6], 10)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived()

    def test_metadata_of_another_peer_does_not_cost_that_peer_its_path(self, scene: Scene) -> None:
        producer, victim, liar = scene.producer(), scene.consumer("victim"), scene.consumer("liar")
        link = victim.connect(producer.address)
        assert liar._side.me is not None
        assert victim._side.me is not None
        liar._side.me = msgspec.structs.replace(liar._side.me, metadata=victim._side.me.metadata)
        with pytest.raises(HandshakeRefused, match="metadata is agent"):
            liar.connect(producer.address)
        push = Pushed(producer, victim, "r", [1], [2], 4)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait_released(WAIT)

    def test_ranks_that_lack_heads_together(self, scene: Scene) -> None:
        part = cache_of(memory_of(heads=2), shard(4, 0, 2))
        producer, consumer = scene.producer(cache=part), scene.consumer(cache=cache_of(memory_of(heads=4)))
        with pytest.raises(HandshakeError, match=rf"{producer.address} together do not fit: .*heads"):
            consumer.connect(producer.address)

    def test_a_welcome_in_a_version_unheard_of(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer = scene.producer(), scene.consumer()
        welcomed = Consuming.welcomed
        monkeypatch.setattr(
            Consuming, "welcomed", lambda self, one: welcomed(self, msgspec.structs.replace(one, version=9))
        )
        with pytest.raises(HandshakeError, match="answers in protocol version 9; upgrade"):
            consumer.connect(producer.address)

    def test_a_welcome_that_cannot_be_dealt_with(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer = scene.producer(), scene.consumer()

        def fail(*_: object) -> None:
            raise ZeroDivisionError("by zero")

        monkeypatch.setattr(Consuming, "_pair", fail)
        with pytest.raises(HandshakeError, match="by zero"):
            consumer.connect(producer.address)


@pytest.fixture
def foreign() -> Iterator[Callable[[bytes], str]]:
    """Listens on a port, greets everybody with the given bytes, and hangs up."""
    servers: list[tuple[socket.socket, threading.Thread]] = []

    def serve(server: socket.socket, greeting: bytes) -> None:
        while True:
            one, _ = server.accept()
            with one:
                one.settimeout(WAIT)
                said = one.recv(64)
                if said == b"stop":
                    return
                one.sendall(greeting)

    def listen(greeting: bytes) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=serve, args=(server, greeting), daemon=True)
        servers.append((server, thread))
        thread.start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield listen
    for server, thread in servers:
        with socket.create_connection(server.getsockname()) as one:
            one.sendall(b"stop")
            thread.join(WAIT)
        server.close()


class TestNobodyThere:
    def test_nothing_listens(self, scene: Scene) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        consumer = scene.consumer()
        with pytest.raises(HandshakeError, match=rf"tcp://127.0.0.1:{port} does not answer: is the producer running"):
            consumer.connect(f"127.0.0.1:{port}", timeout=0.2)
        until(lambda: not consumer._control._lines.routes, "the connection is given up")

    @pytest.mark.parametrize("greeting", [b"", b"SSH-2.0-OpenSSH_9.0\r\n", b"\xff" * 64, b"HTTP/1.1 400 no\r\n\r\n"])
    def test_something_else_listens(self, scene: Scene, foreign: Callable[[bytes], str], greeting: bytes) -> None:
        consumer, producer = scene.consumer(), scene.producer()
        with pytest.raises(HandshakeError, match=r"does not answer.*waited 0.2 s"):
            consumer.connect(foreign(greeting), timeout=0.2)
        assert consumer.connect(producer.address).alive

    def test_it_starts_later(self, scene: Scene) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        consumer = scene.consumer()
        threading.Timer(0.1, lambda: scene.producer(bind=f"127.0.0.1:{port}")).start()
        assert consumer.connect(f"127.0.0.1:{port}").alive

    def test_no_path(self, scene: Scene) -> None:
        producer, consumer = scene.producer(), scene.consumer()
        scene.network.partition(producer.agent)
        with pytest.raises(HandshakeError, match="its first WRITE has not arrived: does NIXL have a path"):
            consumer.connect(producer.address, timeout=0.5)


class TestAddresses:
    @pytest.mark.parametrize(
        "text", ["", "host", "host:", ":80", "host:http", "host:99999", "host:-1", "host:²", "host:٣"]
    )
    def test_that_are_none(self, text: str) -> None:
        with pytest.raises(AddressError, match="is no address; write host:port"):
            parse(text)

    @pytest.mark.parametrize("text", ["0.0.0.0:80", "*:80", "[::]:80", "127.0.0.1:0"])
    def test_that_cannot_be_dialled(self, text: str) -> None:
        with pytest.raises(AddressError, match="cannot be dialled"):
            parse_dialled(text)

    def test_of_hosts_that_do_not_resolve(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: object, **__: object) -> None:
            raise socket.gaierror(-2, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        with pytest.raises(AddressError, match=r"'no\.such\.host' does not resolve"):
            scene.consumer().connect("no.such.host:80")

    def test_that_are_not_given(self, scene: Scene) -> None:
        with pytest.raises(AddressError, match="No address is given to connect to; give one a rank"):
            scene.consumer().connect([])

    def test_a_port_in_use(self, scene: Scene) -> None:
        producer = scene.producer()
        with pytest.raises(AddressError, match=rf"{producer.address} cannot be bound: address already in use"):
            scene.producer("q", bind=producer.address)

    def test_an_address_of_another_machine(self, scene: Scene) -> None:
        with pytest.raises(AddressError, match=r"192.0.2.1:0 cannot be bound.*port 0"):
            scene.producer(bind="192.0.2.1:0", listen_to_the_network_without_a_key=True)

    @pytest.mark.parametrize("peers", [("192.0.2.7",), ("127.0.0.1", "192.0.2.7")])
    def test_loopback_for_a_remote_peer(self, scene: Scene, peers: tuple[str, ...]) -> None:
        with pytest.raises(AddressError, match=r"127.0.0.1 \(advertised\) reaches this machine only and 192.0.2.7"):
            scene.producer(peers=peers)

    def test_bound_to_loopback_and_advertised_elsewhere(self, scene: Scene) -> None:
        with pytest.raises(AddressError, match=r"127.0.0.1 \(bound\) reaches this machine only"):
            scene.producer(peers=("192.0.2.7",), advertise="192.0.2.9:0")

    def test_a_wildcard_says_nothing(self, scene: Scene) -> None:
        with pytest.raises(AddressError, match="listens everywhere and cannot be dialled; set advertise"):
            scene.producer(bind="0.0.0.0:0")
        with pytest.raises(AddressError, match=r"'0\.0\.0\.0' cannot be dialled; set advertise"):
            scene.producer(bind="0.0.0.0:0", advertise="0.0.0.0:0")

    def test_advertised_apart_from_bound(self, scene: Scene) -> None:
        producer = scene.producer(
            bind="0.0.0.0:0",
            advertise="localhost:0",
            peers=("127.0.0.1",),
            listen_to_the_network_without_a_key=True,
        )
        host, port = parse(producer.address)
        assert (host, port != 0) == ("localhost", True)
        assert scene.consumer().connect(producer.address).alive

    def test_peers_on_this_machine_reach_loopback(self) -> None:
        address.check_reachable(("127.0.0.1", 0), "", ("localhost", "127.0.0.2"))


def test_the_memory_transport_cannot_be_configured(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="pass transport=lambda"):
        Producer(EndpointConfig(engine="p", transport="memory"), cache_of(memory_of()))


@pytest.fixture
def stranger() -> Iterator[Callable[[Producer], zmq.Socket[bytes]]]:
    context = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []

    def dial(producer: Producer) -> zmq.Socket[bytes]:
        one = context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 0)
        one.connect(producer.address)
        sockets.append(one)
        return one

    yield dial
    for one in sockets:
        one.close()
    context.term()


class TestStrangers:
    def test_garbage_and_oversized_frames(
        self, scene: Scene, stranger: Callable[[Producer], zmq.Socket[bytes]]
    ) -> None:
        producer, consumer = scene.producer(cache=cache_of(fill(memory_of()))), scene.consumer()
        link = consumer.connect(producer.address)
        one = stranger(producer)
        token = os.urandom(16)
        frames = [
            b"", b"\x00", os.urandom(1000), b"\x81" * 5000, b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000,
            msgspec.msgpack.encode({"type": "introduction"}), msgspec.msgpack.encode({"type": "relay", "frame": 3}),
            msgspec.msgpack.encode({"type": "nothing of ours", "token": token}),
            wire.pack(wire.Alive(token)), wire.pack(wire.Bye(token)), wire.pack(wire.Refusal(token, "no")),
            wire.pack(wire.Relay(os.urandom(64))), wire.pack(wire.Relay(b"PKV\x01" + token + b"\x00")),
            wire.pack(wire.Relay(b"PKV\x63" + token + b"\x00")),
        ]  # fmt: skip
        for frame in frames:
            one.send(frame)
        one.send_multipart([b"two", b"parts"])
        stranger(producer).send(bytes(wire.MAX_CONTROL_FRAME + 1))
        until(lambda: producer.stats()["control frames dropped"] >= 8)
        push = Pushed(producer, consumer, "r", [1, 2], [3, 4], 8)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait_released(WAIT)
        assert link.alive
        assert producer.stats()["errors"] == 0
        until(lambda: producer.stats().get("foreign frames", 0) + producer.stats().get("frames dropped", 0) >= 3)

    def test_a_consumer_bombarded_by_its_producer(self, scene: Scene) -> None:
        """Frames with the right token and nonsense inside, over both ways."""
        producer, consumer = scene.producer(), scene.consumer()
        link = consumer.connect(producer.address)
        pair = producer._side.agents[consumer.agent]
        header = b"PKV\x01" + pair.token
        bodies = [b"", b"\xc0", os.urandom(300), b"\x93" + b"\xa5offer" * 3, msgspec.msgpack.encode(["cancel", 1])]
        theirs = encode(pair.token, Cancel(TransferKey("x", "d", "e"), 3, Outcome.CANCELLED))
        for body in [*(header + body for body in bodies), theirs, bytes(MAX_FRAME)]:
            producer._control.send(pair.route, wire.Relay(body))
            producer.ask(lambda _, body=body: str(producer._side.transport.send(consumer.agent, body)))  # type: ignore
        until(lambda: consumer.stats().get("frames dropped", 0) >= 2 * len(bodies))
        push = Pushed(producer, consumer, "r", [1], [3], 4)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait_released(WAIT)
        assert consumer.stats()["errors"] == 0
