"""What can be seen of a machine without a device library: its PCI devices, NICs, kernel modules and libraries.

Backends ask a :class:`Machine` and not the system, so that their checks can be shown every machine there is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NVIDIA, AMAZON = 0x10DE, 0x1D0F
_DISPLAY = 0x03
"""PCI base class of GPUs, with and without a screen."""
_EFA = 0xEFA0
"""EFA's PCI device ids are 0xefa0 to 0xefa3 so far."""


@dataclass(frozen=True)
class PciDevice:
    """A PCI function: its address (``"0000:a0:1a.0"``), vendor, device and class numbers."""

    address: str
    vendor: int
    device: int
    kind: int

    @property
    def gpu_of_nvidia(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.vendor == NVIDIA and self.kind >> 16 == _DISPLAY

    @property
    def efa(self) -> bool:
        """Whether it is an Elastic Fabric Adapter."""
        return self.vendor == AMAZON and self.device & 0xFFF0 == _EFA


@dataclass(frozen=True)
class Nic:
    """An RDMA device: its name in the kernel and the PCI function behind it, where there is one."""

    name: str
    pci: PciDevice | None

    @property
    def efa(self) -> bool:
        """Whether it is an Elastic Fabric Adapter."""
        return self.pci is not None and self.pci.efa


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def module_is_there(name: str) -> bool:
    """Whether a module of that name can be imported; it is not."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class Machine:
    """A machine, seen through its file system under ``root``, its environment and its libraries.

    ``version_of`` gives the version of an installed distribution, ``has_module`` whether a module is there, and
    ``load`` opens a shared library by name or path, raising OSError.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    version_of: Callable[[str], str | None] = installed_version
    has_module: Callable[[str], bool] = module_is_there
    load: Callable[[str], Any] = ctypes.CDLL

    def pci(self) -> tuple[PciDevice, ...]:
        """Every PCI function, in the order of its address."""
        folder = self.root / "sys/bus/pci/devices"
        return tuple(filter(None, map(_pci_device, sorted(_entries(folder)))))

    def nics(self) -> tuple[Nic, ...]:
        """Every RDMA device, by name."""
        folder = self.root / "sys/class/infiniband"
        return tuple(Nic(entry.name, _pci_device((entry / "device").resolve())) for entry in sorted(_entries(folder)))

    def kernel_module(self, *names: str) -> bool:
        """Whether one of these modules is loaded into the kernel."""
        return any((self.root / "sys/module" / name).is_dir() for name in names)

    def mapped_file(self, fragment: str) -> bool:
        """Whether this process has mapped a file whose path contains the fragment: a library that is loaded."""
        return any(fragment in line for line in self._maps())

    def writable(self, address: int) -> bool:
        """Whether the address lies in memory that this process has mapped for reading and writing."""
        for line in self._maps():
            span, permissions, *_ = line.split(maxsplit=2)
            first, _, stop = span.partition("-")
            if int(first, 16) <= address < int(stop, 16):
                return permissions.startswith("rw")
        return False

    def _maps(self) -> list[str]:
        try:
            return (self.root / "proc/self/maps").read_text().splitlines()
        except OSError:
            return []


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _pci_device(folder: Path) -> PciDevice | None:
    try:
        numbers = [int((folder / name).read_text(), 16) for name in ("vendor", "device", "class")]
    except (OSError, ValueError):
        return None
    return PciDevice(folder.name, *numbers)
