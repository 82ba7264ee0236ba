"""A router and fake servers around it, all on one event loop, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from pushkv_vllm.router.config import DecodeServer, PrefillServer, RouterConfig
from pushkv_vllm.router.fleet import Server
from pushkv_vllm.router.proxy import Router

T = TypeVar("T")
LIMIT = 30.0
"""Seconds after which a condition is taken never to come true."""


def run(scene: Coroutine[Any, Any, T]) -> T:
    """Play a scene to its end on a loop of its own."""
    return asyncio.run(asyncio.wait_for(scene, 2 * LIMIT))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; an AssertionError if it does not come true."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), LIMIT)


@dataclass
class Call:
    """A request as a server got it. ``ended`` is 'answered', or 'left' when its client went away first."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    ended: str = ""

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self.body["kv_transfer_params"]
        return params


Behaviour = Callable[["FakeServer", web.Request, Call], Awaitable[web.StreamResponse]]


async def prefilled(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """What a prefill server does: one token, and parameters for decode."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": server.name,
        "token": "from P",
    }
    return web.json_response({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": params})


def events(body: dict[str, Any]) -> list[bytes]:
    """A stream as a decode server sends it: three tokens, usage if it is asked for, and the end."""
    chunks = [{"id": "d", "choices": [{"index": 0, "text": f"t{number} "}]} for number in range(3)]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({"id": "d", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}})  # type: ignore[dict-item]
    return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [b"data: [DONE]\n\n"]


async def begun(request: web.Request) -> web.StreamResponse:
    """A stream's headers, sent."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def decoded(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """What a decode server does: a stream, or an answer at once."""
    if not call.body.get("stream"):
        # Odd spacing: an answer that were parsed and written anew would look different.
        return web.Response(body=b'{"id": "d",  "choices":[{"text":"all of it"}]}', content_type="application/json")
    response = await begun(request)
    for event in events(call.body):
        await response.write(event)
    await response.write_eof()
    return response


@dataclass
class FakeServer:
    """A server of either role whose behaviour can be changed at any time."""

    name: str
    behaviour: Behaviour
    port: int = 0
    healthy: bool = True
    calls: list[Call] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def call(self) -> Call:
        """The only request so far."""
        assert len(self.calls) == 1, self.calls
        return self.calls[0]

    async def start(self) -> None:
        """Listen, again at the same port after a stop."""
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{path:.*}", self._serve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        """Die: connections are closed, nothing listens."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}], "authorization": request.headers.get("Authorization")})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.path, request.headers, await request.json())
        self.calls.append(call)
        try:
            response = await self.behaviour(self, request, call)
        except (asyncio.CancelledError, ConnectionError):
            call.ended = "left"
            raise
        call.ended = "answered"
        return response


class Scene:
    """P prefill and D decode servers, a router in front, and a client's session."""

    def __init__(self, prefill: int = 1, decode: int = 1, dp: int = 1, **settings: Any) -> None:
        self.prefill = [FakeServer(f"p{number}", prefilled) for number in range(prefill)]
        self.decode = [FakeServer(f"d{number}", decoded) for number in range(decode)]
        self._dp = dp
        self._settings = {
            "health_interval": 0.05,
            "health_limit": 20.0,
            "patience": 20.0,
            "shutdown_limit": 5.0,
        } | settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Scene:
        for server in (*self.prefill, *self.decode):
            await server.start()
            self._stack.push_async_callback(server.stop)
        config = RouterConfig(
            tuple(
                PrefillServer(one.url, "10.0.0.1", 7100 + k, one.name, 2, self._dp)
                for k, one in enumerate(self.prefill)
            ),
            tuple(DecodeServer(one.url) for one in self.decode),
            port=0,
        )
        self.router = Router(replace(config, **self._settings))
        self.runner = web.AppRunner(
            self.router.app(), handler_cancellation=True, shutdown_timeout=self._settings["shutdown_limit"]
        )
        await self.runner.setup()
        self._stack.push_async_callback(self.runner.cleanup)
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.session = await self._stack.enter_async_context(aiohttp.ClientSession())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def state(self, fake: FakeServer) -> Server:
        """The router's view of a server."""
        return next(server for server in self.router.fleet.servers if server.url == fake.url)

    async def ask(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> Reply:
        """A request, read to the end."""
        if not body:
            body = {"prompt": "one two three"}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return Reply(answer.status, answer.headers, await answer.read())

    def idle(self) -> bool:
        """Whether the router thinks that nobody has anything to do."""
        servers = self.router.fleet.servers
        return self.router.gate.running == 0 and all(not server.requests and not server.tokens for server in servers)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, 0 if it has none yet."""
        return self.router.metrics.registry.get_sample_value(f"pushkv_router_{name}", labels) or 0.0


@dataclass
class Reply:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose form is checked."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        return error


async def waits(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Answers once the test says so; as the role does."""
    await server.release.wait()
    return await (prefilled if server.name.startswith("p") else decoded)(server, request, call)


async def streams_on(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Sends a first token, and the rest once the test says so."""
    response = await begun(request)
    first, *rest = events(call.body)
    await response.write(first)
    await server.release.wait()
    for event in rest:
        await response.write(event)
    await response.write_eof()
    return response


def fails(status: int, message: str = "no") -> Behaviour:
    """Answers with an error as vLLM forms it."""

    async def fail(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        error = {"message": message, "type": "Error", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return fail


def fails_in_the_stream(status: int) -> Behaviour:
    """Status 200, and the error as the stream's first event: what vLLM does when a KV load fails."""

    async def fail(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        response = await begun(request)
        error = {"message": "KV load failed", "type": "InternalServerError", "param": None, "code": status}
        await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\ndata: [DONE]\n\n")
        await response.write_eof()
        return response

    return fail


async def drops(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Closes the connection in place of an answer."""
    assert request.transport is not None
    request.transport.close()
    raise ConnectionResetError


async def drops_in_the_stream(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
    """Closes the connection after the first token."""
    response = await begun(request)
    await response.write(events(call.body)[0])
    assert request.transport is not None
    request.transport.close()
    raise ConnectionResetError


def once(first: Behaviour, then: Behaviour) -> Behaviour:
    """One behaviour for the first request, another for those that follow."""

    async def behave(server: FakeServer, request: web.Request, call: Call) -> web.StreamResponse:
        return await (first if len(server.calls) == 1 else then)(server, request, call)

    return behave
