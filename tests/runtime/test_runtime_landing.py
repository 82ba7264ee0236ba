"""Transfers through landing slots, with real threads over the in-process network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from pushkv import Consumer, Outcome, Producer, Transfer
from pushkv.backends.base import Fence
from pushkv.backends.cpu import CpuBackend
from pushkv.backends.cpu_packing import CpuPacker
from pushkv.backends.rows import Runs
from pushkv.cache import KVCache
from pushkv.core.layouts import Shard, shard
from pushkv.core.states import Slot
from pushkv.core.ways import ASSUMED, Costs
from pushkv.errors import BackendError, ConfigError, HandshakeError, ProtocolError
from pushkv.runtime import wire
from pushkv.runtime.consuming import Consuming
from pushkv.transport.memory import Faults, Network
from runtime.scene import QUICK, TOKENS, WAIT, Pushed, Scene, array_of, blocks_for, cache_of, fill, memory_of, until

SLOT = 1024
"""Bytes a slot: a token of all layers has 128, so eight tokens."""
LANDING: dict[str, Any] = {"landing": "landing", "slot_bytes": SLOT, "landing_bytes": 4 * SLOT}


def landing_pair(scene: Scene, **settings: Any) -> tuple[Producer, Consumer]:
    return scene.producer(**{**LANDING, **settings}), scene.consumer(**{**LANDING, **settings})


def slots(consumer: Consumer) -> str:
    """The landing slots in custody, told by the transfer thread."""
    return consumer.ask(lambda side: str(dict(side.machine.landing_slots())))


def under_its_write(scene: Scene, network: Network) -> tuple[Pushed, Transfer]:
    """A transfer whose WRITE is on the way, and stalls there."""
    producer, consumer = landing_pair(scene)
    link = consumer.connect(producer.address)
    pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
    network.faults = Faults(stall=1.0)
    transfer = pushed.offer(link)
    pushed.stage()
    until(lambda: "GRANTED" in slots(consumer) and producer.stats().get("writes", 0), "the WRITE")
    return pushed, transfer


def cancelled_under_its_write(scene: Scene, network: Network) -> tuple[Pushed, Transfer]:
    """The same, and then cancelled."""
    pushed, transfer = under_its_write(scene, network)
    pushed.scene_consumer.cancel(transfer)
    return pushed, transfer


def all_free(endpoint: Producer | Consumer) -> bool:
    pool = endpoint._shared.slots.pool  # type: ignore[union-attr]
    return len(pool) == pool.count


@pytest.fixture(params=[False, True], ids=["copied", "queued"])
def queues(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the backend queues copies on its device, as GPUs do: then the transfer thread does it."""
    monkeypatch.setattr(CpuPacker, "queues", request.param, raising=False)
    return bool(request.param)


def copying_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.endswith("-copies")]


@pytest.mark.usefixtures("queues")
class TestTransfers:
    @pytest.mark.parametrize("tokens", [1, 8, 9, 37, 120])
    def test_whole_prompts_arrive_and_every_slot_comes_back(self, scene: Scene, tokens: int) -> None:
        producer, consumer = landing_pair(scene)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(tokens), blocks_for(tokens, 20), tokens)
        transfer, staged = pushed.offer(link), pushed.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert transfer.wait_released(WAIT)
        assert staged.wait(WAIT) is Outcome.COMPLETE
        assert pushed.arrived()
        until(lambda: all_free(producer) and all_free(consumer), "the slots")
        parts = -(-tokens // (SLOT // 128))
        assert producer.stats()["gathers"] == consumer.stats()["scatters"] == parts
        assert producer.stats()["descriptors"] == parts

    def test_who_waits_long_for_a_slot_to_be_written_looks_seldom(self, timed: Callable[[Network], Scene]) -> None:
        """Each look takes the interpreter from an engine that generates, and who writes the slot knocks."""
        network = Network(seed=1)
        pushed, transfer = under_its_write(timed(network), network)
        consumer = pushed.scene_consumer
        looks: list[float] = []
        look = consumer._side.look
        consumer._side.look = lambda now: looks.append(now) or look(now)  # type: ignore[func-returns-value, method-assign]
        time.sleep(1.0)
        assert 0 < len(looks) < 1000
        network.faults = Faults()
        network.release()
        assert transfer.wait(WAIT) is Outcome.COMPLETE

    def test_copies_that_a_device_makes_take_no_thread(self, scene: Scene, queues: bool) -> None:
        producer, consumer = landing_pair(scene)
        pushed = Pushed(producer, consumer, "r", blocks_for(40), blocks_for(40, 20), 40)
        transfer = pushed.offer(consumer.connect(producer.address))
        pushed.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert pushed.arrived()
        assert len(copying_threads()) == (0 if queues else 2)

    def test_chunks_go_as_they_are_computed(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(40), blocks_for(40, 20), 40)
        transfer = pushed.offer(link)
        for ready in (3, 17, 40):
            pushed.stage(ready=ready)
            until(lambda ready=ready: pushed.arrived(0, ready // TOKENS * TOKENS))
        assert transfer.wait(WAIT) is Outcome.COMPLETE

    def test_a_suffix_into_blocks_that_hold_more(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(30), blocks_for(30, 20), 30)
        before = array_of(consumer).copy()
        transfer = pushed.offer(link, start=13, stop=29, first_block=13 // TOKENS, blocks=pushed.target[3:])
        pushed.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert pushed.arrived(13, 29)
        assert (array_of(consumer)[:, :, 23, :, :1] == before[:, :, 23, :, :1]).all()

    def test_many_at_once_through_few_slots(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene, landing_bytes=2 * SLOT)
        link = consumer.connect(producer.address)
        many = [
            Pushed(producer, consumer, f"r{n}", blocks_for(24, 6 * n), blocks_for(24, 6 * (9 - n)), 24)
            for n in range(10)
        ]
        transfers = [pushed.offer(link) for pushed in many]
        for pushed in many:
            pushed.stage()
        assert {transfer.wait(WAIT) for transfer in transfers} == {Outcome.COMPLETE}
        assert all(pushed.arrived() for pushed in many)
        until(lambda: all_free(producer) and all_free(consumer), "the slots")

    def test_other_axes_block_sizes_and_heads(self, scene: Scene) -> None:
        source = np.random.default_rng(3).integers(0, 255, (2, 2, 16, 4, 6, 8), np.uint8)
        producer = scene.producer(cache=KVCache.of(source, "LSBHNC", model="m"), **LANDING)
        target = np.zeros((12, 2, 2, 8, 2, 8), np.uint8)  # B L S N H C
        cache = KVCache.of(target, "BLSNHC", shard=shard(4, 1, 2), model="m")
        consumer = scene.consumer(cache=cache, **LANDING)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", [9, 2, 11, 4, 0, 1], [3, 8, 1, 7, 5], 35)
        transfer = pushed.offer(link)
        pushed.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        ours = np.moveaxis(source[:, :, pushed.source], 3, 4).reshape(2, 2, 36, 4, 8)[:, :, :35, 2:]
        theirs = np.moveaxis(target[pushed.target], 0, 2).reshape(2, 2, 40, 2, 8)[:, :, :35]
        assert (ours == theirs).all()

    def test_two_producer_ranks_to_one_consumer(self, scene: Scene) -> None:
        whole = fill(memory_of())
        halves = [
            scene.producer(
                rank=rank,
                cache=cache_of(np.ascontiguousarray(whole[:, :, :, rank : rank + 1]), Shard(rank, rank + 1, 2)),
                **LANDING,
            )
            for rank in range(2)
        ]
        consumer = scene.consumer(**LANDING)
        link = consumer.connect([half.address for half in halves])
        first, second = (Pushed(half, consumer, "r", blocks_for(20), blocks_for(20, 9), 20) for half in halves)
        transfer = first.offer(link)
        first.stage()
        second.stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert (array_of(consumer)[:, :, first.target] == whole[:, :, first.source]).all()


class TestAgreement:
    def test_both_ways_beside_each_other(self, scene: Scene) -> None:
        producer = scene.producer(**{**LANDING, "landing": "auto"})
        dear = Costs(descriptor=1.0, copy=1e9)
        lands = scene.consumer("d0", **{**LANDING, "landing": "auto", "landing_costs": dear})
        direct = scene.consumer("d1", **{**LANDING, "landing": "auto", "landing_costs": Costs(descriptor=0.0)})
        for number, consumer in enumerate((lands, direct)):
            pushed = Pushed(producer, consumer, f"r{number}", blocks_for(20), blocks_for(20, 9), 20)
            transfer = pushed.offer(consumer.connect(producer.address))
            pushed.stage()
            assert transfer.wait(WAIT) is Outcome.COMPLETE
            assert pushed.arrived()
        assert "scatters" not in direct.stats()
        assert lands.stats()["scatters"] > 0

    def test_what_writes_have_cost_is_told_to_the_consumer(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pushkv.core.ways.Meter.MANY", 8)
        monkeypatch.setattr("pushkv.core.ways.Meter.CHANGE", 1.0)
        settings = {**LANDING, "landing": "auto", "landing_costs": Costs(copy=1e9)}
        producer, consumer = scene.producer(**settings), scene.consumer(**settings)
        link = consumer.connect(producer.address)
        (pair,) = consumer._side.agents.values()
        (sent,) = producer._side.agents.values()
        assert pair.measured == ASSUMED
        for number in range(2):
            pushed = Pushed(producer, consumer, f"r{number}", blocks_for(20), blocks_for(20, 9)[::-1], 20)
            pushed.offer(link)
            pushed.stage()
            until(lambda: sent.meter.descriptor, "a WRITE of many pieces was timed")
            until(lambda: pair.measured.descriptor == sent.meter._told.descriptor, "its price is told")
        assert pair.measured != ASSUMED

    @pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf"), 1e300])
    def test_prices_that_cannot_be_are_no_message(self, price: float) -> None:
        for message in (wire.Measured(bytes(16), price, 1e9), wire.Measured(bytes(16), 1e-6, price)):
            with pytest.raises(ProtocolError):
                wire.unpack(wire.pack(message))

    @pytest.mark.parametrize("ours", [True, False])
    def test_one_that_lands_everything_refuses_one_without_slots(self, scene: Scene, ours: bool) -> None:
        producer = scene.producer(**(LANDING if ours else {}))
        consumer = scene.consumer(**({} if ours else LANDING))
        with pytest.raises(HandshakeError, match="landing='landing'"):
            consumer.connect(producer.address)

    def test_slots_too_small_for_one_token_of_one_layer(self, scene: Scene) -> None:
        tiny = {**LANDING, "slot_bytes": 32, "landing_bytes": 64}
        producer, consumer = scene.producer(**tiny), scene.consumer(**tiny)
        with pytest.raises(HandshakeError, match="larger slot_bytes"):
            consumer.connect(producer.address)

    def test_only_slots_are_registered_where_everything_lands(self, scene: Scene) -> None:
        _, consumer = landing_pair(scene)
        (region,) = scene.transports[consumer.agent]._station.regions
        assert region == consumer._shared.slots.region  # type: ignore[union-attr]

    def test_costs_that_cannot_be(self, scene: Scene) -> None:
        with pytest.raises(ConfigError, match=r"landing_costs\.wire is 0"):
            scene.consumer(landing="auto", landing_costs=Costs(wire=0.0))

    def test_the_speed_of_copies_is_measured_where_it_is_not_given(self, scene: Scene) -> None:
        array = fill(memory_of())
        consumer = scene.consumer(cache=cache_of(array), landing="auto", slot_bytes=1 << 14, landing_bytes=1 << 15)
        before = array.copy()
        assert consumer._way._costs.copy > 0
        assert (array == before).all()

    def test_settings_that_leave_no_room(self, scene: Scene) -> None:
        with pytest.raises(ConfigError, match="at least a slot"):
            scene.consumer(landing="landing", slot_bytes=64, landing_bytes=32)

    def test_a_backend_without_slots(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: object, size: int, device: int = 0) -> None:
            raise BackendError("no memory is left")

        monkeypatch.setattr(CpuBackend, "allocate", refuse)
        assert scene.consumer("d0", **{**LANDING, "landing": "auto"})._shared.slots is None
        with pytest.raises(BackendError, match="no memory is left"):
            scene.consumer("d1", **LANDING)


class SlowPacker(CpuPacker):
    """Its scatters end when the test says so, and fail where it says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held: list[tuple[object, Runs, dict[str, Any]]] = []
        self.hold = True

    def scatter(self, slot: object, runs: Runs) -> Fence:
        if not self.hold:
            return super().scatter(slot, runs)
        state: dict[str, Any] = {"done": False, "error": ""}
        self.held.append((slot, runs, state))
        return _Held(state)

    def let_go(self, error: str = "") -> None:
        for slot, runs, state in self.held:
            if not error:
                super().scatter(slot, runs)
            state["error"], state["done"] = error, True
        self.held.clear()
        self.hold = False


class _Held:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def done(self) -> bool:
        if self._state["error"]:
            raise BackendError(self._state["error"])
        return bool(self._state["done"])

    def wait(self) -> None:
        until(self.done)


def slow(consumer: Consumer) -> SlowPacker:
    """Put a packer that the test controls into a consumer."""
    packer = SlowPacker(consumer.cache.regions, consumer.cache.arrays)
    consumer._shared.slots._packer = packer  # type: ignore[union-attr]
    return packer


class TestCustody:
    def test_complete_only_when_the_last_scatter_has_ended(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene)
        packer = slow(consumer)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
        transfer, staged = pushed.offer(link), pushed.stage()
        until(lambda: packer.held, "the scatter")
        assert staged.wait(WAIT) is Outcome.COMPLETE
        assert transfer.wait(0.05) is None
        packer.let_go()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert pushed.arrived()

    def test_a_cancelled_transfers_blocks_wait_for_its_scatters_and_for_nothing_else(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene)
        packer = slow(consumer)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(16), blocks_for(16, 20), 16)
        transfer = pushed.offer(link)
        pushed.stage(ready=8)
        until(lambda: packer.held, "the scatter")
        consumer.cancel(transfer)
        assert transfer.wait(WAIT) is Outcome.CANCELLED
        assert not transfer.wait_released(0.05)
        packer.let_go()
        assert transfer.wait_released(WAIT)
        until(lambda: all_free(consumer) and all_free(producer), "the slots")

    def test_a_scatter_that_fails(self, scene: Scene) -> None:
        producer, consumer = landing_pair(scene)
        packer = slow(consumer)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
        transfer = pushed.offer(link)
        pushed.stage()
        until(lambda: packer.held, "the scatter")
        packer.let_go("the device is lost")
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert "the device is lost" in transfer.detail
        assert transfer.wait_released(WAIT)
        until(lambda: all_free(consumer), "the slots")

    def test_a_gather_that_fails(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        producer, consumer = landing_pair(scene)

        def fail(self: object, runs: Runs, slot: object) -> Fence:
            raise BackendError("the device is lost")

        monkeypatch.setattr(CpuPacker, "gather", fail)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
        transfer, staged = pushed.offer(link), pushed.stage()
        assert transfer.wait(WAIT) is Outcome.TRANSPORT_ERROR
        assert staged.wait_released(WAIT)
        until(lambda: all_free(consumer) and all_free(producer), "the slots")

    def test_a_late_write_goes_into_the_slot_and_not_into_the_blocks(self, timed: Callable[[Network], Scene]) -> None:
        network = Network(seed=1)
        pushed, transfer = cancelled_under_its_write(timed(network), network)
        consumer = pushed.scene_consumer
        assert transfer.wait_released(WAIT)  # no proof was needed: nothing of the producer's can reach them
        assert "QUARANTINED" in slots(consumer)
        array = array_of(consumer)
        array[:, :, pushed.target] = 7.0
        assert not all_free(consumer)
        network.faults = Faults()
        network.release()
        until(lambda: all_free(consumer), "the slot")
        ring = consumer._shared.slots._memory  # type: ignore[union-attr]
        assert np.asarray(ring).any()
        assert (array[:, :, pushed.target] == 7.0).all()

    def test_where_scatters_do_not_ask_whose_blocks_they_are_the_late_write_is_found_in_them(
        self, timed: Callable[[Network], Scene], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mutant of the test above: it shows that the bytes did come, and that the canary would have shown it."""
        from pushkv.core.consumer import ConsumerMachine

        original = ConsumerMachine._on_landing

        def heedless(self: Any, key: Any, peer: str, message: Any, now: float) -> None:
            from pushkv.core.commands import Scatter

            order = self._transfers[key].order
            self._commands.append(Scatter(message.credit.slot, 0, peer, key, order.into, message.spans, order.stop))
            original(self, key, peer, message, now)

        monkeypatch.setattr(ConsumerMachine, "_on_landing", heedless)
        network = Network(seed=1)
        pushed, transfer = cancelled_under_its_write(timed(network), network)
        consumer = pushed.scene_consumer
        assert transfer.wait_released(WAIT)
        array = array_of(consumer)
        array[:, :, pushed.target] = 7.0
        network.faults = Faults()
        network.release()
        until(lambda: not (array[:, :, pushed.target] == 7.0).all(), "the harm")

    def test_a_preempted_stage_is_free_while_its_write_is_stalled(self, timed: Callable[[Network], Scene]) -> None:
        network = Network(seed=1)
        scene = timed(network)
        producer, consumer = landing_pair(scene)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(16), blocks_for(16, 20), 16)
        network.faults = Faults(stall=1.0)
        transfer, staged = pushed.offer(link), pushed.stage(ready=8)
        until(lambda: producer.stats().get("writes", 0), "the WRITE")
        producer.preempt("r")
        assert staged.wait_released(WAIT)
        kept = array_of(producer)[:, :, pushed.source].copy()
        array_of(producer)[:, :, pushed.source] = -1.0
        again = blocks_for(16, 40)
        array_of(producer)[:, :, again] = kept
        network.faults = Faults()
        network.release()
        replace(pushed, source=again).stage()
        assert transfer.wait(WAIT) is Outcome.COMPLETE
        assert (array_of(consumer)[:, :, pushed.target] == kept).all()

    def test_a_producer_that_dies_leaves_its_slots_to_the_proof(self, timed: Callable[[Network], Scene]) -> None:
        network = Network(seed=1, proofs=False)
        scene = timed(network)
        producer, consumer = landing_pair(scene, silence=0.3)
        link = consumer.connect(producer.address)
        pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
        network.faults = Faults(stall=1.0)
        transfer = pushed.offer(link)
        pushed.stage()
        until(lambda: "GRANTED" in slots(consumer), "the grant")
        scene.kill(producer)
        assert transfer.wait(WAIT) is Outcome.PEER_LOST
        assert transfer.wait_released(WAIT)
        assert str({Slot.QUARANTINED: 1}) in slots(consumer)
        network.faults = Faults()
        assert consumer.close(0.2) is False
        scene.endpoints.remove(consumer)


@pytest.mark.usefixtures("queues")
class TestLosses:
    def test_everything_lost_doubled_and_reordered(self, timed: Callable[[Network], Scene]) -> None:
        network = Network(seed=5, faults=Faults(drop=0.3, duplicate=0.3, reorder=0.3, delay=(0.0, 0.01)))
        scene = timed(network)
        producer, consumer = landing_pair(
            scene, limits=msgspec.structs.replace(QUICK, deadline=3.0, stage_deadline=5.0)
        )
        network.faults, faults = Faults(), network.faults
        link = consumer.connect(producer.address)
        network.faults = faults
        many = [
            Pushed(producer, consumer, f"r{n}", blocks_for(20, 5 * n), blocks_for(20, 5 * (7 - n)), 20)
            for n in range(8)
        ]
        transfers = [pushed.offer(link) for pushed in many]
        for pushed in many:
            pushed.stage()
        until(lambda: all(transfer.outcome is not None for transfer in transfers), "the outcomes")
        network.faults = Faults()
        for pushed, transfer in zip(many, transfers, strict=True):
            if transfer.outcome is Outcome.COMPLETE:
                assert pushed.arrived()
        until(lambda: all_free(consumer) and all_free(producer), "the slots")


def test_the_copies_thread_ends_with_its_endpoint(scene: Scene) -> None:
    import threading

    producer, consumer = landing_pair(scene)
    link = consumer.connect(producer.address)
    pushed = Pushed(producer, consumer, "r", blocks_for(8), blocks_for(8, 20), 8)
    transfer = pushed.offer(link)
    pushed.stage()
    assert transfer.wait(WAIT) is Outcome.COMPLETE
    mine = [thread for thread in threading.enumerate() if thread.name.endswith("-copies")]
    assert len(mine) >= 2
    scene.close()
    scene.endpoints.clear()
    until(lambda: not any(thread.is_alive() for thread in mine), "the threads' end")
    assert Consuming is not None
