"""Each row of the table of preconditions (docs/neuron.md), produced on the fake and answered with the right error."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from pushkv import Consumer, EndpointConfig, KVCache, Producer
from pushkv.backends.base import DataPath, Verdict
from pushkv.backends.neuron import NeuronBackend
from pushkv.config import NixlConfig
from pushkv.errors import BackendError, HandshakeError, PushKVError, RegistrationError
from pushkv.plugins import backend_for, registry
from pushkv.testing.neuron import FakeHost, FakeNeuron, FakeNixl, Flavour, Status
from pushkv.testing.neuron.host import EFA
from pushkv.transport.memory import MemoryTransport, Network

LIBFABRIC = NixlConfig(backend="LIBFABRIC")


def kv_cache() -> KVCache:
    """As vLLM-Neuron has it: a tensor a layer, (2, B, H, N, C), cast from raw bytes."""
    layers = {f"layer.{n}": _layer() for n in range(2)}
    return KVCache.of(layers, "SBHNC", model="m")


def _layer() -> torch.Tensor:
    raw = torch.zeros(2 * 8 * 2 * 32 * 16 * 2, dtype=torch.int8, device="neuron:3")
    return raw.view(torch.bfloat16).view(2, 8, 2, 32, 16)


def start(fake: FakeNeuron, **settings: object) -> Producer:
    config = EndpointConfig(engine="prefill", **{"nixl": LIBFABRIC, **settings})  # type: ignore[arg-type]
    network = Network(immediate=True)
    return Producer(config, kv_cache(), transport=FakeNixl(fake, lambda agent: MemoryTransport(network, agent)))


def set_up(host: FakeHost, flavour: Flavour = Flavour.LITE, **runtime: object) -> FakeNeuron:
    fake = FakeNeuron(host, flavour, **runtime).install()
    registry().use(NeuronBackend(host.machine()))
    return fake


def verdicts(
    host: FakeHost, name: str, path: DataPath | None = None, *, probe: bool = True
) -> list[tuple[Verdict, str]]:
    backend = NeuronBackend(host.machine())
    checks = backend.check(probe=probe) if path is None else backend.check_path(path, probe=probe)
    return [(check.verdict, str(check)) for check in checks if check.name == name]


def test_a_sound_machine_starts_without_a_warning(neuron: FakeNeuron, caplog: pytest.LogCaptureFixture) -> None:
    with start(neuron) as producer:
        assert producer.cache.home == ("VRAM", 3)
    assert caplog.text == ""


class TestFailures:
    """The first of them is what stands in the error."""

    @pytest.mark.parametrize("kind", list(Flavour))
    def test_memory_that_is_not_mapped(self, host: FakeHost, kind: Flavour) -> None:
        host.environ["NEURON_RT_MAP_HBM"] = "0"
        set_up(host, kind)
        told = "no address" if kind is Flavour.LITE else "the address 0x7f4000000000, which is not mapped"
        with pytest.raises(BackendError, match=f"32768 bytes and {told}; set NEURON_RT_MAP_HBM=1 before the first"):
            kv_cache()
        (mapping,) = verdicts(host, "mapping")
        assert mapping[0] is Verdict.WARN
        assert "device memory gets no address; set NEURON_RT_MAP_HBM=1" in mapping[1]

    def test_mapping_that_is_set_too_late(self, host: FakeHost) -> None:
        host.environ.pop("NEURON_RT_MAP_HBM")
        set_up(host)
        torch.zeros(1, device="neuron")
        host.environ["NEURON_RT_MAP_HBM"] = "1"
        with pytest.raises(BackendError, match="before the first device tensor of the process, at which it is read"):
            kv_cache()

    @pytest.mark.parametrize(
        ("break_it", "told"),
        [
            (lambda host: host.add_nvidia_gpu(), r"NVIDIA GPU is on this host \(0000:01:00.0\).*CUDA.*; hide it"),
            (lambda host: _without_chips(host), "no Neuron device is on the PCI bus; run on a Trn1"),
            (lambda host: host.modules.clear(), "no torch backend for the device neuron is installed; install"),
            (
                lambda host: host.packages.update({"torch-neuronx": "1.0"}),
                "torch-neuronx 1.0 is PyPI's placeholder; install it from AWS's package index",
            ),
            (
                lambda host: (host.modules.add("vllm_neuron"), host.environ.update(NEURON_RT_VISIBLE_CORES="0-3")),
                "NEURON_RT_VISIBLE_CORES is '0-3', which vLLM-Neuron's worker refuses.*use NEURON_VISIBLE_DEVICES",
            ),
            (
                lambda host: setattr(host, "libnrt", None),
                "libnrt.so.1 cannot be loaded: .*; install aws-neuronx-runt",
            ),
        ],
        ids=["GPU", "no chip", "no torch backend", "placeholder", "visible cores", "no libnrt"],
    )
    def test_the_device_cannot_be_used(
        self, host: FakeHost, break_it: Callable[[FakeHost], object], told: str
    ) -> None:
        set_up(host)
        break_it(host)
        with pytest.raises(BackendError, match=f"memory backend 'neuron' cannot be used: .*{told}"):
            backend_for(_layer())

    @pytest.mark.parametrize(
        ("break_it", "told"),
        [
            (
                lambda host: host.packages.update({"nixl-cu12": "0.9.0"}),
                "0.9.0 does not know this device; use NIXL 1.3",
            ),
            (
                lambda host: host.packages.update({"nixl-cu12": "1.3.1"}),
                "1.3.1 may hang on WRITEs over EFA; use NIXL 1.3",
            ),
            (lambda host: host.packages.clear(), "NIXL is not installed; pip install"),
            (
                lambda host: host.libraries.discard("libcuda.so.1"),
                r"does not load: libcuda\.so\.1: .*EFA setup guide",
            ),
            (lambda host: host.libraries.discard("libfabric.so.1"), r"does not load: libfabric\.so\.1: "),
            (lambda host: host.libraries.discard("libhwloc.so.15"), r"does not load: libhwloc\.so\.15: "),
            (
                lambda host: host.environ.update(FI_PROVIDER="tcp"),
                "FI_PROVIDER is 'tcp', which knows no device memory",
            ),
            (
                lambda host: host.environ.update(FI_EFA_IFACE="rdmap9s0"),
                "FI_EFA_IFACE names 'rdmap9s0'.*rdmap0s0, rdmap1",
            ),
        ],
        ids=["old NIXL", "hanging NIXL", "no NIXL", "libcuda", "libfabric", "libhwloc", "provider", "interface"],
    )
    def test_a_push_would_not_work(self, host: FakeHost, break_it: Callable[[FakeHost], object], told: str) -> None:
        fake = set_up(host)
        break_it(host)
        with pytest.raises(BackendError, match=f"'neuron' cannot be pushed over LIBFABRIC: .*{told}"):
            start(fake)

    def test_another_data_mover(self, neuron: FakeNeuron) -> None:
        with pytest.raises(
            BackendError, match=r"over UCX: NIXL's UCX takes .* for host memory; set nixl.backend to 'LIB"
        ):
            start(neuron, nixl=NixlConfig())

    def test_an_instance_without_a_nic_a_chip(self, host: FakeHost, tmp_path_factory: pytest.TempPathFactory) -> None:
        small = FakeHost.trn2(tmp_path_factory.mktemp("small"), chips=1, nics=0)
        with pytest.raises(BackendError, match=r"0 EFA NICs for 1 chips.*\(not a trn2.3xlarge\)"):
            start(set_up(small))
        unpaired = FakeHost.trn2(tmp_path_factory.mktemp("unpaired"), chips=1, nics=1)
        with pytest.raises(
            BackendError, match=r"memory at 0x7f4000000000 has no EFA NIC beside its chip; use an inst"
        ):
            start(set_up(unpaired, nic=""))

    def test_a_nic_of_another_kind_is_none(self, tmp_path: pytest.TempPathFactory) -> None:
        host = FakeHost.trn2(tmp_path / "other", chips=1, nics=0)  # type: ignore[operator]
        host.add_nic("mlx5_0", "0000:50:00.0", vendor=0x15B3, device=0x1021)
        assert verdicts(host, "NICs", DataPath("LIBFABRIC"))[0][0] is Verdict.FAIL
        host.add_nic("rdmap0s0", "0000:51:00.0", device=EFA - 1)
        assert verdicts(host, "NICs", DataPath("LIBFABRIC"))[0][0] is Verdict.PASS

    def test_an_agent_that_would_come_before_the_runtime(self, host: FakeHost) -> None:
        fake = set_up(host)
        backend = NeuronBackend(host.machine())
        raised: list[Exception] = []

        def prepare() -> None:
            try:
                backend.prepare_thread(3)
            except BackendError as error:
                raised.append(error)

        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join()
        assert "allocate a tensor on neuron:3 before the endpoint is made" in str(raised[0])
        assert not fake.nrt.initialized
        backend.describe(_layer())
        backend.prepare_thread(3)

    def test_somebody_elses_agent_that_came_before_the_runtime(self, host: FakeHost) -> None:
        fake = set_up(host)
        FakeNixl(fake, lambda agent: MemoryTransport(Network(), agent))("too-early")
        ((verdict, told),) = verdicts(host, "order")
        assert verdict is Verdict.WARN
        assert "nothing shows that the Neuron runtime was up before it; allocate a device tensor before" in told

    def test_peers_of_one_host_without_the_setting_that_makes_it_safe(self, host: FakeHost) -> None:
        host.environ.pop("FI_EFA_ENABLE_SHM_TRANSFER")
        fake, network = set_up(host), Network(immediate=True)
        nixl = FakeNixl(fake, lambda agent: MemoryTransport(network, agent))
        settings = {"nixl": LIBFABRIC}
        with (
            Producer(EndpointConfig(engine="p", **settings), kv_cache(), transport=nixl) as producer,  # type: ignore[arg-type]
            Consumer(EndpointConfig(engine="d", **settings), kv_cache(), transport=nixl) as consumer,  # type: ignore[arg-type]
            pytest.raises(HandshakeError, match="AWS warns of inaccurate output; set FI_EFA_ENABLE_SHM_TRANSFER=0"),
        ):
            consumer.connect(producer.address)

    def test_a_registration_that_nixl_refuses(self, host: FakeHost) -> None:
        fake = set_up(host)
        host.environ.pop("FI_EFA_USE_DEVICE_RDMA")
        cache_address = "0x7f4000000000"
        fake.nrt.export = Status.RESOURCE
        with pytest.raises(
            RegistrationError, match=r"NIXL_ERR_BACKEND.*FI_EFA_USE_DEVICE_RDMA is not set; set"
        ) as told:
            start(fake)
        assert str(int(cache_address, 16)) in str(told.value)
        assert "length=32768" in str(told.value)


class TestWarnings:
    """What works at a price, or cannot be known."""

    def warning(self, host: FakeHost, name: str, path: DataPath | None = None) -> str:
        ((verdict, told),) = verdicts(host, name, path)
        assert verdict is Verdict.WARN
        return told

    def test_rdma_of_the_device(self, host: FakeHost) -> None:
        set_up(host)
        host.environ["FI_EFA_USE_DEVICE_RDMA"] = "0"
        assert (
            self.warning(host, "device RDMA", DataPath("LIBFABRIC")) == "FI_EFA_USE_DEVICE_RDMA is '0'; set it to 1"
        )

    def test_the_libnrt_that_is_said_to_be_broken(self, host: FakeHost) -> None:
        set_up(host, version=(2, 32, 31, 0))
        assert "libnrt 2.32.31.0 is reported not to export dma-bufs" in self.warning(host, "libnrt")
        set_up(host, version=(2, 32, 31, 1))
        assert verdicts(host, "libnrt") == [(Verdict.PASS, "libnrt 2.32.31.1")]
        set_up(host, without=("nrt_get_version",))
        assert verdicts(host, "libnrt") == [(Verdict.PASS, "libnrt of an unknown version")]

    def test_a_libnrt_that_does_not_tell_the_nic(self, host: FakeHost) -> None:
        set_up(host, without=("nrt_get_attached_efa_bdf",))
        told = self.warning(host, "pairing", DataPath("LIBFABRIC", kv_cache().regions[:1]))
        assert "NIXL spreads WRITEs over all of them; use Neuron runtime 2.31 or later" in told

    def test_slices_that_export_no_dma_buf(self, host: FakeHost) -> None:
        set_up(host, Flavour.NATIVE, dmabuf=1)
        torch.zeros(3, device="neuron")
        keep = [torch.zeros(3, device="neuron") for _ in range(2)]
        path = DataPath("LIBFABRIC", (registry().get("neuron").describe(keep[1]).region,))
        assert "starts inside a page, where this libnrt exports no dma-buf" in self.warning(host, "dma-buf", path)
        set_up(host, Flavour.NATIVE, dmabuf=2)
        keep = [torch.zeros(3, device="neuron") for _ in range(2)]
        path = DataPath("LIBFABRIC", (registry().get("neuron").describe(keep[1]).region,))
        assert verdicts(host, "dma-buf", path) == []

    def test_shared_memory_that_no_peer_uses_yet(self, host: FakeHost) -> None:
        set_up(host)
        host.environ["FI_EFA_ENABLE_SHM_TRANSFER"] = "1"
        told = self.warning(host, "shared memory", DataPath("LIBFABRIC"))
        assert told.endswith("AWS warns of inaccurate output; set FI_EFA_ENABLE_SHM_TRANSFER=0 on both sides")


def test_cores_may_be_set_once_the_worker_has_done_it(host: FakeHost) -> None:
    host.modules.add("vllm_neuron")
    host.environ["NEURON_RT_VISIBLE_CORES"] = "3"
    set_up(host, Flavour.NATIVE)
    assert verdicts(host, "cores")[0][0] is Verdict.FAIL
    torch.zeros(1, device="neuron")
    assert verdicts(host, "cores")[0][0] is Verdict.PASS


def test_without_a_probe_no_library_is_opened(host: FakeHost) -> None:
    def load(name: str) -> object:
        raise AssertionError(f"{name} was opened")

    host.load = load  # type: ignore[method-assign]
    backend = NeuronBackend(host.machine())
    assert [check.name for check in backend.check(probe=False)]
    assert [check.name for check in backend.check_path(DataPath("LIBFABRIC"), probe=False)]


def test_memory_is_registered_to_the_byte(neuron: FakeNeuron) -> None:
    nixl = FakeNixl(neuron, lambda agent: MemoryTransport(Network(), agent))
    odd = torch.zeros(3, 1001, dtype=torch.uint8, device="neuron:1")
    cache = KVCache.of(odd.view(1, 3, 7, 143), "LBNC", model="m")
    with Producer(EndpointConfig(engine="p", nixl=LIBFABRIC), cache, transport=nixl):
        (told,) = nixl.registrations
    assert (told.address, told.length, told.device) == (odd.data_ptr(), 3003, 1)


def _without_chips(host: FakeHost) -> None:
    for folder in (host.root / "sys/bus/pci/devices").glob("0000:9*"):
        (folder / "vendor").write_text("0x8086")


def test_every_error_is_one_of_ours() -> None:
    assert issubclass(RegistrationError, PushKVError)
