"""PushKV for vLLM-Neuron: the connector of :mod:`pushkv_vllm` with what differs on Trainium.

Importing this package loads neither vLLM, torch nor NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pushkv_vllm_neuron.connector import PushKVNeuronConnector

__all__ = ["PushKVNeuronConnector"]


def __getattr__(name: str) -> Any:
    if name != "PushKVNeuronConnector":
        raise AttributeError(f"module 'pushkv_vllm_neuron' has no attribute {name!r}")
    return import_module("pushkv_vllm_neuron.connector").PushKVNeuronConnector
