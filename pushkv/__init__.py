"""Push-mode KV cache transfer for prefill/decode disaggregation.

``import pushkv`` loads neither torch nor nixl: names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushkv.cache import KVCache
    from pushkv.config import EndpointConfig, NixlConfig, read_config
    from pushkv.core.limits import Limits
    from pushkv.core.outcome import Outcome
    from pushkv.core.prompt import prompt_digest
    from pushkv.runtime.consumer import Consumer, Link, Transfer
    from pushkv.runtime.producer import Producer

__all__ = [
    "Consumer",
    "EndpointConfig",
    "KVCache",
    "Limits",
    "Link",
    "NixlConfig",
    "Outcome",
    "Producer",
    "Transfer",
    "prompt_digest",
    "read_config",
]

_HOMES = {
    "Consumer": "pushkv.runtime.consumer",
    "EndpointConfig": "pushkv.config",
    "KVCache": "pushkv.cache",
    "Limits": "pushkv.core.limits",
    "Link": "pushkv.runtime.consumer",
    "NixlConfig": "pushkv.config",
    "Outcome": "pushkv.core.outcome",
    "Producer": "pushkv.runtime.producer",
    "Transfer": "pushkv.runtime.consumer",
    "prompt_digest": "pushkv.core.prompt",
    "read_config": "pushkv.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pushkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
