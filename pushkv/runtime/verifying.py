"""The consumer's look at what has arrived, where the two sides have agreed to verify bytes.

A part counts, for coverage and so for custody, when the digest of its bytes here is the one that came with it. Where
it is not, the transfer fails and the part never counts: it may be that its bytes are still to land. Custody then ends
by the producer's ``Drained``, or by proof.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.digest import target_bytes
from pushkv.core.messages import Blocks, Complete, Offer, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.errors import PushKVError
from pushkv.runtime.digest import Digest
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

    def urgency(self) -> int:
        """A look waits for nothing."""
        return 3 if self._looks else super().urgency()

    def look(self, now: float) -> bool:
        """As for any side, after a while of verifying."""
        return self._verify(now) | super().look(now)

    def note_offer(self, peer: str, offer: Offer) -> None:
        """Remember what was offered, until it is released."""
        if self.reader is not None:
            self._offers.setdefault(offer.nonce, Offered(peer, offer))

    def forget_offers(self, key: TransferKey) -> None:
        """A transfer's blocks are out of custody: they are not read any more."""
        for nonce in [nonce for nonce, one in self._offers.items() if one.offer.key == key]:
            del self._offers[nonce]
        self._looks = {part: look for part, look in self._looks.items() if look.offered.offer.key != key}

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
            or not _fits(pair, offered, complete)
        ):
            self.machine.receive(pair.agent, complete, now)
        elif complete not in self._looks:
            try:
                self._looks[complete] = Look(pair, offered, complete, self._digest(pair, offered.offer, complete))
            except PushKVError as error:
                self._bad(offered, complete, f"cannot be verified: {error}", now)

    def _digest(self, pair: Pair, offer: Offer, complete: Complete) -> Digest:
        assert isinstance(offer.into, Blocks)
        assert self.reader is not None
        return Digest(self.reader, target_bytes(pair.template, tables(offer.into), complete.spans, offer.stop))

    def _verify(self, now: float) -> bool:
        """Look for a while at the part whose turn it is; whether there was any.

        Reading device memory may not return, and is watched like a call to NIXL.
        """
        if not self._looks:
            return False
        complete, look = next(iter(self._looks.items()))
        try:
            done = self.shared.turn.away("reading received blocks back", look.digest.work, LOOK_SECONDS)
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


def _fits(pair: Pair, offered: Offered, complete: Complete) -> bool:
    """Whether the part is of what is owed; what is not, the machine refuses."""
    offer = offered.offer
    owed = pair.template.owed((offer.start, offer.stop), end=offer.stop)
    return all(any(span.within(one) for one in owed) for span in complete.spans)
