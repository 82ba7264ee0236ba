"""Which way a consumer's transfers take, into its blocks or through slots; and what is done where no slot is left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from pushkv.config import EndpointConfig
from pushkv.core.messages import Blocks
from pushkv.core.ring import starved
from pushkv.core.template import Range
from pushkv.core.ways import LAYERED, Left, lands, weigh
from pushkv.errors import NoSlots
from pushkv.runtime.consuming import Consuming
from pushkv.runtime.pair import Pair, tables
from pushkv.runtime.slots import Slots

log = logging.getLogger(__name__)

WANTING = "offers without a landing slot"


class Way:
    """Chooses. ``sides`` are those of all lives of the endpoint, whose slots are theirs together."""

    def __init__(
        self,
        config: EndpointConfig,
        slots: Slots | None,
        sides: Callable[[], Iterable[Consuming]],
        stats: Counter[str],
    ) -> None:
        self._config, self._slots, self._sides, self._stats = config, slots, sides, stats
        given = config.landing_costs
        self._costs = given if slots is None or config.landing != "auto" else slots.costs(given)

    def lands(self, pairs: tuple[Pair, ...], into: Blocks, tokens: Range, address: str) -> bool:
        """Whether a transfer's parts land in slots: where they can, and ``auto`` finds it cheaper.

        Where no slot is to be had before there is proof, ``auto`` goes directly, and what can only land raises
        NoSlots; ``address`` is what `pushkv fence` is to be run with.
        """
        if self._slots is None or not all(pair.room for pair in pairs):
            return False
        if self._config.landing == "landing":
            if wanting := self._wanting(pairs):
                raise NoSlots(f"{wanting}: run `pushkv fence {address}` for proof")
            return True
        weights = [weigh(pair.template, tables(into), tokens) for pair in pairs]
        pieces, size = sum(weight.pieces for weight in weights), sum(weight.bytes for weight in weights)
        cheaper = lands(
            self._costs.prices([pair.measured for pair in pairs]),
            pieces,
            size,
            min(pair.room for pair in pairs),
            _left(pairs),
        )
        return cheaper and not self._wanting(pairs)

    def stuck(self) -> Counter[str]:
        """By peer, how many landing slots wait for nothing but proof."""
        return sum((side.stuck_slots for side in self._sides()), Counter())

    def figures(self) -> dict[str, int]:
        """What is to be told of it besides what is counted."""
        return {} if self._slots is None else {"landing slots without proof": self.stuck().total()}

    def _wanting(self, pairs: tuple[Pair, ...]) -> str:
        """Why one of these producers can get no slot before there is proof; empty where all can."""
        assert self._slots is not None
        stuck, count = self.stuck(), self._slots.pool.count
        who = [pair.agent for pair in pairs if pair.template.writes and starved(stuck, pair.agent, count)]
        if not who:
            return ""
        what = f"{stuck.total()} of {count} landing slots are quarantined, and {who[0]} can get none"
        self._stats[WANTING] += 1
        if self._stats[WANTING].bit_count() == 1:  # the first, second, fourth, …
            log.warning("%s: %s", self._config.engine, what)
        return what


def _left(pairs: tuple[Pair, ...]) -> Left:
    """What is left of a transfer from these producers when the prompt is computed, the most of any of them.

    Where layers of a block lie side by side, they go together where they go directly.
    """
    landing = LAYERED if all(pair.theirs.layers for pair in pairs) else 1.0
    return Left(landing if all(pair.template.layers_apart for pair in pairs) else 1.0, landing)
