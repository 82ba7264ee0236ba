"""The cuda backend on a GPU. Skipped, and said so, where torch sees none: no continuous integration here has one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.backends.base import ArrayDescription, Verdict
from pushkv.backends.cuda import CudaBackend
from pushkv.errors import BackendError
from pushkv.plugins import backend_for

torch = pytest.importorskip("torch", reason="these tests describe torch tensors; the extra pushkv[torch] has it")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine")

BACKEND = CudaBackend()


def read_back(told: ArrayDescription) -> Any:
    """A tensor over the bytes that the description names, made from nothing else."""
    interface = {
        "shape": told.shape,
        "strides": told.strides,
        "typestr": "<f4",
        "data": (told.address, False),
        "version": 3,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=f"cuda:{told.region.device}")


@pytest.mark.parametrize("index", range(torch.cuda.device_count()))
def test_views_are_exact_on_every_device(index: int) -> None:
    base = torch.arange(120, dtype=torch.float32, device=f"cuda:{index}").view(4, 5, 6)
    for view in (base, base[1:, 2:, 1:3], base[::2, ::3, ::2], base.permute(2, 0, 1), base[1], base[:, None, 1]):
        told = BACKEND.describe(view)
        assert (told.region.device, told.region.memory) == (index, "VRAM")
        assert told.region == BACKEND.describe(base).region
        assert torch.equal(read_back(told), view)


def test_a_zero_size_view_lies_in_its_storage() -> None:
    base = torch.zeros(4, 4, device="cuda")
    told = BACKEND.describe(base[4:])
    assert (told.region, told.offset) == (BACKEND.describe(base).region, 64)


def test_the_owner_is_found_past_its_checks() -> None:
    assert backend_for(torch.zeros(1, device="cuda")).name == "cuda"
    assert {check.verdict for check in BACKEND.check()} == {Verdict.PASS}


@pytest.mark.parametrize("index", range(torch.cuda.device_count()))
def test_a_fence_passes_after_the_work_and_no_sooner(index: int) -> None:
    """Also for a device that is not the thread's current one: the array says which is meant."""
    array = torch.zeros(1 << 20, device=f"cuda:{index}")
    with torch.cuda.device(index):
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        array.fill_(1)
    fence = BACKEND.fence(array)
    assert not fence.done()
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: (fence.wait(), done.append(fence.done())))  # asked on another thread
    waiting.start()
    waiting.join(30)
    assert done == [True]
    assert torch.cuda.current_stream(index).query()


def test_a_fence_follows_the_current_stream() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        fence = BACKEND.fence()
    main = BACKEND.fence()
    main.wait()
    assert main.done()
    assert not fence.done()
    fence.wait()


def test_a_fence_is_refused_while_a_graph_is_captured() -> None:
    array = torch.zeros(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        array.add_(1)
        with pytest.raises(BackendError, match="take it after the replay"):
            BACKEND.fence(array)


def test_a_thread_is_prepared_for_its_device() -> None:
    last = torch.cuda.device_count() - 1
    current: list[int] = []
    thread = threading.Thread(
        target=lambda: (BACKEND.prepare_thread(last), current.append(torch.cuda.current_device()))
    )
    thread.start()
    thread.join(30)
    assert current == [last]
    with pytest.raises(BackendError, match="CUDA device 99 cannot be made current"):
        BACKEND.prepare_thread(99)


EXPANDABLE = """
import torch
from pushkv.backends.cuda import CudaBackend
torch.cuda.memory._set_allocator_settings("expandable_segments:True")
keep = torch.zeros(1 << 22, device="cuda")
print([check.verdict.value for check in CudaBackend().check() if check.name == "segments"])
"""


def test_expandable_segments_are_seen_without_the_environment() -> None:
    settings = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE], env=settings, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "['warning']", done.stderr


def test_slots_come_to_the_host() -> None:
    slot = BACKEND.allocate(1 << 16)
    slot.copy_(torch.arange(1 << 16, device="cuda") % 251)
    torch.cuda.synchronize()
    assert BACKEND.to_host(slot[7:5000]).tolist() == [number % 251 for number in range(7, 5000)]
