"""Reading a client's request: what it asks for, about how much work it is, and what the prefill leg is sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from pushkv_vllm.router.errors import RequestFailed

BYTES_A_TOKEN = 4
"""A rough guess, to compare servers' loads with; nothing else depends on it."""
USUAL_ANSWER = 256
"""Tokens that a request which does not limit its answer is taken to generate."""
MOST_CHOICES = 1024

# What only concerns the answer, of which prefill makes one token that nobody reads.
_OF_THE_ANSWER = (
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "request_id",
)


class Endpoint(Enum):
    """The two generating endpoints: their paths."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"

    @property
    def id_prefix(self) -> str:
        """What vLLM puts before the request id that it is given."""
        return "cmpl-" if self is Endpoint.COMPLETIONS else "chatcmpl-"


@dataclass(frozen=True)
class Ask:
    """One client's request. ``body`` is never changed.

    ``alone`` says why decode has to compute the prompt itself, if it has to.
    ``prompt_tokens`` and ``answer_tokens`` are estimates, the latter over all ``n`` choices.
    """

    endpoint: Endpoint
    body: dict[str, Any]
    stream: bool
    n: int
    prompt_tokens: int
    answer_tokens: int
    alone: str | None

    def for_decode(self, params: dict[str, Any] | None) -> bytes:
        """The decode leg's body: the client's, with these ``kv_transfer_params``."""
        return msgspec.json.encode(self.body if params is None else {**self.body, "kv_transfer_params": params})

    def for_prefill(self, params: dict[str, Any]) -> bytes:
        """The prefill leg's body: the same prompt, one token, nothing streamed."""
        body = {name: value for name, value in self.body.items() if name not in _OF_THE_ANSWER}
        limit = {"max_tokens": 1}
        if self.endpoint is Endpoint.CHAT and "max_completion_tokens" in self.body:
            limit = {"max_completion_tokens": 1}
        return msgspec.json.encode({**body, **limit, "stream": False, "kv_transfer_params": params})


def read_ask(endpoint: Endpoint, raw: bytes) -> Ask:
    """Understand a request's body. Raises RequestFailed (400) for what no server would take."""
    body = _object(raw)
    if "kv_transfer_params" in body:
        raise RequestFailed(400, "kv_transfer_params is set by the router; leave it out.")
    stream = _flag(body, "stream")
    n = _whole(body, "n", 1)
    if n > MOST_CHOICES:
        raise RequestFailed(400, f"n is {n}; give at most {MOST_CHOICES}.")
    limits = [_whole(body, name, 0) for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    answer = limits[0] if limits else USUAL_ANSWER
    if endpoint is Endpoint.COMPLETIONS:
        prompt, several = _prompt_tokens(body)
    else:
        prompt, several = _chat_tokens(body), False
    return Ask(endpoint, body, stream, n, prompt, n * answer, "several prompts" if several else _alone(body))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:  # msgspec's DecodeError is a ValueError
        raise RequestFailed(400, f"The body is no JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestFailed(400, f"The body is a JSON {type(body).__name__}; give an object.")
    return body


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestFailed(400, f"{name} is {value!r:.80}; give true or false.")
    return bool(value)


def _whole(body: dict[str, Any], name: str, least: int) -> int:
    value = body.get(name)
    if value is None:
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestFailed(400, f"{name} is {value!r:.80}; give a whole number from {least}.")
    return value


def _alone(body: dict[str, Any]) -> str | None:
    """Why the prompt's KV cannot come from elsewhere: its logits are asked for, or vLLM does not pass it on."""
    if body.get("prompt_logprobs") is not None:
        return "prompt logprobs"
    if body.get("echo") and body.get("logprobs"):
        return "echo with logprobs"
    if body.get("prompt_embeds") is not None:
        return "prompt embeddings"
    return "beam search" if body.get("use_beam_search") else None


def _prompt_tokens(body: dict[str, Any]) -> tuple[int, bool]:
    """About how many tokens a completion's prompt has, and whether it is several prompts."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _tokens(prompt), False
    if prompt is None and body.get("prompt_embeds") is not None:
        return 1, False
    if not isinstance(prompt, list) or not prompt:
        raise RequestFailed(400, f"prompt is {prompt!r:.80}; give a text, a list of token ids, or a list of those.")
    if isinstance(prompt[0], int):
        return len(prompt), False
    return sum(
        _tokens(one) if isinstance(one, str) else len(one) for one in prompt if isinstance(one, (str, list))
    ), len(prompt) > 1


def _chat_tokens(body: dict[str, Any]) -> int:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestFailed(400, f"messages is {messages!r:.80}; give a list of at least one message.")
    return _text_tokens(messages) + (_text_tokens(body["tools"]) if isinstance(body.get("tools"), list) else 0)


def _text_tokens(value: object) -> int:
    """Tokens of all the text in messages, whatever their nesting; an image counts by its size in the request."""
    waiting, total = [value], 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            total += _tokens(one)
        elif isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
    return total


def _tokens(text: str) -> int:
    return 1 + len(text) // BYTES_A_TOKEN
