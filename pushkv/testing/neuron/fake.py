"""The fake as a whole: a process with a Neuron runtime, its torch device, and the machine it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from pushkv.errors import BackendError
from pushkv.testing.neuron import device
from pushkv.testing.neuron.host import FakeHost
from pushkv.testing.neuron.nrt import Allocation, FakeNrt
from pushkv.testing.neuron.queue import Event, WorkQueue


class Flavour(Enum):
    """Which of the two torch backends the process has."""

    LITE = "libtorch_neuronx_lite"
    NATIVE = "torch-neuronx"


class FakeNeuron:
    """One process's device. ``visible_cores`` is 1, as vLLM-Neuron's worker has it, whatever a tensor's index is."""

    def __init__(self, host: FakeHost, flavour: Flavour = Flavour.LITE, **runtime: Any) -> None:
        self.host = host
        self.flavour = flavour
        self.queue = WorkQueue()
        runtime.setdefault("nic", host.nic_beside_the_chip)
        self.nrt = FakeNrt(host.environ, slices=flavour is Flavour.NATIVE, **runtime)
        host.provide(self.nrt, flavour is Flavour.LITE)

    def install(self) -> FakeNeuron:
        """Make torch's ``neuron`` this one: the device's name is the process's for good, what is behind it is not."""
        MODULE.fake = self
        device.register(MODULE)
        return self

    def wrap(self, host: Any, index: int) -> Any:
        """A device tensor over a host tensor, in device memory of its own."""
        allocation = self.nrt.allocate(int(host.untyped_storage().nbytes()), host)
        self.host.show_maps(self.nrt)
        return device.tensor_class()(host, index, self, allocation)

    def address_of(self, allocation: Allocation) -> int:
        """What a storage's ``data_ptr()`` says.

        Without mapped memory one backend says 0, the other an address that is none of this process's.
        """
        if self.nrt.maps_hbm:
            return allocation.va
        return 0 if self.flavour is Flavour.LITE or not allocation.nbytes else allocation.va

    def run_graph(self, graph: Callable[..., object], *writes: Any) -> Any:
        """A whole compiled model's forward: returns at once with its sampled ids, a future on the device.

        ``graph`` is called with the host tensors of ``writes`` when the work lands.
        """
        import torch

        sampled = self.wrap(torch.zeros(1, dtype=torch.int64), 0)
        hosts = [one.host for one in writes]
        storages = {one.allocation.host_address for one in (*writes, sampled)}
        self.queue.submit(lambda: graph(*hosts), storages)
        return sampled

    def synchronize(self) -> None:
        """Let everything land."""
        self.queue.land(self.queue.queued)

    def resolve(self, address: int, length: int) -> int:
        """The host address of device memory. Raises BackendError for what is not within one allocation."""
        found = self.nrt.find(address, length)
        if found is None:
            raise BackendError(
                f"Device memory {address:#x} to {address + length:#x} lies in no allocation; check it."
            )
        return found.host_address + address - found.va


class DeviceModule:
    """``torch.neuron``. The native backend has streams and events; of the lite one only the device count is known."""

    fake: FakeNeuron

    def __getattr__(self, name: str) -> Any:
        if name in ("Event", "synchronize", "current_stream", "is_initialized"):
            fake = self.__dict__.get("fake")
            if fake is not None and fake.flavour is Flavour.NATIVE:
                return getattr(self, f"_{name}")
        raise AttributeError(f"module 'torch.neuron' has no attribute {name!r}")

    def is_available(self) -> bool:
        """There is a device."""
        return True

    def device_count(self) -> int:
        """One core is visible."""
        return 1

    def current_device(self) -> int:
        """Always the first."""
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def _Event(self, **_: Any) -> Event:  # as torch spells it
        return Event(self.fake.queue)

    def _synchronize(self, *_: Any) -> None:
        self.fake.synchronize()

    def _current_stream(self, *_: Any) -> WorkQueue:
        return self.fake.queue

    def _is_initialized(self) -> bool:
        return self.fake.nrt.initialized


MODULE = DeviceModule()


def bytes_at(fake: FakeNeuron, address: int, length: int) -> bytes:
    """What a NIC reads there now."""
    import ctypes

    return ctypes.string_at(fake.resolve(address, length), length)


def put_bytes(fake: FakeNeuron, address: int, payload: Sequence[int] | bytes) -> None:
    """What a WRITE that lands there does."""
    import ctypes

    ctypes.memmove(fake.resolve(address, len(payload)), bytes(payload), len(payload))
