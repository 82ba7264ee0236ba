"""The cuda backend against the contract, on every GPU that torch sees. Without one it is skipped, and says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.backends.base import MemoryBackend
from pushkv.backends.cuda import CudaBackend
from pushkv.testing.backend_contract import BackendContract

BUSY_CYCLES = 20_000_000
"""How long the device is kept busy before late bytes, in its clock's cycles: some 10 ms."""


class TestCuda(BackendContract):
    """torch tensors on the last GPU, which is not the thread's current one where there are several."""

    @pytest.fixture(autouse=True)
    def _gpu(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip("torch sees no CUDA device on this machine")
        self.device = f"cuda:{torch.cuda.device_count() - 1}"

    def make_backend(self) -> MemoryBackend:
        return CudaBackend()

    def make_array(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def write(self, array: Any, values: NDArray[Any]) -> None:
        import torch

        torch.cuda.set_device(array.device)
        array.copy_(torch.from_numpy(np.ascontiguousarray(values)).pin_memory(), non_blocking=True)

    def write_late(self, array: Any, values: NDArray[Any]) -> None:
        import torch

        torch.cuda.set_device(array.device)
        torch.cuda._sleep(BUSY_CYCLES)
        self.write(array, values)

    def read(self, array: Any) -> NDArray[Any]:
        import torch

        torch.cuda.synchronize(array.device)
        return np.array(array.cpu().numpy())

    def peek(self, address: int, length: int, device: int) -> bytes:
        import torch

        # A stream of its own: one that waits for nothing that the array's stream has queued.
        with torch.cuda.stream(torch.cuda.Stream(device=device)):
            return bytes(self._memory(address, length, device).cpu().numpy())

    def poke(self, address: int, payload: bytes, device: int) -> None:
        import torch

        torch.cuda.synchronize(device)
        self._memory(address, len(payload), device).copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        torch.cuda.synchronize(device)

    @staticmethod
    def _memory(address: int, length: int, device: int) -> Any:
        """A tensor over device memory, made from nothing but its address."""
        import torch

        interface = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{device}")
