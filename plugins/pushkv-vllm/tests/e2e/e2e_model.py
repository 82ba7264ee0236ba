"""Small Llama-shaped models with seeded weights: what they answer is arbitrary, and always the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 1024
BEGIN, END = 1, 2
CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"


@dataclass(frozen=True)
class Model:
    """A model's shape. Every ``windowed``-th layer attends to the last ``window`` tokens alone; 0 for none.

    With a ``latent`` of so many elements a token has one row of those and ``rotated`` more for all heads (MLA);
    vLLM's CPU kernel is made for 512 and 64.
    """

    name: str
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    hidden: int = 256
    inner: int = 512
    longest: int = 8192
    window: int = 512
    windowed: int = 0
    latent: int = 0
    rotated: int = 64
    seed: int = 20261130

    @property
    def arguments(self) -> tuple[str, ...]:
        """What its servers need to be told.

        vLLM 0.32's own rotation on CPU takes the keys of latent rows, which are parts of rows, for rows: all but a
        step's first token get other tokens' numbers. PyTorch's does it right.
        """
        rotation = json.dumps({"custom_ops": ["all", "-rotary_embedding"]})
        return ("--compilation-config", rotation) if self.latent else ()

    def write(self, folder: Path) -> Path:
        """Write the model into ``folder``, which is returned."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self._weights()), str(folder / "model.safetensors"), metadata={"format": "pt"})
        files = {
            "config": self._config(),
            "generation_config": _GENERATION,
            "tokenizer": _tokenizer(),
            "tokenizer_config": _TOKENIZER | {"model_max_length": self.longest, "chat_template": CHAT},
        }
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    def _config(self) -> dict[str, Any]:
        kinds = {"sliding_window": self.window, "layer_types": self._kinds()} if self.windowed else {}
        latent = self._latent_config() if self.latent else {}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": self.longest,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "tie_word_embeddings": False,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            **kinds,
            **latent,
        }

    def _latent_config(self) -> dict[str, Any]:
        """DeepSeek's second version without experts."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_nope_head_dim": self.head,
            "qk_rope_head_dim": self.rotated,
            "v_head_dim": self.head,
            "n_routed_experts": 2,
            "first_k_dense_replace": self.layers,
        }

    def _kinds(self) -> list[str]:
        windowed = (layer % self.windowed == 0 for layer in range(self.layers))
        return ["sliding_attention" if one else "full_attention" for one in windowed]

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """All weights, in a fixed order, scaled so that every prompt has an answer of its own."""
        import torch

        numbers = torch.Generator().manual_seed(self.seed)

        def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
            return torch.randn(rows, columns, generator=numbers) * scale

        hidden, scale = self.hidden, 1.5 * self.hidden**-0.5
        yield "model.embed_tokens.weight", normal(VOCABULARY, hidden, 1.0)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield f"{at}.input_layernorm.weight", torch.ones(hidden)
            for name, rows, columns, times in self._projections():
                yield f"{at}.self_attn.{name}.weight", normal(rows, columns, times * 1.5 * columns**-0.5)
            if self.latent:
                yield f"{at}.self_attn.kv_a_layernorm.weight", torch.ones(self.latent)
            yield f"{at}.post_attention_layernorm.weight", torch.ones(hidden)
            yield f"{at}.mlp.gate_proj.weight", normal(self.inner, hidden, scale)
            yield f"{at}.mlp.up_proj.weight", normal(self.inner, hidden, scale)
            yield f"{at}.mlp.down_proj.weight", normal(hidden, self.inner, scale)
        yield "model.norm.weight", torch.ones(hidden)
        yield "lm_head.weight", normal(VOCABULARY, hidden, 1.0)

    def _projections(self) -> list[tuple[str, int, int, float]]:
        """The attention's matrices: name, rows, columns and how many times the usual scale."""
        hidden, queries, keys = self.hidden, self.heads * self.head, self.kv_heads * self.head
        out = ("o_proj", hidden, queries, 2.0)
        if self.latent:
            whole = queries + self.heads * self.rotated
            row, back = ("kv_a_proj_with_mqa", self.latent + self.rotated), ("kv_b_proj", 2 * queries)
            return [("q_proj", whole, hidden, 1.0), (*row, hidden, 1.0), (*back, self.latent, 1.5), out]
        return [("q_proj", queries, hidden, 1.0), ("k_proj", keys, hidden, 1.0), ("v_proj", keys, hidden, 2.0), out]


_GENERATION = {"bos_token_id": BEGIN, "eos_token_id": END, "do_sample": False}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def _tokenizer() -> dict[str, Any]:
    """Words t3 … t1023 split at spaces, each a token."""
    words = {"<unk>": 0, "<s>": BEGIN, "</s>": END} | {f"t{number}": number for number in range(3, VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }


FULL = Model("full")
HYBRID = Model("hybrid", windowed=2)
WINDOW = Model("window", windowed=1)
LATENT = Model("latent", latent=512)
