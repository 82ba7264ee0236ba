"""Engines with vLLM's own scheduler whose workers hold their cache on the fake Neuron device, or as GPUs have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_engine
import numpy as np
import torch
from fake_engine import HEAD_SIZE, FakeEngine, FakeWorker, Scene, Shape
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pushkv.testing.neuron import FakeNeuron, FakeNixl
from pushkv.transport.memory import MemoryTransport, Network
from pushkv_vllm.context import Context
from pushkv_vllm.worker import geometry, half
from pushkv_vllm_neuron import PushKVNeuronConnector
from pushkv_vllm_neuron.geometry import describe
from pushkv_vllm_neuron.requirements import packed

Rows = np.ndarray[Any, Any]


class NeuronWorker(FakeWorker):
    """One rank: a tensor a layer, (2, B, H, N, C), cast from raw bytes; what it writes lands late.

    Packed keys have tokens 2n and 2n + 1 of a block interleaved, element by element.
    """

    @property
    def packed(self) -> bool:
        return packed(self.engine.config)

    def cache(self) -> Any:
        shape = (2, self.engine.shape.blocks, self.heads, self.engine.shape.block_size, HEAD_SIZE)
        size = 4 * torch.Size(shape).numel()
        made = torch.zeros(size, dtype=torch.int8, device="neuron:0").view(torch.float32).view(shape)
        self.engine.fake.synchronize()
        return made

    def connect(self) -> Any:
        return PushKVNeuronConnector(self.engine.config, KVConnectorRole.WORKER, self.engine.cache_config)

    def tokens(self, layer: str, blocks: Sequence[int]) -> Rows:
        keys, values = self.caches[layer].cpu()[:, list(blocks)].numpy()
        if self.packed:
            count, heads, tokens, size = keys.shape
            keys = keys.reshape(count, heads, tokens // 2, size, 2).swapaxes(3, 4).reshape(keys.shape)
        rows = np.stack([keys, values])
        return rows.transpose(1, 3, 0, 2, 4).reshape(-1, 2, rows.shape[2], HEAD_SIZE)

    def write(self, layer: str, block: int, offset: int, row: Rows) -> None:
        self.engine.written.append((self._rows(self.caches[layer].host, block, offset), torch.from_numpy(row.copy())))

    def _rows(self, host: torch.Tensor, block: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a token's key and value lie, (head, element) each."""
        keys, values = host[0, block], host[1, block, :, offset]
        if self.packed:
            heads, tokens, size = keys.shape
            return keys.view(heads, tokens // 2, size, 2)[:, offset // 2, :, offset % 2], values
        return keys[:, offset], values


class GpuWorker(FakeWorker):
    """One rank: (B, H, N, 2C) with tokens outside heads in memory, a token's key before its value."""

    def cache(self) -> Any:
        blocks, size = self.engine.shape.blocks, self.engine.shape.block_size
        return torch.zeros((blocks, size, self.heads, 2 * HEAD_SIZE)).permute(0, 2, 1, 3)

    def halves(self, layer: str) -> tuple[Rows, Rows]:
        both = self.caches[layer].numpy()
        return both[..., :HEAD_SIZE], both[..., HEAD_SIZE:]


class NeuronEngine(FakeEngine):
    """A server on the fake device."""

    def __init__(
        self, fake: FakeNeuron, shape: Shape, network: Network, model: Path, monkeypatch: Any, *, packed: bool
    ) -> None:
        self.fake, self._network, self._packed = fake, network, packed
        self.written: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(fake_engine, "FakeWorker", NeuronWorker)
            patch.setattr(fake_engine, "config_of", self._config)
            super().__init__(shape, network, model, monkeypatch)

    def forward(self, worker: Any, output: Any) -> None:
        """One compiled graph: what a step writes lands at once, when somebody waits for it."""
        self.written = written = []
        super().forward(worker, output)
        if written:
            self.fake.run_graph(lambda *_: [_put(rows, row) for rows, row in written], *worker.caches.values())

    def _config(self, shape: Shape, model: Path) -> Any:
        config = _plain_config(shape, model)
        config.additional_config = {"neuron_config": {"fp8_packed_kv": self._packed}}
        config.kv_transfer_config.kv_connector = "PushKVNeuronConnector"
        config.kv_transfer_config.kv_connector_module_path = "pushkv_vllm_neuron.connector"
        config.kv_transfer_config.kv_buffer_device = "cuda"
        return config

    def _start(self, monkeypatch: Any, addresses: list[str]) -> list[Any]:
        nixl = FakeNixl(self.fake, lambda agent: MemoryTransport(self._network, agent))
        monkeypatch.setattr(half.WorkerHalf, "transports", [nixl])
        return super()._start(monkeypatch, addresses)

    def _geometry(self, worker: Any) -> Any:
        context = Context.of(self.config.parallel_config)
        heads = self.shape.heads
        cache = describe(worker.caches, self.cache_config, worker.ranks, heads, context, packed=self._packed)
        return cache.cache.geometry


def _put(rows: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    for target, value in zip(rows, row, strict=True):
        target.copy_(value)


_plain_config = fake_engine.config_of


class GpuEngine(FakeEngine):
    """A server whose cache is described as a GPU's is, on the same network; its memory is the host's."""

    def __init__(self, fake: FakeNeuron, shape: Shape, network: Network, model: Path, monkeypatch: Any) -> None:
        self._nixl = FakeNixl(fake, lambda agent: MemoryTransport(network, agent))
        plain = geometry._groups
        with monkeypatch.context() as patch:
            patch.setattr(fake_engine, "FakeWorker", GpuWorker)
            patch.setattr(geometry, "_groups", lambda placed, layout, share, _: plain(placed, layout, share, "cuda"))
            super().__init__(shape, network, model, monkeypatch)

    def _start(self, monkeypatch: Any, addresses: list[str]) -> list[Any]:
        monkeypatch.setattr(half.WorkerHalf, "transports", [self._nixl])
        return super()._start(monkeypatch, addresses)


class NeuronScene(Scene):
    """Engines on one fake device and one network."""

    fake: FakeNeuron

    def engine(self, shape: Shape, *, packed: bool = False) -> NeuronEngine:
        engine = NeuronEngine(self.fake, shape, self.network, self.model, self.monkeypatch, packed=packed)
        self.engines.append(engine)
        return engine

    def gpu(self, shape: Shape) -> GpuEngine:
        """Start an engine of another kind."""
        engine = GpuEngine(self.fake, shape, self.network, self.model, self.monkeypatch)
        self.engines.append(engine)
        return engine
