"""The doctor on machines that are made up, with pushes that go as they are told to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.cpu import CpuBackend
from pushkv.cli import main
from pushkv.discovery import discover
from pushkv.doctor.examination import Doctor, Examined, Trial, try_push
from pushkv.doctor.report import as_json, as_text, healthy
from pushkv.errors import BackendError
from pushkv.plugins import Registry
from pushkv.testing.neuron.host import FakeHost

CMA = "[1.5] [vm:1:0]   | d self cfg#0    |\n[1.5] [vm:1:0]   | remote memory write by ucp_put* from host |\n"
LANES = CMA + "[1.5] [vm:1:0]   +---+\n[1.5] [vm:1:0]   | Range  | Description |  Config  |\n"


def lanes(config: str) -> str:
    """What UCX prints of a WRITE by these lanes."""
    return LANES + f"[1.5] [vm:1:0]   +---+\n[1.5] [vm:1:0]   | 0..inf | zero-copy   | {config} |\n"


def rails(provider: str, *, fallback: bool = False, more: str = "") -> str:
    """What NIXL's LIBFABRIC prints of the provider that it took."""
    devices = f"Discovered 1 {provider} devices{' (TCP fallback)' if fallback else ''}\n"
    return f"{devices}System runtime: SYSTEM (no accelerators)\nCreated 4 rails using provider={provider}\n{more}"


@dataclass
class Pushes:
    """Pushes that go as they are told to, and what was tried."""

    here: str = field(default_factory=lambda: lanes("cma/memory"))
    elsewhere: str = field(default_factory=lambda: lanes("tcp/eth0"))
    error: str = ""
    error_elsewhere: str = ""
    tried: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def __call__(self, backend: str, mover: str, environment: Mapping[str, str]) -> Trial:
        self.tried.append((backend, mover, dict(environment)))
        return Trial(self.error_elsewhere, self.elsewhere) if environment else Trial(self.error, self.here)


def examine(
    host: FakeHost, pushes: Pushes, *backends: str, movers: tuple[str, ...] = (), cpu: CpuBackend | None = None
) -> list[Examined]:
    known = Registry(discover({}))
    if cpu is not None:
        known.use(cpu)
    return Doctor(known, host.machine(), backends, movers, pushes).examine()


def check(found: list[Examined], name: str, backend: str = "cpu") -> tuple[Verdict, str]:
    (one,) = [one for one in found if one.entry.name == backend]
    ((verdict, told),) = [(c.verdict, c.found) for path in one.paths for c in path.checks if c.name == name]
    return verdict, told


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A host without accelerators and NICs."""
    return FakeHost(tmp_path)


def test_a_host_without_devices_pushes_host_memory(host: FakeHost) -> None:
    pushes = Pushes()
    found = examine(host, pushes)
    assert healthy(found)
    assert [(one.entry.name, one.considered) for one in found] == [("cpu", True), ("cuda", False), ("neuron", False)]
    assert pushes.tried == [("cpu", "UCX", {}), ("cpu", "UCX", {"UCX_TLS": "^sm,cma,cuda_ipc"})]
    assert check(found, "lanes on this host") == (Verdict.PASS, "UCX writes by cma/memory")
    assert check(found, "lanes to other hosts") == (Verdict.PASS, "UCX writes by tcp/eth0")


def test_a_push_that_fails_is_a_failure_with_its_words(host: FakeHost) -> None:
    found = examine(host, Pushes(error="NIXL is not installed in /usr; install it"))
    assert not healthy(found)
    assert check(found, "push") == (
        Verdict.FAIL, "a push between two processes failed: NIXL is not installed in /usr; install it"
    )  # fmt: skip


class TestEfa:
    """LIBFABRIC is what fits where there is EFA, and a fall-back is no line in a log."""

    @pytest.fixture
    def efa(self, host: FakeHost) -> FakeHost:
        host.add_nic("rdmap0s0", "0000:a0:1a.0")
        return host

    def test_it_is_used(self, efa: FakeHost) -> None:
        pushes = Pushes(here=rails("efa"))
        found = examine(efa, pushes)
        assert healthy(found)
        assert pushes.tried == [("cpu", "LIBFABRIC", {})]
        assert check(found, "provider in use") == (Verdict.PASS, "NIXL made 4 rails over provider efa")

    def test_a_fall_back_to_tcp_is_a_failure(self, efa: FakeHost) -> None:
        found = examine(efa, Pushes(here=rails("tcp", fallback=True)))
        assert not healthy(found)
        told = "NIXL fell back from EFA to provider tcp, some 1-3 GB/s"
        assert check(found, "provider in use") == (Verdict.FAIL, told)

    def test_another_provider_that_nobody_asked_for_is_a_failure(self, efa: FakeHost) -> None:
        assert check(examine(efa, Pushes(here=rails("verbs"))), "provider in use")[0] is Verdict.FAIL

    def test_tcp_that_was_asked_for_is_told(self, efa: FakeHost) -> None:
        efa.environ["FI_PROVIDER"] = "tcp"
        found = examine(efa, Pushes(here=rails("tcp", fallback=True)))
        assert healthy(found)
        assert check(found, "provider in use")[0] is Verdict.WARN

    def test_silence_is_told(self, efa: FakeHost) -> None:
        assert check(examine(efa, Pushes(here="")), "provider in use")[0] is Verdict.WARN

    def test_device_memory_that_went_as_the_hosts_is_a_failure(self, efa: FakeHost) -> None:
        more = (
            "VRAM memory requested but provider does not support FI_HMEM - falling back to system memory registration"
        )
        found = examine(efa, Pushes(here=rails("efa", more=more)))
        assert check(found, "registration")[0] is Verdict.FAIL
        assert not healthy(found)

    def test_ucx_that_goes_over_tcp_beside_a_nic_is_a_failure(self, efa: FakeHost) -> None:
        found = examine(efa, Pushes(elsewhere=lanes("52% on tcp/lo and 48% on tcp/eth0")), movers=("UCX",))
        verdict, told = check(found, "lanes to other hosts")
        assert verdict is Verdict.FAIL
        assert told == "UCX writes by 52% on tcp/lo and 48% on tcp/eth0, though there are RDMA devices (rdmap0s0)"
        found = examine(efa, Pushes(elsewhere=lanes("rc_mlx5/mlx5_0:1")), movers=("UCX",))
        assert check(found, "lanes to other hosts") == (Verdict.PASS, "UCX writes by rc_mlx5/mlx5_0:1")


def test_lanes_that_the_user_chose_are_left_alone(host: FakeHost) -> None:
    host.environ["UCX_TLS"] = "tcp"
    pushes = Pushes(here=lanes("tcp/lo"))
    assert healthy(examine(host, pushes))
    assert len(pushes.tried) == 1


def test_a_push_that_fails_by_the_lanes_to_other_hosts_is_a_failure(host: FakeHost) -> None:
    found = examine(host, Pushes(error_elsewhere="peer lost"))
    assert check(found, "lanes to other hosts")[0] is Verdict.FAIL
    assert not healthy(found)


def test_a_device_that_is_here_and_cannot_be_used_is_a_failure(tmp_path: Path) -> None:
    found = examine(FakeHost.gpus(tmp_path), Pushes())
    (cuda,) = [one for one in found if one.entry.name == "cuda"]
    assert cuda.considered
    assert not healthy(found)


def test_a_backend_that_was_asked_for_is_all_that_counts(host: FakeHost) -> None:
    assert not healthy(examine(host, Pushes(), "neuron"))
    assert healthy(examine(host, Pushes(), "cpu"))
    with pytest.raises(BackendError, match="no memory backend is named 'cdua'; there are: cpu, cuda, neuron"):
        examine(host, Pushes(), "cdua")


class Picky(CpuBackend):
    """Has no way over any data mover."""

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        return (Check("cable", Verdict.FAIL, "the cable is unplugged", "plug it in"),)


def test_what_the_backend_says_against_the_path_is_not_tried(host: FakeHost) -> None:
    pushes = Pushes()
    found = examine(host, pushes, cpu=Picky())
    assert pushes.tried == []
    assert not healthy(found)
    text = as_text(found)
    assert "  FAIL cable: the cable is unplugged\n       -> plug it in\n" in text
    assert text.endswith("As this machine is, a push would not work.")
    told = as_json(found)
    assert told["ok"] is False
    assert told["backends"][0]["paths"][0]["checks"] == [
        {"name": "cable", "verdict": "fail", "found": "the cable is unplugged", "remedy": "plug it in"}
    ]


def test_a_trial_that_crashes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = try_push("a backend that is none", "UCX", {})
    assert "no memory backend is named 'a backend that is none'" in trial.error
    trial = try_push("cpu", "UCX", {"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"})
    assert trial.error.startswith("its process ended with exit code 1: ")


@pytest.mark.processes
def test_here_a_push_of_host_memory_works(capsys: pytest.CaptureFixture[str]) -> None:
    """The real thing: two processes, NIXL, UCX's own word on its lanes."""
    assert main(["doctor", "--backend", "cpu", "--transport", "UCX", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (cpu,) = [one for one in told["backends"] if one["considered"]]
    by_name = {one["name"]: one for one in cpu["paths"][0]["checks"]}
    assert by_name["push"]["verdict"] == "pass"
    assert by_name["lanes on this host"]["found"].startswith("UCX writes by ")


def test_without_a_push_it_only_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--backend", "cpu", "--no-push"]) == 0
    assert capsys.readouterr().out == (
        "cpu: ready\n  ok   host memory: present\n"
        "cpu over UCX: nothing was found that stands in the way of a push (none was tried)\n"
        + "".join(line + "\n" for line in _not_considered())
        + "As this machine is, nothing was found that stands in the way of a push (none was tried).\n"
    )


def _not_considered() -> list[str]:
    from pushkv.plugins import registry

    known = registry()
    return [f"{e.name}: not here ({known.status(e, probe=True)})" for e in known.entries if e.name != "cpu"]
