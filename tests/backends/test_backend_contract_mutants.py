"""The contract catches backends with one fault each, and passes a sound one on a device that is late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.backends.base import ArrayDescription, Check, DataPath, Fence, MemoryBackend, PassedFence, Verdict
from pushkv.backends.cpu import CpuBackend
from pushkv.backends.cpu_packing import CpuPacker
from pushkv.backends.rows import Runs
from pushkv.core.memory import Region
from pushkv.errors import BackendError
from pushkv.testing.backend_contract.packing import runs_of
from pushkv.testing.contracts.cpu import TestCpuNumpy as CpuNumpy


class Queue:
    """Work of a device that does one thing each time it is asked how far it is."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._landed = 0

    def __len__(self) -> int:
        return len(self._work)

    def append(self, work: Callable[[], None]) -> None:
        self._work.append(work)

    def has_landed(self, count: int) -> bool:
        passed = self._landed >= count
        if not passed:
            self._work[self._landed]()
            self._landed += 1
        return passed


class QueueFence:
    """Passes once what was in the queue when it was made has landed."""

    def __init__(self, queue: Queue, behind: int) -> None:
        self._queue = queue
        self._behind = behind

    def done(self) -> bool:
        return self._queue.has_landed(self._behind)

    def wait(self) -> None:
        while not self.done():
            pass


class LateBackend(CpuBackend):
    """The cpu backend of a device that works behind the caller's back."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def fence(self, array: object | None = None) -> Fence:
        return QueueFence(self.queue, len(self.queue))


class LateHost(CpuNumpy):
    """numpy arrays whose bytes land when somebody asks a fence, or reads."""

    kind: type[LateBackend] = LateBackend

    @cached_property
    def queue(self) -> Queue:
        return Queue()

    def make_backend(self) -> MemoryBackend:
        return self.kind(self.queue)

    def write(self, array: Any, values: NDArray[Any]) -> None:
        self.queue.append(lambda: array.__setitem__(Ellipsis, values))

    def read(self, array: Any) -> NDArray[Any]:
        QueueFence(self.queue, len(self.queue)).wait()
        return np.array(array)


class TestLateHost(LateHost):
    """The contract as a whole on a device that is late."""


class SendsEarly(LateBackend):
    def fence(self, array: object | None = None) -> Fence:
        return PassedFence()


class OneShort(LateBackend):
    """A fence in front of the last thing queued instead of behind it."""

    def fence(self, array: object | None = None) -> Fence:
        return QueueFence(self.queue, max(0, len(self.queue) - 1))


class WidensToPages(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        told = super().describe(array)
        first = told.region.address // 4096 * 4096
        wide = replace(told, region=Region(first, (told.region.stop - first + 4095) // 4096 * 4096))
        return replace(wide, offset=told.address - first)


class DescribesACopy(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        self.kept = np.array(array) if isinstance(array, np.ndarray) else array
        return super().describe(self.kept)


class ForgetsStrides(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        told = super().describe(array)
        strides = tuple(told.itemsize * int(np.prod(told.shape[axis + 1 :])) for axis in range(len(told.shape)))
        return replace(told, strides=strides)


class RegistersTheView(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        told = super().describe(array)
        first, stop = told.span
        return replace(told, region=Region(told.region.address + first, stop - first), offset=told.offset - first)


class TakesRepeatedBytes(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        try:
            return super().describe(array)
        except BackendError:
            if not isinstance(array, np.ndarray):
                raise
            return super().describe(array[:, :1])


class TakesWindows(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        try:
            return super().describe(array)
        except BackendError:
            if not isinstance(array, np.ndarray) or 0 in array.strides:
                raise
            return super().describe(array[:1])


class TakesAnything(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        return super().describe(np.zeros(1) if array is None or not hasattr(array, "shape") else array)


class TakesForeignArrays(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        try:
            return super().describe(array)
        except BackendError:
            return super().describe(np.zeros(16))


class RoundsOffsets(LateBackend):
    def describe(self, array: object) -> ArrayDescription:
        told = super().describe(array)
        return replace(told, offset=told.offset // 8 * 8)


class FailsWithoutARemedy(LateBackend):
    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        return (Check("luck", Verdict.FAIL, "no luck today"),)


class CannotBeUsedHere(LateBackend):
    def check(self, *, probe: bool = True) -> tuple[Check, ...]:
        return (Check("luck", Verdict.FAIL, "no luck today", "come back tomorrow"),)


class CannotPrepareAThread(LateBackend):
    def prepare_thread(self, device: int = 0) -> None:
        raise BackendError(f"device {device} is not there")


class ClosesOnce(LateBackend):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class CallsItselfSomethingElse(LateBackend):
    name = "cqu"


MUTANTS: dict[type[LateBackend], str] = {
    SendsEarly: "a_fence_passes_with_the_bytes_and_no_sooner",
    OneShort: "waiting_for_a_fence_returns_with_the_bytes",
    WidensToPages: "the_region_is_the_allocation_and_no_byte_more",
    DescribesACopy: "bytes_that_land_where_it_says_show_in_the_array",
    ForgetsStrides: "a_permuted_view_is_described_where_its_elements_lie",
    RegistersTheView: "layers_of_one_storage_share_a_region",
    TakesRepeatedBytes: "bytes_that_have_several_owners_are_refused",
    TakesWindows: "bytes_that_have_several_owners_are_refused",
    TakesForeignArrays: "an_array_of_another_device_is_refused_and_sent_to_its_owner",
    RoundsOffsets: "an_odd_offset_is_kept",
    CannotBeUsedHere: "the_checks_pass_here",
    CannotPrepareAThread: "a_thread_is_prepared_for_the_arrays_device",
    CallsItselfSomethingElse: "it_is_listed_under_its_name",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_fault_is_caught(mutant: type[LateBackend]) -> None:
    check = f"test_{MUTANTS[mutant]}"
    assert_caught(mutant, lambda subject: getattr(subject, check)(subject.make_backend()))


def test_what_is_no_array_must_be_refused() -> None:
    assert_caught(TakesAnything, lambda one: one.test_what_is_no_array_is_refused(one.make_backend(), None))


def test_a_failed_check_must_say_what_to_do() -> None:
    assert_caught(
        FailsWithoutARemedy, lambda one: one.test_checks_that_do_not_pass_say_what_to_do(one.make_backend(), "UCX")
    )


def test_closing_twice_must_be_possible() -> None:
    assert_caught(ClosesOnce, lambda subject: subject.test_closing_twice_is_closing_once())


class ForgetsTheSlot(LateBackend):
    def to_host(self, slot: Any) -> NDArray[np.uint8]:
        return np.zeros(len(slot), np.uint8)


def test_other_bytes_than_a_slots_are_caught() -> None:
    assert_caught(
        ForgetsTheSlot,
        lambda one: one.test_what_was_gathered_can_be_had_on_the_host(one.make_backend(), "several lengths"),
    )


def assert_caught(mutant: type[LateBackend], check: Callable[[LateHost], object]) -> None:
    """The check passes for the sound backend and fails for the mutant."""
    for kind, caught in ((LateBackend, False), (mutant, True)):
        subject = LateHost()
        subject.kind = kind
        assert _fails(check, subject) is caught


def _fails(check: Callable[[LateHost], object], subject: LateHost) -> bool:
    try:
        check(subject)
    except (AssertionError, pytest.fail.Exception):
        return True
    return False


class Overlooks(CpuPacker):
    """Copies one byte less than it should."""

    def gather(self, runs: Runs, slot: object) -> Fence:
        return super().gather(Runs(runs.region, runs.offset, np.maximum(runs.length - 1, 0)), slot)


class SpillsOver(CpuPacker):
    """Copies one byte more than it should."""

    def scatter(self, slot: object, runs: Runs) -> Fence:
        return super().scatter(slot, Runs(runs.region, runs.offset, runs.length + 1))


class Trusts(CpuPacker):
    """Takes runs that do not fit."""

    def gather(self, runs: Runs, slot: object) -> Fence:
        return PassedFence()


PACKERS = {
    Overlooks: lambda one: one.test_gather_packs_the_runs_one_after_the_other(one.make_backend(), "odd"),
    SpillsOver: lambda one: one.test_scatter_unpacks_them_and_touches_nothing_else(one.make_backend(), "one"),
    Trusts: lambda one: one.test_runs_that_do_not_fit_are_refused_and_nothing_is_copied(
        one.make_backend(), runs_of([(0, -1, 4)])
    ),
}  # fmt: skip


@pytest.mark.parametrize("packer", PACKERS, ids=lambda packer: packer.__name__)
def test_a_faulty_packer_is_caught(packer: type[CpuPacker]) -> None:
    class Packs(LateBackend):
        def packer(self, regions: Sequence[Region], arrays: Sequence[object]) -> CpuPacker:
            return packer(regions, arrays)

    assert_caught(Packs, PACKERS[packer])
