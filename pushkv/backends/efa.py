"""What device memory needs of EFA and of NIXL's LIBFABRIC, for any device that is registered with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.machine import Machine

Version = tuple[int, ...]
NIXL_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13", "nixl")
EFA_WRITE_SINCE: Version = (1, 3, 2)
"""Earlier ones batch WRITEs on a rail without flushing them, and may hang."""
_PASS, _WARN, _FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL
_EFA_SETUP = "follow AWS's EFA setup guide; a stub of libcuda.so.1 is enough where there is no GPU"


class EfaPreconditions:
    """What a WRITE of device memory over EFA needs, looked up on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._environ = machine.environ

    def checks(self, path: DataPath, probe: bool, *, since: Version) -> Iterator[Check]:
        """All of them; NIXL knows the device ``since`` that version."""
        yield self._nixl(since)
        yield self._provider()
        yield self._interface()
        yield self._shared_memory(path)
        yield self._device_rdma()
        if probe:
            yield self._libraries()

    def _nixl(self, since: Version) -> Check:
        found = [(name, told) for name in NIXL_DISTRIBUTIONS if (told := self._machine.version_of(name))]
        if not found:
            return Check("nixl", _FAIL, "NIXL is not installed", "pip install --no-deps nixl-cu12==1.5.1")
        name, told = found[0]
        version = tuple(int(number) for number in re.findall(r"\d+", told)[:3])
        if version < since:
            return Check("nixl", _FAIL, f"{name} {told} does not know this device", "use NIXL 1.3.2 or later")
        if version < EFA_WRITE_SINCE:
            return Check("nixl", _FAIL, f"{name} {told} may hang on WRITEs over EFA", "use NIXL 1.3.2 or later")
        return Check("nixl", _PASS, f"{name} {told}")

    def _provider(self) -> Check:
        told = self._environ.get("FI_PROVIDER", "efa")
        if "efa" in told:
            return Check("provider", _PASS, f"FI_PROVIDER is {told}")
        found = f"FI_PROVIDER is {told!r}, which knows no device memory"
        return Check("provider", _FAIL, found, "unset it, or set FI_PROVIDER=efa")

    def _interface(self) -> Check:
        names = [name.strip() for name in self._environ.get("FI_EFA_IFACE", "all").split(",")]
        there = {nic.name for nic in self._machine.nics() if nic.efa}
        missing = [name for name in names if name not in there and name != "all"]
        if not missing:
            return Check("interface", _PASS, f"FI_EFA_IFACE is {','.join(names)}")
        known = ", ".join(sorted(there)) or "none"
        found = f"FI_EFA_IFACE names {missing[0]!r}, which is no EFA NIC here (there are: {known})"
        return Check("interface", _FAIL, found, "correct it or unset it; vLLM-Neuron's worker sets its own")

    def _shared_memory(self, path: DataPath) -> Check:
        told = self._environ.get("FI_EFA_ENABLE_SHM_TRANSFER")
        if told == "0":
            return Check("shared memory", _PASS, "FI_EFA_ENABLE_SHM_TRANSFER is 0")
        shown = "is not set" if told is None else f"is {told!r}"
        remedy = "set FI_EFA_ENABLE_SHM_TRANSFER=0 on both sides"
        if path.same_machine:
            found = f"a peer is on this host and FI_EFA_ENABLE_SHM_TRANSFER {shown}: AWS warns of inaccurate output"
            return Check("shared memory", _FAIL, found, remedy)
        found = f"FI_EFA_ENABLE_SHM_TRANSFER {shown}: between ranks of one host AWS warns of inaccurate output"
        return Check("shared memory", _WARN, found, remedy)

    def _device_rdma(self) -> Check:
        told = self._environ.get("FI_EFA_USE_DEVICE_RDMA")
        if told == "1":
            return Check("device RDMA", _PASS, "FI_EFA_USE_DEVICE_RDMA is 1")
        found = f"FI_EFA_USE_DEVICE_RDMA is {told!r}" if told is not None else "FI_EFA_USE_DEVICE_RDMA is not set"
        return Check("device RDMA", _WARN, found, "set it to 1")

    def _libraries(self) -> Check:
        """By opening the plug-in itself: the loader names what it lacks."""
        plugin = libfabric_plugin(self._machine)
        try:
            self._machine.load(str(plugin))
        except OSError as error:
            return Check("libraries", _FAIL, f"NIXL's LIBFABRIC does not load: {error}", _EFA_SETUP)
        return Check("libraries", _PASS, "NIXL's LIBFABRIC loads with the libraries that are here")


def libfabric_plugin(machine: Machine) -> Path:
    """NIXL's plug-in as its wheel installs it; a bare name where no wheel is found beside this package."""
    packages = Path(__file__).resolve().parents[2]
    for folder in (packages, *(Path(entry) for entry in _import_path())):
        found = sorted(folder.glob("*nixl_cu*libs/**/libplugin_LIBFABRIC.so"))
        if found:
            return found[0]
    return Path("libplugin_LIBFABRIC.so")


def _import_path() -> list[str]:
    return [entry for entry in sys.path if entry.endswith("-packages")]
