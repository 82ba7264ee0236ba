"""The digest of what a request's KV is computed from."""

from __future__ import annotations

from typing import Any

from pushkv import prompt_digest


def digest_of(request: Any) -> bytes:
    """The prompt's digest: token ids, cache salt, LoRA adapter and the hashes of multimodal inputs."""
    lora = getattr(request, "lora_request", None)
    features = getattr(request, "mm_features", None) or ()
    return prompt_digest(
        request.prompt_token_ids,
        salt=getattr(request, "cache_salt", None) or "",
        lora="" if lora is None else str(lora.lora_name),
        multimodal=[str(feature.identifier) for feature in features],
    )


def refusal(request: Any) -> str:
    """Why this request's KV cannot be named by its tokens; empty where it can."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "its prompt is embeddings; send tokens"
    return ""
