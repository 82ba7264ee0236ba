"""Outcome and custody of the offers that a producer serves: how each ends, and when its memory is out of reach.

The base of :class:`pushkv.core.producer.ProducerMachine`, which decides what to do; here is what that comes to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pushkv.core.commands import AskProof, Ended, Send
from pushkv.core.limits import Limits
from pushkv.core.messages import Ack, Drained, Failed, Ready
from pushkv.core.outcome import Outcome
from pushkv.core.ring import Packed, SlotPool, StagingSlots
from pushkv.core.sending import Book, Serving
from pushkv.core.stages import Outbox, Stages
from pushkv.core.states import SOURCE, OutcomeEvent, Pack, PackEvent, Sending, Source, SourceEvent, step
from pushkv.core.timers import Timers


@dataclass
class Custodian:
    """What one producer rank knows of every transfer.

    ``rank`` and ``epoch`` go into each Complete. ``counts`` tallies what was dropped and why. ``slots`` are for
    staging; none where nothing can be landed.
    """

    rank: int
    epoch: str
    limits: Limits = field(default_factory=Limits)
    timers: Timers = field(default_factory=Timers)
    counts: Counter[str] = field(default_factory=Counter)
    slots: SlotPool = field(default_factory=lambda: SlotPool(0))

    def __post_init__(self) -> None:
        self._staging = StagingSlots(self.slots)
        self._out = Outbox()
        self._stages = Stages(self._out, self.limits.unmatched)
        self._book = Book()
        self._closing: tuple[Outcome, str] | None = None

    def _read_ended(self, serving: Serving) -> None:
        if serving.writes or serving.custody not in (Source.READING, Source.DRAINING):
            return
        self._move(serving, SourceEvent.LAST_DONE)
        self._maybe_complete(serving)
        self._settle(serving)

    def _maybe_complete(self, serving: Serving) -> None:
        if serving.state is Sending.MATCHED and serving.custody is Source.IDLE and not serving.unsent:
            self._over(serving, OutcomeEvent.ALL_SENT, Outcome.COMPLETE, "")
            self._stop(serving)

    def _fail(self, serving: Serving, outcome: Outcome, detail: str, now: float) -> None:
        """Say that a transfer will not complete, until the consumer answers or the deadline passes."""
        if serving.state in (Sending.FAILING, Sending.OVER):
            return
        self._book.decide(serving, OutcomeEvent.FAIL)
        serving.failing, serving.detail = outcome, detail[:2000]
        self._say_failed(serving)
        self.timers.set(
            ("failed", serving.peer, serving.offer.sequence), now + self.limits.resend_wait(0)
        )  # fmt: skip
        self._stop(serving)

    def _say_failed(self, serving: Serving, stuck: bool = False) -> None:
        outcome = serving.failing or Outcome.TRANSPORT_ERROR
        stuck = stuck or serving.custody is Source.STUCK
        message = Failed(serving.offer.key, serving.offer.sequence, outcome, serving.detail, stuck)
        self._say(serving.peer, message, serving.tries)

    def _resend_failed(self, peer: str, sequence: int, now: float) -> None:
        serving = self._book.find(peer, sequence)
        if serving is None or serving.state is not Sending.FAILING:
            return
        serving.tries = min(serving.tries + 1, self.limits.most_tries())
        self._say_failed(serving)
        self.timers.set(("failed", peer, sequence), now + self.limits.resend_wait(serving.tries))

    def _deadline(self, peer: str, sequence: int) -> None:
        serving = self._book.find(peer, sequence)
        if serving is not None:
            outcome = serving.failing or Outcome.EXPIRED
            self._over(serving, OutcomeEvent.END, outcome, serving.detail or "its deadline passed")
            self._stop(serving)

    def _lease_over(self, peer: str, now: float) -> None:
        """The lease bounds what may be started: what has unsent tokens ends; what is in flight goes on."""
        customer = self._book.customers.get(peer)
        for serving in [] if customer is None else list(customer.live.values()):
            if serving.unsent:
                self._fail(serving, Outcome.EXPIRED, "its lease was not renewed", now)

    def _over(self, serving: Serving, event: OutcomeEvent, outcome: Outcome, detail: str) -> None:
        if serving.state is Sending.OVER:
            return
        if serving.failing is outcome:
            detail = serving.detail
        self._book.decide(serving, event)
        offer = serving.offer
        self.timers.cancel(("deadline", serving.peer, offer.sequence))
        self.timers.cancel(("failed", serving.peer, offer.sequence))
        self._out.put(Ended(offer.key, outcome, detail))
        self._stages.sibling_done(offer.key, outcome, offer.siblings, detail)

    def _stop(self, serving: Serving) -> None:
        """Nothing more will be posted for this offer."""
        if serving.custody in (Source.IDLE, Source.READING):
            self._move(serving, SourceEvent.STOP)
        serving.shares.clear()
        self.timers.cancel(("ready", serving.peer, serving.offer.sequence))
        for write in list(serving.unposted):
            packed = self._staging.find(write)
            if packed is not None and packed.state is Pack.GATHERED:
                self._drop(serving, packed)
        self._settle(serving)

    def _drop(self, serving: Serving, packed: Packed) -> None:
        """A part has been gathered for an offer that is over: it goes nowhere."""
        self._staging.move(packed, PackEvent.DROP)
        serving.unposted.discard(packed.write)
        self._book.end_write(packed.write)
        self._read_ended(serving)

    def _move(self, serving: Serving, event: SourceEvent) -> None:
        serving.custody = step(SOURCE, serving.custody, event)

    def _settle(self, serving: Serving) -> None:
        """Answer a Cancel whose WRITEs have ended, and forget what is over with custody ended."""
        offer = serving.offer
        ended = serving.custody is Source.ENDED
        if ended and serving.answer_due:
            serving.answer_due = False
            self._say(serving.peer, Drained(offer.key, offer.sequence))
        if ended and serving.state is Sending.OVER:
            self._book.bury(serving)
        self._settle_stage(offer.key.transfer)

    def _settle_stage(self, transfer: str) -> None:
        wanted = self._book.wants(transfer)
        reads = self._book.reads(transfer) or self._staging.reads(transfer)
        if self._closing is not None and not wanted:
            self._stages.give_up(transfer, *self._closing)
        if self._stages.settle(transfer, wanted, reads):
            self.timers.cancel(("stage", transfer))

    def _seek_proof(self, peer: str, now: float) -> None:
        customer = self._book.customers.get(peer)
        reads = customer is not None and any(s.reads for s in customer.live.values())
        if customer is not None and (reads or customer.lost):
            self._out.put(AskProof(peer))
            # With nothing in custody the proof only lets the epoch be forgotten: no hurry.
            self.timers.set(("proof", peer), now + self.limits.ask_proof * (1 if reads else 100))

    def _say(self, peer: str, message: Ack | Failed | Drained | Ready, tries: int = 0) -> None:
        if not self._book.customers[peer].lost:
            self._out.put(Send(peer, message, insist=tries >= self.limits.insist_after))
