"""The servers: which are up, how much each has to do, and which one a request goes to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from pushkv_vllm.router.config import DecodeServer, PrefillServer, RouterConfig
from pushkv_vllm.router.errors import RequestFailed


@dataclass(eq=False)
class Server:
    """One server's state.

    ``outstanding`` counts the tokens of unfinished requests, for a prefill server by data parallel rank. ``look``
    asks for a health check now.
    """

    url: str
    role: str
    prefill: PrefillServer | None = None
    up: bool = False
    failures: int = 0
    requests: int = 0
    outstanding: list[int] = field(default_factory=lambda: [0])
    look: asyncio.Event = field(default_factory=asyncio.Event)
    chosen: int = 0

    @property
    def tokens(self) -> int:
        """Outstanding tokens over all ranks."""
        return sum(self.outstanding)

    @property
    def rank(self) -> int:
        """The rank with the least to do."""
        return min(range(len(self.outstanding)), key=self.outstanding.__getitem__)

    @property
    def load(self) -> float:
        """Outstanding tokens a rank."""
        return self.tokens / len(self.outstanding)


class Fleet:
    """All servers of a router. Its methods run on the event loop's thread."""

    def __init__(self, config: RouterConfig) -> None:
        self.patience = config.patience
        self.prefill = tuple(_prefill(server) for server in config.prefill)
        self.decode = tuple(_decode(server) for server in config.decode)
        self._turn = itertools.count(1)
        self._changed = asyncio.Condition()

    @property
    def servers(self) -> tuple[Server, ...]:
        """Prefill servers, then decode servers."""
        return (*self.prefill, *self.decode)

    @property
    def ready(self) -> bool:
        """Whether a request can be served now."""
        return any(server.up for server in self.prefill) and any(server.up for server in self.decode)

    async def choose(self, servers: Sequence[Server], avoid: Collection[Server] = (), patience: float = -1) -> Server:
        """The healthy server with the least outstanding tokens; one of ``avoid`` only if there is no other.

        Waits ``patience`` seconds (the configured ones unless given) for one to come up. Raises RequestFailed (503).
        """
        until = time.monotonic() + (self.patience if patience < 0 else patience)
        while not any(server.up for server in servers):
            left = until - time.monotonic()
            if left <= 0 or not await self._change(left):
                names = ", ".join(server.url for server in servers)
                raise RequestFailed(503, f"No {servers[0].role} server is up (of {names}); try again.")
        # Of equals the one that was chosen longest ago.
        best = min((server for server in servers if server.up), key=lambda one: (one in avoid, one.load, one.chosen))
        best.chosen = next(self._turn)
        return best

    async def _change(self, limit: float) -> bool:
        """Wait for a server to come up; False when that took longer."""
        try:
            await asyncio.wait_for(self._wait(), limit)
        except asyncio.TimeoutError:
            return False
        return True

    async def _wait(self) -> None:
        async with self._changed:
            await self._changed.wait()

    def suspect(self, server: Server) -> None:
        """A connection to it failed: it is down until a health check, made now, has passed."""
        server.up = False
        server.look.set()

    async def came_up(self, server: Server) -> None:
        """A health check passed: requests that wait for a server go on."""
        server.failures = 0
        if not server.up:
            server.up = True
            async with self._changed:
                self._changed.notify_all()


def occupy(server: Server, rank: int, tokens: int) -> Callable[[], None]:
    """Count these tokens as this server's until what is returned is called, once or more often."""
    server.requests += 1
    server.outstanding[rank] += tokens
    held = [tokens]

    def end() -> None:
        if held:
            server.requests -= 1
            server.outstanding[rank] -= held.pop()

    return end


def _prefill(server: PrefillServer) -> Server:
    return Server(server.url, "prefill", server, outstanding=[0] * server.dp)


def _decode(server: DecodeServer) -> Server:
    return Server(server.url, "decode")
