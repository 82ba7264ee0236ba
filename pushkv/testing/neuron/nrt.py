"""The runtime library, libnrt: where device memory lies, and what it tells a data mover about it."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

PAGE = 4096
_FIRST = 0x7F40_0000_0000
_APART = 1 << 34
_SEGMENT = 1 << 21
_SLICE = 256


class Status(IntEnum):
    """What libnrt's functions return."""

    SUCCESS = 0
    FAILURE = 1
    INVALID = 2
    RESOURCE = 4
    UNINITIALIZED = 13


class Allocation:
    """Device memory ``[va, va + nbytes)``; ``host`` is the tensor whose bytes it is. Gone when nobody holds it."""

    def __init__(self, va: int, nbytes: int, host: Any) -> None:
        self.va = va
        self.nbytes = nbytes
        self.host = host

    @property
    def host_address(self) -> int:
        """Where its bytes are in host memory."""
        return int(self.host.untyped_storage().data_ptr())


class FakeNrt:
    """One process's runtime.

    ``slices``: allocations are slices of cached segments, as in the native allocator, and not tensors of their own.
    ``dmabuf``: 0 exports nothing, 1 only from page-aligned addresses, 2 also tells an offset. ``nic`` is the PCI
    address of the NIC beside the chip, empty where it has none. ``export`` is what an export answers otherwise.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        slices: bool = False,
        dmabuf: int = 1,
        nic: str = "",
        version: tuple[int, int, int, int] = (2, 33, 10, 0),
        without: tuple[str, ...] = (),
    ) -> None:
        self.dmabuf, self.nic, self.version = dmabuf, nic, version
        self.initialized = False
        self.maps_hbm: bool | None = None
        """Whether device memory is mapped: read from the environment at the first allocation, and kept."""
        self.export = Status.SUCCESS
        self._environ, self._slices, self._without = environ, slices, without
        self._next = _FIRST
        self._bases: list[int] = []
        self._allocations: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()

    def init(self) -> Status:
        """Start the runtime."""
        self.initialized = True
        return Status.SUCCESS

    def allocate(self, nbytes: int, host: Any) -> Allocation:
        """Device memory for a tensor. The first one starts the runtime and latches NEURON_RT_MAP_HBM."""
        self.init()
        if self.maps_hbm is None:
            self.maps_hbm = self._environ.get("NEURON_RT_MAP_HBM", "").lower() in ("1", "true")
        allocation = Allocation(self._place(nbytes), nbytes, host)
        bisect.insort(self._bases, allocation.va)
        self._allocations[allocation.va] = allocation
        return allocation

    def _place(self, nbytes: int) -> int:
        """Slices follow each other in a segment, at any multiple of 256 bytes; else each has a page of its own."""
        at = self._next
        if self._slices and nbytes < _SEGMENT:
            self._next = at + max(_SLICE, -(-nbytes // _SLICE) * _SLICE)
        else:
            at = -(-at // _APART) * _APART
            self._next = at + _APART
        return at

    def find(self, va: int, length: int = 1) -> Allocation | None:
        """The allocation that holds these bytes."""
        at = bisect.bisect_right(self._bases, va) - 1
        found = self._allocations.get(self._bases[at]) if at >= 0 else None
        return found if found is not None and va + length <= found.va + found.nbytes else None

    def maps(self) -> str:
        """The lines that the mapped device memory has in /proc/self/maps."""
        if not self.maps_hbm:
            return ""
        held = sorted(self._allocations.values(), key=lambda one: one.va)
        spans = ((one.va // PAGE, (one.va + max(1, one.nbytes) - 1) // PAGE + 1) for one in held)
        return "".join(f"{a * PAGE:x}-{b * PAGE:x} rw-s 0 00:00 0 /dev/neuron0\n" for a, b in spans)

    # The functions of the library, as ctypes calls them

    def library(self) -> SimpleNamespace:
        """What loading ``libnrt.so.1`` gives: the functions that this version has."""
        functions: dict[str, Callable[..., int]] = {
            "nrt_get_version": self._get_version,
            "nrt_get_attached_efa_bdf": self._get_attached_efa_bdf,
            "nrt_get_dmabuf_fd": lambda va, size, fd: self.export_dmabuf(_value(va), _value(size))[0],
        }
        if self.dmabuf >= 2:
            functions["nrt_get_dmabuf_fd_v2"] = self._get_dmabuf_fd_v2
        return SimpleNamespace(**{name: call for name, call in functions.items() if name not in self._without})

    def _get_version(self, out: Any, size: Any) -> int:
        numbers = ctypes.cast(out, ctypes.POINTER(ctypes.c_uint64))
        for at, number in enumerate(self.version):
            numbers[at] = number
        return Status.SUCCESS

    def _get_attached_efa_bdf(self, va: Any, text: Any, length: Any) -> int:
        if not self.nic or self.find(_value(va)) is None:
            return Status.FAILURE
        text.value = self.nic.encode()
        length._obj.value = len(self.nic)
        return Status.SUCCESS

    def _get_dmabuf_fd_v2(self, va: Any, size: Any, fd: Any, offset: Any) -> int:
        status, offset._obj.value = self.export_dmabuf(_value(va), _value(size))
        return status

    def export_dmabuf(self, va: int, size: int) -> tuple[Status, int]:
        """Whether a dma-buf can be had, and the offset of ``va`` in it; version 1 knows no offset but 0."""
        if not self.initialized:
            return Status.UNINITIALIZED, 0
        if self.export is not Status.SUCCESS:
            return self.export, 0
        offset = va % PAGE
        if not self.dmabuf or self.find(va, size) is None or (offset and self.dmabuf < 2):
            return Status.INVALID, 0
        return Status.SUCCESS, offset


def _value(number: Any) -> int:
    return int(getattr(number, "value", number) or 0)
