"""What an engine asks for, checked on its own thread and put into a message's form."""

from __future__ import annotations

import operator

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


def pack_blocks(cache: KVCache, blocks: object, first: int = 0) -> Blocks:
    """Block ids as a message holds them: one list for a cache of one group, or one a group.

    ``first`` is the logical block (in the request) of the first id. Raises GeometryError for ids out of range.
    """
    groups = cache.geometry.groups
    lists = [blocks] if len(groups) == 1 and not _nested(blocks) else list(blocks)  # type: ignore[call-overload]
    if len(lists) != len(groups):
        raise GeometryError(f"{len(lists)} block tables were given for {len(groups)} cache groups; give one a group.")
    tables = []
    for number, (ids, group) in enumerate(zip(lists, groups, strict=True)):
        array = _ids(ids)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < group.blocks):
            raise GeometryError(
                f"Group {number} is given blocks {int(array.min())} to {int(array.max())}; it has {group.blocks}."
            )
        tables.append(Table(first, array.astype("<i4").tobytes()))
    return Blocks(tuple(tables))


def _ids(ids: object) -> NDArray[np.integer]:
    try:
        array = np.asarray(ids).reshape(-1)
    except ValueError as error:
        raise GeometryError(f"Block ids {ids!r:.80} are no list of numbers ({error}); give one.") from error
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise GeometryError(f"Block ids {ids!r:.80} are no whole numbers; give a list of them.")
    return array.astype(np.int64) if array.size == 0 else array


def check_request(transfer: str, prompt: bytes, deadline: float | None) -> None:
    """What no peer would take is refused where the engine asks for it. Raises ProtocolError."""
    if not 0 < len(transfer) <= 512:
        raise ProtocolError(f"transfer id {transfer!r:.80} has {len(transfer)} characters; give 1 to 512.")
    if not transfer.isascii() and any("\ud800" <= letter <= "\udfff" for letter in transfer):
        raise ProtocolError(f"transfer id {transfer!r:.80} holds half a surrogate pair; UTF-8 cannot.")
    if len(prompt) != DIGEST_BYTES:
        raise ProtocolError(f"{transfer}'s prompt digest has {len(prompt)} bytes; make it with pushkv.prompt_digest.")
    if deadline is not None and not 0 < deadline <= LONGEST:
        raise ProtocolError(f"{transfer}'s deadline is {deadline} s; give seconds above 0, at most a day.")


def whole(what: str, value: object, least: int = 0) -> int:
    """A number (numpy's too) as messages hold it: one that they cannot is refused here. Raises ProtocolError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if not least <= number <= MOST:
        raise ProtocolError(f"{what} is {value!r:.80}; give a whole number from {least} to {MOST}.")
    return number


def _nested(blocks: object) -> bool:
    return isinstance(blocks, (list, tuple)) and bool(blocks) and not isinstance(blocks[0], (int, np.integer))
