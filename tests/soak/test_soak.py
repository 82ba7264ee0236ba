"""The soak: short runs hold every rule, one seed gives one run, and broken machines are found out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pushkv.testing.broken import Broken, Rule
from pushkv.testing.soak.run import Figures, soak
from soak.mutants import MUTANTS, Mutant

SEED = 20
TRANSFERS = 10_000


@pytest.mark.timeout(600)
def test_ten_thousand_transfers() -> None:
    figures = Figures(SEED)
    soak(figures, TRANSFERS)
    print(figures.report())
    assert figures.total("transfers") >= TRANSFERS
    assert figures.total("late_bytes") > 0, "something has landed late, and in kept blocks"


def test_one_seed_gives_one_run() -> None:
    """Also in another process, with other hashes of strings."""
    figures = Figures(3)
    soak(figures, 300, 300)
    command = [sys.executable, "-m", "pushkv.testing.soak", "--transfers", "300", "--seed", "3"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
    assert f"fingerprint: {figures.fingerprint()}" in printed
    assert "verdict: every rule held" in printed
    other = Figures(4)
    soak(other, 300, 300)
    assert other.fingerprint() != figures.fingerprint()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_machine_is_found_out(mutant: Mutant) -> None:
    figures = Figures(SEED)
    with pytest.raises(Broken) as found:
        soak(figures, 6000, 500, mutant.first, producer=mutant.producer, consumer=mutant.consumer)
    assert found.value.rule in mutant.caught_by, figures.failure
    assert "seed 20" in figures.failure


def test_an_honest_run_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    from pushkv.testing.soak.__main__ import main

    assert main(["--transfers", "100", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    for word in ("seed: 5", "outcomes at consumers: complete", "faults: ", "quarantined at rest", "every rule held"):
        assert word in printed


def test_rules_have_words() -> None:
    assert str(Broken(Rule.CANARY, "block 3")) == "a block outside custody was touched: block 3"
