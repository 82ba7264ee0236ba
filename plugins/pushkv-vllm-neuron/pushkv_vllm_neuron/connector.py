"""The connector that vLLM makes on Trainium."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pushkv_vllm.connector import PushKVConnector
from pushkv_vllm.settings import Settings
from pushkv_vllm.worker.half import WorkerHalf
from pushkv_vllm.worker.ranks import Ranks
from pushkv_vllm_neuron.geometry import describe
from pushkv_vllm_neuron.requirements import packed, require


class PushKVNeuronConnector(PushKVConnector):
    """Pushes KV between vLLM-Neuron engines, and between them and engines on GPUs.

    The model is one compiled graph that calls no hook a layer, and leaving its forward does not mean that KV is
    written: a step's parts go out behind the backend's fence, a step at a time at most.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        require(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        if self._worker is not None:
            self._worker.close()
            self._worker = NeuronWorkerHalf(vllm_config, self._worker._settings, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The kernels know one layout."""
        return None

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """The runner makes a tensor a layer."""
        return False


class NeuronWorkerHalf(WorkerHalf):
    """A worker's half for a cache in HBM."""

    def start(self, tensors: dict[str, Any]) -> None:
        """Register the cache. Raises GeometryError, BackendError, ConfigError and TransportError."""
        if next(iter(tensors.values())).device.type == "neuron":
            self._settings = over_libfabric(self._settings, self._vllm_config)
        ranks, folded = Ranks.here(), packed(self._vllm_config)
        cache = describe(
            tensors, self._kv_cache_config, ranks, self._total_heads, self._context, packed=folded, **self._factors()
        )
        self._serve(cache, ranks)


def over_libfabric(settings: Settings, vllm_config: Any) -> Settings:
    """The settings with NIXL's LIBFABRIC, unless another backend is set: HBM moves over no other."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    if "backend" in (extra.get("nixl") or {}):
        return settings
    return msgspec.structs.replace(settings, nixl=msgspec.structs.replace(settings.nixl, backend="LIBFABRIC"))
