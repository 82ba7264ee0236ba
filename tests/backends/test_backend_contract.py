"""The backends of this process keep the contract (those that need a process of their own are in tests/neuron)."""

from __future__ import annotations

from pushkv.testing.contracts.cpu import TestCpuNumpy, TestCpuTorch
from pushkv.testing.contracts.cuda import TestCuda

__all__ = ["TestCpuNumpy", "TestCpuTorch", "TestCuda"]
