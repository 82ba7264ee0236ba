"""The connector that vLLM makes: one object beside the scheduler, one in each worker.

What vLLM calls is here; what it comes to is in :mod:`pushkv_vllm.scheduler` and :mod:`pushkv_vllm.worker`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pushkv.errors import ConfigError
from pushkv_vllm import compat
from pushkv_vllm.context import Context
from pushkv_vllm.directives import Directives, Reports
from pushkv_vllm.log import announce, logger
from pushkv_vllm.scheduler.half import SchedulerHalf
from pushkv_vllm.settings import read_settings
from pushkv_vllm.stats import PushKVPromMetrics, PushKVStats
from pushkv_vllm.worker.half import WorkerHalf


class PushKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Pushes KV from prefill engines into the blocks that decode engines offer.

    Roles are vLLM's: ``kv_producer`` for prefill, ``kv_consumer`` for decode, ``kv_both``. Settings are
    :class:`pushkv_vllm.settings.Settings`, parameters of requests :mod:`pushkv_vllm.params`.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        if compat.sleeps(vllm_config):
            raise ConfigError("PushKVConnector cannot serve a cache that sleep mode takes away; disable sleep mode.")
        Context.of(vllm_config.parallel_config)  # refuses what cannot be served, before anything is made
        if settings.stream in ("auto", "layer") and getattr(vllm_config.parallel_config, "enable_dbo", False):
            if settings.stream == "layer":
                raise ConfigError(
                    "stream is 'layer' and dual-batch overlap computes a layer in two halves; use 'chunk'."
                )
            settings = msgspec.structs.replace(settings, stream="chunk")
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            announce()
            self._scheduler = SchedulerHalf(vllm_config, settings, kv_cache_config)
        else:
            self._worker = WorkerHalf(vllm_config, settings, kv_cache_config)

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a worker's connector was asked what only the scheduler's knows"
        return self._scheduler

    @property
    def _workers(self) -> WorkerHalf:
        assert self._worker is not None, "the scheduler's connector was asked what only a worker's knows"
        return self._worker

    # What the engine asks before there is a connector

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Blocks outermost, wherever the engine can."""
        from vllm.platforms import current_platform

        config = vllm_config.kv_transfer_config
        settings = read_settings(config.kv_connector_extra_config if config is not None else None)
        return compat.layout_to_ask_for(settings.layout, str(current_platform.device_type))

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Until 0.31: one tensor for all layers, blocks outermost."""
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        return settings.layout == "block"

    supports_sleep_mode = False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Never: inside a graph of the whole model nobody is told of layers, and then they go when the step is done.

        Steps that compute prompts are in no such graph, but with ``cudagraph_mode`` FULL.
        """
        return False

    # The scheduler's

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The pool whose blocks are pinned."""
        self._half.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """A request has come in."""
        self._half.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are to come from elsewhere; no decision falls here."""
        missing = self._half.missing(request, num_computed_tokens)
        return missing, missing > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A push fills every group that may be moved, so that none of them is to be zeroed meanwhile."""
        config = self._kv_cache_config
        return tuple(getattr(config, "transfer_group_ids", range(len(config.kv_cache_groups))))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there: offer them."""
        self._half.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's directives."""
        return self._half.directives(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        self._half.output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As for all groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over. Its blocks may go: those that a WRITE may touch are pinned."""
        return False, self._half.finished(request)

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed to take what workers report."""
        return self._half.pending

    def has_pending_block_frees(self) -> bool:
        """Whether pinned blocks may come back soon."""
        return self._half.pending

    # The workers'

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The cache is there: describe and register it, and start."""
        self._workers.start(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: type[Any]) -> None:
        """Until 0.31: the cache is one tensor."""
        self._workers.start_cross_layer(kv_cache, attn_backend)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins: offers, cancels and the like go out at once."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Directives)
        self._workers.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: what arrives does so by itself."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request is scheduled before its KV is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """A layer's work is queued. It goes out with some others, or with the step: see ``stream``."""
        self._workers.layer_queued(layer_name)

    def wait_for_save(self) -> None:
        """The step's work is queued: a fence behind it, and its parts are staged. Waits for nothing."""
        self._workers.queued()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Until 0.31: loads that have ended, those that failed included."""
        return None, self._workers.finished()[0]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """From 0.32: loads that have ended, and which of them have failed."""
        received, failed = self._workers.finished()
        return compat.transfer_results(set(), received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Until 0.31: the blocks of loads that have failed."""
        return self._workers.failed_blocks()

    def build_connector_worker_meta(self) -> Reports | None:
        """What this rank has to report."""
        return self._workers.reports()

    # Both

    def get_kv_connector_stats(self) -> PushKVStats | None:
        """What has changed since the last time."""
        return self._worker.stats() if self._worker is not None else self._half.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PushKVStats:
        """Stats from what has crossed processes."""
        return PushKVStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PushKVPromMetrics:
        """The metrics of the API server."""
        return PushKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """No cache events of our own."""
        return ()

    def shutdown(self) -> None:
        """End what is open, wait a little for custody to end, and stop."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        logger.debug("PushKV is shut down.")
