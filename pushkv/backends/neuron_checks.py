"""What Neuron Direct needs, as checks with their remedies. Most of it fails silently when nobody looks."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.efa import EfaPreconditions
from pushkv.backends.machine import AMAZON, Machine
from pushkv.core.memory import Region

DEVICES = {0x7264: "Inferentia2", 0x7164: "Trainium1", 0x7364: "Trainium2", 0x7564: "Trainium3", 0x7565: "Trainium3"}
"""Neuron devices by PCI device id, as NIXL knows them."""
NO_ADDRESS = "set NEURON_RT_MAP_HBM=1 before the first device tensor of the process, at which it is read for good"
BROKEN_EXPORT = (2, 32, 31, 0)
"""The libnrt whose dma-buf export is reported to be broken."""
PLACEHOLDERS = {"torch-neuronx": "1.0", "vllm-neuron": "0.1.0"}
"""What PyPI has under these names: nothing."""
PAGE = 4096
_PASS, _WARN, _FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


class Preconditions:
    """The table of preconditions, looked up on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._environ = machine.environ
        self._efa = EfaPreconditions(machine)

    def of_the_device(self, probe: bool) -> tuple[Check, ...]:
        """Whether the device can be used here at all. Without ``probe`` no library is opened."""
        checks = [self._packages(), self._devices(), self._only_neuron(), self._mapping(), self._cores()]
        if probe:
            checks += [self._runtime_library(), self._order()]
        return tuple(checks)

    def of_the_path(self, path: DataPath, probe: bool) -> tuple[Check, ...]:
        """Whether NIXL can register the memory and WRITE it over this path."""
        if path.mover != "LIBFABRIC":
            found = f"NIXL's {path.mover} takes Trainium memory for host memory"
            return (Check("mover", _FAIL, found, "set nixl.backend to 'LIBFABRIC'"),)
        checks = [Check("mover", _PASS, "LIBFABRIC moves Trainium memory"), self._only_neuron()]
        checks += [self._nics(), *self._efa.checks(path, probe, since=(0, 10))]
        if probe:
            checks += [check for region in path.regions for check in self._region(region)]
        return tuple(checks)

    def runtime_is_up(self) -> bool:
        """Whether torch's device module says that the runtime is initialised; False where it does not say."""
        device = getattr(sys.modules.get("torch"), "neuron", None)
        told = getattr(device, "is_initialized", None)
        return bool(told()) if callable(told) else False

    def _packages(self) -> Check:
        for name, nothing in PLACEHOLDERS.items():
            if self._machine.version_of(name) == nothing:
                return Check(
                    "packages",
                    _FAIL,
                    f"{name} {nothing} is PyPI's placeholder",
                    "install it from AWS's package index",
                )
        found = [name for name in ("torch_neuronx", "libtorch_neuronx_lite") if self._machine.has_module(name)]
        if found:
            return Check("packages", _PASS, f"torch has the device by {' and '.join(found)}")
        remedy = "install torch-neuronx or vLLM-Neuron from AWS's package index"
        return Check("packages", _FAIL, "no torch backend for the device neuron is installed", remedy)

    def _devices(self) -> Check:
        kinds = [DEVICES[one.device] for one in self._chips()]
        if kinds:
            return Check("devices", _PASS, f"{len(kinds)} x {kinds[0]} on the PCI bus")
        remedy = "run on a Trn1, Trn2, Trn3 or Inf2 instance, and give the container its PCI bus"
        return Check("devices", _FAIL, "no Neuron device is on the PCI bus", remedy)

    def _chips(self) -> list[Any]:
        return [one for one in self._machine.pci() if one.vendor == AMAZON and one.device in DEVICES]

    def _only_neuron(self) -> Check:
        gpus = [one.address for one in self._machine.pci() if one.gpu_of_nvidia]
        if not gpus:
            return Check("other accelerators", _PASS, "no NVIDIA GPU is on this host")
        found = (
            f"an NVIDIA GPU is on this host ({gpus[0]}), so that NIXL chooses CUDA and cannot register Neuron memory"
        )
        return Check("other accelerators", _FAIL, found, "hide it from the container, or use a host without one")

    def _mapping(self) -> Check:
        told = self._environ.get("NEURON_RT_MAP_HBM", "")
        if told.lower() == "true" or (told.isdigit() and int(told) > 0):
            return Check("mapping", _PASS, f"NEURON_RT_MAP_HBM is {told}")
        found = f"NEURON_RT_MAP_HBM is {told!r}: device memory gets no address" if told else (
            "NEURON_RT_MAP_HBM is not set: device memory gets no address"
        )  # fmt: skip
        return Check("mapping", _WARN, found, NO_ADDRESS)

    def _cores(self) -> Check:
        told = self._environ.get("NEURON_RT_VISIBLE_CORES")
        if told is None or not self._machine.has_module("vllm_neuron") or self.runtime_is_up():
            return Check("cores", _PASS, "NEURON_RT_VISIBLE_CORES is left to the engine")
        found = f"NEURON_RT_VISIBLE_CORES is {told!r}, which vLLM-Neuron's worker refuses to find set"
        return Check("cores", _FAIL, found, "unset it and use NEURON_VISIBLE_DEVICES")

    def _runtime_library(self) -> Check:
        library, error = self._libnrt()
        if library is None:
            return Check("libnrt", _FAIL, f"libnrt.so.1 cannot be loaded: {error}", "install aws-neuronx-runtime-lib")
        version = _version_of(library)
        told = ".".join(map(str, version)) or "of an unknown version"
        if version == BROKEN_EXPORT:
            found = f"libnrt {told} is reported not to export dma-bufs, so that registration falls back or fails"
            return Check("libnrt", _WARN, found, "use another version of aws-neuronx-runtime-lib")
        return Check("libnrt", _PASS, f"libnrt {told}")

    def _libnrt(self) -> tuple[Any, str]:
        try:
            return self._machine.load("libnrt.so.1"), ""
        except OSError as error:
            return None, str(error)

    def _order(self) -> Check:
        """An agent older than the runtime registers device memory as the host's, with a warning in its log."""
        if self.runtime_is_up() or not self._machine.mapped_file("libplugin_LIBFABRIC"):
            return Check("order", _PASS, "no NIXL agent over LIBFABRIC is known to be older than the runtime")
        found = "NIXL's LIBFABRIC is loaded and nothing shows that the Neuron runtime was up before it"
        remedy = (
            "allocate a device tensor before anything makes a NIXL agent; an older agent moves host memory instead"
        )
        return Check("order", _WARN, found, remedy)

    def _nics(self) -> Check:
        chips, nics = len(self._chips()), sum(nic.efa for nic in self._machine.nics())
        if nics and nics >= chips:
            return Check("NICs", _PASS, f"{nics} EFA NICs for {chips} chips")
        found = f"{nics} EFA NICs for {chips} chips: memory of a chip without one cannot be registered"
        return Check(
            "NICs", _FAIL, found, "use an instance with one EFA NIC a chip, all attached (not a trn2.3xlarge)"
        )

    def _region(self, region: Region) -> Iterator[Check]:
        library, _ = self._libnrt()
        if library is None:
            return
        yield self._pairing(library, region)
        if region.address % PAGE and not hasattr(library, "nrt_get_dmabuf_fd_v2"):
            found = f"memory at {region.address:#x} starts inside a page, where this libnrt exports no dma-buf"
            yield Check("dma-buf", _WARN, found, "use a newer runtime; libfabric registers it another way, if it can")

    def _pairing(self, library: Any, region: Region) -> Check:
        ask = getattr(library, "nrt_get_attached_efa_bdf", None)
        if ask is None:
            found = "this libnrt does not tell which NIC is beside a chip: NIXL spreads WRITEs over all of them"
            return Check("pairing", _WARN, found, "use Neuron runtime 2.31 or later")
        text, length = ctypes.create_string_buffer(32), ctypes.c_size_t(32)
        if ask(ctypes.c_void_p(region.address), text, ctypes.byref(length)):
            found = f"memory at {region.address:#x} has no EFA NIC beside its chip"
            return Check("pairing", _FAIL, found, "use an instance with one EFA NIC a chip (not a trn2.3xlarge)")
        return Check("pairing", _PASS, f"memory at {region.address:#x} is beside the NIC {text.value.decode()}")


def _version_of(library: Any) -> tuple[int, ...]:
    """Major, minor, patch and maintenance, as nrt_get_version() fills them in; empty where it does not."""
    ask = getattr(library, "nrt_get_version", None)
    if ask is None:
        return ()
    room = (ctypes.c_uint64 * 64)()
    status = ask(ctypes.byref(room), ctypes.c_size_t(ctypes.sizeof(room)))
    return tuple(int(number) for number in room[:4]) if status == 0 else ()
