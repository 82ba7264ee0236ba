"""Host memory: numpy arrays and torch tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.base import (
    ArrayDescription,
    Check,
    Fence,
    MemoryBackend,
    Packer,
    PassedFence,
    Verdict,
    device_type_of,
    element_span,
    is_tensor,
)
from pushkv.backends.cpu_packing import CpuPacker
from pushkv.backends.machine import Machine
from pushkv.backends.tensors import describe_tensor, refuse_overlap, storage_region
from pushkv.core.memory import Region
from pushkv.errors import BackendError
from pushkv.hookspecs import BackendRecord, hookimpl

AnyArray = NDArray[np.generic]


@hookimpl
def pushkv_backends() -> Iterable[BackendRecord]:
    """The plug-in of this module."""
    return [BackendRecord("cpu", ("cpu",), "pushkv.backends.cpu:CpuBackend")]


class CpuBackend(MemoryBackend):
    """Host memory, device 0, NIXL's DRAM. What a call has computed is in memory when it returns."""

    name = "cpu"
    device_types = ("cpu",)

    def describe(self, array: object) -> ArrayDescription:
        """Describe a writable numpy array, or a torch tensor on the CPU, of any strides.

        torch cannot tell that a tensor was made from read-only memory; numpy can, and such an array is refused.
        """
        kind = device_type_of(array)
        if kind != "cpu":
            raise BackendError(
                f"the cpu backend describes host memory and this tensor is on {kind}; use backend_for()"
            )
        if is_tensor(array):
            return describe_tensor(array, device=0, memory="DRAM")
        assert isinstance(array, np.ndarray)
        return _describe_numpy(array)

    def fence(self, array: object | None = None) -> Fence:
        """A fence that is already passed."""
        return PassedFence()

    def allocate(self, size: int, device: int = 0) -> NDArray[np.uint8]:
        """Zeroed bytes, touched so that they are there when the first part comes."""
        slots = np.empty(size, np.uint8)
        slots.fill(0)
        return slots

    def packer(self, regions: Sequence[Region], arrays: Sequence[object]) -> Packer:
        """Copies in host memory by numpy, done when the call returns."""
        return CpuPacker(regions, arrays)

    def present(self, machine: Machine) -> bool:
        """Always."""
        return True

    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        """Host memory has no preconditions."""
        return (Check("host memory", Verdict.PASS, "present"),)


def _describe_numpy(array: AnyArray) -> ArrayDescription:
    if not array.flags.writeable:
        raise BackendError(f"an array of shape {array.shape} is read-only; pass one whose flags.writeable is True")
    refuse_overlap(array.shape, array.strides, array.itemsize)
    region = _allocation(array)
    return ArrayDescription(
        region=region,
        offset=_address(array) - region.address,
        shape=array.shape,
        strides=array.strides,
        itemsize=array.itemsize,
        dtype=_dtype_name(array.dtype),
    )


def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    """The dtype as torch spells it too. Raises BackendError for what has no plain bytes to copy."""
    if dtype.hasobject:
        raise BackendError(f"dtype {dtype} holds Python objects, which mean nothing elsewhere; pass numbers")
    if dtype.names is not None or not dtype.isnative:
        raise BackendError(f"dtype {dtype} has fields or a foreign byte order; pass native numbers or their bytes")
    return str(dtype.name)


def _address(array: AnyArray) -> int:
    return int(array.__array_interface__["data"][0])


def _allocation(array: AnyArray) -> Region:
    """The memory that the array is a view of: the outermost array's, or the buffer or tensor below that."""
    outermost = _outermost(array)
    if is_tensor(outermost.base):
        return storage_region(outermost.base, device=0, memory="DRAM")
    for candidate in (_buffer_of(outermost), _extent_of(outermost)):
        if candidate is not None and _holds(candidate, array):
            return candidate
    return _extent_of(array)


def _outermost(array: AnyArray) -> AnyArray:
    """The array at the end of the chain of bases; numpy puts plain objects in between (as_strided does)."""
    below: object = array.base
    while below is not None:
        if isinstance(below, np.ndarray):
            array = below
        below = getattr(below, "base", None)
    return array


def _buffer_of(array: AnyArray) -> Region | None:
    """The buffer (an mmap, a shared memory, a bytearray) an array was made over, where it can be seen whole."""
    if array.base is None:
        return None
    try:
        # Raises for what is no buffer.
        whole = np.frombuffer(array.base, dtype=np.uint8)
    except (TypeError, ValueError, BufferError):
        return None
    return Region(address=_address(whole), length=whole.nbytes)


def _extent_of(array: AnyArray) -> Region:
    first, stop = element_span(_address(array), array.shape, array.strides, array.itemsize)
    return Region(address=first, length=stop - first)


def _holds(region: Region, array: AnyArray) -> bool:
    """A base may be an array over other memory than its view (a proxy object); then it says nothing."""
    extent = _extent_of(array)
    return region.address <= extent.address and extent.stop <= region.stop
