"""The hook a memory backend's plug-in implements, and the record it returns.

A plug-in is a module or an object with one function::

    from pushkv.hookspecs import BackendRecord, hookimpl

    @hookimpl
    def pushkv_backends():
        return [BackendRecord("xpu", ("xpu",), "pushkv_xpu.backend:XpuBackend")]

It must import nothing heavy: it runs each time somebody lists the backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pluggy

from pushkv.errors import BackendError

PROJECT = "pushkv"
"""pluggy's project name, and the entry-point group that plug-ins are found in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_LOAD = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class BackendRecord:
    """What is known of a memory backend before it is imported.

    ``name`` is what people write (``"cuda"``), ``device_types`` are the types of device it owns, as
    ``tensor.device.type`` spells them, ``load`` is the class as ``"module:Class"``, and ``hint`` is one
    phrase that tells what to install where the class cannot be imported.
    Raises BackendError when a field is malformed.
    """

    name: str
    device_types: tuple[str, ...]
    load: str
    hint: str = ""

    def __post_init__(self) -> None:
        if not _matches(_NAME, self.name):
            raise BackendError(
                f"a backend cannot be named {self.name!r}; use lower-case letters, digits, '-' and '_'"
            )
        # A plain string is a tuple without its comma: it would claim one device type a letter.
        if not isinstance(self.device_types, tuple) or not self.device_types:
            raise BackendError(
                f"backend {self.name!r} has device_types {self.device_types!r}; give a tuple such as ('xpu',)"
            )
        if not all(_matches(_NAME, kind) for kind in self.device_types):
            raise BackendError(
                f"backend {self.name!r} has device_types {self.device_types!r}; give names such as 'xpu'"
            )
        if not _matches(_LOAD, self.load):
            raise BackendError(f"backend {self.name!r} has load {self.load!r}; write it as 'module:Class'")


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and pattern.fullmatch(text) is not None


@hookspec
def pushkv_backends() -> Iterable[BackendRecord]:
    """Return the memory backends this plug-in brings, as records. Called once; imports nothing heavy."""
    raise NotImplementedError  # pluggy reads a specification and never calls it
