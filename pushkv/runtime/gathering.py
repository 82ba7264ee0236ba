"""The producer's staging slots on its transfer thread: gathers, and WRITEs out of slots."""

from __future__ import annotations

from functools import partial

from pushkv.backends.base import Fence
from pushkv.core.commands import Gather
from pushkv.core.memory import Region
from pushkv.runtime.pair import Pair, tables
from pushkv.runtime.posting import Posting


class Gathering(Posting):
    """The part of the producer's side that has to do with gathers."""

    def gather(self, command: Gather) -> None:
        """Have a part gathered into its staging slot; the machine is told when that has ended."""
        write = command.write

        def told(error: str) -> None:
            self.machine.gathered(write, self.shared.clock(), error)

        pair = self.agents.get(command.peer)
        if pair is None:
            told(f"{command.peer} is not connected any more")
            return
        self.shared.stats["gathers"] += 1
        self.copy(pair, partial(self._gather, pair, command), told)

    def _gather(self, pair: Pair, command: Gather) -> Fence:
        """Plan and pack."""
        assert self.shared.slots is not None
        source, target = tables(command.source), tables(command.target)
        plans = pair.plans.gather(source, target, command.spans, command.end)
        return self.shared.slots.gather(plans, command.slot)

    def reached(self, pair: Pair) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
        """A region of each side that a WRITE may touch: slots where there are any, as they may be all that does."""
        ours, theirs = self.shared.slots, pair.theirs.slots
        return (
            self.shared.cache.regions[:1] if ours is None else (ours.region,),
            pair.theirs.regions[:1] if theirs is None else (theirs.region,),
        )
