"""An endpoint's slots: the memory that parts are gathered into or land in, and copies between it and the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pushkv.backends.answers import asked
from pushkv.backends.base import Fence, PassedFence
from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.core.parts import PartCopy, least_slot
from pushkv.core.ring import SlotPool
from pushkv.core.runs import Runs
from pushkv.core.template import PairTemplate
from pushkv.core.ways import Costs
from pushkv.errors import BackendError, HandshakeError
from pushkv.runtime import wire

log = logging.getLogger(__name__)


MOST_QUICK = 1 << 18
"""To list more pieces than this takes long."""
PIECE = 2048
"""Bytes a piece of the copy that is measured."""


class Slots:
    """A ring of equal slots on the cache's device, allocated once for all lives of an endpoint."""

    def __init__(self, cache: KVCache, size: int, count: int) -> None:
        """Raises BackendError where the memory is not to be had, or the backend cannot gather and scatter."""
        self.size, self.pool = size, SlotPool(count)
        self._backend = cache.backend
        backend, device = cache.backend, cache.home[1]
        self._packer = asked(backend, "cannot make a packer", lambda: backend.packer(cache.regions, cache.arrays))
        self._longest_number, self._longest = max(enumerate(cache.regions), key=lambda one: one[1].length)
        self._memory: Any = asked(backend, "cannot allocate slots", lambda: backend.allocate(size * count, device))
        described = cache.backend.describe(self._memory)
        if (described.shape, described.itemsize, described.strides) != ((size * count,), 1, (1,)):
            raise BackendError(
                f"memory backend {cache.backend.name!r} was asked for {size * count} bytes and gave an array of "
                f"shape {described.shape} with {described.itemsize} bytes an element; report it to its author"
            )
        self.region = described.region
        self._first = described.offset

    def quick(self, grain: int) -> bool:
        """Whether a copy between a slot and pieces of at least ``grain`` bytes takes no time of the caller's."""
        return bool(getattr(self._packer, "queues", False)) and self.size <= grain * MOST_QUICK

    def costs(self, given: Costs) -> Costs:
        """What moving bytes costs, with the speed of copies measured where it is not given."""
        return given if given.copy else msgspec.structs.replace(given, copy=self._copy_speed())

    def _copy_speed(self) -> float:
        """Bytes a second of a gather of pieces of 2 KiB; nothing of the cache is changed."""
        size = min(self.size, self._longest.length) // PIECE * PIECE
        if not size:
            return 1e9
        region = np.full(size // PIECE, self._longest_number, np.int64)
        offset = np.random.default_rng(0).permutation(self._longest.length // PIECE)[: region.size] * PIECE
        runs = Runs(region, offset.astype(np.int64), np.full(region.size, PIECE, np.int64))
        taken = []
        for _ in range(3):
            began = time.perf_counter()
            self._packer.gather(runs, self._slot(0)).wait()
            taken.append(time.perf_counter() - began)
        return size / max(min(taken), 1e-9)

    def offset(self, slot: int) -> int:
        """Where a slot begins in the region, in bytes."""
        return self._first + slot * self.size

    def gather(self, copies: Sequence[PartCopy], slot: int) -> Fence:
        """Pack the copies' sources, one after the other."""
        fence: Fence = PassedFence()
        for runs, memory in self._packed([copy.reads for copy in copies], slot):
            fence = self._packer.gather(runs, memory)
        return fence

    def scatter(self, slot: int, copies: Sequence[PartCopy]) -> Fence:
        """Unpack to the copies' targets."""
        fence: Fence = PassedFence()
        for runs, memory in self._packed([copy.writes for copy in copies], slot):
            fence = self._packer.scatter(memory, runs)
        return fence

    def _packed(self, many: list[Runs], slot: int) -> Iterator[tuple[Runs, Any]]:
        """Runs with the memory they are packed in. The fence of the last is behind all."""
        memory, at = self._slot(slot), 0
        for runs in many:
            yield runs, memory[at : at + runs.bytes]
            at += runs.bytes

    def stretch(self, slot: int, length: int) -> Runs:
        """The first bytes of a slot, as :meth:`read` takes them."""
        none = np.zeros(1, np.int64)
        return Runs(none, none + slot * self.size, none + length)

    def read(self, runs: Runs) -> NDArray[np.uint8]:
        """The bytes of a run in host memory, its offset counted from the first slot on. Raises BackendError."""
        (offset,), (length,) = runs.offset.tolist(), runs.length.tolist()
        return self._backend.to_host(self._memory[offset : offset + length])

    def _slot(self, slot: int) -> Any:
        return self._memory[slot * self.size : (slot + 1) * self.size]

    def described(self, only: bool) -> wire.Slots:
        """As the other side gets to know them."""
        return wire.Slots(self.region, self._first, self.size, self.pool.count, only)


def slots_of(config: EndpointConfig, cache: KVCache) -> Slots | None:
    """The slots that a config asks for. None for direct landing, and by choice where the backend has none to give."""
    if config.landing == "direct":
        return None
    count = config.landing_bytes // config.slot_bytes
    try:
        slots = Slots(cache, config.slot_bytes, count)
    except BackendError as error:
        if config.landing == "landing":
            raise
        log.warning("%s lands directly: %s", config.engine, error)
        return None
    log.info("%s has %d slots of %d bytes, %d in all.", config.engine, count, slots.size, count * slots.size)
    return slots


def pool_of(slots: Slots | None) -> SlotPool:
    """Which slots are free; none where there are none."""
    return SlotPool(0) if slots is None else slots.pool


def agreed_room(me: wire.Side, theirs: wire.Side, template: PairTemplate) -> int:
    """How many bytes a part of this pair may have; 0 where parts cannot be landed between the two.

    Raises HandshakeError where one side wants nothing else.
    """
    only = [side.agent for side in (me, theirs) if side.slots is not None and side.slots.only]
    lacking = [side.agent for side in (me, theirs) if side.slots is None]
    if lacking:
        if only:
            raise HandshakeError(f"{only[0]} has landing='landing' and {lacking[0]} no slots: set landing there too")
        return 0
    assert me.slots is not None
    assert theirs.slots is not None
    room = min(me.slots.size, theirs.slots.size)
    if (least := least_slot(template)) > room:
        if only:
            raise HandshakeError(f"one token of one layer has {least} bytes and a slot {room}: set larger slot_bytes")
        return 0
    return room
