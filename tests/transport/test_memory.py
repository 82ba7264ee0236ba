"""The in-process network: every fault on demand, by seed, and never outside registered memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pushkv.core.memory import Region
from pushkv.errors import ConfigError, PeerLost, TransportError
from pushkv.testing.transport_contract import Pair, connect
from pushkv.transport.base import Lattice, Pieces, Proof, WriteStatus
from pushkv.transport.memory import Faults, MemoryTransport, Network, OnDeath


def make(network: Network) -> Pair:
    return connect(MemoryTransport(network, "prefill"), MemoryTransport(network, "decode"))


def write(pair: Pair, offset: int = 0, length: int = 4096, note: bytes = b"done") -> int:
    source, target = pair.producer.pieces((offset, length)), pair.consumer.pieces((offset, length))
    return pair.producer.transport.write("decode", source, target, note)


def landed(pair: Pair) -> int:
    return int(np.count_nonzero(pair.consumer.memory))


def story(seed: int, faults: Faults) -> list[object]:
    """What a fixed sequence of calls leads to on one network."""
    network = Network(seed=seed, faults=faults)
    pair = make(network)
    told: list[object] = []
    for i in range(40):
        write(pair, offset=i * 4096, note=b"%d" % i)
        pair.producer.transport.send("decode", b"note %d" % i)
        network.advance(0.01)
        told += [(r.write, r.status) for r in pair.producer.transport.poll()]
        told += pair.consumer.transport.receive()
        told.append(landed(pair))
    return told


@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop=0.3),
        Faults(duplicate=0.3),
        Faults(reorder=0.5, delay=(0.0, 0.05)),
        Faults(delay=(0.001, 0.03)),
        Faults(stall=0.3),
        Faults(fail=0.3, late=0.1),
    ],
    ids=["drop", "duplicate", "reorder", "delay", "stall", "fail"],
)
def test_one_seed_is_one_run(faults: Faults) -> None:
    assert story(5, faults) == story(5, faults)
    assert story(5, faults) != story(6, faults)
    assert story(5, faults) != story(5, Faults())


def test_nothing_happens_before_its_time() -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0)))
    pair = make(network)
    write(pair)
    network.advance(0.99)
    assert landed(pair) == 0
    assert not pair.producer.transport.poll()
    network.advance(0.02)
    assert landed(pair) == 4096
    assert [r.status for r in pair.producer.transport.poll()] == [WriteStatus.DONE]
    assert not pair.consumer.transport.receive(), "the notification leaves only when the initiator polls"
    network.advance(1.0)
    assert pair.consumer.transport.receive() == [("prefill", b"done")]


def test_steps_land_a_write_in_parts() -> None:
    network = Network(parts=2)
    pair = make(network)
    write(pair)
    assert network.step()
    assert landed(pair) == 2048
    assert not pair.producer.transport.poll()
    assert network.step()
    assert landed(pair) == 4096
    assert not network.step()


def test_bytes_are_read_when_they_land_not_when_they_are_posted() -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0)))
    pair = make(network)
    write(pair)
    pair.producer.memory[:] = 9
    network.advance(2.0)
    assert set(pair.consumer.memory[:4096]) == {9}


def test_a_dropped_notification_leaves_the_bytes() -> None:
    network = Network(faults=Faults(drop=1.0))
    pair = make(network)
    write(pair)
    network.settle()
    assert [r.status for r in pair.producer.transport.poll()] == [WriteStatus.DONE]
    network.settle()
    assert not pair.consumer.transport.receive()
    assert landed(pair) == 4096


def test_a_duplicate_comes_twice() -> None:
    network = Network(faults=Faults(duplicate=1.0))
    pair = make(network)
    pair.producer.transport.send("decode", b"x")
    network.settle()
    assert pair.consumer.transport.receive() == [("prefill", b"x")] * 2


@pytest.mark.parametrize("reorder", [0.0, 1.0])
def test_order_is_kept_unless_reordering(reorder: float) -> None:
    network = Network(faults=Faults(delay=(0.0, 1.0), reorder=reorder), seed=3)
    pair = make(network)
    sent = [b"%d" % i for i in range(20)]
    for payload in sent:
        pair.producer.transport.send("decode", payload)
    network.settle()
    came = [payload for _, payload in pair.consumer.transport.receive()]
    assert sorted(came) == sorted(sent)
    assert (came == sent) is (reorder == 0.0)


def test_a_stalled_write_waits_for_its_release() -> None:
    network = Network()
    pair = make(network)
    network.stall("prefill", "decode")
    write(pair)
    pair.producer.transport.send("decode", b"still talking")
    network.advance(100.0)
    assert landed(pair) == 0
    assert not pair.producer.transport.poll()
    assert pair.consumer.transport.receive() == [("prefill", b"still talking")]
    assert network.pending == 2
    network.release()
    network.settle()
    assert [r.status for r in pair.producer.transport.poll()] == [WriteStatus.DONE]


def test_random_stalls_are_released_too() -> None:
    network = Network(faults=Faults(stall=1.0))
    pair = make(network)
    write(pair)
    network.settle()
    assert landed(pair) == 0
    network.release()
    network.settle()
    assert landed(pair) == 4096


def test_a_failed_writes_bytes_land_later() -> None:
    network = Network(faults=Faults(fail=1.0, late=5.0), seed=1)
    pair = make(network)
    number = write(pair)
    network.advance(0.0)
    (result,) = pair.producer.transport.poll()
    assert (result.write, result.status, result.peer_lost, result.reached) == (
        number,
        WriteStatus.FAILED,
        False,
        True,
    )
    assert landed(pair) == 0
    network.advance(5.0)
    assert landed(pair) == 4096
    assert not pair.producer.transport.poll()


@pytest.mark.parametrize("cut", [("prefill", "decode"), ("decode", "prefill"), ("decode", None)])
def test_a_partition_holds_everything_and_fails_nothing(cut: tuple[str, str | None]) -> None:
    network = Network()
    pair = make(network)
    network.partition(*cut)
    write(pair)
    pair.producer.transport.send("decode", b"one")
    pair.producer.transport.send("decode", b"two")
    network.advance(1000.0)
    assert not pair.producer.transport.poll()
    assert not pair.consumer.transport.receive()
    network.heal()
    network.settle()
    assert pair.consumer.transport.receive() == [("prefill", b"one"), ("prefill", b"two")]
    assert [r.status for r in pair.producer.transport.poll()] == [WriteStatus.DONE]


def test_a_partition_of_others_does_not_matter() -> None:
    network = Network()
    pair = make(network)
    MemoryTransport(network, "bystander")
    network.partition("prefill", "bystander")
    pair.producer.transport.send("decode", b"x")
    network.settle()
    assert pair.consumer.transport.receive()


@pytest.mark.parametrize("on_death", list(OnDeath))
def test_a_dead_initiators_bytes(on_death: OnDeath) -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0), late=10.0), on_death=on_death)
    pair = make(network)
    write(pair)
    network.die("prefill")
    pair.producer.memory[:] = 0  # its memory is gone; what travels was copied
    ended = pair.consumer.transport.writes_ended("prefill")
    assert (ended is Proof.NONE) is (on_death is OnDeath.TCP)
    network.advance(20.0)
    assert landed(pair) == (4096 if on_death is OnDeath.TCP else 0)
    assert pair.consumer.transport.writes_ended("prefill") is Proof.MEMORY_TRANSPORT
    with pytest.raises(TransportError, match="died"):
        pair.producer.transport.poll()


def test_a_dead_targets_writes_fail_and_its_death_takes_time_to_show() -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0)), detection=2.0)
    pair = make(network)
    before = write(pair)
    network.die("decode")
    after = write(pair)  # nobody knows yet
    network.advance(3.0)
    results = {r.write: r for r in pair.producer.transport.poll()}
    assert set(results) == {before, after}
    assert all(r.status is WriteStatus.FAILED and r.peer_lost for r in results.values())
    assert landed(pair) == 0
    with pytest.raises(PeerLost):
        write(pair)
    with pytest.raises(PeerLost):
        pair.producer.transport.send("decode", b"x")
    assert pair.producer.transport.writes_ended("decode") is Proof.MEMORY_TRANSPORT


def test_without_proofs_nothing_is_proven() -> None:
    network = Network(proofs=False)
    pair = make(network)
    network.die("prefill")
    network.advance(1.0)
    assert pair.consumer.transport.writes_ended("prefill") is Proof.NONE


def test_late_bytes_reach_neither_the_next_life_nor_a_closed_agent() -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0)))
    pair = make(network)
    write(pair)
    pair.consumer.transport.close()
    again = MemoryTransport(network, "decode")
    again.claim()
    again.register([Region(pair.consumer.address, pair.consumer.memory.nbytes)])
    network.settle()
    assert landed(pair) == 0
    assert network.lost_bytes == 4096
    with pytest.raises(TransportError, match="another life"):
        pair.producer.transport.add_peer(again.metadata(), None)
    pair.producer.transport.remove_peer("decode")
    assert pair.producer.transport.add_peer(again.metadata(), None) == "decode"


def test_metadata_of_an_earlier_life_is_refused() -> None:
    network = Network()
    old = MemoryTransport(network, "decode")
    metadata = old.metadata()
    old.close()
    MemoryTransport(network, "decode")
    other = MemoryTransport(network, "prefill")
    other.claim()
    with pytest.raises(TransportError, match="lives again"):
        other.add_peer(metadata, None)


def test_a_name_is_taken_while_its_agent_lives() -> None:
    network = Network()
    MemoryTransport(network, "decode")
    with pytest.raises(TransportError, match="epoch"):
        MemoryTransport(network, "decode")


def test_removing_a_peer_ends_its_writes_and_not_their_bytes() -> None:
    network = Network(faults=Faults(delay=(1.0, 1.0)))
    pair = make(network)
    number = write(pair)
    pair.producer.transport.remove_peer("decode")
    (result,) = pair.producer.transport.poll()
    assert (result.write, result.status, result.reached) == (number, WriteStatus.FAILED, True)
    network.settle()
    assert landed(pair) == 4096


@pytest.mark.parametrize("span", [(-8, 16), ((1 << 20) - 8, 16), (1 << 62, 8)])
def test_addresses_outside_registered_memory_raise(span: tuple[int, int]) -> None:
    pair = make(Network())
    offset, length = span
    address = np.array([pair.consumer.address + offset], dtype=np.uint64)
    bad = Pieces(address, np.array([length], dtype=np.uint64))
    with pytest.raises(TransportError, match="not in memory that decode registered"):
        pair.producer.transport.write("decode", pair.producer.pieces((0, length)), bad, b"x")
    lattice = Lattice(address, address * 0, np.ones(1, dtype=np.uint64), length)
    with pytest.raises(TransportError, match="not in memory"):
        pair.producer.transport.prepare("decode", pair.producer.lattice((0, 0, 1), size=length), lattice)


def test_a_length_that_wraps_round_raises() -> None:
    pair = make(Network())
    huge = Pieces(np.array([pair.consumer.address], dtype=np.uint64), np.array([2**64 - 1], dtype=np.uint64))
    with pytest.raises(TransportError, match="not in memory"):
        pair.producer.transport.write("decode", huge, huge, b"x")


def test_blocked_posts_block_until_released() -> None:
    network = Network(immediate=True)
    pair = make(network)
    other = MemoryTransport(network, "stuck")
    network.block_posts("stuck")
    done = threading.Event()

    def post() -> None:
        other.claim()
        other.add_peer(pair.consumer.transport.metadata(), None)
        other.send("decode", b"at last")
        done.set()

    thread = threading.Thread(target=post)
    thread.start()
    assert not done.wait(0.2)
    pair.producer.transport.send("decode", b"not held up")
    assert pair.consumer.transport.receive() == [("prefill", b"not held up")]
    network.unblock_posts()
    assert done.wait(5.0)
    thread.join()


def test_two_threads_push_through_an_immediate_network() -> None:
    network = Network(immediate=True)
    source, target = np.arange(65536, dtype=np.uint8) | 1, np.zeros(65536, dtype=np.uint8)
    consumer = MemoryTransport(network, "decode")
    got: list[bytes] = []
    ready = threading.Event()

    def receive() -> None:
        consumer.claim()
        consumer.register([Region(int(target.ctypes.data), target.nbytes)])
        ready.set()
        while len(got) < 64:
            got.extend(payload for _, payload in consumer.receive())

    thread = threading.Thread(target=receive)
    thread.start()
    assert ready.wait(5.0)
    producer = MemoryTransport(network, "prefill")
    producer.claim()
    producer.register([Region(int(source.ctypes.data), source.nbytes)])
    producer.add_peer(consumer.metadata(), None)
    for i in range(64):
        ours, theirs = (Pieces(_u64(array.ctypes.data + i * 1024), _u64(1024)) for array in (source, target))
        producer.write("decode", ours, theirs, b"%d" % i)
        producer.poll()
    while thread.is_alive():
        producer.poll()
        thread.join(0.01)
    np.testing.assert_array_equal(source, target)


class TestCorruption:
    def corrupted(self, seed: int, faults: Faults, count: int = 8) -> list[tuple[int, int]]:
        """Where bytes differ after some WRITEs, and in which bits."""
        network = Network(seed=seed, faults=faults)
        pair = make(network)
        for i in range(count):
            write(pair, offset=i * 4096)
            network.settle()
            assert [r.status for r in pair.producer.transport.poll()] == [WriteStatus.DONE], "nobody is told"
        differing = pair.producer.memory[: count * 4096] ^ pair.consumer.memory[: count * 4096]
        where = np.flatnonzero(differing)
        return list(zip(where.tolist(), differing[where].tolist(), strict=True))

    def test_one_bit_of_a_write_lands_as_another(self) -> None:
        found = self.corrupted(1, Faults(corrupt=1.0))
        assert [where // 4096 for where, _ in found] == list(range(8))
        assert all(bits.bit_count() == 1 for _, bits in found)
        assert len({where % 4096 for where, _ in found}) > 1
        assert self.corrupted(1, Faults(corrupt=1.0)) == found
        assert self.corrupted(2, Faults(corrupt=1.0)) != found

    def test_it_is_as_frequent_as_asked_for(self) -> None:
        assert self.corrupted(3, Faults()) == []
        assert 0 < len(self.corrupted(3, Faults(corrupt=0.5), 32)) < 32

    def test_writes_of_no_bytes_pass(self) -> None:
        network = Network(faults=Faults(corrupt=1.0))
        pair = make(network)
        write(pair, length=0)
        network.settle()
        assert landed(pair) == 0

    def test_nothing_outside_registered_memory_is_changed(self) -> None:
        """The target closes before the bytes come."""
        network = Network(faults=Faults(corrupt=1.0, delay=(1.0, 1.0)))
        pair = make(network)
        write(pair)
        pair.consumer.transport.close()
        network.settle()
        assert landed(pair) == 0

    def test_it_moves_no_other_fault(self) -> None:
        """Runs of one seed are what they are without it, but for the bytes."""
        faults = {"drop": 0.3, "duplicate": 0.3, "reorder": 0.5, "fail": 0.2, "delay": (0.0, 0.05)}
        plain, spoilt = story(5, Faults(**faults)), story(5, Faults(**faults, corrupt=0.5))
        assert [told for told in plain if not isinstance(told, int)] == [
            told for told in spoilt if not isinstance(told, int)
        ]


def test_wrong_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="corrupt"):
        Faults(corrupt=-0.1)
    with pytest.raises(ConfigError, match="drop"):
        Faults(drop=1.5)
    with pytest.raises(ConfigError, match="delay"):
        Faults(delay=(2.0, 1.0))
    with pytest.raises(ConfigError, match="late"):
        Faults(late=-1.0)


def _u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)
