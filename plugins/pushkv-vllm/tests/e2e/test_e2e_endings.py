"""Pushes that cannot be: each ends by its deadline, under both policies, and the blocks come back.

These are the cases in which vLLM's own push connector waits for ever.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from e2e_cases import FULL_PROMPTS, SHORT
from e2e_cluster import Cluster, Connector, Side
from e2e_load import Prompt, Reference, RequestError, at_once, body, post, session
from e2e_model import FULL
from e2e_server import until

pytestmark = pytest.mark.servers

DEADLINE = 20.0
"""Seconds that a decode server waits for a request's KV, and a prefill server for somebody who wants it."""
MARGIN = 300.0
"""What a busy machine may add to that."""


@pytest.fixture(scope="module")
def reference(refer: Callable[..., Reference]) -> Reference:
    return refer(FULL, FULL_PROMPTS)


@pytest.fixture(scope="module")
def cluster(
    connector: Connector, launch: Callable[..., AbstractContextManager[Cluster]], reference: Reference
) -> Iterator[Cluster]:
    """A prefill server, and two decode servers of which the first fails and the second recomputes."""
    if connector.shape != "pushkv":
        pytest.skip("the stock connectors hang")
    extra = {"deadline": DEADLINE, "hold": DEADLINE}
    recomputes = Side(blocks=512, extra=extra, policy="recompute")
    with launch(FULL, Side(extra=extra), Side(blocks=512, extra=extra), recomputes) as made:
        yield made


@pytest.fixture
def prompt(reference: Reference) -> Prompt:
    return max(reference.known(SHORT), key=len)


def prefill_leg(cluster: Cluster, client: Any, prompt: Prompt, transfer: str) -> Any:
    params = {"do_remote_decode": True, "transfer_id": transfer}
    return post(client, cluster.prefill.url, body(prompt, kv_transfer_params=params) | {"max_tokens": 1})


async def decode_legs(cluster: Cluster, client: Any, prompt: Prompt, transfers: tuple[str, str]) -> list[Any]:
    """The same to both decode servers at once: the answers' tokens, or the errors, and that each ended in time."""

    async def one(url: str, transfer: str) -> Prompt:
        params = {"do_remote_prefill": True, "transfer_id": transfer, **cluster.address}
        found = await post(client, url, body(prompt, kv_transfer_params=params))
        return tuple(found["choices"][0]["token_ids"])

    legs = [one(server.url, transfer) for server, transfer in zip(cluster.decodes, transfers, strict=True)]
    began = time.monotonic()
    found = await asyncio.wait_for(asyncio.gather(*legs, return_exceptions=True), DEADLINE + MARGIN)
    assert time.monotonic() - began < DEADLINE + MARGIN
    return list(found)


def fresh() -> tuple[str, str]:
    return uuid.uuid4().hex, uuid.uuid4().hex


def check(
    cluster: Cluster, reference: Reference, prompt: Prompt, found: list[Any], transfers: tuple[str, str]
) -> None:
    """One failed and the other recomputed; the log names both transfers; every block is free again."""
    failed, recomputed = found
    assert isinstance(failed, RequestError), failed
    assert failed.status >= 500
    reference.check([prompt], [recomputed])
    for server, transfer in zip(cluster.decodes, transfers, strict=True):
        until(
            lambda s=server, t=transfer: t in s.log.read_text(errors="replace"), 300, f"{server.name} logs {transfer}"
        )
    cluster.all_free()


def both_sides_work(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    """The next request is pushed as ever, to either decode server."""

    async def ask() -> list[Any]:
        async with session() as client:
            transfers = fresh()
            legs = [prefill_leg(cluster, client, prompt, transfer) for transfer in transfers]
            decoding = decode_legs(cluster, client, prompt, transfers)
            found, *_ = await asyncio.gather(decoding, *legs)
            return list(found)

    before = cluster.pushed()
    reference.check([prompt, prompt], asyncio.run(ask()))
    for server in cluster.decodes:
        server.step()
    assert cluster.pushed() == before + 2


def failures(cluster: Cluster) -> float:
    """Requests whose KV did not come, as the decode servers count them."""
    return sum(server.metrics().sum("vllm:pushkv_failed") for server in cluster.decodes)


def run_case(
    cluster: Cluster, reference: Reference, prompt: Prompt, case: Callable[[Any, tuple[str, str]], Any]
) -> None:
    """Play a case, check how it ended, and that all is well after it."""

    async def play(transfers: tuple[str, str]) -> list[Any]:
        async with session() as client:
            return list(await case(client, transfers))

    before, transfers = failures(cluster), fresh()
    found = asyncio.run(play(transfers))
    check(cluster, reference, prompt, found, transfers)
    assert failures(cluster) == before + 2
    both_sides_work(cluster, reference, prompt)


def test_the_prefill_leg_is_never_sent(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    run_case(cluster, reference, prompt, lambda client, transfers: decode_legs(cluster, client, prompt, transfers))


def test_decode_comes_later_than_prefill_holds(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    async def case(client: Any, transfers: tuple[str, str]) -> list[Any]:
        await asyncio.gather(*(prefill_leg(cluster, client, prompt, transfer) for transfer in transfers))
        await asyncio.to_thread(cluster.prefill.all_free, DEADLINE + MARGIN)
        return await decode_legs(cluster, client, prompt, transfers)

    run_case(cluster, reference, prompt, case)


def test_ids_that_differ(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    """The id at prefill is a beginning of the one at decode: near is not equal."""

    async def case(client: Any, transfers: tuple[str, str]) -> list[Any]:
        legs = [prefill_leg(cluster, client, prompt, transfer[:-8]) for transfer in transfers]
        return (await asyncio.gather(decode_legs(cluster, client, prompt, transfers), *legs))[0]  # type: ignore[return-value]

    run_case(cluster, reference, prompt, case)


def test_prefill_dies_after_the_handshake(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    both_sides_work(cluster, reference, prompt)

    async def case(client: Any, transfers: tuple[str, str]) -> list[Any]:
        legs = asyncio.create_task(decode_legs(cluster, client, prompt, transfers))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(cluster.prefill.kill)
        found = await legs
        cluster.prefill.start()
        await asyncio.to_thread(cluster.prefill.wait_up)
        return found

    run_case(cluster, reference, prompt, case)


def test_prefill_killed_and_restarted_under_load(cluster: Cluster, reference: Reference, prompt: Prompt) -> None:
    """Decode that fails answers rightly or with an error; decode that recomputes answers everything, and rightly."""
    prompts = [one for one in reference.known(SHORT) if len(one) > 32][:32]

    async def one(client: Any, prompt: Prompt) -> list[Any]:
        transfers = fresh()
        legs = [prefill_leg(cluster, client, prompt, transfer) for transfer in transfers]
        decoding = asyncio.create_task(decode_legs(cluster, client, prompt, transfers))
        await asyncio.gather(*legs, return_exceptions=True)
        return await decoding

    async def under_load() -> list[Any]:
        async with session() as client:
            load = asyncio.create_task(at_once([lambda prompt=prompt: one(client, prompt) for prompt in prompts], 8))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.prefill.kill)
            cluster.prefill.start()
            await asyncio.to_thread(cluster.prefill.wait_up)
            return await load

    recomputing = cluster.decodes[1]
    before = recomputing.metrics().sum("vllm:pushkv_failed")
    results = asyncio.run(under_load())
    for result in results:
        assert isinstance(result, list), result
    answered = [(prompt, left) for prompt, (left, _) in zip(prompts, results, strict=True) if isinstance(left, tuple)]
    reference.check([prompt for prompt, _ in answered], [left for _, left in answered])
    failed = [left for left, _ in results if not isinstance(left, tuple)]
    assert failed, "nothing was in flight when the server was killed"
    assert all(isinstance(left, RequestError) and left.status >= 500 for left in failed), failed
    reference.check(prompts, [right for _, right in results])
    recomputing.step()
    assert recomputing.metrics().sum("vllm:pushkv_failed") > before, "nothing had to be recomputed"
    cluster.all_free()
    both_sides_work(cluster, reference, prompt)
