"""Wrong machines, each of which breaks one rule."""

from __future__ import annotations

from dataclasses import dataclass

from pushkv.core.commands import Ended
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Cancel, Complete, Drained, Failed, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Customer, Serving
from pushkv.core.states import OutcomeEvent, Source, SourceEvent, Target, TargetEvent
from pushkv.testing.broken import Rule


class LossReleases(ConsumerMachine):
    """A lost producer's transfers give their blocks back."""

    def peer_lost(self, peer: str, detail: str, now: float) -> None:
        super().peer_lost(peer, detail, now)
        for key in list(self._pairings[peer].open.values()) if peer in self._pairings else ():
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)


class FailedReleases(ConsumerMachine):
    """Failed is taken for proof."""

    def _on_failed(self, peer: str, message: Failed, now: float) -> None:
        super()._on_failed(peer, message, now)
        key = self._pairings[peer].open.get(message.sequence)
        if key is not None and self._transfers[key].ranks[peer].custody is not Target.OFFERED:
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)


class CancelReleases(ConsumerMachine):
    """A transfer that is cancelled gives its blocks back at once."""

    def cancel(self, key: TransferKey, now: float, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        super().cancel(key, now, outcome, detail)
        for peer, rank in self._transfers[key].ranks.items() if key in self._transfers else ():
            if rank.custody is not Target.ENDED:
                self._move(key, peer, TargetEvent.PROVE)
        self._settle(key, now)


class DeadlineReleases(ConsumerMachine):
    """A transfer that expires gives its blocks back."""

    def fire(self, timer: object, now: float) -> None:
        super().fire(timer, now)
        match timer:
            case ("deadline", TransferKey() as key) if key in self._transfers:
                for peer, rank in self._transfers[key].ranks.items():
                    if rank.custody is not Target.ENDED:
                        self._move(key, peer, TargetEvent.PROVE)
                self._settle(key, now)


class DuplicatesCount(ConsumerMachine):
    """A Complete that comes twice counts twice."""

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        key, owner = self._nonces.get(message.nonce, (None, None))
        if key in self._transfers and owner == peer:
            coverage = self._transfers[key].ranks[peer].coverage
            if message.part in coverage.parts and coverage._missing > 0:
                coverage._missing = max(0, coverage._missing - sum(span.area for span in message.spans))
                if coverage.full and self._transfers[key].ranks[peer].custody is not Target.ENDED:
                    self._move(key, peer, TargetEvent.COVER)
                    self._settle(key, now)
                    return
        super()._on_complete(peer, message, now)


class NewEpochProves(ConsumerMachine):
    """A producer that connects proves that no earlier one writes any more."""

    def connected(self, peer: str, now: float) -> None:
        super().connected(peer, now)
        for other, pairing in list(self._pairings.items()):
            if other != peer and not pairing.live:
                self.writes_ended(other, now)


class StuckReleases(ProducerMachine):
    """A WRITE that failed reads no more."""

    def write_failed(
        self, write: int, outcome: Outcome, detail: str, now: float, reached: bool = True
    ) -> None:  # fmt: skip
        super().write_failed(write, outcome, detail, now, reached=False)


class AnswersAtOnce(ProducerMachine):
    """A Cancel is answered with Drained while a WRITE is in flight."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        super()._on_cancel(peer, customer, cancel, now)
        if cancel.sequence in customer.live:
            self._say(peer, Drained(cancel.key, cancel.sequence))


class PreemptsAtOnce(ProducerMachine):
    """A preempted stage's blocks go back while they are read."""

    def preempt(self, transfer: str) -> None:
        self._stages.suspend(transfer)
        self._stages.settle(transfer, True, False)


class ForgetsTheDead(ProducerMachine):
    """A Cancel that overtakes its Offer is answered and forgotten."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        known = cancel.sequence in customer.live
        super()._on_cancel(peer, customer, cancel, now)
        if not known:
            customer.dead.pop(cancel.sequence, None)


class AnyPrompt(ProducerMachine):
    """Prompts are not compared."""

    def _meet(self, serving: Serving, now: float) -> None:
        stage = self._stages.get(serving.offer.key.transfer)
        if stage is not None:
            stage.prompt = serving.offer.prompt
        super()._meet(serving, now)


class LossEndsReading(ProducerMachine):
    """WRITEs to a lost consumer read nothing any more."""

    def peer_lost(self, peer: str, detail: str, now: float) -> None:
        super().peer_lost(peer, detail, now)
        customer = self._book.customers.get(peer)
        for serving in list(customer.live.values()) if customer else ():
            if serving.custody in (Source.DRAINING, Source.STUCK):
                self._book.end_writes(serving)
                self._move(serving, SourceEvent.PROVE)
                self._settle(serving)


class EndsTwice(ProducerMachine):
    """An outcome that follows another is told too."""

    def _over(self, serving: Serving, event: OutcomeEvent, outcome: Outcome, detail: str) -> None:
        super()._over(serving, event, outcome, detail)
        if event is OutcomeEvent.ANSWER:
            self._out.put(Ended(serving.offer.key, outcome, detail))


class NeverAnswers(ProducerMachine):
    """A Cancel of what is over goes unanswered."""

    def _on_cancel(self, peer: str, customer: Customer, cancel: Cancel, now: float) -> None:
        if cancel.sequence in customer.live:
            super()._on_cancel(peer, customer, cancel, now)


@dataclass(frozen=True)
class Mutant:
    """A wrong machine, and the rules by which it may be found out."""

    caught_by: frozenset[Rule]
    producer: type[ProducerMachine] = ProducerMachine
    consumer: type[ConsumerMachine] = ConsumerMachine
    first: int = 0
    """The episode that is tried first; a later one may find it too."""

    @property
    def name(self) -> str:
        """The wrong machine's."""
        return self.consumer.__name__ if self.producer is ProducerMachine else self.producer.__name__


WRITTEN = frozenset({Rule.TARGET, Rule.CANARY, Rule.BYTES})
READ = frozenset({Rule.SOURCE})

MUTANTS = [
    Mutant(WRITTEN, consumer=LossReleases),
    Mutant(WRITTEN, consumer=FailedReleases),
    Mutant(WRITTEN, consumer=CancelReleases),
    Mutant(WRITTEN, consumer=DeadlineReleases),
    Mutant(frozenset({Rule.BYTES}), consumer=DuplicatesCount),
    Mutant(WRITTEN, consumer=NewEpochProves),
    Mutant(READ, producer=StuckReleases),
    Mutant(WRITTEN, producer=AnswersAtOnce),
    Mutant(READ, producer=PreemptsAtOnce),
    Mutant(WRITTEN, producer=ForgetsTheDead),
    Mutant(frozenset({Rule.BYTES}), producer=AnyPrompt),
    Mutant(READ, producer=LossEndsReading),
    Mutant(frozenset({Rule.ONCE}), producer=EndsTwice),
    Mutant(frozenset({Rule.HANGS}), producer=NeverAnswers),
]
