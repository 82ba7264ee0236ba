"""Gather and scatter in host memory with numpy: no loop over rows, and the GIL is free while bytes move.

Host memory is one address space, so rows are taken by address, wherever their regions are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pushkv.backends.base import Fence, PassedFence
from pushkv.backends.rows import Int64, Rows, Runs, aligned, rows_of
from pushkv.core.memory import Region
from pushkv.errors import BackendError

CHUNK = 1 << 20
"""Bytes that pass through a buffer at once, where rows lie on no common grid."""
MOST = 1 << 62
"""Bytes of the largest array that numpy is asked for; it refuses those of 2**63."""
Bytes = NDArray[np.uint8]
AnyArray = NDArray[np.generic]


class CpuPacker:
    """Packs rows of these regions into slots, and back. ``arrays`` are kept alive as long as it is."""

    def __init__(self, regions: Sequence[Region], arrays: Sequence[object] = ()) -> None:
        self._bases = np.array([region.address for region in regions], np.int64)
        self._lengths = np.array([region.length for region in regions], np.int64)
        self._arrays = tuple(arrays)

    def gather(self, runs: Runs, slot: object) -> Fence:
        """Pack the runs into the slot; done when it returns."""
        packed = _bytes_of(slot)
        self._check(runs, packed)
        for rows in rows_of(runs):
            _gather(self._bases[rows.region] + rows.offset, rows, packed)
        return PassedFence()

    def scatter(self, slot: object, runs: Runs) -> Fence:
        """Unpack the slot to the runs; done when it returns."""
        packed = _bytes_of(slot)
        self._check(runs, packed)
        for rows in rows_of(runs):
            _scatter(self._bases[rows.region] + rows.offset, rows, packed)
        return PassedFence()

    def _check(self, runs: Runs, packed: Bytes) -> None:
        check_runs(runs, self._lengths, packed.nbytes)


def check_runs(runs: Runs, lengths: Int64, room: int) -> None:
    """Raise BackendError unless every run lies in its region and all together fit into the slot."""
    if runs.bytes > room:
        raise BackendError(f"{runs.bytes} bytes do not fit into a slot of {room}; cut the part smaller")
    ends = runs.ends
    if not ends.length.size:
        return
    known = (ends.region >= 0) & (ends.region < lengths.size)
    inside = (
        known.all()
        and not ((ends.offset < 0) | (ends.length < 0) | (ends.offset + ends.length > lengths[ends.region])).any()
    )
    if not inside:
        raise BackendError("a run lies outside its region; plan it against this cache's geometry")


def _bytes_of(slot: object) -> Bytes:
    """A slot's memory: a contiguous array of bytes, numpy's or a torch tensor's on the CPU."""
    array: Bytes = slot if isinstance(slot, np.ndarray) else slot.numpy()  # type: ignore[attr-defined]
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise BackendError(f"a slot of dtype {array.dtype} and shape {array.shape}; give a row of bytes")
    return array


class _Addresses:
    """A stretch of this process's address space, as numpy takes one in."""

    def __init__(self, start: int, length: int) -> None:
        self.__array_interface__ = {"data": (start, False), "shape": (length,), "typestr": "|u1", "version": 3}


def _memory(start: int, stop: int) -> Bytes:
    """The bytes between two addresses, whatever of them is mapped; only rows that are known to be are touched."""
    return np.asarray(_Addresses(start, stop - start))


def _grid(memory: Bytes, width: int) -> AnyArray:
    """The memory as elements of ``width`` bytes."""
    whole: AnyArray = memory[: memory.nbytes // width * width].view(f"V{width}")
    return whole


def _windows(memory: Bytes, width: int) -> AnyArray:
    """An element of ``width`` bytes at each byte of the memory; they overlap."""
    return as_strided(memory[:width].view(f"V{width}"), (memory.nbytes - width + 1,), (1,))


def _copy(target: Bytes, to: Int64, source: Bytes, at: Int64, width: int) -> None:
    """Copy rows of ``width`` bytes, wherever they begin.

    Numpy counts elements that overlap as if they did not, and refuses arrays of 2**63 bytes: where rows lie that far
    apart, as on the heap and in mapped memory (2**45 bytes), they are of many KiB, and copied one by one.
    """
    if max(source.nbytes, target.nbytes) * width >= MOST:
        for begin, place in zip(to.tolist(), at.tolist(), strict=True):
            target[begin : begin + width] = source[place : place + width]
        return
    sources, targets = _windows(source, width), _windows(target, width)
    for some in _chunks(len(to), width):
        targets[to[some]] = sources[at[some]]


def _gather(addresses: Int64, rows: Rows, slot: Bytes) -> None:
    width, start = rows.width, int(addresses.min())
    memory = _memory(start, int(addresses.max()) + width)
    places = addresses - start
    first, count = int(rows.packed[0]), len(rows)
    if _consecutive(rows) and aligned(places, width):
        # mode: "raise" would go through a buffer; the rows have been checked.
        packed = slot[first : first + count * width].reshape(count, width)
        np.take(memory.reshape(-1, width), places // width, axis=0, out=packed, mode="clip")
        return
    _copy(slot, rows.packed, memory, places, width)


def _scatter(addresses: Int64, rows: Rows, slot: Bytes) -> None:
    width, start = rows.width, int(addresses.min())
    memory = _memory(start, int(addresses.max()) + width)
    places = addresses - start
    first, count = int(rows.packed[0]), len(rows)
    if _consecutive(rows) and aligned(places, width):
        packed = _grid(slot[first : first + count * width], width)
        np.put(_grid(memory, width), places // width, packed, mode="clip")
        return
    _copy(memory, places, slot, rows.packed, width)


def _consecutive(rows: Rows) -> bool:
    return bool((np.diff(rows.packed) == rows.width).all())


def _chunks(count: int, width: int) -> list[slice]:
    size = max(1, CHUNK // width)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
