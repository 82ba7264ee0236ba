"""Real processes over NIXL, killed, stopped and cancelled: every rule holds for whoever survives."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice

import pytest

from pushkv.testing.chaos.script import Deed, blows, plans

SECONDS = 20


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("tls", "way"),
    [("", ""), ("tcp", ""), ("", "--landing"), ("tcp", "--landing --verify")],
    ids=["default", "tcp", "default, landing", "tcp, landing, verified"],
)
def test_chaos(tls: str, way: str) -> None:
    """In a process of its own: the children are spawned from its main module."""
    environment = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
    command = [
        sys.executable,
        "-m",
        "pushkv.testing.chaos",
        "--seconds",
        str(SECONDS),
        "--seed",
        "3",
        "--every",
        "0.7",
    ]
    ran = subprocess.run(
        [*command, *way.split(), "--tls", tls],
        capture_output=True,
        text=True,
        timeout=220,
        env=environment,
        check=False,
    )
    assert "verdict: every rule held" in ran.stdout, ran.stdout + ran.stderr[-4000:]
    assert ran.returncode == 0
    figures = dict(line.split(": ", 1) for line in ran.stdout.splitlines() if ": " in line)
    assert int(figures["transfers"]) > 20
    assert "complete" in figures["outcomes at consumers"]
    assert ("scatters" in figures["proofs and other counts"]) == ("--landing" in way)
    assert ("bytes verified" in figures["proofs and other counts"]) == ("--verify" in way)
    assert "parts that differ" not in figures["proofs and other counts"]


def test_a_seed_fixes_what_is_done() -> None:
    assert list(islice(blows(3, 1.0), 50)) == list(islice(blows(3, 1.0), 50))
    assert list(islice(plans(3), 50)) == list(islice(plans(3), 50))
    assert list(islice(plans(3), 50)) != list(islice(plans(4), 50))
    some = list(islice(blows(3, 1.0), 50))
    assert {blow.deed for blow in some} == set(Deed)
    assert {blow.victim for blow in some} == {0, 1, 2, 3}
