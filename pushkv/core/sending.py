"""What the producer's machine keeps: offers being served, and each consumer epoch's floor and window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pushkv.core.messages import Failed, Offer, Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from pushkv.core.states import SENDING, OutcomeEvent, Sending, Source, step
from pushkv.core.streaming import Ahead, Reach, Streaming, advance, clip

Owed = Callable[[int, int, int], tuple[Span, ...]]
"""What this rank owes one consumer rank of tokens ``start`` to ``stop`` of a request offered up to ``end``."""

Cut = Callable[[tuple[Span, ...]], tuple[tuple[Span, ...], ...]]
"""Cuts spans into parts that each fit a slot."""


class Part(NamedTuple):
    """A part to be posted. ``alone``: of its one span, and not of all that is owed of these tokens."""

    start: int
    stop: int
    spans: tuple[Span, ...]
    alone: bool = False


@dataclass(frozen=True)
class Share:
    """A part that waits to be gathered; ``whole`` comes with the last."""

    spans: tuple[Span, ...]
    whole: tuple[Span, ...] | None = None


@dataclass
class Serving:
    """One offer at the producer: how far it is sent, what is in flight, how it ends.

    ``sent`` is how many tokens are sent in all layers, ``ahead`` which layers are of those that follow. Where its
    parts land in slots, that is how far it has been cut into ``shares``, and a WRITE begins with the gather of one;
    ``unposted`` are those that have not gone out.
    """

    peer: str
    offer: Offer
    sent: int
    ahead: Ahead | None = None
    state: Sending = Sending.OFFERED
    custody: Source = Source.IDLE
    parts: int = 0
    writes: set[int] = field(default_factory=set)
    shares: deque[Share] = field(default_factory=deque)
    unposted: set[int] = field(default_factory=set)
    failing: Outcome | None = None
    detail: str = ""
    answer_due: bool = False
    tries: int = 0
    ready_tries: int = 0

    @property
    def reached(self) -> Reach:
        """How far it is sent."""
        return Reach(self.sent, self.ahead)

    @property
    def lands(self) -> bool:
        """Whether its parts go from staging slots to landing slots."""
        return isinstance(self.offer.into, Ring)

    @property
    def reads(self) -> bool:
        """Whether a WRITE may still read memory for it: the source blocks, or staging slots where it lands."""
        return self.custody in (Source.READING, Source.DRAINING, Source.STUCK)

    @property
    def unsent(self) -> bool:
        """Whether something is still to be posted for it, as far as it is not over."""
        rest = self.sent < self.offer.stop or bool(self.shares or self.unposted)
        return self.state is Sending.OFFERED or rest


@dataclass
class Customer:
    """One consumer epoch: what it has offered, and what must never be started (any more).

    Everything below ``floor`` is over by the consumer's own word. ``dead`` holds the sequences from the floor on
    that are over here, with the reason where the offer was refused; it lives as long as the epoch, bounded by the
    window, and nothing is evicted from it: a Cancel that overtook its Offer is remembered there. ``untold`` holds
    what the consumer was told of offers that ended when it was lost, until it says that it knows; bounded alike.
    """

    owed: Owed
    window: int
    cut: Cut | None = None
    """None where nothing can be landed between the two."""
    streaming: Streaming = field(default_factory=Streaming)
    floor: int = 1
    live: dict[int, Serving] = field(default_factory=dict)
    dead: dict[int, Outcome | None] = field(default_factory=dict)
    untold: dict[int, Failed] = field(default_factory=dict)
    lost: bool = False

    def due(self, serving: Serving, computed: Reach) -> tuple[list[Part], Reach]:
        """The parts of an offer that may leave now, in order, and how far it is sent with them."""
        stop = serving.offer.stop
        strips, sent = advance(serving.reached, self.streaming.reach(computed, stop, lands=serving.lands))
        parts = []
        for strip in strips:
            spans = clip(self.owed(strip.start, strip.stop, stop), strip)
            if strip.whole and spans:
                parts.append(Part(strip.start, strip.stop, spans))
            else:
                parts += [Part(strip.start, strip.stop, (span,), alone=True) for span in spans]
        if sent.tokens < stop and not self.streaming.worth(tuple(span for part in parts for span in part.spans)):
            return [], serving.reached
        return parts, sent

    def raise_floor(self, floor: int) -> None:
        """Take the consumer's word that offers below ``floor`` are over."""
        if floor <= self.floor:
            return
        self.floor = floor
        self.dead = {sequence: why for sequence, why in self.dead.items() if sequence >= floor}
        self.untold = {sequence: failed for sequence, failed in self.untold.items() if sequence >= floor}

    def within(self, sequence: int) -> bool:
        """Whether the sequence is one that a well-behaved consumer may use now."""
        return sequence < self.floor + self.window

    def may_start(self, sequence: int) -> bool:
        """Whether an offer of this sequence would be taken in."""
        return sequence >= self.floor and sequence not in self.live and sequence not in self.dead

    def bury(self, sequence: int, refused: Outcome | None = None) -> None:
        """Remember that this offer must never be started."""
        self.live.pop(sequence, None)
        if sequence >= self.floor:
            self.dead[sequence] = refused


class Book:
    """The offers that a producer serves, found by transfer id, by consumer and by WRITE.

    ``unmatched`` counts those that have met no stage.
    """

    __slots__ = ("_by_transfer", "_by_write", "_next_write", "customers", "unmatched")

    def __init__(self) -> None:
        self.customers: dict[str, Customer] = {}
        self._by_transfer: dict[str, list[Serving]] = {}
        self._by_write: dict[int, Serving] = {}
        self._next_write = 1
        self.unmatched = 0

    def __iter__(self) -> Iterator[Serving]:
        return (serving for servings in list(self._by_transfer.values()) for serving in list(servings))

    def of(self, transfer: str) -> list[Serving]:
        """The offers of one transfer id."""
        return list(self._by_transfer.get(transfer, ()))

    def rivals(self, key: TransferKey) -> list[Serving]:
        """The offers of the same transfer and sibling, whatever their attempt."""
        return [serving for serving in self.of(key.transfer) if serving.offer.key.base == key.base]

    def reads(self, transfer: str) -> bool:
        """Whether a WRITE may still read what is staged under this transfer id; one from a staging slot does not."""
        return any(serving.reads and not serving.lands for serving in self._by_transfer.get(transfer, ()))

    def wants(self, transfer: str) -> bool:
        """Whether more will be posted, or completed, of what is staged under this transfer id."""
        return any(serving.state is Sending.MATCHED for serving in self._by_transfer.get(transfer, ()))

    def find(self, peer: str, sequence: int) -> Serving | None:
        """The offer of this consumer with this sequence, None where it is not served."""
        customer = self.customers.get(peer)
        return None if customer is None else customer.live.get(sequence)

    def add(self, serving: Serving) -> None:
        """Serve an offer."""
        self.unmatched += 1
        self.customers[serving.peer].live[serving.offer.sequence] = serving
        self._by_transfer.setdefault(serving.offer.key.transfer, []).append(serving)

    def decide(self, serving: Serving, event: OutcomeEvent) -> None:
        """Move an offer towards its outcome."""
        self.unmatched -= serving.state is Sending.OFFERED
        serving.state = step(SENDING, serving.state, event)

    def bury(self, serving: Serving) -> None:
        """Forget an offer but for its sequence, which must never be started again."""
        customer, transfer = self.customers[serving.peer], serving.offer.key.transfer
        if customer.live.get(serving.offer.sequence) is not serving:
            return
        customer.bury(serving.offer.sequence)
        self._by_transfer[transfer].remove(serving)
        if not self._by_transfer[transfer]:
            del self._by_transfer[transfer]

    def start_write(self, serving: Serving) -> int:
        """Number one more WRITE for an offer."""
        write = self._next_write
        self._next_write += 1
        serving.parts += 1
        serving.writes.add(write)
        self._by_write[write] = serving
        return write

    def serving_of(self, write: int) -> Serving | None:
        """The offer that a WRITE is for, None where it was forgotten."""
        return self._by_write.get(write)

    def end_write(self, write: int) -> Serving | None:
        """Forget a WRITE; the offer that it was for, None where it was forgotten before."""
        serving = self._by_write.pop(write, None)
        if serving is not None:
            serving.writes.discard(write)
        return serving

    def end_writes(self, serving: Serving) -> None:
        """Forget all WRITEs for an offer."""
        for write in list(serving.writes):
            self.end_write(write)
