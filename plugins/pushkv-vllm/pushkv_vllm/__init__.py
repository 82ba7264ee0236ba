"""PushKV for vLLM: a KV connector that pushes, and a router for prefill and decode servers.

Importing this package loads neither vLLM, torch nor NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushkv_vllm.connector import PushKVConnector

__all__ = ["PushKVConnector"]


def __getattr__(name: str) -> Any:
    if name != "PushKVConnector":
        raise AttributeError(f"module 'pushkv_vllm' has no attribute {name!r}")
    return import_module("pushkv_vllm.connector").PushKVConnector
