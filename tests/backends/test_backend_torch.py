"""Host memory by torch. The continuous integration installs torch, so nothing here is skipped there."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from pushkv.backends.base import ArrayDescription
from pushkv.backends.cpu import CpuBackend
from pushkv.backends.cuda import CudaBackend
from pushkv.errors import BackendError, UnclaimedDevice
from pushkv.plugins import backend_for

torch = pytest.importorskip("torch", reason="these tests describe torch tensors; the extra pushkv[torch] has it")

BACKEND = CpuBackend()


def assert_exact(tensor: Any) -> ArrayDescription:
    told = BACKEND.describe(tensor)
    starts = [told.address + int(np.dot(index, told.strides)) for index in np.ndindex(*told.shape)]
    found = b"".join(ctypes.string_at(start, told.itemsize) for start in starts)
    assert found == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    storage = tensor.untyped_storage()
    assert (told.region.address, told.region.length) == (storage.data_ptr(), storage.nbytes())
    assert (told.region.memory, told.region.device) == ("DRAM", 0)
    return told


VIEWS = {
    "whole": lambda t: t,
    "slice": lambda t: t[1:, 2:, 1:3],
    "steps": lambda t: t[::2, ::3, ::2],
    "permuted": lambda t: t.permute(2, 0, 1),
    "select": lambda t: t[1],
    "unsqueezed": lambda t: t[:, None, 1],
    "as_strided": lambda t: t.as_strided((2, 3), (30, 2), 7),
    "detached": lambda t: t.requires_grad_().detach()[2:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_described_through_its_storage(view: Any) -> None:
    assert_exact(view(torch.arange(120, dtype=torch.float32).view(4, 5, 6)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "bool", "int64"])
def test_dtypes_keep_torchs_names(dtype: str) -> None:
    told = assert_exact(torch.arange(8).to(getattr(torch, dtype))[2:])
    assert told.dtype == dtype
    assert told.offset == 2 * told.itemsize


def test_numpy_and_torch_name_shared_dtypes_alike() -> None:
    for name in ("float32", "float16", "float64", "uint8", "int8", "int32", "int64", "bool", "complex64"):
        tensor = torch.zeros(1, dtype=getattr(torch, name))
        assert BACKEND.describe(tensor).dtype == BACKEND.describe(np.zeros(1, name)).dtype == name


def test_layers_in_one_storage_share_a_region() -> None:
    raw = torch.zeros(4096, dtype=torch.int8)
    layers = [raw[start : start + 1024].view(torch.bfloat16).view(2, 8, 32) for start in (0, 1024, 2048)]
    told = [assert_exact(layer) for layer in layers]
    assert len({description.region for description in told}) == 1
    assert [description.offset for description in told] == [0, 1024, 2048]


def test_zero_size_tensors_are_described() -> None:
    base = torch.zeros(4, 4)
    told = BACKEND.describe(base[4:])
    assert (told.region, told.offset) == (BACKEND.describe(base).region, 64)
    assert BACKEND.describe(torch.zeros(0, 3)).region.length == 0


def test_a_tensor_and_the_array_over_it_share_a_region() -> None:
    tensor = torch.zeros(64)
    assert BACKEND.describe(tensor[8:].numpy()[4:]).region == BACKEND.describe(tensor).region
    array = np.zeros(64, np.float32)
    assert BACKEND.describe(torch.from_numpy(array)).region == BACKEND.describe(array).region


@pytest.mark.parametrize(
    ("tensor", "phrase"),
    [
        (torch.zeros(3, 1).expand(3, 4), r"axis 1 of shape \(3, 4\) repeats the same bytes"),
        (torch.zeros(64).as_strided((4, 8), (4, 1)), r"axis 0 of shape \(4, 8\) .* steps over 16 of 32"),
        (torch.zeros(64).as_strided((8, 8), (1, 1)), "repeats the same bytes"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo has no strides"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "lazily conjugated"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "lazily conjugated or negated"),
    ],
)
def test_tensors_whose_bytes_are_not_their_values_are_refused(tensor: Any, phrase: str) -> None:
    with pytest.raises(BackendError, match=phrase):
        BACKEND.describe(tensor)


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    def describe(one: torch.Tensor) -> torch.Tensor:
        BACKEND.describe(one)
        return one

    with pytest.raises(BackendError, match="torch does not tell where this tensor lies"):
        torch.func.vmap(describe)(torch.zeros(3, 4))
    with pytest.warns(UserWarning, match="prototype"):
        nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])
    with pytest.raises(BackendError, match="nested tensor has no strides"):
        BACKEND.describe(nested)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(BackendError, match="this tensor is on meta; use backend_for"):
        BACKEND.describe(torch.zeros(3, device="meta"))
    with pytest.raises(BackendError, match="this array is on cpu; use backend_for"):
        CudaBackend().describe(torch.zeros(3))


def test_the_owner_is_found_by_the_device() -> None:
    assert backend_for(torch.zeros(3)).name == "cpu"
    with pytest.raises(
        UnclaimedDevice, match=r"device 'meta' \(known: cpu, cuda, neuron\); install .* claims 'meta'"
    ):
        backend_for(torch.zeros(3, device="meta"))


def test_the_checks_tell_whether_torch_is_built_with_cuda() -> None:
    found = [check.found for check in CudaBackend().check()]
    assert (f"torch {torch.__version__} is built without CUDA" in found) is (torch.version.cuda is None)
