"""vLLM's own NIXL connectors as they are, but for two things that keep them from running on a machine of few cores.

Loaded by ``kv_connector_module_path``, to compare ours with them: NIXL's Python layer starts its progress thread
without a pause, which takes a core, and the stock worker pins itself to the machine's last core, where prefill and
decode of one machine then wait for each other. Both are undone from outside; nothing of the connectors is changed.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from nixl._api import nixl_agent
from nixl._api import nixlBind as bindings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector

PAUSE_US = 1000


class _Bindings(ModuleType):
    """NIXL's bindings, whose agents pause between looks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    @staticmethod
    def nixlAgent(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return bindings.nixlAgent(name, config)


nixl_agent.__init__.__globals__["nixlBind"] = _Bindings("paused")
os.sched_setaffinity = lambda pid, cores: None  # type: ignore[assignment]

NixlConnector = NixlPullConnector
__all__ = ["NixlConnector", "NixlPushConnector"]
