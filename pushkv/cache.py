"""A rank's KV cache as an endpoint takes it: its memory, its geometry, and what must be equal on the other side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pushkv.backends.answers import asked, blamed
from pushkv.backends.base import ArrayDescription, Fence, MemoryBackend
from pushkv.core.compat import Factors, Value, compatibility
from pushkv.core.geometry import CacheGroup, Geometry, Kind
from pushkv.core.layouts import Array, Packing, Shard, group_of_layers, group_of_tensor, place_array
from pushkv.core.memory import Region
from pushkv.errors import BackendError, GeometryError, PushKVError
from pushkv.plugins import backend_for


@dataclass(frozen=True)
class KVCache:
    """A described cache. ``arrays`` are kept alive as long as it is.

    Make one with :meth:`of` (one array, or one a layer), or from geometries of your own making.
    """

    geometry: Geometry
    regions: tuple[Region, ...]
    factors: Factors
    backend: MemoryBackend
    arrays: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.geometry.check(self.regions)

    @property
    def home(self) -> tuple[str, int]:
        """NIXL's memory type and the device ordinal."""
        return self.regions[0].memory, self.regions[0].device

    @classmethod
    def of(
        cls,
        array: object | Mapping[str, object],
        axes: str,
        *,
        layers: Sequence[str] = (),
        heads: int | None = None,
        shard: Shard | None = None,
        packing: Packing = Packing.SINGLE,
        kind: Kind = Kind.ATTENTION,
        window: int = 0,
        whole_blocks: bool = False,
        **factors: Value,
    ) -> KVCache:
        """Describe a numpy array or torch tensor with all layers (named by ``layers``), or a mapping of one a layer.

        ``axes`` names each dimension: L layer, S side (K or V), B block, H head, N token in block, C content. Without
        ``shard`` this rank holds all heads, ``heads`` of them where no axis tells. ``whole_blocks`` says that a
        kernel packs a block's tokens in an order of its own. ``factors`` are what else must be equal on the other
        side (``model="..."``). Raises GeometryError and BackendError.
        """
        if isinstance(layers, str) or (layers and isinstance(array, Mapping)):
            raise GeometryError(f"layers is {layers!r:.80}; give a list of names, or none with a mapping of arrays.")
        arrays = tuple(array.values()) if isinstance(array, Mapping) else (array,)
        backend, regions, placed = _place(arrays)
        share = shard or _all_heads(placed[0], axes, heads)
        if isinstance(array, Mapping):
            named = dict(zip(array, placed, strict=True))
            group = group_of_layers(
                named, axes, share, packing=packing, kind=kind, window=window, whole_blocks=whole_blocks
            )
        else:
            names = tuple(layers) or _numbered(placed[0], axes)
            group = group_of_tensor(
                names, placed[0], axes, share, packing=packing, kind=kind, window=window, whole_blocks=whole_blocks
            )
        return cls.from_groups((group,), regions, backend, arrays, **factors)

    @classmethod
    def from_groups(
        cls,
        groups: Iterable[CacheGroup],
        regions: Iterable[Region],
        backend: MemoryBackend,
        arrays: Iterable[object] = (),
        **factors: Value,
    ) -> KVCache:
        """A cache of several groups that were described one by one (:mod:`pushkv.core.layouts`)."""
        geometry = Geometry(tuple(groups))
        return cls(geometry, tuple(regions), compatibility(geometry, **factors), backend, tuple(arrays))


def fence_of(cache: KVCache) -> Fence:
    """The backend's fence behind the work that the calling thread has queued so far. Raises BackendError."""
    try:  # as asked() does, which would be three calls more on the engine's thread for each prompt of a step
        return cache.backend.fence(cache.arrays[0] if cache.arrays else None)
    except (KeyboardInterrupt, PushKVError):
        raise
    except BaseException as error:
        raise blamed(cache.backend, "cannot make a fence", error) from error


def _place(arrays: Sequence[object]) -> tuple[MemoryBackend, list[Region], list[Array]]:
    if not arrays:
        raise GeometryError("There is no array to describe; give at least one.")
    backend = backend_for(arrays[0])
    regions: list[Region] = []
    placed = [place_array(_described(backend, array), regions) for array in arrays]
    if empty := [one.shape for one in placed if 0 in one.shape]:
        raise GeometryError(f"An array of shape {empty[0]} holds nothing; give each axis a size of 1 or more.")
    return backend, regions, placed


def _described(backend: MemoryBackend, array: object) -> ArrayDescription:
    """Raises BackendError, also for what a backend of somebody's plug-in does instead of describing."""
    told = asked(backend, "failed to describe an array", lambda: backend.describe(array))
    if not isinstance(told, ArrayDescription):
        raise BackendError(
            f"memory backend {backend.name!r} describes an array as {told!r:.80}, which is no ArrayDescription; "
            "report it to its author"
        )
    return told


def _all_heads(array: Array, axes: str, heads: int | None) -> Shard:
    count = heads if heads is not None else (array.shape[axes.index("H")] if "H" in axes else 1)
    return Shard(0, count, count)


def _numbered(array: Array, axes: str) -> tuple[str, ...]:
    return tuple(f"layer.{number}" for number in range(array.shape[axes.index("L")] if "L" in axes else 1))
