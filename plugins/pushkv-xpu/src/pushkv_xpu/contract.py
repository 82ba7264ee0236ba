"""The backend against PushKV's contract, on the stand-in. ``python -m pushkv.testing.backend_contract`` runs it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pushkv.backends.base import MemoryBackend
from pushkv.testing.backend_contract import BackendContract, HostMemory
from pushkv_xpu import standin
from pushkv_xpu.backend import XpuBackend


class TestXpu(HostMemory, BackendContract):
    """The stand-in's memory is host memory, so ``HostMemory`` says what a NIC would find."""

    @cached_property
    def runtime(self) -> standin.Runtime:
        """The device of one test."""
        return standin.Runtime()

    def make_backend(self) -> MemoryBackend:
        return XpuBackend(self.runtime)

    def make_array(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        return standin.zeros(shape, getattr(torch, dtype))

    def write(self, array: Any, values: NDArray[Any]) -> None:
        host = torch.from_numpy(np.array(values)).to(array.dtype)
        self.runtime.submit(lambda: standin.host(array).copy_(host))

    def read(self, array: Any) -> NDArray[Any]:
        self.runtime.synchronize()
        return np.array(standin.host(array).numpy())
