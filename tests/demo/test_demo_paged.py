"""The paged cache and its block pool."""

from __future__ import annotations

import numpy as np
import pytest

from pushkv.demo.paged import AXES, BlockPool, OutOfBlocks, PagedCache, blocks_for
from pushkv.errors import ConfigError


def cache(**settings):
    return PagedCache(**({"layers": 3, "heads": 2, "head_dim": 4, "blocks": 7, "block_size": 5} | settings))


@pytest.mark.parametrize("order", ["LSBHNC", "LSBNHC", "BLSHNC", "CNHBSL"])
def test_the_view_is_the_same_memory_in_the_order_of_the_axes(order):
    made = cache(order=order)
    sizes = dict(zip(AXES, (3, 2, 7, 2, 5, 4), strict=True))
    assert made.array.shape == tuple(sizes[axis] for axis in order)
    assert made.view.shape == tuple(sizes.values())
    assert made.array.flags.c_contiguous
    made.view[2, 1, 6, 0, 4, 3] = 9
    assert made.array.sum() == 9


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_written_is_read_back_by_head(dtype):
    made = cache(dtype=dtype)
    table = np.array([4, 0, 6], np.int32)
    keys, values = np.random.default_rng(0).integers(-9, 9, (2, 8, 2, 4)).astype(np.float32)
    blocks, offsets = made.slots(table, 3, 11)
    made.write(1, blocks, offsets, keys, values)
    found = made.read(1, table)
    assert found.shape == (2, 2, 15, 4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0, :, 3:11], keys.transpose(1, 0, 2))
    np.testing.assert_array_equal(found[1, :, 3:11], values.transpose(1, 0, 2))
    assert np.count_nonzero(made.view) == np.count_nonzero(keys) + np.count_nonzero(values)


def test_several_tables_are_read_at_once():
    made = cache()
    made.array[...] = np.arange(made.array.size).reshape(made.array.shape)
    tables = np.array([[1, 2], [6, 0]], np.int32)
    found = made.read(2, tables)
    assert found.shape == (2, 2, 2, 10, 4)
    for row in range(2):
        np.testing.assert_array_equal(found[:, :, row], made.read(2, tables[row]))


def test_sizes_in_bytes():
    made = cache(dtype=np.float16)
    assert made.token_bytes == 3 * 2 * 2 * 4 * 2
    assert made.block_bytes * made.blocks == made.array.nbytes


def test_own_memory_is_used():
    array = np.zeros((3, 2, 7, 2, 5, 4), np.float32)
    assert cache(array=array).array is array
    with pytest.raises(ConfigError, match="needs an array of"):
        cache(array=array, dtype=np.float16)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"order": "LSBHN"}, "axis order 'LSBHN'"),
        ({"order": "LLBHNC"}, "axis order 'LLBHNC'"),
        ({"blocks": 0}, r"\{'B': 0\} are below 1"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' is not supported"),
    ],
)
def test_bad_settings_are_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        cache(**setting)


def test_tokens_past_the_table_are_refused():
    with pytest.raises(OutOfBlocks, match="token 10 has no block: the table holds 2 blocks of 5"):
        cache().slots(np.array([1, 2], np.int32), 8, 11)


def test_blocks_for_rounds_up():
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_the_pool_hands_out_from_the_front_and_takes_back_in_reverse():
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    assert (first.tolist(), second.tolist(), first.dtype) == ([0, 1, 2], [3, 4], np.int32)
    assert pool.free_count == 1
    pool.free(first)
    pool.free(second.tolist())
    assert pool.free_count == 6
    assert pool.allocate(6).tolist() == [5, 2, 1, 0, 4, 3]


def test_a_seed_shuffles_the_pool_alike_each_time():
    one, two = BlockPool(50, seed=3).allocate(50), BlockPool(50, seed=3).allocate(50)
    assert one.tolist() == two.tolist() != list(range(50))
    assert sorted(one.tolist()) == list(range(50))


def test_an_exhausted_pool_says_so_and_stays_as_it_was():
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 free"):
        pool.allocate(2)
    assert pool.allocate(1).tolist() == [3]
    assert pool.allocate(0).tolist() == []


@pytest.mark.parametrize("ids", [[0], [4], [-1], [3, 3], [1, 0]])
def test_freeing_what_is_not_taken_is_refused(ids):
    pool = BlockPool(4)
    taken = pool.allocate(4)
    pool.free(taken[:1])
    with pytest.raises(ConfigError, match="free already"):
        pool.free(ids)
    assert pool.free_count == 1
