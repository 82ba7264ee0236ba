"""A doctor and a listing among plug-ins that print, raise, leave and lie: still one document and an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_site import BACKEND, PASSES, PLUGIN, FakeSite
from pushkv.backends.base import Check, Verdict
from pushkv.errors import BackendError

NOISY = """
import atexit, ctypes, os, subprocess, sys
print("noise: print")
sys.stdout.write("noise: write")
sys.__stdout__.write("noise: kept")
os.write(1, b"noise: descriptor")
ctypes.CDLL(None).printf(b"noise: C")
subprocess.run([sys.executable, "-c", "print('noise: a child')"], check=True)
"""
WAYS = {
    "check raises": ("def check(self, *, probe=True):\n        raise ValueError('oh dear')", "ValueError: oh dear"),
    "check leaves": ("def check(self, *, probe=True):\n        raise SystemExit(0)", "SystemExit: 0"),
    "check says nothing": ("def check(self, *, probe=True):\n        return None", "cannot check itself, TypeError"),
    "check says text": ("def check(self, *, probe=True):\n        return 'fine'", "TypeError: 'f' is no Check"),
    "check with a text for a verdict": (
        "def check(self, *, probe=True):\n        return (Check('card', 'pass', 'found'),)",
        "a check's verdict is 'pass'; give a member of Verdict",
    ),
    "check that found no text": (
        "def check(self, *, probe=True):\n        return (Check('card', Verdict.PASS, {1: object()}),)",
        "give text",
    ),
    "path raises": ("def check_path(self, path, *, probe=True):\n        raise OSError('no way')", "OSError: no way"),
    "path leaves": ("def check_path(self, path, *, probe=True):\n        raise SystemExit(3)", "SystemExit: 3"),
    "path says nothing": ("def check_path(self, path, *, probe=True):\n        return None", "over UCX, TypeError"),
}


@pytest.fixture
def site(tmp_path: Path) -> FakeSite:
    return FakeSite(tmp_path)


def declare(site: FakeSite, extra: str = "", *, module: str = "", backend: str = "") -> None:
    site.declare("pushkv-odd", "[pushkv]\nodd = pushkv_odd\n")
    site.module("pushkv_odd", module + PLUGIN.format(name="odd", device="odd", module="pushkv_odd_backend"))
    made = BACKEND.format(name="odd", device="odd", checks=PASSES)
    site.module("pushkv_odd_backend", f"{backend}{made}\n    {extra}\n")


def told(done: Any) -> dict[str, Any]:
    """The one document that was printed."""
    made: dict[str, Any] = json.loads(done.stdout)
    return made


@pytest.mark.parametrize("command", [("doctor", "--no-push", "--json"), ("backends", "--json", "--probe")], ids=str)
def test_what_plugins_print_is_no_part_of_the_document(site: FakeSite, command: tuple[str, ...]) -> None:
    declare(site, module=NOISY, backend=NOISY)
    done = site.python("-m", "pushkv", *command)
    assert {one["name"] for one in told(done)["backends"]} >= {"cpu", "odd"}
    for noise in ("print", "write", "kept", "descriptor", "C", "a child"):
        assert f"noise: {noise}" in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_a_backend_that_misbehaves_is_a_failure_where_it_counts(site: FakeSite, way: str) -> None:
    method, words = WAYS[way]
    declare(site, method)
    found = told(done := site.python("-m", "pushkv", "doctor", "--no-push", "--json", "--backend", "odd"))
    (odd,) = [one for one in found["backends"] if one["name"] == "odd"]
    assert (done.returncode, found["ok"], odd["ok"]) == (1, False, False)
    said = [odd["reason"], *(check["found"] for path in odd["paths"] for check in path["checks"])]
    assert any(words in one for one in said), said
    assert "Traceback" not in done.stderr
    text = site.python("-m", "pushkv", "doctor", "--no-push", "--backend", "odd")
    assert text.returncode == 1
    assert words in text.stdout


@pytest.mark.parametrize("method", ["raise RuntimeError('no idea')", "raise SystemExit(0)"])
def test_one_that_cannot_say_whether_it_is_here_does_not_count(site: FakeSite, method: str) -> None:
    """And is told: the others are examined all the same."""
    unready = "def check(self, *, probe=True):\n        return (Check('card', Verdict.FAIL, 'no card'),)\n"
    declare(site, f"{unready}\n    def present(self, machine):\n        {method}")
    found = told(done := site.python("-m", "pushkv", "doctor", "--no-push", "--json"))
    (odd,) = [one for one in found["backends"] if one["name"] == "odd"]
    assert (odd["status"], odd["considered"]) == ("broken", False)
    assert "cannot say whether its device is here" in odd["reason"]
    assert (done.returncode, found["ok"]) == (0, True)


def test_a_plugin_that_does_not_import_is_told_and_does_not_count(site: FakeSite) -> None:
    declare(site, module="raise SystemExit('gone')\n")
    found = told(done := site.python("-m", "pushkv", "doctor", "--no-push", "--json"))
    (odd,) = [one for one in found["backends"] if one["name"] == "odd"]
    assert (odd["status"], odd["considered"], done.returncode) == ("broken", False, 0)
    asked = site.python("-m", "pushkv", "doctor", "--no-push", "--json", "--backend", "odd")
    assert (told(asked)["ok"], asked.returncode) == (False, 1)


def test_an_error_leaves_standard_output_empty(site: FakeSite) -> None:
    declare(site, module=NOISY)
    done = site.python("-m", "pushkv", "doctor", "--json", "--backend", "nobody")
    assert (done.stdout, done.returncode) == ("", 1)
    assert "no memory backend is named 'nobody'" in done.stderr


@pytest.mark.parametrize("arguments", [("x", True, "y"), (1, Verdict.PASS, "y"), ("x", Verdict.PASS, None)])
def test_a_check_is_text_and_a_verdict(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(BackendError, match="a check's"):
        Check(*arguments)
