"""The cpu backend against the contract, with numpy arrays and with torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.backends.base import MemoryBackend
from pushkv.backends.cpu import CpuBackend
from pushkv.testing.backend_contract import BackendContract, HostMemory


class TestCpuNumpy(HostMemory, BackendContract):
    """numpy arrays."""

    def make_backend(self) -> MemoryBackend:
        return CpuBackend()

    def make_array(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        return np.zeros(shape, np.dtype(dtype))

    def write(self, array: Any, values: NDArray[Any]) -> None:
        array[...] = values

    def read(self, array: Any) -> NDArray[Any]:
        return np.array(array)

    def foreign(self) -> Any:
        torch = pytest.importorskip("torch", reason="only torch makes arrays of other devices")
        return torch.zeros(16, device="meta")


class TestCpuTorch(HostMemory, BackendContract):
    """torch tensors on the CPU."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="these tests describe torch tensors; the extra pushkv[torch] has it")

    def make_backend(self) -> MemoryBackend:
        return CpuBackend()

    def make_array(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def write(self, array: Any, values: NDArray[Any]) -> None:
        import torch

        array.copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def read(self, array: Any) -> NDArray[Any]:
        return np.array(array.numpy())

    def foreign(self) -> Any:
        import torch

        return torch.zeros(16, device="meta")
