"""Consumers that are wrong about several producer ranks: what one rank says or does is taken for all of them."""

from __future__ import annotations

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Complete, Drained, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.states import Target, TargetEvent


class FirstProofIsAll(ConsumerMachine):
    """What one rank proves ends the custody of all of them."""

    def _settle(self, key: TransferKey, now: float) -> None:
        transfer = self._transfers.get(key)
        ranks = {} if transfer is None else transfer.ranks
        proven = any(rank.custody is Target.ENDED for rank in ranks.values())
        for peer, rank in ranks.items():
            if proven and rank.custody in (Target.DRAINING, Target.QUARANTINED):
                self._move(key, peer, TargetEvent.PROVE)
        super()._settle(key, now)


class CoveredByOne(ConsumerMachine):
    """A transfer is complete when one rank has sent all that it owes; the others' custody goes on."""

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        super()._on_complete(peer, message, now)
        key, owner = self._nonces.get(message.nonce, (None, None))
        if key is not None and owner == peer and self._transfers[key].ranks[peer].coverage.full:
            self._finish(key, Outcome.COMPLETE, "", now)


class StopsOneRank(ConsumerMachine):
    """The end of a transfer is told to the first rank that it was offered to, and to no other."""

    def _first(self, key: TransferKey) -> str:
        return next(iter(self._transfers[key].ranks))

    def _move(self, key: TransferKey, peer: str, event: TargetEvent) -> None:
        if event is not TargetEvent.STOP or peer == self._first(key):
            super()._move(key, peer, event)

    def _send_cancel(self, key: TransferKey, peer: str, now: float) -> None:
        if peer == self._first(key):
            super()._send_cancel(key, peer, now)


class LossStopsTheOthers(ConsumerMachine):
    """When a rank is lost, what the others owed is taken for stopped."""

    def _finish(self, key: TransferKey, outcome: Outcome, detail: str, now: float, lost: str | None = None) -> None:
        super()._finish(key, outcome, detail, now, lost)
        transfer = self._transfers.get(key)
        for peer, rank in transfer.ranks.items() if transfer is not None and lost is not None else ():
            if rank.custody is Target.DRAINING:
                self._move(key, peer, TargetEvent.PROVE)
        self._settle(key, now)


class OneSayForAll(ConsumerMachine):
    """Drained is taken from whichever rank it comes."""

    def _on_drained(self, peer: str, message: Drained, now: float) -> None:
        for other in list(self._pairings):
            if message.sequence in self._pairings[other].open:
                super()._on_drained(other, message, now)
