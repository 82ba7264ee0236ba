"""The command line: ``pushkv backends``, ``--version``, and how errors are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fake_site import FakeSite
from pushkv.cli import main
from pushkv.discovery import own_distribution


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    return FakeSite(tmp_path)


def test_the_table_has_a_line_for_each_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "DEVICES", "DISTRIBUTION", "STATUS"]
    assert lines[1].startswith("cpu     cpu      pushkv ")
    assert lines[1].endswith("  ready")
    assert lines[2].startswith("cuda    cuda     pushkv ")


def test_the_json_holds_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["probed"] is False
    cpu = listing["backends"][0]
    assert cpu["distribution"] == " ".join(own_distribution())
    del cpu["distribution"], cpu["checks"]
    assert cpu == {
        "name": "cpu",
        "device_types": ["cpu"],
        "load": "pushkv.backends.cpu:CpuBackend",
        "status": "ready",
        "reason": "",
    }


LOADED = """
import sys
from pushkv.cli import main
code = main(sys.argv[1:])
print(code, sorted({"torch", "nixl", "nixl_cu12", "nixl_cu13", "zmq"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"]])
def test_a_listing_without_probe_imports_no_device_library(site: FakeSite, arguments: list[str]) -> None:
    site.backend("pushkv-xpu", "xpu")
    done = site.python("-c", LOADED, *arguments)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


CPU_TORCH = """
__version__ = "9.9"

class version:
    cuda = None

class cuda:
    def is_initialized():
        return False
"""


def test_a_probe_may_import_torch_and_never_a_data_mover(site: FakeSite) -> None:
    site.module("torch", CPU_TORCH)
    done = site.python("-c", LOADED.replace('"torch", ', ""), "backends", "--probe", "--json")
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    assert last == "0 []", done.stderr
    cuda = json.loads(printed)["backends"][1]
    assert cuda["status"] == "unavailable"
    assert "torch 9.9 is built without CUDA" in [check["found"] for check in cuda["checks"]]


def test_importing_pushkv_imports_no_device_library(site: FakeSite) -> None:
    done = site.python("-c", "import sys, pushkv.plugins; print({'torch', 'nixl'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_a_warning_stands_under_its_backend(site: FakeSite) -> None:
    site.backend("pushkv-xpu", "xpu", checks="Check('fan', Verdict.WARN, 'the fan is loud', 'oil it'),")
    lines = site.python("-m", "pushkv", "backends").stdout.splitlines()
    assert lines[-2].endswith("  ready")
    assert lines[-1] == "  warning: the fan is loud; oil it"


def test_an_error_is_one_line_on_standard_error(site: FakeSite) -> None:
    done = site.python("-m", "pushkv", "backends", PUSHKV_DISABLE="cdua")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("pushkv: error: PUSHKV_DISABLE names 'cdua'")
    assert len(done.stderr.splitlines()) == 1


def test_the_version_is_told(capsys: pytest.CaptureFixture[str], site: FakeSite) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    expected = " ".join(own_distribution())
    assert capsys.readouterr().out.strip() == expected
    assert site.python("-m", "pushkv", "--version").stdout.strip() == expected


@pytest.mark.parametrize("arguments", [[], ["bakends"], ["backends", "--jason"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
