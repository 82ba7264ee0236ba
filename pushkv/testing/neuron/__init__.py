"""A Trainium in host memory: torch's device ``neuron``, its runtime, its machine, and what NIXL makes of it.

Every behaviour that it has is documented of the real one or was read in the sources of what runs on it;
``docs/neuron.md`` lists them. It has not been held against the hardware. Installing the device is global to a
process and cannot be undone: tests that use it have a pytest process of their own.
"""

from __future__ import annotations

from pushkv.testing.neuron.fabric import FakeNixl
from pushkv.testing.neuron.fake import FakeNeuron, Flavour
from pushkv.testing.neuron.host import FakeHost
from pushkv.testing.neuron.nrt import FakeNrt, Status

__all__ = ["FakeHost", "FakeNeuron", "FakeNixl", "FakeNrt", "Flavour", "Status"]
