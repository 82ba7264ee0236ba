"""``pushkv backends``: which memory backends there are, and how each one stands."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pushkv.commands.aside import words_aside

if TYPE_CHECKING:
    from pushkv.discovery import Entry
    from pushkv.plugins import Status

_HEADER = ("NAME", "DEVICES", "DISTRIBUTION", "STATUS")


@dataclass(frozen=True)
class Row:
    """One backend or broken plug-in, and how it stands."""

    entry: Entry
    status: Status


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand's parser."""
    parser = subparsers.add_parser(
        "backends",
        help="list the memory backends and how each one stands",
        description="List the memory backends: name, device types, distribution and status.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--probe", action="store_true", help="import the device libraries and ask them; slower")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the listing; 0 whatever stands in it. Raises PushKVError when the backends cannot be listed."""
    from pushkv.plugins import registry

    with words_aside():
        known = registry()
        rows = [Row(entry, known.status(entry, probe=args.probe)) for entry in known.entries]
    print(json.dumps(as_json(rows, probed=args.probe), indent=2) if args.json else as_table(rows))
    return 0


def as_json(rows: list[Row], *, probed: bool) -> dict[str, Any]:
    """The listing as one object: ``probed`` and ``backends``, one object each."""
    return {"probed": probed, "backends": [_object(row) for row in rows]}


def _object(row: Row) -> dict[str, Any]:
    record = row.entry.record
    return {
        "name": row.entry.name,
        "device_types": list(record.device_types) if record else [],
        "distribution": row.entry.source,
        "load": record.load if record else None,
        "status": row.status.state.value,
        "reason": row.status.reason,
        "checks": [
            {"name": check.name, "verdict": check.verdict.value, "found": check.found, "remedy": check.remedy}
            for check in row.status.checks
        ],
    }


def as_table(rows: list[Row]) -> str:
    """The listing for people, one line a backend and one a warning under it."""
    table = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADER) - 1)]
    lines = [_line(_HEADER, widths)]
    for row in rows:
        lines.append(_line(_cells(row), widths))
        if row.status.state.value == "ready":  # of what is not here anyway nobody wants to know
            lines += [f"  warning: {check}" for check in row.status.checks if check.verdict.value == "warning"]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    record = row.entry.record
    return (row.entry.name, ",".join(record.device_types) if record else "-", row.entry.source, str(row.status))


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)), cells[-1]])
