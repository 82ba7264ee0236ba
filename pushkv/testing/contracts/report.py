"""Runs one module of contract classes in this process and prints what came of each check, as JSON.

A module of its own process: a fake device stays in the process that installed it. This file lies outside of the
contract's own package, which pytest has to import itself for a failed check to say what it has found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

MARK = "contract report: "
"""What the line with the JSON begins with; a device library may print on its own."""


class Collector:
    """A pytest plug-in that notes the outcome of each check: (subject, check, outcome, why)."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, str, str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the call, or what kept it from being made."""
        if report.when != "call" and report.passed:
            return
        subject, check = report.nodeid.split("::")[1:3]
        self.noted.append((subject.removeprefix("Test"), check.partition("[")[0], report.outcome, _why(report)))


def _why(report: pytest.TestReport) -> str:
    if report.passed:
        return ""
    told: Any = report.longrepr
    if isinstance(told, tuple):
        return str(told[2]).removeprefix("Skipped: ")
    crash = getattr(told, "reprcrash", None)
    return str(crash.message if crash else told).splitlines()[0][:300]


def main(argv: Sequence[str]) -> int:
    """Run the contract classes of the module that is named; 0 if all that ran passed."""
    collector = Collector()
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", "/dev/null", "--tb=no"]
    code = pytest.main([*options, "--pyargs", *argv], plugins=[collector])
    print(MARK + json.dumps(collector.noted))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
