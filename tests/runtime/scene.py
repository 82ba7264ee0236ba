"""Endpoints over the in-process network with real threads, and what their tests have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv import Consumer, EndpointConfig, KVCache, Limits, Link, Producer, Transfer, prompt_digest
from pushkv.core.geometry import Geometry
from pushkv.core.layouts import Shard
from pushkv.runtime.ending import Ending
from pushkv.transport.base import Transport
from pushkv.transport.memory import MemoryTransport, Network

WAIT = 30.0
"""Seconds that anything may take on a busy machine; nothing here measures time."""
TOKENS = 4
"""Tokens a block."""

Array = NDArray[np.float32]


def until(condition: Callable[[], object], what: str = "it") -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {WAIT} s"
        time.sleep(0.002)


def memory_of(blocks: int = 64, heads: int = 2, layers: int = 2, content: int = 4) -> Array:
    """A cache of layers, sides, blocks, heads, tokens, content."""
    return np.zeros((layers, 2, blocks, heads, TOKENS, content), np.float32)


def cache_of(array: Array, shard: Shard | None = None, **factors: Any) -> KVCache:
    return KVCache.of(array, "LSBHNC", shard=shard, **{"model": "m", **factors})


def fill(array: Array, seed: int = 0) -> Array:
    """Random contents, so that a byte in the wrong place shows."""
    array[:] = np.random.default_rng(seed).standard_normal(array.shape)
    return array


def blocks_for(tokens: int, first: int = 0) -> list[int]:
    """As many blocks as the tokens need, from ``first`` on."""
    return list(range(first, first - (-tokens // TOKENS)))


def same_tokens(
    source: Array, source_blocks: Sequence[int], target: Array, target_blocks: Sequence[int], start: int, stop: int
) -> bool:
    """Whether tokens ``start`` to ``stop`` are equal in both caches."""

    def tokens_of(array: Array, blocks: Sequence[int]) -> Array:
        chosen = array[:, :, list(blocks)]  # L S B H N C
        return np.moveaxis(chosen, 3, 2).reshape(*chosen.shape[:2], chosen.shape[3], -1, chosen.shape[5])

    ours, theirs = tokens_of(source, source_blocks), tokens_of(target, target_blocks)
    return bool((ours[..., start:stop, :] == theirs[..., start:stop, :]).all())


QUICK = Limits(resend=0.02, resend_most=0.2, ask_proof=0.02, deadline=60.0, stage_deadline=60.0)
"""Limits under which losses are made good soon."""
SETTINGS: dict[str, Any] = {"limits": QUICK, "silence": WAIT, "stall": WAIT, "stream": "layer"}


@dataclass
class Gate:
    """A fence that the test opens."""

    open: bool = False
    error: str = ""

    def done(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.open

    def wait(self) -> None:
        until(lambda: self.open)


@dataclass
class Scene:
    """Endpoints on one network; closed in the end."""

    network: Network
    endpoints: list[Producer | Consumer] = field(default_factory=list)
    transports: dict[str, MemoryTransport] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)

    def transport(self, agent: str) -> Transport:
        self.transports[agent] = MemoryTransport(self.network, agent)
        return self.transports[agent]

    def _config(self, engine: str, settings: dict[str, Any]) -> EndpointConfig:
        return EndpointConfig(engine=engine, **{**SETTINGS, **settings})

    def producer(self, engine: str = "p", cache: KVCache | None = None, **settings: Any) -> Producer:
        cache = cache or cache_of(fill(memory_of()))
        producer = Producer(self._config(engine, settings), cache, transport=self.transport)
        self.endpoints.append(producer)
        return producer

    def consumer(
        self,
        engine: str = "d",
        cache: KVCache | None = None,
        fellows: Sequence[Geometry] | None = None,
        **settings: Any,
    ) -> Consumer:
        cache = cache or cache_of(memory_of())
        consumer = Consumer(self._config(engine, settings), cache, transport=self.transport, fellows=fellows)
        self.endpoints.append(consumer)
        return consumer

    def kill(self, endpoint: Producer | Consumer) -> None:
        """End an endpoint as SIGKILL does: nothing of it says or does anything any more."""
        endpoint._control.close()
        self.network.die(endpoint.agent)
        assert endpoint._transfer.stop(WAIT)
        self.endpoints.remove(endpoint)

    def close(self, timeout: float = WAIT) -> None:
        self.network.unblock_posts()
        self.network.heal()
        self.network.release()
        for endpoint in reversed(self.endpoints):
            endpoint.close(timeout)


def array_of(endpoint: Producer | Consumer) -> Array:
    """The array behind an endpoint's cache."""
    array = endpoint.cache.arrays[0]
    assert isinstance(array, np.ndarray)
    return array


def knows(producer: Producer, count: int) -> None:
    """Wait until the producer has as many open offers."""
    until(lambda: producer.ask(lambda _: str(producer._side.machine.open_transfers)) == str(count), "the offers")


@dataclass
class Clock:
    """Lets a network's virtual time pass with real time, in small steps, until it is stopped."""

    network: Network
    stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Clock:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        while not self.stopped.wait(0.001):
            self.network.advance(0.002)

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


@dataclass
class Pushed:
    """One prompt pushed from a producer to a consumer."""

    scene_producer: Producer
    scene_consumer: Consumer
    name: str
    source: list[int]
    target: list[int]
    tokens: int
    prompt: bytes = b""

    def __post_init__(self) -> None:
        self.prompt = self.prompt or prompt_digest([len(self.name), *self.name.encode()])

    def offer(self, link: Link, **more: Any) -> Transfer:
        settings: dict[str, Any] = {"prompt": self.prompt, "prompt_tokens": self.tokens, **more}
        return self.scene_consumer.offer(self.name, link, settings.pop("blocks", self.target), **settings)

    def stage(self, **more: Any) -> Ending:
        settings: dict[str, Any] = {"prompt": self.prompt, "prompt_tokens": self.tokens, **more}
        return self.scene_producer.stage(self.name, settings.pop("blocks", self.source), **settings)

    def arrived(self, start: int = 0, stop: int | None = None) -> bool:
        ours, theirs = array_of(self.scene_producer), array_of(self.scene_consumer)
        return same_tokens(ours, self.source, theirs, self.target, start, self.tokens if stop is None else stop)
