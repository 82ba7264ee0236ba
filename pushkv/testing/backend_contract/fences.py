"""The contract's part on fences: bytes that land late must not be sent early."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from pushkv.backends.base import ArrayDescription, Fence, MemoryBackend
from pushkv.testing.backend_contract.subject import BackendSubject

SHAPE = (32, 1024)
WAIT_S = 30.0


class FenceContract(BackendSubject):
    """What a fence promises, whatever the device offers for it."""

    def test_a_fence_passes_with_the_bytes_and_no_sooner(self, backend: MemoryBackend) -> None:
        array, told = self._array(backend)
        for generation in range(1, 9):
            self.write_late(array, np.full(SHAPE, generation, np.uint8))
            fence = backend.fence(array)
            end = time.monotonic() + WAIT_S
            while not self._passed_with(fence, told, generation):
                assert time.monotonic() < end, f"a fence did not pass in {WAIT_S} s"
            assert fence.done(), "a fence that has passed is not passed any more"

    def test_waiting_for_a_fence_returns_with_the_bytes(self, backend: MemoryBackend) -> None:
        array, told = self._array(backend)
        for generation in range(1, 9):
            self.write_late(array, np.full(SHAPE, generation, np.uint8))
            fence = backend.fence(array)
            fence.wait()
            assert self._lands(told) == {generation}
            assert fence.done()
            fence.wait()

    def test_a_fence_may_be_asked_on_another_thread(self, backend: MemoryBackend) -> None:
        array, told = self._array(backend)
        self.write_late(array, np.full(SHAPE, 7, np.uint8))
        fence = backend.fence(array)
        seen: list[object] = []

        def ask() -> None:
            try:
                fence.wait()
                seen.append((fence.done(), self._lands(told)))
            except BaseException as error:
                seen.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert seen == [(True, {7})]

    def test_later_work_leaves_an_earlier_fence_as_good(self, backend: MemoryBackend) -> None:
        array, told = self._array(backend)
        other, beside = self._array(backend)
        self.write_late(array, np.full(SHAPE, 1, np.uint8))
        first = backend.fence(array)
        self.write_late(other, np.full(SHAPE, 2, np.uint8))
        second = backend.fence(other)
        first.wait()
        assert self._lands(told) == {1}
        second.wait()
        assert (self._lands(told), self._lands(beside)) == ({1}, {2})

    def test_a_fence_without_an_array_is_behind_all_work_of_the_thread(self, backend: MemoryBackend) -> None:
        array, told = self._array(backend)
        self.write_late(array, np.full(SHAPE, 5, np.uint8))
        fence = backend.fence()
        fence.wait()
        assert self._lands(told) == {5}

    def test_a_fence_behind_nothing_passes(self, backend: MemoryBackend) -> None:
        array, _ = self._array(backend)
        self.read(array)
        fence = backend.fence(array)
        fence.wait()
        assert fence.done()

    def _array(self, backend: MemoryBackend) -> tuple[Any, ArrayDescription]:
        array = self.make_array(SHAPE)
        assert not self.read(array).any()
        return array, backend.describe(array)

    def _lands(self, told: ArrayDescription) -> set[int]:
        """The values of all bytes that a NIC would send now."""
        return set(self.peek(told.address, SHAPE[0] * SHAPE[1], told.region.device))

    def _passed_with(self, fence: Fence, told: ArrayDescription, generation: int) -> bool:
        done = fence.done()
        seen = self._lands(told)
        assert not done or seen == {generation}, f"the fence had passed and the bytes were still {seen}"
        return done
