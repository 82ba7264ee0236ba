"""The contract: description, registration, refusals, fences, checks and listing."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pushkv.backends.base import ArrayDescription, DataPath, MemoryBackend, Verdict, device_type_of
from pushkv.errors import BackendError
from pushkv.plugins import registry
from pushkv.testing.backend_contract.fences import FenceContract
from pushkv.testing.backend_contract.packing import PackingContract

BASE = (4, 5, 6)

VIEWS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda a: a,
    "slice": lambda a: a[1:, 2:, 1:3],
    "steps": lambda a: a[::2, ::3, ::2],
    "select": lambda a: a[1],
    "one element": lambda a: a[3, 4, 5:],
    "new axis": lambda a: a[:, None, 1],
    "reshaped": lambda a: a.reshape(20, 6)[3:7],
}


class BackendContract(FenceContract, PackingContract):
    """What every memory backend does, whatever the device. See :class:`BackendSubject` for what to implement."""

    @pytest.fixture
    def backend(self) -> Iterator[MemoryBackend]:
        """A fresh backend, closed afterwards."""
        backend = self.make_backend()
        yield backend
        backend.close()

    # Description

    @pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
    @pytest.mark.parametrize("view", VIEWS)
    def test_a_view_is_described_where_its_elements_lie(self, backend: MemoryBackend, view: str, dtype: str) -> None:
        array, values = self._numbered(dtype)
        told = backend.describe(VIEWS[view](array))
        wanted = VIEWS[view](values)
        assert (told.shape, told.itemsize, told.dtype) == (wanted.shape, wanted.itemsize, dtype)
        np.testing.assert_array_equal(self._elements(told, dtype), wanted)

    def test_a_permuted_view_is_described_where_its_elements_lie(self, backend: MemoryBackend) -> None:
        array, values = self._numbered("float32")
        told = backend.describe(self.permuted(array, 2, 0, 1)[1:, ::2])
        np.testing.assert_array_equal(self._elements(told, "float32"), values.transpose(2, 0, 1)[1:, ::2])

    def test_bytes_that_land_where_it_says_show_in_the_array(self, backend: MemoryBackend) -> None:
        array, values = self._numbered("uint8")
        self.read(array)
        view = array[2, 1:4]
        told = backend.describe(view)
        payload = bytes(range(200, 200 + values[2, 1:4].size))
        self.poke(told.address, payload, told.region.device)
        values[2, 1:4] = np.frombuffer(payload, np.uint8).reshape(3, 6)
        np.testing.assert_array_equal(self.read(array), values)

    def test_layers_of_one_storage_share_a_region(self, backend: MemoryBackend) -> None:
        raw = self.make_array((4096,))
        layers = [self.reinterpreted(raw[at : at + 1024], "float32").reshape(2, 8, 16) for at in (0, 1024, 3072)]
        told = [backend.describe(layer) for layer in layers]
        assert {one.region for one in told} == {backend.describe(raw).region}
        assert [one.offset for one in told] == [0, 1024, 3072]

    def test_two_allocations_are_two_regions(self, backend: MemoryBackend) -> None:
        regions = [backend.describe(array).region for array in [self.make_array((4096,)) for _ in range(4)]]
        regions.sort(key=lambda region: region.address)
        for one, following in itertools.pairwise(regions):
            assert one.stop <= following.address

    def test_describing_again_says_the_same(self, backend: MemoryBackend) -> None:
        array = self.make_array(BASE, "float32")
        assert backend.describe(array[1:]) == backend.describe(array[1:])
        assert self.make_backend().describe(array) == backend.describe(array)

    # Zero size

    def test_an_empty_view_lies_in_its_storage(self, backend: MemoryBackend) -> None:
        array = self.make_array((4, 4), "float32")
        told = backend.describe(array[4:])
        assert told.shape == (0, 4)
        assert told.region == backend.describe(array).region
        assert 0 <= told.offset <= told.region.length

    def test_an_empty_array_has_nothing_to_register(self, backend: MemoryBackend) -> None:
        told = backend.describe(self.make_array((0, 3), "float32"))
        assert (told.shape, told.itemsize) == ((0, 3), 4)
        assert told.region.length == 0 or self.allocation(self.make_array((0, 3)))[1] > 0

    # Registration

    def test_the_region_is_the_allocation_and_no_byte_more(self, backend: MemoryBackend) -> None:
        for length in (1, 100, 4096, 4097, 70_000):
            array = self.make_array((length,))
            region = backend.describe(array[length // 2 :]).region
            assert (region.address, region.length) == self.allocation(array)

    def test_the_region_is_what_a_data_mover_registers(self, backend: MemoryBackend) -> None:
        region = backend.describe(self.make_array((100,))).region
        assert region.memory in ("DRAM", "VRAM")
        assert {type(value) for value in (region.address, region.length, region.device)} == {int}
        assert region.address > 0
        assert region.device >= 0

    def test_an_odd_offset_is_kept(self, backend: MemoryBackend) -> None:
        array = self.make_array((300,))
        self.write(array, np.arange(300) % 251)
        told = backend.describe(array[37:40])
        assert told.offset == 37
        self.read(array)
        assert self.peek(told.address, 3, told.region.device) == bytes([37, 38, 39])

    def test_elements_keep_their_alignment(self, backend: MemoryBackend) -> None:
        told = backend.describe(self.make_array(BASE, "int64")[1:, 2])
        assert told.address % told.itemsize == 0
        assert all(stride % told.itemsize == 0 for stride in told.strides)

    # Refusals

    def test_bytes_that_have_several_owners_are_refused(self, backend: MemoryBackend) -> None:
        with pytest.raises(BackendError, match="repeats the same bytes"):
            backend.describe(self.repeated(self.make_array((3, 1)), (3, 4)))
        with pytest.raises(BackendError, match="repeats the same bytes"):
            backend.describe(self.overlapping(self.make_array((64,), "float32"), 8))

    @pytest.mark.parametrize("wrong", [None, 7, "cache", [1, 2], b"bytes", object()])
    def test_what_is_no_array_is_refused(self, backend: MemoryBackend, wrong: object) -> None:
        with pytest.raises(BackendError):
            backend.describe(wrong)

    def test_an_array_of_another_device_is_refused_and_sent_to_its_owner(self, backend: MemoryBackend) -> None:
        foreign = self.foreign()
        if foreign is None:
            pytest.skip("there is no array of another device to be had here")
        with pytest.raises(BackendError, match=r"backend_for") as caught:
            backend.describe(foreign)
        assert device_type_of(foreign) in str(caught.value)

    # Checks, threads, closing

    def test_the_checks_pass_here(self, backend: MemoryBackend) -> None:
        checks = backend.check()
        assert checks
        assert [str(check) for check in checks if check.verdict is Verdict.FAIL] == []

    @pytest.mark.parametrize("mover", ["UCX", "LIBFABRIC", "one that is not made yet"])
    def test_checks_that_do_not_pass_say_what_to_do(self, backend: MemoryBackend, mover: str) -> None:
        region = backend.describe(self.make_array((100,))).region
        paths = [DataPath(mover), DataPath(mover, (region,), same_machine=True)]
        every = [backend.check(probe=False), backend.check()]
        every += [backend.check_path(path, probe=probe) for path in paths for probe in (False, True)]
        for checks in every:
            assert isinstance(checks, tuple)
            assert all(check.name and check.found for check in checks)
            assert [check.name for check in checks if check.verdict is not Verdict.PASS and not check.remedy] == []

    def test_a_thread_is_prepared_for_the_arrays_device(self, backend: MemoryBackend) -> None:
        region = backend.describe(self.make_array((100,))).region
        raised: list[BaseException] = []

        def prepare() -> None:
            try:
                backend.prepare_thread(region.device)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=prepare, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert not raised

    def test_closing_twice_is_closing_once(self) -> None:
        backend = self.make_backend()
        backend.fence(self.make_array((100,))).wait()
        backend.close()
        backend.close()

    # Listing

    def test_it_is_listed_under_its_name(self, backend: MemoryBackend) -> None:
        records = {entry.name: entry.record for entry in registry().entries}
        assert backend.name in records
        record = records[backend.name]
        assert record is not None
        assert record.device_types == backend.device_types
        module, _, name = record.load.partition(":")
        assert isinstance(backend, getattr(sys.modules[module], name))

    def test_its_arrays_are_routed_to_it(self, backend: MemoryBackend) -> None:
        known = registry()
        known.use(backend)
        try:
            assert known.for_array(self.make_array((10,))) is backend
        finally:
            known.close()

    def test_listing_it_imports_no_device_library(self, backend: MemoryBackend) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _LISTING, backend.name, *self.libraries],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == []

    def _numbered(self, dtype: str) -> tuple[Any, NDArray[Any]]:
        """An array of the device, and a numpy one, that hold 1, 2, 3, …"""
        values = np.arange(1, 121).astype(dtype).reshape(BASE)
        array = self.make_array(BASE, dtype)
        self.write(array, values)
        self.read(array)
        return array, values.copy()

    def _elements(self, told: ArrayDescription, dtype: str) -> NDArray[Any]:
        """The elements that the description names, read as a NIC reads them."""
        held = self.peek(told.region.address, told.region.length, told.region.device)
        shown: NDArray[Any] = np.ndarray(told.shape, np.dtype(dtype), held, told.offset, told.strides)
        return shown


_LISTING = """
import json, sys
from pushkv.plugins import registry
name, *libraries = sys.argv[1:]
known = registry()
(entry,) = [entry for entry in known.entries if entry.name == name]
known.status(entry, probe=False)
print(json.dumps(sorted(set(libraries) & set(sys.modules))))
"""
