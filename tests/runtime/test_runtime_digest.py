"""The digest of stretches of memory, a little at a time."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.backends.cpu import CpuBackend
from pushkv.core.memory import Region
from pushkv.core.runs import Runs
from pushkv.errors import BackendError
from pushkv.runtime import digest
from pushkv.runtime.digest import CHUNK, Digest, Reader


def reader(*arrays: np.ndarray) -> Reader:
    """What reads these arrays back, a region each."""
    regions = tuple(Region(array.ctypes.data, array.nbytes) for array in arrays)
    cache = SimpleNamespace(backend=CpuBackend(), regions=regions, arrays=arrays)
    return Reader(cache)  # type: ignore[arg-type]


def stretches(*rows: tuple[int, int, int]) -> Runs:
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    return Runs(*columns)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 96, 1000]), st.integers(500, 20_000))
def test_it_is_the_crc_of_the_bytes_in_their_order(seed: int, grain: int, chunk: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 256, 40_000, dtype=np.uint8) for _ in range(3)]
    rows = []
    for _ in range(int(rng.integers(1, 20))):
        length = grain * int(rng.integers(1, 1 + 8000 // grain))
        rows.append((int(rng.integers(0, 3)), int(rng.integers(0, 40_000 - length)), length))
    taken = Digest(reader(*arrays), stretches(*rows))
    expected = zlib.crc32(b"".join(arrays[region][start : start + size].tobytes() for region, start, size in rows))
    before, digest.CHUNK = digest.CHUNK, chunk
    try:
        assert taken.work(60.0)
    finally:
        digest.CHUNK = before
    assert taken.value == expected.to_bytes(4, "big")
    assert taken.bytes == sum(size for _, _, size in rows)


def test_it_goes_on_for_as_long_as_it_may_and_for_a_chunk_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.arange(4 * CHUNK, dtype=np.uint32).view(np.uint8)[: 4 * CHUNK]
    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    taken = Digest(reader(memory), stretches((0, 0, memory.size)))
    assert not taken.work(0.0)
    assert taken.value == zlib.crc32(memory[:CHUNK]).to_bytes(4, "big")
    assert not taken.work(2.0)
    assert taken.value == zlib.crc32(memory[: 3 * CHUNK]).to_bytes(4, "big")
    assert taken.work(2.0)
    assert taken.value == zlib.crc32(memory).to_bytes(4, "big")
    assert taken.work(0.0)


def test_any_bit_changes_it() -> None:
    memory = np.zeros(1000, np.uint8)

    def value() -> bytes:
        taken = Digest(reader(memory), stretches((0, 500, 100), (0, 0, 100)))
        assert taken.work(60.0)
        return taken.value

    values = {value()}
    for byte in (500, 599, 0, 99):
        for bit in range(8):
            memory[byte] ^= 1 << bit
            values.add(value())
            memory[byte] ^= 1 << bit
    assert len(values) == 33
    memory[100:500] = 7
    assert value() in values, "what lies between is not looked at"


def test_no_bytes_are_done_at_once() -> None:
    none = np.zeros(0, np.int64)
    taken = Digest(reader(np.zeros(8, np.uint8)), Runs(none, none, none))
    assert taken.done
    assert taken.value == bytes(4)


def test_memory_outside_a_region_is_not_read() -> None:
    memory = np.zeros(100, np.uint8)
    with pytest.raises(BackendError, match="a run lies outside its region"):
        Digest(reader(memory), stretches((0, 90, 11))).work(1.0)
