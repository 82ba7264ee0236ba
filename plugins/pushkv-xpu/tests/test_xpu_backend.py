"""What the contract does not know about this device, and one push between two of them."""

from __future__ import annotations

import pytest
import torch
from pushkv_xpu import standin
from pushkv_xpu.backend import XpuBackend

from pushkv import Consumer, EndpointConfig, KVCache, Outcome, Producer, prompt_digest
from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.errors import BackendError
from pushkv.plugins import backend_for, registry
from pushkv.testing.host_backed import HostBackedTransport
from pushkv.transport.memory import MemoryTransport, Network

TOKENS = list(range(48))
DIGEST = prompt_digest(TOKENS)


@pytest.fixture
def runtime() -> standin.Runtime:
    return standin.Runtime()


def test_the_installed_distribution_brings_it() -> None:
    (entry,) = [entry for entry in registry().entries if entry.name == "xpu"]
    assert entry.source.startswith("pushkv-xpu ")
    assert entry.fault is None


def test_torch_without_an_xpu_says_what_to_do() -> None:
    if torch.xpu.is_available():
        pytest.skip("this machine has an XPU")
    devices = XpuBackend().check()[1]
    assert devices.verdict is Verdict.FAIL
    assert devices.found == "torch sees no XPU"
    with pytest.raises(BackendError, match="memory backend 'xpu' cannot be used: torch sees no XPU"):
        backend_for(standin.zeros((3,), torch.uint8))


def test_a_data_path_is_refused_before_it_is_tried(runtime: standin.Runtime) -> None:
    (check,) = XpuBackend(runtime).check_path(DataPath("UCX"))
    assert check == Check(
        "mover",
        Verdict.FAIL,
        "NIXL's UCX has no way to Intel GPU memory",
        "keep the cache that is pushed in host memory",
    )


def test_a_device_that_is_not_there_is_named(runtime: standin.Runtime) -> None:
    with pytest.raises(BackendError, match="XPU device 5 cannot be made current: invalid device ordinal 5"):
        XpuBackend(runtime).prepare_thread(5)


def test_work_that_failed_comes_out_of_its_fence(runtime: standin.Runtime) -> None:
    def fail() -> None:
        raise RuntimeError("the device is lost")

    runtime.submit(fail)
    fence = XpuBackend(runtime).fence()
    for ask in (fence.done, fence.wait):
        with pytest.raises(BackendError, match="work before a fence failed: the device is lost"):
            ask()


def test_a_push_waits_for_the_bytes(runtime: standin.Runtime) -> None:
    """Between two caches on the stand-in, by the in-process data mover: late bytes arrive, not the old ones."""
    registry().use(XpuBackend(runtime))
    arrays = [standin.zeros((2, 2, 8, 2, 16, 4), torch.float32) for _ in range(2)]
    prefill, decode = (KVCache.of(array, "LSBHNC", model="m") for array in arrays)
    assert prefill.home == ("VRAM", 0)
    network = Network(immediate=True)

    def mover(agent: str) -> HostBackedTransport:
        return HostBackedTransport(MemoryTransport(network, agent), lambda region: region.address)

    config = EndpointConfig(engine="prefill", transport="memory")
    with (
        Producer(config, prefill, transport=mover) as producer,
        Consumer(EndpointConfig(engine="decode", transport="memory"), decode, transport=mover) as consumer,
    ):
        link = consumer.connect(producer.address)
        transfer = consumer.offer("one", link, [5, 0, 2], prompt=DIGEST, prompt_tokens=len(TOKENS))
        kv = torch.randn(standin.host(arrays[0]).shape)
        runtime.submit(lambda: standin.host(arrays[0]).copy_(kv))
        producer.stage("one", [1, 2, 3], prompt=DIGEST, prompt_tokens=len(TOKENS))
        assert transfer.wait(30) is Outcome.COMPLETE, transfer.detail
    assert torch.equal(standin.host(arrays[1])[:, :, [5, 0, 2]], kv[:, :, [1, 2, 3]])
