"""Finding the NIXL that is installed, without importing torch on the way.

The wheels carry one module a CUDA flavour (``nixl_cu12``, ``nixl_cu13``, ``nixl_rocm``) and an optional
module ``nixl`` in front of them that imports all of torch only to choose between them.
PushKV goes to the flavour itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from pushkv.errors import TransportUnavailable

FLAVOURS = {"nixl_cu12": "nixl-cu12", "nixl_cu13": "nixl-cu13", "nixl_rocm": "nixl-rocm", "nixl": "nixl"}
"""Module by distribution, in the order tried when nothing speaks for one of them."""

INSTALL_HINT = (
    "install it with `pip install --no-deps nixl-cu12==1.5.1 && pip install numpy` "
    "(no torch, the lightest), or `pip install --no-deps nixl-cu13==1.5.1` beside a torch for CUDA 13"
)
EFA_WRITE_SINCE = (1, 3, 2)
STRIDED_SINCE = (1, 5, 1)

Version = tuple[int, ...]


@dataclass(frozen=True)
class NixlModule:
    """One importable NIXL: the ``module`` it was found as, its ``version``, and its compiled ``bindings``."""

    module: str
    version: Version
    bindings: ModuleType

    @property
    def version_text(self) -> str:
        """The version as people write it, ``unknown`` where the distribution does not tell."""
        return ".".join(map(str, self.version)) or "unknown"

    @property
    def strided(self) -> bool:
        """Whether lists can be prepared from rows of (address, length, device, stride, count)."""
        return self.version >= STRIDED_SINCE


def find_nixl(
    *,
    import_module: Callable[[str], ModuleType] = importlib.import_module,
    installed: Callable[[str], bool] | None = None,
) -> NixlModule:
    """Import the bindings of the NIXL that fits this process.

    A torch that is already imported decides between flavours by its CUDA major; otherwise the first
    flavour that is installed and imports wins. Raises TransportUnavailable, with the commands that
    help, when none is installed or none imports.
    """
    found = [name for name in _preferred() if (installed or _installed)(name)]
    failures = []
    for name in found:
        try:
            return NixlModule(name, _version(FLAVOURS[name]), import_module(f"{name}._bindings"))
        except ImportError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise TransportUnavailable(f"NIXL is installed but does not import ({'; '.join(failures)}); {INSTALL_HINT}.")
    raise TransportUnavailable(f"NIXL is not installed in {sys.prefix}; {INSTALL_HINT}.")


def refuse_broken_writes(nixl: NixlModule, backend: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise TransportUnavailable where this NIXL's WRITE over EFA is known to hang."""
    over_efa = backend == "LIBFABRIC" and "efa" in environment.get("FI_PROVIDER", "efa")
    if over_efa and nixl.version < EFA_WRITE_SINCE:
        raise TransportUnavailable(
            f"NIXL {nixl.version_text} cannot be trusted to WRITE over EFA: 1.2.0 to 1.3.1 batch requests on a rail "
            "without flushing them and may hang; use NIXL 1.3.2 or later, or backend UCX."
        )


def _preferred() -> list[str]:
    """The flavours, the one that fits the imported torch first."""
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    first = None
    if getattr(torch_version, "hip", None):
        first = "nixl_rocm"
    elif cuda := getattr(torch_version, "cuda", None):
        first = f"nixl_cu{str(cuda).split('.')[0]}"
    return sorted(FLAVOURS, key=lambda name: name != first)


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _version(distribution: str) -> Version:
    """The numbers of the distribution's version; empty, so older than anything, when it has none."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
