"""Peers that are killed or stopped before, during and after a WRITE, over NIXL between processes.

"During" is made certain: the victim is stopped (SIGSTOP) once its WRITE's first bytes have landed, and killed while
it is. A stopped process is no proof of anything, so that the survivor must be seen to keep its blocks until the kill.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from pushkv import Consumer, Link, Outcome, Producer, Transfer
from pushkv.runtime.ending import Ending
from runtime.actors import SILENCE, Actor, make_cache, make_config, start
from runtime.scene import QUICK, WAIT, until

pytestmark = pytest.mark.processes

SMALL, LARGE = 1, 256
"""Blocks of 1 MiB."""

Start = Callable[..., Actor]
Bystander = Callable[[str], Actor]
TLS = pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])


@pytest.fixture
def begin() -> Iterator[Start]:
    actors: list[Actor] = []

    def begin_one(kind: str, engine: str, **settings: object) -> Actor:
        actors.append(start(kind, engine, **settings))
        return actors[-1]

    yield begin_one
    for actor in actors:
        actor.kill()
        actor.pipe.close()


@pytest.fixture(scope="module")
def bystanders() -> Iterator[dict[tuple[str, str], Actor]]:
    """Peers that nothing happens to, by kind and transports; started once, as starting takes its time."""
    actors: dict[tuple[str, str], Actor] = {}
    yield actors
    for actor in actors.values():
        actor.kill()
        actor.pipe.close()


@pytest.fixture
def bystander(lanes: str, bystanders: dict[tuple[str, str], Actor]) -> Callable[[str], Actor]:
    def one(kind: str) -> Actor:
        if (kind, lanes) not in bystanders:
            bystanders[kind, lanes] = start(kind, f"bystander-{kind}")
        return bystanders[kind, lanes]

    return one


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, tls: str) -> str:
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return tls


def offer(consumer: Consumer, link: Link, name: str, first: int, count: int) -> Transfer:
    return consumer.offer(name, link, list(range(first, first + count)), prompt=bytes(32), prompt_tokens=count)


def stage(producer: Producer, name: str, first: int, count: int) -> Ending:
    return producer.stage(name, list(range(first, first + count)), prompt=bytes(32), prompt_tokens=count)


def landed(consumer: Consumer, first: int, count: int, source: int) -> bool:
    """Whether ``count`` blocks from ``first`` on hold what the source blocks from ``source`` on do."""
    array = consumer.cache.arrays[0]
    assert isinstance(array, np.ndarray)
    expected = (1 + np.arange(source, source + count) % 250).astype(np.uint8)
    return bool((array[0, first : first + count, 0, :] == expected[:, None]).all())


class TestAProducerDies:
    @pytest.fixture
    def consumer(self, lanes: str) -> Iterator[Consumer]:
        consumer = Consumer(make_config("d"), make_cache(0))
        yield consumer
        assert consumer.close(WAIT)

    def push(self, consumer: Consumer, link: Link, actor: Actor, name: str) -> None:
        """A small push to the end, into block 310, under an id of its own: the bystander serves all tests."""
        name = f"{name} {secrets.token_hex(4)}"
        transfer = offer(consumer, link, name, 310, SMALL)
        actor.ask("stage", name, 7, SMALL)
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert transfer.wait_released(WAIT)
        assert landed(consumer, 310, SMALL, 7)

    @TLS
    def test_before_the_write(self, begin: Start, bystander: Bystander, consumer: Consumer) -> None:
        victim, other = begin("producer", "p"), bystander("producer")
        address = victim.ask("address")
        link, second = consumer.connect(address), consumer.connect(other.ask("address"))
        waiting = [offer(consumer, link, f"r{n}", n, SMALL) for n in range(3)]
        victim.kill()
        self.push(consumer, second, other, "meanwhile")
        assert {transfer.wait(WAIT) for transfer in waiting} == {Outcome.PEER_LOST}
        assert all(transfer.wait_released(WAIT) for transfer in waiting)
        assert consumer.stats()["proof: process reaped"] == 1
        assert not link.alive
        again = begin("producer", "p", bind=address)
        self.push(consumer, consumer.connect(address), again, "the next epoch")

    @TLS
    def test_during_a_write(self, begin: Start, bystander: Bystander, consumer: Consumer) -> None:
        victim, other = begin("producer", "p"), bystander("producer")
        link, second = consumer.connect(victim.ask("address")), consumer.connect(other.ask("address"))
        array = consumer.cache.arrays[0]
        assert isinstance(array, np.ndarray)
        before = offer(consumer, link, "waits", 300, SMALL)
        large = offer(consumer, link, "large", 0, LARGE)
        victim.tell("stage", "large", 0, LARGE)
        until(lambda: array[0, :LARGE, 0, 0].any(), "the first byte")
        victim.signal(signal.SIGSTOP)
        assert [one.wait(WAIT) for one in (before, large)] == [Outcome.PEER_LOST] * 2, "not landed as a whole"
        self.push(consumer, second, other, "meanwhile")
        assert not before.released
        assert not large.released
        assert consumer.held_blocks == LARGE + SMALL
        victim.kill()
        self.push(consumer, second, other, "and on")
        assert large.wait_released(WAIT)
        assert before.wait_released(WAIT)
        assert consumer.stats()["proof: process reaped"] == 1
        array[:] = 0
        self.push(consumer, second, other, "and on again")
        assert not array[0, :LARGE].any(), "nothing lands after the proof"

    @TLS
    def test_after_the_write(self, begin: Start, consumer: Consumer) -> None:
        victim = begin("producer", "p")
        link = consumer.connect(victim.ask("address"))
        transfer = offer(consumer, link, "r", 0, LARGE)
        victim.ask("stage", "r", 9, LARGE)
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        victim.kill()
        assert transfer.wait_released(WAIT)
        assert landed(consumer, 0, LARGE, 9)
        late = offer(consumer, link, "late", 0, SMALL)
        assert late.wait(WAIT) is Outcome.PEER_LOST
        assert late.wait_released(WAIT)
        until(lambda: not consumer._side.agents, "the epoch is forgotten")

    @TLS
    def test_stopped_and_continued(self, begin: Start, consumer: Consumer) -> None:
        """Lost by its silence; its blocks stay in quarantine until it is heard again and drains."""
        victim = begin("producer", "p")
        link = consumer.connect(victim.ask("address"))
        array = consumer.cache.arrays[0]
        assert isinstance(array, np.ndarray)
        waiting, large = offer(consumer, link, "waits", 300, SMALL), offer(consumer, link, "large", 0, LARGE)
        victim.tell("stage", "large", 0, LARGE)
        until(lambda: array[0, :LARGE, 0, 0].any(), "the first byte")
        victim.signal(signal.SIGSTOP)
        assert waiting.wait(WAIT) is Outcome.PEER_LOST
        assert large.wait(WAIT) is Outcome.PEER_LOST
        assert consumer.held_blocks == LARGE + SMALL
        victim.signal(signal.SIGCONT)
        assert victim.answer() is None
        assert waiting.wait_released(WAIT)
        assert large.wait_released(WAIT)
        assert "proof: process reaped" not in consumer.stats()
        until(lambda: link.alive)
        self.push(consumer, link, victim, "goes on")

    @TLS
    def test_silent_and_alive(self, begin: Start, consumer: Consumer) -> None:
        """No loss, as its process can be seen to be there: what waits is served when it speaks again."""
        victim = begin("producer", "p")
        link = consumer.connect(victim.ask("address"))
        waiting = offer(consumer, link, "waits", 0, SMALL)
        victim.tell("hold_the_lock", 2 * SILENCE)
        assert waiting.wait(1.5 * SILENCE) is None
        assert link.alive
        assert victim.answer() is None
        victim.ask("stage", "waits", 7, SMALL)
        assert waiting.wait(WAIT) is Outcome.COMPLETE
        assert landed(consumer, 0, SMALL, 7)
        assert "peers lost" not in consumer.stats()

    def test_silent_and_alive_for_too_long(self, begin: Start) -> None:
        """What it holds is counted as quarantined then, and comes back when it speaks after all."""
        limits = msgspec.structs.replace(QUICK, deadline=SILENCE + 1.0)
        with Consumer(make_config("d", limits=limits), make_cache(0)) as consumer:
            victim = begin("producer", "p")
            link = consumer.connect(victim.ask("address"))
            victim.tell("hold_the_lock", 6 * SILENCE)
            waiting = offer(consumer, link, "waits", 0, SMALL)
            until(lambda: consumer.quarantined == 1)
            assert waiting.outcome in (Outcome.EXPIRED, Outcome.PEER_LOST)
            assert not waiting.released
            assert not link.alive
            assert victim.answer() is None
            assert waiting.wait_released(WAIT)
            until(lambda: link.alive)

    @TLS
    def test_another_producer_in_its_process_takes_its_place(self, begin: Start, consumer: Consumer) -> None:
        """The process runs, and the one that has gone is silent for ever: its successor is found all the same."""
        victim = begin("producer", "p")
        link = consumer.connect(victim.ask("address"))
        successor = victim.ask("take_its_place")
        until(lambda: link.agents == (successor,) and link.alive)
        self.push(consumer, link, victim, "goes on")


class TestAConsumerDies:
    @pytest.fixture
    def producer(self, lanes: str) -> Iterator[Producer]:
        producer = Producer(make_config("p"), make_cache(1))
        yield producer
        assert producer.close(WAIT)

    def push(self, producer: Producer, actor: Actor, name: str) -> None:
        actor.ask("offer", name, 310, SMALL)
        ending = stage(producer, name, 7, SMALL)
        assert actor.ask("outcome", name) == "complete"
        assert ending.wait(WAIT) is Outcome.COMPLETE
        assert ending.wait_released(WAIT)

    def pair(self, begin: Start, bystander: Bystander, producer: Producer) -> tuple[Actor, Actor]:
        victim, other = begin("consumer", "d"), bystander("consumer")
        for actor in (victim, other):
            actor.ask("connect", producer.address)
        return victim, other

    @TLS
    def test_before_the_write(self, begin: Start, bystander: Bystander, producer: Producer) -> None:
        victim, other = self.pair(begin, bystander, producer)
        victim.ask("offer", "r", 0, SMALL)
        part = producer.stage("r", [3], prompt=bytes(32), prompt_tokens=1, ready=0)
        until(lambda: producer._side.in_custody == 1)
        victim.kill()
        self.push(producer, other, "meanwhile")
        assert part.wait(WAIT) is Outcome.PEER_LOST
        assert part.wait_released(WAIT)
        again = begin("consumer", "d")
        again.ask("connect", producer.address)
        self.push(producer, again, "the next epoch")

    @TLS
    def test_during_a_write(self, begin: Start, bystander: Bystander, producer: Producer, tls: str) -> None:
        victim, other = self.pair(begin, bystander, producer)
        victim.ask("offer", "large", 0, LARGE)
        until(lambda: producer._side.in_custody == 1)
        if tls:
            victim.signal(signal.SIGSTOP)  # over tcp it has to read what we send
        large = stage(producer, "large", 0, LARGE)
        until(lambda: producer.stats().get("writes") == 1)
        if tls:
            assert large.wait(WAIT) is Outcome.PEER_LOST
            self.push(producer, other, "meanwhile")
            assert not large.released, "the WRITE is in flight and reads the blocks"
        victim.kill()
        self.push(producer, other, "and on")
        # Over cma we write by ourselves, and may be faster than the kill.
        assert large.wait(WAIT) in ([Outcome.PEER_LOST] if tls else [Outcome.PEER_LOST, Outcome.COMPLETE])
        assert large.wait_released(WAIT)
        until(lambda: len(producer._side.agents) == 1, "the epoch is forgotten")

    @TLS
    def test_after_the_write(self, begin: Start, bystander: Bystander, producer: Producer) -> None:
        victim, other = self.pair(begin, bystander, producer)
        self.push(producer, victim, "r")
        victim.kill()
        self.push(producer, other, "on")
        until(lambda: len(producer._side.agents) == 1, "the epoch is forgotten")
        assert producer.stats()["peers lost"] == 1

    @TLS
    def test_closing_in_good_order_is_heard_at_once(self, begin: Start, producer: Producer) -> None:
        """Long before the silence would tell, and while its process lives."""
        other = begin("consumer", "d")
        other.ask("connect", producer.address)
        assert other.ask("close") is True
        until(lambda: producer.stats().get("peers lost") == 1)
        assert other.process.is_alive()


@TLS
def test_connecting_again_harms_nothing(begin: Start, lanes: str) -> None:
    consumer = Consumer(make_config("d"), make_cache(0))
    actor = begin("producer", "p")
    address = actor.ask("address")
    link = consumer.connect(address)
    transfers = [offer(consumer, link, f"r{n}", 64 * n, 64) for n in range(4)]
    for number in range(4):
        actor.ask("stage", f"r{number}", 64 * number, 64)
        consumer.connect(address)
    assert [transfer.wait(WAIT) for transfer in transfers] == [Outcome.COMPLETE] * 4
    assert landed(consumer, 0, 256, 0)
    pair = consumer._side.agents[link.agents[0]]
    consumer._transfer.submit(lambda: consumer._side.peer_gone(pair.token, "broken by the test"))
    until(lambda: not link.alive)
    again = consumer.connect(address)
    last = offer(consumer, again, "last", 300, SMALL)
    actor.ask("stage", "last", 300, SMALL)
    assert last.wait(WAIT) is Outcome.COMPLETE
    assert consumer.close(WAIT)
