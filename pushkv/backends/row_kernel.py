"""Rows of bytes copied by Triton kernels, wherever on a device they lie.

Importing this imports triton; :mod:`pushkv.backends.cuda_packing` does so where it is to be had. Triton reads the
kernels' annotations as its own, so that those which say nothing to it are left out.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

TILE = 4096
"""Elements that a program copies: of rows that are long a part, of rows that are short several."""
_KINDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))
_NUMBERS = ["slot", "rows", "places", "steps", "across", "size", "width", "programs"]
"""One compiled kernel serves them all, be they 1 or multiples of 16: no transfer waits for a compiler."""


@triton.jit
def _move(source, target, there, column, width, KIND: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of some rows, by their addresses."""
    inside = there[:, None] & (column < width)[None, :]
    reads = source.to(tl.pointer_type(KIND))[:, None] + column[None, :]
    writes = target.to(tl.pointer_type(KIND))[:, None] + column[None, :]
    if WIDE:  # rows begin at multiples of 16 bytes: two elements go by one instruction
        reads = tl.max_contiguous(tl.multiple_of(reads, (1, 16)), (1, 2))
        writes = tl.max_contiguous(tl.multiple_of(writes, (1, 16)), (1, 2))
    tl.store(writes, tl.load(reads, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["rows", "width", "programs"])
def _copy_listed(  # type: ignore[no-untyped-def]
    addresses,
    rows,
    width,
    programs,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Element ``j`` of row ``i``: from address ``addresses[i]`` on to ``addresses[rows + i]`` on."""
    program = tl.program_id(0)  # the other dimensions of a grid end at 65,535
    row = program // programs * ROWS + tl.arange(0, ROWS)
    column = program % programs * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    source = tl.load(addresses + row, mask=there, other=0)
    target = tl.load(addresses + rows + row, mask=there, other=0)
    _move(source, target, there, column, width, KIND, WIDE)


@triton.jit(do_not_specialize=_NUMBERS)
def _copy_laid(  # type: ignore[no-untyped-def]
    numbers,
    slot,
    rows,
    places,
    steps,
    across,
    size,
    width,
    programs,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of ``size`` bytes between places and a slot; ``numbers`` are the places' addresses, then the steps."""
    program = tl.program_id(0)
    row = program // programs * ROWS + tl.arange(0, ROWS)
    column = program % programs * COLUMNS + tl.arange(0, COLUMNS)
    there = row < rows
    part = row // (steps * across)
    within = row % (steps * across)
    place = tl.load(numbers + part * across + within % across, mask=there, other=0)
    inside = place + tl.load(numbers + places + within // across, mask=there, other=0)
    packed = slot.to(tl.int64) + row.to(tl.int64) * size
    if OUT:
        _move(packed, inside, there, column, width, KIND, WIDE)
    else:
        _move(inside, packed, there, column, width, KIND, WIDE)


def copy_listed(addresses: Any, rows: int, width: int, grid: int) -> None:
    """Queue the copying of ``rows`` rows of ``width`` bytes on the current stream.

    ``addresses`` is a tensor of ``2 * rows`` int64 on the device, where the rows are and then where they go; ``grid``
    divides them all, and ``width``.
    """
    tiles = Tiles(rows, width, grid)
    _copy_listed[tiles.launch](addresses, rows, tiles.elements, tiles.programs, *tiles.fixed, num_warps=8)


def copy_laid(
    numbers: Any, slot: int, places: int, steps: int, across: int, width: int, grid: int, *, out: bool
) -> None:
    """Queue the copying of rows of ``width`` bytes between the slot at address ``slot`` and the cache.

    ``numbers`` is a tensor of ``places + steps`` int64 on the device: addresses, and steps in bytes, in the order of
    :class:`pushkv.core.runs.LaidRuns`. ``grid`` divides all of these; ``out`` of the slot, or into it.
    """
    rows = places * steps
    tiles = Tiles(rows, width, grid)
    sizes = rows, places, steps, across, width, tiles.elements, tiles.programs
    _copy_laid[tiles.launch](numbers, slot, *sizes, out, *tiles.fixed, num_warps=8)


class Tiles:
    """How rows are dealt out to a kernel's programs."""

    def __init__(self, rows: int, width: int, grid: int) -> None:
        size, kind = next((size, kind) for size, kind in _KINDS if grid % size == 0)
        self.elements = width // size
        columns = min(TILE, triton.next_power_of_2(self.elements))
        held = TILE // columns
        self.programs = triton.cdiv(self.elements, columns)
        self.launch = (triton.cdiv(rows, held) * self.programs,)
        self.fixed = (kind, grid % 16 == 0 and columns > 1, held, columns)
