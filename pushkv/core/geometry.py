"""How a rank's KV cache lies in memory, as data.

A :class:`CacheGroup` is a strided array with named axes: L (layer), S (side: K or V), B (block), H (head),
N (token in the block) and C (content). L and S are listed place by place, because engines put them anywhere,
even into allocations of their own; B, H, N and C are byte strides that all layers of the group share. Every
order of axes, padding and packing is a matter of these numbers alone. All offsets and strides are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pushkv.core.memory import Region
from pushkv.errors import GeometryError


class Kind(Enum):
    """What a cache group holds, and so which of a request's tokens it keeps."""

    ATTENTION = "attention"
    """K and V of every token."""
    LATENT = "latent"
    """One compressed vector a token (MLA), the same on every tensor-parallel rank."""
    WINDOW = "window"
    """K and V of the last ``window`` tokens."""
    STATE = "state"
    """A recurrent state, a whole slot; the slot that holds the request's last token is the one to move."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where one side of one layer starts: byte ``offset`` in region number ``region``."""

    region: int
    offset: int


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """One layer by name, with one :class:`Place` a side: block 0, the group's first head, token 0."""

    name: str
    places: tuple[Place, ...]


class Strides(msgspec.Struct, frozen=True, array_like=True):
    """Bytes from one block, head, token and content element to the next."""

    block: int
    head: int
    token: int
    content: int


class Stripe(msgspec.Struct, frozen=True, array_like=True):
    """Which of a request's tokens a rank holds, where several share them out (context parallelism).

    The tokens are dealt out in runs of ``width``; this rank has every ``count``-th run, from number ``index`` on, and
    keeps its tokens one after the other. By default that is all of them.
    """

    index: int = 0
    count: int = 1
    width: int = 1

    @property
    def period(self) -> int:
        """After so many tokens it repeats."""
        return self.count * self.width

    def before(self, token: int) -> int:
        """How many tokens in front of ``token`` are held: its own place among them, where it is."""
        rounds, rest = divmod(token, self.period)
        return rounds * self.width + min(max(rest - self.index * self.width, 0), self.width)

    def places(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for tokens that are all held."""
        return tokens // self.period * self.width + tokens % self.width

    def holds(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these tokens are held."""
        return np.asarray(tokens // self.width % self.count == self.index)

    def __str__(self) -> str:
        return f"stripe {self.index} of {self.count}, {self.width} tokens wide"


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table and one shape.

    ``blocks`` blocks of ``block_size`` tokens; heads ``[head_start, head_stop)`` of the model's ``total_heads``;
    ``content`` elements of ``itemsize`` bytes a head and token; ``sides`` places a layer (2 where K and V are
    told apart, 1 where they are not). ``replicas`` ranks of this side hold these heads and this one is number
    ``replica``. ``window`` is in tokens, 0 unless the kind is WINDOW. A STATE group has no token axis: its
    ``block_size`` is how many tokens one slot stands for. With ``whole_blocks`` a block's tokens cannot be told
    apart, because a kernel packs them in an order of its own: blocks are copied whole, between groups of one size.
    With a ``stripe`` of several the blocks hold that stripe's tokens alone, so that logical block ``j`` is on every
    rank a part of the same ``span`` tokens. ``replicas`` counts ranks with the same heads and the same stripe.
    """

    layers: tuple[Layer, ...]
    blocks: int
    block_size: int
    total_heads: int
    head_start: int
    head_stop: int
    content: int
    itemsize: int
    dtype: str
    strides: Strides
    sides: int = 2
    kind: Kind = Kind.ATTENTION
    window: int = 0
    replica: int = 0
    replicas: int = 1
    whole_blocks: bool = False
    stripe: Stripe = Stripe()

    @property
    def span(self) -> int:
        """Of how many tokens of a request a block holds those that are this rank's."""
        return self.block_size * self.stripe.count

    @property
    def heads(self) -> int:
        """How many heads this rank holds."""
        return self.head_stop - self.head_start

    @property
    def tokens(self) -> int:
        """The size of the token axis: ``block_size``, or 1 for a state."""
        return 1 if self.kind is Kind.STATE else self.block_size

    @property
    def extent(self) -> int:
        """Bytes from the first to past the last byte of one side of one layer."""
        strides = self.strides
        return (
            (self.blocks - 1) * strides.block
            + (self.heads - 1) * strides.head
            + (self.tokens - 1) * strides.token
            + (self.content - 1) * strides.content
            + self.itemsize
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over the layers, sides and heads held here (of one slot, for a state)."""
        return len(self.layers) * self.sides * self.heads * self.content * self.itemsize


class Geometry(msgspec.Struct, frozen=True):
    """A rank's whole cache: its groups, in the order in which requests list their block tables."""

    groups: tuple[CacheGroup, ...]

    @property
    def grain(self) -> int:
        """Ranges of tokens begin, and end but at a prompt's end, at multiples of this."""
        return math.lcm(*(group.span for group in self.groups if group.whole_blocks))

    def check(self, regions: Sequence[Region] | None = None) -> None:
        """Refuse what no sane cache looks like, with GeometryError naming the group and the numbers.

        With ``regions`` every element must also lie inside the region it names. The cost is bounded by the
        number of layers that were received, never by the sizes they claim.
        """
        # Imported here because that module reads the types of this one.
        from pushkv.core.validity import check_geometry

        check_geometry(self, regions)


@dataclass(frozen=True, eq=False)
class BlockTable:
    """A request's blocks of one group: ``ids[i]`` holds logical block ``first + i``.

    Logical block ``j`` is the tokens ``[j * block_size, (j + 1) * block_size)`` of the request, where the group has
    a stripe of them: counted in that stripe's tokens. ``ids`` is one-dimensional, of integers; a list is converted.
    """

    first: int
    ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        try:
            ids: NDArray[Any] = np.asarray(self.ids)
        except ValueError as error:  # rows of several lengths
            raise GeometryError(f"A block table is {self.ids!r:.80}; give one row of integers.") from error
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise GeometryError(
                f"A block table has shape {ids.shape} and dtype {ids.dtype}; give one row of integers."
            )
        if not isinstance(self.first, (int, np.integer)) or self.first < 0:
            raise GeometryError(f"A block table starts at logical block {self.first!r:.80}; give 0 or more.")
        object.__setattr__(self, "ids", ids if ids.size else ids.astype(np.int32))

    def divided(self, ratio: int) -> BlockTable:
        """The same tokens in blocks of 1/``ratio`` the size, where a block is several of the kernel's blocks."""
        return BlockTable(self.first * ratio, np.add.outer(self.ids * ratio, np.arange(ratio)).ravel())

    def __len__(self) -> int:
        return int(self.ids.size)
