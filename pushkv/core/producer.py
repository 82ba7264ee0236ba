"""The producer's protocol machine: offers met with staged blocks, WRITEs, and the custody of source blocks.

Sans-IO: every method takes ``now`` in seconds and leaves commands to be taken by :meth:`ProducerMachine.commands`.
Peers are named by the consumer's agent name, which contains its epoch. The runtime has checked the pair's token
before a message gets here, and carries out Post commands in order, at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pushkv.core.commands import Command, Post, Send
from pushkv.core.messages import (
    Ack,
    Blocks,
    Cancel,
    Complete,
    Drained,
    Failed,
    Grant,
    Offer,
    Renew,
    ToProducer,
    TransferKey,
)
from pushkv.core.outcome import Outcome
from pushkv.core.packing import Packing
from pushkv.core.ring import starved
from pushkv.core.sending import Customer, Cut, Owed, Part, Serving
from pushkv.core.span import Span
from pushkv.core.stages import Stage
from pushkv.core.states import OutcomeEvent, Pack, Sending, Source, SourceEvent
from pushkv.core.streaming import Ahead, Counts, Streaming


@dataclass
class ProducerMachine(Packing):
    """One producer rank's side of every transfer it knows of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gone: set[str] = set()

    # What the engine asks

    def stage(
        self,
        transfer: str,
        blocks: Blocks,
        prompt: bytes,
        prompt_tokens: int,
        ready: int,
        now: float,
        siblings: int = 1,
        deadline: float | None = None,
        layers: Counts | None = None,
    ) -> None:
        """Say that the KV of tokens 0 to ``ready`` of a prompt is in ``blocks``; again as more is computed.

        With ``layers`` that is so for the first layers of each group alone, and for the others up to where the calls
        before said.
        ``siblings`` is how many consumers' transfers the stage waits for, 0 for as many as their offers say.
        ``deadline`` counts from the call that gives it, the limits' own from the first. Raises ProtocolError, and
        changes nothing, where the numbers contradict each other or an earlier call, or too many prompts wait.
        """
        ahead = None
        if layers is not None:
            known = self._stages.get(transfer)
            ahead, ready = Ahead(ready, layers), 0 if known is None else known.ready
        stage = Stage(transfer, prompt, prompt_tokens, siblings, blocks, ready, ahead)
        if self._stages.put(stage) or deadline is not None:
            wait = self.limits.stage_deadline if deadline is None else deadline
            self.timers.set(("stage", transfer), now + wait)
        for serving in self._book.of(transfer):
            self._meet(serving, now)
        self._settle_stage(transfer)

    def preempt(self, transfer: str) -> None:
        """Take a stage's blocks back: no further part is posted from them; StageReleased says when none is read.

        Then stage again with fresh blocks to go on from the first unsent token, or :meth:`unstage`. Unknown ids
        are fine.
        """
        self._stages.suspend(transfer)
        self._settle_stage(transfer)

    def unstage(self, transfer: str, now: float, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        """End a stage from this side: its transfers fail with ``outcome``, until it is staged anew also those offered
        later. Unknown ids are fine."""
        stage = self._stages.get(transfer)
        if stage is None:
            return
        self._stages.end(stage, outcome, detail)
        told = detail or "cancelled by the producer's engine"
        self._stages.withdraw(transfer, outcome, told)
        for serving in self._book.of(transfer):
            self._fail(serving, outcome, told, now)
        self._settle_stage(transfer)

    def close(
        self,
        now: float,
        outcome: Outcome = Outcome.REJECTED_CLOSING,
        detail: str = "the producer is shutting down",
    ) -> None:
        """Refuse new offers from now on, for this reason; offers and stages that have not met fail too.

        What has met goes on to its end, and its stage may still be told of more tokens.
        """
        self._closing = (outcome, detail)
        for serving in self._book:
            if serving.state is Sending.OFFERED:
                self._fail(serving, outcome, detail, now)
        for transfer in self._stages.names():
            self._settle_stage(transfer)

    @property
    def reading(self) -> int:
        """How many transfers' source blocks may still be read."""
        return sum(serving.reads for serving in self._book)

    @property
    def open_transfers(self) -> int:
        """How many transfers have no outcome yet."""
        return sum(serving.state is not Sending.OVER for serving in self._book)

    @property
    def staged(self) -> int:
        """How many stages still wait or are read."""
        return len(self._stages)

    def custody(self) -> Counter[Source]:
        """How many transfers are in which custody."""
        return Counter(serving.custody for serving in self._book)

    def staging_slots(self) -> Counter[Pack]:
        """How many staging slots are in which custody; free ones are not counted."""
        return self._staging.custody()

    # What the runtime tells

    def connected(
        self, peer: str, owed: Owed, now: float, cut: Cut | None = None, streaming: Streaming | None = None
    ) -> None:
        """A consumer epoch is connected, for the first time or again; one whose end was proven stays gone.

        ``cut`` cuts spans into parts that fit the slots of both; without it nothing can be landed at this peer.
        ``streaming`` says which parts leave early.
        """
        if peer in self._gone:
            self.counts["connected after its end"] += 1
            return
        customer = self._book.customers.setdefault(peer, Customer(owed, self.limits.window))
        customer.owed, customer.cut, customer.lost = owed, cut, False
        customer.streaming = streaming or customer.streaming
        for failed in customer.untold.values():
            self._out.put(Send(peer, failed, insist=True))

    def peer_lost(self, peer: str, detail: str, now: float) -> None:
        """A consumer cannot be reached: its transfers end. What is in flight stays in custody.

        It may be there all the same, and wait: so it is told, over the control connection.
        """
        customer = self._book.customers.get(peer)
        if customer is None or customer.lost:
            return
        customer.lost = True
        self.timers.cancel(("lease", peer))
        for serving in list(customer.live.values()):
            self._tell_of_loss(customer, serving, detail)
            self._over(serving, OutcomeEvent.END, Outcome.PEER_LOST, detail)
            self._stop(serving)
        self.timers.set(("proof", peer), now)

    def _tell_of_loss(self, customer: Customer, serving: Serving, detail: str) -> None:
        if serving.state is not Sending.OVER:
            offer, stuck = serving.offer, serving.custody is Source.STUCK
            failed = Failed(offer.key, offer.sequence, Outcome.PEER_LOST, detail[:2000], stuck)
            customer.untold[offer.sequence] = failed
            self._out.put(Send(serving.peer, failed, insist=True))

    def writes_ended(self, peer: str, now: float) -> None:
        """The transport has proof that no WRITE to this consumer epoch reads or writes memory any more.

        That ends the epoch for good, so that its floor can be forgotten: it is never connected again.
        """
        if peer not in self._book.customers:
            return
        self.peer_lost(peer, "its writes have ended", now)
        self._staging.proven(peer)
        for serving in list(self._book.customers[peer].live.values()):
            self._book.end_writes(serving)
            self._move(serving, SourceEvent.PROVE)
            self._settle(serving)
        self.timers.cancel(("proof", peer))
        del self._book.customers[peer]
        self._gone.add(peer)
        self._gather(now)

    def write_done(self, write: int, now: float) -> None:
        """A WRITE has ended and its bytes are there."""
        serving = self._book.end_write(write)
        self._slot_written(write, False, now)
        if serving is not None:
            self._read_ended(serving)

    def write_failed(
        self, write: int, outcome: Outcome, detail: str, now: float, reached: bool = True
    ) -> None:  # fmt: skip
        """A WRITE has failed. Unless it never ``reached`` the transport, its bytes may still travel."""
        serving = self._book.end_write(write)
        self._slot_written(write, reached, now)
        if serving is None:
            return
        if reached and serving.custody is not Source.STUCK:
            self._move(serving, SourceEvent.STRAND)
        self._fail(serving, outcome, detail, now)
        if serving.custody is Source.STUCK:
            self.timers.set(("proof", serving.peer), now)
        else:
            self._read_ended(serving)

    def receive(self, peer: str, message: ToProducer, now: float) -> None:
        """Take in a message of a peer whose token was right. Never raises for what it says."""
        customer = self._book.customers.get(peer)
        if customer is None or customer.lost:
            self.counts["stray"] += 1
            return
        if isinstance(message, Grant):
            self._on_grant(peer, message)
            return
        if not isinstance(message, Cancel):
            customer.raise_floor(message.floor)
        if isinstance(message, Renew):
            self.timers.set(("lease", peer), now + message.lease)
        elif not customer.within(message.sequence):
            self.counts["beyond the window"] += 1
        elif isinstance(message, Offer):
            self._on_offer(peer, customer, message, now)
        elif isinstance(message, Cancel):
            self._on_cancel(peer, customer, message, now)

    def tick(self, now: float) -> None:
        """Fire the timers that are due."""
        for name in self.timers.take(now):
            self.fire(name, now)

    def fire(self, timer: object, now: float) -> None:
        """Act on one timer, which is no longer set."""
        match timer:
            case ("lease", str(peer)):
                self._lease_over(peer, now)
            case ("deadline", str(peer), int(sequence)):
                self._deadline(peer, sequence)
            case ("failed", str(peer), int(sequence)):
                self._resend_failed(peer, sequence, now)
            case ("ready", str(peer), int(sequence)):
                self._resend_ready(peer, sequence, now)
            case ("staging",):
                self._gather(now)
            case ("stage", str(transfer)):
                self.unstage(transfer, now, Outcome.EXPIRED, "no offer came by the stage's deadline")
            case ("proof", str(peer)):
                self._seek_proof(peer, now)

    def commands(self) -> list[Command]:
        """Take the commands that have gathered."""
        return self._out.take()

    # Offers and cancels

    def _on_offer(self, peer: str, customer: Customer, offer: Offer, now: float) -> None:
        self.timers.set(("lease", peer), now + offer.lease)
        if offer.sequence < customer.floor:
            self.counts["offer below the floor"] += 1
            return
        if offer.sequence in customer.untold:
            self._out.put(Send(peer, customer.untold[offer.sequence], insist=True))
            return
        if offer.sequence in customer.dead:
            self._answer_dead(peer, customer, offer)
            return
        self._say(peer, Ack(offer.sequence))
        if offer.sequence in customer.live:
            self.counts["duplicate offer"] += 1
            return
        if self._book.unmatched >= self.limits.unmatched and offer.key.transfer not in self._stages:
            customer.bury(offer.sequence, Outcome.REJECTED_BUSY)
            self._answer_dead(peer, customer, offer)
            return
        self._admit(peer, customer, offer, now)

    def _answer_dead(self, peer: str, customer: Customer, offer: Offer) -> None:
        refused = customer.dead[offer.sequence]
        if refused is None:
            self._say(peer, Ack(offer.sequence))
        else:
            detail = f"{self.limits.unmatched} offers wait for their prompts already: retry later"
            self._say(peer, Failed(offer.key, offer.sequence, refused, detail))

    def _admit(self, peer: str, customer: Customer, offer: Offer, now: float) -> None:
        serving = Serving(peer, offer, sent=offer.start)
        self._book.add(serving)
        self.timers.set(("deadline", peer, offer.sequence), now + offer.remaining)
        self._supersede(offer.key, now)
        if self._closing:
            self._fail(serving, *self._closing, now)
        self._meet(serving, now)

    def _supersede(self, key: TransferKey, now: float) -> None:
        """End every attempt but the latest that is known of."""
        rivals = self._book.rivals(key)
        latest = max([key.attempt, *(rival.offer.key.attempt for rival in rivals)])
        for rival in rivals:
            if rival.offer.key.attempt < latest:
                self._fail(rival, Outcome.SUPERSEDED, f"attempt {latest} follows", now)

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        customer.untold.pop(cancel.sequence, None)
        serving = customer.live.get(cancel.sequence)
        if serving is None:
            if customer.may_start(cancel.sequence):
                self._supersede(cancel.key, now)
                self._stages.sibling_done(cancel.key, cancel.outcome, cancel.siblings)
            customer.bury(cancel.sequence)
            self._say(peer, Drained(cancel.key, cancel.sequence))
            self._settle_stage(cancel.key.transfer)
            return
        serving.answer_due = True
        self._over(serving, OutcomeEvent.ANSWER, cancel.outcome, "the consumer ended it")
        self._stop(serving)
        if serving.custody is Source.STUCK:
            self._say_failed(serving, stuck=True)

    # Rendezvous

    def _meet(self, serving: Serving, now: float) -> None:
        """Where an offer and a stage are both here, check that they are of one prompt and post what is ready."""
        stage = self._stages.get(serving.offer.key.transfer)
        if stage is None:
            if (withdrawn := self._stages.withdrawn(serving.offer.key.transfer)) is not None:
                self._fail(serving, *withdrawn, now)
            return
        if serving.state is Sending.OFFERED:
            refusal = stage.refusal(serving.offer) or self._landing_refusal(serving)
            if refusal is not None:
                self._fail(serving, *refusal, now)
                return
            self._book.decide(serving, OutcomeEvent.MATCH)
        if serving.state is Sending.MATCHED:
            self._advance(serving, stage, now)

    def _landing_refusal(self, serving: Serving) -> tuple[Outcome, str] | None:
        if not serving.lands:
            return None
        if self._book.customers[serving.peer].cut is None:
            what = "this producer has no staging slots to fill landing slots from: offer blocks"
            return Outcome.REJECTED_GEOMETRY, what
        stuck = self._staging.stuck()
        if starved(stuck, serving.peer, self.slots.count):
            self.counts["refused for want of staging slots"] += 1
            what = (
                f"{sum(stuck.values())} of this producer's {self.slots.count} staging slots wait for proof: fence it"
            )
            return Outcome.REJECTED_BUSY, what
        return None

    def _advance(self, serving: Serving, stage: Stage, now: float) -> None:
        """Post what is computed and not sent; a part once posted never changes."""
        if stage.blocks is None:
            return
        offer, customer = serving.offer, self._book.customers[serving.peer]
        parts, sent = customer.due(serving, stage.computed)
        if sent == serving.reached and not serving.shares and offer.start < offer.stop:
            return
        serving.sent, serving.ahead = sent
        whole = customer.owed(offer.start, offer.stop, offer.stop) if sent.tokens == offer.stop else None
        if serving.lands:
            self._share(serving, [part.spans for part in parts], whole, now)
        else:
            for number, part in enumerate(parts, 1):
                self._post(serving, stage.blocks, part, whole if number == len(parts) else None)
        self._maybe_complete(serving)

    def _post(self, serving: Serving, source: Blocks, part: Part, whole: tuple[Span, ...] | None) -> None:
        offer, number, write = serving.offer, serving.parts, self._book.start_write(serving)
        self._move(serving, SourceEvent.POST)
        complete = Complete(offer.nonce, self.rank, self.epoch, number, part.spans, whole)
        assert isinstance(offer.into, Blocks)
        where = (part.start, part.stop, offer.stop)
        self._out.put(Post(write, serving.peer, offer.key, source, offer.into, *where, complete, part.alone))
