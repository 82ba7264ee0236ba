"""Gather and scatter with torch, alike for every device: rows of a 2-D view of a region's storage, by index.

Nothing here imports torch: whoever holds a tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pushkv.backends.base import Fence
from pushkv.backends.cpu_packing import check_runs
from pushkv.backends.rows import Int64, Rows, Runs, cut_to_grid, rows_of
from pushkv.backends.tensors import storage_region
from pushkv.core.memory import Region
from pushkv.errors import BackendError


class TorchPacker:
    """Packs rows of these regions into slots, and back, by ``index_select`` and ``index_copy_``.

    The work is queued inside ``on`` (a side stream), and ``fence`` is called there after it. A region's rows are one
    launch, so a cache of one tensor for all layers takes one, and a tensor a layer one a layer.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        tensors: Sequence[Any],
        fence: Callable[[], Fence],
        on: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``tensors`` are any that lie in the regions. Raises BackendError for a region that none lies in."""
        self._flat = [_flat_of(region, tensors) for region in regions]
        self._lengths = np.array([region.length for region in regions], np.int64)
        self._fence, self._on = fence, on

    def gather(self, runs: Runs, slot: Any) -> Fence:
        """Queue the packing of the runs into the slot; the fence passes when it is done."""
        check_runs(runs, self._lengths, int(slot.numel()))
        with self._on():
            for flat, rows in self._by_region(runs):
                (source, chosen), (target, places) = _views(flat, slot, rows)
                if places is None and chosen is not None:
                    _torch().index_select(source, 0, chosen, out=target)
                    continue
                packed = source if chosen is None else source.index_select(0, chosen)
                target.copy_(packed) if places is None else target.index_copy_(0, places, packed)
            return self._fence()

    def scatter(self, slot: Any, runs: Runs) -> Fence:
        """Queue the unpacking of the slot to the runs; the fence passes when it is done."""
        check_runs(runs, self._lengths, int(slot.numel()))
        with self._on():
            for flat, rows in self._by_region(runs):
                (target, chosen), (source, places) = _views(flat, slot, rows)
                packed = source if places is None else source.index_select(0, places)
                target.copy_(packed) if chosen is None else target.index_copy_(0, chosen, packed)
            return self._fence()

    def _by_region(self, runs: Runs) -> Iterator[tuple[Any, Rows]]:
        for rows in rows_of(runs):
            for number in np.unique(rows.region):
                here = rows.region == number
                mine = Rows(rows.width, rows.region[here], rows.offset[here], rows.packed[here])
                yield self._flat[number], cut_to_grid(mine)


def _torch() -> Any:
    return sys.modules["torch"]


def _flat_of(region: Region, tensors: Sequence[Any]) -> Any:
    """The region as a tensor of bytes, over the storage of one that lies in it."""
    for tensor in tensors:
        whole = storage_region(tensor, device=region.device, memory=region.memory)
        if whole.address == region.address and whole.length == region.length:
            size = int(tensor.element_size())
            if region.length % size == 0:
                return tensor.detach().as_strided((region.length // size,), (1,), 0).view(_torch().uint8)
            flat = tensor.new_empty(0, dtype=_torch().uint8)
            return flat.set_(tensor.untyped_storage(), 0, (region.length,), (1,))
    raise BackendError(f"no tensor of the cache lies in {region}; describe the cache with the tensors it is made of")


def _views(flat: Any, slot: Any, rows: Rows) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Region and slot as rows of one type of element, each with which rows are meant, None for all in order."""
    kind, size = _element(rows.width, int(rows.offset.min()), int(rows.packed.min()))
    return _view(flat, rows.offset, rows.width, kind, size), _view(slot, rows.packed, rows.width, kind, size)


def _view(flat: Any, at: Int64, width: int, kind: Any, size: int) -> tuple[Any, Any]:
    start = int(at.min())
    index = (at - start) // width
    count = int(index.max()) + 1
    view = flat[start : start + count * width].view(kind).view(count, width // size)
    if count == index.size and bool((np.diff(index) == 1).all()):
        return view, None
    return view, _torch().from_numpy(index).to(flat.device)


def _element(*multiples: int) -> tuple[Any, int]:
    """The widest type that steps evenly over all of these, and its bytes."""
    torch, grid = _torch(), int(np.gcd.reduce(multiples))
    kinds = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2))
    return next((pair for pair in kinds if grid % pair[1] == 0), (torch.uint8, 1))
