"""Runs of bytes of one side's memory, one after the other: listed, or in few numbers where they are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pushkv.core.pieces import Int64


@dataclass(frozen=True, eq=False)
class Runs:
    """``length[i]`` bytes from byte ``offset[i]`` of region number ``region[i]`` on, in this order.

    Runs that are written must not overlap.
    """

    region: Int64
    offset: Int64
    length: Int64

    @property
    def bytes(self) -> int:
        """How many bytes they have together."""
        return int(self.length.sum())

    @property
    def ends(self) -> Runs:
        """Runs of which this is true: where these lie in their regions, all do."""
        return self


class LaidRuns(Runs):
    """Runs of ``width`` bytes, one for each of some places and each of some steps; listed when first asked for.

    Place ``i`` is byte ``place[i]`` of region ``home[i]``. Run ``(p * steps + s) * across + i`` is place
    ``p * across + i``, ``step[s]`` bytes on: ``across`` places, then the same a step further.
    """

    home: Int64
    place: Int64
    step: Int64
    across: int
    width: int

    def __init__(self, home: Int64, place: Int64, step: Int64, across: int, width: int) -> None:
        self.__dict__.update(home=home, place=place, step=step, across=across, width=width)

    def __len__(self) -> int:
        return int(self.place.size * self.step.size)

    @property
    def bytes(self) -> int:
        """How many bytes they have together."""
        return len(self) * self.width

    def at(self, step: Int64) -> LaidRuns:
        """The same places at other steps."""
        return LaidRuns(self.home, self.place, step, self.across, self.width)

    @property
    def ends(self) -> Runs:
        """The lowest and the highest run of each place."""
        if not len(self):
            return Runs(self.home[:0], self.place[:0], self.place[:0])
        ends = np.concatenate((self.place + self.step.min(), self.place + self.step.max()))
        return Runs(np.concatenate((self.home, self.home)), ends, np.full(ends.size, self.width, np.int64))

    @cached_property
    def region(self) -> Int64:
        """As for any runs."""
        return self._listed(self.home, np.zeros_like(self.step))

    @cached_property
    def offset(self) -> Int64:
        """As for any runs."""
        return self._listed(self.place, self.step)

    @cached_property
    def length(self) -> Int64:
        """As for any runs."""
        return np.full(len(self), self.width, np.int64)

    def _listed(self, place: Int64, step: Int64) -> Int64:
        return (place.reshape(-1, 1, self.across) + step.reshape(1, -1, 1)).ravel()
