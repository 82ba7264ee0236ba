"""What the doctor found, as a text for people and as one object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pushkv.backends.base import Check, Verdict
from pushkv.doctor.examination import Examined
from pushkv.plugins import State

_SIGNS = {Verdict.PASS: "ok  ", Verdict.WARN: "warn", Verdict.FAIL: "FAIL"}


def healthy(found: Sequence[Examined]) -> bool:
    """Whether a push would work: something was considered, and nothing of it stands in the way."""
    return any(one.considered for one in found) and all(one.ok for one in found)


def as_json(found: Sequence[Examined]) -> dict[str, Any]:
    """``ok`` and ``backends``, one object each, with every check."""
    return {"ok": healthy(found), "backends": [_object(one) for one in found]}


def _object(one: Examined) -> dict[str, Any]:
    return {
        "name": one.entry.name,
        "distribution": one.entry.source,
        "considered": one.considered,
        "ok": one.ok,
        "status": one.status.state.value,
        "reason": one.status.reason,
        "checks": list(map(_check, one.status.checks)),
        "paths": [
            {"mover": path.mover, "ok": path.ok, "checks": list(map(_check, path.checks))} for path in one.paths
        ],
    }


def _check(check: Check) -> dict[str, str]:
    return {"name": check.name, "verdict": check.verdict.value, "found": check.found, "remedy": check.remedy}


def as_text(found: Sequence[Examined]) -> str:
    """A line a check under its backend and data mover, the remedy under what did not pass, and a last word."""
    return "\n".join(_lines(found))


def _lines(found: Sequence[Examined]) -> Iterator[str]:
    for one in found:
        if not one.considered:
            yield f"{one.entry.name}: not here ({one.status})"
            continue
        yield f"{one.entry.name}: {one.status.state.value}"
        yield from _told(one.status.checks)
        if one.status.state is not State.READY and not one.status.checks:
            yield f"  FAIL {one.status.reason}"
        for path in one.paths:
            yield f"{one.entry.name} over {path.mover}: {_verdict(path.ok, path.tried)}"
            yield from _told(path.checks)
    tried = all(path.tried for one in found for path in one.paths)
    yield f"As this machine is, {_verdict(healthy(found), tried)}."


def _verdict(ok: bool, tried: bool) -> str:
    if not ok:
        return "a push would not work"
    return "a push works" if tried else "nothing was found that stands in the way of a push (none was tried)"


def _told(checks: Sequence[Check]) -> Iterator[str]:
    for check in checks:
        yield f"  {_SIGNS[check.verdict]} {check.name}: {check.found}"
        if check.verdict is not Verdict.PASS and check.remedy:
            yield f"       -> {check.remedy}"
