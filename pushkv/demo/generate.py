"""Greedy generation: the decode loop of the demo, and the single-process run that it compares with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pushkv.demo.model import DecodeInput, Model, choose
from pushkv.demo.paged import BlockIds, BlockPool, PagedCache, blocks_for
from pushkv.demo.workload import Request, Workload
from pushkv.errors import ConfigError

SAFE_GAP = 1e-3
"""Two logits that are nearer than this could be swapped by the order of a sum."""


@dataclass(frozen=True)
class Generation:
    """What was generated for one request: tokens, and each one's lead over the second best logit."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def least_gap(self) -> float:
        """The smallest lead of all tokens."""
        return min(self.gaps)


@dataclass
class _Running:
    token: int
    position: int
    table: BlockIds
    left: int
    tokens: list[int]
    gaps: list[float]


class DecodeLoop:
    """Sequences that are decoded together, one token each a step; new ones may join between steps."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._running: dict[str, _Running] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the sequences that still want tokens."""
        return tuple(self._running)

    def add(self, name: str, *, token: int, position: int, table: BlockIds, count: int) -> None:
        """Let a sequence join: ``token`` stands at ``position``, KV of all before it is in the blocks of ``table``.

        ``count`` tokens are generated after it; the last of them is not fed back, so the table needs
        blocks for ``position + count`` tokens. Raises ConfigError for a name that runs already.
        """
        if name in self._running or count < 1:
            raise ConfigError(f"request {name!r} runs already or wants {count} tokens; add it once, for at least 1")
        self._running[name] = _Running(token, position, table, count, [], [])

    def step(self) -> dict[str, Generation]:
        """Generate one token for each running sequence; returns those that are done with it."""
        if not self._running:
            return {}
        batch = [DecodeInput(entry.token, entry.position, entry.table) for entry in self._running.values()]
        choice = choose(self._model.decode(self._cache, batch))
        for entry, token, gap in zip(
            self._running.values(), choice.tokens.tolist(), choice.gaps.tolist(), strict=True
        ):
            entry.tokens.append(token)
            entry.gaps.append(gap)
            entry.token, entry.position, entry.left = token, entry.position + 1, entry.left - 1
        done = [name for name, entry in self._running.items() if not entry.left]
        return {name: _result(self._running.pop(name)) for name in done}


def generate_alone(
    model: Model, cache: PagedCache, pool: BlockPool, requests: Sequence[Request]
) -> dict[str, Generation]:
    """Prefill and decode all requests in this process, by name: the reference. Frees its blocks at the end."""
    loop = DecodeLoop(model, cache)
    tables = {request.name: pool.allocate(blocks_for(request.length, cache.block_size)) for request in requests}
    for request in requests:
        # The last prompt token is the first that is fed to decode, as engines do it with a cached prefix.
        *known, last = request.prompt
        if known:
            model.prefill(cache, known, tables[request.name])
        loop.add(request.name, token=last, position=len(known), table=tables[request.name], count=request.new_tokens)
    done: dict[str, Generation] = {}
    while loop.running:
        done.update(loop.step())
    for table in tables.values():
        pool.free(table)
    return {request.name: done[request.name] for request in requests}


def settled(
    model: Model,
    cache: PagedCache,
    pool: BlockPool,
    workload: Workload,
    *,
    least_gap: float = SAFE_GAP,
    draws: int = 16,
) -> tuple[tuple[Request, ...], dict[str, Generation]]:
    """The workload's requests and their reference, in which every token leads by at least ``least_gap``.

    A request with a closer call gets another prompt of the same length. Raises ConfigError when
    that did not help after ``draws`` draws.
    """
    requests = {request.name: request for request in workload.requests()}
    found = generate_alone(model, cache, pool, list(requests.values()))
    for _ in range(draws):
        close = [name for name, generation in found.items() if generation.least_gap < least_gap]
        if not close:
            return tuple(requests.values()), found
        requests.update((name, workload.redrawn(requests[name])) for name in close)
        found.update(generate_alone(model, cache, pool, [requests[name] for name in close]))
    raise ConfigError(f"after {draws} draws some token still leads by less than {least_gap}; ask for a smaller gap")


def _result(entry: _Running) -> Generation:
    return Generation(tuple(entry.tokens), tuple(entry.gaps))
