"""Endpoints in processes of their own, over real NIXL, that do as they are told and can be killed or stopped."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pushkv import Consumer, EndpointConfig, KVCache, Link, Producer, Transfer
from pushkv.runtime.ending import Ending
from runtime.scene import QUICK, WAIT

Pipe = multiprocessing.connection.Connection
BLOCK = 1 << 20
"""Bytes a block; one token each, so that tokens count blocks."""
BLOCKS = 320
SILENCE = 3.0
"""Seconds; signs of life come every second."""


def make_cache(fill: int) -> KVCache:
    """One layer of 320 MiB. Block b of a filled cache holds the byte 1 + b % 250."""
    array = np.zeros((1, BLOCKS, 1, BLOCK), np.uint8)
    if fill:
        array[:] = (1 + np.arange(BLOCKS) % 250).astype(np.uint8)[None, :, None, None]
    return KVCache.of(array, "LBNC", model="m")


def make_config(engine: str, **more: Any) -> EndpointConfig:
    # These caches are small and the WRITEs large: a lost one takes most of the cache into quarantine.
    settings = {"silence": SILENCE, "quarantine_limit": 1.0, "limits": QUICK, **more}
    return EndpointConfig(engine=engine, **settings)


class Role:
    """What a child process can be told: its methods, by name."""

    def __init__(self, kind: str, engine: str, settings: dict[str, Any], cache: KVCache | None = None) -> None:
        config, cache = make_config(engine, **settings), cache or make_cache(kind == "producer")
        self.end: Producer | Consumer = (Producer if kind == "producer" else Consumer)(config, cache)
        self.array = cache.arrays[0]
        self.stages: dict[str, Ending] = {}
        self.transfers: dict[str, Transfer] = {}
        self.link: Link | None = None

    def address(self) -> str:
        assert isinstance(self.end, Producer)
        return self.end.address

    def stage(self, name: str, first: int, count: int) -> None:
        assert isinstance(self.end, Producer)
        blocks = range(first, first + count)
        self.stages[name] = self.end.stage(name, list(blocks), prompt=bytes(32), prompt_tokens=count)

    def spoil(self, block: int) -> None:
        """From now on write into a source block while WRITEs are handed over, which is after their digests."""
        side: Any = self.end._side
        hand_over = side._hand_over

        def spoiling(write: Any, start: int, notification: bytes) -> Any:
            self.array[0, block, 0, 0] ^= bool(notification)
            return hand_over(write, start, notification)

        side._hand_over = spoiling

    def spoil_slot(self, part: int) -> None:
        """From now on write into the staging slot of parts of this number while they are handed over."""
        side: Any = self.end._side
        slots, hand_over = side.shared.slots, type(side)._hand_over

        def spoiling(write: Any, start: int, notification: bytes) -> Any:
            if write.post.complete.part == part and notification:
                slots._memory[write.post.slot * slots.size] ^= 1
            return hand_over(side, write, start, notification)

        side._hand_over = spoiling

    def connect(self, address: str) -> None:
        assert isinstance(self.end, Consumer)
        self.link = self.end.connect(address, WAIT)

    def offer(self, name: str, first: int, count: int) -> None:
        assert isinstance(self.end, Consumer)
        assert self.link is not None
        blocks = list(range(first, first + count))
        self.transfers[name] = self.end.offer(name, self.link, blocks, prompt=bytes(32), prompt_tokens=count)

    def outcome(self, name: str) -> str:
        outcome = {**self.stages, **self.transfers}[name].wait(WAIT)
        return "" if outcome is None else outcome.value

    def hold_the_lock(self, seconds: float) -> None:
        """Be in a C call that keeps Python's lock, so that no thread of this process says anything."""
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    def take_its_place(self) -> str:
        """Leave the producer without a good-bye, as one does that closes with memory in custody, and begin another
        one at its address; the new one's agent."""
        assert isinstance(self.end, Producer)
        self.left, config = self.end, self.end.config
        self.left._control.close()
        config = msgspec.structs.replace(config, bind=self.left.address.removeprefix("tcp://"))
        self.end = Producer(config, self.left.cache)
        return self.end.agent

    def close(self) -> bool:
        return self.end.close(WAIT)


def serve(pipe: Pipe, kind: str, engine: str, settings: dict[str, Any]) -> None:
    """The child's work: one endpoint."""
    obey(pipe, Role(kind, engine, settings))


def obey(pipe: Pipe, role: object) -> None:
    """The child's main loop: call what it is told to until the parent goes away."""
    pipe.send(None)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(role, name)(*arguments))
        except Exception:
            pipe.send(traceback.format_exc())


@dataclass
class Actor:
    """The parent's handle on a child."""

    process: multiprocessing.process.BaseProcess
    pipe: Pipe

    def tell(self, name: str, *arguments: Any) -> None:
        """Have it do something without waiting for the answer."""
        self.pipe.send((name, arguments))

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT), "the child does not answer"
        return self.pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.tell(name, *arguments)
        answer = self.answer()
        assert not (isinstance(answer, str) and answer.startswith("Traceback")), answer
        return answer

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
            self.process.join(WAIT)


def start(kind: str, engine: str, **settings: Any) -> Actor:
    """Start a child with an endpoint; it is ready when this returns."""
    return launch(serve, kind, engine, settings)


def launch(work: Callable[..., None], *arguments: Any) -> Actor:
    """Start a child that gets a pipe and these arguments; it obeys when this returns."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    actor = Actor(process, ours)
    assert actor.answer() is None
    return actor
