"""A paged KV cache in host memory, and the pool that hands out its blocks.

The cache is one numpy array whose axes stand in a chosen order. Nothing that is computed from it
depends on that order, on the block size or on which blocks a request was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pushkv.errors import ConfigError, PushKVError

AXES = "LSBHNC"
"""Layer, K or V, block, head, token in block, content."""

BlockIds = NDArray[np.int32]
Float = NDArray[np.float32]


class OutOfBlocks(PushKVError):
    """The pool has fewer free blocks than were asked for."""


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-tokens // block_size)


class PagedCache:
    """KV of one rank: ``array`` in the axis order ``order``, ``view`` the same memory as LSBHNC.

    ``layers``, ``heads`` (KV heads of this rank) and ``head_dim`` say what a token holds; ``blocks``
    blocks of ``block_size`` tokens are there. ``order`` is any order of the letters of :data:`AXES`
    ("LSBHNC" is HND, "LSBNHC" NHD, "BLSHNC" block-outer). ``array`` may bring its own memory, of the
    right shape and dtype; otherwise zeros are allocated. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        blocks: int,
        block_size: int = 16,
        order: str = AXES,
        dtype: DTypeLike = np.float32,
        array: NDArray[np.floating] | None = None,
    ) -> None:
        sizes = {"L": layers, "S": 2, "B": blocks, "H": heads, "N": block_size, "C": head_dim}
        shape = _physical_shape(sizes, order)
        self.order = order
        self.layers, self.heads, self.head_dim = layers, heads, head_dim
        self.blocks, self.block_size = blocks, block_size
        self.dtype = _checked_dtype(dtype)
        self.array = np.zeros(shape, self.dtype) if array is None else _checked_array(array, shape, self.dtype)
        self.view = self.array.transpose([order.index(axis) for axis in AXES])
        # Whole rows of N x C stay together under this view, so gathering costs one copy a head and block.
        self._by_head = self.view.transpose(0, 1, 3, 2, 4, 5)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, K and V."""
        return self.layers * 2 * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.token_bytes * self.block_size

    def slots(self, table: BlockIds, start: int, stop: int) -> tuple[BlockIds, NDArray[np.int64]]:
        """Where the tokens ``[start, stop)`` of a request live: block ids and offsets in the block."""
        if stop > len(table) * self.block_size:
            raise OutOfBlocks(
                f"token {stop - 1} has no block: the table holds {len(table)} blocks of {self.block_size} tokens; "
                "allocate blocks for all tokens first"
            )
        positions = np.arange(start, stop)
        return table[positions // self.block_size], positions % self.block_size

    def write(self, layer: int, blocks: BlockIds, offsets: NDArray[np.int64], keys: Float, values: Float) -> None:
        """Store one layer's keys and values, each (tokens, heads, head_dim), into the given slots."""
        self.view[layer, 0][blocks, :, offsets] = keys
        self.view[layer, 1][blocks, :, offsets] = values

    def read(self, layer: int, tables: BlockIds) -> Float:
        """One layer's KV of whole blocks, float32, C-contiguous.

        ``tables`` of shape (..., blocks) gives (2, heads, ..., blocks * block_size, head_dim).
        """
        gathered = self._by_head[layer][:, :, tables]
        shape = (2, self.heads, *tables.shape[:-1], tables.shape[-1] * self.block_size, self.head_dim)
        return np.ascontiguousarray(gathered, dtype=np.float32).reshape(shape)


class BlockPool:
    """Free blocks of a cache, handed out from the front of a queue.

    A request's blocks go back in reverse, as vLLM frees them, so that after a while no table is in
    order. ``seed`` shuffles the queue at the start, to stand for a pool that has run for long.
    """

    def __init__(self, blocks: int, *, seed: int | None = None) -> None:
        order = np.arange(blocks) if seed is None else np.random.default_rng(seed).permutation(blocks)
        # A dict is an ordered set: oldest first, and freeing twice is seen at once.
        self._free: dict[int, None] = dict.fromkeys(order.tolist())
        self.blocks = blocks

    @property
    def free_count(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def allocate(self, count: int) -> BlockIds:
        """Take ``count`` blocks; raises OutOfBlocks and takes none when there are too few."""
        if not 0 <= count <= len(self._free):
            raise OutOfBlocks(
                f"{count} blocks asked for, {len(self._free)} of {self.blocks} free; free some or grow the cache"
            )
        ids = [block for block, _ in zip(self._free, range(count), strict=False)]
        for block in ids:
            del self._free[block]
        return np.array(ids, dtype=np.int32)

    def free(self, ids: BlockIds | Sequence[int]) -> None:
        """Give blocks back. Raises ConfigError for one that is free already or was never there."""
        blocks = [int(block) for block in ids]
        wrong = [b for b in blocks if b in self._free or not 0 <= b < self.blocks]
        if wrong or len(set(blocks)) < len(blocks):
            raise ConfigError(f"blocks {wrong or blocks} are free already, named twice or unknown; free a block once")
        self._free.update(dict.fromkeys(reversed(blocks)))


def _physical_shape(sizes: dict[str, int], order: str) -> tuple[int, ...]:
    if sorted(order) != sorted(AXES):
        raise ConfigError(f"axis order {order!r} is not an order of the letters {AXES}; use for example 'LSBHNC'")
    small = {axis: size for axis, size in sizes.items() if size < 1}
    if small:
        raise ConfigError(f"cache sizes {small} are below 1; every axis needs at least one element")
    return tuple(sizes[axis] for axis in order)


def _checked_dtype(dtype: DTypeLike) -> np.dtype[np.floating]:
    for supported in (np.dtype(np.float32), np.dtype(np.float16)):
        if dtype in (supported, supported.name, supported.type):
            return supported
    raise ConfigError(f"cache dtype {dtype!r} is not supported; use float32 or float16")


def _checked_array(
    array: NDArray[np.floating], shape: tuple[int, ...], dtype: np.dtype[np.floating]
) -> NDArray[np.floating]:
    if array.shape != shape or array.dtype != dtype:
        raise ConfigError(
            f"the cache needs an array of {shape} {dtype}, got {array.shape} {array.dtype}; reshape it first"
        )
    return array
