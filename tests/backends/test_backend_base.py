"""Descriptions as data, and what every backend shares."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pushkv.backends.base import (
    ArrayDescription,
    Check,
    PassedFence,
    Verdict,
    device_type_of,
    element_span,
    is_tensor,
    share_regions,
)
from pushkv.core.memory import Region
from pushkv.errors import BackendError


def description(region: Region, offset: int = 0) -> ArrayDescription:
    return ArrayDescription(region, offset, (2,), (4,), 4, "float32")


def test_a_description_tells_its_address_and_span() -> None:
    told = ArrayDescription(Region(1000, 100), 16, (3, 2), (24, 8), 8, "int64")
    assert told.address == 1016
    assert told.span == (16, 16 + 2 * 24 + 8 + 8)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (3,), (5,)), (-1, (1,), (4,)), (9, (1,), (4,)), (4, (3,), (-4,)), (16, (0,), (4,))],
)
def test_elements_outside_their_region_are_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(BackendError, match="of a region of 12; pass an array"):
        ArrayDescription(Region(0, 12), offset, shape, strides, 4, "float32")


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(0, 4), st.integers(-40, 40)), max_size=4),
    st.sampled_from([1, 2, 4, 8]),
)
def test_the_span_is_that_of_every_element(offset: int, axes: list[tuple[int, int]], itemsize: int) -> None:
    shape, strides = [size for size, _ in axes], [stride for _, stride in axes]
    first = [offset + int(np.dot(index, strides)) for index in np.ndindex(*shape)]
    expected = (min(first), max(first) + itemsize) if first else (offset, offset)
    assert element_span(offset, shape, strides, itemsize) == expected


def test_arrays_of_one_storage_share_a_region() -> None:
    one, two = Region(0, 64), Region(64, 64)
    regions, indices = share_regions([description(one), description(two), description(one, 8)])
    assert regions == (one, two)
    assert indices == (0, 1, 0)


def test_a_passed_fence_is_done() -> None:
    assert PassedFence().done()
    PassedFence().wait()


def test_a_check_reads_as_a_sentence() -> None:
    assert str(Check("a", Verdict.PASS, "found")) == "found"
    assert str(Check("a", Verdict.FAIL, "missing", "install it")) == "missing; install it"


def test_nothing_is_a_tensor_while_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not is_tensor(object())
    assert device_type_of(np.zeros(1)) == "cpu"
    with pytest.raises(BackendError, match="a bytes cannot be described"):
        device_type_of(b"")
