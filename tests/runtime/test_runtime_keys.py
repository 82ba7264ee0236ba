"""Endpoints behind a cluster key, and strangers at their door."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from pushkv import Consumer, Outcome, Producer
from pushkv.core.messages import TOKEN_BYTES
from pushkv.errors import AddressError, HandshakeError
from pushkv.runtime import wire
from pushkv.runtime.keys import new_key
from pushkv.runtime.rate import Rate
from runtime.scene import Scene, blocks_for, until

PROMPT = b"p" * 32


def write_keys(file: Path, *keys: str) -> str:
    file.write_text("\n".join(keys))
    file.chmod(0o600)
    return str(file)


def push(producer: Producer, consumer: Consumer) -> Outcome | None:
    link = consumer.connect(producer.address)
    transfer = consumer.offer("t", link, blocks_for(16), prompt=PROMPT, prompt_tokens=16)
    producer.stage("t", blocks_for(16), prompt=PROMPT, prompt_tokens=16)
    return transfer.wait(30)


def test_a_push_between_holders_of_one_key(scene: Scene, tmp_path: Path) -> None:
    file = write_keys(tmp_path / "key", new_key())
    producer, consumer = scene.producer(key_file=file), scene.consumer(key_file=file)
    assert producer.guarded
    assert push(producer, consumer) is Outcome.COMPLETE


def test_who_holds_another_key_or_none_gets_no_answer(scene: Scene, tmp_path: Path) -> None:
    producer = scene.producer(key_file=write_keys(tmp_path / "ours", new_key()))
    other = scene.consumer("other", key_file=write_keys(tmp_path / "theirs", new_key()))
    none = scene.consumer("none")
    for stranger in (other, none):
        with pytest.raises(HandshakeError, match="one cluster key"):
            stranger.connect(producer.address, timeout=0.7)
    assert not producer._side.pairs


def test_the_key_in_the_environment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSHKV_CLUSTER_KEY", new_key())
    assert push(scene.producer(), scene.consumer()) is Outcome.COMPLETE


def test_a_key_being_rotated(scene: Scene, tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    ahead = write_keys(tmp_path / "ahead", new, old)
    behind = write_keys(tmp_path / "behind", old, new)
    assert push(scene.producer("p1", key_file=ahead), scene.consumer("d1", key_file=behind)) is Outcome.COMPLETE
    assert push(scene.producer("p2", key_file=behind), scene.consumer("d2", key_file=ahead)) is Outcome.COMPLETE


def test_the_network_needs_a_key_or_the_word_for_it(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(AddressError, match="without a cluster key; make one with `pushkv keygen`"):
        scene.producer(bind="0.0.0.0:0", advertise="127.0.0.1:0")
    scene.producer(bind="0.0.0.0:0", advertise="127.0.0.1:0", key_file=write_keys(tmp_path / "key", new_key()))
    scene.producer(bind="0.0.0.0:0", advertise="127.0.0.1:0", listen_to_the_network_without_a_key=True)


def test_an_address_that_is_not_allowed(scene: Scene) -> None:
    producer = scene.producer(allow=("10.0.0.0/8",))
    with pytest.raises(HandshakeError, match="does not answer"):
        scene.consumer().connect(producer.address, timeout=0.7)


def test_one_who_introduces_itself_without_end_does_not_stop_others(scene: Scene) -> None:
    """A stranger's flood of introductions costs the producer a count each; a good consumer is served beside it."""
    producer, consumer, spare = scene.producer(), scene.consumer(), scene.consumer("spare")
    assert spare._side.me is not None
    context = zmq.Context()
    with context.socket(zmq.DEALER) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        flood.connect(producer.address)
        for number in range(500):
            token = number.to_bytes(TOKEN_BYTES, "little")
            flood.send(wire.pack(wire.Introduction(token, spare._side.me)))
        assert push(producer, consumer) is Outcome.COMPLETE
        until(lambda: producer.stats().get("handshakes over the rate", 0) > 400, "the flood is held back")
        assert producer.stats()["handshakes over the rate"] < 500
    context.term()


def test_strangers_frames_do_not_reach_the_transfer_thread(scene: Scene) -> None:
    producer, consumer = scene.producer(), scene.consumer()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(producer.address)
        for number in range(50):
            stranger.send(wire.pack(wire.Relay(b"PKV\x01" + number.to_bytes(TOKEN_BYTES, "little") + b"x")))
        until(lambda: producer.stats().get("foreign frames", 0) == 50, "the frames are counted")
        assert push(producer, consumer) is Outcome.COMPLETE
    context.term()


def test_a_rate_is_for_each_and_for_all() -> None:
    rate = Rate(per_second=1, burst=2, together=3)
    assert [rate.allows("a", 0.0) for _ in range(3)] == [True, True, False]
    assert rate.allows("a", 1.0)
    assert [rate.allows(name, 1.0) for name in "bcdefg"] == [True] * 5 + [False]
    assert rate.allows("b", 100.0)
    for number in range(10_000):
        rate.allows(number, 200.0)
    assert len(rate._buckets) <= 4096
