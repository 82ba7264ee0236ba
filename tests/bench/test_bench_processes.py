"""``pushkv bench`` as a user runs it, small: real processes and real NIXL; nothing is said of how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def bench(*argv: str) -> dict[str, Any]:
    """What it prints with ``--json``."""
    command = [sys.executable, "-m", "pushkv", "bench", *argv, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_serve_in_every_mode() -> None:
    """Every request gets all of its tokens, with its own KV: the engines check the bytes and fail the run else."""
    argv = ["--lengths", "64", "--rates", "50", "--seconds", "0.1", "--chunk", "32", "--new-tokens", "3"]
    told = bench("serve", *argv, "--decode-ms", "1", "--modes", "none,pull,pull-default,push,stream")
    assert [(cell["length"], cell["mode"]) for cell in told["cells"]] == [
        (64, mode) for mode in ("none", "pull", "pull-default", "push", "stream")
    ]
    for one in told["cells"]:
        assert one["requests"] == 8
        assert one["prefill_ms_p50"] > 0
        assert 0 < one["ttft_ms_p50"] <= one["ttft_ms_max"]
        assert 0 < one["tpot_ms_mean"] <= one["tpot_ms_max"]
        assert one["tpot_over_none"] > 0
    assert {"date", "cores", "nixl", "python", "tls"} <= told["where"].keys()


def test_handover() -> None:
    told = bench("handover", "--sizes", "65536", "--repeats", "2", "--idle-seconds", "0.1")
    (row,) = told["rows"]
    assert row["bytes"] == 65536
    assert min(row["raw_write_ms_p50"], row["handover_ms_p50"], row["offer_seen_ms_p50"]) > 0
    assert set(told["idle_share_of_a_core"]) == {"consumer", "producer"}


def test_descriptors() -> None:
    """Every byte is checked by the measurement itself."""
    told = bench("descriptors", "--pieces", "512,4096", "--count", "4", "--regions", "3", "--repeats", "1",
                 "--slot", "65536")  # fmt: skip
    assert [row["piece"] for row in told["rows"]] == [512, 4096]
    for row in told["rows"]:
        assert (row["regions"], row["pieces_a_region"]) == (3, 4)
        assert min(row[f"{way}_ms"] for way in ("raw", "direct", "landing", "auto")) > 0


def test_an_engine_that_fails_is_told_in_one_line() -> None:
    """Prompts for which there are never enough blocks are no case; a data mover that cannot be is one."""
    command = [
        sys.executable,
        "-m",
        "pushkv",
        "bench",
        "serve",
        "--lengths",
        "64",
        "--rates",
        "50",
        "--seconds",
        "0.1",
    ]
    done = subprocess.run(
        [*command, "--modes", "push", "--tls", "nonesuch"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1
    assert "pushkv: error: In mode push the" in done.stderr
