"""Pushes on the fake over real NIXL: bytes that land late, and caches of another kind on the other side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pushkv import Consumer, EndpointConfig, KVCache, Outcome, Producer, prompt_digest
from pushkv.backends.base import PassedFence
from pushkv.config import NixlConfig
from pushkv.demo.model import DecodeInput, Model, choose
from pushkv.demo.paged import PagedCache
from pushkv.demo.weights import ModelConfig, Weights
from pushkv.testing.neuron import FakeNeuron, FakeNixl

LIBFABRIC = NixlConfig(backend="LIBFABRIC")
TRANSFERS = 1000
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 32, 2, 32, 16


@dataclass
class Ends:
    """A prefill and a decode engine on one device, connected."""

    fake: FakeNeuron
    producer: Producer
    consumer: Consumer
    link: object
    source: list[torch.Tensor]
    target: list[torch.Tensor]


def layers(content: int = CONTENT) -> list[torch.Tensor]:
    """A tensor a layer, (2, B, H, N, C), cast from raw bytes, as vLLM-Neuron makes them."""
    size = 2 * BLOCKS * HEADS * TOKENS * content
    return [
        torch.zeros(size, dtype=torch.int8, device="neuron:1").view(2, BLOCKS, HEADS, TOKENS, content)
        for _ in range(LAYERS)
    ]


def described(tensors: list[torch.Tensor]) -> KVCache:
    return KVCache.of({f"layer.{n}": tensor for n, tensor in enumerate(tensors)}, "SBHNC", model="m")


@pytest.fixture
def ends(neuron: FakeNeuron) -> Iterator[Ends]:
    nixl = FakeNixl(neuron)
    source, target = layers(), layers()
    neuron.synchronize()
    with (
        Producer(EndpointConfig(engine="prefill", nixl=LIBFABRIC), described(source), transport=nixl) as producer,
        Consumer(EndpointConfig(engine="decode", nixl=LIBFABRIC), described(target), transport=nixl) as consumer,
    ):
        yield Ends(neuron, producer, consumer, consumer.connect(producer.address), source, target)


def push(ends: Ends, number: int, *, fenced: bool = True) -> bool:
    """Compute a prompt's KV as one graph that lands late, push it, and say whether the other side has it exactly."""
    generator = np.random.default_rng(number)
    count = int(generator.integers(1, 4))
    ours, theirs = (generator.permutation(BLOCKS)[:count].tolist() for _ in range(2))
    tokens = count * TOKENS - int(generator.integers(0, TOKENS))
    kv = torch.from_numpy(generator.integers(-128, 128, (LAYERS, 2, count, HEADS, TOKENS, CONTENT), np.int8))

    def forward(*hosts: torch.Tensor) -> None:
        for layer, host in enumerate(hosts):
            host[:, ours] = kv[layer]

    ends.fake.run_graph(forward, *ends.source)
    digest, key = prompt_digest([number]), f"request {number}"
    transfer = ends.consumer.offer(key, ends.link, theirs, prompt=digest, prompt_tokens=tokens)  # type: ignore[arg-type]
    fence = None if fenced else PassedFence()
    ends.producer.stage(key, ours, prompt=digest, prompt_tokens=tokens, fence=fence)
    assert transfer.wait(60) is Outcome.COMPLETE, transfer.detail
    assert transfer.wait_released(60)
    landed = [_tokens(target.cpu()[:, theirs], tokens) for target in ends.target]
    return all(torch.equal(found, _tokens(kv[layer], tokens)) for layer, found in enumerate(landed))


def _tokens(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens of blocks (S, B, H, N, C), as (S, H, tokens, C)."""
    return blocks.permute(0, 2, 1, 3, 4).reshape(2, HEADS, -1, CONTENT)[:, :, :count]


def test_a_thousand_transfers_are_exact_behind_their_fences(ends: Ends) -> None:
    wrong = [number for number in range(TRANSFERS) if not push(ends, number)]
    assert wrong == []
    stats = ends.producer.stats()
    assert stats["bytes"] > TRANSFERS * LAYERS * 2 * HEADS * CONTENT


def test_without_the_fence_old_bytes_are_sent(ends: Ends) -> None:
    """The mutation that shows that the test above can fail: every one of them."""
    wrong = [number for number in range(20) if not push(ends, number, fenced=False)]
    ends.fake.synchronize()
    assert wrong == list(range(20))


def test_an_agent_that_came_too_early_sends_what_is_not_the_devices(neuron: FakeNeuron) -> None:
    """Why the runtime must be up before any agent: nothing fails, and nothing that arrives is KV."""
    nixl = FakeNixl(neuron)
    early = nixl("too-early")
    early.claim()
    source, target = layers(), layers()
    neuron.synchronize()
    with (
        Producer(EndpointConfig(engine="p", nixl=LIBFABRIC), described(source), transport=nixl) as producer,
        Consumer(EndpointConfig(engine="d", nixl=LIBFABRIC), described(target), transport=nixl) as consumer,
    ):
        ends = Ends(neuron, producer, consumer, consumer.connect(producer.address), source, target)
        assert not push(ends, 1)
    early.close()


CONFIG = ModelConfig()
WEIGHTS = Weights.seeded(CONFIG, 3)
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, CONFIG.vocabulary, 150)]
NEW = 12


class NeuronEngine:
    """The demo's model on Trainium: a tensor a layer, (2, B, H, N, C), blocks of 32, K and V apart.

    It computes in a host cache; graphs carry the cache to the device, late, and reads bring it back.
    """

    def __init__(self, blocks: int) -> None:
        self.model = Model(CONFIG, WEIGHTS)
        self.paged = self.model.cache(blocks, 32)
        self.tensors = [
            torch.zeros(2, blocks, CONFIG.kv_heads, 32, CONFIG.head_dim, device="neuron:2")
            for _ in range(CONFIG.layers)
        ]
        named = dict(zip(CONFIG.layer_names, self.tensors, strict=True))
        self.cache = KVCache.of(named, "SBHNC", model="demo")

    def write_back(self, fake: FakeNeuron) -> None:
        """One forward has changed the cache: the device has it when the graph lands."""
        computed = torch.from_numpy(self.paged.view.copy())
        fake.run_graph(lambda *hosts: [host.copy_(computed[n]) for n, host in enumerate(hosts)], *self.tensors)

    def read(self) -> None:
        """Take in what was pushed to the device."""
        for layer, tensor in enumerate(self.tensors):
            self.paged.view[layer] = tensor.cpu().numpy()


class GpuEngine:
    """The demo's model with a cache as vLLM has it on a GPU: block outermost, NHD, K and V in one, blocks of 16."""

    def __init__(self, blocks: int) -> None:
        self.model = Model(CONFIG, WEIGHTS)
        self.paged = self.model.cache(blocks, 16, order="BLNHSC")
        self.tensor = torch.from_numpy(self.paged.array)
        self.cache = KVCache.of(self.tensor, "BLNHSC", layers=CONFIG.layer_names, model="demo")

    def write_back(self, fake: FakeNeuron) -> None:
        """Its memory is the host's."""

    def read(self) -> None:
        """Its memory is the host's."""


def tokens_alone() -> list[int]:
    """What one process gives by itself."""
    model = Model(CONFIG, WEIGHTS)
    cache = model.cache(32, 16)
    table = np.arange(16, dtype=np.int32)
    first = choose(model.prefill(cache, PROMPT, table))
    return [int(first.tokens[0]), *generate(model, cache, table, int(first.tokens[0]))]


def generate(model: Model, cache: PagedCache, table: np.ndarray, token: int) -> list[int]:
    found = []
    for step in range(NEW):
        choice = choose(model.decode(cache, [DecodeInput(token, len(PROMPT) + step, table)]))
        assert choice.gaps[0] > 1e-3, "the best two are too close for the order of a sum not to decide"
        token = int(choice.tokens[0])
        found.append(token)
    return found


@pytest.mark.parametrize("direction", ["GPU to Trainium", "Trainium to GPU", "Trainium to Trainium"])
def test_tokens_are_those_of_one_process(neuron: FakeNeuron, direction: str) -> None:
    """Other order, other block size, K and V in one region against two."""
    kinds = {"GPU": GpuEngine, "Trainium": NeuronEngine}
    prefill, decode = (kinds[name](40) for name in direction.split(" to "))
    neuron.synchronize()
    nixl = FakeNixl(neuron)
    sizes = [engine.paged.block_size for engine in (prefill, decode)]
    ours, theirs = (np.array([7, 3, 30, 5, 21, 22, 9, 11, 4, 35, 1], np.int32)[: -(-170 // size)] for size in sizes)
    digest = prompt_digest(PROMPT)

    def config(engine: object, name: str) -> EndpointConfig:
        return EndpointConfig(engine=name, nixl=LIBFABRIC if isinstance(engine, NeuronEngine) else NixlConfig())

    with (
        Producer(config(prefill, "prefill"), prefill.cache, transport=nixl) as producer,
        Consumer(config(decode, "decode"), decode.cache, transport=nixl) as consumer,
    ):
        link = consumer.connect(producer.address)
        blocks = theirs[: -(-len(PROMPT) // sizes[1])].tolist()
        transfer = consumer.offer("r", link, blocks, prompt=digest, prompt_tokens=len(PROMPT))
        first = choose(prefill.model.prefill(prefill.paged, PROMPT, ours)).tokens[0]
        prefill.write_back(neuron)
        mine = ours[: -(-len(PROMPT) // sizes[0])].tolist()
        producer.stage("r", mine, prompt=digest, prompt_tokens=len(PROMPT))
        assert transfer.wait(60) is Outcome.COMPLETE, transfer.detail
        decode.read()
    assert [int(first), *generate(decode.model, decode.paged, theirs, int(first))] == tokens_alone()


@pytest.mark.parametrize(
    "settings",
    [{"landing": "landing"}, {"verify": "checksum"}, {"landing": "landing", "verify": "checksum"}],
    ids=str,
)
def test_gathered_and_scattered_on_the_device(neuron: FakeNeuron, settings: dict[str, str]) -> None:
    """Through slots, or with a digest of the bytes: both read and write device memory by torch's own operations."""
    nixl = FakeNixl(neuron)
    source, target = layers(), layers()
    neuron.synchronize()
    told = {"nixl": LIBFABRIC, "landing_bytes": 1 << 20, "slot_bytes": 1 << 18, **settings}
    with (
        Producer(EndpointConfig(engine="p", **told), described(source), transport=nixl) as producer,  # type: ignore[arg-type]
        Consumer(EndpointConfig(engine="d", **told), described(target), transport=nixl) as consumer,  # type: ignore[arg-type]
    ):
        ends = Ends(neuron, producer, consumer, consumer.connect(producer.address), source, target)
        assert [number for number in range(20) if not push(ends, number)] == []
