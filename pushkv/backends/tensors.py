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
    Raises BackendError for tensors that are sparse, nested, lazily conjugated or negated, expanded, overlap
    themselves or have no address.
    """
    _refuse_what_is_not_its_bytes(tensor)
    storage_of(tensor)
    itemsize = int(tensor.element_size())
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    refuse_overlap(shape, strides, itemsize)
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
    storage = storage_of(tensor)
    address, length = int(storage.data_ptr()), int(storage.nbytes())
    if length and not address:
        raise BackendError(
            f"a tensor on {tensor.device} has {length} bytes but no address; pass a tensor whose memory is allocated"
        )
    return Region(address=address, length=length, device=device, memory=memory)


def storage_of(tensor: Any) -> Any:
    """The tensor's storage. Raises BackendError for one that has none of its own: nested, batched, functional."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BackendError(f"torch does not tell where this tensor lies ({line}); pass a plain tensor") from error


def refuse_overlap(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    """Raise BackendError when an axis repeats the same bytes: a WRITE there would have several owners.

    From the innermost axis out, each has to step over all that lies inside it, as axes of an allocation and of
    slices of it do.
    """
    if 0 in shape:  # no elements; numpy gives them strides of 0
        return
    axes = sorted(
        (abs(stride), axis) for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)) if size > 1
    )
    inside = itemsize
    for step, axis in axes:
        if step < inside:
            raise BackendError(
                f"axis {axis} of shape {shape} repeats the same bytes (it steps over {step} of {inside}); pass the "
                "array it was made from"
            )
        inside += (shape[axis] - 1) * step


def _refuse_what_is_not_its_bytes(tensor: Any) -> None:
    """Some tensors hold, at their address, something else than their values."""
    if str(tensor.layout) != "torch.strided":
        raise BackendError(f"a tensor of layout {tensor.layout} has no strides; pass a torch.strided tensor")
    if getattr(tensor, "is_nested", False):
        raise BackendError("a nested tensor has no strides; pass the tensors that it is made of")
    if tensor.is_conj() or tensor.is_neg():
        raise BackendError(
            "a lazily conjugated or negated tensor's bytes are not its values; pass its resolve_conj().resolve_neg()"
        )
