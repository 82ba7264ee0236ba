"""The prefill engine: it computes prompts chunk by chunk and stages what is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pushkv import Producer, Shard, StageEnded, StageReleased, prompt_digest, shard
from pushkv.core.commands import Command
from pushkv.demo.engine import Engine, News, Place
from pushkv.demo.model import Model
from pushkv.demo.paged import BlockIds, PagedCache, blocks_for
from pushkv.demo.settings import DemoSettings
from pushkv.demo.words import Prefilled
from pushkv.demo.workload import Request
from pushkv.trace import now


@dataclass
class _Prompt:
    """The prompt under way: ``ready`` of its tokens are computed."""

    request: Request
    digest: bytes
    table: BlockIds
    ready: int = 0


class Prefill(Engine):
    """Computes one prompt at a time, a chunk a step."""

    def __init__(self, place: Place, model: Model, cache: PagedCache, producer: Producer) -> None:
        super().__init__(place, model, cache)
        self._producer = producer
        self._current: _Prompt | None = None
        self._held: dict[str, BlockIds] = {}
        served = [customers(place.spec.settings, rank) for rank in range(place.group.size)]
        self._customers = served[place.spec.rank]
        # A rank whose heads another rank writes has nothing to stage, and reports no end.
        self._stagers = sum(bool(count) for count in served)

    def events(self) -> list[Command]:
        """What the producer has seen."""
        return self._producer.events()

    def note(self, events: Iterable[Command], news: News) -> None:
        """Stages end, and their blocks come back."""
        for event in events:
            if isinstance(event, StageEnded):
                news.ended.append((event.transfer, event.outcome, event.detail))
            elif isinstance(event, StageReleased):
                news.released.append(event.transfer)

    def compute(self) -> bool:
        """Free what is released, then one chunk."""
        for name in [name for name in self._held if self.released(name, self._stagers)]:
            self.pool.free(self._held.pop(name))
            ended = self.ended(name, self._stagers)
            if ended is not None:
                self.outcomes[name] = ended[0]
        if self._current is None:
            self._current = self._admit()
        if self._current is None:
            return False
        self._advance(self._current)
        return True

    def _admit(self) -> _Prompt | None:
        if not self.waiting:
            return None
        request = self.waiting[0]
        count = blocks_for(len(request.prompt), self.cache.block_size)
        if count > self.pool.free_count:
            return None
        self.waiting.popleft()
        return _Prompt(request, prompt_digest(request.prompt), self.pool.allocate(count))

    def _advance(self, prompt: _Prompt) -> None:
        request, started = prompt.request, now()
        stop = min(prompt.ready + self.place.spec.settings.chunk, len(request.prompt))
        layers = self.place.spec.settings.stream == "layer"
        self.model.prefill(
            self.cache,
            request.prompt[prompt.ready : stop],
            prompt.table,
            start=prompt.ready,
            written=(lambda layer: self._stage(prompt, stop, layer + 1)) if layers else None,
        )
        prompt.ready = stop
        ended = now()
        self.place.trace.span("prefill", "engine", request.name, started, ended, tokens=stop)
        if stop == len(request.prompt):
            self.place.trace.instant("prefill done", "engine", request.name, ended)
            self._held[request.name] = prompt.table
            self._current = None
        self._stage(prompt, stop)
        if stop == len(request.prompt):
            self.tell(Prefilled(request.name))

    def _stage(self, prompt: _Prompt, ready: int, layers: int | None = None) -> None:
        if self._customers:
            self._producer.stage(
                prompt.request.name,
                prompt.table,
                prompt=prompt.digest,
                prompt_tokens=len(prompt.request.prompt),
                ready=ready,
                layers=layers,
                siblings=self._customers,
            )


def customers(settings: DemoSettings, rank: int) -> int:
    """How many decode ranks a prefill rank writes to: those that hold heads of which its copy is the one to send."""
    heads = settings.model.kv_heads
    mine = shard(heads, rank, settings.prefill.tp)
    theirs = [shard(heads, other, settings.decode.tp) for other in range(settings.decode.tp)]
    return sum(_writes(mine, other) for other in theirs)


def _writes(mine: Shard, theirs: Shard) -> bool:
    shared = min(mine.head_stop, theirs.head_stop) > max(mine.head_start, theirs.head_start)
    return shared and mine.replica == theirs.replica % mine.replicas
