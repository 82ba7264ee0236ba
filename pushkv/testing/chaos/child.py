"""A child: an endpoint, its cache with canaries, and the loop that an engine would be."""

from __future__ import annotations

import ctypes
import hashlib
import heapq
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.commands import Command
from pushkv.core.limits import Limits
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.chaos.tasks import (
    BLOCKS,
    CONTENT,
    LAYERS,
    MOST_TOKENS,
    SLOT_BYTES,
    SLOTS,
    TOKENS,
    Answer,
    Close,
    Closed,
    How,
    Job,
    Report,
    State,
    Task,
    Wrong,
)
from pushkv.testing.ledger import Ledger
from pushkv.testing.patterns import Bytes, Prompts

LIMITS = Limits(deadline=6.0, lease=3.0, stage_deadline=6.0, resend=0.1, resend_most=1.0, ask_proof=0.05, window=256)
CHECK = 1.0
"""Seconds between looks at all canaries."""
PR_SET_PDEATHSIG = 1


class Child:
    """Base of both kinds."""

    def __init__(self, pipe: Connection, engine: str) -> None:
        self.pipe = pipe
        array = np.zeros((LAYERS, BLOCKS, TOKENS, CONTENT), np.uint8)
        self.ledger = Ledger(engine, array, 1)
        self.cache = KVCache.of(array, "LBNC", model="chaos")
        self.prompts = Prompts((LAYERS, CONTENT), MOST_TOKENS, 16 << 20)
        self.late_bytes = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._checked = 0.0
        self._leaving = False

    @property
    def end(self) -> Any:
        """The endpoint."""
        raise NotImplementedError

    def say(self, answer: Answer) -> None:
        """Tell the parent."""
        self.pipe.send(answer)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done later."""
        self._count += 1
        heapq.heappush(self._agenda, (time.monotonic() + seconds, self._count, action))

    def run(self) -> None:
        """Do what comes until the parent is gone or says so."""
        while not self._leaving:
            if self.pipe.poll(0.002):
                self._do(self.pipe.recv())
            for event in self.end.events():
                self.happened(event)
            now = time.monotonic()
            while self._agenda and self._agenda[0][0] <= now:
                heapq.heappop(self._agenda)[2]()
            if now - self._checked > CHECK:
                self._check(now)

    def _check(self, now: float) -> None:
        self._checked = now
        self.ledger.check()
        stats = self.end.stats()
        if stats.get("errors"):
            raise Broken(Rule.ERROR, f"{stats['errors']} in {self.ledger.name}")
        self.say(self.state())

    def _do(self, task: Task) -> None:
        if isinstance(task, Report):
            self.ledger.check()
            self.say(replace(self.state(), asked=True))
        elif isinstance(task, Close):
            clear = self.end.close(20.0)
            for event in self.end.events():
                self.happened(event)
            self.ledger.check()
            self.say(Closed(clear))
            self._leaving = True
        else:
            self.task(task)

    def task(self, task: Task) -> None:
        """Do what only this kind does."""
        raise NotImplementedError

    def happened(self, event: Command) -> None:
        """An event of the endpoint."""
        raise NotImplementedError

    def state(self) -> State:
        """How it is."""
        raise NotImplementedError

    def kv(self, job: Job) -> Bytes:
        """A job's KV: tokens, layers, content."""
        return self.prompts.kv(job.prompt)


def places(blocks: Sequence[int], first: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The block and the slot in it of each token."""
    return np.array(blocks, np.intp)[tokens // TOKENS - first], tokens % TOKENS


def digest(job: Job, other: bool = False) -> bytes:
    """The prompt's digest; ``other``: of another prompt."""
    return hashlib.blake2b(f"{job.prompt} {other}".encode(), digest_size=32).digest()


def config(engine: str, bind: str, how: How) -> EndpointConfig:
    """An endpoint's settings."""
    return EndpointConfig(
        engine=engine, bind=bind or "127.0.0.1:0", limits=LIMITS, silence=2.5, stream="layer",
        landing="landing" if how.landing else "direct", slot_bytes=SLOT_BYTES, landing_bytes=SLOTS * SLOT_BYTES,
        verify="checksum" if how.verify else "off",
    )  # fmt: skip


def live(pipe: Connection, kind: str, engine: str, bind: str, how: How) -> None:
    """The child's whole life; it ends with its parent's."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    logging.getLogger("pushkv").setLevel(logging.CRITICAL)
    from pushkv.testing.chaos.consumer import ConsumerChild
    from pushkv.testing.chaos.producer import ProducerChild

    try:
        (ProducerChild if kind == "producer" else ConsumerChild)(pipe, engine, bind, how).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except Broken as error:
        pipe.send(Wrong(error.rule.name, str(error)))
        os._exit(1)
    except BaseException as error:
        import traceback

        pipe.send(Wrong(Rule.ERROR.name, f"{engine}: {error!r}\n{traceback.format_exc()}"))
        os._exit(1)
    os._exit(0)  # nothing that is still in custody is collected first
