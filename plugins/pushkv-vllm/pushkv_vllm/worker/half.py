"""The connector in a worker: the endpoints of this rank, and what vLLM calls there."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from vllm.logger import init_logger

from pushkv import Consumer, Ended, Outcome, Producer
from pushkv.errors import GeometryError
from pushkv.runtime.factory import TransportFactory
from pushkv.runtime.streaming import WORTH
from pushkv_vllm import compat
from pushkv_vllm.context import Context
from pushkv_vllm.directives import Directives, Reports
from pushkv_vllm.log import adopt
from pushkv_vllm.settings import Settings
from pushkv_vllm.stats import PushKVStats, Tally
from pushkv_vllm.wake import Bell
from pushkv_vllm.worker.decode import DecodeWorker, News
from pushkv_vllm.worker.geometry import EngineCache, describe, describe_cross_layer, model_digest
from pushkv_vllm.worker.kernel import check_cpu_kernel
from pushkv_vllm.worker.layers import TIMES, Layers
from pushkv_vllm.worker.prefill import PrefillWorker
from pushkv_vllm.worker.ranks import Ranks

logger = init_logger("vllm.pushkv.worker")

STEP_OF_LAYERS = TIMES * WORTH
"""Bytes of KV of a step of which ``auto`` tells layer by layer: so that each part is one that it lets go early."""
LOOKS = 3
"""Steps for which is counted what has changed after the last that had anything open."""
CLOSING = 5.0
"""For how many seconds shutting down waits for custody to end."""


class WorkerHalf:
    """Both roles' worker halves."""

    transports: ClassVar[list[TransportFactory]] = []
    """What makes the data movers; none for what the settings say. Tests put an in-process one here."""

    def __init__(self, vllm_config: Any, settings: Settings, kv_cache_config: Any) -> None:
        adopt()
        self._vllm_config = vllm_config
        self._settings = settings
        self._kv_cache_config = kv_cache_config
        self._bell = Bell()
        self._decode: DecodeWorker | None = None
        self._prefill: PrefillWorker | None = None
        self._endpoints: list[Producer | Consumer] = []
        self._directives: Directives | None = None
        self._news: News | None = None
        self._tally = Tally()
        self._looks = 0
        """For how many more steps to count with nothing open: a part may be staged, or a gauge fall, after a look."""
        self._rank = 0

    @property
    def _transport(self) -> TransportFactory | None:
        return self.transports[0] if self.transports else None

    # At the start

    def start(self, tensors: dict[str, Any]) -> None:
        """Register a cache of one tensor a layer. Raises GeometryError, ConfigError and TransportError."""
        ranks = Ranks.here()
        if next(iter(tensors.values())).device.type == "cpu":
            for group in self._kv_cache_config.kv_cache_groups:
                check_cpu_kernel(self._vllm_config, group.kv_cache_spec)
        cache = describe(tensors, self._kv_cache_config, ranks, self._total_heads, self._context, **self._factors())
        self._serve(cache, ranks)

    def start_cross_layer(self, tensor: Any, attn_backend: type[Any]) -> None:
        """Register a cache of one tensor for all layers, in the order in which it lies in memory."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        ranks = Ranks.here()
        heads_first = str(get_kv_cache_layout()) == "HND"
        cache = describe_cross_layer(
            tensor, self._kv_cache_config, ranks, self._total_heads, self._context,
            heads_first=heads_first, **self._factors(),
        )  # fmt: skip
        self._serve(cache, ranks)

    @property
    def _context(self) -> Context:
        return Context.of(self._vllm_config.parallel_config)

    @property
    def _total_heads(self) -> int:
        return int(self._vllm_config.model_config.get_total_num_kv_heads())

    def _factors(self) -> dict[str, str]:
        cache = self._vllm_config.cache_config
        return {
            "model": self._settings.model or model_digest(self._vllm_config),
            "cache dtype": str(cache.cache_dtype),
        }

    def _serve(self, cache: EngineCache, ranks: Ranks) -> None:
        config, parallel = self._vllm_config.kv_transfer_config, self._vllm_config.parallel_config
        if self._settings.switch_interval:
            sys.setswitchinterval(min(sys.getswitchinterval(), self._settings.switch_interval))
        engine, settings, self._rank = str(config.engine_id), self._settings, ranks.rank
        layout = getattr(self._vllm_config.cache_config, "kv_cache_layout", None)
        logger.info("PushKV: rank %d of %d, cache layout %s (asked for: %s): %s", ranks.rank, ranks.count, layout,
                    settings.layout, cache)  # fmt: skip
        if config.is_kv_producer:
            first = settings.port + int(getattr(parallel, "data_parallel_index", 0) or 0)
            own = settings.endpoint(engine, ranks.rank, first if ranks.rank == 0 else 0, cache.device)
            producer = Producer(own, cache.cache, transport=self._transport)
            producer.introduce(ranks.gather(producer.address))
            least = STEP_OF_LAYERS if settings.stream == "auto" else 0
            layers = Layers(cache.cache.geometry, least, own.slot_bytes) if own.layers else None
            self._prefill = PrefillWorker(producer, cache, settings.hold, layers)
            self._endpoints.append(producer)
            logger.info("PushKV: prefill rank %d is reached at %s", ranks.rank, producer.address)
        if config.is_kv_consumer:
            self._endpoints.append(self._consumer(cache, ranks, engine))
        for endpoint in self._endpoints:
            endpoint.on_event = self._tell

    def _consumer(self, cache: EngineCache, ranks: Ranks, engine: str) -> Consumer:
        settings = self._settings
        geometry = cache.cache.geometry
        everybody = ranks.gather(geometry)
        fellows = [one for rank, one in enumerate(everybody) if rank != ranks.rank]
        consumer = Consumer(
            settings.endpoint(engine, ranks.rank, 0, cache.device),
            cache.cache,
            fellows=fellows,
            transport=self._transport,
        )
        recompute = self._vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"
        if not compat.fails_by_request() and len(self._kv_cache_config.kv_cache_groups) > 1:
            raise GeometryError(
                "This vLLM cannot be told of a failed load of a cache of several groups; upgrade to 0.32, or use "
                "--disable-hybrid-kv-cache-manager."
            )
        self._decode = DecodeWorker(consumer, cache, late=recompute and not compat.fails_by_request(),
                                    changed=self._bell.ring, patience=settings.connect_timeout)  # fmt: skip
        self._decode.connect(settings.producers.values())
        return consumer

    # Each step, in the order of vLLM's calls

    def begin(self, directives: Directives) -> None:
        """A step's directives are here."""
        self._directives = directives
        if directives.urgent:
            self._looks = LOOKS
        self._bell.doorbell = directives.wake
        if self._decode is not None:
            self._decode.do(directives)
        if self._prefill is not None:
            self._prefill.do(directives)

    def _tell(self, event: object) -> None:
        """Something has happened, on any thread: wake the scheduler, and tell it at once of a load that is there."""
        load = 0
        if self._decode is not None and isinstance(event, Ended) and event.outcome is Outcome.COMPLETE:
            load = self._decode.load_of(event.key)
        if load:
            self._bell.tell(self._rank, load)
        else:
            self._bell.ring()

    def layer_queued(self, name: str) -> None:
        """A layer's work of the step is queued."""
        if self._prefill is not None:
            self._prefill.layer_queued(name)

    def queued(self) -> None:
        """The step's work is queued."""
        if self._prefill is not None:
            self._prefill.stage()

    def finished(self) -> tuple[set[str], set[str]]:
        """Loads that have ended, and those of them that failed. Also takes in what else has happened."""
        if self._directives is not None and not self._directives.tokens:
            self.queued()  # before 0.27 nobody says so for a step without tokens
        news = self._decode.poll() if self._decode is not None else None
        reports = self._prefill.poll() if self._prefill is not None else None
        if reports is not None:
            news = news or News()
            news.reports = news.reports.aggregate(reports)
        self._news = news
        return (news.received, news.failed) if news is not None else (set(), set())

    def failed_blocks(self) -> set[int]:
        """The blocks of failed loads, where the engine must be told of those."""
        return set() if self._news is None or compat.fails_by_request() else self._news.blocks

    def reports(self) -> Reports | None:
        """What the scheduler half is to hear, None where that is nothing."""
        news, self._news = self._news, None
        loads = self._decode is not None and self._decode.open > 0
        if news is None:
            return Reports(open=True) if loads else None
        news.reports.open = loads
        return news.reports or None

    def stats(self) -> PushKVStats | None:
        """What has been counted here since the last time."""
        seconds = self._decode.seconds if self._decode is not None else []
        still = sum(half.open for half in (self._decode, self._prefill) if half is not None)
        quarantined = sum(endpoint.quarantined for endpoint in self._endpoints)
        if still or quarantined:
            self._looks = LOOKS
        elif self._looks:
            self._looks -= 1
        elif not seconds:
            return None
        counts = self._prefill.written() if self._prefill is not None else {}
        return self._tally.take(counts, {"open": still, "quarantined": quarantined}, seconds)

    def close(self) -> None:
        """End what is open and stop."""
        if self._decode is not None:
            self._decode.links.close()
        for endpoint in self._endpoints:
            endpoint.on_event = None
            endpoint.close(CLOSING)
        self._bell.close()
