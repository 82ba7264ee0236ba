"""What a memory backend is: it says where an array lives and when its bytes are there.

A backend never moves anything and never imports a data mover. Its module imports no device library
either: only the methods that need one do, so that backends can be listed cheaply.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pushkv.backends.machine import Machine
from pushkv.backends.rows import Runs
from pushkv.core.memory import Region
from pushkv.errors import BackendError


@dataclass(frozen=True)
class ArrayDescription:
    """Where an array's elements lie.

    ``region`` is the whole allocation behind the array (its storage), so that arrays which share one share a
    registration. ``offset`` is where the first element lies, in bytes from the region's start; ``strides`` are
    in bytes, one an axis, and may be negative; ``dtype`` is spelt alike for numpy and torch (``"float32"``,
    ``"bfloat16"``). The element ``[i, j, ...]`` lies at ``region.address + offset + i*strides[0] + ...``.
    A region of length 0 has nothing to register.
    Raises BackendError when an element would lie outside the region.
    """

    region: Region
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    def __post_init__(self) -> None:
        first, stop = self.span
        if first < 0 or stop > self.region.length:
            raise BackendError(
                f"an array of shape {self.shape} and byte strides {self.strides} spans bytes {first} to {stop}"
                f" of a region of {self.region.length}; pass an array that lies inside its own storage"
            )

    @property
    def address(self) -> int:
        """The address of the first element, in bytes."""
        return self.region.address + self.offset

    @property
    def span(self) -> tuple[int, int]:
        """The bytes ``[first, stop)`` of the region that the elements touch; empty when there are none."""
        return element_span(self.offset, self.shape, self.strides, self.itemsize)


def element_span(offset: int, shape: Iterable[int], strides: Iterable[int], itemsize: int) -> tuple[int, int]:
    """The bytes ``[first, stop)`` that a strided array's elements touch; ``(offset, offset)`` when it has none."""
    first = last = offset
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return offset, offset
        first += min(0, (size - 1) * stride)
        last += max(0, (size - 1) * stride)
    return first, last + itemsize


def share_regions(descriptions: Iterable[ArrayDescription]) -> tuple[tuple[Region, ...], tuple[int, ...]]:
    """The distinct regions to register, and each description's index among them (arrays of one storage share)."""
    numbers: dict[Region, int] = {}
    indices = tuple(numbers.setdefault(description.region, len(numbers)) for description in descriptions)
    return tuple(numbers), indices


class Fence(Protocol):
    """A point in a device's work: once passed, what was queued before it is in memory.

    Made on the thread that queued the work, asked on any. Both methods raise BackendError when the
    device reports that the work failed.
    """

    def done(self) -> bool:
        """Whether the point is passed; never blocks."""

    def wait(self) -> None:
        """Return once the point is passed."""


class PassedFence:
    """The fence of work that is done when the call that does it returns."""

    def done(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Packer(Protocol):
    """Copies between a cache's regions and slots: one-dimensional arrays of bytes of the same device.

    ``queues``: both return at once, as the work is queued on the device; where it is absent they may copy themselves.
    One thread at a time uses it. Both methods raise BackendError for runs outside their region or too many for the
    slot, before anything is copied. The memory must stay as it is until the fence has passed.
    """

    def gather(self, runs: Runs, slot: Any) -> Fence:
        """Pack the runs into the slot, one after the other from its first byte on."""

    def scatter(self, slot: Any, runs: Runs) -> Fence:
        """Unpack the slot to the runs."""


class Verdict(Enum):
    """What a check found. FAIL: the backend cannot be used; WARN: it can, at a price."""

    PASS = "pass"
    WARN = "warning"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One precondition of a backend: what was looked at, what was found, and what to do about it.

    Raises BackendError for anything but text and a verdict.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.verdict, Verdict):
            raise BackendError(f"a check's verdict is {self.verdict!r:.80}; give a member of Verdict")
        for what, text in {"name": self.name, "found": self.found, "remedy": self.remedy}.items():
            if not isinstance(text, str):
                raise BackendError(f"a check's {what} is {text!r:.80}; give text")

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


@dataclass(frozen=True)
class DataPath:
    """Between what a data mover is to move bytes: ``mover`` is NIXL's backend (``"UCX"``, ``"LIBFABRIC"``).

    ``regions`` are what is to be registered, where that is known; ``same_machine`` says that a peer runs here too.
    """

    mover: str
    regions: tuple[Region, ...] = ()
    same_machine: bool = False


class MemoryBackend(ABC):
    """Describes the memory of one or more types of device. One instance serves a process, from any thread."""

    name: ClassVar[str]
    """As in the backend's record."""
    device_types: ClassVar[tuple[str, ...]]
    """As in the backend's record."""

    @abstractmethod
    def describe(self, array: object) -> ArrayDescription:
        """Where the array lives. Copies nothing.

        Raises BackendError for what is no array, lives on another backend's device, or cannot be written into.
        """

    @abstractmethod
    def fence(self, array: object | None = None) -> Fence:
        """A fence behind all work the calling thread has queued so far.

        ``array`` is one that the work writes: it chooses the device where there are several, and a platform
        without events may read from it. Without it the thread's current device is meant.
        """

    @abstractmethod
    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        """Look at the backend's preconditions, the first things to fix first; never raises for what it finds.

        Without ``probe`` only at what can be seen without importing a device library.
        """

    def present(self, machine: Machine) -> bool:
        """Whether a device of this kind seems to be in the machine, by a look that opens no library."""
        return False

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        """Look at what this memory needs of the machine for that data path; never raises for what it finds.

        A failure means that a push over it would not work, or not safely. Without ``probe`` as in :meth:`check`.
        """
        return ()

    def prepare_thread(self, device: int = 0) -> None:  # noqa: B027  # most devices need nothing
        """Make the calling thread fit to own a data mover's agent for this device ordinal.

        Called on that thread before the agent is made. Raises BackendError.
        """

    def allocate(self, size: int, device: int = 0) -> Any:
        """A one-dimensional array of ``size`` bytes for slots, that :meth:`describe` takes. Raises BackendError."""
        raise BackendError(f"the {self.name} backend has no landing slots; set landing='direct'")

    def packer(self, regions: Sequence[Region], arrays: Sequence[object]) -> Packer:
        """What gathers from and scatters to these regions, which ``arrays`` lie in. Raises BackendError."""
        raise BackendError(f"the {self.name} backend cannot gather and scatter; set landing='direct'")

    def to_host(self, slot: Any) -> NDArray[np.uint8]:
        """The bytes of (a part of) a slot in host memory; called when the gather into it has passed its fence.

        Whatever is done to the slot afterwards may show in them. Raises BackendError.
        """
        host: NDArray[np.uint8] = slot.cpu().numpy() if is_tensor(slot) else slot
        return host

    def close(self) -> None:  # noqa: B027  # most backends hold nothing
        """Release what the backend holds. Idempotent."""


def is_tensor(array: object) -> TypeGuard[Any]:
    """Whether the array is a torch tensor. Imports nothing: while torch is not imported, nothing is a tensor."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(array, kind)


def device_type_of(array: object) -> str:
    """The type of device that an array lives on: ``"cpu"`` for numpy, ``tensor.device.type`` for torch.

    Raises BackendError for anything else.
    """
    if is_tensor(array):
        return str(array.device.type)
    if isinstance(array, np.ndarray):
        return "cpu"
    raise BackendError(f"a {type(array).__name__} cannot be described; pass a numpy array or a torch tensor")
