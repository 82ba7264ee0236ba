"""Plain text for a terminal: aligned tables, readable quantities, a progress line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """A number of bytes in the largest unit that leaves at least one: ``1536`` is ``1.5 KiB``."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {BYTE_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """A duration in s, ms or µs, with three digits or so: ``0.00123`` is ``1.23 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under a header and a rule, two spaces apart; a column that holds only numbers is set to the right.

    Every row has as many cells as the header (ValueError otherwise). The text ends without a newline.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True)) if cells else [(title,) for title in header]
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(row, widths, right) for row in [list(header), rule, *cells])


def format_facts(facts: Sequence[tuple[str, object]]) -> str:
    """Names and values, one pair a line, the values aligned."""
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in facts)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    placed = [
        cell.rjust(width) if to_right else cell.ljust(width)
        for cell, width, to_right in zip(cells, widths, right, strict=True)
    ]
    return "  ".join(placed).rstrip()


class Progress:
    """A line that counts up to ``total``: rewritten in place on a terminal, elsewhere a new line each quarter.

    It writes to ``stream``, standard error by default, so that standard output stays clean for JSON.
    """

    def __init__(self, label: str, total: int, *, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._label, self._total, self._quiet = label, total, quiet
        self._stream = sys.stderr if stream is None else stream
        self._in_place = self._stream.isatty()
        self._shown = -1
        self.done = 0

    def advance(self, count: int = 1) -> None:
        """Count on and show it."""
        self.done = min(self.done + count, self._total)
        quarter = 4 * self.done // self._total if self._total else 4
        if self._quiet or (not self._in_place and quarter <= max(self._shown, 0)):
            return
        self._shown = quarter
        text = f"{self._label}: {self.done}/{self._total}"
        ends = self.done == self._total or not self._in_place
        self._stream.write(("\r" if self._in_place else "") + text + ("\n" if ends else ""))
        self._stream.flush()
