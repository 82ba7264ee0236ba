"""Prefill's worker half: it stages what a step has computed, and reports when nothing reads it any more."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from vllm.logger import init_logger

from pushkv import Outcome, Producer, PushKVError, StageEnded, StageReleased
from pushkv.backends.base import Fence, PassedFence
from pushkv.cache import fence_of
from pushkv_vllm.directives import Directives, Reclaim, Reports, StagePart, Unstage
from pushkv_vllm.worker.geometry import EngineCache
from pushkv_vllm.worker.layers import Layers

logger = init_logger("vllm.pushkv.prefill")

REMEMBERED = 1 << 16
"""How many transfers that are over are remembered, so that late directives for one do not begin it anew."""


@dataclass
class Held:
    """A transfer that is staged. ``held``: its blocks may be read. ``reclaim``: what to answer once they are not."""

    held: bool = False
    ended: bool = False
    reclaim: Reclaim | None = None


@dataclass(frozen=True)
class NoFence:
    """Where there should be one: what it was for fails, and nothing else."""

    error: PushKVError

    def done(self) -> bool:
        """Raises the error."""
        raise self.error

    def wait(self) -> None:
        """Raises it too."""
        raise self.error


class PrefillWorker:
    """``hold`` is for how many seconds after its last part a prompt waits for an offer.

    With ``layers`` the layers of a step are staged as they are queued, some at a time.
    """

    def __init__(self, producer: Producer, cache: EngineCache, hold: float, layers: Layers | None = None) -> None:
        self._producer = producer
        self._cache = cache
        self._hold = hold
        self._transfers: dict[str, Held] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._parts: tuple[StagePart, ...] = ()
        self._layers = layers
        self._reports = Reports()

    def do(self, directives: Directives) -> None:
        """Carry out a step's directives, but for its parts: those wait for the step's work to be queued."""
        for reclaim in directives.reclaims:
            self._reclaim(reclaim)
        self._parts += directives.parts
        if self._layers is not None:
            self._layers.begin(directives.tokens)
        for unstage in directives.unstages:
            self._unstage(unstage)

    def layer_queued(self, name: str) -> None:
        """The work of a layer is queued: stage it with those before, every few layers."""
        if self._layers is not None and self._parts and (counts := self._layers.queued(name)) is not None:
            self._stage(self._parts, counts)

    def stage(self) -> None:
        """Stage this step's parts behind a fence: what is queued by now must be done before any is read."""
        parts, self._parts = self._parts, ()
        if parts:
            self._stage(parts)

    def _stage(self, parts: tuple[StagePart, ...], layers: tuple[int, ...] | None = None) -> None:
        try:
            fence: Fence = fence_of(self._cache.cache)
        except PushKVError as error:
            fence = NoFence(error)
        for part in parts:
            if part.transfer in self._over:
                continue
            state = self._transfers.setdefault(part.transfer, Held())
            try:
                ending = self._producer.stage(
                    part.transfer,
                    self._cache.tables(part.tables),
                    prompt=part.prompt,
                    prompt_tokens=part.prompt_tokens,
                    ready=part.ready,
                    layers=layers,
                    siblings=None,
                    deadline=self._hold,
                    fence=fence,
                )
                state.held = not ending.released
            except PushKVError as error:
                logger.error("%s cannot be staged: %s", part.transfer, error)
                self._producer.unstage(part.transfer)
                if not state.held:
                    self._end(part.transfer, state, f"rejected: {error}")

    def poll(self) -> Reports | None:
        """Take what has happened since the last step; None where that is nothing, as in most."""
        for event in self._producer.events():
            if isinstance(event, StageEnded):
                self._stage_ended(event)
            elif isinstance(event, StageReleased):
                self._released(event.transfer)
        if not self._reports.news:
            return None
        reports, self._reports = self._reports, Reports()
        return reports

    def _reclaim(self, reclaim: Reclaim) -> None:
        state = self._transfers.get(reclaim.transfer)
        if state is None or not state.held:
            self._reports.reclaimed[reclaim.transfer, reclaim.round] += 1
            return
        state.reclaim = reclaim
        self._producer.preempt(reclaim.transfer)

    def _unstage(self, unstage: Unstage) -> None:
        """End a transfer. One that was never staged is, empty, so that whoever waits for it hears of the end."""
        if unstage.transfer in self._over:
            return
        self._parts = tuple(part for part in self._parts if part.transfer != unstage.transfer)
        if unstage.transfer not in self._transfers:
            self._transfers[unstage.transfer] = Held(held=True)
            nothing = self._cache.tables([()] * (max(self._cache.owners) + 1))
            self._producer.stage(unstage.transfer, nothing, prompt=unstage.prompt, ready=0, siblings=None,
                                 prompt_tokens=unstage.prompt_tokens, fence=PassedFence())  # fmt: skip
        self._producer.unstage(unstage.transfer)

    def _stage_ended(self, event: StageEnded) -> None:
        state = self._transfers.get(event.transfer)
        if state is None or state.ended:
            return
        how = event.outcome.value
        if event.outcome is not Outcome.COMPLETE:
            how = f"{how}: {event.detail}" if event.detail else how
            logger.log(20 if event.outcome is Outcome.CANCELLED else 30, "Transfer %s was not sent: %s",
                       event.transfer, how)  # fmt: skip
        self._end(event.transfer, state, how)

    def _end(self, transfer: str, state: Held, how: str) -> None:
        state.ended = True
        self._reports.ended[transfer] = how
        if not state.held:
            self._forget(transfer)

    def _released(self, transfer: str) -> None:
        state = self._transfers.get(transfer)
        if state is None:
            return
        state.held = False
        if state.reclaim is not None:
            self._reports.reclaimed[transfer, state.reclaim.round] += 1
            state.reclaim = None
        if state.ended:
            self._forget(transfer)

    def _forget(self, transfer: str) -> None:
        del self._transfers[transfer]
        self._over[transfer] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
        self._reports.over[transfer] += 1

    def written(self) -> dict[str, int]:
        """What has been written into other engines' memory since the start."""
        told = self._producer.stats()
        return {name: told[name] for name in ("bytes", "writes", "descriptors") if name in told}

    @property
    def open(self) -> int:
        """How many transfers are staged."""
        return len(self._transfers)
