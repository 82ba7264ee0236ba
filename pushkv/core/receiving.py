"""What the consumer's machine keeps: orders, their state at each rank, and the numbering of a rank pair."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pushkv.core.messages import Blocks, Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Coverage, Span
from pushkv.core.states import Receiving, Target


@dataclass(frozen=True)
class Order:
    """What a consumer asks for: tokens ``start`` to ``stop`` of a prompt, into these blocks.

    ``owed`` says what each producer rank owes (from the copy template); ranks that owe nothing may be left out.
    ``prompt`` is the 32-byte digest over ``prompt_tokens`` tokens. ``deadline`` is in seconds from now, None for
    the limits' own.
    """

    key: TransferKey
    into: Blocks | Ring
    prompt: bytes
    prompt_tokens: int
    start: int
    stop: int
    owed: Mapping[str, tuple[Span, ...]]
    deadline: float | None = None


@dataclass
class OrderAtRank:
    """One offer: an order at one producer rank."""

    coverage: Coverage
    nonce: bytes
    custody: Target = Target.QUEUED
    sequence: int = 0
    floor: int = 0
    tries: int = 0
    acked: bool = False


@dataclass
class Transfer:
    """An order with its state; ``blocks`` are the block ids it holds, one set a cache group."""

    order: Order
    deadline: float
    ranks: dict[str, OrderAtRank]
    blocks: list[frozenset[int]]
    state: Receiving = Receiving.OPEN
    outcome: Outcome | None = None


class Pairing:
    """The numbering of one consumer epoch's offers to one producer epoch.

    ``open`` maps the sequences whose custody has not ended, in ascending order, to their keys. At most ``window``
    may lie between the floor and the next one; what does not fit waits in ``queue``.
    """

    __slots__ = ("live", "next", "open", "queue", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.next = 1
        self.open: dict[int, TransferKey] = {}
        self.queue: deque[TransferKey] = deque()
        self.live = True

    @property
    def floor(self) -> int:
        """The lowest sequence that is not over."""
        return next(iter(self.open), self.next)

    @property
    def has_room(self) -> bool:
        """Whether one more offer fits the window."""
        return self.next < self.floor + self.window

    def number(self, key: TransferKey) -> int:
        """Give an offer its sequence."""
        sequence = self.next
        self.next += 1
        self.open[sequence] = key
        return sequence


def block_sets(into: Blocks | Ring) -> list[frozenset[int]]:
    """The block ids an offer puts into custody, one set a cache group; none where parts land in slots."""
    if isinstance(into, Ring):
        return []
    return [frozenset(np.frombuffer(table.ids, "<i4").tolist()) for table in into.tables]


def random_nonce(_key: TransferKey, _peer: str) -> bytes:
    """A fresh 128-bit nonce."""
    return secrets.token_bytes(16)
