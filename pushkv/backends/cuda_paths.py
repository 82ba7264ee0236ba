"""What GPUDirect needs: a NIC that reaches GPU memory, memory that it can register, and UCX's settings."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.efa import EfaPreconditions
from pushkv.backends.machine import Machine, Nic
from pushkv.core.memory import Region

PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
EFA_PEER_MEMORY = ("efa_nv_peermem", *PEER_MEMORY)
"""Kernel modules by which an RDMA driver reaches GPU memory without dma-buf."""
DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED."""
ANY_CUDA = frozenset({"all", "cuda", "cuda_copy", "cuda_ipc", "gdr_copy"})
IPC = frozenset({"all", "cuda", "cuda_ipc"})
FIXED_SEGMENTS = (
    "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF, or allocate the cache from a plain pool"
)
_PASS, _WARN, _FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


class CudaPaths:
    """The checks for each data mover, looked up on one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._environ = machine.environ
        self._efa = EfaPreconditions(machine)

    def checks(self, path: DataPath, probe: bool) -> tuple[Check, ...]:
        """Whether GPU memory can be registered with this data mover and moved without a copy through the host."""
        if path.mover == "LIBFABRIC":
            found = [self._efa_nics(), self._reach(self._efa_cards(), EFA_PEER_MEMORY, probe)]
            found += [_at_worst_a_warning(check) for check in self._efa.checks(path, probe, since=(0, 10))]
        else:
            cards = self._machine.nics()
            found = [self._lanes(path), self._between_hosts(cards), self._reach(cards, PEER_MEMORY, probe)]
        if probe:
            found += [*self._mapped_piecemeal(path), *self._peers(path)]
        return tuple(filter(None, found))

    def _efa_cards(self) -> tuple[Nic, ...]:
        return tuple(nic for nic in self._machine.nics() if nic.efa)

    def _efa_nics(self) -> Check:
        count = len(self._efa_cards())
        if count:
            return Check("NICs", _PASS, f"{count} EFA NICs")
        remedy = "use an instance with EFA and give the container its devices, or set nixl.backend to 'UCX'"
        return Check("NICs", _FAIL, "there is no EFA NIC: NIXL's LIBFABRIC would go over TCP or not at all", remedy)

    def _lanes(self, path: DataPath) -> Check:
        """UCX takes GPU memory for host memory without its CUDA transports, and NIXL then refuses it."""
        told = self._environ.get("UCX_TLS", "all")
        known, ipc = _cuda_lanes(told)
        if not known:
            return Check("lanes", _FAIL, f"UCX_TLS is {told!r}, without CUDA", "add cuda to UCX_TLS, or unset it")
        if not ipc and path.same_machine:
            found = f"UCX_TLS is {told!r}, without cuda_ipc: between GPUs of this host bytes go through host memory"
            return Check("lanes", _WARN, found, "add cuda_ipc to UCX_TLS, or unset it")
        return Check("lanes", _PASS, f"UCX_TLS is {told}")

    def _between_hosts(self, nics: tuple[Nic, ...]) -> Check:
        if nics:
            return Check("NICs", _PASS, f"RDMA devices: {', '.join(nic.name for nic in nics)}")
        found = "there is no RDMA device: to other hosts UCX goes over TCP, through host memory"
        return Check("NICs", _WARN, found, "give the container its RDMA devices, unless all peers are on this host")

    def _reach(self, nics: tuple[Nic, ...], modules: tuple[str, ...], probe: bool) -> Check | None:
        """Whether a NIC reaches GPU memory: by a kernel module, or by dma-buf where the driver has it."""
        if not nics:
            return None
        if self._machine.kernel_module(*modules):
            return Check("GPUDirect", _PASS, "a peer-memory module is loaded")
        dma_buf = self._dma_buf() if probe else None
        if dma_buf:
            return Check("GPUDirect", _PASS, "the driver exports dma-bufs")
        why = "the driver exports no dma-buf" if dma_buf is False else "it is not known whether dma-buf is there"
        found = f"no peer-memory module is loaded and {why}: {nics[0].name} may not reach GPU memory"
        remedy = f"modprobe {modules[0]}, or use NVIDIA's open kernel modules, which export dma-bufs"
        return Check("GPUDirect", _WARN, found, remedy)

    def _dma_buf(self) -> bool | None:
        """What the driver says; None where it cannot be asked."""
        try:
            ask = self._machine.load("libcuda.so.1").cuDeviceGetAttribute
        except (OSError, AttributeError):
            return None
        answer = ctypes.c_int(0)
        status = ask(ctypes.byref(answer), ctypes.c_int(DMA_BUF_SUPPORTED), ctypes.c_int(0))
        return bool(answer.value) if status == 0 else None

    def _mapped_piecemeal(self, path: DataPath) -> Iterator[Check]:
        """Memory of CUDA's virtual memory management (expandable segments, an engine's sleep mode)."""
        verdict = _FAIL if path.mover == "LIBFABRIC" else _WARN
        for region in path.regions:
            if region.memory == "VRAM" and self._is_virtual(region):
                found = f"memory at {region.address:#x} is mapped piecemeal (VMM), which a NIC cannot register"
                yield Check("segments", verdict, found, f"{FIXED_SEGMENTS}; also without the engine's sleep mode")
                return

    def _is_virtual(self, region: Region) -> bool:
        """Only memory of the VMM has a handle to retain; what torch tells counts where the driver cannot be asked."""
        try:
            library = self._machine.load("libcuda.so.1")
            retain, release = library.cuMemRetainAllocationHandle, library.cuMemRelease
        except (OSError, AttributeError):
            return any(_covers(segment, region) for segment in expandable_segments())
        handle = ctypes.c_ulonglong(0)
        if retain(ctypes.byref(handle), ctypes.c_void_p(region.address)):
            return False
        release(handle)
        return True

    def _peers(self, path: DataPath) -> Iterator[Check]:
        """Several GPUs of one host copy to each other directly only where one may access the other."""
        torch: Any = sys.modules.get("torch")
        if not path.same_machine or torch is None or not torch.cuda.is_available():
            return
        count = int(torch.cuda.device_count())
        apart = [
            pair for pair in itertools.combinations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)
        ]
        if apart:
            found = f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other: bytes go through host memory"
            yield Check("peer access", _WARN, found, "see nvidia-smi topo -p2p r, and ACS in the BIOS")


def _cuda_lanes(tls: str) -> tuple[bool, bool]:
    """Whether UCX_TLS leaves UCX a transport that knows GPU memory, and one between GPUs of this host."""
    names = {name.strip().lower() for name in tls.lstrip("^").split(",")}
    if tls.startswith("^"):
        return "cuda" not in names, not names & {"cuda", "cuda_ipc"}
    return bool(names & ANY_CUDA), bool(names & IPC)


def expandable_segments() -> list[dict[str, Any]]:
    """The segments that torch's allocator holds and maps piecemeal; none where torch is not in use."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [segment for segment in torch.cuda.memory_snapshot() if segment.get("is_expandable", False)]


def _covers(segment: dict[str, Any], region: Region) -> bool:
    start = int(segment.get("address", 0))
    return start <= region.address < start + int(segment.get("total_size", 0))


def _at_worst_a_warning(check: Check) -> Check:
    """EFA's shared memory is told of Neuron alone to give wrong results."""
    if check.name == "shared memory" and check.verdict is _FAIL:
        return Check(check.name, _WARN, check.found, check.remedy)
    return check
