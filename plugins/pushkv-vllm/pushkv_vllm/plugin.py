"""What vLLM calls in every process of a server: it makes the connector known by name."""

from __future__ import annotations

NAME = "PushKVConnector"


def register() -> None:
    """Make ``PushKVConnector`` a name that ``--kv-transfer-config`` knows. Idempotent; imports nothing heavy."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM raises for a name that is there already, and calls plug-ins more than once in a process.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "pushkv_vllm.connector", NAME)
