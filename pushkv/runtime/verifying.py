"""The consumer's look at what has arrived, where the two sides have agreed to verify bytes.

A part counts, for coverage and so for custody, when the digest of its bytes here is the one that came with it. Where
it is not, the transfer fails and the part never counts: it may be that its bytes are still to land. Custody then ends
by the producer's ``Drained``, or by proof.

A part that comes into a landing slot is looked at there, before it is scattered: what differs never gets into a
block. That goes on where its transfer is over, as the slot is given back for a part that has come whole.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.digest import target_bytes
from pushkv.core.messages import Blocks, Complete, Offer, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.parts import part_bytes
from pushkv.core.span import splintered
from pushkv.errors import ProtocolError, PushKVError
from pushkv.runtime.digest import Digest
from pushkv.runtime.loop import Urgency
from pushkv.runtime.pair import Pair, tables
from pushkv.runtime.side import Shared, Side

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.002
"""How long a look at what has arrived may take, before everything else has its turn."""


@dataclass
class Offered:
    """One offer as it was sent to one producer, and the parts of it that were found good."""

    peer: str
    offer: Offer
    good: set[Complete] = field(default_factory=set)

    @property
    def lands(self) -> bool:
        """Whether its parts come into landing slots."""
        return not isinstance(self.offer.into, Blocks)


@dataclass
class Look:
    """A part that has arrived, and how far its digest has been worked out."""

    pair: Pair
    offered: Offered
    complete: Complete
    digest: Digest


class Verifying(Side):
    """The part of the consumer's side that has to do with verifying bytes."""

    def __init__(self, shared: Shared, machine: ConsumerMachine) -> None:
        super().__init__(shared, machine)
        self.machine = machine
        self._offers: dict[bytes, Offered] = {}
        self._looks: dict[Complete, Look] = {}
        """Parts that are being looked at; the first is the next one's turn."""
        self._fading: set[TransferKey] = set()
        """Transfers whose blocks are released, and which the machine may still know."""

    def urgency(self) -> Urgency:
        """A look waits for nothing."""
        return Urgency.NO_ONE if self._looks else super().urgency()

    def look(self, now: float) -> bool:
        """As for any side, after a while of verifying."""
        return self._verify(now) | super().look(now)

    def note_offer(self, peer: str, offer: Offer) -> None:
        """Remember what was offered, until it is released."""
        if self.verifies:
            self._offers.setdefault(offer.nonce, Offered(peer, offer))

    def forget_offers(self, key: TransferKey) -> None:
        """A transfer's blocks are out of custody and not read any more; its landing slots may be for a while."""
        self._fading.add(key)
        self.forget_past_offers()

    def forget_past_offers(self) -> None:
        """Forget what was released and has no slot in custody."""
        past = {key for key in self._fading if not self.machine.knows(key)}
        if past:
            self._fading -= past
            self._offers = {nonce: one for nonce, one in self._offers.items() if one.offer.key not in past}
            self._looks = {part: look for part, look in self._looks.items() if look.offered.offer.key not in past}

    def forget_looks(self) -> None:
        """The thread is stuck in one: what was being looked at never counts."""
        self._looks.clear()

    def part(self, pair: Pair, complete: Complete, now: float) -> None:
        """Take in a part: for the machine at once, or when it has been verified."""
        offered = self._offers.get(complete.nonce)
        if (
            offered is None
            or offered.peer != pair.agent
            or complete in offered.good
            or not self._fits(pair, offered, complete)
        ):
            self.machine.receive(pair.agent, complete, now)
        elif any((one.nonce, one.part) == (complete.nonce, complete.part) for one in self._looks):
            # The same again; or another of that number, and whoever says two things of one part gets no two looks.
            self.machine.counts["parts that come while they are verified"] += 1
        else:
            try:
                self._looks[complete] = Look(pair, offered, complete, self._digest(pair, offered, complete))
            except PushKVError as error:
                self._bad(offered, complete, f"cannot be verified: {error}", now)

    def _fits(self, pair: Pair, offered: Offered, complete: Complete) -> bool:
        """Whether the part is of what is owed, in a slot that waits for it; what is not, the machine refuses."""
        offer = offered.offer
        owed = pair.template.owed((offer.start, offer.stop), end=offer.stop)
        if splintered(complete.spans, owed):
            return False
        within = all(any(span.within(one) for one in owed) for span in complete.spans)
        return within and (not offered.lands or self.machine.awaits(pair.agent, complete))

    def _digest(self, pair: Pair, offered: Offered, complete: Complete) -> Digest:
        if offered.lands:
            return self._digest_of_slot(pair, complete)
        offer = offered.offer
        assert self.reader is not None
        return Digest(self.reader, target_bytes(pair.template, tables(offer.into), complete.spans, offer.stop))

    def _digest_of_slot(self, pair: Pair, complete: Complete) -> Digest:
        slots, credit = self.shared.slots, complete.credit
        assert slots is not None
        assert credit is not None
        length = part_bytes(pair.template, complete.spans)
        if length > slots.size:
            raise ProtocolError(f"its {length} bytes are more than a slot's {slots.size}")
        return Digest(slots, slots.stretch(credit.slot, length))

    def _verify(self, now: float) -> bool:
        """Look for a while at the part whose turn it is; whether there was any.

        Reading device memory may not return, and is watched like a call to NIXL.
        """
        if not self._looks:
            return False
        complete, look = next(iter(self._looks.items()))
        what = "a landing slot" if look.offered.lands else "received blocks"
        try:
            done = self.shared.turn.away(f"reading {what} back", look.digest.work, LOOK_SECONDS)
        except Exception as error:  # a device that fails
            del self._looks[complete]
            self._bad(look.offered, complete, f"cannot be verified: {error}", now)
            return True
        del self._looks[complete]
        if done:
            self._judge(look, now)
        else:
            self._looks[complete] = look  # the others' turn
        return True

    def _judge(self, look: Look, now: float) -> None:
        sent, got = look.complete.digest, look.digest.value
        self.shared.stats["bytes verified"] += look.digest.bytes
        if look.offered.lands and not self.machine.awaits(look.pair.agent, look.complete):
            return  # there is proof for its slot, which is another part's now
        if sent == got:
            look.offered.good.add(look.complete)
            self.machine.receive(look.pair.agent, look.complete, now)
            return
        told = "came without a digest" if sent is None else f"was sent with the digest {sent.hex()}"
        self._bad(look.offered, look.complete, f"{told}; the digest of what has arrived is {got.hex()}", now)

    def _bad(self, offered: Offered, complete: Complete, what: str, now: float) -> None:
        key, spans = offered.offer.key, complete.spans
        tokens = f"{min(s.token_start for s in spans)} to {max(s.token_stop for s in spans)}" if spans else "none"
        detail = f"part {complete.part} (tokens {tokens}) of producer rank {complete.rank} {what}"
        log.error("%s fails: %s", key, detail)
        self.shared.stats["parts that differ"] += 1
        self.machine.cancel(key, now, Outcome.TRANSPORT_ERROR, detail)
