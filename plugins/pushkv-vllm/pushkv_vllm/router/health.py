"""Health checks: every server's ``/health``, at intervals and whenever a leg has failed there."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import aiohttp

from pushkv_vllm.router.config import RouterConfig
from pushkv_vllm.router.fleet import Fleet, Server

log = logging.getLogger("pushkv.router")


class Health:
    """Keeps ``Server.up`` true to what the servers say of themselves.

    A server is up after one check that passed, and down after ``health_failures`` that did not, or at once when
    nothing listens at its address.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._config = config
        self._fleet = fleet
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look at every server once, then go on in the background."""
        await asyncio.gather(*(self.check(server) for server in self._fleet.servers))
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._fleet.servers]

    async def stop(self) -> None:
        """End the checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.look.wait(), self._config.health_interval)
            server.look.clear()
            await self.check(server)
            if server.failures:
                # Neither a storm of failing legs nor a server that refuses at once makes this a busy loop.
                await asyncio.sleep(min(0.2, self._config.health_interval))

    async def check(self, server: Server) -> None:
        """One check. Never raises but for cancellation."""
        limit = aiohttp.ClientTimeout(total=self._config.health_limit)
        try:
            async with self._session.get(f"{server.url}/health", timeout=limit) as answer:
                ok, why, gone = answer.status < 300, f"status {answer.status}", False
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            ok, why, gone = False, repr(error), isinstance(error, aiohttp.ClientConnectorError)
        if ok:
            if not server.up:
                log.info("%s server %s is up", server.role, server.url)
            await self._fleet.came_up(server)
            return
        server.failures += 1
        if server.up and (gone or server.failures >= self._config.health_failures):
            server.up = False
            log.warning("%s server %s is down: %s", server.role, server.url, why)
