"""The plug-in for Intel GPUs, as torch names them: ``xpu``. It imports nothing heavy: every listing reads it."""

from __future__ import annotations

from collections.abc import Iterable

from pushkv.hookspecs import BackendRecord, hookimpl


@hookimpl
def pushkv_backends() -> Iterable[BackendRecord]:
    """The one backend of this distribution."""
    return [
        BackendRecord(
            name="xpu",
            device_types=("xpu",),
            load="pushkv_xpu.backend:XpuBackend",
            hint="install a torch that is built for Intel GPUs",
        )
    ]
