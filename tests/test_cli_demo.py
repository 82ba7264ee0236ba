"""``pushkv demo``, as a user runs it: two processes over NIXL, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pushkv.cli import main
from pushkv.demo.environment import ONE_THREAD, environment

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


Running = tuple[subprocess.Popen[str], list[int]]


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
def table() -> subprocess.CompletedProcess[str]:
    return demo("--requests", "4", "--longest", "40", "--new-tokens", "3")


@pytest.fixture(scope="module")
def told() -> subprocess.CompletedProcess[str]:
    return demo("--json", *SMALL)


@pytest.mark.processes
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


@pytest.mark.processes
def test_progress_goes_to_standard_error(told: subprocess.CompletedProcess[str]) -> None:
    assert "connected (UCX" in told.stderr
    assert "requests done: 16/16" in told.stderr


@pytest.mark.processes
def test_the_table_tells_what_moved_by_what_and_how_fast(table: subprocess.CompletedProcess[str]) -> None:
    assert table.returncode == 0, table.stderr
    for words in (
        "ALL TOKENS EQUAL",
        "before merging",
        "NIXL",
        "UCX:",
        "TTFT",
        "prefill done to KV received",
        "raw NIXL WRITE of 1.0 MiB",
    ):
        assert words in table.stdout
    assert sum(line.startswith("request-") and line.endswith("equal") for line in table.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests", "1"], "ask for at least 2 requests"),
        (["--prefill-tp", "3"], "rank 0 of 3 cannot hold a share"),
        (["--decode-block", "0"], "use at least 1"),
        (["--decode-order", "NHC"], "axis order 'NHC' is not known; use block-outer, HND, NHD"),
        (["--chunk", "0"], "a chunk of 0 tokens"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert words in told.err


def test_a_missing_nixl_is_told_with_the_remedy_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pushkv.transport.nixl_import._installed", lambda name: False)
    assert main(["demo"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "NIXL is not installed" in told
    assert "pip install --no-deps nixl-cu12" in told


def test_the_environment_is_as_before_afterwards() -> None:
    before = dict(os.environ)
    with environment(ONE_THREAD):
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
        assert "UCX_LOG_LEVEL" in os.environ
    assert dict(os.environ) == before


@pytest.fixture
def running() -> Iterator[Running]:
    """A demo under way, and its engines' process ids."""
    arguments = command("--no-raw", "--new-tokens", "100")
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    engines: list[int] = []
    for line in process.stderr:
        if "(processes " in line:
            engines = [int(pid) for pid in re.findall(r"\d+", line)]
        if "connected" in line:
            break
    yield process, engines
    process.kill()
    process.communicate()


def gone(pid: int, within: float = 10.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_engine_outlives_the_command(running: Running, how: signal.Signals) -> None:
    process, engines = running
    assert len(engines) == 2
    process.send_signal(how)
    assert all(gone(pid) for pid in engines)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (130 if how is signal.SIGINT else -how)
    assert ("interrupted" in errors) == (how is signal.SIGINT)
    assert "Traceback" not in errors


@pytest.mark.processes
@pytest.mark.parametrize(("number", "name"), [(0, "prefill"), (1, "decode")])
def test_an_engine_that_dies_ends_the_run_with_one_line(running: Running, number: int, name: str) -> None:
    process, engines = running
    os.kill(engines[number], signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.splitlines()[-1].startswith(f"pushkv: error: {name} ended with exit code -9")
    assert all(gone(pid) for pid in engines)
