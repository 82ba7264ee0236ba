"""Engines of vLLM's scheduler on the fake Neuron device, which stays in the process: run this folder by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pushkv_vllm

CONNECTOR_TESTS = Path(pushkv_vllm.__file__).resolve().parents[1] / "tests" / "connector"
"""The engines that the connector itself is tested with."""
sys.path.insert(0, str(CONNECTOR_TESTS))

from pushkv.backends.neuron import NeuronBackend  # noqa: E402
from pushkv.plugins import registry  # noqa: E402
from pushkv.testing.neuron import FakeHost, FakeNeuron, Flavour  # noqa: E402
from pushkv.transport.memory import Network  # noqa: E402


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration; nobody computes with it."""
    import json

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=list(Flavour), ids=lambda one: one.name.lower())
def neuron(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeNeuron]:
    """The device, with the registry's backend on its machine."""
    host = FakeHost.trn2(tmp_path / "host")
    fake = FakeNeuron(host, request.param).install()
    registry().use(NeuronBackend(host.machine()))
    yield fake
    registry().close()


@pytest.fixture
def scene(neuron: FakeNeuron, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Engines on the fake device."""
    from neuron_engine import NeuronScene

    made = NeuronScene(model, monkeypatch, Network(immediate=True))
    made.fake = neuron
    yield made
    made.close()
