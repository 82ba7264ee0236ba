"""Push-mode KV cache transfer for prefill/decode disaggregation.

``import pushkv`` loads neither torch nor nixl: names are imported when they are first used.

All errors are in :mod:`pushkv.errors`, constructors for the cache layouts of engines in :mod:`pushkv.core.layouts`,
the planner in :mod:`pushkv.core.plan`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushkv.cache import KVCache
    from pushkv.config import EndpointConfig, NixlConfig, read_config
    from pushkv.core.commands import Ended, Released, StageEnded, StageReleased
    from pushkv.core.geometry import BlockTable, Kind
    from pushkv.core.layouts import Packing, Shard, shard
    from pushkv.core.limits import Limits
    from pushkv.core.outcome import Outcome
    from pushkv.core.prompt import prompt_digest
    from pushkv.errors import PushKVError
    from pushkv.runtime.consumer import Consumer, Link, Transfer
    from pushkv.runtime.ending import Ending
    from pushkv.runtime.producer import Producer
    from pushkv.runtime.sigterm import drain_on_sigterm
    from pushkv.trace import Trace

__all__ = [
    "BlockTable",
    "Consumer",
    "Ended",
    "Ending",
    "EndpointConfig",
    "KVCache",
    "Kind",
    "Limits",
    "Link",
    "NixlConfig",
    "Outcome",
    "Packing",
    "Producer",
    "PushKVError",
    "Released",
    "Shard",
    "StageEnded",
    "StageReleased",
    "Trace",
    "Transfer",
    "drain_on_sigterm",
    "prompt_digest",
    "read_config",
    "shard",
]

_HOMES = {
    "BlockTable": "pushkv.core.geometry",
    "Consumer": "pushkv.runtime.consumer",
    "Ended": "pushkv.core.commands",
    "EndpointConfig": "pushkv.config",
    "Ending": "pushkv.runtime.ending",
    "KVCache": "pushkv.cache",
    "Kind": "pushkv.core.geometry",
    "Limits": "pushkv.core.limits",
    "Link": "pushkv.runtime.consumer",
    "NixlConfig": "pushkv.config",
    "Outcome": "pushkv.core.outcome",
    "Packing": "pushkv.core.layouts",
    "Producer": "pushkv.runtime.producer",
    "PushKVError": "pushkv.errors",
    "Released": "pushkv.core.commands",
    "Shard": "pushkv.core.layouts",
    "StageEnded": "pushkv.core.commands",
    "StageReleased": "pushkv.core.commands",
    "Trace": "pushkv.trace",
    "Transfer": "pushkv.runtime.consumer",
    "drain_on_sigterm": "pushkv.runtime.sigterm",
    "prompt_digest": "pushkv.core.prompt",
    "read_config": "pushkv.config",
    "shard": "pushkv.core.layouts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pushkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
