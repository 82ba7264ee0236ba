"""Whether the ranks of a producer engine together write all that a consumer rank holds, and each element once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pushkv.core.common import common_period, edges_of
from pushkv.core.geometry import CacheGroup, Place
from pushkv.core.pieces import Int64
from pushkv.core.template import GroupPair, PairTemplate, Range
from pushkv.errors import GeometryMismatch

Writer = tuple[Range, GroupPair]
"""The heads that a producer rank writes of a layer, and the pair that tells which tokens."""


def uncovered(templates: Sequence[PairTemplate]) -> list[str]:
    """What the consumer rank holds and not exactly one of these producer ranks writes, a line a layer; empty is good.

    ``templates`` pair every producer rank with one consumer rank.
    """
    lines = []
    for number, group in enumerate(templates[0].target.groups if templates else ()):
        pairs = [template.pairs[number] for template in templates]
        writers = _writers(group, pairs)
        try:
            tokens = _tokens(group, pairs)
        except GeometryMismatch as error:
            lines.append(f"group {number}: {error}")
            continue
        for layer in group.layers:
            if not _once(group, writers[layer.places], tokens):
                told = sorted(_told(heads, pair) for heads, pair in writers[layer.places])
                held = _told((group.head_start, group.head_stop), None if group.stripe.count == 1 else group)
                lines.append(
                    f"group {number}, layer {layer.name!r}: heads {held} are held, "
                    f"{', '.join(told) or 'none'} would be written"
                )
    return lines


def _told(heads: Range, holder: GroupPair | CacheGroup | None) -> str:
    group = holder.source if isinstance(holder, GroupPair) else holder
    striped = group is not None and group.stripe.count > 1
    return f"[{heads[0]}, {heads[1]})" + (f" of {group.stripe}" if group is not None and striped else "")


def _writers(group: CacheGroup, pairs: list[GroupPair]) -> dict[tuple[Place, ...], list[Writer]]:
    """Who writes what of each layer; of layers that share a place, those of one are all."""
    held = {layer.name: layer.places for layer in group.layers}
    writers: dict[tuple[Place, ...], list[Writer]] = {places: [] for places in held.values()}
    for pair in pairs:
        if pair.heads:
            start = max(pair.source.head_start, group.head_start)
            for name in pair.layers:
                writers[held[name]].append(((start, start + pair.heads), pair))
    return writers


def _tokens(group: CacheGroup, pairs: list[GroupPair]) -> Int64:
    """A token of each stretch that ranks hold alike, for as many tokens as it takes until all repeat."""
    stripes = (group.stripe, *(pair.source.stripe for pair in pairs))
    return edges_of(stripes, common_period(stripes))


def _once(group: CacheGroup, writers: list[Writer], tokens: Int64) -> bool:
    """Whether each head of each token is written once, and no others are."""
    edges = np.unique([edge for heads, _ in writers for edge in heads] + [group.head_start, group.head_stop])
    times: NDArray[np.int64] = np.zeros((edges.size - 1, tokens.size), np.int64)
    for (start, stop), pair in writers:
        times[np.searchsorted(edges, start) : np.searchsorted(edges, stop)] += pair.source.stripe.holds(tokens)
    held = group.stripe.holds(tokens)
    return bool((times[:, held] == 1).all())
