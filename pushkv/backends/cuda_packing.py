"""Gather and scatter on NVIDIA GPUs: one launch of a Triton kernel, however many tensors the rows lie in.

By torch's own operations a tensor is a launch, and each uploads its index by a copy that waits for the work before
it. Where triton cannot be used, that is how it goes (:mod:`pushkv.backends.torch_packing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from pushkv.backends.base import Fence, Packer, PassedFence
from pushkv.backends.cpu_packing import check_runs
from pushkv.backends.rows import Int64, LaidRuns, Runs, rows_of
from pushkv.backends.torch_packing import TorchPacker
from pushkv.core.memory import Region
from pushkv.errors import BackendError

log = logging.getLogger(__name__)


class Kernels(Protocol):
    """What :mod:`pushkv.backends.row_kernel` has."""

    def copy_listed(self, addresses: Any, rows: int, width: int, grid: int) -> None:
        """Copy rows from where they are to where they go."""

    def copy_laid(
        self, numbers: Any, slot: int, places: int, steps: int, across: int, width: int, grid: int, *, out: bool
    ) -> None:
        """Copy rows between places and a slot."""


WIDEST = 32 << 10
"""Rows of as many bytes, and longer ones, are copied by the same kernels: as many as a program takes at once."""
Upload = Callable[[Int64], Any]


class KernelPacker:
    """Packs rows of these regions into slots, and back, by kernels that take addresses.

    The work is queued inside ``on`` (a side stream), and ``fence`` is called there after it.
    """

    queues = True

    def __init__(
        self,
        regions: Sequence[Region],
        tensors: Sequence[Any],
        fence: Callable[[], Fence],
        on: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        kernels: Kernels,
        upload: Upload,
    ) -> None:
        """``upload`` brings addresses to the device, in the order of the stream. ``tensors`` are kept alive."""
        self._bases = np.array([region.address for region in regions], np.int64)
        self._lengths = np.array([region.length for region in regions], np.int64)
        self._tensors = tuple(tensors)
        self._fence, self._on, self._kernels, self._upload = fence, on, kernels, upload

    def gather(self, runs: Runs, slot: Any) -> Fence:
        """Queue the packing of the runs into the slot; the fence passes when it is done."""
        return self._run(runs, slot, out=False)

    def scatter(self, slot: Any, runs: Runs) -> Fence:
        """Queue the unpacking of the slot to the runs; the fence passes when it is done."""
        return self._run(runs, slot, out=True)

    def _run(self, runs: Runs, slot: Any, *, out: bool) -> Fence:
        check_runs(runs, self._lengths, int(slot.numel()))
        with self._on():
            if isinstance(runs, LaidRuns):
                self._laid(runs, int(slot.data_ptr()), out)
            else:
                self._listed(runs, int(slot.data_ptr()), out)
            return self._fence()

    def _laid(self, runs: LaidRuns, slot: int, out: bool) -> None:
        if not runs.bytes:
            return
        numbers = np.concatenate((self._bases[runs.home] + runs.place, runs.step))
        grid = int(np.gcd.reduce([int(np.gcd.reduce(numbers)), runs.width, slot]))
        places, steps = runs.place.size, runs.step.size
        self._kernels.copy_laid(self._upload(numbers), slot, places, steps, runs.across, runs.width, grid, out=out)

    def _listed(self, runs: Runs, slot: int, out: bool) -> None:
        for rows in rows_of(runs):
            inside, packed = self._bases[rows.region] + rows.offset, rows.packed + slot
            ends = np.concatenate((packed, inside) if out else (inside, packed))
            grid = int(np.gcd(np.gcd.reduce(ends), rows.width))
            self._kernels.copy_listed(self._upload(ends), len(rows), rows.width, grid)


def upload_pinned(torch: Any, device: int) -> Upload:
    """By a copy that nobody waits for, out of pinned memory that torch keeps until the copy is over."""

    def upload(ends: Int64) -> Any:
        pinned = torch.empty(ends.size, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = ends
        return pinned.to(f"cuda:{device}", non_blocking=True)

    return upload


def cuda_packer(
    torch: Any,
    regions: Sequence[Region],
    tensors: Sequence[Any],
    fence: Callable[[], Fence],
    on: Callable[[], AbstractContextManager[object]],
    device: int,
) -> Packer:
    """The kernels' packer if they run on this device, else torch's, which is said in one log line.

    Raises BackendError for a region that no tensor lies in.
    """
    by_torch = TorchPacker(regions, tensors, fence, on)
    upload = upload_pinned(torch, device)
    try:
        with on():
            kernels = tried(torch, upload, f"cuda:{device}", likely_widths(tensors))
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        log.warning(
            "Gathers and scatters on CUDA device %d go by torch's operations, a launch a tensor: Triton's kernels "
            "do not run here (%s: %s); install triton and a C compiler for them.",
            device,
            type(error).__name__,
            line,
        )
        return by_torch
    return KernelPacker(regions, tensors, fence, on, kernels=kernels, upload=upload)


def likely_widths(tensors: Sequence[Any]) -> tuple[int, ...]:
    """The lengths, ascending, of the rows that these tensors fall into: what lies together of each axis and those
    inside it, and half of the innermost, where K and V may share it."""
    widths = {WIDEST}
    for tensor in tensors:
        run = int(tensor.element_size())
        axes = sorted((int(step), int(size)) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        for place, (step, size) in enumerate((step, size) for step, size in axes if size > 1):
            if step * int(tensor.element_size()) != run:
                break
            run *= size
            widths.update({run} if place or size % 2 else {run, run // 2})
    return tuple(sorted({min(width, WIDEST) for width in widths}))


def tried(torch: Any, upload: Upload, device: Any, widths: Sequence[int]) -> Kernels:
    """The kernels, compiled for rows of these lengths and seen to copy: no transfer between equal caches waits
    for their compiler. What another layout needs besides is compiled when it is first copied, and kept on disk."""
    from pushkv.backends import row_kernel

    cache = torch.arange(WIDEST // 8, dtype=torch.int64, device=device)
    slot = torch.zeros(WIDEST, dtype=torch.uint8, device=cache.device)
    packer = KernelPacker([Region(cache.data_ptr(), WIDEST)], [cache], PassedFence, kernels=row_kernel, upload=upload)
    nought = np.zeros(1, np.int64)
    for width in widths:
        for runs in (LaidRuns(nought, nought, nought, 1, width), Runs(nought, nought, nought + width)):
            slot.zero_()
            packer.gather(runs, slot)
            packer.scatter(slot, runs)
            if not bool((slot[:width] == cache.view(torch.uint8)[:width]).all()):
                raise BackendError("it copied wrong bytes")
    return row_kernel
