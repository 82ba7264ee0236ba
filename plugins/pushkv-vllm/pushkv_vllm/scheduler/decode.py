"""Decode's scheduler half: which requests wait for KV, what is offered for them, and whose blocks stay pinned.

A request is *new* until the engine has allocated for it, then *offered*, and *settled* once its load has ended, it
was declined or it is over. Its offered blocks are pinned from the offer until every rank has reported that nobody can
write into them any more; so a failed load can be reported, and a request aborted, without waiting for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pushkv_vllm.directives import Decline, OfferBlocks, Reports
from pushkv_vllm.params import DecodeLeg
from pushkv_vllm.pins import Pins
from pushkv_vllm.prompt import digest_of, refusal
from pushkv_vllm.scheduler.arrivals import Arrivals


class Stand(Enum):
    """How far a request is."""

    NEW = "new"
    OFFERED = "offered"
    SETTLED = "settled"


@dataclass
class Awaited:
    """A request whose KV is to come from elsewhere. ``error``: why it cannot, for the load to fail with."""

    leg: DecodeLeg | None
    error: str = ""
    stand: Stand = Stand.NEW


class DecodeScheduler:
    """``ranks`` workers offer for each request; ``block_sizes`` are those of the engine's cache groups, in tokens as
    the scheduler has them: with context parallelism as many as the ranks that share them out hold together."""

    def __init__(self, pins: Pins, ranks: int, block_sizes: Sequence[int], deadline: float) -> None:
        self._pins = pins
        self._ranks = ranks
        self._block_sizes = tuple(block_sizes)
        self._deadline = deadline
        self._requests: dict[str, Awaited] = {}
        self._open: dict[tuple[str, int], str] = {}
        """The requests that are offered or pinned, by transfer and sibling."""
        self._loads: dict[str, str] = {}
        """How the loads that are under way will be counted."""
        self._released: Counter[str] = Counter()
        self._offers: list[OfferBlocks] = []
        self._cancels: list[str] = []
        self._declines: list[Decline] = []
        self.counts: Counter[str] = Counter()
        self.arrivals = Arrivals(ranks)

    @property
    def waiting(self) -> bool:
        """Whether a worker is to report something."""
        return bool(self._open or self._loads)

    @property
    def pinned(self) -> bool:
        """Whether blocks are pinned for requests that the engine may know no more."""
        return any(request in self._pins for request in self._open.values())

    def add(self, request: Any, leg: DecodeLeg | None, error: str = "") -> None:
        """A request has come in; with ``error`` its load is to fail."""
        self._requests[request.request_id] = Awaited(leg, error or refusal(request))

    def missing(self, request: Any, local: int) -> int:
        """How many tokens to load past the ``local`` ones. Decides nothing: the engine may ask again, or not take it.

        The prompt's last token is not loaded: decode computes it, to have something to sample from.
        """
        awaited = self._requests.get(request.request_id)
        if awaited is None or awaited.stand is not Stand.NEW:
            return 0
        return max(0, int(request.num_prompt_tokens) - 1 - local)

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """The engine has allocated ``tables``, and ``external`` tokens of it are to be loaded."""
        awaited = self._requests.get(request.request_id)
        if awaited is None or awaited.stand is not Stand.NEW:
            return
        if external <= 0:
            self._settle(awaited, decline=True)
            return
        stop = int(request.num_prompt_tokens) - 1
        self._offer(request, awaited, tables, stop - external, stop)

    def _offer(self, request: Any, awaited: Awaited, tables: Sequence[Sequence[int]], start: int, stop: int) -> None:
        name, leg = request.request_id, awaited.leg
        error = awaited.error
        if leg is not None and self._open.setdefault((leg.transfer, leg.sibling), name) != name:
            error = f"transfer {leg.transfer} is open for another request; take a fresh id for each dispatch"
        rows = [self._fresh(table, size, start, stop) for table, size in zip(tables, self._block_sizes, strict=True)]
        if error or leg is None:
            error = error or "it has no parameters"
            leg = DecodeLeg("", "")
        else:
            self._pins.hold(name, (number for _, row in rows for number in row))
        awaited.stand = Stand.OFFERED
        self._loads[name] = "failed" if error else "received"
        self._offers.append(
            OfferBlocks(
                name, leg.transfer, leg.address, leg.sibling, leg.siblings, leg.attempt,
                tuple(row for _, row in rows), tuple(first for first, _ in rows), start, stop,
                b"" if error else digest_of(request), int(request.num_prompt_tokens),
                min(self._deadline, leg.deadline or self._deadline), error, self.arrivals.expect(name),
            )
        )  # fmt: skip

    @staticmethod
    def _fresh(table: Sequence[int], size: int, start: int, stop: int) -> tuple[int, tuple[int, ...]]:
        """A group's blocks to load into, from the first that is its own: hits and null blocks are in front.

        A block's place in the table is its place in the request, so that nothing is ever taken out of the middle.
        """
        first, last = start // size, -(-stop // size)
        while first < last and first < len(table) and table[first] == 0:
            first += 1
        return first, tuple(table[first:last])

    def finished(self, request: Any) -> None:
        """A request is over. What is offered for it is cancelled, and its blocks stay pinned."""
        awaited = self._requests.pop(request.request_id, None)
        if awaited is None:
            return
        if awaited.stand is Stand.NEW:
            self._settle(awaited, decline=True)
        elif awaited.stand is Stand.OFFERED:
            self._cancels.append(request.request_id)
            self._loads[request.request_id] = "aborted" if request.status.name == "FINISHED_ABORTED" else "failed"

    def _settle(self, awaited: Awaited, *, decline: bool) -> None:
        awaited.stand = Stand.SETTLED
        leg = awaited.leg
        if decline and leg is not None and (leg.transfer, leg.sibling) not in self._open:
            self._declines.append(Decline(leg.transfer, leg.address, leg.sibling, leg.siblings, leg.attempt))
            self.counts["declined"] += 1

    def take(self) -> tuple[tuple[OfferBlocks, ...], tuple[str, ...], tuple[Decline, ...]]:
        """What the workers are to do: offers, cancels, declines."""
        taken = tuple(self._offers), tuple(self._cancels), tuple(self._declines)
        self._offers, self._cancels, self._declines = [], [], []
        return taken

    def received(self, requests: Iterable[str], failed: Iterable[str]) -> None:
        """Loads have ended on all ranks; those of ``failed`` have failed on one, and the others' need not go on."""
        for name in failed:
            if self._loads.get(name) == "received":
                self._loads[name] = "failed"
                self._cancels.append(name)
        for name in requests:
            how = self._loads.pop(name, "")
            if how:
                self.counts[how] += 1
            awaited = self._requests.get(name)
            if awaited is not None and awaited.stand is Stand.OFFERED:
                self._settle(awaited, decline=False)

    def reports(self, reports: Reports) -> None:
        """Unpin what no rank's peers can write into any more."""
        for name, count in reports.released.items():
            self._released[name] += count
            if self._released[name] >= self._ranks:
                del self._released[name]
                self._pins.let_go(name)
                self._open = {key: owner for key, owner in self._open.items() if owner != name}
