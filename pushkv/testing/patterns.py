"""What test memory holds, so that every byte in the wrong place shows.

Bytes 0 to 250 are KV, 251 to 254 fill blocks that nobody has in custody (another one each time a block is given
back), and 255 fills blocks that wait for KV.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
KV_VALUES = 251
HOLE = 255
_CANARIES = 4


def canary(generation: int) -> int:
    """What fills a block that has been given back for the ``generation``-th time."""
    return KV_VALUES + generation % _CANARIES


class Prompts:
    """The KV of made-up prompts: ``shape`` are the bytes of one token, of at most ``tokens`` tokens a prompt."""

    def __init__(self, shape: tuple[int, ...], tokens: int, pool: int = 1 << 20) -> None:
        self._shape = (tokens, *shape)
        self._size = int(np.prod(self._shape))
        self._pool = np.random.default_rng(7).integers(0, KV_VALUES, pool, np.uint8)

    def kv(self, prompt: int) -> Bytes:
        """The KV of a prompt: tokens, then the shape of one."""
        start = prompt * 7919 % (len(self._pool) - self._size)
        return self._pool[start : start + self._size].reshape(self._shape)
