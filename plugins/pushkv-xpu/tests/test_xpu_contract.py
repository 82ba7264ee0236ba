"""The backend keeps the contract."""

from __future__ import annotations

from pushkv_xpu.contract import TestXpu

__all__ = ["TestXpu"]
