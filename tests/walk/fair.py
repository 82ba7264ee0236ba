"""Fair weather: from every state, if only good things happen from now on, everything comes to its end.

The engines ask for nothing more, nobody dies or is lost, WRITEs land and are told, messages arrive, who is apart
connects again, who is gone is proven gone, and timers go off. Then every transfer must be over on both sides, and
no memory in custody but for WRITEs that failed, whose bytes may travel as long as both processes live.
"""

from __future__ import annotations

from typing import Any

from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import TransferKey
from pushkv.core.producer import ProducerMachine
from pushkv.core.states import Pack, Receiving, Sending, Slot, Source, Target
from walk.errors import Violation
from walk.moves import Moves
from walk.world import World

_GOOD = (
    "starts again", "land", "gather ends", "scatter ends", "told done", "has proof", "connects", "gets", "timer",
)  # fmt: skip


class FairWeather:
    """Checks worlds, and remembers which it has checked."""

    def __init__(self, moves: Moves) -> None:
        self._moves = moves
        self._good: set[World] = set()

    def check(self, world: World) -> None:
        """Follow a world to its end; raises Violation where it does not come to one."""
        chain: dict[World, None] = {}
        while world not in self._good:
            if world in chain:
                raise Violation("nothing hangs: in fair weather it goes round in circles")
            chain[world] = None
            after = self._next(world)
            if after is None:
                self._settled(world)
                break
            world = after
        self._good.update(chain)  # |= would copy the set

    def _next(self, world: World) -> World | None:
        best, found = len(_GOOD), None
        for name, made in self._moves.of(world):
            rank = _rank(name)
            if rank < best and (after := self._moves.rules.normal(made)) != world:
                best, found = rank, after
        return found

    def _settled(self, world: World) -> None:
        rules = self._moves.rules
        left = rules.cs.fact(world.c, unsettled_consumer)
        waiting = rules.cs.fact(world.c, quarantined)
        for p in world.ps:
            left = left or rules.ps.fact(p, unsettled_producer)
            waiting -= rules.ps.fact(p, stuck)
        left = left or "".join(f"{key} waits for a proof that nobody owes" for key in waiting)
        if left:
            raise Violation(f"nothing hangs: in fair weather {left}")


def _rank(name: tuple[Any, ...]) -> int:
    return _GOOD.index(name[1]) if name[1] in _GOOD else len(_GOOD)


def unsettled_consumer(machine: ConsumerMachine) -> str:
    """What a consumer still waits for, besides proof about a failed WRITE."""
    for key, transfer in machine._transfers.items():
        if transfer.state is Receiving.OPEN:
            return f"{key} stays open at the consumer"
        for peer, rank in transfer.ranks.items():
            if rank.custody not in (Target.ENDED, Target.QUARANTINED):
                return f"{key} stays {rank.custody.value} at {peer}"
    busy = {slot for slot in machine.landing_slots() if slot is not Slot.QUARANTINED}
    return f"slots stay {', '.join(slot.value for slot in busy)}" if busy else ""


def unsettled_producer(machine: ProducerMachine) -> str:
    """What a producer still waits for, besides proof about a failed WRITE."""
    for serving in machine._book:
        if serving.state is not Sending.OVER:
            return f"{serving.offer.key} stays open at the producer"
        if serving.custody is not Source.STUCK:
            return f"the sources of {serving.offer.key} stay {serving.custody.value}"
    if len(machine._stages) and not machine.reading:
        return "a stage stays"
    if busy := {pack for pack in machine.staging_slots() if pack is not Pack.STUCK}:
        return f"staging slots stay {', '.join(pack.value for pack in busy)}"
    return ""


def quarantined(machine: ConsumerMachine) -> frozenset[TransferKey]:
    """The transfers whose blocks wait for proof at the consumer."""
    return frozenset(machine._transfers)


def stuck(machine: ProducerMachine) -> frozenset[TransferKey]:
    """The transfers of which a WRITE failed whose bytes may travel."""
    return frozenset(serving.offer.key for serving in machine._book if serving.custody is Source.STUCK)
