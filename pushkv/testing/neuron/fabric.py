"""What NIXL's LIBFABRIC backend makes of the machine and of device memory, with the bytes moved by real NIXL.

Registration goes by the rules of the real thing. The bytes are the host's, and go over NIXL's UCX backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.machine import AMAZON
from pushkv.core.memory import Region
from pushkv.errors import BackendError, TransportError, TransportUnavailable
from pushkv.testing.host_backed import HostBackedTransport
from pushkv.testing.neuron.fake import FakeNeuron
from pushkv.testing.neuron.host import LIBRARIES
from pushkv.testing.neuron.nrt import Status
from pushkv.transport.base import Transport
from pushkv.transport.nixl_errors import translate

log = logging.getLogger(__name__)

NEURON_DEVICES = frozenset({0x7264, 0x7164, 0x7364, 0x7564, 0x7565})
"""The PCI device ids that NIXL looks for."""


def real_nixl(agent: str) -> Transport:
    """A NIXL agent over UCX."""
    from pushkv.transport.nixl import NixlSettings, NixlTransport

    return NixlTransport(NixlSettings(agent))


@dataclass(frozen=True)
class Registration:
    """Device memory that an agent has registered.

    ``system``: as host memory, silently, since the agent knew of no device. ``fallback``: not by dma-buf, silently
    too. ``rails`` are the NICs used.
    """

    address: int
    length: int
    device: int
    system: bool
    fallback: bool
    rails: tuple[str, ...]


class FakeNixl:
    """Makes agents for one fake device; ``registrations`` are what they registered."""

    def __init__(self, neuron: FakeNeuron, mover: Callable[[str], Transport] = real_nixl) -> None:
        self.neuron = neuron
        self.registrations: list[Registration] = []
        self._mover = mover
        self._knows_the_device: bool | None = None
        self._shadows: list[NDArray[np.uint8]] = []

    def __call__(self, agent: str) -> Transport:
        """An agent. Whether libfabric knows the device is decided for the process when the first one is made.

        Raises TransportUnavailable.
        """
        missing = [name for name in LIBRARIES if name not in self.neuron.host.libraries]
        if missing:
            raise TransportUnavailable(f"NIXL cannot start its backend LIBFABRIC (nixlNotFoundError): {missing[0]}")
        if self._knows_the_device is None:
            self._knows_the_device = self.neuron.nrt.initialized
        self.neuron.host.mapped.append("/opt/nixl/plugins/libplugin_LIBFABRIC.so")
        self.neuron.host.show_maps(self.neuron.nrt)
        knows_the_device = self._knows_the_device
        return HostBackedTransport(self._mover(agent), lambda region: self._register(region, knows_the_device))

    @property
    def accelerator(self) -> str:
        """By a look at the PCI bus: an NVIDIA GPU decides, wherever the memory is."""
        devices = self.neuron.host.machine().pci()
        if any(one.gpu_of_nvidia for one in devices):
            return "CUDA"
        if any(one.vendor == AMAZON and one.device in NEURON_DEVICES for one in devices):
            return "NEURON"
        return "SYSTEM"

    def _register(self, region: Region, knows_the_device: bool) -> int:
        if self.accelerator != "NEURON":
            raise _refused("nixlNotSupportedError", "NIXL_ERR_NOT_SUPPORTED", region)
        nics = tuple(nic.name for nic in self.neuron.host.machine().nics() if nic.efa)
        if not nics:
            raise _refused("nixlBackendError", "NIXL_ERR_BACKEND", region)
        if not knows_the_device:
            return self._as_system_memory(region, nics)
        status, _ = self.neuron.nrt.export_dmabuf(region.address, region.length)
        try:
            host = self.neuron.resolve(region.address, region.length)
        except BackendError as error:
            raise _refused("nixlBackendError", "NIXL_ERR_BACKEND", region) from error
        if status is Status.RESOURCE:
            raise _refused("nixlBackendError", "NIXL_ERR_BACKEND", region)
        self._note(region, nics, fallback=status is not Status.SUCCESS)
        return host

    def _as_system_memory(self, region: Region, nics: tuple[str, ...]) -> int:
        """Only a warning says it: what is moved is not the device's memory."""
        log.warning("provider lacks FI_HMEM; %s is registered as system memory", region)
        self._note(region, nics, system=True)
        self._shadows.append(np.zeros(region.length, np.uint8))
        return int(self._shadows[-1].ctypes.data)

    def _note(self, region: Region, nics: tuple[str, ...], *, system: bool = False, fallback: bool = False) -> None:
        """The device id decides nothing; the address does, by the NIC beside its chip, else all of them."""
        beside = [
            nic.name for nic in self.neuron.host.machine().nics() if nic.pci and nic.pci.address == self._near()
        ]
        rails = tuple(beside) or nics
        self.registrations.append(Registration(region.address, region.length, region.device, system, fallback, rails))

    def _near(self) -> str:
        return self.neuron.nrt.nic


def _refused(kind: str, told: str, region: Region) -> TransportError:
    return translate(type(kind, (Exception,), {})(told), f"register {region}")
