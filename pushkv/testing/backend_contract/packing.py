"""The contract's part on gather and scatter: what landing needs of a backend. One that has neither is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.backends.base import MemoryBackend, Packer
from pushkv.backends.rows import LaidRuns, Runs
from pushkv.core.memory import Region
from pushkv.errors import BackendError
from pushkv.testing.backend_contract.subject import BackendSubject

SIZE = 1 << 16
SLOT = 1 << 15
Bytes = NDArray[np.uint8]


@dataclass
class Bench:
    """Two arrays, a slot, and what packs between them."""

    arrays: list[Any]
    values: list[Bytes]
    slot: Any
    packer: Packer
    regions: list[Region]
    slot_region: Region


def runs_of(rows: Sequence[tuple[int, int, int]]) -> Runs:
    """Runs by rows of (region, offset, length)."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return Runs(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())


def laid(places: Sequence[tuple[int, int]], steps: Sequence[int], across: int, width: int) -> LaidRuns:
    """Laid runs by places of (region, offset)."""
    table = np.array(places, np.int64).reshape(-1, 2)
    return LaidRuns(table[:, 0].copy(), table[:, 1].copy(), np.array(steps, np.int64), across, width)


def rows_in(runs: Runs) -> list[tuple[int, int, int]]:
    """The runs as rows of (region, offset, length)."""
    return list(zip(runs.region.tolist(), runs.offset.tolist(), runs.length.tolist(), strict=True))


RUNS: dict[str, Runs] = {
    "one": runs_of([(0, 4096, 2048)]),
    "equal, scattered": runs_of([(n % 2, (n * 7 % 31) * 2048, 512) for n in range(31)]),
    "several lengths": runs_of([(0, 0, 64), (0, 1024, 192), (1, 64, 128), (1, 8192, 4096)]),
    "odd": runs_of([(0, 3, 7), (1, 101, 1), (0, 4097, 333)]),
    "none": runs_of([]),
    "with empty ones": runs_of([(0, 128, 64), (1, 0, 0), (0, 1024, 64)]),
    "laid, a place after the other": laid([(0, 0), (0, 16384), (1, 512)], [1024, 0, 4096, 2048], 1, 512),
    "laid, two places a step": laid([(0, 0), (1, 64), (1, 8192), (0, 8192)], [0, 300, 5000], 2, 60),
    "laid, odd": laid([(0, 5), (1, 40000)], [7, 1007], 2, 333),
    "laid, none": laid([], [], 1, 8),
}


class PackingContract(BackendSubject):
    """What a packer promises."""

    def make_bench(self, backend: MemoryBackend) -> Bench:
        """Skips where the backend has no slots to land in."""
        arrays = [self.make_array((SIZE,)) for _ in range(2)]
        regions = [backend.describe(array).region for array in arrays]
        try:
            slot = backend.allocate(SLOT, regions[0].device)
        except BackendError as error:
            pytest.skip(str(error))
        packer = backend.packer(regions, arrays)
        values = [np.random.default_rng(seed).integers(1, 256, SIZE, np.uint8) for seed in (1, 2)]
        for array, held in zip(arrays, values, strict=True):
            self.write(array, held)
            self.read(array)
        return Bench(arrays, values, slot, packer, regions, backend.describe(slot).region)

    def test_slots_are_memory_to_register(self, backend: MemoryBackend) -> None:
        bench = self.make_bench(backend)
        region = bench.slot_region
        assert (region.memory, region.device) == (bench.regions[0].memory, bench.regions[0].device)
        assert region.length >= SLOT
        assert region.address > 0

    @pytest.mark.parametrize("name", RUNS)
    def test_gather_packs_the_runs_one_after_the_other(self, backend: MemoryBackend, name: str) -> None:
        bench, rows = self.make_bench(backend), rows_in(RUNS[name])
        bench.packer.gather(RUNS[name], bench.slot).wait()
        wanted = b"".join(bench.values[region][at : at + length].tobytes() for region, at, length in rows)
        assert self._slot_bytes(bench, len(wanted)) == wanted

    @pytest.mark.parametrize("name", RUNS)
    def test_what_was_gathered_can_be_had_on_the_host(self, backend: MemoryBackend, name: str) -> None:
        bench, rows = self.make_bench(backend), rows_in(RUNS[name])
        bench.packer.gather(RUNS[name], bench.slot).wait()
        wanted = b"".join(bench.values[region][at : at + length].tobytes() for region, at, length in rows)
        assert backend.to_host(bench.slot[: len(wanted)]).tobytes() == wanted

    @pytest.mark.parametrize("name", RUNS)
    def test_scatter_unpacks_them_and_touches_nothing_else(self, backend: MemoryBackend, name: str) -> None:
        bench, rows = self.make_bench(backend), rows_in(RUNS[name])
        packed = np.random.default_rng(3).integers(1, 256, SLOT, np.uint8)
        self.poke(bench.slot_region.address, packed.tobytes(), bench.slot_region.device)
        bench.packer.scatter(bench.slot, RUNS[name]).wait()
        taken = 0
        for region, at, length in rows:
            bench.values[region][at : at + length] = packed[taken : taken + length]
            taken += length
        for array, values in zip(bench.arrays, bench.values, strict=True):
            np.testing.assert_array_equal(self.read(array), values)

    def test_a_gathers_fence_passes_with_the_bytes_in_the_slot(self, backend: MemoryBackend) -> None:
        bench = self.make_bench(backend)
        for at in range(0, 8192, 1024):
            fence = bench.packer.gather(runs_of(((0, at, 1024),)), bench.slot)
            while not fence.done():
                pass
            assert self._slot_bytes(bench, 1024) == bench.values[0][at : at + 1024].tobytes()

    @pytest.mark.parametrize(
        "runs",
        [
            runs_of([(0, SIZE - 10, 11)]),
            runs_of([(0, -1, 4)]),
            runs_of([(2, 0, 4)]),
            runs_of([(0, 0, SLOT), (1, 0, 1)]),
            laid([(0, 0)], [SIZE // 2, SIZE - 10], 1, 11),
            laid([(0, 0)], [-1], 1, 4),
            laid([(2, 0)], [0], 1, 4),
            laid([(0, 0), (1, 0)], [0, SLOT // 2], 1, SLOT // 2),
        ],
        ids=[
            f"{way}{what}"
            for way in ("", "laid, ")
            for what in ("past the region", "before the region", "no such region", "more than the slot")
        ],
    )
    def test_runs_that_do_not_fit_are_refused_and_nothing_is_copied(self, backend: MemoryBackend, runs: Runs) -> None:
        bench = self.make_bench(backend)
        with pytest.raises(BackendError):
            bench.packer.gather(runs, bench.slot)
        with pytest.raises(BackendError):
            bench.packer.scatter(bench.slot, runs)
        for array, values in zip(bench.arrays, bench.values, strict=True):
            np.testing.assert_array_equal(self.read(array), values)

    def test_memory_that_no_array_lies_in_is_refused(self, backend: MemoryBackend) -> None:
        bench = self.make_bench(backend)
        if bench.regions[0].memory == "DRAM":
            pytest.skip("host memory is taken by address")
        region = bench.regions[0]
        elsewhere = Region(region.address, region.length - 1, region.device, region.memory)
        with pytest.raises(BackendError):
            backend.packer([elsewhere], bench.arrays)

    def _slot_bytes(self, bench: Bench, length: int) -> bytes:
        return self.peek(bench.slot_region.address, length, bench.slot_region.device)
