"""verify="checksum": what arrives as something else fails its transfer, whatever the layouts of the two sides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from pushkv import Consumer, Kind, KVCache, Link, Outcome, Producer
from pushkv.backends.cpu import CpuBackend
from pushkv.core.commands import Send
from pushkv.core.layouts import Shard, group_of_tensor, place_array
from pushkv.core.messages import Cancel, Complete
from pushkv.errors import BackendError, ConfigError, HandshakeError, HandshakeRefused
from pushkv.runtime import digest, verifying, wire
from pushkv.runtime.digest import Reader
from pushkv.runtime.posting import Posting
from pushkv.transport.memory import Faults, Network
from runtime.engines import BYTES, LAYOUTS, Engines, Layout, fails_while_unreadable
from runtime.scene import WAIT, Array, Pushed, Scene, array_of, cache_of, fill, memory_of, until

MakeScene = Callable[[Network], Scene]
CORRUPT = Faults(corrupt=1.0)


def connected(scene: Scene, **settings: Any) -> tuple[Producer, Consumer, Link]:
    settings = {"verify": "checksum", **settings}
    producer = scene.producer(cache=cache_of(fill(memory_of(256))), **settings)
    consumer = scene.consumer(cache=cache_of(memory_of(256)), **settings)
    return producer, consumer, consumer.connect(producer.address)


def pushes(producer: Producer, consumer: Consumer, count: int, blocks: int = 3) -> list[Pushed]:
    """Prompts of two tokens less than their blocks hold; blocks fall on the target."""
    return [
        Pushed(
            producer, consumer, f"r{n}", list(range(n * blocks, (n + 1) * blocks)),
            list(range(255 - n * blocks, 255 - (n + 1) * blocks, -1)), 4 * blocks - 2,
        )
        for n in range(count)
    ]  # fmt: skip


class TestAcrossLayouts:
    @pytest.mark.parametrize(("ours", "theirs"), LAYOUTS)
    def test_what_arrives_as_it_was_is_complete(self, scene: Scene, ours: Layout, theirs: Layout) -> None:
        """In three parts that end within blocks."""
        engines = Engines(scene, ours, theirs)
        transfers = engines.offer()
        for ready in (5, 13, 22):
            engines.stage(ready)
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.COMPLETE] * theirs.ranks
        assert engines.arrived()
        assert engines.stat("bytes verified") == 22 * BYTES
        assert engines.stat("parts that differ") == 0

    @pytest.mark.parametrize(("ours", "theirs"), LAYOUTS)
    def test_a_bit_that_does_not_fails_the_transfer(self, scene: Scene, ours: Layout, theirs: Layout) -> None:
        engines = Engines(scene, ours, theirs)
        transfers = engines.offer(start=9)
        scene.network.faults = CORRUPT
        engines.stage()
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.TRANSPORT_ERROR] * theirs.ranks
        assert all(transfer.wait_released(WAIT) for transfer in transfers)
        assert not engines.arrived(9)

    def test_a_prefix_that_is_there_already_is_not_looked_at(self, scene: Scene) -> None:
        engines = Engines(scene, Layout(block=8), Layout("BLNHSC"))
        transfers = engines.offer(start=9)
        engines.stage()
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.COMPLETE]
        assert engines.arrived(9)
        assert engines.stat("bytes verified") == 13 * BYTES

    def test_one_rank_of_two_is_named(self, scene: Scene) -> None:
        engines = Engines(scene, Layout(ranks=2), Layout(block=8))
        (transfer,) = engines.offer()
        engines.stage(ranks=[0])
        until(lambda: engines.stat("bytes verified") == 22 * BYTES // 2)
        scene.network.faults = CORRUPT
        engines.stage(ranks=[1])
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "part 0 (tokens 0 to 22) of producer rank 1 was sent with the digest " in transfer.detail

    def test_one_part_of_three(self, scene: Scene) -> None:
        engines = Engines(scene, Layout("LBNHSC"), Layout(block=8))
        (transfer,) = engines.offer()
        engines.stage(9)
        until(lambda: engines.stat("bytes verified") == 8 * BYTES)
        scene.network.faults = CORRUPT
        engines.stage(17)
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "part 1 (tokens 8 to 16) of producer rank 0" in transfer.detail
        assert transfer.wait_released(WAIT)


def grouped(seed: int | None, axes: str) -> tuple[KVCache, list[Array]]:
    """A cache of two groups: attention and a window of 6 tokens, in memory of their own."""
    shapes = [{"L": 2, "S": 2, "B": 32, "H": 2, "N": 4, "C": 4}, {"L": 3, "S": 2, "B": 32, "H": 2, "N": 4, "C": 4}]
    arrays = [np.zeros([shape[axis] for axis in axes], np.float32) for shape in shapes]
    if seed is not None:
        arrays = [fill(array, seed + number) for number, array in enumerate(arrays)]
    backend, regions = CpuBackend(), []
    placed = [place_array(backend.describe(array), regions) for array in arrays]
    share = Shard(0, 2, 2)
    groups = (
        group_of_tensor(["a0", "a1"], placed[0], axes, share),
        group_of_tensor(["w0", "w1", "w2"], placed[1], axes, share, kind=Kind.WINDOW, window=6),
    )
    return KVCache.from_groups(groups, regions, backend, arrays, model="m"), arrays


@pytest.mark.parametrize("faults", [Faults(), CORRUPT], ids=["sound", "corrupt"])
def test_groups_of_several_kinds(scene: Scene, faults: Faults) -> None:
    """A part then has several spans; those of the window are of its last tokens alone."""
    (ours, _), (theirs, _) = grouped(1, "LSBHNC"), grouped(None, "BLNHSC")
    producer = scene.producer(cache=ours, verify="checksum")
    consumer = scene.consumer(cache=theirs, verify="checksum")
    link = consumer.connect(producer.address)
    scene.network.faults = faults
    asked = {"prompt": bytes(32), "prompt_tokens": 22}
    transfer = consumer.offer("r", link, [[9, 4, 7, 1, 3, 20], [30, 8, 2, 11, 5, 6]], **asked)
    for ready in (10, 22):
        producer.stage("r", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]], ready=ready, **asked)
    assert transfer.wait(WAIT) is (Outcome.COMPLETE if faults == Faults() else Outcome.TRANSPORT_ERROR)
    assert transfer.wait_released(WAIT)
    if faults == Faults():
        assert consumer.stats()["bytes verified"] == (22 * 2 + 6 * 3) * 2 * 2 * 4 * 4


class TestHowItFails:
    def test_both_digests_are_named_and_the_engine_may_try_again(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        push, other = pushes(producer, consumer, 2)
        transfer = push.offer(link)
        scene.network.faults = CORRUPT
        stage = push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        words = transfer.detail.replace(";", "").split()
        sent, got = words[words.index("digest") + 1], words[-1]
        assert sent != got
        assert {len(bytes.fromhex(word)) for word in (sent, got)} == {4}
        assert transfer.wait_released(WAIT)
        assert stage.wait_released(WAIT)
        assert consumer.stats()["parts that differ"] == 1
        scene.network.faults = Faults()
        again = push.offer(link, attempt=1, blocks=other.target)
        push.stage()
        assert again.wait(WAIT) is Outcome.COMPLETE

    def test_without_it_nobody_notices(self, scene: Scene) -> None:
        """The same fault: what all this is about."""
        producer, consumer, link = connected(scene, verify="off")
        (push,) = pushes(producer, consumer, 1)
        scene.network.faults = CORRUPT
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert not push.arrived()

    def test_a_part_that_differs_ends_no_custody(self, scene: Scene) -> None:
        """Its bytes may still be on their way: the blocks wait for the producer's word."""
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1)
        transfer = push.offer(link)
        send, withheld = consumer._side._send, threading.Event()

        def withhold(command: Send, now: float) -> None:
            if isinstance(command.message, Cancel):
                withheld.set()
            else:
                send(command, now)

        consumer._side._send = withhold  # type: ignore[method-assign]
        scene.network.faults = CORRUPT
        stage = push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert withheld.wait(WAIT)
        assert stage.wait(WAIT) is Outcome.COMPLETE, "as far as the producer knows"
        assert not transfer.wait_released(0.2)
        assert consumer.held_blocks == 3
        consumer._side._send = send  # type: ignore[method-assign]
        assert transfer.wait_released(WAIT)

    def test_a_source_that_changes_after_its_digest(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the digest and the WRITE somebody writes into the blocks that the engine should have left alone."""
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1)
        hand_over = Posting._hand_over

        def spoil(self: Posting, *given: Any) -> int:
            array_of(producer)[0, 0, push.source[1], 0, 0, 0] += 1
            return hand_over(self, *given)

        monkeypatch.setattr(Posting, "_hand_over", spoil)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR

    def test_a_target_that_changes_before_it_is_looked_at(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1)
        part = verifying.Verifying.part

        def spoil(self: Any, *given: Any) -> None:
            array_of(consumer)[0, 0, push.target[1], 0, 0, 0] += 1
            part(self, *given)

        monkeypatch.setattr(verifying.Verifying, "part", spoil)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR

    def test_a_part_without_a_digest(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1)
        monkeypatch.setattr(Posting, "_digest", lambda *_: None)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "part 0 (tokens 0 to 10) of producer rank 0 came without a digest" in transfer.detail

    @pytest.mark.parametrize("whose", ["producer", "consumer"])
    def test_memory_that_cannot_be_read_back(self, scene: Scene, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
        producer, consumer, link = connected(scene)
        push, other = pushes(producer, consumer, 2)
        victim = {"producer": producer, "consumer": consumer}[whose]
        fails_while_unreadable(monkeypatch, Reader, lambda one: one is victim._side.reader, (push, other), link)

    def test_a_part_of_what_was_not_owed_is_the_machines(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is refused as without verifying, and nothing is read for it."""
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1)
        part = verifying.Verifying.part

        def lie(self: Any, pair: Any, complete: Complete, now: float) -> None:
            spans = tuple(msgspec.structs.replace(span, token_stop=1000) for span in complete.spans)
            part(self, pair, msgspec.structs.replace(complete, spans=spans), now)

        monkeypatch.setattr(verifying.Verifying, "part", lie)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.REJECTED_GEOMETRY
        assert "bytes verified" not in consumer.stats()


class TestAgreeing:
    def test_sides_that_differ_are_not_connected(self, scene: Scene) -> None:
        checking, careless = scene.producer("p", verify="checksum"), scene.producer("q")
        with pytest.raises(
            HandshakeRefused, match="verify is 'checksum' on this side and 'off' on the other: set it"
        ):
            scene.consumer().connect(checking.address)
        with pytest.raises(HandshakeRefused, match="verify is 'off' on this side and 'checksum' on the other"):
            scene.consumer("e", verify="checksum").connect(careless.address)

    def test_a_producer_that_says_nothing_of_it_cannot(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """An older one, which would also not refuse a consumer that wants it."""
        producer, consumer = scene.producer(), scene.consumer(verify="checksum")
        assert consumer._side.me is not None
        me = consumer._side.me
        older = msgspec.msgpack.decode(msgspec.msgpack.encode(me))
        del older["verify"]
        assert msgspec.convert(older, type(me), strict=False).verify == "off"
        refusals: list[str] = []
        check = wire.check_verify

        def of_the_consumer_alone(ours: wire.Side, theirs: wire.Side) -> None:
            if ours is me:
                refusals.append(theirs.verify)
                check(ours, theirs)

        monkeypatch.setattr(wire, "check_verify", of_the_consumer_alone)
        with pytest.raises(HandshakeError, match="verify is 'checksum' on this side and 'off' on the other"):
            consumer.connect(producer.address)
        assert refusals == ["off"]

    def test_another_word_is_refused(self, scene: Scene) -> None:
        with pytest.raises(ConfigError, match="verify is 'crc'; choose 'off' or 'checksum'"):
            scene.producer(verify="crc")

    def test_a_backend_that_cannot_is_refused_when_the_endpoint_is_made(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(CpuBackend, "packer")
        before = threading.active_count()
        with pytest.raises(BackendError, match="reads memory back, which cannot be done here; leave it at 'off'"):
            scene.producer(verify="checksum")
        assert threading.active_count() == before
        assert scene.producer().address

    def test_off_reads_nothing_and_sends_nothing(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise AssertionError("read")

        monkeypatch.setattr(Reader, "__init__", fail)
        came: list[Complete] = []
        part = verifying.Verifying.part
        monkeypatch.setattr(
            verifying.Verifying,
            "part",
            lambda self, pair, complete, now: (came.append(complete), part(self, pair, complete, now)),
        )
        producer, consumer, link = connected(scene, verify="off")
        (push,) = pushes(producer, consumer, 1)
        transfer = push.offer(link)
        push.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert push.arrived()
        assert [complete.digest for complete in came] == [None]
        assert not consumer._side._offers


class TestALittleAtATime:
    @pytest.fixture(autouse=True)
    def slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One chunk of 512 bytes a look, for prompts of several KiB."""
        monkeypatch.setattr(digest, "CHUNK", 512)
        monkeypatch.setattr(verifying, "LOOK_SECONDS", 0.0)
        monkeypatch.setattr("pushkv.runtime.posting.SLICE_SECONDS", 0.0)

    def test_it_comes_to_the_same(self, scene: Scene) -> None:
        producer, consumer, link = connected(scene)
        for push in pushes(producer, consumer, 3, blocks=25):
            transfer = push.offer(link)
            push.stage(ready=50)
            push.stage()
            assert transfer.wait(WAIT) is Outcome.COMPLETE
            assert push.arrived()

    def test_parts_take_turns(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer, link = connected(scene)
        seen: list[bytes] = []
        verify = verifying.Verifying._verify

        def once_both_are_there(self: Any, now: float) -> bool:
            if len(self._looks) < 2 and not seen:
                return False
            seen.extend(part.nonce for part in list(self._looks)[:1])
            return verify(self, now)

        monkeypatch.setattr(verifying.Verifying, "_verify", once_both_are_there)
        two = pushes(producer, consumer, 2, blocks=40)
        transfers = [push.offer(link) for push in two]
        for push in two:
            push.stage()
        assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.COMPLETE] * 2
        assert len(set(seen)) == 2
        changes = sum(one != other for one, other in pairwise(seen))
        assert changes > 2, "neither waited for the other's end"

    def test_what_is_cancelled_meanwhile_is_not_read_any_more(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its blocks may be freed once they are released."""
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, blocks=40)
        reading, go_on = threading.Event(), threading.Event()
        reads: list[int] = []
        read = Reader.read

        def slowly(self: Reader, runs: Any) -> Any:
            if self is consumer._side.reader:
                reads.append(len(reads))
                reading.set()
                assert go_on.wait(WAIT)
            return read(self, runs)

        monkeypatch.setattr(Reader, "read", slowly)
        transfer = push.offer(link)
        push.stage()
        assert reading.wait(WAIT)
        assert transfer.outcome is None, "not before it has been verified"
        consumer.cancel(transfer)
        # From here on it reads one chunk a look, and hears of the cancel in between.
        go_on.set()
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert transfer.wait_released(WAIT)
        done = len(reads)
        assert done < 2 * 2 * 158 * 2 * 16 // 512
        assert not consumer._side._looks
        assert consumer.ask(lambda side: str(len(side._looks) + len(side._offers))) == "0"
        assert len(reads) == done

    def test_a_producer_that_is_told_to_stop_reads_no_further(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        producer, consumer, link = connected(scene)
        (push,) = pushes(producer, consumer, 1, blocks=40)
        reading, go_on = threading.Event(), threading.Event()
        read = Reader.read

        def slowly(self: Reader, runs: Any) -> Any:
            if self is producer._side.reader:
                reading.set()
                assert go_on.wait(WAIT)
            return read(self, runs)

        monkeypatch.setattr(Reader, "read", slowly)
        transfer = push.offer(link)
        stage = push.stage()
        assert reading.wait(WAIT)
        consumer.cancel(transfer)
        go_on.set()
        assert transfer.wait_released(WAIT)
        assert stage.wait_released(WAIT)
        assert producer.ask(lambda side: str(sum(map(len, side._queues.values())) + len(side._writes))) == "0"


def test_notifications_that_come_twice_or_not_in_order(timed: MakeScene) -> None:
    scene = timed(Network(seed=4))
    producer, consumer, link = connected(scene)
    scene.network.faults = Faults(duplicate=1.0, reorder=0.5, delay=(0.0, 0.01))
    many = pushes(producer, consumer, 24)
    transfers = [push.offer(link) for push in many]
    for ready in (3, 7, 10):
        for push in many:
            push.stage(ready=ready)
    assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
    assert all(push.arrived() for push in many)
    assert all(transfer.wait_released(WAIT) for transfer in transfers)
    assert "parts that differ" not in consumer.stats()
    assert consumer.stats()["bytes verified"] < 2 * 24 * 10 * 2 * 2 * 2 * 4 * 4, "a duplicate is not read again"


def test_where_one_write_in_three_is_corrupt_just_those_fail(timed: MakeScene) -> None:
    scene = timed(Network(seed=7))
    producer, consumer, link = connected(scene)
    scene.network.faults = Faults(corrupt=0.33, delay=(0.0, 0.01))
    many = pushes(producer, consumer, 60)
    transfers = [push.offer(link) for push in many]
    for push in many:
        push.stage()
    assert all(transfer.wait(WAIT) for transfer in transfers)
    good = [transfer.outcome is Outcome.COMPLETE for transfer in transfers]
    assert {transfer.outcome for transfer in transfers} == {Outcome.COMPLETE, Outcome.TRANSPORT_ERROR}
    assert [push.arrived() for push in many] == good
    assert all(transfer.wait_released(WAIT) for transfer in transfers)
