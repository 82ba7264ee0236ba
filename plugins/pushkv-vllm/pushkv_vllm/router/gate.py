"""The queue in front of the servers: so many requests run, so many wait, more are turned away."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pushkv_vllm.router.errors import RequestFailed


class Gate:
    """Lets ``running`` requests in at a time, first come first served; ``waiting`` more wait ``limit`` seconds."""

    def __init__(self, running: int, waiting: int, limit: float) -> None:
        self._free = running
        self._most = waiting
        self._limit = limit
        self._queue: deque[asyncio.Future[None]] = deque()
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return sum(not future.done() for future in self._queue)

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Wait for a place and hold it. Raises RequestFailed: 429 if the queue is full, 503 if it took too long."""
        if self._free:
            self._free -= 1
        else:
            await self._wait()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._leave()

    async def _wait(self) -> None:
        if self.waiting >= self._most:
            raise RequestFailed(
                429, f"{self.waiting} requests wait already; try again.", "rate_limit_error", {"Retry-After": "1"}
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        try:
            # The future is not cancelled with the wait: whether a place was given to it stays visible.
            done, _ = await asyncio.wait({place}, timeout=self._limit)
        except asyncio.CancelledError:
            self._give_up(place)
            raise
        if not done:
            self._give_up(place)
            raise RequestFailed(
                503, f"No place came free within {self._limit:g} s; try again.", headers={"Retry-After": "5"}
            )

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if place.done():
            self._leave()
        else:
            self._queue.remove(place)

    def _leave(self) -> None:
        """Hand the place to the first who waits."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self._free += 1
