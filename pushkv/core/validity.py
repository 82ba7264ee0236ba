"""Whether a geometry can be believed: sizes, strides, overlaps and bounds, at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from pushkv.core.geometry import CacheGroup, Geometry, Kind
from pushkv.core.memory import Region
from pushkv.errors import GeometryError

MAX_GROUPS = 64
MAX_LAYERS = 4096
MAX_NAME = 256
LIMIT = 1 << 46
"""No size, stride or offset in bytes goes beyond 64 TiB, so that sums of a few stay exact in 64 bits."""
MAX_COUNT = 1 << 31
"""Blocks, tokens of a block, heads and content elements are counted in 31 bits."""
MAX_STRIPES = 1 << 12
"""No request is shared out to more ranks."""
ADDRESSES = 1 << 64
"""Addresses are below this."""

Axis = tuple[int, int, str]
"""(stride in bytes, size, name)."""


def check_geometry(geometry: Geometry, regions: Sequence[Region] | None) -> None:
    """See :meth:`pushkv.core.geometry.Geometry.check`."""
    _check_types(geometry)
    if not 1 <= len(geometry.groups) <= MAX_GROUPS:
        raise GeometryError(
            f"A geometry has {len(geometry.groups)} cache groups; between 1 and {MAX_GROUPS} make sense."
        )
    if regions is not None:
        _check_regions(regions)
    layers = sum(len(group.layers) for group in geometry.groups)
    if layers > MAX_LAYERS:
        raise GeometryError(f"A geometry has {layers} layers; at most {MAX_LAYERS} are taken.")
    _check_names(geometry)
    for number, group in enumerate(geometry.groups):
        _check_sizes(f"Group {number}", group)
        _check_strides(f"Group {number}", group)
        _check_places(f"Group {number}", group, regions)
        _check_rows(f"Group {number}", group)


def _check_types(geometry: Geometry) -> None:
    """Refuse what a peer could not decode: a head count of 4.0, a layer named by a number."""
    try:
        msgspec.convert(msgspec.to_builtins(geometry), Geometry)
    except (msgspec.ValidationError, TypeError) as error:
        raise GeometryError(f"A geometry holds what cannot travel ({error}); give whole numbers and text.") from error


def _check_regions(regions: Sequence[Region]) -> None:
    """Memory as a data mover can be told of: inside 64 bits, all of it on one device."""
    if not regions:
        raise GeometryError("A cache has layers to lie somewhere and there are 0 regions; name the memory.")
    for number, region in enumerate(regions):
        if region.address < 0 or region.length < 0 or region.stop > ADDRESSES or not 0 <= region.device <= MAX_COUNT:
            raise GeometryError(
                f"Region {number} is {region.length} bytes at address {region.address} of device {region.device}; "
                "there is no such memory."
            )
    homes = {(region.memory, region.device) for region in regions}
    if len(homes) > 1:
        raise GeometryError(f"A rank's cache lies on {sorted(homes)}; an endpoint serves one device: split it.")


def _check_names(geometry: Geometry) -> None:
    seen: dict[str, int] = {}
    for number, group in enumerate(geometry.groups):
        for layer in group.layers:
            if len(layer.name) > MAX_NAME:
                raise GeometryError(f"A layer name has {len(layer.name)} characters; at most {MAX_NAME} are taken.")
            if layer.name in seen:
                raise GeometryError(
                    f"Layer {layer.name!r} is listed twice, in groups {seen[layer.name]} and {number}; name it once."
                )
            seen[layer.name] = number


def _check_sizes(where: str, group: CacheGroup) -> None:
    counts = {
        "blocks": group.blocks,
        "block_size": group.block_size,
        "content": group.content,
        "itemsize": group.itemsize,
        "total_heads": group.total_heads,
        "replicas": group.replicas,
    }
    for name, value in counts.items():
        if not 1 <= value <= MAX_COUNT:
            raise GeometryError(f"{where} has {name} {value}; it must be between 1 and {MAX_COUNT}.")
    if not 0 <= group.head_start < group.head_stop <= group.total_heads:
        raise GeometryError(
            f"{where} holds heads [{group.head_start}, {group.head_stop}) of {group.total_heads}; "
            "the range must be inside and not empty."
        )
    _check_stripe(where, group)
    if not 0 <= group.replica < group.replicas:
        raise GeometryError(f"{where} is replica {group.replica} of {group.replicas}; count from 0.")
    if group.sides not in (1, 2):
        raise GeometryError(f"{where} has {group.sides} sides; there are 2 (K and V) or 1.")
    if len(group.dtype) > MAX_NAME:
        raise GeometryError(
            f"{where} has a dtype name of {len(group.dtype)} characters; at most {MAX_NAME} are taken."
        )
    if not 0 <= group.window <= MAX_COUNT or (group.window > 0) != (group.kind is Kind.WINDOW):
        raise GeometryError(
            f"{where} is of kind {group.kind.value} with a window of {group.window} tokens; "
            "a window group needs a positive one and the others 0."
        )


def _check_stripe(where: str, group: CacheGroup) -> None:
    stripe = group.stripe
    if not 1 <= stripe.count <= MAX_STRIPES or not 0 <= stripe.index < stripe.count:
        raise GeometryError(
            f"{where} is stripe {stripe.index} of {stripe.count}; count from 0, at most {MAX_STRIPES}."
        )
    if not 1 <= stripe.width <= group.block_size or group.block_size % stripe.width:
        raise GeometryError(
            f"{where} has stripes of {stripe.width} tokens and blocks of {group.block_size}; the former must divide "
            "the latter."
        )
    if stripe.count > 1 and group.kind is Kind.STATE:
        raise GeometryError(f"{where} is {stripe} of a state, which has no tokens to share out; give each rank all.")


def block_axes(group: CacheGroup) -> list[Axis]:
    """The axes of one side of one layer that have more than one element, the finest stride first."""
    strides = group.strides
    axes = [
        (strides.block, group.blocks, "block"),
        (strides.head, group.heads, "head"),
        (strides.token, group.tokens, "token"),
        (strides.content, group.content, "content"),
    ]
    return sorted(axis for axis in axes if axis[1] > 1)


def _check_strides(where: str, group: CacheGroup) -> None:
    """Each axis must step over all that the finer ones span: then no two elements share a byte."""
    strides = group.strides
    named = {"block": strides.block, "head": strides.head, "token": strides.token, "content": strides.content}
    for name, stride in named.items():
        if not 0 <= stride <= LIMIT:
            raise GeometryError(f"{where} has a {name} stride of {stride} bytes; it must be between 0 and {LIMIT}.")
    extent = group.itemsize
    for stride, size, name in block_axes(group):
        if stride < extent:
            raise GeometryError(
                f"{where} has overlapping strides: one {name} is {stride} bytes from the next "
                f"but what lies inside spans {extent} bytes."
            )
        extent += stride * (size - 1)
    if extent > LIMIT:
        raise GeometryError(f"{where} spans {extent} bytes a layer; at most {LIMIT} are taken.")


def _check_places(where: str, group: CacheGroup, regions: Sequence[Region] | None) -> None:
    extent = group.extent
    for layer in group.layers:
        if len(layer.places) != group.sides:
            raise GeometryError(
                f"{where}, layer {layer.name!r} has {len(layer.places)} places; the group has {group.sides} sides."
            )
        for place in layer.places:
            if not 0 <= place.offset <= LIMIT or not 0 <= place.region <= MAX_COUNT:
                raise GeometryError(
                    f"{where}, layer {layer.name!r} starts at byte {place.offset} of region {place.region}; "
                    f"offsets are between 0 and {LIMIT}."
                )
            if regions is None:
                continue
            if place.region >= len(regions):
                raise GeometryError(
                    f"{where}, layer {layer.name!r} lies in region {place.region}; there are {len(regions)} regions."
                )
            length = regions[place.region].length
            if place.offset + extent > length:
                raise GeometryError(
                    f"{where}, layer {layer.name!r} spans bytes [{place.offset}, {place.offset + extent}) of region "
                    f"{place.region}, which has {length} bytes."
                )


def _check_rows(where: str, group: CacheGroup) -> None:
    """No two rows (a side of a layer) may share a byte, unless two layers share all of theirs."""
    rows: dict[int, list[tuple[int, str]]] = {}
    for places, name in {layer.places: layer.name for layer in group.layers}.items():
        for place in places:
            rows.setdefault(place.region, []).append((place.offset, name))
    axes = block_axes(group)[::-1]
    for members in rows.values():
        _check_disjoint(where, sorted(members), axes, group.itemsize)


def _check_disjoint(where: str, rows: list[tuple[int, str]], axes: list[Axis], itemsize: int) -> None:
    """Rows sorted by offset, axes coarsest first.

    Rows whose spans do not touch are apart. Those that do are apart only if they are so within one step of the
    coarsest axis, so the question repeats with their offsets modulo that step and one axis fewer.
    """
    extent = itemsize + sum(stride * (size - 1) for stride, size, _ in axes)
    for cluster in _clusters(rows, extent):
        if len(cluster) == 1:
            continue
        if not axes:
            (first, name), (second, other) = cluster[:2]
            raise GeometryError(
                f"{where}, layers {name!r} and {other!r} overlap: {second - first} bytes apart within one element "
                f"of {itemsize} bytes."
            )
        stride = axes[0][0]
        phases = sorted((offset % stride, name) for offset, name in cluster)
        inner = extent - stride * (axes[0][1] - 1)
        _check_disjoint(where, _unwound(where, phases, stride, inner), axes[1:], itemsize)


def _clusters(rows: list[tuple[int, str]], extent: int) -> list[list[tuple[int, str]]]:
    clusters = [[rows[0]]]
    for row in rows[1:]:
        if row[0] < clusters[-1][-1][0] + extent:
            clusters[-1].append(row)
        else:
            clusters.append([row])
    return clusters


def _unwound(where: str, phases: list[tuple[int, str]], stride: int, inner: int) -> list[tuple[int, str]]:
    """Phases on a circle of ``stride`` bytes, cut where the gap is widest, so that neighbours stay neighbours."""
    gaps = [after[0] - before[0] for before, after in pairwise(phases)]
    gaps.append(phases[0][0] + stride - phases[-1][0])
    if max(gaps) < inner:
        raise GeometryError(
            f"{where}, layers {phases[0][1]!r} and {phases[-1][1]!r} overlap, or interleave across steps of {stride} "
            f"bytes: the widest gap they leave in a step is {max(gaps)} bytes, and what a step holds spans {inner}."
        )
    cut = (gaps.index(max(gaps)) + 1) % len(phases)
    return phases[cut:] + [(offset + stride, name) for offset, name in phases[:cut]]
