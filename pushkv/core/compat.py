"""Whether two engines' caches mean the same: named factors, their digest, and where they differ."""

from __future__ import annotations

import hashlib
import json

import msgspec

from pushkv.core.geometry import CacheGroup, Geometry
from pushkv.errors import GeometryError

Value = str | int | float | bool | None
"""What a model factor may be."""


class Factors(msgspec.Struct, frozen=True):
    """Named factors, sorted by name. Two ranks may exchange KV only if all of theirs are equal."""

    items: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, equal exactly for equal factors, in every process and version."""
        return hashlib.sha256(json.dumps(self.items, ensure_ascii=True).encode()).hexdigest()


def group_factors(group: CacheGroup, number: int) -> dict[str, str]:
    """What the two sides of one group must agree on; neither where it lies nor how it is sharded."""
    prefix = f"group {number} "
    whole = {prefix + "tokens of whole blocks": str(group.block_size)} if group.whole_blocks else {}
    return whole | {
        prefix + "kind": group.kind.value,
        prefix + "dtype": group.dtype,
        prefix + "element bytes": str(group.itemsize),
        prefix + "content elements": str(group.content),
        prefix + "sides": str(group.sides),
        prefix + "heads of the model": str(group.total_heads),
        prefix + "window": str(group.window),
    }


def compatibility(geometry: Geometry, **model_factors: Value) -> Factors:
    """The factors of one engine: those of its cache groups, and whatever else must be equal.

    Equal on every rank of an engine: neither the layers and heads of a rank, nor the layout count, nor the block size
    unless blocks are copied whole.
    ``model_factors`` are the caller's (model, revision, packing, …); floats and None are written as JSON has them.
    """
    factors = {"cache groups": str(len(geometry.groups))}
    for number, group in enumerate(geometry.groups):
        factors.update(group_factors(group, number))
    for name, value in model_factors.items():
        if name in factors or not isinstance(value, (str, int, float, type(None))):
            raise GeometryError(
                f"The factor {name!r} is {value!r:.40}; give text or a number under a name of its own."
            )
        factors[name] = value if isinstance(value, str) else json.dumps(value)
    return Factors(tuple(sorted(factors.items())))


def differences(a: Factors, b: Factors) -> list[str]:
    """One line a factor that differs, with its name and both values; empty where the two are compatible."""
    ours, theirs = dict(a.items), dict(b.items)
    return [
        f"{name}: {ours.get(name, 'not given')!r} against {theirs.get(name, 'not given')!r}"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
