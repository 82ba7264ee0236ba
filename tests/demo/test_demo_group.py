"""A group of ranks: sums and gathered words are the same on all of them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pushkv.demo.group import Group, star


def on_all_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run ``work`` on a thread a rank; the pipes are those that processes get."""
    groups = [Group(rank, size, pipes) for rank, pipes in enumerate(star(multiprocessing.get_context("spawn"), size))]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_the_same_sum(size: int) -> None:
    arrays = np.random.default_rng(0).standard_normal((size, 70, 300)).astype(np.float32)
    # A transposed array is not contiguous, as a slice of a result may be.
    sums = on_all_ranks(size, lambda group: group.all_reduce(arrays[group.rank].T))
    expected = arrays[0].T.copy()
    for array in arrays[1:]:
        expected += array.T
    assert all(np.array_equal(total, expected) for total in sums)


@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_get_what_each_one_says_in_the_order_of_ranks(size: int) -> None:
    assert (
        on_all_ranks(size, lambda group: group.all_gather({"rank": group.rank}))
        == [[{"rank": rank} for rank in range(size)]] * size
    )


def test_a_rank_that_is_gone_is_an_error_for_the_others() -> None:
    (center,), (ray,) = star(multiprocessing.get_context("spawn"), 2)
    ray.close()
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(EOFError):
            Group(0, 2, [center]).all_gather("here")
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(10)
    assert failed.is_set()
