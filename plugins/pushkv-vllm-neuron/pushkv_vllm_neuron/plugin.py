"""What vLLM calls in every process of a server: it makes the connector known by name."""

from __future__ import annotations

import logging
import os

NAME = "PushKVNeuronConnector"

log = logging.getLogger(__name__)


def register() -> None:
    """Make ``PushKVNeuronConnector`` a name that ``--kv-transfer-config`` knows. Idempotent, and light."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Workers are told their core by this variable, but by vLLM-Neuron and later than this.
    if told := os.environ.get("NEURON_RT_VISIBLE_CORES"):
        log.warning(
            "NEURON_RT_VISIBLE_CORES is %r, which vLLM-Neuron's worker refuses to find set; unset it and use "
            "NEURON_VISIBLE_DEVICES.",
            told,
        )
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "pushkv_vllm_neuron.connector", NAME)
