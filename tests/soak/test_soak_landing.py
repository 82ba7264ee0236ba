"""The soak through landing slots: every rule holds, and machines that break one about slots are found out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Complete, TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.ring import LandingRing, Packed
from pushkv.core.states import PackEvent, Slot, SlotEvent
from pushkv.runtime.verifying import Look, Verifying
from pushkv.testing.broken import Broken, Rule
from pushkv.testing.soak.run import Figures, soak

SEED = 20


@pytest.mark.timeout(600)
def test_transfers_through_slots() -> None:
    figures = Figures(SEED)
    soak(figures, 1500, 500, landing=True)
    print(figures.report())
    assert figures.total("late_bytes") > 0, "something has landed late, and in kept slots"
    assert figures.total("quarantined") == figures.total("stuck") == 0, "no block waits for proof"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("landing", [True, False], ids=["slots", "blocks"])
def test_bytes_that_arrive_as_others_never_count(landing: bool) -> None:
    """A transfer fails for them only where there are some, and no slot lets one into a block."""
    figures = Figures(SEED)
    soak(figures, 800, 400, landing=landing, verify=True)
    print(figures.report())
    assert sum(tally.faults["corrupt"] for tally in figures.tallies) > 5


@pytest.mark.timeout(600)
def test_proof_about_slots_alone_is_taken_note_of() -> None:
    """Found by this seed: no event comes of it, and what is published of custody stayed as it was."""
    soak(Figures(11), 500, 500, 4, landing=True, verify=True)


@pytest.mark.timeout(600)
def test_an_endpoint_that_takes_parts_unseen_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Verifying._judge

    def believe(self: Verifying, look: Look, now: float) -> None:
        judge(self, replace(look, complete=msgspec.structs.replace(look.complete, digest=look.digest.value)), now)

    monkeypatch.setattr(Verifying, "_judge", believe)
    figures = Figures(SEED)
    with pytest.raises(Broken) as found:
        soak(figures, 6000, 500, landing=True, verify=True)
    assert found.value.rule is Rule.BYTES, figures.failure


class _FreesOnTime(LandingRing):
    """Takes a slot back when its transfer is over, as if that were proof."""

    def over(self, key: TransferKey) -> None:
        super().over(key)
        for berth in self._of(key):
            if berth.state is Slot.QUARANTINED:
                self._move(berth, SlotEvent.PROVE)


class FreesSlots(ConsumerMachine):
    """Does so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = _FreesOnTime(self.slots)


class ScattersLate(ConsumerMachine):
    """Has what comes for a transfer that is over scattered, and releases blocks without asking for scatters."""

    def _on_landing(self, key: TransferKey, peer: str, message: Complete, now: float) -> None:
        transfer = self._transfers[key]
        state, transfer.state = transfer.state, type(transfer.state)("open")
        super()._on_landing(key, peer, message, now)
        if transfer.outcome is not None:
            transfer.state = state


class CompleteOnArrival(ConsumerMachine):
    """Completes when everything is in its slots."""

    def _on_landing(self, key: TransferKey, peer: str, message: Complete, now: float) -> None:
        super()._on_landing(key, peer, message, now)
        scattering, self._ring.scattering = self._ring.scattering, lambda *_: False  # type: ignore[method-assign]
        self._landed(key, peer, now)
        self._settle(key, now)
        self._ring.scattering = scattering  # type: ignore[method-assign]


class ReusesStaging(ProducerMachine):
    """Takes a staging slot for free once its WRITE is posted."""

    def _slot_written(self, write: int, reached: bool | None, now: float) -> None:
        pass

    def _post_slot(self, serving: object, packed: Packed) -> None:
        super()._post_slot(serving, packed)  # type: ignore[arg-type]
        self._staging.move(packed, PackEvent.DONE)
        self._gather(0.0)


class ForgetsGathers(ProducerMachine):
    """Releases a stage's blocks although a gather reads them."""

    def _settle_stage(self, transfer: str) -> None:
        reads, self._staging.reads = self._staging.reads, lambda _: False  # type: ignore[method-assign]
        super()._settle_stage(transfer)
        self._staging.reads = reads  # type: ignore[method-assign]


@dataclass(frozen=True)
class Mutant:
    caught_by: frozenset[Rule]
    first: int = 0
    """The episode that it is looked for from: the first in which it is found."""
    consumer: type[ConsumerMachine] = ConsumerMachine
    producer: type[ProducerMachine] = ProducerMachine


MUTANTS = {
    "frees slots": Mutant(frozenset({Rule.TARGET}), consumer=FreesSlots),
    "scatters late": Mutant(frozenset({Rule.BYTES, Rule.CANARY}), consumer=ScattersLate),
    "complete on arrival": Mutant(frozenset({Rule.BYTES, Rule.CANARY}), consumer=CompleteOnArrival),
    "reuses staging": Mutant(frozenset({Rule.SOURCE}), producer=ReusesStaging),
    "forgets gathers": Mutant(frozenset({Rule.BYTES}), 1, producer=ForgetsGathers),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_that_breaks_a_rule_about_slots_is_found_out(name: str) -> None:
    mutant, figures = MUTANTS[name], Figures(SEED)
    with pytest.raises(Broken) as found:
        soak(figures, 6000, 500, mutant.first, landing=True, producer=mutant.producer, consumer=mutant.consumer)
    assert found.value.rule in mutant.caught_by, figures.failure
