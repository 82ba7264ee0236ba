"""What the contract needs of a device: arrays on it, and its memory as a NIC sees it."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.base import MemoryBackend, is_tensor


class BackendSubject:
    """A backend with its device, for the contract to work on. The author of a backend implements the first part.

    ``array`` is whatever the backend describes. It is indexed like a numpy array or a torch tensor.
    """

    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    """Modules that listing the backend must not import."""

    def make_backend(self) -> MemoryBackend:
        """A fresh backend."""
        raise NotImplementedError

    def make_array(self, shape: tuple[int, ...], dtype: str = "uint8") -> Any:
        """A contiguous array of zeros on the device, in an allocation of its own. ``dtype`` as numpy spells it."""
        raise NotImplementedError

    def write(self, array: Any, values: NDArray[Any]) -> None:
        """Queue work that fills the array. Where the device works behind the caller's back, the bytes land later."""
        raise NotImplementedError

    def read(self, array: Any) -> NDArray[Any]:
        """What the array holds once everything queued has landed, on the host."""
        raise NotImplementedError

    def peek(self, address: int, length: int, device: int) -> bytes:
        """What a NIC would read at that address now. It waits for nothing."""
        raise NotImplementedError

    def poke(self, address: int, payload: bytes, device: int) -> None:
        """Put the bytes there, as a NIC does when a WRITE lands."""
        raise NotImplementedError

    # What works for numpy arrays and torch tensors as it is

    def write_late(self, array: Any, values: NDArray[Any]) -> None:
        """As :meth:`write`, with something before it that keeps the device busy for a while, if it can be."""
        self.write(array, values)

    def allocation(self, array: Any) -> tuple[int, int]:
        """Address and length in bytes of the allocation behind the array: what is to be registered, no byte more."""
        if is_tensor(array):
            storage = array.untyped_storage()
            return int(storage.data_ptr()), int(storage.nbytes())
        while isinstance(array.base, np.ndarray):
            array = array.base
        return int(array.ctypes.data), int(array.nbytes)

    def permuted(self, array: Any, *axes: int) -> Any:
        """The array with its axes in that order, as a view."""
        return array.permute(*axes) if is_tensor(array) else array.transpose(*axes)

    def reinterpreted(self, array: Any, dtype: str) -> Any:
        """The same bytes as another dtype, as a view."""
        if is_tensor(array):
            import torch

            return array.view(getattr(torch, dtype))
        return array.view(np.dtype(dtype))

    def repeated(self, array: Any, shape: tuple[int, ...]) -> Any:
        """The array expanded to a shape by repeating the same bytes."""
        if is_tensor(array):
            return array.expand(shape)
        return np.lib.stride_tricks.as_strided(array, shape, np.broadcast_to(array, shape).strides)

    def overlapping(self, array: Any, width: int) -> Any:
        """Every stretch of ``width`` elements of a one-dimensional array, as a view: neighbours share bytes."""
        shape = array.shape[0] - width + 1, width
        if is_tensor(array):
            return array.as_strided(shape, (1, 1))
        return np.lib.stride_tricks.as_strided(array, shape, array.strides * 2)

    def foreign(self) -> Any:
        """An array that another backend owns; None where there is none to be had."""
        return np.zeros(16, dtype=np.uint8)


class HostMemory(BackendSubject):
    """A device whose memory is the host's, addresses included."""

    def peek(self, address: int, length: int, device: int) -> bytes:
        """Read host memory."""
        return ctypes.string_at(address, length)

    def poke(self, address: int, payload: bytes, device: int) -> None:
        """Write host memory."""
        ctypes.memmove(address, payload, len(payload))
