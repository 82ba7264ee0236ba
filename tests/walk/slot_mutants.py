"""Machines that are wrong about slots."""

from __future__ import annotations

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Complete, Credit, Grant, TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.ring import Berth, LandingRing, Packed
from pushkv.core.sending import Serving
from pushkv.core.states import PackEvent, Sending, Slot, SlotEvent, Target


class _Eager(LandingRing):
    def over(self, key: TransferKey) -> None:
        super().over(key)
        for berth in self._of(key):
            if berth.state is Slot.QUARANTINED:
                self._move(berth, SlotEvent.PROVE)


class _Blind(LandingRing):
    def find(self, credit: Credit, peer: str, key: TransferKey, part: int) -> Berth | None:
        berth = self._berths.get(credit.slot)
        return berth if berth is not None and berth.state in (Slot.GRANTED, Slot.QUARANTINED) else None


class _Generous(LandingRing):
    def scattered(self, slot: int, generation: int) -> Berth | None:
        berth = super().scattered(slot, generation)
        if berth is not None:
            self.pool.give(slot)
        return berth


class GrantsBeforeProof(ConsumerMachine):
    """A slot is free for others when its transfer is over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = _Eager(self.slots)


class CreditUnchecked(ConsumerMachine):
    """What comes with a slot's number is taken for what the slot was granted for, whatever its generation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = _Blind(self.slots)


class CountsSlotsTwice(ConsumerMachine):
    """A slot is given back by its scatter's end, and once more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = _Generous(self.slots)


class ReleasesUnderScatter(ConsumerMachine):
    """Blocks are released when their transfer is over, although a scatter writes into them."""

    def _settle(self, key: TransferKey, now: float) -> None:
        scattering, self._ring.scattering = self._ring.scattering, lambda *_: False  # type: ignore[method-assign]
        super()._settle(key, now)
        del self._ring.scattering
        assert scattering


class CompleteOnArrival(ConsumerMachine):
    """A transfer is complete when all of it is in slots."""

    def _on_landing(self, key: TransferKey, peer: str, message: Complete, now: float) -> None:
        super()._on_landing(key, peer, message, now)
        self._ring.scattering = lambda *_: False  # type: ignore[method-assign]
        self._landed(key, peer, now)
        del self._ring.scattering
        self._settle(key, now)


class KeepsBlocks(ConsumerMachine):
    """Blocks wait for the producer's word, as if it could reach them."""

    def _settle(self, key: TransferKey, now: float) -> None:
        transfer = self._transfers.get(key)
        ranks = [] if transfer is None else list(transfer.ranks.values())
        if all(rank.custody is Target.ENDED for rank in ranks):
            super()._settle(key, now)


class OneCreditForAll(ProducerMachine):
    """A credit is good for every part that waits for one."""

    def _on_grant(self, peer: str, grant: Grant) -> None:
        serving = self._book.find(peer, grant.sequence)
        for write in sorted(serving.unposted) if serving is not None and serving.state is Sending.MATCHED else ():
            packed = self._staging.find(write)
            if packed is not None:
                super()._on_grant(peer, Grant(grant.sequence, packed.complete.part, grant.credit))


class StagingFreeOnPost(ProducerMachine):
    """A staging slot is taken for the next part once its WRITE is posted."""

    def _slot_written(self, write: int, reached: bool | None, now: float) -> None:
        pass

    def _post_slot(self, serving: Serving, packed: Packed) -> None:
        super()._post_slot(serving, packed)
        self._staging.move(packed, PackEvent.DONE)
        self._gather(0.0)


class ForgetsGathers(ProducerMachine):
    """Source blocks are given back although a gather reads them."""

    def _settle_stage(self, transfer: str) -> None:
        self._staging.reads = lambda _: False  # type: ignore[method-assign]
        super()._settle_stage(transfer)
        del self._staging.reads


class AsksOnce(ProducerMachine):
    """A Ready is said once."""

    def _say_ready(self, serving: Serving, now: float) -> None:
        super()._say_ready(serving, now)
        self.timers.cancel(("ready", serving.peer, serving.offer.sequence))
