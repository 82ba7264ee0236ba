"""The doctor on a Trn2 that is made up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pushkv.backends.base import Verdict
from pushkv.backends.neuron import NeuronBackend
from pushkv.discovery import discover
from pushkv.doctor.examination import Doctor, Examined, Trial
from pushkv.doctor.report import healthy
from pushkv.plugins import Registry
from pushkv.testing.neuron import FakeHost, FakeNeuron

EFA = "Discovered 2 efa devices\nSystem runtime: NEURON for 2 devices\nCreated 2 rails using provider=efa\n"
SILENT = "VRAM memory requested but provider does not support FI_HMEM - falling back to system memory registration\n"


def examine(host: FakeHost, log: str, error: str = "") -> tuple[bool, Examined, list[tuple[str, str]]]:
    """Whether a push works, what was found about neuron, and what was tried."""
    FakeNeuron(host).install()
    known = Registry(discover({"PUSHKV_DISABLE": "cpu"}))
    known.use(NeuronBackend(host.machine()))
    tried: list[tuple[str, str]] = []

    def push(backend: str, mover: str, environment: Mapping[str, str]) -> Trial:
        tried.append((backend, mover))
        return Trial(error, log)

    found = Doctor(known, host.machine(), try_push=push).examine()
    (neuron,) = [one for one in found if one.entry.name == "neuron"]
    return healthy(found), neuron, tried


def failures(neuron: Examined) -> list[str]:
    every = [*neuron.status.checks, *(check for path in neuron.paths for check in path.checks)]
    return [str(check) for check in every if check.verdict is Verdict.FAIL]


def test_a_sound_trn2_pushes_over_libfabric(host: FakeHost) -> None:
    ok, neuron, tried = examine(host, EFA)
    assert ok
    assert neuron.considered
    assert tried == [("neuron", "LIBFABRIC")]


def test_a_trn2_3xlarge_does_not(tmp_path: Path) -> None:
    ok, neuron, tried = examine(FakeHost.trn2(tmp_path, chips=1, nics=0), EFA)
    assert not ok
    assert tried == []
    assert "(not a trn2.3xlarge)" in failures(neuron)[0]


def test_a_chip_that_cannot_be_used_is_a_failure(host: FakeHost) -> None:
    host.add_nvidia_gpu()
    ok, neuron, _ = examine(host, EFA)
    assert not ok
    assert "NIXL chooses CUDA" in failures(neuron)[0]


def test_memory_that_went_as_the_hosts_is_a_failure_although_nothing_else_is(host: FakeHost) -> None:
    ok, neuron, _ = examine(host, EFA + SILENT)
    assert not ok
    assert failures(neuron)[0].startswith("NIXL registered device memory as host memory, without an error")
