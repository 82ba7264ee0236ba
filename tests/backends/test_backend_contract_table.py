"""The command that prints the contract's table: what ran, what did not, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pushkv.testing.backend_contract.__main__ import Subject, as_table, examine, known, main

FAULTY = """
import pytest
from pushkv.testing.contracts.cpu import TestCpuNumpy as Sound
from pushkv.backends.cpu import CpuBackend

class Widened(CpuBackend):
    def describe(self, array):
        told = super().describe(array)
        object.__setattr__(told, "region", type(told.region)(told.region.address, told.region.length + 1))
        return told

class TestWidened(Sound):
    def make_backend(self):
        return Widened()

class TestAbsent(Sound):
    @pytest.fixture(autouse=True)
    def _device(self):
        pytest.skip("there is no such device here")
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "faulty_contracts.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "faulty_contracts"


def test_a_backend_that_breaks_the_contract_is_a_failure(faulty: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([faulty, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    widened, absent = told["subjects"]
    assert (widened["name"], widened["verdict"]) == ("Widened", "failed")
    assert widened["checks"]["test_the_region_is_the_allocation_and_no_byte_more"] == "failed"
    assert widened["checks"]["test_describing_again_says_the_same"] == "passed"
    (trouble,) = [one for one in widened["troubles"] if one.startswith("the region is the allocation and no byte")]
    assert "assert (" in trouble, "what it has found, not only that it has"
    assert (absent["verdict"], absent["troubles"]) == ("skipped", ["there is no such device here"])


def test_a_module_that_cannot_run_is_a_failure() -> None:
    (subject,) = examine("no_such_module_of_contracts")
    assert subject.verdict == "failed"
    assert subject.troubles[0].startswith("it ran no check: ")


def test_the_table_has_a_line_a_check_and_says_why_one_did_not_run() -> None:
    one, other = Subject("One"), Subject("Other")
    one.note("test_it_works", "passed", "")
    one.note("test_it_works", "failed", "it did not")
    other.note("test_it_works", "skipped", "no device")
    assert as_table([one, other]).splitlines() == [
        "CHECK     One  Other",
        "it works  NO   -",
        "One: it works: it did not",
        "Other: no device",
    ]


def test_the_built_in_contracts_are_known() -> None:
    assert "pushkv.testing.contracts.cpu" in known()
