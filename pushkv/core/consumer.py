"""The consumer's protocol machine: offers, arrivals, outcomes and the custody of target blocks.

Sans-IO: every method takes ``now`` in seconds and leaves commands to be taken by :meth:`ConsumerMachine.commands`.
Peers are named by the producer's agent name, which contains its epoch. The runtime has checked the pair's token
before a message gets here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pushkv.core.commands import AskProof, Command, Ended, Released, Send
from pushkv.core.keeping import Keeping
from pushkv.core.limits import Limits
from pushkv.core.messages import (
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Offer,
    Ready,
    Renew,
    ToConsumer,
    TransferKey,
)
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order, OrderAtRank, Pairing, Transfer, block_sets, declined, random_nonce
from pushkv.core.span import Coverage
from pushkv.core.states import RECEIVING, TARGET, OutcomeEvent, Receiving, Target, TargetEvent, step
from pushkv.core.timers import Timers
from pushkv.errors import ProtocolError


@dataclass
class ConsumerMachine(Keeping):
    """One consumer rank's side of every transfer it has open.

    ``counts`` tallies what was dropped and why.
    """

    limits: Limits = field(default_factory=Limits)
    nonce: Callable[[TransferKey, str], bytes] = random_nonce
    timers: Timers = field(default_factory=Timers)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pairings: dict[str, Pairing] = {}
        self._nonces: dict[bytes, tuple[TransferKey, str]] = {}
        self._newest: dict[tuple[str, str, str, int], TransferKey] = {}
        self._gone: set[str] = set()
        self._commands: list[Command] = []

    # What the engine asks

    def offer(self, order: Order, now: float) -> None:
        """Offer blocks to every rank that owes something.

        Raises ProtocolError for a key that is not newer than its last attempt, and GeometryError naming the
        blocks that an earlier offer still has in custody; neither touches anything else.
        """
        blocks = self._check(order)
        if (older := self._newest.get(order.key.base)) is not None:
            self._finish(older, Outcome.SUPERSEDED, f"attempt {order.key.attempt} follows", now)
        wait = self.limits.deadline if order.deadline is None else order.deadline
        ranks = {
            peer: OrderAtRank(Coverage(owed), self.nonce(order.key, peer))
            for peer, owed in order.owed.items()
            if owed
        }
        transfer = Transfer(order, now + wait, ranks, blocks)
        self._newest[order.key.base] = order.key
        self._held.take(blocks)
        self.timers.set(("deadline", order.key), transfer.deadline)
        self._enter(transfer, now)

    def decline(self, key: TransferKey, peers: Mapping[str, int], now: float) -> None:
        """Tell these producer ranks that nothing of a transfer is wanted; ``peers`` maps each to its siblings.

        It ends as cancelled, and is released when all have answered. The key is one that is not offered.
        """
        if key in self._transfers or key.base in self._newest:
            raise ProtocolError(f"{key} is open and cannot be declined: cancel it")
        ranks = {peer: siblings for peer, siblings in peers.items() if self._is_live(peer)}
        self._commands.append(Ended(key, Outcome.CANCELLED, "declined"))
        self._enter(declined(key, ranks, self.nonce, now), now)

    def _enter(self, transfer: Transfer, now: float) -> None:
        key = transfer.order.key
        self._transfers[key] = transfer
        for peer, rank in transfer.ranks.items():
            self._nonces[rank.nonce] = (key, peer)
            self._pairings[peer].queue.append(key)
            self._pump(peer, now)
        self._settle(key, now)

    def cancel(self, key: TransferKey, now: float, outcome: Outcome = Outcome.CANCELLED, detail: str = "") -> None:
        """End a transfer from this side. Its blocks come back by Released, once there is proof."""
        self._finish(key, outcome, detail or "cancelled by the engine", now)

    # What the runtime tells

    def connected(self, peer: str, now: float) -> None:
        """A producer epoch is connected, for the first time or again; one whose end was proven stays gone."""
        if peer in self._gone:
            self.counts["connected after its end"] += 1
            return
        pairing = self._pairings.setdefault(peer, Pairing(self.limits.window))
        if pairing.live:
            return
        pairing.live = True
        self.timers.cancel(("proof", peer))
        # The floor comes first: a Cancel beyond the window that the producer knows is not taken in.
        self._renew(peer, now)
        for key in list(pairing.open.values()):
            self._move(key, peer, TargetEvent.REGAIN)
            self._send_cancel(key, peer, now)

    def peer_lost(self, peer: str, detail: str, now: float) -> None:
        """A producer cannot be reached. Its transfers end; its blocks wait for proof: loss is none."""
        pairing = self._pairings.get(peer)
        if pairing is None or not pairing.live:
            return
        pairing.live = False
        self.timers.cancel(("renew", peer))
        for key in [*pairing.open.values(), *pairing.queue]:
            self._finish(key, Outcome.PEER_LOST, detail, now, lost=peer)
        pairing.queue.clear()
        if pairing.open:
            self.timers.set(("proof", peer), now)

    def writes_ended(self, peer: str, now: float) -> None:
        """The transport has proof that no WRITE of this producer epoch can land any more.

        That ends the epoch for good, so that its numbering can be forgotten: it is never connected again.
        """
        pairing = self._pairings.get(peer)
        if pairing is None:
            return
        if pairing.live:
            self.peer_lost(peer, "its writes have ended", now)
        for key in list(pairing.open.values()):
            self._move(key, peer, TargetEvent.PROVE)
            self._settle(key, now)
        self.timers.cancel(("proof", peer))
        del self._pairings[peer]
        self._gone.add(peer)

    def receive(self, peer: str, message: ToConsumer, now: float) -> None:
        """Take in a message of a peer whose token was right. Never raises for what it says."""
        if peer not in self._pairings:
            self.counts["stray"] += 1
            return
        if isinstance(message, Complete):
            self._on_complete(peer, message, now)
        elif isinstance(message, Ack):
            self._on_ack(peer, message)
        elif isinstance(message, Failed):
            self._on_failed(peer, message, now)
        elif isinstance(message, Drained):
            self._on_drained(peer, message, now)
        elif isinstance(message, Ready):
            self.counts["ready without a ring"] += 1

    def tick(self, now: float) -> None:
        """Fire the timers that are due."""
        for name in self.timers.take(now):
            self.fire(name, now)

    def fire(self, timer: object, now: float) -> None:
        """Act on one timer, which is no longer set."""
        match timer:
            case ("deadline", TransferKey() as key):
                self._finish(key, Outcome.EXPIRED, "its deadline passed", now)
            case ("resend", TransferKey() as key, str(peer)):
                self._resend(key, peer, now)
            case ("renew", str(peer)):
                self._renew(peer, now)
            case ("proof", str(peer)):
                self._seek_proof(peer, now)

    def commands(self) -> list[Command]:
        """Take the commands that have gathered."""
        taken, self._commands = self._commands, []
        return taken

    # Offers

    def _check(self, order: Order) -> list[frozenset[int]]:
        newest = self._newest.get(order.key.base)
        if newest is not None and newest.attempt >= order.key.attempt:
            raise ProtocolError(f"{order.key} is not newer than attempt {newest.attempt}: count attempts up")
        lost = ", ".join(peer for peer, owed in order.owed.items() if owed and not self._is_live(peer))
        if lost:
            raise ProtocolError(f"{order.key} is offered to {lost}, which is not connected: connect first")
        blocks = block_sets(order.into)
        self._held.check(order.key, blocks)
        return blocks

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

    def _say(self, peer: str, message: Offer | Cancel | Renew, tries: int = 0) -> None:
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

    # Messages

    def _on_ack(self, peer: str, message: Ack) -> None:
        key = self._pairings[peer].open.get(message.sequence)
        if key is None:
            return
        rank = self._transfers[key].ranks[peer]
        if rank.custody is Target.OFFERED and not rank.acked:
            rank.acked, rank.tries = True, 0
            self.timers.cancel(("resend", key, peer))

    def _on_complete(self, peer: str, message: Complete, now: float) -> None:
        key, owner = self._nonces.get(message.nonce, (None, None))
        if key is None or owner != peer or key not in self._transfers:
            self.counts["stray complete"] += 1
            return
        rank = self._transfers[key].ranks[peer]
        if rank.custody in (Target.ENDED, Target.QUEUED):
            self.counts["stray complete"] += 1
            return
        try:
            fresh = rank.coverage.add(message.part, message.spans, message.whole)
        except ValueError as error:
            self._finish(key, Outcome.REJECTED_GEOMETRY, f"{peer}: {error}", now)
            return
        if not fresh:
            self.counts["duplicate complete"] += 1
        elif rank.coverage.full:
            self._move(key, peer, TargetEvent.COVER)
            self._settle(key, now)

    def _on_failed(self, peer: str, message: Failed, now: float) -> None:
        key = self._pairings[peer].open.get(message.sequence)
        if key is None:  # over here with full coverage (or drained, when the answer no longer matters)
            self._say(peer, Cancel(message.key, message.sequence, self._pairings[peer].verdict(message.sequence)))
            return
        rank = self._transfers[key].ranks[peer]
        if self._transfers[key].state is Receiving.OPEN:
            self._finish(key, message.outcome, message.detail, now)
        elif rank.custody is Target.DRAINING:
            self._send_cancel(key, peer, now)
        if message.stuck and rank.custody is Target.DRAINING:
            self._move(key, peer, TargetEvent.LOSE)
            self.timers.set(("proof", peer), now)

    def _on_drained(self, peer: str, message: Drained, now: float) -> None:
        key = self._pairings[peer].open.get(message.sequence)
        if key is None:
            return
        if self._transfers[key].ranks[peer].custody is Target.OFFERED:
            self.counts["stray drained"] += 1
            return
        self._move(key, peer, TargetEvent.DRAIN)
        self._settle(key, now)

    # Outcome and custody

    def _finish(self, key: TransferKey, outcome: Outcome, detail: str, now: float, lost: str | None = None) -> None:
        """Give a transfer its outcome, unless it has one, and stop every rank that may still write."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return
        if transfer.state is Receiving.OPEN:
            transfer.state = step(RECEIVING, transfer.state, OutcomeEvent.FAIL)
            self._end(transfer, outcome, detail)
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
            self._pairings[peer].close(rank.sequence, transfer.outcome if event is TargetEvent.COVER else None)

    def _settle(self, key: TransferKey, now: float) -> None:
        """Complete a transfer that is covered from every rank; release one whose custody has ended."""
        transfer = self._transfers.get(key)
        if transfer is None or any(rank.custody is not Target.ENDED for rank in transfer.ranks.values()):
            return
        if transfer.state is Receiving.OPEN:
            transfer.state = step(RECEIVING, transfer.state, OutcomeEvent.ALL_HERE)
            self._end(transfer, Outcome.COMPLETE, "")
        del self._transfers[key]
        if self._newest.get(key.base) == key:
            del self._newest[key.base]
        self._held.give_back(transfer.blocks)
        for peer, rank in transfer.ranks.items():
            del self._nonces[rank.nonce]
            self._pump(peer, now)
        self._commands.append(Released(key))
