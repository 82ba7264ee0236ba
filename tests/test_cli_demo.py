"""``pushkv demo``, as a user runs it: two processes over NIXL, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SMALL = ("--requests", "16", "--longest", "160", "--new-tokens", "8", "--chunk", "64", "--no-raw")
PROMISED = {
    "ok": bool,
    "tokens_equal": bool,
    "requests": int,
    "bytes": int,
    "transport": str,
    "descriptors": int,
    "handover_ms_p50": float,
    "handover_ms_p99": float,
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pushkv", "demo", *arguments]


def demo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def told() -> subprocess.CompletedProcess[str]:
    return demo("--json", *SMALL)


def test_json_is_the_only_thing_on_standard_output(told: subprocess.CompletedProcess[str]) -> None:
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert {name: type(found[name]) for name in PROMISED} == PROMISED
    assert found["ok"] is True
    assert found["tokens_equal"] is True
    assert found["requests"] == 16
    assert found["troubles"] == []
    assert found["transport"].startswith("NIXL ")
    assert 0 < found["descriptors"] < found["descriptors_before"]


def test_progress_goes_to_standard_error(told: subprocess.CompletedProcess[str]) -> None:
    assert "connected (UCX" in told.stderr
    assert "requests done: 16/16" in told.stderr
