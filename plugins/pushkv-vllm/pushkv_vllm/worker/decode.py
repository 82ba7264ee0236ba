"""Decode's worker half: offers, and what became of them.

Every request that the scheduler half has named is reported as received exactly once, whatever happens; its blocks are
reported as released exactly once, when nobody can write into them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm.logger import init_logger

from pushkv import Consumer, Ended, Link, Outcome, PushKVError, Released, Transfer
from pushkv.core.messages import TransferKey
from pushkv_vllm.directives import Decline, Directives, OfferBlocks, Reports
from pushkv_vllm.worker.geometry import EngineCache
from pushkv_vllm.worker.links import Links

logger = init_logger("vllm.pushkv.decode")


@dataclass
class Load:
    """One request's load. ``since`` is when it was asked for; ``transfer`` is None until it could be offered."""

    order: OfferBlocks
    since: float
    transfer: Transfer | None = None
    ended: bool = False
    failure: str = ""

    @property
    def expires(self) -> float:
        """By when it must have ended."""
        return self.since + self.order.deadline


@dataclass
class News:
    """What is to be reported in this step. ``blocks`` are those that a failed load was to fill."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    reports: Reports = field(default_factory=Reports)

    def __bool__(self) -> bool:
        return bool(self.received or self.failed or self.blocks or self.reports.news)


class DecodeWorker:
    """``late``: report a failed load when its blocks are released, not before (see :mod:`pushkv_vllm.compat`)."""

    def __init__(
        self, consumer: Consumer, cache: EngineCache, *, late: bool, changed: Callable[[], None], patience: float
    ) -> None:
        self._consumer = consumer
        self._cache = cache
        self._late = late
        self._patience = patience
        self.links = Links(consumer, changed)
        self._loads: dict[str, Load] = {}
        self._waiting: dict[str, Load] = {}
        """Loads whose prefill engine is being connected."""
        self._by_key: dict[TransferKey, str] = {}
        self._news = News()
        self.seconds: list[float] = []

    def connect(self, addresses: Iterable[str]) -> None:
        """Connect to prefill engines ahead of time."""
        for address in addresses:
            self.links.find(address, time.monotonic())

    def do(self, directives: Directives) -> None:
        """Carry out a step's directives."""
        for order in directives.offers:
            load = self._loads[order.request] = Load(order, time.monotonic())
            if order.error:
                self._never_offered(load, order.error)
            elif not self._offer(load):
                self._waiting[order.request] = load
        for request in directives.cancels:
            self._cancel(request)
        for decline in directives.declines:
            self._decline(decline)

    def poll(self) -> News | None:
        """Take what has happened since the last step; None where that is nothing, as in most."""
        for event in self._consumer.events():
            if isinstance(event, Ended):
                self._ended(event)
            elif isinstance(event, Released):
                self._released(event.key)
        for load in list(self._waiting.values()):
            if self._offer(load):
                self._waiting.pop(load.order.request, None)
        if not self._news:
            return None
        news, self._news = self._news, News()
        return news

    def _offer(self, load: Load) -> bool:
        """Offer a load; False while its prefill engine is being connected."""
        order, now = load.order, time.monotonic()
        try:
            link = self.links.find(order.address, load.since)
            if link is not None:
                self._submit(load, link, max(0.001, load.expires - now))
                return True
        except ConnectionError as error:
            self._never_offered(load, str(error), Outcome.PEER_LOST)
            return True
        except PushKVError as error:
            self._never_offered(load, str(error), Outcome.REJECTED_GEOMETRY)
            return True
        if now >= min(load.expires, load.since + self._patience):
            why = f"no connection to {order.address} within {now - load.since:.1f} s"
            self._never_offered(load, why, Outcome.PEER_LOST)
            return True
        return False

    def _submit(self, load: Load, link: Link, deadline: float) -> None:
        order = load.order
        load.transfer = self._consumer.offer(
            order.transfer,
            link,
            self._cache.tables(order.tables),
            prompt=order.prompt,
            prompt_tokens=order.prompt_tokens,
            start=order.start,
            stop=order.stop,
            first_block=self._cache.firsts(order.firsts),
            sibling=order.sibling,
            siblings=order.siblings,
            attempt=order.attempt,
            deadline=deadline,
        )
        self._by_key[load.transfer.key] = order.request

    def load_of(self, key: TransferKey) -> int:
        """The number of the load that a transfer is for, 0 where it is not known (yet). From any thread."""
        load = self._loads.get(self._by_key.get(key, ""))
        return load.order.load if load is not None else 0

    def _cancel(self, request: str) -> None:
        load = self._loads.get(request)
        if load is None or load.ended:
            return
        if load.transfer is not None:
            self._consumer.cancel(load.transfer)
        else:
            self._waiting.pop(request, None)
            order = load.order
            self._decline(Decline(order.transfer, order.address, order.sibling, order.siblings, order.attempt))
            self._never_offered(load, "by the engine", Outcome.CANCELLED)

    def _decline(self, decline: Decline) -> None:
        """Where the prefill engine cannot be connected nobody is told, and it holds the prompt for its own time."""

        def tell(link: Link) -> None:
            try:
                self._consumer.decline(
                    decline.transfer,
                    link,
                    sibling=decline.sibling,
                    siblings=decline.siblings,
                    attempt=decline.attempt,
                )
            except PushKVError as error:
                logger.warning("%s cannot be declined: %s", decline.transfer, error)

        self.links.once(decline.address, tell)

    # What becomes of them

    def _never_offered(self, load: Load, why: str, outcome: Outcome | None = None) -> None:
        """Parameters that cannot be followed have no outcome: there was no transfer."""
        self._failed(load, why, outcome)
        self._report(load)
        self._forget(load)

    def _ended(self, event: Ended) -> None:
        load = self._loads.get(self._by_key.get(event.key, ""))
        if load is None:
            return
        self._outcome(load, event.outcome, event.detail)
        if not (self._late and load.failure):
            self._report(load)

    def _released(self, key: TransferKey) -> None:
        load = self._loads.get(self._by_key.pop(key, ""))
        if load is None:
            return
        if self._late and load.failure:
            self._report(load)
        self._forget(load)

    def _outcome(self, load: Load, outcome: Outcome, detail: str) -> None:
        load.ended = True
        if outcome is Outcome.COMPLETE:
            self.seconds.append(time.monotonic() - load.since)
        else:
            self._failed(load, detail, outcome)

    @staticmethod
    def _failed(load: Load, why: str, outcome: Outcome | None) -> None:
        load.ended = True
        load.failure = ": ".join(filter(None, (outcome.value if outcome is not None else "", why)))
        if outcome is not Outcome.CANCELLED:
            logger.warning("The KV of %s (transfer %s) did not come: %s", load.order.request, load.order.transfer,
                           load.failure)  # fmt: skip

    def _report(self, load: Load) -> None:
        request = load.order.request
        self._news.received.add(request)
        if load.failure:
            self._news.failed.add(request)
            self._news.reports.failed[request] = load.failure
            self._news.blocks.update(load.order.tables[0] if load.order.tables else ())

    def _forget(self, load: Load) -> None:
        """Its blocks are out of everybody's reach."""
        self._loads.pop(load.order.request, None)
        self._news.reports.released[load.order.request] += 1

    @property
    def open(self) -> int:
        """How many loads are open or in custody."""
        return len(self._loads)
