"""Wrong machines and a wrong transport: each breaks one rule, and the walk must find it.

A to F are the variants of an early draft of the protocol in which small models found holes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Cancel, Complete, Drained, Failed, Offer, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.receiving import Held, OrderAtRank
from pushkv.core.sending import Customer, Serving
from pushkv.core.span import Coverage, Span
from pushkv.core.states import Receiving, Sending, Target, TargetEvent
from walk.layer_mutants import BegunIsComputed, LayersAreTokens, SendsBegunAgain
from walk.rank_mutants import CoveredByOne, FirstProofIsAll, LossStopsTheOthers, OneSayForAll, StopsOneRank
from walk.rules import Rules
from walk.search import Walked, hunt
from walk.slot_mutants import (
    AsksOnce,
    CompleteOnArrival,
    CountsSlotsTwice,
    CreditUnchecked,
    ForgetsGathers,
    GrantsBeforeProof,
    KeepsBlocks,
    OneCreditForAll,
    ReleasesUnderScatter,
    StagingFreeOnPost,
)
from walk.world import Bounds

CUSTODY, SOURCES, COVERED = "custody ends on proof", "sources are held", "complete means covered"
COMPUTED = "sent once computed"
ONCE, POSTED, HANGS = "one outcome", "posted once", "nothing hangs"
AGREE, SUPERSEDED = "agreement", "superseded"
SCATTERED, BACK, COUNTED = "scattered as landed", "blocks come back", "slots are counted"

QUIET = Bounds(attempts=1, parts=1, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False, losses=False)
ERRORS = Bounds(attempts=1, parts=1, p_restarts=0, c_restarts=0, preemptions=0, losses=False)
LOSSES = Bounds(attempts=1, parts=1, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False)
PARTS = Bounds(attempts=1, parts=2, p_restarts=0, c_restarts=0, write_errors=False, losses=False)
RETRY = Bounds(attempts=2, parts=1, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False, losses=False)
RETRY_PARTS = Bounds(attempts=2, parts=2, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False, losses=False)
RANKS = Bounds(
    attempts=1, parts=1, ranks=2, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False, losses=False
)
RANKS_LOST = Bounds(attempts=1, parts=1, ranks=2, p_restarts=0, c_restarts=0, preemptions=0, write_errors=False)
LANDS = replace(QUIET, slots=1)
SLOTS = replace(QUIET, slots=2, staging=2, slot_tokens=1)
ONE_SLOT = replace(SLOTS, slots=1, staging=1)
LAYERS = Bounds(
    attempts=1, parts=2, layers=2, p_restarts=0, c_restarts=0, write_errors=False, losses=False, cancels=False
)
TCP = Bounds(attempts=1, parts=1, c_restarts=0, preemptions=0, write_errors=False, losses=False, death_is_proof=True)


@dataclass(frozen=True)
class Mutant:
    """One broken rule, the bounds in which it shows, and the invariant that must catch it."""

    name: str
    rule: str
    caught_by: str
    bounds: Bounds
    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine

    def hunt(self) -> Walked:
        """Walk until it is caught."""
        rules = type("Mutated", (Rules,), {"producer": self.producer, "consumer": self.consumer})
        return hunt(rules(self.bounds, exact=True))


# Variants A to F


class NoTombstone(ProducerMachine):
    """A Cancel that overtakes its Offer is answered and forgotten."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        if cancel.sequence in customer.live:
            super()._on_cancel(peer, customer, cancel, now)
        else:
            self._say(peer, Drained(cancel.key, cancel.sequence))


class EvictedTombstone(ProducerMachine):
    """That a Cancel came before its Offer is remembered until the next prompt is staged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._early: set[tuple[str, int]] = set()

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        if customer.may_start(cancel.sequence):
            self._early.add((peer, cancel.sequence))
        super()._on_cancel(peer, customer, cancel, now)

    def stage(self, *args: Any, **kwargs: Any) -> None:
        for peer, sequence in self._early:
            self._book.customers[peer].dead.pop(sequence, None)
        super().stage(*args, **kwargs)


class FailedIsProof(ConsumerMachine):
    """Failed ends custody."""

    def _on_failed(self, peer: str, message: Failed, now: float) -> None:
        super()._on_failed(peer, message, now)
        if message.sequence in self._pairings[peer].open:
            self._move(message.key, peer, TargetEvent.DRAIN)
            self._settle(message.key, now)


class LossIsProof(ConsumerMachine):
    """A producer that cannot be reached writes no more."""

    def peer_lost(self, peer: str, detail: str, now: float) -> None:
        super().peer_lost(peer, detail, now)
        for key in list(self._pairings[peer].open.values()):
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)


class LossAndLeaseIsProof(ConsumerMachine):
    """A producer that cannot be reached writes no more once its lease is over by the consumer's clock."""

    def _seek_proof(self, peer: str, now: float) -> None:
        for key in list(self._pairings[peer].open.values()):
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)


# Custody of target blocks


class DrainedByKey(ConsumerMachine):
    """Drained is taken for whatever is offered now, whichever offer it speaks of."""

    def _on_drained(self, peer: str, message: Drained, now: float) -> None:
        for sequence, key in list(self._pairings[peer].open.items()):
            if self._transfers[key].ranks[peer].custody is not Target.OFFERED:
                super()._on_drained(peer, Drained(key, sequence), now)


class DeadlineEndsCustody(ConsumerMachine):
    """A transfer that expires gives its blocks back."""

    def fire(self, timer: object, now: float) -> None:
        super().fire(timer, now)
        match timer:
            case ("deadline", TransferKey() as key):
                for peer in list(self._transfers[key].ranks) if key in self._transfers else ():
                    self._move(key, peer, TargetEvent.PROVE)
                    self._settle(key, now)


class CancelEndsCustody(ConsumerMachine):
    """A transfer that the engine cancels gives its blocks back."""

    def cancel(self, key: TransferKey, now: float, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        super().cancel(key, now, outcome, detail)
        for peer in list(self._transfers[key].ranks) if key in self._transfers else ():
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)


class _AnyBlock(Held):
    def check(self, key: TransferKey, blocks: list[frozenset[int]]) -> None:
        pass


class OffersHeldBlocks(ConsumerMachine):
    """A retry takes the blocks of the attempt before it, although that lacks proof."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held = _AnyBlock()


class AnswersAtOnce(ProducerMachine):
    """Drained is said although a WRITE is in flight."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        super()._on_cancel(peer, customer, cancel, now)
        self._say(peer, Drained(cancel.key, cancel.sequence))


class PostsAfterDrained(ProducerMachine):
    """A cancelled offer that has met no stage is answered, and left where it was."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        serving = customer.live.get(cancel.sequence)
        if serving is not None and serving.state is Sending.OFFERED:
            self._say(peer, Drained(cancel.key, cancel.sequence))
        else:
            super()._on_cancel(peer, customer, cancel, now)


class FloorForgets(ProducerMachine):
    """The floor clears what must never be started, and does not refuse what is below it."""

    def _on_offer(self, peer: str, customer: Customer, offer: Offer, now: float) -> None:
        floor, customer.floor = customer.floor, 0
        super()._on_offer(peer, customer, offer, now)
        customer.floor = floor


# Custody of source blocks


class StuckIsDone(ProducerMachine):
    """A failed WRITE reads its blocks no more."""

    def write_failed(self, write: int, outcome: Outcome, detail: str, now: float, reached: bool = True) -> None:
        super().write_failed(write, outcome, detail, now, reached=False)


class PreemptReleases(ProducerMachine):
    """A preempted stage gives its blocks back at once."""

    def preempt(self, transfer: str) -> None:
        self._stages.suspend(transfer)
        self._stages.settle(transfer, wanted=True, reading=False)


class OneSiblingEndsAll(ProducerMachine):
    """The end of one WRITE is taken for the end of all of its transfer."""

    def _read_ended(self, serving: Serving) -> None:
        self._book.end_writes(serving)
        super()._read_ended(serving)


# Parts and coverage


class SendsAgain(ProducerMachine):
    """A preempted producer begins again from the first token."""

    def preempt(self, transfer: str) -> None:
        super().preempt(transfer)
        for serving in self._book.of(transfer):
            serving.sent = serving.offer.start


class _Counting(Coverage):
    __slots__ = ()

    def add(self, part: int, spans: tuple[Span, ...], whole: tuple[Span, ...] | None = None) -> bool:
        self.parts[part] = spans
        self._missing -= sum(span.area for span in spans)
        return True


class CountsDuplicates(ConsumerMachine):
    """A part that comes twice counts twice."""

    def offer(self, order: Any, now: float) -> None:
        super().offer(order, now)
        for rank in self._transfers[order.key].ranks.values():
            rank.coverage = _Counting(rank.coverage.owed)


class LastPartIsAll(ConsumerMachine):
    """The part that names the whole completes the transfer."""

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        key, _ = self._nonces.get(message.nonce, (None, None))
        if key is None or message.whole is None or self._rank(key, peer).custody is Target.ENDED:
            super()._on_complete(peer, message, now)
            return
        self._move(key, peer, TargetEvent.COVER)
        self._settle(key, now)

    def _rank(self, key: TransferKey, peer: str) -> OrderAtRank:
        return self._transfers[key].ranks[peer]


class NonceUnchecked(ConsumerMachine):
    """A Complete counts for the newest offer to its sender, whatever its nonce."""

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        newest = [key for key in self._pairings[peer].open.values() if self._transfers[key].state is Receiving.OPEN]
        for key in newest[-1:]:
            nonce = self._transfers[key].ranks[peer].nonce
            message = Complete(nonce, 0, peer, message.part, message.spans, message.whole)
        super()._on_complete(peer, message, now)


# Outcomes, retries and waiting


class PostsSuperseded(ProducerMachine):
    """An earlier attempt is served on beside the later one."""

    def _fail(self, serving: Serving, outcome: Outcome, detail: str, now: float) -> None:
        if outcome is not Outcome.SUPERSEDED:
            super()._fail(serving, outcome, detail, now)


class EndsTwice(ConsumerMachine):
    """A transfer that is over takes another outcome."""

    def cancel(self, key: TransferKey, now: float, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        if key in self._transfers:
            self._transfers[key].state = Receiving.OPEN
        super().cancel(key, now, outcome, detail)


class CancelOnce(ConsumerMachine):
    """A Cancel is not repeated."""

    def _send_cancel(self, key: TransferKey, peer: str, now: float) -> None:
        super()._send_cancel(key, peer, now)
        self.timers.cancel(("resend", key, peer))


class AsksNobody(ProducerMachine):
    """A failed WRITE ends its transfer although the consumer may have it all."""

    def _fail(self, serving: Serving, outcome: Outcome, detail: str, now: float) -> None:
        super()._fail(serving, outcome, detail, now)
        self.receive(serving.peer, Cancel(serving.offer.key, serving.offer.sequence, outcome), now)


class LateCancelEndsStage(ProducerMachine):
    """The end of an earlier attempt ends the stage that a later one is served from."""

    def _settle_stage(self, transfer: str) -> None:
        self._stages.settle(transfer, False, self._book.reads(transfer))
        super()._settle_stage(transfer)


class NoProofSought(ProducerMachine):
    """Nobody asks whether a failed WRITE has ended."""

    def write_failed(self, write: int, outcome: Outcome, detail: str, now: float, reached: bool = True) -> None:
        super().write_failed(write, outcome, detail, now, reached)
        for peer in self._book.customers:
            self.timers.cancel(("proof", peer))


MUTANTS = (
    Mutant("A", "rule 6: a Cancel that overtakes its Offer kills it", CUSTODY, QUIET, NoTombstone),
    Mutant("B", "rules 6 and 9: what must not start is never evicted", CUSTODY, RETRY, EvictedTombstone),
    Mutant("C", "rule 1: Failed is no proof", CUSTODY, QUIET, consumer=FailedIsProof),
    Mutant("D", "rule 1: loss is no proof", CUSTODY, LOSSES, consumer=LossIsProof),
    Mutant("E", "rule 1: a lease never frees", CUSTODY, LOSSES, consumer=LossAndLeaseIsProof),
    Mutant("F", "rule 1: over tcp, death alone is no proof", CUSTODY, TCP),
    Mutant("drained by key", "rule 6: Drained speaks of one offer", CUSTODY, RETRY, consumer=DrainedByKey),
    Mutant("deadline", "rule 3: an outcome does not end custody", CUSTODY, QUIET, consumer=DeadlineEndsCustody),
    Mutant("cancel", "rule 3: a Cancel does not end custody", CUSTODY, QUIET, consumer=CancelEndsCustody),
    Mutant("held blocks", "rule 5: no block is offered twice", CUSTODY, RETRY, consumer=OffersHeldBlocks),
    Mutant("answers at once", "rule 1: Drained means no WRITE in flight", CUSTODY, QUIET, AnswersAtOnce),
    Mutant("posts on", "rule 1: Drained means none will be posted", CUSTODY, QUIET, PostsAfterDrained),
    Mutant("floor forgets", "rule 6: nothing below the floor starts", CUSTODY, RETRY, FloorForgets),
    Mutant("stuck is done", "rule 2: a failed WRITE may still read", SOURCES, ERRORS, StuckIsDone),
    Mutant("preempt", "rule 2: a preempted stage is held", SOURCES, PARTS, PreemptReleases),
    Mutant("one sibling", "rule 2: held until the last WRITE ends", SOURCES, PARTS, OneSiblingEndsAll),
    Mutant("sends again", "rule 4: a part is posted once", POSTED, PARTS, SendsAgain),
    Mutant("counts twice", "rule 4: coverage is not a count", COVERED, PARTS, consumer=CountsDuplicates),
    Mutant("last is all", "rule 4: all parts, not the last", COVERED, PARTS, consumer=LastPartIsAll),
    Mutant("nonce", "rule 4: a late Complete is a stray", COVERED, RETRY, consumer=NonceUnchecked),
    Mutant("superseded", "rule 3: an attempt ends the one before", SUPERSEDED, RETRY, PostsSuperseded),
    Mutant("ends twice", "rule 3: one outcome", ONCE, QUIET, consumer=EndsTwice),
    Mutant("cancel once", "rule 6: Cancel is resent", HANGS, QUIET, consumer=CancelOnce),
    Mutant("asks nobody", "rule 3: the sides agree where they can", AGREE, ERRORS, AsksNobody),
    Mutant("late cancel", "rule 3: an earlier attempt's end is its own", HANGS, RETRY_PARTS, LateCancelEndsStage),
    Mutant("no proof sought", "rules 1 and 2: somebody asks for proof", HANGS, ERRORS, NoProofSought),
    Mutant("begun", "rule 4: a part is of what is computed", COMPUTED, LAYERS, BegunIsComputed),
    Mutant("begun again", "rule 4: a layer is posted once", POSTED, LAYERS, SendsBegunAgain),
    Mutant("layers", "rule 4: all layers, of every token", COVERED, LAYERS, consumer=LayersAreTokens),
    Mutant("first proof", "rule 1: proof from every rank", CUSTODY, RANKS, consumer=FirstProofIsAll),
    Mutant("drained for all", "rule 1: Drained speaks of one rank", CUSTODY, RANKS, consumer=OneSayForAll),
    Mutant("loss for all", "rule 1: a rank's loss stops no other", CUSTODY, RANKS_LOST, consumer=LossStopsTheOthers),
    Mutant("covered by one", "rule 4: covered from every rank", COVERED, RANKS, consumer=CoveredByOne),
    Mutant("stops one rank", "rule 3: one outcome over all ranks", HANGS, RANKS, consumer=StopsOneRank),
    Mutant("slot frees", "rule 1: a slot is granted again on proof", CUSTODY, LANDS, consumer=GrantsBeforeProof),
    Mutant("any credit", "rule 5: a credit fits exactly", SCATTERED, ONE_SLOT, consumer=CreditUnchecked),
    Mutant("gives twice", "rule 9: a slot is given back once", COUNTED, LANDS, consumer=CountsSlotsTwice),
    Mutant("under scatter", "rule 1: blocks wait for scatters", CUSTODY, LANDS, consumer=ReleasesUnderScatter),
    Mutant("on arrival", "rule 3: complete when scattered", COVERED, LANDS, consumer=CompleteOnArrival),
    Mutant("keeps blocks", "rule 1: blocks wait for nothing else", BACK, LANDS, consumer=KeepsBlocks),
    Mutant("one credit", "rule 4: a credit is good for one part", CUSTODY, SLOTS, OneCreditForAll),
    Mutant("staging frees", "rule 2: a slot is held while a WRITE reads it", SOURCES, ONE_SLOT, StagingFreeOnPost),
    Mutant("gathers", "rule 2: blocks are held while a gather reads them", SOURCES, LANDS, ForgetsGathers),
    Mutant("asks once", "rule 6: Ready is resent", HANGS, LANDS, AsksOnce),
)

__all__ = ["MUTANTS", "Mutant"]
