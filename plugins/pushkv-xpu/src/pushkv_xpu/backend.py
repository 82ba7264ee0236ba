"""The memory of Intel GPUs, as torch allocates it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pushkv.backends.base import ArrayDescription, Check, DataPath, Fence, MemoryBackend, Verdict, device_type_of
from pushkv.backends.tensors import describe_tensor
from pushkv.errors import BackendError

_INSTALL = "install a torch that is built for Intel GPUs"


class XpuBackend(MemoryBackend):
    """Intel GPU memory; the device is torch's ordinal.

    ``runtime`` is what ``torch.xpu`` is; the tests give a stand-in for it.
    """

    name = "xpu"
    device_types = ("xpu",)

    def __init__(self, runtime: Any = None) -> None:
        self._given = runtime

    def describe(self, array: object) -> ArrayDescription:
        """Describe a torch tensor on an XPU through its storage. Raises BackendError for anything else."""
        kind = device_type_of(array)
        if kind != "xpu":
            raise BackendError(
                f"the xpu backend describes Intel GPU memory and this array is on {kind}; use backend_for()"
            )
        tensor: Any = array
        return describe_tensor(tensor, device=int(tensor.device.index or 0), memory="VRAM")

    def fence(self, array: object | None = None) -> Fence:
        """An event on the calling thread's current stream, of the tensor's device or the current one."""
        runtime = self._runtime()
        return XpuFence(runtime, runtime.current_stream(getattr(array, "device", None)))

    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        """Look for torch; with ``probe`` for a device that it can use."""
        if self._given is None and find_spec("torch") is None:
            return (Check("torch", Verdict.FAIL, "torch is not installed", _INSTALL),)
        installed = Check("torch", Verdict.PASS, "torch is installed")
        return (installed, _devices(self._runtime())) if probe else (installed,)

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        """Nothing in NIXL registers this memory: a push over it cannot work, and is refused before it is tried."""
        return (
            Check(
                "mover",
                Verdict.FAIL,
                f"NIXL's {path.mover} has no way to Intel GPU memory",
                "keep the cache that is pushed in host memory",
            ),
        )

    def prepare_thread(self, device: int = 0) -> None:
        """Make the device current on this thread."""
        try:
            self._runtime().set_device(device)
        except (RuntimeError, AssertionError) as error:
            raise BackendError(f"XPU device {device} cannot be made current: {_line(error)}") from error

    def _runtime(self) -> Any:
        if self._given is not None:
            return self._given
        try:
            import torch
        except ImportError as error:
            raise BackendError(f"torch cannot be imported: {_line(error)}; {_INSTALL}") from error
        return torch.xpu


class XpuFence:
    """An event, recorded on a stream when the fence is made."""

    def __init__(self, runtime: Any, stream: Any) -> None:
        self._event = runtime.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has passed the event; never blocks."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise BackendError(f"work before a fence failed: {_line(error)}; restart the process") from error

    def wait(self) -> None:
        """Return once the stream has passed the event."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise BackendError(f"work before a fence failed: {_line(error)}; restart the process") from error


def _devices(runtime: Any) -> Check:
    count = int(runtime.device_count()) if runtime.is_available() else 0
    if count:
        return Check("devices", Verdict.PASS, f"{count} XPU device{'s' if count > 1 else ''}")
    return Check("devices", Verdict.FAIL, "torch sees no XPU", f"see whether its driver is there, or {_INSTALL}")


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
