"""The contract of every :class:`~pushkv.transport.base.Transport`, as a pytest class.

Derive from :class:`TransportContract`, implement :meth:`TransportContract.make_pair`, and let pytest collect it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.errors import PushKVError, TransportError
from pushkv.transport.base import Host, Lattice, Pieces, Proof, Transport, WriteResult, WriteStatus

BUFFER = 1 << 20
PIECE = 1024
WAIT_S = 10.0


@dataclass
class Side:
    """One transport with the memory it registered."""

    transport: Transport
    memory: NDArray[np.uint8]

    @property
    def address(self) -> int:
        """Where its memory starts."""
        return int(self.memory.ctypes.data)

    def pieces(self, *spans: tuple[int, int]) -> Pieces:
        """Pieces by (offset, length) in its memory."""
        rows = np.array(spans, dtype=np.uint64).reshape(-1, 2)
        return Pieces(rows[:, 0] + np.uint64(self.address), rows[:, 1].copy())

    def lattice(self, *rows: tuple[int, int, int], size: int = PIECE) -> Lattice:
        """A lattice by rows of (offset, stride, count)."""
        table = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        return Lattice(table[:, 0] + np.uint64(self.address), table[:, 1].copy(), table[:, 2].copy(), size)


@dataclass
class Pair:
    """Two connected transports and what came out of them so far."""

    producer: Side
    consumer: Side
    settle: Callable[[], object] = lambda: None
    """Lets whatever is due happen, where nothing does by itself."""
    results: dict[int, WriteResult] = field(default_factory=dict)
    arrived: list[tuple[str, bytes]] = field(default_factory=list)

    def pump(self) -> None:
        """Poll both sides once."""
        self.settle()
        for result in self.producer.transport.poll():
            assert result.write not in self.results, "a WRITE ended twice"
            self.results[result.write] = result
        self.settle()
        self.arrived += self.consumer.transport.receive()

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds, or fail."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"nothing came in {WAIT_S} s: {self.results} {self.arrived}"
            self.pump()

    def finish(self, write: int) -> WriteResult:
        """Poll until the WRITE ended."""
        self.until(lambda: write in self.results)
        return self.results[write]

    def payloads(self, count: int) -> list[bytes]:
        """Poll until so many notifications came and take their payloads."""
        self.until(lambda: len(self.arrived) >= count)
        payloads = [payload for _, payload in self.arrived]
        self.arrived.clear()
        return payloads

    def close(self) -> None:
        """Close both."""
        self.producer.transport.close()
        self.consumer.transport.close()


def connect(producer: Transport, consumer: Transport, host: Host | None = None) -> Pair:
    """Claim, register 1 MiB a side and add each other; the producer's memory holds noise, the consumer's zeros."""
    noise = np.random.default_rng(7).integers(1, 256, BUFFER, dtype=np.uint8)
    pair = Pair(Side(producer, noise), Side(consumer, np.zeros(BUFFER, dtype=np.uint8)))
    for side in (pair.producer, pair.consumer):
        side.transport.claim()
        side.transport.register([Region(side.address, BUFFER)])
    assert producer.add_peer(consumer.metadata(), host) == consumer.agent
    assert consumer.add_peer(producer.metadata(), host) == producer.agent
    return pair


class TransportContract:
    """What every transport does, whatever moves its bytes."""

    def make_pair(self) -> Pair:
        """Make two connected transports; implemented by the derived class."""
        raise NotImplementedError

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """Two connected transports, closed afterwards."""
        pair = self.make_pair()
        yield pair
        pair.close()

    def test_a_notification_arrives_with_its_sender(self, pair: Pair) -> None:
        payload = bytes(range(256)) * 8
        pair.producer.transport.send(pair.consumer.transport.agent, payload)
        pair.until(lambda: bool(pair.arrived))
        assert pair.arrived == [(pair.producer.transport.agent, payload)]

    def test_many_notifications_all_arrive(self, pair: Pair) -> None:
        sent = [f"note {i}".encode() for i in range(200)]
        for payload in sent:
            pair.producer.transport.send(pair.consumer.transport.agent, payload)
        assert sorted(pair.payloads(len(sent))) == sorted(sent)

    def test_notifications_go_both_ways(self, pair: Pair) -> None:
        pair.consumer.transport.send(pair.producer.transport.agent, b"offer")
        back: list[tuple[str, bytes]] = []

        def came() -> bool:
            back.extend(pair.producer.transport.receive())
            return bool(back)

        pair.until(came)
        assert back == [(pair.consumer.transport.agent, b"offer")]

    def test_pieces_land_and_the_notification_follows(self, pair: Pair) -> None:
        source = pair.producer.pieces((0, 100), (5000, 3), (70000, 65536))
        target = pair.consumer.pieces((900000, 100), (17, 3), (4096, 65536))
        write = pair.producer.transport.write(pair.consumer.transport.agent, source, target, b"\x00done\xff")
        assert pair.finish(write) == WriteResult(write, WriteStatus.DONE)
        assert pair.payloads(1) == [b"\x00done\xff"]
        assert pair.producer.transport.descriptors(write) in (3, None)
        want = np.zeros(BUFFER, dtype=np.uint8)
        for (ours, length), theirs in zip(((0, 100), (5000, 3), (70000, 65536)), (900000, 17, 4096), strict=True):
            want[theirs : theirs + length] = pair.producer.memory[ours : ours + length]
        np.testing.assert_array_equal(pair.consumer.memory, want)

    def test_indexed_pieces_land(self, pair: Pair) -> None:
        prepared = self._prepare(pair)
        source = np.array([0, 1, 9, 30], dtype=np.int32)
        target = np.array([8, 9, 0, 39], dtype=np.int32)
        write = pair.producer.transport.write_indexed(prepared, source, target, b"part")
        assert pair.finish(write).status is WriteStatus.DONE
        assert pair.payloads(1) == [b"part"]
        for one, other in zip(source, target, strict=True):
            landed = pair.consumer.memory[_target_offset(other) :][:PIECE]
            np.testing.assert_array_equal(landed, pair.producer.memory[_source_offset(one) :][:PIECE])

    def test_neighbours_on_both_sides_are_one_descriptor(self, pair: Pair) -> None:
        prepared = self._prepare(pair)
        run = np.arange(8, dtype=np.int32)
        write = pair.producer.transport.write_indexed(prepared, run, run, b"run")
        pair.finish(write)
        assert pair.producer.transport.descriptors(write) in (1, None)

    def test_an_index_path_and_a_piece_path_move_the_same_bytes(self, pair: Pair) -> None:
        prepared = self._prepare(pair)
        source = np.array([3, 25, 7], dtype=np.int32)
        target = np.array([21, 2, 3], dtype=np.int32)
        pair.finish(pair.producer.transport.write_indexed(prepared, source, target, b"1"))
        by_index = pair.consumer.memory.copy()
        pair.consumer.memory[:] = 0
        ours = pair.producer.pieces(*((_source_offset(i), PIECE) for i in source))
        theirs = pair.consumer.pieces(*((_target_offset(i), PIECE) for i in target))
        pair.finish(pair.producer.transport.write(pair.consumer.transport.agent, ours, theirs, b"2"))
        np.testing.assert_array_equal(by_index, pair.consumer.memory)

    def test_a_write_of_nothing_is_its_notification(self, pair: Pair) -> None:
        nothing = np.empty(0, dtype=np.int32)
        prepared = self._prepare(pair)
        one = pair.producer.transport.write_indexed(prepared, nothing, nothing, b"empty indices")
        agent = pair.consumer.transport.agent
        two = pair.producer.transport.write(agent, pair.producer.pieces(), pair.consumer.pieces(), b"empty pieces")
        assert pair.finish(one).status is pair.finish(two).status is WriteStatus.DONE
        assert sorted(pair.payloads(2)) == [b"empty indices", b"empty pieces"]
        assert pair.producer.transport.descriptors(one) in (0, None)

    def test_a_write_of_zero_bytes_warms_the_path_up(self, pair: Pair) -> None:
        source, target = pair.producer.pieces((0, 0)), pair.consumer.pieces((0, 0))
        write = pair.producer.transport.write(pair.consumer.transport.agent, source, target, b"warm")
        assert pair.finish(write).status is WriteStatus.DONE
        assert pair.payloads(1) == [b"warm"]
        assert not pair.consumer.memory.any()

    def test_pieces_of_two_sizes_are_refused(self, pair: Pair) -> None:
        ours, theirs = pair.producer.lattice((0, 64, 4), size=64), pair.consumer.lattice((0, 32, 4), size=32)
        one = np.zeros(1, dtype=np.int32)
        with pytest.raises(TransportError):
            pair.producer.transport.write_indexed(
                pair.producer.transport.prepare(pair.consumer.transport.agent, ours, theirs), one, one, b"x"
            )

    def test_an_empty_lattice_can_be_prepared_but_not_indexed(self, pair: Pair) -> None:
        transport = pair.producer.transport
        prepared = transport.prepare(
            pair.consumer.transport.agent, pair.producer.lattice(), pair.consumer.lattice((0, 0, 0))
        )
        first = np.zeros(1, dtype=np.int32)
        with pytest.raises(TransportError):
            transport.write_indexed(prepared, first, first, b"x")

    def test_every_write_has_its_own_number_and_ends_once(self, pair: Pair) -> None:
        agent = pair.consumer.transport.agent
        writes = [
            pair.producer.transport.write(
                agent, pair.producer.pieces((i * 64, 64)), pair.consumer.pieces((i * 64, 64)), b"%d" % i
            )
            for i in range(50)
        ]
        assert len(set(writes)) == 50
        pair.until(lambda: len(pair.results) == 50)
        assert set(pair.results) == set(writes)
        assert sorted(pair.payloads(50)) == sorted(b"%d" % i for i in range(50))

    @pytest.mark.parametrize("wrong", ["number", "length", "unregistered source", "unregistered target"])
    def test_wrong_pieces_are_refused_before_anything_moves(self, pair: Pair, wrong: str) -> None:
        source, target = pair.producer.pieces((0, 64)), pair.consumer.pieces((0, 64))
        if wrong == "number":
            target = pair.consumer.pieces((0, 64), (64, 64))
        elif wrong == "length":
            target = pair.consumer.pieces((0, 65))
        elif wrong == "unregistered source":
            source = pair.producer.pieces((BUFFER, 64))
        else:
            target = pair.consumer.pieces((BUFFER - 1, 64))
        with pytest.raises(TransportError):
            pair.producer.transport.write(pair.consumer.transport.agent, source, target, b"x")
        pair.pump()
        assert not pair.arrived
        assert not pair.consumer.memory.any()

    @pytest.mark.parametrize(("source", "target"), [([0], [0, 1]), ([40], [0]), ([0], [-1])])
    def test_wrong_indices_are_refused(self, pair: Pair, source: list[int], target: list[int]) -> None:
        prepared = self._prepare(pair)
        ours, theirs = np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        with pytest.raises(TransportError):
            pair.producer.transport.write_indexed(prepared, ours, theirs, b"x")

    def test_unknown_numbers_and_peers_are_refused(self, pair: Pair) -> None:
        transport, one = pair.producer.transport, np.zeros(1, dtype=np.int32)
        with pytest.raises(TransportError, match="999"):
            transport.write_indexed(999, one, one, b"x")
        with pytest.raises(TransportError, match="stranger"):
            transport.send("stranger", b"x")
        with pytest.raises(TransportError, match="stranger"):
            transport.prepare("stranger", pair.producer.lattice(), pair.consumer.lattice())

    def test_metadata_that_is_none_is_refused(self, pair: Pair) -> None:
        for garbage in (b"", b"garbage", pair.producer.transport.metadata()[:40]):
            with pytest.raises(PushKVError):
                pair.consumer.transport.add_peer(garbage, None)
        self._still_works(pair)

    def test_adding_a_peer_again_changes_nothing(self, pair: Pair) -> None:
        prepared = self._prepare(pair)
        agent = pair.producer.transport.add_peer(pair.consumer.transport.metadata(), None)
        assert agent == pair.consumer.transport.agent
        one = np.zeros(1, dtype=np.int32)
        assert pair.finish(pair.producer.transport.write_indexed(prepared, one, one, b"x")).status is WriteStatus.DONE

    def test_memory_registered_later_is_reached_after_adding_again(self, pair: Pair) -> None:
        late = np.zeros(4096, dtype=np.uint8)
        pair.consumer.transport.register([Region(int(late.ctypes.data), late.nbytes)])
        agent = pair.producer.transport.add_peer(pair.consumer.transport.metadata(), None)
        target = Pieces(np.array([late.ctypes.data], dtype=np.uint64), np.array([4096], dtype=np.uint64))
        pair.finish(pair.producer.transport.write(agent, pair.producer.pieces((0, 4096)), target, b"late"))
        np.testing.assert_array_equal(late, pair.producer.memory[:4096])

    def test_registering_nothing_is_refused(self, pair: Pair) -> None:
        with pytest.raises(TransportError, match="length=0"):
            pair.producer.transport.register([Region(pair.producer.address, 0)])

    def test_a_removed_peer_is_unknown_and_can_come_back(self, pair: Pair) -> None:
        transport, agent = pair.producer.transport, pair.consumer.transport.agent
        prepared = self._prepare(pair)
        transport.remove_peer(agent)
        transport.remove_peer(agent)
        one = np.zeros(1, dtype=np.int32)
        with pytest.raises(TransportError):
            transport.write_indexed(prepared, one, one, b"x")
        with pytest.raises(TransportError):
            transport.send(agent, b"x")
        transport.add_peer(pair.consumer.transport.metadata(), None)
        self._still_works(pair)

    def test_a_living_peer_proves_nothing(self, pair: Pair) -> None:
        assert pair.producer.transport.writes_ended(pair.consumer.transport.agent) is Proof.NONE
        assert pair.producer.transport.writes_ended("stranger") is Proof.NONE

    def test_the_path_is_told_in_words(self, pair: Pair) -> None:
        assert pair.producer.transport.path(pair.consumer.transport.agent)

    def test_another_thread_is_turned_away(self, pair: Pair) -> None:
        caught: list[BaseException] = []

        def intrude() -> None:
            try:
                pair.producer.transport.poll()
            except AssertionError as error:
                caught.append(error)

        thread = threading.Thread(target=intrude, name="intruder")
        thread.start()
        thread.join()
        assert "intruder" in str(caught[0])
        with pytest.raises(TransportError):
            pair.producer.transport.claim()

    def test_metadata_may_be_read_by_another_thread(self, pair: Pair) -> None:
        seen: list[bytes] = []
        thread = threading.Thread(target=lambda: seen.append(pair.producer.transport.metadata()))
        thread.start()
        thread.join()
        assert seen == [pair.producer.transport.metadata()]

    def test_a_closed_transport_says_so(self, pair: Pair) -> None:
        pair.producer.transport.close()
        pair.producer.transport.close()
        with pytest.raises(TransportError, match="closed"):
            pair.producer.transport.send(pair.consumer.transport.agent, b"x")

    @staticmethod
    def _prepare(pair: Pair) -> int:
        """Two rows of 20 pieces a side; consecutive pieces of a row follow each other at both ends."""
        ours = pair.producer.lattice((0, PIECE, 20), (1, 0, 0), (500_000, PIECE, 20))
        theirs = pair.consumer.lattice((4096, PIECE, 20), (300_000, 2 * PIECE, 20))
        return pair.producer.transport.prepare(pair.consumer.transport.agent, ours, theirs)

    @staticmethod
    def _still_works(pair: Pair) -> None:
        pair.producer.transport.send(pair.consumer.transport.agent, b"still here")
        assert pair.payloads(1) == [b"still here"]


def _source_offset(index: int) -> int:
    return int(index) * PIECE if index < 20 else 500_000 + (int(index) - 20) * PIECE


def _target_offset(index: int) -> int:
    return 4096 + int(index) * PIECE if index < 20 else 300_000 + (int(index) - 20) * 2 * PIECE
