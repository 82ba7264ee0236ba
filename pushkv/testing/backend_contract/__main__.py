"""``python -m pushkv.testing.backend_contract``: which backend keeps which part of the contract, on this machine.

Runs the built-in backends' contracts and those that installed distributions declare in the entry-point group
``pushkv.contracts`` (an entry's value is a module of contract classes), each module in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata

from pushkv.testing.contracts.report import MARK

BUILTIN = (
    "pushkv.testing.contracts.cpu",
    "pushkv.testing.contracts.cuda",
    "pushkv.testing.contracts.neuron",
)
GROUP = "pushkv.contracts"
_SIGNS = {"passed": "yes", "skipped": "-", "failed": "NO"}
_WORST = ("passed", "skipped", "failed")


@dataclass
class Subject:
    """A backend on its device, and what came of each check. ``troubles`` are why some did not pass or run."""

    name: str
    outcomes: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)

    def note(self, check: str, outcome: str, why: str) -> None:
        """Take in one run of a check; the worst of its runs counts."""
        self.outcomes[check] = max(self.outcomes.get(check, "passed"), outcome, key=_WORST.index)
        told = why if outcome == "skipped" else f"{_words(check)}: {why}"
        if outcome != "passed" and told not in self.troubles:
            self.troubles.append(told)

    @property
    def verdict(self) -> str:
        """``"passed"``, ``"skipped"`` where nothing could run, or ``"failed"``."""
        found = set(self.outcomes.values())
        if "failed" in found or not found:
            return "failed"
        return "skipped" if found == {"skipped"} else "passed"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 unless a check failed."""
    parser = argparse.ArgumentParser(prog="python -m pushkv.testing.backend_contract", description=__doc__)
    parser.add_argument("modules", nargs="*", help="modules of contract classes (default: all that are known)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    subjects = [subject for module in args.modules or known() for subject in examine(module)]
    print(json.dumps(as_json(subjects), indent=2) if args.json else as_table(subjects))
    return 1 if any(subject.verdict == "failed" for subject in subjects) else 0


def known() -> list[str]:
    """The built-in modules and those of installed distributions."""
    return [*BUILTIN, *(point.value for point in metadata.entry_points(group=GROUP))]


def examine(module: str) -> list[Subject]:
    """Run one module's contracts in a process of its own."""
    command = [sys.executable, "-m", "pushkv.testing.contracts.report", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    subjects: dict[str, Subject] = {}
    for name, check, outcome, why in json.loads(lines[-1].removeprefix(MARK)) if lines else []:
        subjects.setdefault(name, Subject(name)).note(check, outcome, why)
    if not subjects:
        why = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()[-1]
        return [Subject(module, troubles=[f"it ran no check: {why}"])]
    return list(subjects.values())


def as_json(subjects: Sequence[Subject]) -> dict[str, object]:
    """``ok`` and ``subjects``, one object each."""
    told = [
        {"name": one.name, "verdict": one.verdict, "checks": one.outcomes, "troubles": one.troubles}
        for one in subjects
    ]
    return {"ok": all(one.verdict != "failed" for one in subjects), "subjects": told}


def as_table(subjects: Sequence[Subject]) -> str:
    """A line a check and a column a backend, then why what did not pass did not."""
    checks = list(dict.fromkeys(check for subject in subjects for check in subject.outcomes))
    widths = [max(len(subject.name), 3) for subject in subjects]
    first = max([len(_words(check)) for check in checks] + [len("CHECK")])
    lines = [_row("CHECK", [subject.name for subject in subjects], first, widths)]
    for check in checks:
        cells = [_SIGNS[subject.outcomes[check]] if check in subject.outcomes else "" for subject in subjects]
        lines.append(_row(_words(check), cells, first, widths))
    lines += [f"{subject.name}: {trouble}" for subject in subjects for trouble in subject.troubles]
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str], first: int, widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([name.ljust(first), *padded]).rstrip()


def _words(check: str) -> str:
    return check.removeprefix("test_").replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
