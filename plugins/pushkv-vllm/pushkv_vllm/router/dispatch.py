"""A request's two legs, and what follows when one fails.

What an attempt opens is put on its exit stack: when the stack is left, for whatever reason, the legs that still run
are cancelled, and a server whose connection closes aborts its request.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from pushkv_vllm.router.body import Ask, Endpoint
from pushkv_vllm.router.config import Mode, RouterConfig, Shape
from pushkv_vllm.router.errors import RequestFailed
from pushkv_vllm.router.fleet import Fleet, Server, occupy
from pushkv_vllm.router.legs import Answer, LegFailed, Legs, Prefilled, Sending
from pushkv_vllm.router.metrics import Metrics
from pushkv_vllm.router.shapes import Dispatch, decode_params, prefill_params

log = logging.getLogger("pushkv.router")


@dataclass(frozen=True)
class Attempt:
    """One try at a request. ``headers`` go to both servers; servers in ``avoid`` have failed it before."""

    ask: Ask
    headers: Mapping[str, str]
    number: int
    avoid: tuple[Server, ...]
    stack: ExitStack

    def sending(self, identity: str, body: bytes, rank: int | None = None) -> Sending:
        """A leg's request. ``identity`` is made up for the dispatch: a client's own id may come twice."""
        headers = {**self.headers, "X-Request-Id": identity, "Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        return Sending(self.ask.endpoint.value, headers, body)


@dataclass(frozen=True)
class PrefillLeg:
    """Where a dispatch's prompt is computed; ``over`` says that the server has this work no longer."""

    server: Server
    dispatch: Dispatch
    over: Callable[[], None]


class Dispatcher:
    """Turns a request into an answer, by as many attempts as the settings allow."""

    def __init__(self, config: RouterConfig, fleet: Fleet, legs: Legs, metrics: Metrics) -> None:
        self._config = config
        self._fleet = fleet
        self._legs = legs
        self._metrics = metrics

    @asynccontextmanager
    async def answered(self, ask: Ask, headers: Mapping[str, str], name: str) -> AsyncIterator[Answer]:
        """The answer, once it has begun. Raises LegFailed (the last attempt's) or RequestFailed.

        ``headers`` go to both servers; ``name`` is the request's in the log.
        """
        failed: tuple[Server, ...] = ()
        for number in range(self._config.attempts):
            with ExitStack() as stack:
                try:
                    answer = await self._answer(Attempt(ask, headers, number, failed, stack))
                except LegFailed as failure:
                    self._note(failure, f"request {name}, attempt {number}")
                    if failure.final or number + 1 == self._config.attempts:
                        raise
                    failed = (*failed, failure.server)
                    continue
                yield answer
                return

    def _note(self, failure: LegFailed, where: str) -> None:
        server = failure.server
        self._metrics.failed_legs.labels(server.url, server.role, str(failure.status)).inc()
        log.log(logging.INFO if failure.final else logging.WARNING, "%s: %s", where, failure)

    async def _answer(self, attempt: Attempt) -> Answer:
        self._metrics.dispatches.labels("retry" if attempt.number else "first").inc()
        prefill = await self._prefill_server(attempt)
        if prefill is None:
            return await self._opening(attempt, uuid.uuid4().hex, await self._decode_server(attempt), None)
        dispatch = _dispatch(attempt, prefill)
        leg = PrefillLeg(prefill, dispatch, occupy(prefill, dispatch.rank, attempt.ask.prompt_tokens))
        attempt.stack.callback(leg.over)
        if self._config.mode is Mode.SEQUENTIAL:
            return await self._in_sequence(attempt, leg)
        return await self._at_once(attempt, leg)

    async def _prefill_server(self, attempt: Attempt) -> Server | None:
        """Where the prompt is computed; None if decode is to do it."""
        if attempt.ask.alone is not None:
            self._metrics.alone.labels(attempt.ask.alone).inc()
            return None
        try:
            return await self._fleet.choose(self._fleet.prefill, attempt.avoid)
        except RequestFailed:
            if not self._config.decode_alone:
                raise
            self._metrics.alone.labels("no prefill server").inc()
            return None

    async def _decode_server(self, attempt: Attempt) -> Server:
        decode = await self._fleet.choose(self._fleet.decode, attempt.avoid)
        tokens = attempt.ask.prompt_tokens + attempt.ask.answer_tokens
        attempt.stack.callback(occupy(decode, 0, tokens))
        return decode

    async def _at_once(self, attempt: Attempt, leg: PrefillLeg) -> Answer:
        decode = await self._decode_server(attempt)
        began = time.monotonic()
        first = asyncio.create_task(self._prefilled(attempt, leg))
        attempt.stack.callback(_abandon, first)
        second = self._opening(attempt, leg.dispatch.id, decode, decode_params(self._config.shape, leg.dispatch))
        answer = await _both(first, second)
        if first.done() and first.exception() is None:
            self._metrics.handoff.observe(max(0.0, time.monotonic() - began - first.result().seconds))
        return answer

    async def _in_sequence(self, attempt: Attempt, leg: PrefillLeg) -> Answer:
        params = (await self._prefilled(attempt, leg)).params
        if params is None:
            log.warning("prefill server %s answers no kv_transfer_params; decode computes on", leg.server.url)
            self._metrics.alone.labels("no parameters").inc()
        elif self._config.shape is Shape.PUSHKV:
            params.setdefault("n", leg.dispatch.n)
        return await self._opening(attempt, leg.dispatch.id, await self._decode_server(attempt), params)

    async def _prefilled(self, attempt: Attempt, leg: PrefillLeg) -> Prefilled:
        """The prefill leg, pinned to the rank that decode is told of."""
        dispatch = leg.dispatch
        body = attempt.ask.for_prefill(prefill_params(self._config.shape, dispatch))
        rank = dispatch.rank if dispatch.prefill.dp > 1 else None
        try:
            done = await self._legs.prefill(leg.server, attempt.sending(dispatch.id, body, rank))
        finally:
            leg.over()
        self._metrics.prefill_leg.observe(done.seconds)
        return done

    def _opening(
        self, attempt: Attempt, identity: str, decode: Server, params: dict[str, Any] | None
    ) -> asyncio.Task[Answer]:  # fmt: skip
        """The decode leg. What comes of it is closed with the attempt."""
        sending = attempt.sending(identity, attempt.ask.for_decode(params))
        opening = asyncio.create_task(self._legs.decode(decode, sending, attempt.ask.stream))
        attempt.stack.callback(_abandon, opening)
        return opening


def _dispatch(attempt: Attempt, server: Server) -> Dispatch:
    """A dispatch with a fresh id, to the rank of a prefill server that has the least to do."""
    assert server.prefill is not None
    identity = uuid.uuid4().hex
    # vLLM counts a completion's prompts in its ids; there is one here.
    suffix = "-0" if attempt.ask.endpoint is Endpoint.COMPLETIONS else ""
    request = f"{attempt.ask.endpoint.id_prefix}{identity}{suffix}"
    return Dispatch(identity, request, attempt.number, attempt.ask.n, server.prefill, server.rank)


async def _both(first: asyncio.Task[Prefilled], second: asyncio.Task[Answer]) -> Answer:
    """Decode's answer. Raises LegFailed as soon as either leg fails before it has begun."""
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    if not second.done():
        first.result()
        await asyncio.wait({second})
    return second.result()


def _abandon(leg: asyncio.Task[Any]) -> None:
    """Cancel a leg that still runs, and close what came or comes of it.

    Nothing is awaited: whoever cleans up after a client that went away may be cancelled at every step.
    """
    leg.cancel()
    leg.add_done_callback(_close)


def _close(leg: asyncio.Task[Any]) -> None:
    if not leg.cancelled() and leg.exception() is None and isinstance(answer := leg.result(), Answer):
        answer.close()
