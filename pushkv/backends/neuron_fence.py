"""Fences on a device whose torch backend may or may not have events."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pushkv.backends.base import Fence
from pushkv.errors import BackendError


def fence_for(arrays: Sequence[object], reader: Reader) -> Fence:
    """An event where torch.neuron has them, else what the reader's thread waits for.

    ``arrays`` are what the work writes; raises BackendError where none is given and one is needed.
    """
    device = getattr(sys.modules.get("torch"), "neuron", None)
    if (event := getattr(device, "Event", None)) is not None:
        return EventFence(event())
    if (synchronize := getattr(device, "synchronize", None)) is not None:
        return reader.ask(synchronize)
    if not arrays:
        raise BackendError(
            "this torch backend has no events and no synchronize(): a fence has to read from an array that the work "
            "writes; pass one"
        )
    return reader.ask(lambda: read_one_element_of_each(arrays))


def read_one_element_of_each(arrays: Sequence[Any]) -> None:
    """Blocks until what writes the arrays has landed; one of no elements has nothing to wait for."""
    for array in arrays:
        if array.numel():
            array[(0,) * array.dim()].to("cpu")


class EventFence:
    """An event of torch.neuron, recorded on the calling thread's current stream."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def done(self) -> bool:
        """Whether the stream has passed the event; never blocks."""
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise _failed(error) from error

    def wait(self) -> None:
        """Wait until the stream has passed the event."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise _failed(error) from error


class ReadFence:
    """Passed once a call that blocks on the device has returned, on another thread."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read
        self._over = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """On the reader's thread: block, and take down what comes of it."""
        try:
            self._read()
        except Exception as error:
            self._error = error
        self._read = _nothing  # the array is not kept alive by its fence
        self._over.set()

    def done(self) -> bool:
        """Whether the call has returned; never blocks."""
        if self._over.is_set() and self._error is not None:
            raise _failed(self._error) from self._error
        return self._over.is_set()

    def wait(self) -> None:
        """Wait until the call has returned."""
        self._over.wait()
        self.done()


class Reader:
    """One thread that blocks on the device for everybody, in the order it was asked. Started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[ReadFence | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, read: Callable[[], object]) -> Fence:
        """Have the call made, which blocks until the work queued so far has landed."""
        fence = ReadFence(read)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_serve, args=(self._asked,), name="pushkv-neuron-reader", daemon=True
                )
                self._thread.start()
            self._asked.put(fence)
        return fence

    def close(self) -> None:
        """End the thread once what it has been asked is answered; asked again it is started anew."""
        with self._lock:
            if self._thread is not None:
                self._asked.put(None)
                self._asked, self._thread = queue.SimpleQueue(), None


def _serve(asked: queue.SimpleQueue[ReadFence | None]) -> None:
    while (fence := asked.get()) is not None:
        fence.run()


def _nothing() -> None:
    """What is left to do."""


def _failed(error: Exception) -> BackendError:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return BackendError(f"the Neuron device reports that work before a fence failed: {line}; restart the process")
