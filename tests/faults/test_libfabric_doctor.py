"""``pushkv doctor`` over NIXL's real LIBFABRIC on a machine without EFA: its fall-back to TCP is a failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("PUSHKV_LIBFABRIC", "")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FOLDER, reason="make test-libfabric installs what this takes, and runs it"),
]


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    settings = {key: value for key, value in os.environ.items() if not key.startswith("FI_")}
    settings.update(environment, LD_LIBRARY_PATH=f"{FOLDER}/lib", PYTHONPATH=f"{FOLDER}/site{os.pathsep}{ROOT}")
    command = [sys.executable, "-m", "pushkv", "doctor", "--json", "--backend", "cpu", "--transport", "LIBFABRIC"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=110, check=False)
    told = json.loads(done.stdout)
    (path,) = told["backends"][0]["paths"]
    return done.returncode, {check["name"]: check for check in path["checks"]}


def test_a_fall_back_to_tcp_is_a_failure_although_the_push_arrives() -> None:
    code, checks = doctor()
    assert code == 1
    assert checks["push"]["verdict"] == "pass"
    assert checks["provider in use"]["verdict"] == "fail"
    assert "NIXL fell back from EFA to provider tcp" in checks["provider in use"]["found"]


def test_tcp_that_was_asked_for_is_not() -> None:
    code, checks = doctor(FI_PROVIDER="tcp")
    assert code == 0
    assert checks["provider in use"]["verdict"] == "warning"
