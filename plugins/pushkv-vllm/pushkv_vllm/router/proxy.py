"""The HTTP service: reads requests, relays answers, and ends both legs when a client goes away."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import aiohttp
import msgspec
from aiohttp import web

from pushkv_vllm.router.body import Ask, Endpoint, read_ask
from pushkv_vllm.router.config import RouterConfig
from pushkv_vllm.router.dispatch import Dispatcher
from pushkv_vllm.router.errors import RequestFailed, error_body
from pushkv_vllm.router.fleet import Fleet
from pushkv_vllm.router.gate import Gate
from pushkv_vllm.router.health import Health
from pushkv_vllm.router.legs import Answer, LegFailed, Legs
from pushkv_vllm.router.metrics import Ending, Metrics

log = logging.getLogger("pushkv.router")

FORWARDED = ("Authorization", "traceparent", "tracestate", "baggage", "X-Session-Id", "User-Agent")
"""Headers that go on to the servers. Ids, ranks and hop-by-hop headers do not."""
BACKEND_IDLE = 2.0
"""Seconds that an idle connection to a server is kept: less than uvicorn's 5, lest it close just as it is used."""


class Router:
    """A router over its own session; made and closed on one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.fleet = Fleet(config)
        self.gate = Gate(config.max_running, config.max_queue, config.queue_limit)
        self.metrics = Metrics(self.fleet, lambda: (self.gate.running, self.gate.waiting))
        self._forward = (*FORWARDED, *config.forward)

    def app(self) -> web.Application:
        """The service as an aiohttp application. Serve it with ``handler_cancellation=True``, as ``cli`` does."""
        app = web.Application(client_max_size=self.config.max_body, middlewares=[_errors])
        app.cleanup_ctx.append(self._life)
        for endpoint in Endpoint:
            app.router.add_post(endpoint.value, self._generating(endpoint))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=BACKEND_IDLE, socket_factory=_keepalive)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=True) as session:
            self._session = session
            self._dispatcher = Dispatcher(
                self.config, self.fleet, Legs(self.config, self.fleet, session), self.metrics
            )
            health = Health(self.config, self.fleet, session)
            await health.start()
            yield
            await health.stop()

    def _generating(self, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def generate(request: web.Request) -> web.StreamResponse:
            name = _name(request.headers.get("X-Request-Id"))
            # Until something says otherwise: a request that is cancelled was left by its client.
            ending = [Ending.DISCONNECTED]
            try:
                return await self._generate(endpoint, request, name, ending)
            except RequestFailed as failure:
                ending[0] = _refusal(failure.status)
                return _response(failure.status, failure.body(), name, failure.headers)
            except LegFailed as failure:
                ending[0] = Ending.REFUSED if failure.final else Ending.FAILED
                return _response(failure.status, failure.body, name)
            except ConnectionError:
                return _response(499, b"", name)  # nobody reads it
            except Exception:
                ending[0] = Ending.FAILED
                raise
            finally:
                self.metrics.requests.labels(endpoint.value, ending[0].value).inc()

        return generate

    async def _generate(
        self, endpoint: Endpoint, request: web.Request, name: str, ending: list[Ending]
    ) -> web.StreamResponse:  # fmt: skip
        ask = read_ask(endpoint, await self._body(request))
        began = time.monotonic()
        headers = {key: request.headers[key] for key in self._forward if key in request.headers}
        async with self.gate.entered():
            self.metrics.queued.observe(time.monotonic() - began)
            async with self._dispatcher.answered(ask, headers, name) as answer:
                self.metrics.first_token.observe(time.monotonic() - began)
                response = await self._relay(request, ask, answer, name, ending)
        return response

    async def _body(self, request: web.Request) -> bytes:
        limit = self.config.max_body
        too_large = RequestFailed(413, f"The body is larger than {limit} bytes.")
        if request.content_length is not None and request.content_length > limit:
            raise too_large
        try:
            raw: bytes = await asyncio.wait_for(request.read(), self.config.body_limit)
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except asyncio.TimeoutError as error:
            raise RequestFailed(408, f"The body did not come within {self.config.body_limit:g} s.") from error
        except (aiohttp.ClientError, web.HTTPException, ValueError) as error:
            raise RequestFailed(400, f"The body cannot be read: {error}.") from error
        return raw

    async def _relay(
        self, request: web.Request, ask: Ask, answer: Answer, name: str, ending: list[Ending]
    ) -> web.StreamResponse:  # fmt: skip
        if answer.rest is None:
            ending[0] = Ending.ANSWERED
            return _response(200, answer.first, name, kind=answer.content_type)
        response = web.StreamResponse(headers={"Content-Type": answer.content_type, "X-Request-Id": name,
                                               "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})  # fmt: skip
        await response.prepare(request)
        try:
            await self._write(request, response, answer.first)
            async for piece in answer.rest:
                await self._write(request, response, piece)
        except LegFailed as failure:
            ending[0] = Ending.BROKEN
            log.warning("request %s broke off: %s", name, failure)
            self.metrics.failed_legs.labels(failure.server.url, failure.server.role, str(failure.status)).inc()
            # Too late for a status: told in the stream, which then ends without its [DONE].
            await self._write(request, response, b"data: " + failure.body + b"\n\n")
        else:
            ending[0] = Ending.ANSWERED
        await response.write_eof()
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
        """Hand a piece to the client; the connection of one that reads nothing for too long is ended."""
        try:
            await asyncio.wait_for(response.write(piece), self.config.client_stall)
        except asyncio.TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read") from error

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """The models, as a decode server lists them."""
        server = await self.fleet.choose(self.fleet.decode)
        headers = {key: request.headers[key] for key in self._forward if key in request.headers}
        limit = aiohttp.ClientTimeout(total=self.config.health_limit)
        try:
            async with self._session.get(f"{server.url}/v1/models", headers=headers, timeout=limit) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise RequestFailed(502, f"Decode server {server.url} does not list its models: {error!r}.") from error

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """200 while there is a healthy server of each role, else 503; which is which is in the body."""
        servers = [{"url": server.url, "role": server.role, "up": server.up} for server in self.fleet.servers]
        body = msgspec.json.encode({"ready": self.fleet.ready, "servers": servers})
        return web.Response(status=200 if self.fleet.ready else 503, body=body, content_type="application/json")

    async def _metrics_page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self.metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:  # fmt: skip
    """Whatever goes wrong is answered in OpenAI's form."""
    name = _name(request.headers.get("X-Request-Id"))
    try:
        return await handler(request)
    except RequestFailed as failure:
        return _response(failure.status, failure.body(), name, failure.headers)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}."
        kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _response(error.status, error_body(error.status, text, "invalid_request_error"), name, kept)
    except Exception:
        log.exception("request %s failed in the router", name)
        return _response(500, error_body(500, "The router failed; its log has more.", "server_error"), name)


def _response(
    status: int, body: bytes, name: str, headers: Mapping[str, str] | None = None, kind: str = "application/json"
) -> web.Response:  # fmt: skip
    return web.Response(
        status=status, body=body, headers={**(headers or {}), "X-Request-Id": name, "Content-Type": kind}
    )


def _refusal(status: int) -> Ending:
    if status == 429:
        return Ending.OVERLOADED
    return Ending.REFUSED if status < 500 else Ending.FAILED


def _name(given: str | None) -> str:
    """The client's own id if it is fit to be logged and sent back, or one that is made up.

    It goes no further: what the servers get is made up for each dispatch, because clients' ids may come twice.
    """
    return given if given is not None and re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex


def _keepalive(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that the other machine is gone."""
    family, kind, proto, _, _ = address
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
