"""One life of an endpoint: an epoch with its agent, its protocol machine and its transfer thread.

An endpoint begins another life when a call into the data mover does not return, or when it is fenced. The lives
before go on for as long as memory is in their custody: they answer cancels and wait for proof, and take nothing new.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from pushkv.core.outcome import Outcome
from pushkv.runtime.loop import TransferThread
from pushkv.runtime.side import Shared, Side
from pushkv.runtime.turn import Turn

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Side)
_kept: list[object] = []
"""What is still in somebody's custody when its life ends: it lives as long as the process."""


def keep(*things: object) -> None:
    """Never let these be collected: a peer may still write into their memory."""
    _kept.extend(things)


class Life(Generic[S]):
    """A life. ``shared`` is the endpoint's, with this life's epoch, agent and turn filled in."""

    def __init__(self, role: str, shared: Shared, make_side: Callable[[Shared], S]) -> None:
        config = shared.config
        self.epoch = secrets.token_hex(8)
        self.agent = f"pushkv-{role}-{config.engine}-{config.rank}-{self.epoch}"
        self.turn = Turn()
        self.side = make_side(replace(shared, agent=self.agent, epoch=self.epoch, turn=self.turn))
        self.transfer = TransferThread(f"pushkv-{role}", self.side, config.idle_poll, config.due_poll)
        self.retiring: float | None = None
        """By when the agent is closed for the proof that gives; None where nobody has asked for it."""
        self.stalled = ""
        self._stall = config.stall
        self._stats: Counter[str] = shared.stats

    def submit(self, action: Callable[[S], object]) -> None:
        """Have the transfer thread do something with its side; from any thread."""
        self.transfer.submit(partial(action, self.side))

    def do(self, action: Callable[[S], object], deadline: float) -> bool:
        """Have it do something and wait for that; whether it was done by the deadline, on the monotonic clock."""
        done = threading.Event()

        def doing(side: S) -> None:
            try:
                action(side)
            finally:
                done.set()

        self.submit(doing)
        return done.wait(max(0.0, deadline - time.monotonic()))

    def give_up_if_stuck(self) -> bool:
        """Go on without the data mover where a call into it does not return; whether that was so just now."""
        doing = self.turn.seize(self._stall)
        if doing is None:
            return False
        self.stalled = f"{doing} did not return for {self._stall:g} s"
        log.error("%s: %s; its transfer thread is given up, its memory stays registered.", self.agent, self.stalled)
        self._stats["transfer threads given up"] += 1
        # The data mover too: were it collected when the call returns at last, its memory would be deregistered.
        keep(self, self.side.transport)
        self.side.transport = None
        self.side.grounded = self.stalled
        self.transfer = self.transfer.successor(self.side)
        self.transfer.start()
        return True

    def retire(self, limit: float, detail: str) -> None:
        """End what is open, and close the agent within ``limit`` seconds: that proves the writes of peers ended."""
        self.retiring = time.monotonic() + limit
        self.submit(lambda side: side.end_open(Outcome.TRANSPORT_ERROR, detail))

    def tick(self, now: float) -> bool:
        """For a life that is past: close its agent when it is time; whether the life is over."""
        side = self.side
        if self.retiring is not None and (now >= self.retiring or side.in_custody <= side.quarantined):
            self.retiring = None
            self.submit(lambda one: one.close_for_proof())
        if side.in_custody or self.retiring is not None or not (self.stalled or side.agent_closed):
            return False
        self.transfer.submit(self.transfer.end)
        return True
