"""The fake behaves as documented: addresses, latches, exports, order, late bytes."""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import pytest
import torch

from pushkv.core.memory import Region
from pushkv.errors import TransportError, TransportUnavailable
from pushkv.testing.neuron import FakeHost, FakeNeuron, FakeNixl, Flavour, Status
from pushkv.testing.neuron.fake import bytes_at
from pushkv.testing.neuron.nrt import PAGE


def region_of(tensor: torch.Tensor) -> Region:
    storage = tensor.untyped_storage()
    return Region(storage.data_ptr(), storage.nbytes(), 3, "VRAM")


class TestAddresses:
    def test_views_have_the_addresses_of_their_elements(self, neuron: FakeNeuron) -> None:
        whole = torch.zeros(4, 5, 6, device="neuron:3")
        assert str(whole.device) == "neuron:3"
        assert whole[2, 1:].data_ptr() == whole.data_ptr() + (2 * 30 + 6) * 4
        assert whole.permute(2, 0, 1)[3].data_ptr() == whole.data_ptr() + 12
        assert whole[2:].untyped_storage().data_ptr() == whole.data_ptr()

    def test_a_cast_view_shares_its_storage(self, neuron: FakeNeuron) -> None:
        raw = torch.zeros(4096, dtype=torch.int8, device="neuron")
        layer = raw[1024:2048].view(torch.bfloat16).view(2, 8, 32)
        assert layer.untyped_storage().data_ptr() == raw.data_ptr()
        assert layer.data_ptr() == raw.data_ptr() + 1024

    def test_mapping_is_latched_at_the_first_allocation(self, host: FakeHost) -> None:
        host.environ["NEURON_RT_MAP_HBM"] = "0"
        FakeNeuron(host).install()
        first = torch.zeros(4, device="neuron")
        host.environ["NEURON_RT_MAP_HBM"] = "1"
        assert first.data_ptr() == torch.zeros(4, device="neuron").data_ptr() == 0

    def test_unmapped_native_memory_has_an_address_that_is_none(self, host: FakeHost) -> None:
        host.environ["NEURON_RT_MAP_HBM"] = "0"
        FakeNeuron(host, Flavour.NATIVE).install()
        address = torch.zeros(4, device="neuron").data_ptr()
        assert address > 0
        assert not host.machine().writable(address)

    def test_the_native_allocator_hands_out_slices(self, host: FakeHost) -> None:
        FakeNeuron(host, Flavour.NATIVE).install()
        one, other = (torch.zeros(100, dtype=torch.uint8, device="neuron") for _ in range(2))
        assert other.data_ptr() - one.data_ptr() == 256
        assert other.data_ptr() % PAGE

    def test_one_core_is_visible_whatever_the_index(self, neuron: FakeNeuron) -> None:
        assert (torch.neuron.device_count(), torch.neuron.current_device()) == (1, 0)
        assert torch.zeros(1, device="neuron:3").get_device() == 3


class TestLateBytes:
    def test_what_is_written_lands_when_somebody_reads(self, neuron: FakeNeuron) -> None:
        tensor = torch.zeros(8, dtype=torch.uint8, device="neuron")
        tensor.cpu()
        tensor[2:5] = 9
        assert bytes_at(neuron, tensor.data_ptr(), 8) == bytes(8)
        assert tensor.cpu().tolist() == [0, 0, 9, 9, 9, 0, 0, 0]
        assert bytes_at(neuron, tensor.data_ptr(), 8) == bytes([0, 0, 9, 9, 9, 0, 0, 0])

    def test_reading_something_else_leaves_them_late(self, neuron: FakeNeuron) -> None:
        early, late = (torch.zeros(4, dtype=torch.uint8, device="neuron") for _ in range(2))
        neuron.synchronize()
        early.fill_(1)
        late.fill_(2)
        assert early.cpu().tolist() == [1] * 4
        assert bytes_at(neuron, late.data_ptr(), 4) == bytes(4)

    def test_a_forward_returns_before_its_kv_is_written(self, neuron: FakeNeuron) -> None:
        kv = torch.zeros(16, dtype=torch.uint8, device="neuron")
        neuron.synchronize()
        sampled = neuron.run_graph(lambda host: host.fill_(7), kv)
        assert bytes_at(neuron, kv.data_ptr(), 16) == bytes(16)
        sampled.to("cpu")
        assert bytes_at(neuron, kv.data_ptr(), 16) == bytes([7] * 16)

    def test_a_host_tensor_may_change_after_it_was_copied_from(self, neuron: FakeNeuron) -> None:
        source, target = torch.full((4,), 3.0), torch.zeros(4, device="neuron")
        target.copy_(source)
        source.fill_(8)
        assert target.cpu().tolist() == [3.0] * 4

    def test_results_are_those_of_the_host(self, neuron: FakeNeuron) -> None:
        host = torch.arange(24.0).reshape(2, 3, 4)
        there = host.to("neuron")
        index = torch.tensor([1, 0], device="neuron")
        assert torch.equal((there * 2 + 1).cpu(), host * 2 + 1)
        assert torch.equal(there.index_select(0, index).cpu(), host[[1, 0]])
        assert there.sum().item() == host.sum().item()
        there.index_copy_(0, index, there.clone())
        assert torch.equal(there.cpu(), host[[1, 0]])

    def test_only_the_native_backend_has_events(self, neuron: FakeNeuron) -> None:
        native = neuron.flavour is Flavour.NATIVE
        assert [hasattr(torch.neuron, name) for name in ("Event", "synchronize", "is_initialized")] == [native] * 3

    def test_an_event_passes_only_when_it_is_asked_again(self, host: FakeHost) -> None:
        fake = FakeNeuron(host, Flavour.NATIVE).install()
        tensor = torch.zeros(4, device="neuron")
        fake.synchronize()
        tensor.fill_(1)
        event = torch.neuron.Event()
        event.record()
        assert [event.query(), event.query()] == [False, True]


class TestExports:
    def test_version_1_exports_from_the_start_of_a_page_alone(self, host: FakeHost) -> None:
        fake = FakeNeuron(host, dmabuf=1).install()
        base = torch.zeros(10_000, dtype=torch.uint8, device="neuron").data_ptr()
        keep = torch.zeros(10_000, dtype=torch.uint8, device="neuron")
        base = keep.data_ptr()
        assert fake.nrt.export_dmabuf(base, 10_000) == (Status.SUCCESS, 0)
        assert fake.nrt.export_dmabuf(base + 100, 50) == (Status.INVALID, 0)
        assert fake.nrt.export_dmabuf(base, 10_001) == (Status.INVALID, 0)

    def test_version_2_tells_the_offset(self, host: FakeHost) -> None:
        fake = FakeNeuron(host, dmabuf=2).install()
        keep = torch.zeros(10_000, dtype=torch.uint8, device="neuron")
        assert fake.nrt.export_dmabuf(keep.data_ptr() + 5000, 50) == (Status.SUCCESS, 5000 % PAGE)
        offset, fd = ctypes.c_uint64(), ctypes.c_int()
        library = fake.nrt.library()
        at = ctypes.c_uint64(keep.data_ptr() + 5000)
        assert library.nrt_get_dmabuf_fd_v2(at, ctypes.c_uint64(50), ctypes.byref(fd), ctypes.byref(offset)) == 0
        assert offset.value == 5000 % PAGE

    def test_nothing_is_exported_before_the_runtime_is_up(self, host: FakeHost) -> None:
        assert FakeNeuron(host).nrt.export_dmabuf(PAGE, 1)[0] is Status.UNINITIALIZED


class TestRegistration:
    def test_it_is_exact_and_beside_the_chips_nic(self, neuron: FakeNeuron) -> None:
        nixl = FakeNixl(neuron)
        tensor = torch.zeros(300, dtype=torch.uint8, device="neuron:3")
        agent = nixl("exact")
        agent.claim()
        agent.register([region_of(tensor)])
        (told,) = nixl.registrations
        assert (told.address, told.length, told.rails) == (tensor.data_ptr(), 300, ("rdmap0s0",))
        assert not told.system
        agent.close()

    def test_without_pairing_every_nic_is_used(self, host: FakeHost) -> None:
        fake = FakeNeuron(host, nic="").install()
        nixl = FakeNixl(fake)
        keep = torch.zeros(300, dtype=torch.uint8, device="neuron")
        agent = nixl("all-rails")
        agent.claim()
        agent.register([region_of(keep)])
        assert nixl.registrations[0].rails == ("rdmap0s0", "rdmap1s0")
        agent.close()

    def test_a_slice_falls_back_from_dma_buf_without_a_word(
        self, host: FakeHost, caplog: pytest.LogCaptureFixture
    ) -> None:
        nixl = FakeNixl(FakeNeuron(host, Flavour.NATIVE, dmabuf=1).install())
        _, keep = (torch.zeros(300, dtype=torch.uint8, device="neuron") for _ in range(2))
        agent = nixl("fallback")
        agent.claim()
        agent.register([region_of(keep)])
        assert nixl.registrations[0].fallback
        assert not caplog.text
        agent.close()

    def test_an_agent_before_the_runtime_takes_device_memory_for_host_memory(
        self, host: FakeHost, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Silently: its WRITEs carry bytes that are not the device's."""
        fake = FakeNeuron(host).install()
        nixl = FakeNixl(fake)
        first = nixl("too-early")
        tensor = torch.full((4096,), 7, dtype=torch.uint8, device="neuron")
        fake.synchronize()
        with caplog.at_level(logging.WARNING):
            sides = [first, nixl("later")]
            for side in sides:
                side.claim()
                side.register([region_of(tensor)])
        assert [told.system for told in nixl.registrations] == [True, True]
        assert "registered as system memory" in caplog.text
        for side in sides:
            side.close()

    @pytest.mark.parametrize("case", ["a GPU beside it", "no chip", "no NIC", "widened", "no resources"])
    def test_what_cannot_be_registered_raises_as_nixl_does(self, host: FakeHost, case: str) -> None:
        fake = FakeNeuron(host).install()
        keep = torch.zeros(100, dtype=torch.uint8, device="neuron")
        region = region_of(keep)
        if case == "a GPU beside it":
            host.add_nvidia_gpu()
        elif case == "no chip":
            _unplug(host, "9")
        elif case == "no NIC":
            for entry in (host.root / "sys/class/infiniband").iterdir():
                (entry / "device").unlink()
                entry.rmdir()
        elif case == "widened":
            region = Region(region.address // PAGE * PAGE, PAGE, 0, "VRAM")
        else:
            fake.nrt.export = Status.RESOURCE
        agent = FakeNixl(fake)("refused")
        agent.claim()
        told = "NIXL_ERR_NOT_SUPPORTED" if case in ("a GPU beside it", "no chip") else "NIXL_ERR_BACKEND"
        with pytest.raises(TransportError, match=told):
            agent.register([region])
        agent.close()

    def test_a_missing_library_keeps_the_backend_from_starting(self, host: FakeHost) -> None:
        host.libraries.discard("libcuda.so.1")
        with pytest.raises(TransportUnavailable, match=r"libcuda\.so\.1"):
            FakeNixl(FakeNeuron(host).install())("no-libcuda")

    def test_device_ids_are_ignored(self, neuron: FakeNeuron) -> None:
        """Two agents on one device, which name it differently, move bytes all the same."""
        nixl = FakeNixl(neuron)
        source, target = (torch.zeros(64, dtype=torch.uint8, device="neuron") for _ in range(2))
        source.copy_(torch.arange(64, dtype=torch.uint8))
        neuron.synchronize()
        sides = [nixl("one"), nixl("other")]
        for side, tensor, index in zip(sides, (source, target), (3, 0), strict=True):
            side.claim()
            whole = region_of(tensor)
            side.register([Region(whole.address, whole.length, index, "VRAM")])
        sides[0].add_peer(sides[1].metadata(), None)
        sides[1].add_peer(sides[0].metadata(), None)
        _write(sides, source.data_ptr(), target.data_ptr(), 64)
        assert target.cpu().tolist() == list(range(64))
        for side in sides:
            side.close()


def _unplug(host: FakeHost, bus: str) -> None:
    for folder in (host.root / "sys/bus/pci/devices").iterdir():
        if folder.name.startswith(f"0000:{bus}"):
            (folder / "vendor").write_text("0x8086")


def _write(sides: list, source: int, target: int, length: int) -> None:
    from pushkv.transport.base import Pieces, WriteStatus

    def piece(address: int, device: int) -> Pieces:
        return Pieces(np.array([address], np.uint64), np.array([length], np.uint64), device, "VRAM")

    sides[0].write(sides[1].agent, piece(source, 1), piece(target, 5), b"done")
    results, came = [], []
    for _ in range(100_000):
        results += sides[0].poll()
        came += sides[1].receive()
        if results and came:
            break
    assert [result.status for result in results] == [WriteStatus.DONE]
