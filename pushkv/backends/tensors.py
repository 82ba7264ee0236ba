"""Describing a torch tensor, alike for every device that torch gives addresses of.

Nothing here imports torch: whoever holds a tensor has imported it.
"""

from __future__ import annotations

from typing import Any

from pushkv.backends.base import ArrayDescription
from pushkv.core.memory import MemoryType, Region
from pushkv.errors import BackendError


def describe_tensor(tensor: Any, *, device: int, memory: MemoryType) -> ArrayDescription:
    """Describe a strided tensor through its storage, on device ordinal ``device``.

    The offset comes from the tensor's own storage offset: ``data_ptr()`` of an empty view is 0.
    Raises BackendError for sparse, lazily conjugated or negated, expanded and addressless tensors.
    """
    _refuse_what_is_not_its_bytes(tensor)
    itemsize = int(tensor.element_size())
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    refuse_overlap(shape, strides)
    return ArrayDescription(
        region=storage_region(tensor, device=device, memory=memory),
        offset=int(tensor.storage_offset()) * itemsize,
        shape=shape,
        strides=strides,
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def storage_region(tensor: Any, *, device: int, memory: MemoryType) -> Region:
    """The tensor's whole storage. Raises BackendError when torch gives it no address."""
    storage = tensor.untyped_storage()
    address, length = int(storage.data_ptr()), int(storage.nbytes())
    if length and not address:
        raise BackendError(
            f"a tensor on {tensor.device} has {length} bytes but no address; pass a tensor whose memory is allocated"
        )
    return Region(address=address, length=length, device=device, memory=memory)


def refuse_overlap(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Raise BackendError when an axis repeats the same bytes: a WRITE there would have several owners."""
    if 0 in shape:  # no elements; numpy gives them strides of 0
        return
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride == 0:
            raise BackendError(
                f"axis {axis} of shape {shape} repeats the same bytes (stride 0); pass the array it was expanded from"
            )


def _refuse_what_is_not_its_bytes(tensor: Any) -> None:
    """Some tensors hold, at their address, something else than their values."""
    if str(tensor.layout) != "torch.strided":
        raise BackendError(f"a tensor of layout {tensor.layout} has no strides; pass a torch.strided tensor")
    if tensor.is_conj() or tensor.is_neg():
        raise BackendError(
            "a lazily conjugated or negated tensor's bytes are not its values; pass its resolve_conj().resolve_neg()"
        )
