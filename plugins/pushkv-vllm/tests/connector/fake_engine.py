"""An engine whose scheduler is vLLM's own and whose model is a sum: real requests, real blocks, no servers.

A layer's KV of a token is a number made of the tokens up to it, so that whoever has the wrong KV at any place of any
block is found out: each step checks all tokens before those that it computes. Workers are the connector's own, over
an in-process data mover, called in the order in which vLLM's runner calls them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from pushkv.transport.memory import MemoryTransport, Network
from pushkv_vllm import PushKVConnector
from pushkv_vllm.context import Context
from pushkv_vllm.worker import half
from pushkv_vllm.worker.ranks import Ranks

WAIT = 60.0
HEADS, HEAD_SIZE, LAYERS = 4, 2, 3


def until(condition: Callable[[], object], *engines: FakeEngine) -> None:
    """Step the engines until the condition holds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{condition} did not come to hold within {WAIT} s"
        for engine in engines:
            engine.step()
        time.sleep(0.001)


@dataclass(frozen=True)
class Shape:
    """How an engine is built: ``ranks`` workers in each of ``stages``, which share the layers out.

    ``window`` makes every second layer a sliding-window one, in a group of its own. With ``latent`` a token of a
    layer is one row, the same at all ranks (MLA). ``context`` ranks of the same heads share tokens out in runs of
    ``interleave``, by default a block.
    """

    role: str = "kv_producer"
    ranks: int = 1
    stages: int = 1
    latent: bool = False
    blocks: int = 256
    block_size: int = 4
    window: int = 0
    policy: str = "fail"
    batched: int = 64
    caching: bool = True
    settings: tuple[tuple[str, Any], ...] = ()
    heads: int = HEADS
    context: int = 1
    interleave: int = 0

    @property
    def rank_heads(self) -> int:
        """How many heads a rank holds."""
        return 1 if self.latent else max(1, self.heads // self.ranks)

    @property
    def span(self) -> int:
        """Of how many tokens a block is to the scheduler."""
        return self.block_size * self.context

    def holds(self, rank: int, token: int) -> bool:
        """Whether a token is this rank's, as vLLM's slot mapping has it."""
        return token % self.span // (self.interleave or self.block_size) % self.context == rank % self.context

    def slot(self, token: int) -> tuple[int, int]:
        """The number of the block in the request, and the place in it, of a token that a rank holds; as there."""
        run, offset = self.interleave or self.block_size, token % self.span
        return token // self.span, offset // (self.context * run) * run + offset % run


@lru_cache(maxsize=1)
def base_config(model: str) -> VllmConfig:
    """The configuration of the small model that the tests write; the engines' own are copies of it."""
    args = EngineArgs(model=model, dtype="float32", enforce_eager=True, max_model_len=4096, skip_tokenizer_init=True)
    return args.create_engine_config()


def config_of(shape: Shape, model: Path) -> VllmConfig:
    """A server's configuration."""
    transfer = KVTransferConfig(
        kv_connector="PushKVConnector",
        kv_connector_module_path="pushkv_vllm.connector",
        kv_role=shape.role,
        kv_load_failure_policy=shape.policy,
        # The prompts are so small that by default nothing would leave before their end.
        kv_connector_extra_config={"port": 0, "idle_wait": 0.001, "stream": "chunk", **dict(shape.settings)},
    )
    config: VllmConfig = EngineArgs(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=1024, block_size=32,
        skip_tokenizer_init=True, max_num_seqs=16, max_num_batched_tokens=max(shape.batched, 16),
        enable_prefix_caching=shape.caching, kv_transfer_config=transfer, num_gpu_blocks_override=shape.blocks,
        async_scheduling=False,
    ).create_engine_config()  # fmt: skip
    config.cache_config.block_size = shape.block_size
    config.cache_config.num_gpu_blocks = shape.blocks
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.pipeline_parallel_size = shape.stages
    config.parallel_config.decode_context_parallel_size = shape.context
    config.parallel_config.cp_kv_cache_interleave_size = shape.interleave or shape.block_size
    object.__setattr__(config.model_config, "get_total_num_kv_heads", lambda: shape.heads)
    return config


def cache_config_of(shape: Shape) -> KVCacheConfig:
    """Layers' names and groups."""
    heads, kind = shape.rank_heads, MLAAttentionSpec if shape.latent else FullAttentionSpec
    full = kind(block_size=shape.block_size, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32)
    names = [f"layers.{number}" for number in range(LAYERS)]
    groups = [KVCacheGroupSpec(names, full)]
    if shape.window:
        narrow = SlidingWindowSpec(block_size=shape.block_size, num_kv_heads=heads, head_size=HEAD_SIZE,
                                   dtype=torch.float32, sliding_window=shape.window)  # fmt: skip
        groups = [KVCacheGroupSpec(names[::2], full), KVCacheGroupSpec(names[1::2], narrow)]
    page = full.page_size_bytes
    tensors = [KVCacheTensor(page * shape.blocks, [name], page, page) for name in names]
    return KVCacheConfig(num_blocks=shape.blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


@cache
def value_of(tokens: tuple[int, ...]) -> float:
    """What a token's KV is: a number of all tokens up to it."""
    total = 1
    for token in tokens:
        total = (total * 31 + token + 7) % 9973
    return float(total)


def next_token(tokens: Sequence[int]) -> int:
    """What the model says next."""
    return int(value_of(tuple(tokens))) % 500 + 3


class FakeWorker:
    """One rank: its share of the layers and heads, and the connector."""

    def __init__(self, engine: FakeEngine, rank: int, stage: int) -> None:
        self.engine, self.rank = engine, rank
        self.ranks = Ranks(rank, engine.shape.ranks, stage, engine.shape.stages)
        self.latent = engine.shape.latent
        self.heads = engine.shape.rank_heads
        layers = np.array_split(np.arange(LAYERS), engine.shape.stages)[stage]
        self.caches = {f"layers.{number}": self.cache() for number in layers}
        self.connector = self.connect()

    def cache(self) -> Any:
        """A layer's cache."""
        blocks, size = self.engine.shape.blocks, self.engine.shape.block_size
        return torch.zeros((blocks, size, HEAD_SIZE) if self.latent else (blocks, self.heads, size, 2 * HEAD_SIZE))

    def connect(self) -> Any:
        """The connector."""
        return PushKVConnector(self.engine.config, KVConnectorRole.WORKER, self.engine.cache_config)

    def halves(self, layer: str) -> tuple[np.ndarray[Any, Any], ...]:
        """A layer's keys and values as (block, head, token, element): of a block and head the keys come first, by
        columns. Of latent rows there is one half."""
        if self.latent:
            return (self.caches[layer].numpy()[:, None],)
        heads, size = self.heads, self.engine.shape.block_size
        both = self.caches[layer].numpy().reshape(-1, heads, 2, size * HEAD_SIZE)
        keys = both[:, :, 0].reshape(-1, heads, HEAD_SIZE, size).transpose(0, 1, 3, 2)
        return keys, both[:, :, 1].reshape(-1, heads, size, HEAD_SIZE)

    def tokens(self, layer: str, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
        """The tokens of these blocks as (token, side, head, element)."""
        rows = np.stack([one[list(blocks)] for one in self.halves(layer)])
        return rows.transpose(1, 3, 0, 2, 4).reshape(-1, rows.shape[0], rows.shape[2], HEAD_SIZE)

    def write(self, layer: str, block: int, offset: int, row: np.ndarray[Any, Any]) -> None:
        """Write one token, (side, head, element)."""
        for rows, side in zip(self.halves(layer), row, strict=True):
            rows[block, :, offset] = side

    def expected(self, layer: str, values: Sequence[float]) -> np.ndarray[Any, Any]:
        """What tokens with these values are to be."""
        shape = self.engine.shape
        first = 0 if self.latent else self.rank * shape.heads // shape.ranks
        base = np.asarray(values, np.float32)[:, None, None, None] + np.float32(10_000 * int(layer.split(".")[1]))
        side = np.arange(1 if self.latent else 2, dtype=np.float32)[:, None, None] * 100_000
        head = (np.arange(self.heads, dtype=np.float32) + first)[:, None] * 1_000_000
        made: np.ndarray[Any, Any] = base + side + head + np.arange(HEAD_SIZE, dtype=np.float32) * np.float32(0.25)
        return made


class FakeEngine:
    """A server without its front: requests go in, tokens come out, a step at a time."""

    def __init__(self, shape: Shape, network: Network, model: Path, monkeypatch: Any) -> None:
        self.shape = shape
        self.config = config_of(shape, model)
        self.cache_config = cache_config_of(shape)
        init_none_hash(sha256)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=shape.span,
            hash_block_size=shape.span,
            log_stats=True,
        )
        monkeypatch.setattr(half.WorkerHalf, "transports", [lambda agent: MemoryTransport(network, agent)])
        monkeypatch.setattr(half, "check_cpu_kernel", lambda *_: None)  # blocks of 4 tokens are nothing for it
        self.workers: list[FakeWorker] = []
        addresses: list[str] = []
        self.workers = self._start(monkeypatch, addresses)
        self.aggregator = KVOutputAggregator(shape.ranks * shape.stages)
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.finished: dict[str, RequestStatus] = {}
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.steps = count()
        self.wrong: list[str] = []
        self.loaded: dict[str, int] = {}

    def _start(self, monkeypatch: Any, addresses: list[str]) -> list[FakeWorker]:
        places = product(range(self.shape.stages), range(self.shape.ranks))
        workers = [FakeWorker(self, rank, stage) for stage, rank in places]
        geometries = [self._geometry(worker) for worker in workers]
        for worker in workers:
            monkeypatch.setattr(Ranks, "here", classmethod(lambda cls, ranks=worker.ranks: ranks))
            monkeypatch.setattr(Ranks, "gather", lambda _, mine: [mine] if isinstance(mine, str) else geometries)
            worker.connector.register_kv_caches(worker.caches)
        self.producers = [one for worker in workers for one in self._endpoints(worker) if one.role == "prefill"]
        for producer in self.producers:
            producer.introduce([one.address for one in self.producers])
        return workers

    def _geometry(self, worker: FakeWorker) -> Any:
        from pushkv_vllm.worker.geometry import describe

        context = Context.of(self.config.parallel_config)
        return describe(worker.caches, self.cache_config, worker.ranks, self.shape.heads, context).cache.geometry

    @staticmethod
    def _endpoints(worker: FakeWorker) -> list[Any]:
        return list(worker.connector._worker._endpoints)

    @property
    def endpoints(self) -> list[Any]:
        """All ranks' endpoints."""
        return [one for worker in self.workers for one in self._endpoints(worker)]

    @property
    def where(self) -> dict[str, Any]:
        """The parameters that name this prefill engine."""
        host, _, port = self.producers[0].address.removeprefix("tcp://").rpartition(":")
        return {"remote_host": host, "remote_port": int(port)}

    @property
    def free_blocks(self) -> int:
        """How many of the pool's blocks nobody refers to."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(self, name: str, prompt: Sequence[int], params: Any, tokens: int = 1) -> Request:
        """A request comes in."""
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, extra_args=extra)
        sampling.update_from_generation_config({}, 2)
        hasher = get_request_block_hasher(self.shape.span, sha256) if self.shape.caching else None
        request = Request(request_id=name, prompt_token_ids=list(prompt), sampling_params=sampling,
                          pooling_params=None, block_hasher=hasher)  # fmt: skip
        self.tokens[name] = list(prompt)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # A step

    def step(self) -> Any:
        """One step, if the engine would take one; what the scheduler said."""
        next(self.steps)
        if not self.scheduler.has_requests():
            return None
        output = self.scheduler.schedule()
        self.take_tables(output)
        result = self.execute(output)
        for made in self.scheduler.update_from_output(output, result).values():
            for one in made.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one.finish_reason
                    self.answers[one.request_id] = one.kv_transfer_params
        return output

    def take_tables(self, output: Any) -> None:
        """What a runner keeps of block tables."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self.loaded[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = [list(table) for table in blocks]
            elif blocks is not None:
                for mine, more in zip(self.tables[name], blocks, strict=True):
                    mine.extend(more)

    def execute(self, output: Any) -> Any:
        """What the workers do, in the order of vLLM's runner, and what becomes of their outputs."""
        made = []
        sampled = self.sampled(output)
        for worker in self.workers:
            connector = worker.connector
            connector.handle_preemptions(output.kv_connector_metadata)
            connector.bind_connector_metadata(output.kv_connector_metadata)
            self.forward(worker, output)
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(output.finished_req_ids)
            told = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=connector.get_block_ids_with_load_errors(),
                kv_connector_stats=connector.get_kv_connector_stats(),
                kv_connector_worker_meta=connector.build_connector_worker_meta(),
            )
            connector.clear_connector_metadata()
            made.append(self.output(sampled, told))
        return self.aggregator.aggregate(made)

    @staticmethod
    def output(sampled: dict[str, list[int]], told: KVConnectorOutput) -> ModelRunnerOutput:
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(told) if not told.is_empty() else ModelRunnerOutput(
                **vars(EMPTY_MODEL_RUNNER_OUTPUT)
            )  # fmt: skip
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=told,
        )

    def ranges(self, output: Any) -> dict[str, tuple[int, int]]:
        """Which tokens of which requests a step computes."""
        scheduled, starts = output.num_scheduled_tokens, {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {name: (starts[name], starts[name] + tokens) for name, tokens in scheduled.items()}

    def sampled(self, output: Any) -> dict[str, list[int]]:
        """The next token of each request whose last known token is computed in this step."""
        made = {}
        for name, (_, stop) in self.ranges(output).items():
            known = self.tokens[name]
            made[name] = [next_token(known)] if stop == len(known) else []
        for name, tokens in made.items():
            self.tokens[name] = [*self.tokens[name], *tokens]
        return made

    def forward(self, worker: FakeWorker, output: Any) -> None:
        """Check what was computed before, and compute, layer by layer."""
        ranges = self.ranges(output)
        groups = enumerate(self.cache_config.kv_cache_groups)
        layers = sorted(
            ((layer, group, spec) for group, spec in groups for layer in spec.layer_names if layer in worker.caches),
            key=lambda one: one[0],
        )
        for layer, group, spec in layers:
            window = getattr(spec.kv_cache_spec, "sliding_window", None)
            for name, (start, stop) in ranges.items():
                oldest = max(0, start - window + 1) if window else 0
                self._check(worker, name, group, layer, self.tokens[name], (oldest, start))
                self._compute(worker, name, group, layer, self.tokens[name], (start, stop))
            if ranges:
                worker.connector.save_kv_layer(layer, worker.caches[layer], None)

    def _values(self, known: list[int], places: Sequence[int]) -> list[float]:
        return [value_of(tuple(known[: place + 1])) for place in places]

    def _check(
        self, worker: FakeWorker, name: str, group: int, layer: str, known: list[int], places: tuple[int, int]
    ) -> None:
        """Look at tokens that were computed before, wherever they come from."""
        held = [place for place in range(*places) if self.shape.holds(worker.rank, place)]
        if not held:
            return
        size, slots = self.shape.block_size, [self.shape.slot(place) for place in held]
        first = slots[0][0]
        blocks = self.tables[name][group][first : slots[-1][0] + 1]
        found = worker.tokens(layer, blocks)[[(block - first) * size + offset for block, offset in slots]]
        expected = worker.expected(layer, self._values(known, held))
        for number in np.flatnonzero((found != expected).any(axis=(1, 2, 3)))[:1]:
            block = self.tables[name][group][slots[number][0]]
            self.wrong.append(f"{name}, rank {worker.rank}, {layer}, token {held[number]} in block {block}")

    def _compute(
        self, worker: FakeWorker, name: str, group: int, layer: str, known: list[int], places: tuple[int, int]
    ) -> None:
        held = [place for place in range(*places) if self.shape.holds(worker.rank, place)]
        for place, row in zip(held, worker.expected(layer, self._values(known, held)), strict=True):
            block, offset = self.shape.slot(place)
            worker.write(layer, self.tables[name][group][block], offset, row)

    def close(self) -> None:
        """Stop the connectors."""
        for worker in self.workers:
            worker.connector.shutdown()
        self.scheduler.shutdown()


@dataclass
class Scene:
    """A network and the engines on it."""

    model: Path
    monkeypatch: Any
    network: Network
    engines: list[FakeEngine] = field(default_factory=list)

    def engine(self, shape: Shape) -> FakeEngine:
        """Start an engine."""
        engine = FakeEngine(shape, self.network, self.model, self.monkeypatch)
        self.engines.append(engine)
        return engine

    def kill(self, engine: FakeEngine) -> None:
        """End an engine as SIGKILL does."""
        self.engines.remove(engine)
        for endpoint in engine.endpoints:
            endpoint._control.close()
            self.network.die(endpoint.agent)
            assert endpoint._transfer.stop(WAIT)

    def close(self) -> None:
        """Stop everything, and look whether any engine has met wrong KV."""
        self.network.release()
        for engine in self.engines:
            engine.close()
        assert [wrong for engine in self.engines for wrong in engine.wrong[:3]] == []
