"""Caches that differ: prefixes that decode has already, chunks, block sizes, windows, how many workers share them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
from e2e_cases import FAMILIES, FULL_PROMPTS, LATENTS, SHORT, WINDOWED
from e2e_cluster import Cluster, Connector, Side
from e2e_load import Prompt, Reference, ask_all
from e2e_model import FULL, HYBRID, LATENT, WINDOW, Model

pytestmark = pytest.mark.servers


@dataclass(frozen=True)
class Case:
    """A pair of servers, and what they are asked, each list after the one before."""

    model: Model
    prefill: Side
    decode: Side
    asked: tuple[list[Prompt], ...]
    all_asked: list[Prompt]


CACHING = Side(caching=True, chunk=512, block=64, blocks=512)
TWICE = (FAMILIES, FAMILIES[::-1])
CASES = {
    # Small chunks, larger blocks; the second time both sides have the prompts' beginnings, or all of them.
    "caching-chunks-blocks-of-64": Case(FULL, CACHING, CACHING, TWICE, FULL_PROMPTS),
    "windows-in-every-other-layer": Case(HYBRID, Side(chunk=512), Side(chunk=512), (WINDOWED,), WINDOWED),
    "tp-2-to-1": Case(FULL, Side(tp=2), Side(), (SHORT[:40],), FULL_PROMPTS),
    "tp-1-to-2": Case(FULL, Side(), Side(tp=2), (SHORT[:40],), FULL_PROMPTS),
    "pp-2-to-1": Case(FULL, Side(pp=2), Side(), (SHORT[:40],), FULL_PROMPTS),
    "blocks-of-32-to-64": Case(FULL, Side(), Side(block=64, blocks=512), (SHORT[:40],), FULL_PROMPTS),
    "blocks-of-64-to-32": Case(FULL, Side(block=64, blocks=512), Side(), (SHORT[:40],), FULL_PROMPTS),
    "latent-rows": Case(LATENT, Side(), Side(), (LATENTS,), LATENTS),
}
LONG = {
    "windows-in-all-layers": Case(WINDOW, Side(), Side(), (WINDOWED,), WINDOWED),
    "windows-and-caching": Case(HYBRID, Side(caching=True), Side(caching=True), (WINDOWED, WINDOWED), WINDOWED),
    "caching-in-decode-alone": Case(FULL, Side(), Side(caching=True), TWICE, FULL_PROMPTS),
    "tp-2-to-2": Case(FULL, Side(tp=2), Side(tp=2), (SHORT,), FULL_PROMPTS),
    "pp-1-to-2": Case(FULL, Side(), Side(pp=2), (SHORT[:40],), FULL_PROMPTS),
    "latent-rows-tp-1-to-2": Case(LATENT, Side(), Side(tp=2), (LATENTS,), LATENTS),
    "dp-2-to-1": Case(FULL, Side(dp=2), Side(), (SHORT[:40],), FULL_PROMPTS),
}
PARAMETERS = [pytest.param(case, id=name) for name, case in CASES.items()]
PARAMETERS += [pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()]


@pytest.mark.parametrize("case", PARAMETERS)
def test_answers_are_a_single_servers(
    case: Case,
    connector: Connector,
    refer: Callable[..., Reference],
    launch: Callable[..., AbstractContextManager[Cluster]],
) -> None:
    reference = refer(case.model, case.all_asked)
    with launch(case.model, case.prefill, case.decode) as cluster:
        with cluster.router(mode="push" if connector.push else "sequential") as router:
            for asked in case.asked:
                prompts = reference.known(asked)
                reference.check(prompts, ask_all(router.url, prompts))
        cluster.all_free()
        check_sources(cluster, connector, case, reference)


def check_sources(cluster: Cluster, connector: Connector, case: Case, reference: Reference) -> None:
    """Every prompt's KV was pushed, or was there already; decode computed none of it but last tokens."""
    metrics = cluster.decode.metrics()
    asked = sum(len(reference.known(one)) for one in case.asked)
    probes = metrics.sum("vllm:request_success") - asked
    computed = metrics.sum("vllm:prompt_tokens_by_source", source="local_compute")
    # With caching decode computes what its last, partly filled block holds, where prefill was not asked for it.
    most = case.decode.block if case.decode.caching else 1
    assert computed <= asked * most + 3 * probes
    if connector.shape != "pushkv":
        return
    assert metrics.sum("vllm:pushkv_failed") == 0
    received, declined = metrics.sum("vllm:pushkv_received"), metrics.sum("vllm:pushkv_declined")
    assert received + declined == asked
    if case.decode.caching:
        assert metrics.sum("vllm:prompt_tokens_by_source", source="local_cache_hit") > 0
    else:
        assert declined <= sum(len(prompt) == 1 for one in case.asked for prompt in one)
