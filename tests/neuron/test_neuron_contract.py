"""The neuron backend keeps the contract on the fake device."""

from __future__ import annotations

from pushkv.testing.contracts.neuron import TestNeuronLite, TestNeuronNative

__all__ = ["TestNeuronLite", "TestNeuronNative"]
