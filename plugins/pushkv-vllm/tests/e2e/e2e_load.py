"""Prompts, the requests that carry them, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from e2e_model import VOCABULARY

Prompt = tuple[int, ...]
ANSWER = 16
"""Tokens that every answer has."""
LIMIT = 900.0
"""Seconds in which a request has to end, on however busy a machine."""


class RequestError(Exception):
    """A request ended with an error; ``status`` is its code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def make_prompts(seed: int, count: int, longest: int = 4000, shortest: int = 1) -> list[Prompt]:
    """Prompts of lengths from ``shortest`` to ``longest``, as many short as long ones by the logarithm."""
    chance = random.Random(seed)
    ratio = longest / shortest
    lengths = [min(longest, round(shortest * ratio ** chance.random())) for _ in range(count)]
    # Around the ends of blocks and of chunks, and the longest.
    special = [
        length for length in (shortest, 31, 32, 33, 64, 65, 511, 512, 513, longest) if shortest <= length <= longest
    ]
    lengths[: len(special)] = special[:count]
    return [tuple(chance.randrange(3, VOCABULARY) for _ in range(length)) for length in lengths]


def make_families(seed: int, families: int, members: int, shared: int, own: int) -> list[Prompt]:
    """Prompts that share a beginning: ``families`` of ``members`` each."""
    chance = random.Random(seed)

    def words(length: int) -> Prompt:
        return tuple(chance.randrange(3, VOCABULARY) for _ in range(length))

    made = []
    for _ in range(families):
        beginning = words(chance.randrange(shared // 2, shared))
        made += [beginning + words(chance.randrange(1, own)) for _ in range(members)]
    chance.shuffle(made)
    return made


def body(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """A greedy completion's body."""
    return {"model": "m", "prompt": list(prompt), "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, **more}  # fmt: skip


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client's session."""
    limit = aiohttp.ClientTimeout(total=LIMIT)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as made:
        yield made


async def post(client: aiohttp.ClientSession, url: str, content: Mapping[str, Any], request_id: str = "") -> Any:
    """An answer that is not streamed. Raises RequestError."""
    headers = {"X-Request-Id": request_id} if request_id else {}
    path = "/v1/chat/completions" if "messages" in content else "/v1/completions"
    async with client.post(url + path, json=content, headers=headers) as answer:
        raw = await answer.read()
        if answer.status != 200:
            raise RequestError(answer.status, raw[:500].decode(errors="replace"))
        return json.loads(raw)


async def stream(
    client: aiohttp.ClientSession, url: str, content: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream. Raises RequestError, also for an error in the stream."""
    async with client.post(f"{url}/v1/completions", json={**content, "stream": True}) as answer:
        if answer.status != 200:
            raise RequestError(answer.status, (await answer.read())[:500].decode(errors="replace"))
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RequestError(int(event["error"].get("code") or 500), str(event["error"]["message"]))
            yield event


async def tokens(client: aiohttp.ClientSession, url: str, prompt: Prompt, **more: Any) -> Prompt:
    """The tokens of a streamed answer. Raises RequestError."""
    made: list[int] = []
    async for event in stream(client, url, body(prompt, **more)):
        for choice in event["choices"]:
            made += choice.get("token_ids") or []
    return tuple(made)


async def at_once(jobs: Iterable[Callable[[], Awaitable[Any]]], most: int = 16) -> list[Any]:
    """Run jobs, ``most`` at a time; what one raises takes its result's place."""
    gate = asyncio.Semaphore(most)

    async def one(job: Callable[[], Awaitable[Any]]) -> Any:
        async with gate:
            return await job()

    return await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True)


def ask_all(url: str, prompts: Sequence[Prompt], most: int = 16, **more: Any) -> list[Any]:
    """All prompts' tokens, or the errors in their places."""

    async def all_of_them() -> list[Any]:
        async with session() as client:
            return await at_once(
                [lambda prompt=prompt: tokens(client, url, prompt, **more) for prompt in prompts], most
            )

    return asyncio.run(all_of_them())


@dataclass(frozen=True)
class Reference:
    """What a single server answers."""

    answers: Mapping[Prompt, Prompt]

    def check(self, prompts: Sequence[Prompt], results: Sequence[Any]) -> None:
        """Hold results against the reference. Raises AssertionError that tells which differ."""
        wrong = []
        for prompt, result in zip(prompts, results, strict=True):
            if result != self.answers[prompt]:
                wrong.append(f"prompt of {len(prompt)}: {result!r}, not {self.answers[prompt]!r}")
        assert not wrong, f"{len(wrong)} of {len(prompts)} differ: " + "; ".join(wrong[:5])

    def known(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those prompts whose answers do not hang on a hair."""
        return [prompt for prompt in prompts if prompt in self.answers]


HAIR = 1e-3
"""By how much the best token has to lead, in log probability, to be compared: many times the noise of float32."""


async def _answer(client: aiohttp.ClientSession, url: str, prompt: Prompt) -> Prompt | None:
    """A prompt's tokens; None where two tokens are so close that the order of additions may decide."""
    found = (await post(client, url, body(prompt, logprobs=2)))["choices"][0]
    for best in found["logprobs"]["top_logprobs"]:
        values = sorted(best.values(), reverse=True)
        if len(values) > 1 and values[0] - values[1] < HAIR:
            return None
    return tuple(found["token_ids"])


def make_reference(url: str, prompts: Sequence[Prompt]) -> Reference:
    """Ask a single server. Raises AssertionError if more than a tenth of the prompts has to be left out."""

    async def all_of_them() -> list[Any]:
        async with session() as client:
            return await at_once([lambda prompt=prompt: _answer(client, url, prompt) for prompt in prompts], 4)

    answers = asyncio.run(all_of_them())
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    kept = {prompt: answer for prompt, answer in zip(prompts, answers, strict=True) if answer is not None}
    assert len(kept) > 0.9 * len(prompts), f"{len(prompts) - len(kept)} of {len(prompts)} answers hang on a hair"
    assert len(set(kept.values())) > 0.9 * len(kept), "the model answers different prompts alike"
    return Reference(kept)
