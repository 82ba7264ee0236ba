"""The queue, by itself: places are never lost, whoever gives up and when."""

from __future__ import annotations

import asyncio
import random

import pytest

from pushkv_vllm.router.errors import RequestFailed
from pushkv_vllm.router.gate import Gate


@pytest.mark.parametrize("seed", range(20))
def test_places_are_never_lost(seed: int) -> None:
    async def scene() -> None:
        chance = random.Random(seed)
        gate = Gate(3, 1000, 60.0)
        most = 0

        async def pass_through() -> None:
            nonlocal most
            async with gate.entered():
                most = max(most, gate.running)
                assert gate.running <= 3
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(pass_through()) for _ in range(60)]
        for _ in range(200):
            await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert (most, gate.running, gate.waiting) == (3, 0, 0)
        # All three places can be taken once more.
        async with gate.entered(), gate.entered(), gate.entered():
            assert gate.running == 3

    asyncio.run(scene())


def test_first_come_first_served_and_no_more_than_may_wait() -> None:
    async def scene() -> None:
        gate, order = Gate(1, 2, 60.0), []

        async def enter(name: int) -> None:
            async with gate.entered():
                order.append(name)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(enter(name)) for name in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="2 requests wait"):
            async with gate.entered():
                pass
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]

    asyncio.run(scene())


def test_a_wait_that_is_too_long() -> None:
    async def scene() -> None:
        gate = Gate(1, 1, 0.01)
        async with gate.entered():
            with pytest.raises(RequestFailed) as failure:
                async with gate.entered():
                    pass
            assert failure.value.status == 503
            assert gate.waiting == 0

    asyncio.run(scene())
