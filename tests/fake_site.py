"""Distributions on disk as an installer would leave them, and a Python that sees them beside PushKV."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PLUGIN = """
from pushkv.hookspecs import BackendRecord, hookimpl

@hookimpl
def pushkv_backends():
    return [BackendRecord({name!r}, ({device!r},), "{module}:Backend", hint="install the {name} driver")]
"""

BACKEND = """
from pushkv.backends.base import Check, MemoryBackend, PassedFence, Verdict

class Backend(MemoryBackend):
    name = {name!r}
    device_types = ({device!r},)

    def describe(self, array):
        raise NotImplementedError

    def fence(self, array=None):
        return PassedFence()

    def check(self, *, probe=True):
        return ({checks})
"""

PASSES = "Check('card', Verdict.PASS, 'a card is there'),"
FAILS = "Check('card', Verdict.FAIL, 'no card is there', 'plug one in'),"


@dataclass
class FakeSite:
    """A folder that is put on the import path, in front of everything."""

    folder: Path
    behind: list[Path] = field(default_factory=list)

    def module(self, name: str, source: str) -> None:
        (self.folder / f"{name}.py").write_text(source)

    def declare(self, distribution: str, entry_points: str, version: str = "0.1", folder: Path | None = None) -> None:
        """Write the dist-info folder of a distribution with this entry_points.txt."""
        info = (folder or self.folder) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def backend(
        self,
        distribution: str,
        name: str,
        *,
        point: str = "",
        device: str = "",
        module: str = "",
        checks: str = PASSES,
    ) -> None:
        """A whole, sound plug-in: distribution, hook module and backend module."""
        module = module or distribution.replace("-", "_")
        device = device or name
        self.module(module, PLUGIN.format(name=name, device=device, module=f"{module}_backend"))
        self.module(f"{module}_backend", BACKEND.format(name=name, device=device, checks=checks))
        self.declare(distribution, f"[pushkv]\n{point or name} = {module}\n")

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        given = filter(None, [os.environ.get("PYTHONPATH")])
        path = os.pathsep.join(map(str, [self.folder, *self.behind, ROOT, *given]))
        settings = {key: value for key, value in os.environ.items() if not key.startswith(("PUSHKV_", "PYTHON"))}
        settings.update(environ, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        return subprocess.run(
            [sys.executable, *arguments], env=settings, capture_output=True, text=True, timeout=100, check=False
        )

    def listing(self, **environ: str) -> dict[str, dict[str, Any]]:
        """``pushkv backends --json``, by name of backend."""
        done = self.python("-m", "pushkv", "backends", "--json", **environ)
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)["backends"]}

    def error_of(self, statement: str, **environ: str) -> dict[str, str]:
        """The error that a statement raises, with the names in :mod:`pushkv.plugins` at hand."""
        done = self.python("-c", _ERROR_OF.format(statement=statement), **environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


_ERROR_OF = """
import json
from pushkv.plugins import backend_for, get_backend, registry
try:
    {statement}
except Exception as error:
    cause = type(error.__cause__).__name__ if error.__cause__ else None
    print(json.dumps(dict(type=type(error).__name__, text=str(error), cause=cause)))
else:
    print("{{}}")
"""
