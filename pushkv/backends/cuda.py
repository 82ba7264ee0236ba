"""The memory of NVIDIA GPUs, as torch allocates it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.base import (
    ArrayDescription,
    Check,
    DataPath,
    Fence,
    MemoryBackend,
    Packer,
    Verdict,
    device_type_of,
)
from pushkv.backends.cuda_packing import cuda_packer
from pushkv.backends.cuda_paths import FIXED_SEGMENTS, CudaPaths, expandable_segments
from pushkv.backends.machine import Machine
from pushkv.backends.tensors import describe_tensor
from pushkv.core.memory import Region
from pushkv.errors import BackendError
from pushkv.hookspecs import BackendRecord, hookimpl

_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Any of these shows an NVIDIA driver; the last is how WSL shows one."""
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_INSTALL_TORCH = "install a CUDA build of torch (the extra pushkv[torch])"


@hookimpl
def pushkv_backends() -> Iterable[BackendRecord]:
    """The plug-in of this module."""
    return [BackendRecord("cuda", ("cuda",), "pushkv.backends.cuda:CudaBackend", hint=_INSTALL_TORCH)]


class CudaBackend(MemoryBackend):
    """GPU memory, NIXL's VRAM, the device being torch's ordinal (after CUDA_VISIBLE_DEVICES)."""

    name = "cuda"
    device_types = ("cuda",)

    def __init__(self, machine: Machine | None = None) -> None:
        self._paths = CudaPaths(machine or Machine())
        self._copying: dict[Any, Any] = {}
        """Streams for copies to the host, by device."""

    def describe(self, array: object) -> ArrayDescription:
        """Describe a torch tensor on a CUDA device through its storage."""
        kind = device_type_of(array)
        if kind != "cuda":
            raise BackendError(
                f"the cuda backend describes GPU memory and this array is on {kind}; use backend_for()"
            )
        tensor: Any = array
        return describe_tensor(tensor, device=int(tensor.device.index), memory="VRAM")

    def fence(self, array: object | None = None) -> Fence:
        """An event on the calling thread's current stream, of the tensor's device or the current one.

        Raises BackendError while a graph is captured: a captured event never passes by itself.
        """
        torch = _torch()
        if torch.cuda.is_current_stream_capturing():
            raise BackendError("a fence cannot be taken while a CUDA graph is captured; take it after the replay")
        device = None if array is None else getattr(array, "device", None)
        return CudaFence(torch.cuda.current_stream(device))

    def allocate(self, size: int, device: int = 0) -> Any:
        """Zeroed bytes of this device."""
        torch = _torch()
        try:
            return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}")
        except RuntimeError as error:
            raise BackendError(
                f"{size} bytes for landing slots cannot be had on CUDA device {device}: {_line(error)}; "
                "set smaller landing_bytes, or make room before the engine sizes its cache"
            ) from error

    def packer(self, regions: Sequence[Region], arrays: Sequence[object]) -> Packer:
        """Copies on a stream of their own, beside the engine's."""
        torch = _torch()
        device = regions[0].device if regions else 0
        stream = torch.cuda.Stream(device=device)
        return cuda_packer(torch, regions, arrays, lambda: CudaFence(stream), lambda: _on_stream(stream), device)

    def to_host(self, slot: Any) -> NDArray[np.uint8]:
        """Copied on a stream of its own, so that it does not wait for the engine's work."""
        if slot.device not in self._copying:
            self._copying[slot.device] = _torch().cuda.Stream(device=slot.device)
        with _on_stream(self._copying[slot.device]):
            return super().to_host(slot)

    def present(self, machine: Machine) -> bool:
        """Whether an NVIDIA GPU is on the PCI bus."""
        return any(one.gpu_of_nvidia for one in machine.pci())

    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        """Look for torch, a driver and the allocator's settings; with ``probe`` torch's word on devices counts."""
        installed = _torch_installed()
        if not probe or installed.verdict is Verdict.FAIL:
            return (installed, _driver(), _segments(probe))
        devices = _ask_torch()
        # Where torch sees a device there is a driver, wherever a container may keep it.
        driver = () if devices.verdict is Verdict.PASS else (_driver(),)
        return (installed, *driver, devices, _segments(probe))

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        """Look for what GPUDirect needs: a NIC that reaches GPU memory, memory that it can register, UCX's lanes."""
        return self._paths.checks(path, probe)

    def prepare_thread(self, device: int = 0) -> None:
        """Make device ``device`` current on this thread, its context made.

        An agent made on a thread without a CUDA context takes GPU memory for host memory.
        """
        torch = _torch()
        try:
            torch.cuda.set_device(device)
            torch.cuda.synchronize(device)
        except (RuntimeError, AssertionError) as error:
            raise BackendError(f"CUDA device {device} cannot be made current: {_line(error)}") from error


class CudaFence:
    """A CUDA event, recorded on a stream when the fence is made."""

    def __init__(self, stream: Any) -> None:
        # blocking: wait() sleeps; the default would spin on a core.
        self._event = _torch().cuda.Event(blocking=True)
        with _device_errors():
            self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has passed the event; never blocks."""
        with _device_errors():
            return bool(self._event.query())

    def wait(self) -> None:
        """Sleep until the stream has passed the event."""
        with _device_errors():
            self._event.synchronize()


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    """Queue work on a stream; what the device says of it, or of work before, is a BackendError."""
    with _device_errors(), _torch().cuda.stream(stream):
        yield


@contextmanager
def _device_errors() -> Iterator[None]:
    """A kernel that failed shows in whatever is asked of the device next, as a RuntimeError of torch."""
    try:
        yield
    except RuntimeError as error:
        raise BackendError(
            f"CUDA reports that work before a fence failed: {_line(error)}; restart the process"
        ) from error


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"torch cannot be imported: {_line(error)}; {_INSTALL_TORCH}") from error
    return torch


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _torch_installed() -> Check:
    if "torch" in sys.modules or find_spec("torch") is not None:
        return Check("torch", Verdict.PASS, "torch is installed")
    return Check("torch", Verdict.FAIL, "torch is not installed", _INSTALL_TORCH)


def _driver() -> Check:
    if any(path.exists() for path in _DRIVER):
        return Check("driver", Verdict.PASS, "an NVIDIA driver is present")
    return Check(
        "driver", Verdict.FAIL, "no NVIDIA driver is on this machine", "install one, or give the container its GPUs"
    )


def _ask_torch() -> Check:
    """What torch says of the devices. It makes no CUDA context: that would take memory on every device."""
    try:
        torch = _torch()
    except BackendError as error:
        return Check("torch import", Verdict.FAIL, str(error))
    if torch.version.cuda is None:
        return Check("CUDA build", Verdict.FAIL, f"torch {torch.__version__} is built without CUDA", _INSTALL_TORCH)
    return _devices(torch)


def _devices(torch: Any) -> Check:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    count = torch.cuda.device_count()
    if count == 0:
        remedy = "make a device visible" if visible is not None else "see whether nvidia-smi lists one"
        return Check("devices", Verdict.FAIL, f"torch {torch.__version__} sees no CUDA device{shown}", remedy)
    if not torch.cuda.is_available():
        remedy = f"match the driver to CUDA {torch.version.cuda}"
        return Check("devices", Verdict.FAIL, f"torch {torch.__version__} cannot use CUDA{shown}", remedy)
    return Check("devices", Verdict.PASS, f"{count} CUDA device{'s' if count > 1 else ''}{shown}")


def _segments(probe: bool) -> Check:
    """Expandable segments are mapped piecemeal: a NIC cannot register them, and UCX goes round by the host."""
    named = [name for name in _ALLOCATOR_SETTINGS if _expandable(os.environ.get(name, ""))]
    if named:
        return Check(
            "segments",
            Verdict.WARN,
            f"{named[0]} asks for expandable segments, which a NIC cannot register",
            FIXED_SEGMENTS,
        )
    if probe and expandable_segments():
        return Check(
            "segments", Verdict.WARN, "torch holds expandable segments, which a NIC cannot register", FIXED_SEGMENTS
        )
    return Check("segments", Verdict.PASS, "the allocator's segments are fixed")


def _expandable(settings: str) -> bool:
    return "expandable_segments:true" in settings.lower().replace(" ", "")
