"""What GPUDirect needs, on machines that are made up: no GPU and no NIC is here."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pushkv.backends.base import DataPath, Verdict
from pushkv.backends.cuda import CudaBackend
from pushkv.core.memory import Region
from pushkv.testing.neuron.host import FakeHost

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL
CACHE = Region(0x7000_0000_0000, 1 << 20, 0, "VRAM")


def libcuda(*, dma_buf: int = 0, status: int = 0, virtual: bool = False) -> SimpleNamespace:
    """The driver's library, as ctypes gives it; ``released`` are the handles that were given back."""
    released: list[int] = []

    def attribute(out: Any, name: ctypes.c_int, device: ctypes.c_int) -> int:
        assert (name.value, device.value) == (124, 0)
        out._obj.value = dma_buf
        return status

    def retain(out: Any, address: ctypes.c_void_p) -> int:
        assert address.value == CACHE.address
        out._obj.value = 42
        return 0 if virtual else 1

    return SimpleNamespace(
        cuDeviceGetAttribute=attribute,
        cuMemRetainAllocationHandle=retain,
        cuMemRelease=lambda handle: released.append(handle.value),
        released=released,
    )


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says of the machine that the test runs on does not count."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def found(host: FakeHost, name: str, path: DataPath, *, probe: bool = True) -> tuple[Verdict, str]:
    ((verdict, told),) = every(host, name, path, probe=probe)
    return verdict, told


def every(host: FakeHost, name: str, path: DataPath, *, probe: bool = True) -> list[tuple[Verdict, str]]:
    checks = CudaBackend(host.machine()).check_path(path, probe=probe)
    return [(check.verdict, str(check)) for check in checks if check.name == name]


UCX, LIBFABRIC = DataPath("UCX"), DataPath("LIBFABRIC")


class TestUcx:
    @pytest.mark.parametrize("tls", [None, "all", "tcp,cuda", "rc,cuda_copy", "^tcp", "cuda_ipc,tcp"])
    def test_lanes_that_know_gpu_memory(self, tmp_path: Path, tls: str | None) -> None:
        host = FakeHost.gpus(tmp_path)
        host.environ.update({"UCX_TLS": tls} if tls else {})
        assert found(host, "lanes", UCX)[0] is PASS

    @pytest.mark.parametrize("tls", ["tcp", "rc,sm", "^cuda"])
    def test_lanes_that_take_it_for_host_memory_are_a_failure(self, tmp_path: Path, tls: str) -> None:
        host = FakeHost.gpus(tmp_path)
        host.environ["UCX_TLS"] = tls
        told = f"UCX_TLS is {tls!r}, without CUDA; add cuda to UCX_TLS, or unset it"
        assert found(host, "lanes", UCX) == (FAIL, told)

    @pytest.mark.parametrize("tls", ["tcp,cuda_copy", "^cuda_ipc"])
    def test_staging_between_gpus_of_one_host_is_reported(self, tmp_path: Path, tls: str) -> None:
        host = FakeHost.gpus(tmp_path)
        host.environ["UCX_TLS"] = tls
        verdict, told = found(host, "lanes", DataPath("UCX", same_machine=True))
        assert verdict is WARN
        assert "without cuda_ipc: between GPUs of this host bytes go through host memory" in told

    def test_staging_between_hosts_is_reported(self, tmp_path: Path) -> None:
        host = FakeHost.gpus(tmp_path / "none")
        verdict, told = found(host, "NICs", UCX)
        assert verdict is WARN
        assert "to other hosts UCX goes over TCP, through host memory" in told
        assert every(host, "GPUDirect", UCX) == []
        assert found(FakeHost.gpus(tmp_path / "two", nics=2), "NICs", UCX) == (PASS, "RDMA devices: mlx5_0, mlx5_1")

    def test_a_nic_reaches_gpu_memory_by_a_module_or_by_dma_buf(self, tmp_path: Path) -> None:
        host = FakeHost.gpus(tmp_path, nics=1)
        verdict, told = found(host, "GPUDirect", UCX)
        assert verdict is WARN
        assert (
            "it is not known whether dma-buf is there: mlx5_0 may not reach GPU memory; modprobe nvidia_peermem"
            in told
        )
        host.provided["libcuda.so.1"] = libcuda(dma_buf=0)
        assert "the driver exports no dma-buf" in found(host, "GPUDirect", UCX)[1]
        host.provided["libcuda.so.1"] = libcuda(dma_buf=1, status=3)
        assert "it is not known" in found(host, "GPUDirect", UCX)[1]
        host.provided["libcuda.so.1"] = libcuda(dma_buf=1)
        assert found(host, "GPUDirect", UCX) == (PASS, "the driver exports dma-bufs")
        assert found(host, "GPUDirect", UCX, probe=False)[0] is WARN
        host.load_kernel_module("nvidia_peermem")
        assert found(host, "GPUDirect", UCX, probe=False) == (PASS, "a peer-memory module is loaded")

    def test_virtual_memory_is_a_warning(self, tmp_path: Path) -> None:
        host = FakeHost.gpus(tmp_path, nics=1)
        host.provided["libcuda.so.1"] = library = libcuda(virtual=True)
        verdict, told = found(host, "segments", DataPath("UCX", (CACHE,)))
        assert verdict is WARN
        assert "memory at 0x700000000000 is mapped piecemeal (VMM), which a NIC cannot register" in told
        assert library.released == [42]
        host.provided["libcuda.so.1"] = libcuda()
        assert every(host, "segments", DataPath("UCX", (CACHE,))) == []


class TestEfa:
    def host(self, root: Path, nics: int = 2) -> FakeHost:
        host = FakeHost.gpus(root)
        for nic in range(nics):
            host.add_nic(f"rdmap{nic}s0", f"0000:{0xA0 + nic:02x}:1a.0")
        host.environ.update(FI_EFA_USE_DEVICE_RDMA="1", FI_EFA_ENABLE_SHM_TRANSFER="0")
        host.load_kernel_module("efa_nv_peermem")
        return host

    def test_a_sound_machine(self, tmp_path: Path) -> None:
        checks = CudaBackend(self.host(tmp_path).machine()).check_path(DataPath("LIBFABRIC", (CACHE,)))
        assert {check.verdict for check in checks} == {PASS}

    def test_without_an_efa_nic_it_would_go_over_tcp(self, tmp_path: Path) -> None:
        verdict, told = found(self.host(tmp_path, nics=0), "NICs", LIBFABRIC)
        assert verdict is FAIL
        assert "there is no EFA NIC: NIXL's LIBFABRIC would go over TCP or not at all" in told

    def test_virtual_memory_is_refused(self, tmp_path: Path) -> None:
        host = self.host(tmp_path)
        host.provided["libcuda.so.1"] = libcuda(virtual=True)
        verdict, told = found(host, "segments", DataPath("LIBFABRIC", (CACHE,)))
        assert verdict is FAIL
        assert "remove expandable_segments:True" in told

    @pytest.mark.parametrize(("address", "expected"), [(CACHE.address, FAIL), (CACHE.address + (1 << 30), None)])
    def test_expandable_segments_count_by_what_torch_holds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: int, expected: Verdict | None
    ) -> None:
        """Where the driver's library cannot be asked, the region's own segment decides."""
        segments = [{"address": address, "total_size": 1 << 21, "is_expandable": True}]
        cuda = SimpleNamespace(
            is_available=lambda: False, is_initialized=lambda: True, memory_snapshot=lambda: segments
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        told = every(self.host(tmp_path), "segments", DataPath("LIBFABRIC", (CACHE,)))
        assert [verdict for verdict, _ in told] == ([expected] if expected else [])

    def test_another_provider_is_a_failure(self, tmp_path: Path) -> None:
        host = self.host(tmp_path)
        host.environ["FI_PROVIDER"] = "tcp"
        assert found(host, "provider", LIBFABRIC)[0] is FAIL

    def test_shared_memory_with_a_peer_on_this_host_is_a_warning_here(self, tmp_path: Path) -> None:
        host = self.host(tmp_path)
        host.environ["FI_EFA_ENABLE_SHM_TRANSFER"] = "1"
        assert found(host, "shared memory", DataPath("LIBFABRIC", same_machine=True))[0] is WARN


def test_gpus_that_cannot_access_each_other_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost.gpus(tmp_path)
    linked = {(0, 1), (1, 2)}
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: False,
        device_count=lambda: 3,
        can_device_access_peer=lambda one, other: (one, other) in linked,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    verdict, told = found(host, "peer access", DataPath("UCX", same_machine=True))
    assert verdict is WARN
    assert told.startswith("GPUs 0 and 2 cannot access each other: bytes go through host memory")
    assert every(host, "peer access", UCX) == []
    linked.add((0, 2))
    assert every(host, "peer access", DataPath("UCX", same_machine=True)) == []
