"""Landing in the walk: how offers are cut, copies under way, and the rules about slots.

Which transfer a slot is granted for the walk reads off the consumer's own ring, and holds it against what the world
knows: which WRITEs can still land in the slot, what has landed in it, and which scatters still read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from pushkv.core.commands import Gather, Scatter
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Complete, Credit, TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.span import Span
from pushkv.core.states import Receiving, Slot
from walk.errors import Violation

if TYPE_CHECKING:
    from walk.bits import Bits
    from walk.world import Flight, World

Berths = dict[int, tuple[str, TransferKey, int, int, Slot]]
"""Of each slot in custody: the peer, transfer and part that it was granted for, the generation, the custody."""


class Cuts(NamedTuple):
    """Cuts spans into parts of as many tokens as a slot holds."""

    tokens: int

    def __call__(self, spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
        return tuple(
            (Span(one.group, one.layer_start, one.layer_stop, at, min(at + self.tokens, one.token_stop)),)
            for one in spans
            for at in range(one.token_start, one.token_stop, self.tokens)
        )


class Copy(NamedTuple):
    """A gather (of a producer's life) or a scatter (of a consumer's) that has not ended."""

    life: str
    number: int
    """The gather's WRITE, or the scatter's generation."""
    slot: int
    key: TransferKey
    block: int
    """The target block."""
    spans: tuple[Span, ...]
    gathers: bool


def gather_of(life: str, command: Gather, block: int) -> Copy:
    """A gather that has been launched."""
    return Copy(life, command.write, command.slot, command.key, block, command.spans, True)


def scatter_of(life: str, command: Scatter, block: int) -> Copy:
    """A scatter that has been launched."""
    return Copy(life, command.generation, command.slot, command.key, block, command.spans, False)


def berths(machine: ConsumerMachine) -> Berths:
    """The landing slots in custody."""
    held = machine._ring._berths.values()
    return {one.slot: (one.peer, one.key, one.part, one.generation, one.state) for one in held}


class SlotRules:
    """The rules about slots, by what the world knows. ``berths`` tells those of a consumer's state."""

    def __init__(self, flights: Bits, copies: Bits, of_state: Callable[[int], Berths]) -> None:
        self._flights, self._copies, self._berths = flights, copies, of_state
        self._good: set[tuple[int, str, int, int]] = set()

    def check(self, w: World) -> None:
        """No WRITE lands in a slot but the one that it was granted for, and none is given away while it is read."""
        place = (w.c, w.env.c_name, w.air, w.copies)
        if place in self._good:
            return
        held = self._berths(w.c)
        for _, flight in self._flights.each(w.air):
            if flight.staging >= 0 and flight.consumer == w.env.c_name:
                _check_flight(held, flight)
        for _, copy in self._copies.each(w.copies):
            berth = held.get(copy.slot)
            if copy.life == w.env.c_name and (berth is None or berth[3:] != (copy.number, Slot.SCATTERING)):
                raise Violation(f"custody ends on proof: slot {copy.slot} is given away while it is scattered")
        self._good.add(place)

    def gather(self, w: World, copy: Copy) -> None:
        """A gather is launched: nothing else may use its staging slot. Raises Violation."""
        for _, flight in self._flights.each(w.air):
            if (flight.producer, flight.staging) == (copy.life, copy.slot):
                raise Violation(f"sources are held: a part is gathered over one of {flight.key} that a WRITE reads")
        for _, other in self._copies.each(w.copies):
            if other.gathers and (other.life, other.slot) == (copy.life, copy.slot):
                raise Violation(f"sources are held: two parts are gathered into staging slot {copy.slot}")

    def post(self, w: World, flight: Flight) -> None:
        """A staging slot is posted: its gather must be over. Raises Violation."""
        for _, copy in self._copies.each(w.copies):
            if copy.gathers and (copy.life, copy.slot) == (flight.producer, flight.staging):
                raise Violation(f"sources are held: a WRITE of {flight.key} is posted from what is still gathered")

    def scatter(self, copy: Copy, landed: frozenset[tuple[Credit, tuple[Span, ...]]], owner: Any) -> None:
        """A scatter is launched: of what has landed, into its own transfer's block. Raises Violation."""
        if (Credit(copy.slot, copy.number), copy.spans) not in landed:
            raise Violation(
                f"scattered as landed: slot {copy.slot} is scattered for {copy.key} and holds other bytes"
            )
        check_block(copy, owner)


def check_block(copy: Copy, owner: TransferKey | None) -> None:
    """A scatter that runs writes into its own transfer's block. Raises Violation."""
    if owner != copy.key:
        raise Violation(f"custody ends on proof: {copy.key} is scattered into a block of {owner or 'somebody else'}")


def _check_flight(held: Berths, flight: Flight) -> None:
    credit = flight.complete.credit
    assert credit is not None
    berth = held.get(credit.slot)
    mine = (flight.producer, flight.key, flight.complete.part, credit.generation)
    if berth is None or berth[:4] != mine or berth[4] not in (Slot.GRANTED, Slot.QUARANTINED):
        whose = "nobody's" if berth is None else f"granted for part {berth[2]} of {berth[1]} ({berth[4].value})"
        raise Violation(f"custody ends on proof: bytes of {flight.key} land in slot {credit.slot}, now {whose}")


def landed_in(completes: list[Complete]) -> frozenset[tuple[Credit, tuple[Span, ...]]]:
    """What has landed in which slot."""
    return frozenset((one.credit, one.spans) for one in completes if one.credit is not None)


def check_ring(machine: ConsumerMachine) -> None:
    """What must hold of a consumer's ring in every state. Raises Violation.

    Blocks come back as soon as their transfer is over and no scatter for it runs: no proof is waited for.
    """
    held = list(machine._ring._berths)
    if sorted([*machine.slots._free, *held]) != list(range(machine.slots.count)):
        raise Violation(f"slots are counted: {held} are in custody, and {list(machine.slots._free)} free")
    for key, transfer in machine._transfers.items():
        done = transfer.state is Receiving.OVER and not machine._ring.scattering(key)
        if transfer.lands and done and not transfer.released:
            raise Violation(f"blocks come back: {key} is over, nothing is scattered for it, and its block is kept")


def check_staging(machine: ProducerMachine) -> None:
    """Every staging slot is free or holds one part. Raises Violation."""
    held = [packed.slot for packed in machine._staging._packed.values()]
    if sorted([*machine.slots._free, *held]) != list(range(machine.slots.count)):
        raise Violation(f"slots are counted: {held} are in custody, and {list(machine.slots._free)} free")
