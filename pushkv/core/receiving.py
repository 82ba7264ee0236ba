"""What the consumer's machine keeps: orders, their state at each rank, and the numbering of a rank pair."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pushkv.core.messages import Blocks, Ring, TransferKey
from pushkv.core.outcome import Outcome
from pushkv.core.span import Coverage, Span
from pushkv.core.states import Receiving, Target
from pushkv.errors import GeometryError


@dataclass(frozen=True)
class Order:
    """What a consumer asks for: tokens ``start`` to ``stop`` of a prompt, into these blocks.

    ``owed`` says what each producer rank owes (from the copy template); ranks that owe nothing may be left out.
    ``prompt`` is the 32-byte digest over ``prompt_tokens`` tokens. ``deadline`` is in seconds from now, None for
    the limits' own. ``siblings`` is how many offers of this transfer this engine has for each producer rank.
    """

    key: TransferKey
    into: Blocks | Ring
    prompt: bytes
    prompt_tokens: int
    start: int
    stop: int
    owed: Mapping[str, tuple[Span, ...]]
    deadline: float | None = None
    siblings: Mapping[str, int] = field(default_factory=dict)


@dataclass
class OrderAtRank:
    """One offer: an order at one producer rank."""

    coverage: Coverage
    nonce: bytes
    custody: Target = Target.QUEUED
    sequence: int = 0
    floor: int = 0
    wanted: int = 0
    """How many parts have wanted a landing slot."""
    tries: int = 0
    acked: bool = False


@dataclass
class Transfer:
    """An order with its state; ``blocks`` are the block ids it holds, one set a cache group.

    ``declined``: nothing was offered, and so no memory waits for anything.
    ``released``: they are the engine's again, though landing slots that were granted for it may still be written.
    """

    order: Order
    deadline: float
    ranks: dict[str, OrderAtRank]
    blocks: list[frozenset[int]]
    state: Receiving = Receiving.OPEN
    outcome: Outcome | None = None
    declined: bool = False
    released: bool = False

    @property
    def lands(self) -> bool:
        """Whether its parts land in slots, so that no producer can reach its blocks."""
        return isinstance(self.order.into, Ring)


class Pairing:
    """The numbering of one consumer epoch's offers to one producer epoch.

    ``open`` maps the sequences whose custody has not ended, in ascending order, to their keys. At most ``window``
    may lie between the floor and the next one; what does not fit waits in ``queue``.
    """

    __slots__ = ("_unheard", "live", "next", "open", "queue", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        self.next = 1
        self.open: dict[int, TransferKey] = {}
        self.queue: deque[TransferKey] = deque()
        self.live = True
        # What offers came to that were covered only after they had failed: the Cancel that told the producer may
        # be lost. So few that the window bounds them in practice; only the producer's words rest on it.
        self._unheard: dict[int, Outcome] = {}

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

    def close(self, sequence: int, unheard: Outcome | None) -> None:
        """The custody of an offer has ended; its producer may not have heard of this outcome."""
        self.open.pop(sequence, None)
        if unheard is not None:
            self._unheard[sequence] = unheard
            if len(self._unheard) > self.window:
                del self._unheard[next(iter(self._unheard))]

    def verdict(self, sequence: int) -> Outcome:
        """What an offer came to whose custody has ended."""
        return self._unheard.get(sequence, Outcome.COMPLETE)


class Held:
    """The block ids in custody, one set a cache group."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: list[set[int]] = []

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    def check(self, key: TransferKey, blocks: list[frozenset[int]]) -> None:
        """Raises GeometryError where a block is in custody already, naming it; changes nothing."""
        for group, (held, mine) in enumerate(zip(self._groups, blocks, strict=False)):
            if not held.isdisjoint(mine):
                raise GeometryError(
                    f"{key} offers blocks {sorted(held & mine)[:8]} of group {group} while an earlier offer of "
                    "them lacks proof: wait for its release or take other blocks"
                )

    def take(self, blocks: list[frozenset[int]]) -> None:
        """Put blocks into custody."""
        self._groups += [set() for _ in blocks[len(self._groups) :]]
        for held, mine in zip(self._groups, blocks, strict=False):
            held |= mine

    def give_back(self, blocks: list[frozenset[int]]) -> None:
        """End the custody of blocks."""
        for held, mine in zip(self._groups, blocks, strict=False):
            held -= mine


def block_sets(into: Blocks | Ring) -> list[frozenset[int]]:
    """The block ids an offer puts into custody, one set a cache group."""
    return [frozenset(np.frombuffer(table.ids, "<i4").tolist()) for table in into.tables]


def declined(
    key: TransferKey, siblings: Mapping[str, int], nonce: Callable[[TransferKey, str], bytes], now: float
) -> Transfer:
    """A transfer that is over before it is offered: each of these producer ranks is to hear so."""
    ranks = {peer: OrderAtRank(Coverage(()), nonce(key, peer)) for peer in siblings}
    order = Order(key, Blocks(()), b"", 0, 0, 0, {}, siblings=siblings)
    return Transfer(order, now, ranks, [], Receiving.OVER, Outcome.CANCELLED, declined=True)


def random_nonce(_key: TransferKey, _peer: str) -> bytes:
    """A fresh 128-bit nonce."""
    return secrets.token_bytes(16)
