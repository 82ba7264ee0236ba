"""Fences by what the platform offers, and what is left of them when it fails."""

from __future__ import annotations

import threading

import pytest
import torch

from pushkv.backends.neuron import NeuronBackend
from pushkv.backends.neuron_fence import EventFence, ReadFence
from pushkv.errors import BackendError
from pushkv.testing.neuron import FakeHost, FakeNeuron, Flavour


def test_the_native_backend_has_events(host: FakeHost) -> None:
    FakeNeuron(host, Flavour.NATIVE).install()
    assert isinstance(NeuronBackend(host.machine()).fence(), EventFence)


def test_without_events_it_synchronizes(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNeuron(host).install()
    monkeypatch.setattr(torch.neuron, "synchronize", fake.synchronize, raising=False)
    tensor = torch.ones(4, device="neuron")
    fence = NeuronBackend(host.machine()).fence()
    assert isinstance(fence, ReadFence)
    fence.wait()
    assert tensor.host.tolist() == [1.0] * 4


def test_with_neither_it_reads_and_needs_an_array(host: FakeHost) -> None:
    FakeNeuron(host).install()
    backend = NeuronBackend(host.machine())
    assert isinstance(backend.fence(torch.ones(4, device="neuron")), ReadFence)
    with pytest.raises(BackendError, match="a fence has to read from an array that the work writes; pass one"):
        backend.fence()


def test_an_empty_array_has_nothing_to_wait_for(host: FakeHost) -> None:
    FakeNeuron(host).install()
    NeuronBackend(host.machine()).fence(torch.ones(0, 4, device="neuron")).wait()


@pytest.mark.parametrize("flavour", list(Flavour), ids=lambda one: one.name.lower())
def test_work_that_failed_comes_out_of_its_fence(host: FakeHost, flavour: Flavour) -> None:
    fake = FakeNeuron(host, flavour).install()

    def fail(host: object) -> None:
        raise RuntimeError("NRT_EXEC_BAD_INPUT\nand more")

    kv = torch.zeros(4, device="neuron")
    fake.synchronize()
    fake.run_graph(fail, kv)
    fence = NeuronBackend(host.machine()).fence(kv)
    with pytest.raises(BackendError, match="work before a fence failed: NRT_EXEC_BAD_INPUT; restart the process"):
        fence.wait()


def test_done_does_not_block_while_the_read_does(host: FakeHost) -> None:
    fake = FakeNeuron(host).install()
    kv, gate = torch.zeros(4, device="neuron"), threading.Event()
    fake.synchronize()
    fake.run_graph(lambda host: (gate.wait(30), host.fill_(1)), kv)
    fence = NeuronBackend(host.machine()).fence(kv)
    assert [fence.done() for _ in range(3)] == [False] * 3
    gate.set()
    fence.wait()
    assert kv.host.tolist() == [1.0] * 4


def test_closing_ends_the_reading_thread_and_it_can_be_asked_again(host: FakeHost) -> None:
    FakeNeuron(host).install()
    backend = NeuronBackend(host.machine())
    before = set(threading.enumerate())
    backend.fence(torch.ones(1, device="neuron")).wait()
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "pushkv-neuron-reader"
    backend.close()
    thread.join(30)
    assert not thread.is_alive()
    backend.fence(torch.ones(1, device="neuron")).wait()
    backend.close()
