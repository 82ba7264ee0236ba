"""The cuda backend on a stand-in for torch: what it asks, and what it makes of the answers.

No GPU is used here. What the stand-in cannot show is in test_backend_cuda_device.py.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pushkv.backends import cuda
from pushkv.backends.base import Verdict
from pushkv.backends.cuda import CudaBackend
from pushkv.core.memory import Region
from pushkv.errors import BackendError

Device = namedtuple("Device", "type index")


class FakeTensor:
    """A float16 tensor of shape (4, 8) that starts 64 bytes into a storage of 4096 on cuda:1."""

    device = SimpleNamespace(type="cuda", index=1)
    shape = (4, 8)
    layout = "torch.strided"
    dtype = "torch.float16"
    base = 0x7F0000000000

    def stride(self) -> tuple[int, ...]:
        return (16, 1)

    def storage_offset(self) -> int:
        return 32

    def element_size(self) -> int:
        return 2

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.base, nbytes=lambda: 4096)


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.device, self.busy, self.error = device, True, ""


class FakeEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        if self.stream.error:
            raise RuntimeError(f"CUDA error: {self.stream.error}\nCompile with ...")
        return not self.stream.busy

    def synchronize(self) -> None:
        self.query()
        self.stream.busy = False


class FakeCuda:
    Event = FakeEvent

    def __init__(self) -> None:
        self.count, self.available, self.initialized, self.capturing = 2, True, False, False
        self.segments: list[dict[str, object]] = []
        self.calls: list[tuple[str, object]] = []
        self.streams: list[FakeStream] = []

    def current_stream(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream(device))
        return self.streams[-1]

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def device_count(self) -> int:
        return self.count

    def is_available(self) -> bool:
        return self.available

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_snapshot(self) -> list[dict[str, object]]:
        return self.segments

    def set_device(self, device: int) -> None:
        if device >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal\nCompile with ...")
        self.calls.append(("set_device", device))

    def synchronize(self, device: int) -> None:
        self.calls.append(("synchronize", device))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake = SimpleNamespace(
        Tensor=FakeTensor, __version__="2.9.0+cu130", version=SimpleNamespace(cuda="13.0"), cuda=FakeCuda()
    )
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "_DRIVER", ())
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return fake


BACKEND = CudaBackend()


def found(*, probe: bool = True) -> dict[str, tuple[Verdict, str]]:
    return {check.name: (check.verdict, check.found) for check in BACKEND.check(probe=probe)}


def failures(*, probe: bool = True) -> list[str]:
    return [check.name for check in BACKEND.check(probe=probe) if check.verdict is Verdict.FAIL]


class TestDescribe:
    def test_a_tensor_is_vram_of_its_ordinal(self, torch: Any) -> None:
        told = BACKEND.describe(FakeTensor())
        assert told.region == Region(0x7F0000000000, 4096, device=1, memory="VRAM")
        assert (told.offset, told.shape, told.strides) == (64, (4, 8), (32, 2))
        assert (told.itemsize, told.dtype) == (2, "float16")

    def test_host_arrays_are_refused(self, torch: Any) -> None:
        with pytest.raises(BackendError, match="this array is on cpu; use backend_for"):
            BACKEND.describe(np.zeros(3))

    def test_a_tensor_without_an_address_is_refused(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeTensor, "base", 0)
        with pytest.raises(BackendError, match="4096 bytes but no address"):
            BACKEND.describe(FakeTensor())


class TestFence:
    def test_it_passes_when_its_stream_has(self, torch: Any) -> None:
        fence = BACKEND.fence(FakeTensor())
        (stream,) = torch.cuda.streams
        assert stream.device is FakeTensor.device
        assert not fence.done()
        stream.busy = False
        assert fence.done()

    def test_without_an_array_it_is_the_current_devices(self, torch: Any) -> None:
        fence = BACKEND.fence()
        assert torch.cuda.streams[0].device is None
        fence.wait()
        assert fence.done()

    def test_a_failed_device_is_one_error(self, torch: Any) -> None:
        fence = BACKEND.fence()
        torch.cuda.streams[0].error = "an illegal memory access was encountered"
        for ask in (fence.done, fence.wait):
            with pytest.raises(BackendError, match="illegal memory access was encountered; restart the process"):
                ask()

    def test_it_is_refused_while_a_graph_is_captured(self, torch: Any) -> None:
        torch.cuda.capturing = True
        with pytest.raises(BackendError, match="while a CUDA graph is captured; take it after the replay"):
            BACKEND.fence()


class TestPrepareThread:
    def test_the_context_is_made_on_the_agents_device(self, torch: Any) -> None:
        BACKEND.prepare_thread(1)
        assert torch.cuda.calls == [("set_device", 1), ("synchronize", 1)]

    def test_a_device_that_is_not_there_is_named(self, torch: Any) -> None:
        with pytest.raises(BackendError, match="CUDA device 7 cannot be made current: CUDA error: invalid device"):
            BACKEND.prepare_thread(7)


class TestSlots:
    def test_they_are_copied_to_the_host_on_a_stream_of_their_own(self, torch: Any) -> None:
        """Made once a device. The current stream is where the engine's work is, and its copy would wait for that."""
        current: list[Any] = []

        class Slot(FakeTensor):
            def cpu(self) -> Any:
                assert current, "on the engine's stream"
                return SimpleNamespace(numpy=lambda: np.arange(4, dtype=np.uint8))

        @contextmanager
        def use(stream: Any) -> Iterator[None]:
            current.append(stream)
            yield
            current.remove(stream)

        made: list[Any] = []
        torch.cuda.Stream = lambda device: made.append(device) or FakeStream(device)
        torch.cuda.stream = use
        torch.Tensor = Slot
        Slot.device = Device("cuda", 1)
        backend = CudaBackend()
        for _ in range(2):
            assert backend.to_host(Slot()).tolist() == [0, 1, 2, 3]
        assert made == [Device("cuda", 1)]


class TestCheck:
    def test_a_machine_with_devices_passes(self, torch: Any) -> None:
        assert failures() == []
        assert found()["devices"] == (Verdict.PASS, "2 CUDA devices")

    def test_without_torch(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setattr(cuda, "find_spec", lambda name: None)
        for probe in (False, True):
            assert found(probe=probe)["torch"] == (Verdict.FAIL, "torch is not installed")
            assert failures(probe=probe) == ["torch", "driver"]

    def test_without_a_driver_as_seen_unprobed(self, torch: Any) -> None:
        assert failures(probe=False) == ["driver"]

    def test_torchs_word_on_devices_outweighs_the_drivers_files(self, torch: Any) -> None:
        assert "driver" not in found(probe=True)

    def test_torch_that_cannot_be_imported(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
        verdict, text = found()["torch import"]
        assert verdict is Verdict.FAIL
        assert text.startswith("torch cannot be imported: ")

    def test_torch_without_cuda(self, torch: Any) -> None:
        torch.version.cuda = None
        assert found()["CUDA build"] == (Verdict.FAIL, "torch 2.9.0+cu130 is built without CUDA")

    def test_no_device(self, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.cuda.count = 0
        assert found()["devices"] == (Verdict.FAIL, "torch 2.9.0+cu130 sees no CUDA device")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert found()["devices"][1].endswith("sees no CUDA device (CUDA_VISIBLE_DEVICES='')")

    def test_a_driver_that_does_not_fit(self, torch: Any) -> None:
        torch.cuda.available = False
        assert found()["devices"] == (Verdict.FAIL, "torch 2.9.0+cu130 cannot use CUDA")

    @pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_expandable_segments_by_the_environment(
        self, torch: Any, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments: True")
        for probe in (False, True):
            verdict, text = found(probe=probe)["segments"]
            assert verdict is Verdict.WARN
            assert text.startswith(name)
        monkeypatch.setenv(name, "expandable_segments:False")
        assert found()["segments"][0] is Verdict.PASS

    def test_expandable_segments_that_a_process_turned_on_itself(self, torch: Any) -> None:
        torch.cuda.initialized = True
        torch.cuda.segments = [{"is_expandable": False}]
        assert found()["segments"][0] is Verdict.PASS
        torch.cuda.segments = [{"is_expandable": False}, {"is_expandable": True}]
        assert found()["segments"][0] is Verdict.WARN
        assert found(probe=False)["segments"][0] is Verdict.PASS
