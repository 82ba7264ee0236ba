"""torch's device ``neuron``: PrivateUse1 under its name, and tensors whose bytes are host tensors."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pushkv.testing.neuron.nrt import Allocation
from pushkv.testing.neuron.operation import Operation

if TYPE_CHECKING:
    from pushkv.testing.neuron.fake import FakeNeuron


@lru_cache(maxsize=1)
def tensor_class() -> Any:
    """The class of tensors on the device; one a process."""
    import torch
    from torch.utils import _pytree as pytree

    class HbmTensor(torch.Tensor):  # type: ignore[misc]  # torch is not read by the type checker here
        """A tensor on ``neuron:<index>``: ``host`` has its bytes, ``allocation`` its device memory."""

        @staticmethod
        def __new__(cls: Any, host: Any, index: int, fake: Any, allocation: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls,
                host.size(),
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=torch.device("neuron", index),
            )

        def __init__(self, host: Any, index: int, fake: FakeNeuron, allocation: Allocation) -> None:
            self.host, self.index, self.fake, self.allocation = host, index, fake, allocation

        def __repr__(self, **_: Any) -> str:
            return f"<neuron:{self.index} {tuple(self.shape)} {self.dtype}>"

        def data_ptr(self) -> int:
            base = self.fake.address_of(self.allocation)
            return base + self.host.storage_offset() * self.host.element_size() if base else 0

        def untyped_storage(self) -> Any:
            address, length = self.fake.address_of(self.allocation), self.allocation.nbytes
            return SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: length)

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            every = [one for one in pytree.tree_leaves((args, kwargs or {})) if isinstance(one, cls)]
            return Operation(func, args, dict(kwargs or {}), every).make()

    return HbmTensor


@lru_cache(maxsize=1)
def register(module: Any) -> Any:
    """Name PrivateUse1 ``neuron``, with ``module`` as ``torch.neuron``. Once a process, for good.

    Returns the library that factories and copies are registered in; it must be kept.
    """
    import torch
    from torch.utils import backend_registration

    backend_registration._setup_privateuseone_for_python_backend("neuron", backend_module=module)
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return module.fake.wrap(torch.empty(size, dtype=dtype), device.index or 0)

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
        return module.fake.wrap(torch.empty_strided(size, stride, dtype=dtype), device.index or 0)

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        """What torch.tensor(..., device="neuron") fills its tensor by."""
        every = [one for one in (target, source) if hasattr(one, "allocation")]
        return Operation(torch.ops.aten.copy_.default, (target, source), {}, every).make()

    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    return library
