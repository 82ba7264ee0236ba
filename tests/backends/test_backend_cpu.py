"""Host memory by numpy: whatever view is described, the bytes found by the description are the array's."""

from __future__ import annotations

import ctypes
import mmap
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from pushkv.backends.base import ArrayDescription, Verdict
from pushkv.backends.cpu import CpuBackend
from pushkv.errors import BackendError

BACKEND = CpuBackend()


def elements(told: ArrayDescription) -> list[bytes]:
    """The elements' bytes, read by nothing but the description."""
    starts = [told.address + int(np.dot(index, told.strides)) for index in np.ndindex(*told.shape)]
    return [ctypes.string_at(start, told.itemsize) for start in starts]


def assert_exact(array: np.ndarray) -> ArrayDescription:
    told = BACKEND.describe(array)
    assert (told.shape, told.itemsize) == (array.shape, array.itemsize)
    assert b"".join(elements(told)) == array.tobytes()
    assert (told.region.memory, told.region.device) == ("DRAM", 0)
    return told


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def test_an_array_that_owns_its_memory_is_its_region() -> None:
    array = np.arange(24, dtype=np.float32)
    told = assert_exact(array)
    assert (told.region.address, told.region.length, told.offset) == (array.ctypes.data, 96, 0)
    assert (told.strides, told.dtype) == ((4,), "float32")


VIEWS = {
    "slice": lambda a: a[1:, 2:, 1:3],
    "steps": lambda a: a[::2, ::3, ::2],
    "transposed": lambda a: a.transpose(2, 0, 1),
    "reversed": lambda a: a[::-1, :, ::-1],
    "new axis": lambda a: a[:, None, 1],
    "one element": lambda a: a[1, 2, 3:4],
    "scalar": lambda a: a[1, 2, 3, ...],
    "another dtype": lambda a: a.view(np.uint16),
    "a view of a view": lambda a: a[1:][:, 1:].view(np.int32)[..., ::2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_lies_in_the_region_of_its_base(view: object) -> None:
    base = numbers(4, 5, 6)
    assert callable(view)
    told = assert_exact(view(base))
    assert told.region == BACKEND.describe(base).region


@settings(deadline=None)  # busy machines are slow
@given(st.data())
def test_any_slices_of_a_cache_are_exact(data: st.DataObject) -> None:
    base = numbers(3, 4, 5)
    order = data.draw(st.permutations(range(3)))
    key = tuple(data.draw(st.slices(base.shape[axis])) for axis in order)
    told = assert_exact(base.transpose(order)[key])
    assert told.region == BACKEND.describe(base).region


def test_zero_size_arrays_are_described() -> None:
    base = numbers(4, 4)
    told = assert_exact(base[4:])
    assert told.region == BACKEND.describe(base).region
    assert told.span[0] == told.span[1]
    assert assert_exact(np.zeros((0, 3), np.float16)).region.length == 0


def test_an_as_strided_view_lies_in_the_region_of_its_base() -> None:
    base = numbers(64)
    view = as_strided(base[8:], shape=(3, 4), strides=(64, 4))
    assert assert_exact(view).region == BACKEND.describe(base).region


def test_the_region_of_an_array_over_a_buffer_is_the_buffer() -> None:
    with mmap.mmap(-1, 8192) as memory:
        array = np.frombuffer(memory, dtype=np.int64, offset=4096)
        told = assert_exact(array)
        assert (told.region.length, told.offset) == (8192, 4096)
        del array
    raw = bytearray(64)
    assert assert_exact(np.frombuffer(raw, np.uint8, count=8, offset=8)).region.length == 64


def test_the_region_of_an_array_over_shared_memory_is_all_of_it() -> None:
    memory = SharedMemory(create=True, size=4096)
    try:
        array = np.ndarray((16,), np.float32, buffer=memory.buf, offset=128)
        told = assert_exact(array)
        assert (told.region.length, told.offset) == (memory.size, 128)
        del array
    finally:
        memory.close()
        memory.unlink()


def test_an_array_over_a_foreign_address_is_its_own_region() -> None:
    store = (ctypes.c_float * 16)()
    array = np.ctypeslib.as_array(ctypes.cast(store, ctypes.POINTER(ctypes.c_float)), shape=(16,))
    told = assert_exact(array[4:])
    assert told.address == ctypes.addressof(store) + 16


def test_a_base_over_other_memory_says_nothing() -> None:
    """An object may lend another's memory and have a base of its own."""
    target, unrelated = numbers(4), numbers(8)

    class Lender:
        __array_interface__ = target.__array_interface__
        base = unrelated

    told = assert_exact(np.asarray(Lender()))
    assert told.region == BACKEND.describe(target).region


@pytest.mark.parametrize("array", [np.broadcast_to(np.zeros(2), (3, 2)), np.frombuffer(b"12345678", np.uint8)])
def test_read_only_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(BackendError, match=r"is read-only; pass one whose flags.writeable is True"):
        BACKEND.describe(array)


def test_a_locked_view_of_writable_memory_is_refused() -> None:
    view = numbers(4)[1:]
    view.flags.writeable = False
    with pytest.raises(BackendError, match="read-only"):
        BACKEND.describe(view)


def test_an_axis_that_repeats_its_bytes_is_refused() -> None:
    with pytest.raises(BackendError, match=r"axis 0 of shape \(3, 4\) repeats the same bytes"):
        BACKEND.describe(as_strided(numbers(4), shape=(3, 4), strides=(0, 4)))
    assert_exact(as_strided(numbers(4), shape=(1, 4), strides=(0, 4)))


def test_windows_that_overlap_are_refused() -> None:
    with pytest.raises(BackendError, match=r"repeats the same bytes \(it steps over 4 of 20\)"):
        BACKEND.describe(as_strided(numbers(8), shape=(5, 2), strides=(4, 4)))
    with pytest.raises(BackendError, match="repeats the same bytes"):
        BACKEND.describe(as_strided(numbers(8), shape=(2, 6), strides=(-4, 4))[::-1])
    assert_exact(as_strided(numbers(8), shape=(4, 2), strides=(8, 4)))


@pytest.mark.parametrize(
    ("dtype", "phrase"),
    [("O", "Python objects"), (">f4", "foreign byte order"), ([("k", "f4"), ("v", "f4")], "has fields")],
)
def test_a_dtype_without_plain_bytes_is_refused(dtype: object, phrase: str) -> None:
    with pytest.raises(BackendError, match=phrase):
        BACKEND.describe(np.zeros(2, dtype=dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize("array", [[1.0], b"12", 3, None, memoryview(b"12")])
def test_what_is_no_array_is_refused(array: object) -> None:
    with pytest.raises(BackendError, match="pass a numpy array or a torch tensor"):
        BACKEND.describe(array)


def test_host_memory_is_always_ready_and_its_fences_passed() -> None:
    assert [check.verdict for check in BACKEND.check()] == [Verdict.PASS]
    assert BACKEND.fence().done()
    assert BACKEND.fence(np.zeros(1)).done()
    BACKEND.prepare_thread(0)
    BACKEND.close()
    BACKEND.close()
