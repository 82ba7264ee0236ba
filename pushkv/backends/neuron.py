"""The memory of AWS Trainium and Inferentia, as torch's device ``neuron`` allocates it: Neuron Direct.

Written against the documented interfaces and tested on a fake (:mod:`pushkv.testing.neuron`); no hardware was
at hand. ``docs/neuron.md`` has the facts it rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pushkv.backends.base import (
    ArrayDescription,
    Check,
    DataPath,
    Fence,
    MemoryBackend,
    Packer,
    PassedFence,
    device_type_of,
)
from pushkv.backends.machine import AMAZON, Machine
from pushkv.backends.neuron_checks import DEVICES, NO_ADDRESS, Preconditions
from pushkv.backends.neuron_fence import Reader, fence_for
from pushkv.backends.rows import Runs
from pushkv.backends.tensors import describe_tensor, storage_of
from pushkv.backends.torch_packing import TorchPacker
from pushkv.core.memory import Region
from pushkv.errors import BackendError
from pushkv.hookspecs import BackendRecord, hookimpl

_INSTALL = "install torch-neuronx or vLLM-Neuron from AWS's package index; those names on PyPI are placeholders"


@hookimpl
def pushkv_backends() -> Iterable[BackendRecord]:
    """The plug-in of this module."""
    return [BackendRecord("neuron", ("neuron",), "pushkv.backends.neuron:NeuronBackend", hint=_INSTALL)]


class NeuronBackend(MemoryBackend):
    """Device memory by its virtual address, NIXL's VRAM over LIBFABRIC.

    The device ordinal is the tensor's index; NIXL goes by the address and ignores it. ``machine`` is what the
    preconditions are looked up on.
    """

    name = "neuron"
    device_types = ("neuron",)

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Machine()
        self._preconditions = Preconditions(self._machine)
        self._reader = Reader()
        self._seen = False
        """Whether mapped device memory has been seen, which only a runtime that is up can give."""

    def describe(self, array: object) -> ArrayDescription:
        """Describe a torch tensor through its storage, exactly: never out to a page.

        Raises BackendError where device memory is not mapped: then a storage has no address, or one that is none.
        """
        kind = device_type_of(array)
        if kind != "neuron":
            raise BackendError(
                f"the neuron backend describes Trainium memory and this array is on {kind}; use backend_for()"
            )
        tensor: Any = array
        storage = storage_of(tensor)
        address, length = int(storage.data_ptr()), int(storage.nbytes())
        if length and not (address and self._machine.writable(address)):
            told = f"the address {address:#x}, which is not mapped" if address else "no address"
            raise BackendError(f"a tensor on {tensor.device} has {length} bytes and {told}; {NO_ADDRESS}")
        self._seen |= length > 0
        return describe_tensor(tensor, device=max(0, int(tensor.get_device())), memory="VRAM")

    def fence(self, array: object | None = None) -> Fence:
        """By what torch.neuron offers: an event, else its synchronize(), else a blocking read of one element.

        Leaving a model's forward says nothing: it is one compiled graph that runs behind the caller's back. Without
        event and synchronize() an array that the work writes is needed. Raises BackendError where it is missing.
        """
        return fence_for([] if array is None else [array], self._reader)

    def allocate(self, size: int, device: int = 0) -> Any:
        """Zeroed bytes of device memory."""
        torch = _torch()
        try:
            return torch.zeros(size, dtype=torch.uint8, device=f"neuron:{device}")
        except RuntimeError as error:
            raise BackendError(
                f"{size} bytes for landing slots cannot be had on neuron:{device} ({error}); set landing='direct'"
            ) from error

    def packer(self, regions: Sequence[Region], arrays: Sequence[object]) -> Packer:
        """Copies by torch's own operations. On the device each new shape of them is compiled first."""
        return NeuronPacker(regions, arrays, self._reader)

    def present(self, machine: Machine) -> bool:
        """Whether a Neuron device is on the PCI bus."""
        return any(one.vendor == AMAZON and one.device in DEVICES for one in machine.pci())

    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        """Look for the device, the packages, the runtime and its settings."""
        return self._preconditions.of_the_device(probe)

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        """Look for what registration and WRITEs need: LIBFABRIC, EFA, its settings, the NIC beside the chip."""
        return self._preconditions.of_the_path(path, probe)

    def prepare_thread(self, device: int = 0) -> None:
        """Make sure that the runtime is up: an agent made before it takes device memory for host memory, silently.

        Raises BackendError where nothing shows that it is.
        """
        if not (self._seen or self._preconditions.runtime_is_up()):
            raise BackendError(
                "the Neuron runtime is not up yet, and an agent made now would take its memory for host memory; "
                f"allocate a tensor on neuron:{device} before the endpoint is made"
            )

    def close(self) -> None:
        """End the thread that blocking reads are made on."""
        self._reader.close()


class NeuronPacker(TorchPacker):
    """Gather and scatter in the order of the device's work; their fences read from what they have written."""

    def __init__(self, regions: Sequence[Region], arrays: Sequence[object], reader: Reader) -> None:
        super().__init__(regions, arrays, PassedFence)
        self._reader = reader

    def gather(self, runs: Runs, slot: Any) -> Fence:
        """Queue the packing of the runs into the slot."""
        super().gather(runs, slot)
        return fence_for([slot], self._reader)

    def scatter(self, slot: Any, runs: Runs) -> Fence:
        """Queue the unpacking of the slot to the runs."""
        super().scatter(slot, runs)
        written = [self._flat[number] for number in sorted(set(runs.region[runs.length > 0].tolist()))]
        return fence_for(written, self._reader) if written else PassedFence()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendError(f"torch cannot be imported: {error}; {_INSTALL}") from error
    return torch
