"""What the plug-in does in each of a server's processes."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from pushkv_vllm_neuron import PushKVNeuronConnector, plugin


def test_the_connector_has_a_name_however_often_it_is_registered() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory._registry[plugin.NAME]() is PushKVNeuronConnector


@pytest.mark.parametrize("told", ["0", "0-3", ""])
def test_cores_that_the_user_chose_are_warned_of(
    told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", told)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    warned = [one.getMessage() for one in caplog.records if "NEURON_VISIBLE_DEVICES" in one.getMessage()]
    assert len(warned) == bool(told)


def test_vllm_finds_it() -> None:
    found = {point.name: point.value for point in entry_points(group="vllm.general_plugins")}
    if "pushkv_neuron" not in found:
        pytest.skip("pushkv-vllm-neuron is on the path and not installed")
    assert found["pushkv_neuron"] == "pushkv_vllm_neuron.plugin:register"
