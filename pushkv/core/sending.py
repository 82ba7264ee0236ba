"""What the producer's machine keeps: offers being served, and each consumer epoch's floor and window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pushkv.core.messages import Offer
from pushkv.core.outcome import Outcome
from pushkv.core.span import Span
from pushkv.core.states import Sending, Source

Owed = Callable[[int, int, int], tuple[Span, ...]]
"""What this rank owes one consumer rank of tokens ``start`` to ``stop`` of a request that ends at ``end``."""


@dataclass
class Serving:
    """One offer at the producer: how far it is sent, what is in flight, how it ends."""

    peer: str
    offer: Offer
    sent: int
    state: Sending = Sending.OFFERED
    custody: Source = Source.IDLE
    parts: int = 0
    writes: set[int] = field(default_factory=set)
    failing: Outcome | None = None
    detail: str = ""
    answer_due: bool = False
    tries: int = 0

    @property
    def reads(self) -> bool:
        """Whether a WRITE may still read the source blocks."""
        return self.custody in (Source.READING, Source.DRAINING, Source.STUCK)


@dataclass
class Customer:
    """One consumer epoch: what it has offered, and what must never be started (any more).

    Everything below ``floor`` is over by the consumer's own word. ``dead`` holds the sequences from the floor on
    that are over here, with the reason where the offer was refused; it lives as long as the epoch, bounded by the
    window, and nothing is evicted from it: a Cancel that overtook its Offer is remembered there.
    """

    owed: Owed
    window: int
    floor: int = 1
    live: dict[int, Serving] = field(default_factory=dict)
    dead: dict[int, Outcome | None] = field(default_factory=dict)
    lost: bool = False

    def raise_floor(self, floor: int) -> None:
        """Take the consumer's word that offers below ``floor`` are over."""
        if floor <= self.floor:
            return
        self.floor = floor
        self.dead = {sequence: why for sequence, why in self.dead.items() if sequence >= floor}

    def within(self, sequence: int) -> bool:
        """Whether the sequence is one that a well-behaved consumer may use now."""
        return sequence < self.floor + self.window

    def bury(self, sequence: int, refused: Outcome | None = None) -> None:
        """Remember that this offer must never be started."""
        self.live.pop(sequence, None)
        if sequence >= self.floor:
            self.dead[sequence] = refused
