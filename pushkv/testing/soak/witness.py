"""What the soak learns from the machines themselves: which offers were taken in, and how each ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pushkv.core.messages import Offer, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Customer, Serving
from pushkv.core.states import OutcomeEvent, Sending


@dataclass
class Served:
    """One offer at one producer. ``alone``: it ended without the consumer's word."""

    producer: str
    key: TransferKey
    outcome: Outcome | None = None
    alone: bool = False


class Witness(ProducerMachine):
    """A producer's machine that tells which offers it takes in, and by what each ends."""

    admitted: Callable[[TransferKey], None]
    decided: Callable[[TransferKey, bool], None]

    def _admit(self, peer: str, customer: Customer, offer: Offer, now: float) -> None:
        self.admitted(offer.key)
        super()._admit(peer, customer, offer, now)

    def _over(self, serving: Serving, event: OutcomeEvent, outcome: Outcome, detail: str) -> None:
        if serving.state is not Sending.OVER:
            self.decided(serving.offer.key, event is OutcomeEvent.END)
        super()._over(serving, event, outcome, detail)


def witnessed(machine: type[ProducerMachine]) -> type[Any]:
    """A machine, perhaps a mutant, that tells."""
    return type(f"Witnessed{machine.__name__}", (Witness, machine), {})
