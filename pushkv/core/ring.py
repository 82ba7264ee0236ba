"""Slots: a consumer's landing ring and a producer's staging slots, who has which, and whose turn is next.

Slots are few and peers are many, so each peer may hold as many as a dynamic threshold allows: twice the number that
is free, after Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM
Transactions on Networking 6:2, 1998). One peer alone gets most of them, and some are always left for the next;
slots that wait for proof count for the peer that is to blame.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pushkv.core.messages import Complete, Credit, TransferKey
from pushkv.core.states import PACK, SLOT, Pack, PackEvent, Slot, SlotEvent, step

SHARE = 2
"""A peer may hold this many times what is free."""


def starved(stuck: Mapping[str, int], peer: str, count: int) -> bool:
    """Whether this peer gets none of ``count`` slots before there is proof, though all that need none come back.

    ``stuck`` are the slots that wait for proof, by the peer that is to blame.
    """
    return stuck.get(peer, 0) >= SHARE * (count - sum(stuck.values()))


class SlotPool:
    """The numbers of the slots that nobody has, shared by all lives of an endpoint.

    A slot that an earlier life still has in custody comes back when that custody ends, not before.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: deque[int] = deque(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """One of them; None where there is none."""
        try:
            return self._free.popleft()
        except IndexError:
            return None

    def give(self, slot: int) -> None:
        """Give one back."""
        self._free.append(slot)


class Turns:
    """Whose turn it is to get a slot: peers in rotation, each within its share."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._order: OrderedDict[str, None] = OrderedDict()
        self.held: Counter[str] = Counter()

    def wait(self, peer: str) -> None:
        """This peer wants a slot; unless it waits already, it is behind all others that do."""
        self._order.setdefault(peer, None)

    def __len__(self) -> int:
        return len(self._order)

    def take(self, wants: Callable[[str], bool]) -> tuple[str, int] | None:
        """The next peer that wants one and may have it, and its slot; peers that want none are forgotten."""
        for peer in list(self._order):
            if not wants(peer):
                del self._order[peer]
            elif self.held[peer] < SHARE * len(self._pool):
                if (slot := self._pool.take()) is None:
                    return None
                self.held[peer] += 1
                self._order.move_to_end(peer)
                return peer, slot
        return None

    def give(self, peer: str, slot: int) -> None:
        """A peer has given a slot back."""
        self.held[peer] -= 1
        if not self.held[peer]:
            del self.held[peer]
        self._pool.give(slot)


@dataclass
class Berth:
    """A landing slot that was granted: for one generation, to one part of one offer."""

    slot: int
    generation: int
    peer: str
    key: TransferKey
    part: int
    state: Slot = Slot.FREE

    @property
    def credit(self) -> Credit:
        """The right to WRITE it once."""
        return Credit(self.slot, self.generation)


class LandingRing:
    """The consumer's slots: granted in turns, each credit good for one WRITE of one part.

    The custody of a slot ends as :data:`pushkv.core.states.SLOT` says. A slot that was granted to a transfer which
    is over is quarantined until its WRITE has come or there is proof that it will not.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._turns = Turns(pool)
        self._berths: dict[int, Berth] = {}
        self._wanted: dict[str, dict[TransferKey, tuple[int, int]]] = {}
        """By peer, the parts of each transfer that have a slot, and those that want one in all."""
        self._generation = 0

    @property
    def dry(self) -> bool:
        """Whether somebody waits for a slot."""
        return bool(self._wanted)

    @property
    def busy(self) -> bool:
        """Whether a slot is granted or scattered."""
        return any(berth.state is not Slot.QUARANTINED for berth in self._berths.values())

    def custody(self) -> Counter[Slot]:
        """How many slots are in which custody, FREE ones left out."""
        return Counter(berth.state for berth in self._berths.values())

    def quarantined(self) -> list[Berth]:
        """The slots that were granted to transfers which are over, and have not been written."""
        return [berth for berth in self._berths.values() if berth.state is Slot.QUARANTINED]

    def wants(self, key: TransferKey) -> bool:
        """Whether a part of this transfer waits for a slot."""
        return any(key in wanted for wanted in self._wanted.values())

    def want(self, peer: str, key: TransferKey, before: int, parts: int) -> None:
        """This many parts of a transfer want a slot in all, where it were ``before``; they get them in order."""
        wanted = self._wanted.setdefault(peer, {})
        granted, _ = wanted.get(key, (before, before))
        wanted[key] = (granted, parts)
        self._turns.wait(peer)

    def grants(self) -> Iterator[Berth]:
        """Grant what may be granted now."""
        while (turn := self._turns.take(self._wanted.__contains__)) is not None:
            peer, slot = turn
            key, (granted, parts) = next(iter(self._wanted[peer].items()))
            self._generation += 1
            berth = self._berths[slot] = Berth(slot, self._generation, peer, key, granted)
            self._move(berth, SlotEvent.GRANT)
            self._wanted[peer][key] = (granted + 1, parts)
            if granted + 1 == parts:
                self._forget(peer, key)
            yield berth

    def _forget(self, peer: str, key: TransferKey) -> None:
        wanted = self._wanted.get(peer)
        if wanted is not None and wanted.pop(key, None) is not None and not wanted:
            del self._wanted[peer]

    def due(self, peer: str, key: TransferKey) -> list[Berth]:
        """What was granted to a transfer and has not come."""
        return [berth for berth in self._of(key) if berth.peer == peer and berth.state is Slot.GRANTED]

    def scattering(self, key: TransferKey, peer: str | None = None) -> bool:
        """Whether a scatter for this transfer is queued or running; of one peer's parts, where one is named."""
        mine = (berth for berth in self._of(key) if peer in (None, berth.peer))
        return any(berth.state is Slot.SCATTERING for berth in mine)

    def _of(self, key: TransferKey) -> list[Berth]:
        return [berth for berth in self._berths.values() if berth.key == key]

    def find(self, credit: Credit, peer: str, key: TransferKey, part: int) -> Berth | None:
        """The slot that this credit is good for, None where it was used, or is another's."""
        berth = self._berths.get(credit.slot)
        if berth is None or berth.state not in (Slot.GRANTED, Slot.QUARANTINED):
            return None
        fits = (berth.generation, berth.peer, berth.key, berth.part) == (credit.generation, peer, key, part)
        return berth if fits else None

    def scatter(self, berth: Berth) -> None:
        """Its WRITE has come, and its scatter is about to be launched."""
        self._move(berth, SlotEvent.ARRIVE)
        self._move(berth, SlotEvent.SCATTER)

    def drop(self, berth: Berth) -> None:
        """Its WRITE has come, for a transfer that is over."""
        self._move(berth, SlotEvent.ARRIVE)
        self._move(berth, SlotEvent.DROP)

    def scattered(self, slot: int, generation: int) -> Berth | None:
        """A scatter has ended, well or not; None for one that nobody waits for."""
        berth = self._berths.get(slot)
        if berth is None or berth.generation != generation or berth.state is not Slot.SCATTERING:
            return None
        self._move(berth, SlotEvent.SCATTERED)
        return berth

    def over(self, key: TransferKey) -> None:
        """A transfer is over: it gets no more slots, and those it has may still be written."""
        for peer in list(self._wanted):
            self._forget(peer, key)
        for berth in self._of(key):
            if berth.state is Slot.GRANTED:
                self._move(berth, SlotEvent.LOSE)

    def proven(self, peer: str, key: TransferKey) -> None:
        """No WRITE of this peer's for this transfer can land any more."""
        for berth in self._of(key):
            if berth.peer == peer and berth.state is Slot.QUARANTINED:
                self._move(berth, SlotEvent.PROVE)

    def _move(self, berth: Berth, event: SlotEvent) -> None:
        berth.state = step(SLOT, berth.state, event)
        if berth.state is Slot.FREE:
            del self._berths[berth.slot]
            self._turns.give(berth.peer, berth.slot)


@dataclass
class Packed:
    """A part in a staging slot: being gathered, waiting for its credit, or on its way."""

    write: int
    slot: int
    peer: str
    transfer: str
    complete: Complete
    credit: Credit | None = None
    state: Pack = Pack.FREE


class StagingSlots:
    """The producer's slots: a part is gathered into one, and WRITTEN from there. ``writes`` finds it by its WRITE."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._turns = Turns(pool)
        self._packed: dict[int, Packed] = {}

    def custody(self) -> Counter[Pack]:
        """How many slots are in which custody, FREE ones left out."""
        return Counter(packed.state for packed in self._packed.values())

    def stuck(self) -> Counter[str]:
        """By peer, how many slots wait for proof that a failed WRITE reads them no more."""
        return Counter(packed.peer for packed in self._packed.values() if packed.state is Pack.STUCK)

    def wait(self, peer: str) -> None:
        """Something for this peer could be gathered."""
        self._turns.wait(peer)

    @property
    def dry(self) -> bool:
        """Whether something waits for a slot."""
        return bool(self._turns)

    def take(self, wants: Callable[[str], bool]) -> tuple[str, int] | None:
        """The next peer that something can be gathered for, and a slot for it."""
        return self._turns.take(wants)

    def pack(self, packed: Packed) -> None:
        """A part is about to be gathered into the slot that was taken for it."""
        self._packed[packed.write] = packed
        self.move(packed, PackEvent.TAKE)

    def find(self, write: int) -> Packed | None:
        """The part of this WRITE, None where it has no slot any more."""
        return self._packed.get(write)

    def reads(self, transfer: str) -> bool:
        """Whether a gather may still read what is staged under this transfer id."""
        return any(one.transfer == transfer and one.state is Pack.GATHERING for one in self._packed.values())

    def proven(self, peer: str) -> None:
        """No WRITE to this peer reads memory any more."""
        for packed in list(self._packed.values()):
            if packed.peer == peer and packed.state in (Pack.WRITING, Pack.STUCK):
                self.move(packed, PackEvent.PROVE)

    def move(self, packed: Packed, event: PackEvent) -> None:
        """Move a slot's custody; a free one is the next part's."""
        packed.state = step(PACK, packed.state, event)
        if packed.state is Pack.FREE:
            del self._packed[packed.write]
            self._turns.give(packed.peer, packed.slot)
