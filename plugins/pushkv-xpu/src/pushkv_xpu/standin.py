"""A stand-in for the device: host tensors that say they are on ``xpu``, and work that lands when it is asked for.

With it the backend can be tested on any machine. Write one like it for your device: as small as this, and as late
as the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class XpuTensor(torch.Tensor):  # type: ignore[misc]  # torch is not read by the type checker here
    """A host tensor whose device is an XPU. Views of it are such tensors too."""

    @property
    def device(self) -> torch.device:
        """The device it claims to be on."""
        return torch.device("xpu", 0)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> XpuTensor:
    """Zeros on the device."""
    made: XpuTensor = torch.zeros(shape, dtype=dtype).as_subclass(XpuTensor)
    return made


def host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain tensor."""
    return tensor.as_subclass(torch.Tensor)


class Runtime:
    """What ``torch.xpu`` is, for one device with one stream. Work lands in its order, and only when an event asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: list[Callable[[], object]] = []
        self._landed = 0

    def submit(self, work: Callable[[], object]) -> None:
        """Queue work."""
        with self._lock:
            self._work.append(work)

    def queued(self) -> int:
        """How much has been queued so far."""
        return len(self._work)

    def advance(self, behind: int) -> bool:
        """Whether the first ``behind`` pieces of work have landed; if not, one more does now."""
        with self._lock:
            if self._landed >= behind:
                return True
            self._work[self._landed]()
            self._landed += 1
            return False

    def synchronize(self) -> None:
        """Let everything land."""
        behind = self.queued()
        while not self.advance(behind):
            pass

    def is_available(self) -> bool:
        """There is a device."""
        return True

    def device_count(self) -> int:
        """There is one."""
        return 1

    def set_device(self, device: int) -> None:
        """Make it current. Raises RuntimeError where there is none of that number."""
        if device:
            raise RuntimeError(f"invalid device ordinal {device}")

    def current_stream(self, device: Any = None) -> Runtime:
        """The one stream."""
        return self

    def Event(self) -> Event:  # as torch spells it
        """An event that is not recorded yet."""
        return Event()


class Event:
    """Passed once what was queued when it was recorded has landed."""

    def __init__(self) -> None:
        self._stream: Runtime | None = None
        self._behind = 0

    def record(self, stream: Runtime) -> None:
        """Record it behind all work of the stream."""
        self._stream, self._behind = stream, stream.queued()

    def query(self) -> bool:
        """Whether it is passed."""
        return self._stream is None or self._stream.advance(self._behind)

    def synchronize(self) -> None:
        """Wait for it."""
        while not self.query():
            pass
