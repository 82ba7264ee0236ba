"""Engines with vLLM's own scheduler whose workers hold their cache on the fake Neuron device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_engine
import torch
from fake_engine import HEAD_SIZE, HEADS, LAYERS, FakeEngine, Scene, Shape, value_of
from pushkv_vllm.worker import half
from pushkv_vllm_neuron import PushKVNeuronConnector
from pushkv_vllm_neuron.geometry import describe
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pushkv.testing.neuron import FakeNeuron, FakeNixl
from pushkv.transport.memory import MemoryTransport, Network


class NeuronWorker(fake_engine.FakeWorker):
    """One rank: a tensor a layer, (2, B, H, N, C), cast from raw bytes; what it writes lands late."""

    def __init__(self, engine: Any, rank: int) -> None:
        self.engine, self.rank = engine, rank
        shape = (2, engine.shape.blocks, HEADS // engine.shape.ranks, engine.shape.block_size, HEAD_SIZE)
        size = 4 * torch.Size(shape).numel()
        self.caches = {
            f"layers.{number}": torch.zeros(size, dtype=torch.int8, device="neuron:0").view(torch.float32).view(shape)
            for number in range(LAYERS)
        }
        engine.fake.synchronize()
        self.connector = PushKVNeuronConnector(engine.config, KVConnectorRole.WORKER, engine.cache_config)

    def rows(self, layer: str, block: int, offset: int) -> list[Any]:
        cache = self.caches[layer]
        return [cache[side, block, :, offset] for side in range(2)]


class NeuronEngine(FakeEngine):
    """A server on the fake device."""

    def __init__(self, fake: FakeNeuron, shape: Shape, network: Network, model: Path, monkeypatch: Any) -> None:
        self.fake = fake
        with monkeypatch.context() as patch:
            patch.setattr(fake_engine, "FakeWorker", NeuronWorker)
            patch.setattr(fake_engine, "config_of", self._config)
            super().__init__(shape, network, model, monkeypatch)

    def forward(self, worker: Any, output: Any) -> None:
        """One compiled graph: what a step writes lands at once, when somebody waits for it."""
        self._written: list[tuple[Any, Any]] = []
        super().forward(worker, output)
        written = self._written
        if written:
            self.fake.run_graph(lambda *hosts: [row.copy_(value) for row, value in written], *worker.caches.values())

    def _touch(
        self, worker: Any, name: str, group: int, layer: str, place: int, known: list[int], *, write: bool
    ) -> None:
        if not write:
            super()._touch(worker, name, group, layer, place, known, write=False)
            return
        block, offset = divmod(place, self.shape.block_size)
        number, value = self.tables[name][group][block], value_of(tuple(known[: place + 1]))
        rows = enumerate(worker.rows(layer, number, offset))
        self._written += [(row.host, worker.expected(layer, side, value)) for side, row in rows]

    @staticmethod
    def _config(shape: Shape, model: Path) -> Any:
        config = _plain_config(shape, model)
        config.kv_transfer_config.kv_connector = "PushKVNeuronConnector"
        config.kv_transfer_config.kv_connector_module_path = "pushkv_vllm_neuron.connector"
        config.kv_transfer_config.kv_buffer_device = "cuda"
        return config

    def _start(self, monkeypatch: Any, addresses: list[str]) -> list[Any]:
        nixl = FakeNixl(self.fake, lambda agent: MemoryTransport(self._network, agent))
        monkeypatch.setattr(half.WorkerHalf, "transports", [nixl])
        return super()._start(monkeypatch, addresses)

    def _geometry(self, worker: Any) -> Any:
        ranks = half.Ranks(worker.rank, self.shape.ranks)
        return describe(worker.caches, self.cache_config, ranks, HEADS).cache.geometry


_plain_config = fake_engine.config_of


class GpuEngine(FakeEngine):
    """A server whose cache is host memory, as the connector's own tests have it, on the same network."""

    def __init__(self, fake: FakeNeuron, shape: Shape, network: Network, model: Path, monkeypatch: Any) -> None:
        self._nixl = FakeNixl(fake, lambda agent: MemoryTransport(network, agent))
        super().__init__(shape, network, model, monkeypatch)

    def _start(self, monkeypatch: Any, addresses: list[str]) -> list[Any]:
        monkeypatch.setattr(half.WorkerHalf, "transports", [self._nixl])
        return super()._start(monkeypatch, addresses)


class NeuronScene(Scene):
    """Engines on one fake device and one network."""

    fake: FakeNeuron

    def engine(self, shape: Shape) -> NeuronEngine:
        NeuronEngine._network = self.network
        engine = NeuronEngine(self.fake, shape, self.network, self.model, self.monkeypatch)
        self.engines.append(engine)
        return engine

    def gpu(self, shape: Shape) -> GpuEngine:
        """Start an engine of another kind."""
        engine = GpuEngine(self.fake, shape, self.network, self.model, self.monkeypatch)
        self.engines.append(engine)
        return engine
