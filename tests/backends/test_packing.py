"""Gather and scatter: every byte where it belongs, whatever the runs, by numpy and by torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.backends.base import Packer, PassedFence
from pushkv.backends.cpu import CpuBackend
from pushkv.backends.cuda_packing import KernelPacker, likely_widths, tried
from pushkv.backends.rows import LaidRuns, Runs, rows_of
from pushkv.backends.torch_packing import TorchPacker
from pushkv.core.memory import Region
from pushkv.errors import BackendError

SIZE = 1 << 14


def runs_of(*rows: tuple[int, int, int]) -> Runs:
    """Runs of (region, offset, length)."""
    region, offset, length = np.array(rows, np.int64).reshape(-1, 3).T
    return Runs(region, offset, length)


def laid_of(places: list[tuple[int, int]], steps: list[int], across: int, width: int) -> LaidRuns:
    """Laid runs by places of (region, offset)."""
    home, place = np.array(places, np.int64).reshape(-1, 2).T
    return LaidRuns(home, place, np.array(steps, np.int64), across, width)


def memories(count: int = 2) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, 256, SIZE, np.uint8) for _ in range(count)]


def numpy_packer(arrays: list[Any]) -> tuple[Packer, Any]:
    backend = CpuBackend()
    regions = [backend.describe(array).region for array in arrays]
    return backend.packer(regions, arrays), backend.allocate(SIZE)


def torch_packer(arrays: list[Any]) -> tuple[Packer, Any]:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(array) for array in arrays]
    regions = [Region(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
    return TorchPacker(regions, tensors, PassedFence), torch.zeros(SIZE, dtype=torch.uint8)


class ListedCopies:
    """What the kernels do, for memory that numpy reaches."""

    def copy_listed(self, addresses: Any, rows: int, width: int, grid: int) -> None:
        assert not (addresses % grid).any()
        assert width % grid == 0
        for source, target in addresses.reshape(2, rows).T.tolist():
            ctypes.memmove(target, source, width)

    def copy_laid(
        self, numbers: Any, slot: int, places: int, steps: int, across: int, width: int, grid: int, *, out: bool
    ) -> None:
        assert not (numbers % grid).any()
        assert slot % grid == width % grid == 0
        for row in range(places * steps):
            part, within = divmod(row, steps * across)
            step, place = divmod(within, across)
            inside = int(numbers[part * across + place] + numbers[places + step])
            packed = slot + row * width
            ctypes.memmove(packed, inside, width) if not out else ctypes.memmove(inside, packed, width)


def kernel_packer(arrays: list[Any]) -> tuple[Packer, Any]:
    torch = pytest.importorskip("torch")
    regions = [Region(array.__array_interface__["data"][0], array.nbytes) for array in arrays]
    if os.environ.get("TRITON_INTERPRET"):  # as `make test-triton` does
        from pushkv.backends import row_kernel

        return KernelPacker(regions, arrays, PassedFence, kernels=row_kernel, upload=torch.from_numpy), torch.zeros(
            SIZE, dtype=torch.uint8
        )
    packer = KernelPacker(regions, arrays, PassedFence, kernels=ListedCopies(), upload=lambda ends: ends)
    return packer, torch.zeros(SIZE, dtype=torch.uint8)


Make = Callable[[list[Any]], tuple[Packer, Any]]
both = pytest.mark.parametrize("make", [numpy_packer, torch_packer, kernel_packer])


def packed(arrays: list[Any], runs: Runs) -> np.ndarray[Any, Any]:
    """What a slot must hold, run by run."""
    pieces = [arrays[r][o : o + n] for r, o, n in zip(runs.region, runs.offset, runs.length, strict=True)]
    return np.concatenate([np.zeros(0, np.uint8), *pieces])


def check_both_ways(make: Make, runs: Runs) -> None:
    arrays = memories()
    before = [array.copy() for array in arrays]
    packer, slot = make(arrays)
    packer.gather(runs, slot).wait()
    assert (np.asarray(slot)[: runs.bytes] == packed(arrays, runs)).all()
    assert not np.asarray(slot)[runs.bytes :].any()
    news = np.random.default_rng(9).integers(0, 256, runs.bytes, np.uint8)
    np.asarray(slot)[: runs.bytes] = news
    packer.scatter(slot, runs).wait()
    assert (packed(arrays, runs) == news).all()
    written = [np.zeros(SIZE, bool) for _ in arrays]
    for region, offset, length in zip(runs.region, runs.offset, runs.length, strict=True):
        written[region][offset : offset + length] = True
    for now, then, mask in zip(arrays, before, written, strict=True):
        assert (now[~mask] == then[~mask]).all()


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    """Runs that do not overlap: cuts of the regions, some of them, in any order."""
    unit = draw(st.sampled_from([1, 2, 4, 8, 64, 96]))
    shift = draw(st.sampled_from([0, 0, 1, 4, 8]))
    rows = []
    for region in range(2):
        cuts = sorted(draw(st.sets(st.integers(0, (SIZE // 2 - shift) // unit), max_size=12)))
        for start, stop in pairwise(cuts):
            if draw(st.booleans()):
                rows.append((region, shift + start * unit, (stop - start) * unit))
    return runs_of(*draw(st.permutations(rows)))


@both
class TestBothWays:
    @pytest.mark.parametrize(
        "runs",
        [
            runs_of(),
            runs_of((0, 0, SIZE)),
            runs_of((0, 4096, 0)),
            runs_of(*((0, row * 512, 256) for row in (3, 1, 7))),
            runs_of(*((row % 2, row * 512, 256) for row in range(20))),
            runs_of((0, 3, 64), (0, 256, 64), (1, 77, 64)),
            runs_of((0, 0, 512), (0, 2048, 1024), (1, 0, 512)),
            runs_of((0, 0, 3), (0, 100, 5), (1, 7, 3)),
            runs_of(*((0, length * 130, length) for length in range(1, 40))),
            laid_of([(0, 0), (0, 8192), (1, 0)], [512, 0, 1024], 1, 256),
            laid_of([(0, 3), (1, 5), (1, 9000), (0, 9000)], [0, 300, 77], 2, 30),
            laid_of([], [], 1, 8),
        ],
        ids=[
            "none",
            "one",
            "empty",
            "rows",
            "two regions",
            "no grid",
            "multiples",
            "two lengths",
            "many lengths",
            "laid",
            "laid across",
            "none laid",
        ],
    )
    def test_of_every_shape(self, make: Make, runs: Runs) -> None:
        check_both_ways(make, runs)

    @settings(max_examples=150, deadline=None)
    @given(runs=some_runs())
    def test_of_any_runs(self, make: Make, runs: Runs) -> None:
        check_both_ways(make, runs)

    @pytest.mark.parametrize(
        ("runs", "says"),
        [
            (runs_of((0, SIZE - 4, 8)), "outside its region"),
            (runs_of((0, -8, 8)), "outside its region"),
            (runs_of((2, 0, 8)), "outside its region"),
            (runs_of((-1, 0, 8)), "outside its region"),
            (runs_of((0, 0, SIZE), (1, 0, 8)), "do not fit into a slot"),
            (laid_of([(0, 0)], [0, SIZE - 7], 1, 8), "outside its region"),
            (laid_of([(0, 0)], [-1], 1, 8), "outside its region"),
            (laid_of([(5, 0)], [0], 1, 8), "outside its region"),
            (laid_of([(0, 0), (1, 0)], [0, SIZE // 2], 1, SIZE // 2), "do not fit into a slot"),
        ],
    )
    def test_what_does_not_fit_is_refused_and_nothing_is_copied(self, make: Make, runs: Runs, says: str) -> None:
        arrays = memories()
        before = [array.copy() for array in arrays]
        packer, slot = make(arrays)
        for act in (lambda: packer.gather(runs, slot), lambda: packer.scatter(slot, runs)):
            with pytest.raises(BackendError, match=says):
                act()
        assert not np.asarray(slot).any()
        assert all((now == then).all() for now, then in zip(arrays, before, strict=True))

    def test_a_slot_is_a_part_of_the_ring(self, make: Make) -> None:
        arrays = memories()
        packer, ring = make(arrays)
        runs = runs_of((0, 64, 128), (1, 0, 128))
        packer.gather(runs, ring[1024:2048]).wait()
        assert (np.asarray(ring)[1024:1280] == packed(arrays, runs)).all()
        assert not np.asarray(ring)[:1024].any()


class TestRows:
    def test_neighbours_that_were_merged_are_cut_again(self) -> None:
        (rows,) = rows_of(runs_of((0, 0, 1024), (0, 4096, 2048)))
        assert (rows.width, list(rows.offset), list(rows.packed)) == (1024, [0, 4096, 5120], [0, 1024, 2048])

    def test_small_odd_lengths_go_by_length(self) -> None:
        assert [rows.width for rows in rows_of(runs_of((0, 0, 3), (0, 50, 5), (0, 90, 3)))] == [3, 5]

    def test_too_many_rows_are_refused(self) -> None:
        runs = runs_of(*((0, 0, (1 << 22) + 2 * step) for step in range(40)))
        with pytest.raises(BackendError, match="at most"):
            list(rows_of(runs))


class TestSlotsOfTheBackends:
    def test_host_memory_is_what_it_describes(self) -> None:
        ring = CpuBackend().allocate(4096)
        assert CpuBackend().describe(ring).region.length == 4096

    def test_a_slot_of_anything_but_bytes_is_refused(self) -> None:
        packer, _ = numpy_packer(memories())
        with pytest.raises(BackendError, match="row of bytes"):
            packer.gather(runs_of((0, 0, 8)), np.zeros(8, np.int32))

    def test_a_region_without_a_tensor_is_refused(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(BackendError, match="no tensor"):
            TorchPacker([Region(4096, 64)], [torch.zeros(64)], PassedFence)

    def test_a_tensor_that_starts_inside_its_storage_is_found(self) -> None:
        torch = pytest.importorskip("torch")
        whole = torch.arange(256, dtype=torch.uint8)
        view = whole[64:128].view(torch.int32)
        region = Region(whole.data_ptr(), 256)
        slot = torch.zeros(16, dtype=torch.uint8)
        TorchPacker([region], [view], PassedFence).gather(runs_of((0, 8, 16)), slot)
        assert slot.tolist() == list(range(8, 24))


@pytest.mark.parametrize(
    ("shape", "axes", "widths"),
    [
        ((100, 8, 16, 256), (0, 1, 2, 3), [256, 512, 8192, 32768]),  # blocks, heads, tokens, K and V
        ((100, 16, 8, 256), (0, 2, 1, 3), [256, 512, 4096, 32768]),  # heads inside tokens
        ((2, 100, 4, 32, 128), (0, 1, 2, 3, 4), [128, 256, 8192, 32768]),  # K and V apart
        ((100, 16, 576), (0, 1, 2), [576, 1152, 18432, 32768]),  # latents
        ((4, 7), (0, 1), [14, 56, 32768]),
    ],
)
def test_kernels_are_made_for_the_rows_that_a_cache_falls_into(
    shape: tuple[int, ...], axes: tuple[int, ...], widths: list[int]
) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(shape, dtype=torch.float16).permute(axes)
    assert list(likely_widths([tensor, tensor])) == widths


def test_the_kernels_that_are_made_are_seen_to_copy() -> None:
    torch = pytest.importorskip("torch")
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("needs Triton, as `make test-triton` has it")
    from pushkv.backends import row_kernel

    upload, widths = torch.from_numpy, (14, 256, 576, 8192, 32768)
    assert tried(torch, upload, "cpu", widths) is row_kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_kernel, "copy_listed", lambda *_: None)
        with pytest.raises(BackendError, match="it copied wrong bytes"):
            tried(torch, upload, "cpu", widths)


def low_memory(length: int) -> np.ndarray[Any, Any]:
    """Bytes that are mapped far below numpy's large arrays, as those on the heap are. They are never freed."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(1 << 36, length, 3, 0x22, -1, 0)  # to read and to write; private and of no file
    made = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    made[:] = np.random.default_rng(1).integers(0, 256, length, np.uint8)
    return made


def test_wide_rows_of_arrays_that_lie_far_apart() -> None:
    """Rows of 4 MiB in mapped memory and on the heap: numpy has no array of so many elements, counted whole."""
    width = 4 << 20
    high, low = np.random.default_rng(2).integers(0, 256, width + 4096, np.uint8), low_memory(2 * width)
    backend = CpuBackend()
    regions = [backend.describe(array).region for array in (high, low)]
    assert abs(regions[0].address - regions[1].address) * width >= 1 << 63
    packer, slot = backend.packer(regions, (high, low)), backend.allocate(3 * width)
    runs = runs_of((1, width, width), (0, 7, width), (1, 0, width))
    packer.gather(runs, slot)
    pieces = [low[width:].copy(), high[7 : 7 + width].copy(), low[:width].copy()]
    assert (slot == np.concatenate(pieces)).all()
    high[:], low[:] = 0, 0
    packer.scatter(slot, runs)
    for one, there in zip(pieces, (low[width:], high[7 : 7 + width], low[:width]), strict=True):
        assert (one == there).all()
    assert not high[:7].any()
