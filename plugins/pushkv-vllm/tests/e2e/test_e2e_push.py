"""One prefill and one decode server behind the router, against a single server."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from e2e_cases import FULL_PROMPTS, MIXED, SHORT
from e2e_cluster import Cluster, Connector, Side
from e2e_load import ANSWER, Prompt, Reference, RequestError, ask_all, at_once, body, post, session, tokens
from e2e_model import FULL

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def reference(refer: Callable[..., Reference]) -> Reference:
    return refer(FULL, FULL_PROMPTS)


@pytest.fixture(scope="module")
def cluster(launch: Callable[..., AbstractContextManager[Cluster]], reference: Reference) -> Iterator[Cluster]:
    # Decode's cache is small enough for requests to be preempted.
    with launch(FULL, Side(), Side(blocks=512)) as made:
        yield made


def check_pushed(cluster: Cluster, connector: Connector, before: tuple[float, float], prompts: list[Prompt]) -> None:
    """Whether the KV of all these prompts came by push, by our count and by what vLLM says that decode computed."""
    cluster.decode.step()
    pushed, computed = cluster.pushed() - before[0], cluster.computed() - before[1]
    # Decode computes each prompt's last token again, and the whole prompt of the request that asked for the metrics.
    assert computed <= len(prompts) + 3, f"decode computed {computed} prompt tokens of {len(prompts)} prompts"
    if connector.shape == "pushkv":
        # A prompt of one token has nothing that could be sent: decode computes the last one itself.
        assert pushed == sum(len(prompt) > 1 for prompt in prompts) or pushed == len(prompts)


def test_all_prompts_are_pushed_and_answered_as_by_a_single_server(
    cluster: Cluster, connector: Connector, reference: Reference
) -> None:
    prompts = reference.known(MIXED)
    assert len(prompts) >= 100
    assert max(map(len, prompts)) == 4000
    before = cluster.pushed(), cluster.computed()
    with cluster.router(mode="push" if connector.push else "sequential") as router:
        reference.check(prompts, ask_all(router.url, prompts))
    check_pushed(cluster, connector, before, prompts)
    cluster.all_free()


@pytest.mark.parametrize("shape", ["pushkv", "stock"])
def test_prefill_first(cluster: Cluster, connector: Connector, reference: Reference, shape: str) -> None:
    """As routers for pulling connectors do it: also without a transfer id of the router's."""
    prompts = reference.known(SHORT)[:24]
    before = cluster.pushed(), cluster.computed()
    with cluster.router(mode="sequential", shape=shape) as router:
        reference.check(prompts, ask_all(router.url, prompts))
    check_pushed(cluster, connector, before, prompts)
    cluster.all_free()


def test_siblings(cluster: Cluster, connector: Connector, reference: Reference) -> None:
    """One prefill serves n choices. (vLLM takes no n with a temperature of 0: one candidate is drawn from.)"""
    if not connector.push:
        pytest.skip("one pull a prefill")
    prompts = [prompt for prompt in reference.known(SHORT) if len(prompt) > 32][:8]

    async def ask(url: str) -> list[Any]:
        async with session() as client:
            one = {"n": 3, "temperature": 1.0, "top_k": 1}
            return await at_once(
                [lambda prompt=prompt: post(client, url, body(prompt, **one)) for prompt in prompts], 4
            )

    before = cluster.pushed()
    with cluster.router() as router:
        for prompt, found in zip(prompts, asyncio.run(ask(router.url)), strict=True):
            assert not isinstance(found, BaseException), found
            reference.check([prompt] * 3, [tuple(choice["token_ids"]) for choice in found["choices"]])
    assert cluster.pushed() - before == 3 * len(prompts)
    cluster.all_free()


def test_chat_and_usage(cluster: Cluster, connector: Connector) -> None:
    """A chat's answer is what decode makes of it alone, and usage comes through."""
    content = {"model": "m", "messages": [{"role": "user", "content": "t5 t6 t7 " * 40}], "max_tokens": 8,
               "temperature": 0, "ignore_eos": True}  # fmt: skip

    async def ask(url: str) -> Any:
        async with session() as client:
            return await post(client, url, content)

    with cluster.router(mode="push" if connector.push else "sequential") as router:
        through, alone = asyncio.run(ask(router.url)), asyncio.run(ask(cluster.decode.url))
    assert through["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert through["usage"][name] == alone["usage"][name]


def test_requests_of_one_public_id_do_not_mix(cluster: Cluster, connector: Connector, reference: Reference) -> None:
    """Both legs sent by hand: all with the same request id, each with a transfer id of its own, decode first."""
    if connector.shape != "pushkv":
        pytest.skip("the stock connectors match by request id")
    prompts = [prompt for prompt in reference.known(SHORT) if len(prompt) > 32][:8]

    async def both(client: Any, prompt: Prompt) -> Prompt:
        transfer = uuid.uuid4().hex
        there = {"do_remote_prefill": True, "transfer_id": transfer, **cluster.address}
        here = {"do_remote_decode": True, "transfer_id": transfer}
        decode = asyncio.create_task(post(client, cluster.decode.url, body(prompt, kv_transfer_params=there), "same"))
        await asyncio.sleep(random.Random(len(prompt)).random())
        await post(client, cluster.prefill.url, body(prompt, kv_transfer_params=here) | {"max_tokens": 1}, "same")
        return tuple((await decode)["choices"][0]["token_ids"])

    async def all_of_them() -> list[Any]:
        async with session() as client:
            return await at_once([lambda prompt=prompt: both(client, prompt) for prompt in prompts], 8)

    reference.check(prompts, asyncio.run(all_of_them()))
    cluster.all_free()


def test_clients_that_leave_at_any_moment(cluster: Cluster, connector: Connector, reference: Reference) -> None:
    """300 requests, most of which are left: no wrong token, no block lost, both servers up."""
    chance = random.Random(4)
    prompts = [chance.choice(reference.known(SHORT)) for _ in range(300)]

    async def maybe(client: Any, url: str, prompt: Prompt, patience: float | None) -> Prompt | None:
        try:
            return await asyncio.wait_for(tokens(client, url, prompt), patience)
        except asyncio.TimeoutError:
            return None

    async def all_of_them(url: str) -> list[Any]:
        async with session() as client:
            # The first ones tell how long an answer takes here; the others are left within twice that time.
            started = asyncio.get_running_loop().time()
            first = await at_once([lambda prompt=prompt: maybe(client, url, prompt, None) for prompt in prompts[:20]])
            usual = (asyncio.get_running_loop().time() - started) / 20 * 16
            patience = [chance.choice((None, *[chance.random() * 2 * usual] * 3)) for _ in prompts[20:]]
            jobs = zip(prompts[20:], patience, strict=True)
            return first + await at_once([lambda job=job: maybe(client, url, *job) for job in jobs])

    with cluster.router(mode="push" if connector.push else "sequential") as router:
        results = asyncio.run(all_of_them(router.url))
    kept = [(prompt, result) for prompt, result in zip(prompts, results, strict=True) if result is not None]
    assert len(kept) >= 60
    assert len(prompts) - len(kept) >= 60, "hardly anybody left"
    reference.check([prompt for prompt, _ in kept], [result for _, result in kept])
    cluster.all_free()


def test_prefill_killed_and_restarted_under_load(
    cluster: Cluster, connector: Connector, reference: Reference
) -> None:
    """What was in flight fails or is right; what comes when the server is back is pushed as before."""
    if connector.shape != "pushkv":
        pytest.skip("the stock connectors hang")
    prompts = (reference.known(SHORT) * 2)[:80]

    async def under_load(url: str) -> list[Any]:
        async with session() as client:
            jobs = [lambda prompt=prompt: tokens(client, url, prompt) for prompt in prompts]
            load = asyncio.create_task(at_once(jobs))
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.prefill.kill)
            cluster.prefill.start()
            await asyncio.to_thread(cluster.prefill.wait_up)
            return await load

    with cluster.router("--attempts", "1", "--patience", "300") as router:
        results = asyncio.run(under_load(router.url))
        answered = [(prompt, one) for prompt, one in zip(prompts, results, strict=True) if isinstance(one, tuple)]
        reference.check([prompt for prompt, _ in answered], [one for _, one in answered])
        failed = [one for one in results if not isinstance(one, tuple)]
        assert failed, "nothing was in flight when the server was killed"
        assert all(isinstance(one, RequestError) and one.status >= 500 for one in failed), failed
        assert len(failed) <= 16, "more has failed than was in flight"
        before = cluster.pushed(), cluster.computed()
        later = reference.known(SHORT)[:16]
        reference.check(later, ask_all(router.url, later))
    check_pushed(cluster, connector, before, later)
    cluster.all_free()


def test_the_answers_length(reference: Reference) -> None:
    """The comparison is worth something: answers are whole, and differ."""
    assert {len(answer) for answer in reference.answers.values()} == {ANSWER}
    assert len(set(reference.answers.values())) > 0.95 * len(reference.answers)
