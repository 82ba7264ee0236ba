"""What differs between vLLM 0.26 and 0.33, found by looking where that can be, by version where it cannot.

Everything else of the connector knows one vLLM. A version that is newer than all here warns and is treated as the
newest.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 33)
"""The first and the last version that this module was written for."""

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version's text; (0, 0) where it has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def concern(text: str) -> str:
    """What to warn of when vLLM is of this version; empty for those known."""
    version = version_of(text)
    if version == (0, 0) or version > NEWEST:
        newest = ".".join(map(str, NEWEST))
        return f"vLLM {text} is newer than {newest}, the last one that this connector knows; it is treated as that."
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"vLLM {text} is older than {oldest}, the first one that this connector knows; upgrade it."
    return ""


def _base() -> ModuleType:
    return import_module(_BASE)


@lru_cache(maxsize=1)
def fails_by_request() -> bool:
    """Whether a failed load is named by its request (from 0.32), not by its blocks.

    A request that fails so gives all its blocks back and starts anew with fresh ones. One that fails by blocks goes
    on in the same.
    """
    return hasattr(_base(), "KVConnectorTransferResults")


def transfer_results(sent: set[str], received: set[str], failed: set[str]) -> Any:
    """What ``get_transfer_results`` returns."""
    return _base().KVConnectorTransferResults(sent, received, failed)


@lru_cache(maxsize=1)
def names_layouts() -> bool:
    """Whether cache layouts are named by their axes (from 0.32), not HND or NHD."""
    backend = import_module("vllm.v1.attention.backend").AttentionBackend
    return hasattr(backend, "supported_kv_cache_layouts")


def layout_to_ask_for(wanted: str, device: str) -> str | None:
    """What ``get_required_kvcache_layout`` returns for the setting ``layout``; None for no wish.

    Blocks outermost, one block's layers next to each other: the fewest pieces. Before layouts had names that came by
    ``prefer_cross_layer_blocks`` alone, with heads outside tokens. The CPU's kernels take one layout only.
    """
    if wanted == "engine" or device == "cpu":
        return None
    if not names_layouts():
        return "HND"
    return "BLHNC" if wanted == "block" else wanted


def table_now(scheduler_output: Any, request: str) -> tuple[list[int], ...] | None:
    """The request's present block table where the scheduler can tell it (from 0.32), else None."""
    state = getattr(scheduler_output, "kv_connector_block_state", None)
    return None if state is None else state.get_block_ids(request)


def sleeps(vllm_config: Any) -> bool:
    """Whether the engine may free the cache under the connector (sleep mode)."""
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
