"""Outcome and custody of the transfers that a consumer has open: what is said for each, how it ends, what is proof.

The base of :class:`pushkv.core.consumer.ConsumerMachine`, which decides what to do; here is what that comes to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pushkv.core.commands import AskProof, Command, Ended, Released, Send
from pushkv.core.keeping import Keeping
from pushkv.core.limits import Limits
from pushkv.core.messages import Cancel, Grant, Offer, Renew, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import OrderAtRank, Pairing, Transfer, random_nonce
from pushkv.core.ring import Berth, LandingRing, SlotPool
from pushkv.core.states import RECEIVING, TARGET, OutcomeEvent, Receiving, Target, TargetEvent, step
from pushkv.core.timers import Timers


@dataclass
class Recipient(Keeping):
    """What one consumer rank knows of every transfer.

    ``counts`` tallies what was dropped and why. ``slots`` are the landing ring's; none where it has no ring.
    """

    limits: Limits = field(default_factory=Limits)
    nonce: Callable[[TransferKey, str], bytes] = random_nonce
    timers: Timers = field(default_factory=Timers)
    counts: Counter[str] = field(default_factory=Counter)
    slots: SlotPool = field(default_factory=lambda: SlotPool(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ring = LandingRing(self.slots)
        self._pairings: dict[str, Pairing] = {}
        self._nonces: dict[bytes, tuple[TransferKey, str]] = {}
        self._newest: dict[tuple[str, str, str, int], TransferKey] = {}
        self._gone: set[str] = set()
        self._commands: list[Command] = []

    # What is said

    def _is_live(self, peer: str) -> bool:
        pairing = self._pairings.get(peer)
        return pairing is not None and pairing.live

    def _pump(self, peer: str, now: float) -> None:
        """Send queued offers while the window has room."""
        pairing = self._pairings.get(peer)
        while pairing is not None and pairing.live and pairing.queue and pairing.has_room:
            key = pairing.queue.popleft()
            transfer = self._transfers.get(key)
            if transfer is None or transfer.ranks[peer].custody is not Target.QUEUED:
                continue
            rank = transfer.ranks[peer]
            rank.floor, rank.sequence = pairing.floor, pairing.number(key)
            self._move(key, peer, TargetEvent.SEND)
            if transfer.declined:
                self._move(key, peer, TargetEvent.STOP)
                self._send_cancel(key, peer, now)
            else:
                self._send_offer(transfer, peer, now)
            if ("renew", peer) not in self.timers:
                self.timers.set(("renew", peer), now + self.limits.renew)

    def _send_offer(self, transfer: Transfer, peer: str, now: float) -> None:
        order, rank = transfer.order, transfer.ranks[peer]
        offer = Offer(
            order.key, rank.sequence, rank.floor, rank.nonce, order.prompt, order.prompt_tokens, order.start,
            order.stop, order.into, max(0.0, transfer.deadline - now), self.limits.lease,
            order.siblings.get(peer, 0),
        )  # fmt: skip
        self._say(peer, offer, rank.tries)
        self.timers.set(("resend", order.key, peer), now + self.limits.resend_wait(rank.tries))

    def _send_cancel(self, key: TransferKey, peer: str, now: float) -> None:
        transfer = self._transfers[key]
        rank = transfer.ranks[peer]
        outcome = transfer.outcome or Outcome.CANCELLED
        self._say(peer, self._cancel(key, rank, peer, outcome), rank.tries)
        self.timers.set(("resend", key, peer), now + self.limits.resend_wait(rank.tries))

    def _cancel(self, key: TransferKey, rank: OrderAtRank, peer: str, outcome: Outcome) -> Cancel:
        return Cancel(key, rank.sequence, outcome, self._transfers[key].order.siblings.get(peer, 0))

    def _say(self, peer: str, message: Offer | Cancel | Renew | Grant, tries: int = 0) -> None:
        self._commands.append(Send(peer, message, insist=tries >= self.limits.insist_after))

    def _resend(self, key: TransferKey, peer: str, now: float) -> None:
        transfer = self._transfers.get(key)
        if transfer is None or not self._is_live(peer):
            return
        rank = transfer.ranks[peer]
        rank.tries = min(rank.tries + 1, self.limits.most_tries())
        if rank.custody is Target.OFFERED and not rank.acked:
            self._send_offer(transfer, peer, now)
        elif rank.custody is Target.DRAINING:
            self._send_cancel(key, peer, now)

    def _renew(self, peer: str, now: float) -> None:
        pairing = self._pairings.get(peer)
        if pairing is None or not pairing.live or not pairing.open:
            return
        self._say(peer, Renew(pairing.floor, self.limits.lease))
        self.timers.set(("renew", peer), now + self.limits.renew)

    def _seek_proof(self, peer: str, now: float) -> None:
        """Ask the transport about quarantined blocks, and the producer too where it can still be heard."""
        pairing = self._pairings.get(peer)
        waiting = [] if pairing is None else self._quarantined(pairing, peer)
        if pairing is None or not waiting:
            return
        self._commands.append(AskProof(peer))
        if pairing.live:
            for key, rank in waiting:
                outcome = self._transfers[key].outcome or Outcome.CANCELLED
                self._say(peer, self._cancel(key, rank, peer, outcome))
        self.timers.set(("proof", peer), now + self.limits.ask_proof)

    def _quarantined(self, pairing: Pairing, peer: str) -> list[tuple[TransferKey, OrderAtRank]]:
        ranks = ((key, self._transfers[key].ranks[peer]) for key in pairing.open.values())
        return [(key, rank) for key, rank in ranks if rank.custody is Target.QUARANTINED]

    # Landing slots

    def _grant(self, now: float) -> None:
        """Grant landing slots while there are any."""
        for berth in self._ring.grants():
            self._say_grant(berth)
        if self._ring.dry and ("ring",) not in self.timers:  # an earlier life may give slots back
            self.timers.set(("ring",), now + self.limits.ask_proof)

    def _say_grant(self, berth: Berth) -> None:
        sequence = self._transfers[berth.key].ranks[berth.peer].sequence
        self._say(berth.peer, Grant(sequence, berth.part, berth.credit))

    def _landed(self, key: TransferKey, peer: str, now: float) -> None:
        """A scatter of this rank's has ended: the rank is done when all it owes is in the blocks."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        rank = transfer.ranks[peer]
        if transfer.state is not Receiving.OPEN or not rank.coverage.full or self._ring.scattering(key, peer):
            return
        if self._ring.due(peer, key):
            self._finish(key, Outcome.REJECTED_GEOMETRY, f"{peer} wants more slots than it fills", now)
        else:
            self._move(key, peer, TargetEvent.COVER)

    # Outcome and custody

    def _finish(self, key: TransferKey, outcome: Outcome, detail: str, now: float, lost: str | None = None) -> None:
        """Give a transfer its outcome, unless it has one, and stop every rank that may still write."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        if transfer.state is Receiving.OPEN:
            transfer.state = step(RECEIVING, transfer.state, OutcomeEvent.FAIL)
            self._end(transfer, outcome, detail)
        self._ring.over(key)
        for peer, rank in transfer.ranks.items():
            if peer == lost and rank.custody not in (Target.ENDED, Target.QUARANTINED):
                self._move(key, peer, TargetEvent.LOSE)
                if transfer.declined:
                    self._move(key, peer, TargetEvent.PROVE)
            elif rank.custody is Target.QUEUED:
                self._move(key, peer, TargetEvent.STOP)
            elif rank.custody is Target.OFFERED:
                self._move(key, peer, TargetEvent.STOP)
                rank.tries = 0
                self._send_cancel(key, peer, now)
        self._settle(key, now)

    def _end(self, transfer: Transfer, outcome: Outcome, detail: str) -> None:
        transfer.outcome = outcome
        self.timers.cancel(("deadline", transfer.order.key))
        self._commands.append(Ended(transfer.order.key, outcome, detail))

    def _move(self, key: TransferKey, peer: str, event: TargetEvent) -> None:
        transfer = self._transfers[key]
        rank = transfer.ranks[peer]
        rank.custody = step(TARGET, rank.custody, event)
        if rank.custody in (Target.ENDED, Target.QUARANTINED):
            self.timers.cancel(("resend", key, peer))
        if rank.custody is Target.ENDED:
            self._ring.proven(peer, key)
            self._pairings[peer].close(rank.sequence, transfer.outcome if event is TargetEvent.COVER else None)

    def _settle(self, key: TransferKey, now: float) -> None:
        """Complete a transfer that is covered from every rank, release its blocks, forget it once custody has ended.

        Blocks are released with the last custody; where parts land in slots, once it is over and nothing scatters.
        """
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        ended = all(rank.custody is Target.ENDED for rank in transfer.ranks.values())
        if ended and transfer.state is Receiving.OPEN:
            transfer.state = step(RECEIVING, transfer.state, OutcomeEvent.ALL_HERE)
            self._end(transfer, Outcome.COMPLETE, "")
        out_of_reach = ended or (transfer.lands and transfer.state is Receiving.OVER)
        if out_of_reach and not transfer.released and not self._ring.scattering(key):
            transfer.released = True
            self._held.give_back(transfer.blocks)
            transfer.blocks = []
            self._commands.append(Released(key))
        if ended and transfer.released:
            self._forget(transfer, now)
        self._grant(now)

    def _forget(self, transfer: Transfer, now: float) -> None:
        key = transfer.order.key
        del self._transfers[key]
        if self._newest.get(key.base) == key:
            del self._newest[key.base]
        for peer, rank in transfer.ranks.items():
            del self._nonces[rank.nonce]
            self._pump(peer, now)
