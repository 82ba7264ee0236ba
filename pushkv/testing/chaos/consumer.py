"""A decode engine's child."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from pushkv.core.commands import Command, Ended, Released
from pushkv.core.messages import TransferKey
from pushkv.core.outcome import Outcome
from pushkv.errors import PushKVError
from pushkv.runtime.consumer import Consumer, Link, Transfer
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.chaos.child import Child, config, digest, places
from pushkv.testing.chaos.tasks import TOKENS, How, Know, Offer, Outcomes, Skipped, State, Task, Up
from pushkv.testing.patterns import HOLE

RETRY = 0.02
PATIENCE = 100
"""How often an engine without blocks tries again."""
CONNECT = 3.0
"""Seconds that a connection may take before it is tried again."""


@dataclass(eq=False)
class Receipt:
    """One attempt: its blocks, and what they are to hold."""

    task: Offer
    blocks: list[int]
    transfer: Transfer
    outcome: Outcome | None = None
    landed: int = 0


class ConsumerChild(Child):
    """Connects, offers, cancels."""

    def __init__(self, pipe: Connection, engine: str, bind: str, how: How) -> None:
        super().__init__(pipe, engine)
        self._consumer = Consumer(config(engine, "", how), self.cache)
        self._receipts: dict[TransferKey, Receipt] = {}
        self._links: dict[str, Link] = {}
        self._addresses: tuple[str, ...] = ()
        threading.Thread(target=self._keep_connected, daemon=True).start()
        self.say(Up())

    @property
    def end(self) -> Consumer:
        """The endpoint."""
        return self._consumer

    def _keep_connected(self) -> None:
        """On a thread of its own: connect, and connect again where a producer is away for long."""
        away: dict[str, float] = {}
        while True:
            for address in self._addresses:
                link = self._links.get(address)
                if link is not None and link.alive:
                    away.pop(address, None)
                elif link is None or time.monotonic() - away.setdefault(address, time.monotonic()) > 1.0:
                    self._connect(address)
            time.sleep(0.1)

    def _connect(self, address: str) -> None:
        try:
            self._links[address] = self._consumer.connect(address, CONNECT)
        except PushKVError:
            return

    def task(self, task: Task) -> None:
        """Get to know producers, or offer."""
        if isinstance(task, Know):
            self._addresses = task.addresses
            return
        assert isinstance(task, Offer)
        self._offer(task, PATIENCE)

    def _offer(self, task: Offer, patience: int) -> None:
        job, first = task.job, task.start // TOKENS
        link = self._links.get(task.address)
        ready = link is not None and link.alive
        taken = self.ledger.take(-(-job.tokens // TOKENS) - first, task) if ready else None
        if link is None or taken is None:
            if patience:
                self.after(RETRY, lambda: self._offer(task, patience - 1))
            else:
                self.say(Skipped(job.transfer, task.attempt))
            return
        transfer = self._consumer.offer(
            job.transfer, link, taken, prompt=digest(job), prompt_tokens=job.tokens, start=task.start,
            first_block=first, attempt=task.attempt,
        )  # fmt: skip
        receipt = self._receipts[transfer.key] = Receipt(task, taken, transfer)
        if task.cancel is not None:
            self.after(task.cancel, lambda: self._cancel(receipt))

    def _cancel(self, receipt: Receipt) -> None:
        if receipt.outcome is None:
            self._consumer.cancel(receipt.transfer)

    def happened(self, event: Command) -> None:
        """Events of transfers."""
        assert isinstance(event, (Ended, Released))
        receipt = self._receipts.get(event.key)
        if receipt is None:
            raise Broken(Rule.ONCE, f"{event} comes for a transfer that is over")
        if isinstance(event, Ended):
            self._ended(receipt, event)
        else:
            self._released(receipt, event.key)

    def _ended(self, receipt: Receipt, event: Ended) -> None:
        if receipt.outcome is not None:
            raise Broken(Rule.ONCE, f"{event.key} ends twice")
        receipt.outcome = event.outcome
        if event.outcome is Outcome.COMPLETE and receipt.task.job.mismatch and receipt.blocks:
            raise Broken(Rule.BYTES, f"{event.key} is complete with another prompt's KV")
        receipt.landed = self._look(receipt, event.key)
        self.say(Outcomes(event.key.transfer, event.key.epoch, event.key.attempt, event.outcome.value))

    def _released(self, receipt: Receipt, key: TransferKey) -> None:
        if receipt.outcome is None:
            raise Broken(Rule.ONCE, f"{key} is released without an outcome")
        self.late_bytes += self._look(receipt, key) - receipt.landed
        del self._receipts[key]
        self.ledger.give_back(receipt.blocks)

    def _look(self, receipt: Receipt, key: TransferKey) -> int:
        """Look at a transfer's bytes, and count those that have landed. Raises Broken."""
        job, first = receipt.task.job, receipt.task.start // TOKENS
        if not receipt.blocks:
            return 0
        tokens = np.arange(first * TOKENS, (first + len(receipt.blocks)) * TOKENS)
        block, slot = places(receipt.blocks, first, tokens)
        found = self.ledger.blocks[block, :, slot]
        inside = (tokens >= receipt.task.start) & (tokens < job.tokens)
        holes = found[inside] == HOLE
        right = found[inside] == self.kv(job)[tokens[inside]]
        if receipt.outcome is not Outcome.COMPLETE:
            right |= holes
        if not right.all() or not (found[~inside] == HOLE).all():
            assert receipt.outcome is not None
            raise Broken(Rule.BYTES, f"{key} ({receipt.outcome.value}) holds bytes that are not its own")
        return int(holes.size - holes.sum())

    def state(self) -> State:
        """How it is."""
        return State(
            open=sum(receipt.outcome is None for receipt in self._receipts.values()),
            held=len(self.ledger) - self.ledger.free,
            linked=sum(link.alive for link in self._links.values()),
            late_bytes=self.late_bytes,
            stats=self._consumer.stats(),
            held_for=tuple(str(key) for key in self._receipts)[:8],
        )
