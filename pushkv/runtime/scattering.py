"""The consumer's landing slots on its transfer thread: parts that have come are scattered into their blocks."""

from __future__ import annotations

from functools import partial

from pushkv.backends.base import Fence
from pushkv.core.commands import Scatter
from pushkv.runtime.loop import Urgency
from pushkv.runtime.pair import Pair, tables
from pushkv.runtime.verifying import Verifying


class Scattering(Verifying):
    """The part of the consumer's side that has to do with landing slots."""

    def urgency(self) -> Urgency:
        """As for any side, but a WRITE into a slot is looked for at once: others wait for the slot."""
        return max(super().urgency(), Urgency.SLOT if self.machine.lands else Urgency.NOTHING)

    def scatter(self, command: Scatter) -> None:
        """Have a landing slot scattered; the machine is told when that has ended."""

        def told(error: str) -> None:
            self.machine.scattered(command.slot, command.generation, self.shared.clock(), error)

        pair = self.agents.get(command.peer)
        if pair is None:
            told(f"{command.peer} is not connected any more")
            return
        self.shared.stats["scatters"] += 1
        self.copy(pair, partial(self._scatter, pair, command), told)

    def _scatter(self, pair: Pair, command: Scatter) -> Fence:
        """Plan and unpack."""
        assert self.shared.slots is not None
        plans = pair.plans.scatter(tables(command.target), command.spans, command.end)
        return self.shared.slots.scatter(command.slot, plans)
