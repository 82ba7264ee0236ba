"""The consumer's protocol machine: offers, arrivals, outcomes and the custody of target blocks.

Sans-IO: every method takes ``now`` in seconds and leaves commands to be taken by :meth:`ConsumerMachine.commands`.
Peers are named by the producer's agent name, which contains its epoch. The runtime has checked the pair's token
before a message gets here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pushkv.core.commands import Command, Ended, Scatter
from pushkv.core.messages import (
    Ack,
    Cancel,
    Complete,
    Drained,
    Failed,
    Ready,
    Ring,
    ToConsumer,
    TransferKey,
)
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order, OrderAtRank, Pairing, Transfer, block_sets, declined
from pushkv.core.recipient import Recipient
from pushkv.core.span import Coverage
from pushkv.core.states import Receiving, Slot, Target, TargetEvent
from pushkv.errors import GeometryError, ProtocolError


@dataclass
class ConsumerMachine(Recipient):
    """One consumer rank's side of every transfer it has open."""

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

    def landing_slots(self) -> Counter[Slot]:
        """How many landing slots are in which custody; free ones are not counted."""
        return self._ring.custody()

    def awaits(self, peer: str, message: Complete) -> bool:
        """Whether a landing slot waits for this part: its credit is good, and has not been used."""
        key, owner = self._nonces.get(message.nonce, (None, None))
        if key is None or owner != peer or message.credit is None:
            return False
        return self._ring.find(message.credit, peer, key, message.part) is not None

    def stuck_slots(self) -> Counter[str]:
        """By peer, how many landing slots nothing but proof gives back; those that Drained is awaited for are not."""
        owners = ((berth.peer, self._transfers[berth.key].ranks[berth.peer]) for berth in self._ring.quarantined())
        return Counter(peer for peer, rank in owners if rank.custody is Target.QUARANTINED)

    @property
    def lands(self) -> bool:
        """Whether a landing slot is granted or scattered."""
        return self._ring.busy

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

    def scattered(self, slot: int, generation: int, now: float, error: str = "") -> None:
        """A scatter has ended; ``error`` says what went wrong with it: then its transfer fails."""
        berth = self._ring.scattered(slot, generation)
        if berth is None:
            return
        if error:
            self._finish(berth.key, Outcome.TRANSPORT_ERROR, f"a part could not be scattered: {error}", now)
        self._landed(berth.key, berth.peer, now)
        self._settle(berth.key, now)

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
            self._on_ready(peer, message, now)

    def tick(self, now: float) -> None:
        """Fire the timers that are due."""
        for name in self.timers.take(now):
            self.fire(name, now)

    def fire(self, timer: object, now: float) -> None:
        """Act on one timer, which is no longer set."""
        match timer:
            case ("deadline", TransferKey() as key):
                self._finish(key, Outcome.EXPIRED, f"its deadline passed{self._waiting(key)}", now)
            case ("resend", TransferKey() as key, str(peer)):
                self._resend(key, peer, now)
            case ("renew", str(peer)):
                self._renew(peer, now)
            case ("ring",):
                self._grant(now)
            case ("proof", str(peer)):
                self._seek_proof(peer, now)

    def commands(self) -> list[Command]:
        """Take the commands that have gathered."""
        taken, self._commands = self._commands, []
        return taken

    def _waiting(self, key: TransferKey) -> str:
        """What a transfer that lands still waits for, in words."""
        if not self._ring.wants(key):
            return ""
        stuck = sum(self.stuck_slots().values())
        return f" while it waited for a landing slot; {stuck} of {self.slots.count} wait for proof"

    # Offers

    def _check(self, order: Order) -> list[frozenset[int]]:
        newest = self._newest.get(order.key.base)
        if newest is not None and newest.attempt >= order.key.attempt:
            raise ProtocolError(f"{order.key} is not newer than attempt {newest.attempt}: count attempts up")
        lost = ", ".join(peer for peer, owed in order.owed.items() if owed and not self._is_live(peer))
        if lost:
            raise ProtocolError(f"{order.key} is offered to {lost}, which is not connected: connect first")
        if isinstance(order.into, Ring) and not self.slots.count:
            raise GeometryError(f"{order.key} is to land in slots and there is no landing ring: offer its blocks")
        blocks = block_sets(order.into)
        self._held.check(order.key, blocks)
        return blocks

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
        if self._transfers[key].lands:
            self._on_landing(key, peer, message, now)
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

    def _on_ready(self, peer: str, message: Ready, now: float) -> None:
        key = self._pairings[peer].open.get(message.sequence)
        transfer = None if key is None else self._transfers[key]
        if key is None or transfer is None or not transfer.lands or transfer.state is not Receiving.OPEN:
            self.counts["stray ready"] += 1
            return
        self._on_ack(peer, Ack(message.sequence))
        rank = transfer.ranks[peer]
        if message.parts > sum(span.area for span in rank.coverage.owed):
            self.counts["ready beyond what is owed"] += 1
        elif message.parts > rank.wanted:
            self._ring.want(peer, key, rank.wanted, message.parts)
            rank.wanted = message.parts
        else:
            for berth in self._ring.due(peer, key):
                self._say_grant(berth)
        self._grant(now)

    def _on_landing(self, key: TransferKey, peer: str, message: Complete, now: float) -> None:
        """A part is in its slot: scatter it, unless its transfer is over. A credit is good for one WRITE."""
        berth = None if message.credit is None else self._ring.find(message.credit, peer, key, message.part)
        if berth is None:
            self.counts["duplicate complete"] += 1
            return
        transfer = self._transfers[key]
        if transfer.state is not Receiving.OPEN:
            self._ring.drop(berth)
            self._grant(now)
            return
        try:
            transfer.ranks[peer].coverage.add(message.part, message.spans, message.whole)
        except ValueError as error:  # the slot stays in custody: who says one thing wrong may do others
            self._finish(key, Outcome.REJECTED_GEOMETRY, f"{peer}: {error}", now)
            return
        self._ring.scatter(berth)
        order = transfer.order
        assert isinstance(order.into, Ring)
        self._commands.append(
            Scatter(berth.slot, berth.generation, peer, key, order.into, message.spans, order.stop)
        )  # fmt: skip

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
