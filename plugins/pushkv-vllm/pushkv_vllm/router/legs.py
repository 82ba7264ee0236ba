"""One leg: a request to one server, and what comes back or why nothing does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from pushkv_vllm.router.config import RouterConfig
from pushkv_vllm.router.errors import error_body
from pushkv_vllm.router.fleet import Fleet, Server

MOST_OF_AN_EVENT = 16 * 2**20
"""A stream's first event is read whole, up to this many bytes."""


class LegFailed(Exception):
    """A leg ended without what it was for.

    ``status`` and ``body`` are what a client is answered if it comes to that. ``final`` says that no other
    server would do better, because the fault is the request's.
    """

    def __init__(self, server: Server, reason: str, status: int, body: bytes, final: bool = False) -> None:
        super().__init__(f"{server.role} server {server.url}: {reason}")
        self.server = server
        self.reason = reason
        self.status = status
        self.body = body
        self.final = final


@dataclass(frozen=True)
class Sending:
    """A request to a server: its path, headers and body."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Prefilled:
    """A prefill leg that is done: the ``kv_transfer_params`` of its answer, if any, and how long it took."""

    params: dict[str, Any] | None
    seconds: float


@dataclass(frozen=True)
class Answer:
    """A decode server's answer. ``first`` is its first event, or all of it if ``rest`` is None."""

    content_type: str
    first: bytes
    rest: AsyncIterator[bytes] | None
    close: Callable[[], None]


class Legs:
    """Talks to servers over one session."""

    def __init__(self, config: RouterConfig, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._fleet = fleet
        self._session = session

    async def prefill(self, server: Server, sending: Sending) -> Prefilled:
        """Compute a prompt. Raises LegFailed."""
        began = time.monotonic()
        answer = await self._post(server, sending, self._config.silence)
        try:
            raw = await self._read(server, answer)
        finally:
            answer.close()
        try:
            found = msgspec.json.decode(raw)
        except ValueError as error:
            raise _broken(server, f"its answer is no JSON ({error})") from error
        params = found.get("kv_transfer_params") if isinstance(found, dict) else None
        return Prefilled(params if isinstance(params, dict) else None, time.monotonic() - began)

    async def decode(self, server: Server, sending: Sending, stream: bool) -> Answer:
        """An answer that has begun: its first event has been seen, and is no error. Raises LegFailed.

        It has to be closed; closing it before its end ends it on the server as well.
        """
        answer = await self._post(server, sending, self._config.silence if stream else self._config.answer_limit)
        try:
            kind = answer.headers.get("Content-Type", "application/json")
            if stream and kind.startswith("text/event-stream"):
                return Answer(
                    kind, await self._first_event(server, answer), self._chunks(server, answer), answer.close
                )
            return Answer(kind, await self._read(server, answer), None, answer.close)
        except BaseException:
            answer.close()
            raise

    async def _post(self, server: Server, sending: Sending, silence: float) -> aiohttp.ClientResponse:
        """A response with status 200, its body unread."""
        limit = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_limit, sock_read=silence)
        with self._told(server):
            answer = await self._session.post(
                server.url + sending.path,
                data=sending.body,
                headers=sending.headers,
                timeout=limit,
                allow_redirects=False,
            )
        if answer.status == 200:
            return answer
        try:
            raise _refused(server, answer.status, await self._read(server, answer))
        finally:
            answer.close()

    @contextmanager
    def _told(self, server: Server) -> Iterator[None]:
        """What goes wrong on the connection, told as the leg's failure; the server's health is looked at."""
        try:
            yield
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            self._fleet.suspect(server)
            raise _unreachable(server, error) from error

    async def _read(self, server: Server, answer: aiohttp.ClientResponse) -> bytes:
        with self._told(server):
            whole: bytes = await answer.read()
        return whole

    async def _chunks(self, server: Server, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """A response's body in the pieces in which it comes. Raises LegFailed if it breaks off."""
        pieces = answer.content.iter_any().__aiter__()
        while True:
            with self._told(server):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece

    async def _first_event(self, server: Server, answer: aiohttp.ClientResponse) -> bytes:
        """What comes up to the first event's end. Raises LegFailed if there is none, or if it is an error."""
        seen = bytearray()
        async for chunk in self._chunks(server, answer):
            seen += chunk
            if b"\n\n" in seen or b"\r\n\r\n" in seen or len(seen) > MOST_OF_AN_EVENT:
                break
        if not seen:
            raise _broken(server, "it ended the stream without an event")
        error = _error_in(bytes(seen))
        if error is not None:
            code = error.get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 500
            body = msgspec.json.encode({"error": error})
            raise LegFailed(server, f"an error in the stream, {status}", status, body, final=_final(status))
        return bytes(seen)


def _refused(server: Server, status: int, body: bytes) -> LegFailed:
    """An answer with an error status: passed on as it is if it is the client's fault, or if nothing better comes."""
    if not 400 <= status < 600:
        return _broken(server, f"it answered with status {status}")
    if not body.lstrip().startswith(b"{"):
        body = error_body(status, f"The server answered with status {status}.", "server_error")
    return LegFailed(server, f"status {status}", status, body, final=_final(status))


def _final(status: int) -> bool:
    """Whether an error is the request's own fault: then no other server would do better."""
    return status < 500 and status not in (408, 429)


def _broken(server: Server, reason: str) -> LegFailed:
    return LegFailed(
        server, reason, 502, error_body(502, f"A {server.role} server failed: {reason}.", "server_error")
    )


def _unreachable(server: Server, error: BaseException) -> LegFailed:
    """A connection that was refused, broke or stayed silent."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _broken(server, "it cannot be reached")
    if isinstance(error, asyncio.TimeoutError):
        text = f"A {server.role} server did not answer in time."
        return LegFailed(server, "silence", 504, error_body(504, text, "server_error"))
    return _broken(server, f"the connection broke ({type(error).__name__})")


def _error_in(event: bytes) -> dict[str, Any] | None:
    """The error that a stream's first event holds, in place of a first token."""
    line = event.lstrip().splitlines()[0] if event.strip() else b""
    if not line.startswith(b"data:") or b'"error"' not in line:
        return None
    try:
        found = msgspec.json.decode(line.removeprefix(b"data:"))
    except ValueError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return error if isinstance(error, dict) else None
