"""One producer rank and one consumer rank that know each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pushkv.core.geometry import BlockTable, Geometry
from pushkv.core.memory import Region
from pushkv.core.messages import Blocks, Ring
from pushkv.core.parts import PartPlans
from pushkv.core.template import PairTemplate, Range
from pushkv.core.ways import ASSUMED, Meter, Prices
from pushkv.runtime import wire
from pushkv.runtime.control import Route
from pushkv.transport.host import ProcessWatch


@dataclass
class Pair:
    """One producer rank and one consumer rank that know each other. ``agent`` is the other's.

    A new handshake of the same two epochs gives a new token. Whichever side is behind goes on with the old one for
    a while, so the last ones stay good (``former``), and a producer starts to use the new one when the consumer
    has (``coming`` until then): a handshake that failed half-way leaves the pair as it was.
    """

    token: bytes
    route: Route
    theirs: wire.Side
    template: PairTemplate
    watch: ProcessWatch | None
    heard: float
    spoken: float = -math.inf
    """When the other side was last sent a notification."""
    prepared: int | None = None
    room: int = 0
    """Bytes that a part may have to be landed; 0 where it cannot be."""
    lost: bool = False
    moved: bool = False
    """The other side wants to be met again: it goes on with another agent, or its way to this one is gone."""
    broken: bool = False
    """The way to the peer is gone, so that only a new handshake brings it back."""
    former: tuple[bytes, ...] = ()
    coming: bytes = b""
    meter: Meter = field(default_factory=Meter)
    """A producer's: what its WRITEs to this peer cost."""
    measured: Prices = ASSUMED
    """A consumer's: what this peer has measured."""
    fellows: tuple[str, ...] = ()
    """The addresses of all ranks of the other side's engine, where it has told them."""
    _readers: tuple[PairTemplate, tuple[PairTemplate, ...]] | None = None

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """All tokens that are good for this pair."""
        return (self.token, *self.former, *([self.coming] if self.coming else []))

    def readers(self, fellows: Sequence[Geometry], tokens: Range | None = None) -> int:
        """To how many ranks of our engine this producer rank writes: this one, and those with these geometries.

        With ``tokens``, of a request for those: where ranks share tokens out some may get nothing of it.
        """
        if self._readers is None or self._readers[0] is not self.template:
            source = self.template.source
            templates = (self.template, *(PairTemplate(source, one) for one in fellows))
            self._readers = self.template, tuple(one for one in templates if one.writes)
        writing = self._readers[1]
        if tokens is None or not any(one.striped for one in writing):
            return len(writing)
        return sum(bool(one.owed(tokens)) for one in writing)

    @cached_property
    def plans(self) -> PartPlans:
        """The copies of its parts into slots and out of them."""
        return PartPlans(self.template)

    @property
    def agent(self) -> str:
        """The other side's agent name."""
        return self.theirs.agent

    def addresses(self, region: NDArray[np.int64], offset: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Addresses in the other side's memory."""
        return addresses(self.theirs.regions, region, offset)


def addresses(
    regions: tuple[Region, ...], region: NDArray[np.int64], offset: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The absolute addresses of offsets into regions."""
    bases = np.fromiter((one.address for one in regions), np.uint64, len(regions))
    return np.asarray(bases[region] + offset.astype(np.uint64), np.uint64)


def tables(blocks: Blocks | Ring) -> tuple[BlockTable, ...]:
    """A message's block tables as the planner takes them."""
    return tuple(BlockTable(table.first, np.frombuffer(table.ids, "<i4")) for table in blocks.tables)
