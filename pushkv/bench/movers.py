"""The ways for KV to cross in ``pushkv bench serve``: what each engine's thread does for them in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pushkv.bench.alone import Alone, Ids
from pushkv.bench.engine import Memory
from pushkv.bench.workload import Mode, Prefilled, Request, ServeSettings
from pushkv.config import EndpointConfig
from pushkv.errors import BenchError

CONNECT_S = 30.0
CLOSE_S = 10.0
SILENCE_S = 60.0
"""A machine that is busy with other work makes figures bad, not the run fail."""


class Source:
    """Prefill's side of a mode; as it is, nothing crosses. All calls are made by the engine's thread."""

    @property
    def where(self) -> Any:
        """What decode needs to know to connect."""
        return None

    def meet(self, target: Any) -> None:
        """What decode has answered."""

    def computed(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        """A step has computed the prompt up to ``tokens``."""

    def finished(self, done: Prefilled) -> bool:
        """The whole prompt is computed; True if its blocks may be reused at once."""
        return True

    def released(self) -> list[str]:
        """Requests whose blocks may be reused, asked once a step."""
        return []

    def close(self) -> None:
        """Let go of everything."""


class Target:
    """Decode's side of a mode; as it is, nothing crosses. All calls are made by the engine's thread."""

    early = False
    """Whether blocks are offered as a request comes in, before its prompt is computed."""
    checks = False
    """Whether KV comes at all."""

    def __init__(self) -> None:
        self._new: list[str] = []

    @property
    def where(self) -> Any:
        """What prefill needs to know."""
        return None

    def meet(self, source: Any) -> None:
        """Connect to prefill."""

    def load(self, request: Request, blocks: Sequence[int], theirs: Sequence[int]) -> None:
        """Blocks are there for a request; ``theirs`` are prefill's, none where it is early."""
        self._new.append(request.name)

    def loaded(self) -> list[str]:
        """Requests whose KV is there, asked once a step."""
        told, self._new = self._new, []
        return told

    def close(self) -> None:
        """Let go of everything."""


def _agent(name: str, memory: Memory, mode: Mode) -> Alone:
    """NIXL's agent for a pull: with threads that leave the engine its core, or as the Python API makes it."""
    if mode is Mode.PULL_DEFAULT:
        return Alone(name, memory.rows, delay_us=0, parameters={"num_threads": "4"})
    return Alone(name, memory.rows)


class PullSource(Source):
    """Blocks are held until decode says that it has read them."""

    def __init__(self, memory: Memory, mode: Mode) -> None:
        self._agent = _agent("bench-prefill", memory, mode)

    @property
    def where(self) -> Any:
        return self._agent.metadata

    def meet(self, target: Any) -> None:
        self._agent.meet(target[0])

    def finished(self, done: Prefilled) -> bool:
        return False

    def released(self) -> list[str]:
        return [message.decode() for message in self._agent.notifications()]


class PullTarget(Target):
    """READs are posted, and polled once a step, by the engine's thread; the lists of both sides are made once."""

    checks = True

    def __init__(self, memory: Memory, settings: ServeSettings, mode: Mode) -> None:
        self._agent = _agent("bench-decode", memory, mode)
        self._settings = settings
        self._open: dict[str, int] = {}

    @property
    def where(self) -> Any:
        return self._agent.metadata

    def meet(self, source: Any) -> None:
        metadata, regions = source
        peer = self._agent.meet(metadata)
        self._ours = self._agent.listed(self._agent.regions, self._settings.piece)
        self._theirs = self._agent.listed(regions, self._settings.piece, peer=peer)

    def load(self, request: Request, blocks: Sequence[int], theirs: Sequence[int]) -> None:
        ours, sources = self._numbers(blocks), self._numbers(theirs)
        handle = self._agent.post("READ", (self._ours, ours), (self._theirs, sources), request.name.encode())
        self._open[request.name] = handle

    def _numbers(self, blocks: Sequence[int]) -> Ids:
        """The numbers of these blocks in a list, region after region."""
        bases = np.arange(self._settings.regions, dtype=np.int32) * np.int32(self._settings.blocks)
        numbers: Ids = np.add.outer(bases, np.asarray(blocks, np.int32)).ravel()
        return numbers

    def loaded(self) -> list[str]:
        done = [name for name, handle in self._open.items() if self._agent.over(handle)]
        for name in done:
            del self._open[name]
        return done


def _config(engine: str, settings: ServeSettings, *, stream: bool = False) -> EndpointConfig:
    parts: Literal["chunk", "request"] = "chunk" if stream else "request"
    return EndpointConfig(engine=engine, silence=SILENCE_S, landing=settings.landing, stream=parts)


class PushSource(Source):
    """PushKV's producer, told of each chunk; with ``stream`` it sends each, without all of them in the end."""

    def __init__(self, memory: Memory, settings: ServeSettings, *, stream: bool) -> None:
        from pushkv import Producer

        self._producer = Producer(_config("prefill", settings, stream=stream), memory.cache)

    @property
    def where(self) -> Any:
        return self._producer.address

    def computed(self, request: Request, blocks: Sequence[int], tokens: int) -> None:
        self._producer.stage(request.name, blocks, prompt=request.digest, prompt_tokens=request.tokens, ready=tokens)

    def finished(self, done: Prefilled) -> bool:
        return False

    def released(self) -> list[str]:
        from pushkv import Outcome, StageEnded, StageReleased

        events = self._producer.events()
        for event in events:
            if isinstance(event, StageEnded) and event.outcome is not Outcome.COMPLETE:
                raise BenchError(f"{event.transfer} ended at prefill as {event.outcome.value}: {event.detail}")
        return [event.transfer for event in events if isinstance(event, StageReleased)]

    def close(self) -> None:
        self._producer.close(CLOSE_S)


class PushTarget(Target):
    """PushKV's consumer."""

    early = checks = True

    def __init__(self, memory: Memory, settings: ServeSettings) -> None:
        from pushkv import Consumer

        self._consumer = Consumer(_config("decode", settings), memory.cache)

    def meet(self, source: Any) -> None:
        self._link = self._consumer.connect(source, CONNECT_S)

    def load(self, request: Request, blocks: Sequence[int], theirs: Sequence[int]) -> None:
        self._consumer.offer(request.name, self._link, blocks, prompt=request.digest, prompt_tokens=request.tokens)

    def loaded(self) -> list[str]:
        from pushkv import Ended, Outcome

        ended = [event for event in self._consumer.events() if isinstance(event, Ended)]
        for event in ended:
            if event.outcome is not Outcome.COMPLETE:
                raise BenchError(f"{event.key} ended at decode as {event.outcome.value}: {event.detail}")
        return [event.key.transfer for event in ended]

    def close(self) -> None:
        self._consumer.close(CLOSE_S)


def source_of(mode: Mode, memory: Memory, settings: ServeSettings) -> Source:
    """Prefill's side of a mode."""
    if mode is Mode.NONE:
        return Source()
    if mode in (Mode.PULL, Mode.PULL_DEFAULT):
        return PullSource(memory, mode)
    return PushSource(memory, settings, stream=mode is Mode.STREAM)


def target_of(mode: Mode, memory: Memory, settings: ServeSettings) -> Target:
    """Decode's side of a mode."""
    if mode is Mode.NONE:
        return Target()
    if mode in (Mode.PULL, Mode.PULL_DEFAULT):
        return PullTarget(memory, settings, mode)
    return PushTarget(memory, settings)
