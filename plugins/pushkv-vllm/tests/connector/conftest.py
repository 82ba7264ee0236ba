"""Engines on an in-process network, for one test each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_engine import Scene

from pushkv.transport.memory import Network

# Threads of torch's that spin would take the cores from the threads under test.
torch.set_num_threads(1)
# vLLM asks a server of its own how it is used, and hubs for models, unless it is told not to.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration; nobody computes with it."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def scene(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Engines over an immediate network."""
    made = Scene(model, monkeypatch, Network(immediate=True))
    yield made
    made.close()
