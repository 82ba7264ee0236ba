"""What an engine asks for, checked on its own thread and put into a message's form."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pushkv.cache import KVCache
from pushkv.core.messages import Blocks, Table
from pushkv.core.prompt import DIGEST_BYTES
from pushkv.errors import GeometryError, ProtocolError

LONGEST = 86400.0
"""The longest deadline, in seconds."""
MOST = 2**31 - 1
"""The largest number of tokens, blocks, siblings or attempts, as messages hold it."""


def pack_blocks(cache: KVCache, blocks: object, first: int | Sequence[int] = 0, whose: str = "a request") -> Blocks:
    """Block ids as a message holds them: one list for a cache of one group, or one a group.

    ``first`` is the logical block (in the request) of the first id, or of each group's first. Raises GeometryError
    for ids out of range, and ProtocolError for a ``first`` that cannot be.
    """
    groups = cache.geometry.groups
    lists = [blocks] if len(groups) == 1 and not _nested(blocks) else _listed(blocks)
    if len(lists) != len(groups):
        raise GeometryError(f"{len(lists)} block tables were given for {len(groups)} cache groups; give one a group.")
    firsts = tuple(first) if isinstance(first, Sequence) else (first,) * len(groups)
    if len(firsts) != len(groups):
        raise GeometryError(f"{len(firsts)} first blocks are given for {len(groups)} cache groups; give one a group.")
    tables = []
    for number, (ids, group) in enumerate(zip(lists, groups, strict=True)):
        array = _ids(ids)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < group.blocks):
            raise GeometryError(
                f"Group {number} is given blocks {int(array.min())} to {int(array.max())}; it has {group.blocks}."
            )
        start = whole(whose, "first_block", firsts[number])
        tables.append(Table(start, array.astype("<i4").tobytes()))
    return Blocks(tuple(tables))


def _ids(ids: object) -> NDArray[np.integer]:
    try:
        array = np.atleast_1d(np.asarray(ids))
    except ValueError as error:
        raise GeometryError(f"Block ids {ids!r:.80} are no list of numbers ({error}); give one.") from error
    if array.ndim > 1:
        raise GeometryError(f"Block ids of shape {array.shape} are given for one cache group; give one row of them.")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise GeometryError(f"Block ids {ids!r:.80} are no whole numbers; give a list of them.")
    return array.astype(np.int64) if array.size == 0 else array


def check_request(transfer: str, prompt: bytes, deadline: float | None) -> None:
    """What no peer would take is refused where the engine asks for it. Raises ProtocolError."""
    if not isinstance(transfer, str):
        raise ProtocolError(f"transfer id {transfer!r:.80} is no text; give 1 to 512 characters.")
    if not 0 < len(transfer) <= 512:
        raise ProtocolError(f"transfer id {transfer!r:.80} has {len(transfer)} characters; give 1 to 512.")
    if not transfer.isascii() and any("\ud800" <= letter <= "\udfff" for letter in transfer):
        raise ProtocolError(f"transfer id {transfer!r:.80} holds half a surrogate pair; UTF-8 cannot.")
    if not isinstance(prompt, bytes) or len(prompt) != DIGEST_BYTES:
        has = f"has {len(prompt)} bytes" if isinstance(prompt, bytes) else f"is {prompt!r:.40}"
        raise ProtocolError(f"{transfer}'s prompt digest {has}; make it with pushkv.prompt_digest.")
    if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline <= LONGEST):
        raise ProtocolError(f"{transfer}'s deadline is {deadline!r} s; give seconds above 0, at most a day.")


def whole(whose: str, what: str, value: object, least: int = 0) -> int:
    """A number (numpy's too) as messages hold it: one that they cannot is refused here. Raises ProtocolError."""
    if type(value) is int and least <= value <= MOST:  # as in nearly every call of an engine's step
        return value
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= MOST:
        raise ProtocolError(f"{whose}'s {what} is {value!r:.80}; give a whole number from {least} to {MOST}.")
    return number


def layer_counts(cache: KVCache, layers: int | Sequence[int], whose: str) -> tuple[int, ...]:
    """So many first layers of each cache group, as the machine has them. Raises ProtocolError."""
    groups = cache.geometry.groups
    given = tuple(layers) if isinstance(layers, Sequence) else (layers,) * len(groups)
    if len(given) != len(groups):
        raise ProtocolError(
            f"{whose}'s layers are {given!r:.80} for {len(groups)} cache groups; give one number a group."
        )
    counts = (whole(whose, "layers", count) for count in given)
    return tuple(min(count, len(group.layers)) for count, group in zip(counts, groups, strict=True))


def check_tables(blocks: Blocks, start: int, stop: int) -> None:
    """Refuse to ask for tokens without a block to put them into: nothing would come, and count as complete."""
    if start < stop and not any(table.ids for table in blocks.tables):
        raise GeometryError(f"No block is given for tokens {start} to {stop}; give those that they are to go to.")


def _listed(blocks: object) -> list[object]:
    if not isinstance(blocks, (list, tuple, np.ndarray)):
        raise GeometryError(f"Block tables {blocks!r:.80} are no list of block ids a cache group; give one.")
    return list(blocks)


def _nested(blocks: object) -> bool:
    """Whether these are tables, and not the ids of one."""
    if isinstance(blocks, np.ndarray):
        return blocks.ndim > 1
    return isinstance(blocks, (list, tuple)) and bool(blocks) and hasattr(blocks[0], "__len__")
