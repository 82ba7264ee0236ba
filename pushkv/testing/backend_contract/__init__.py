"""The contract of every :class:`~pushkv.backends.base.MemoryBackend`, as a pytest class.

Derive from :class:`BackendContract`, implement what :class:`BackendSubject` asks for, and let pytest collect it.
``python -m pushkv.testing.backend_contract`` prints which backend keeps which part of it on this machine.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in ("contract", "fences", "packing")))

from pushkv.testing.backend_contract.contract import BackendContract  # noqa: E402  # after the line above
from pushkv.testing.backend_contract.subject import BackendSubject, HostMemory  # noqa: E402

__all__ = ["BackendContract", "BackendSubject", "HostMemory"]
