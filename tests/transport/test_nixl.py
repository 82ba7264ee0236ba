"""What is peculiar to the NIXL transport: finding it, its versions, its errors, its handles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pushkv.errors import ConfigError, PeerLost, TransportError, TransportUnavailable
from pushkv.testing.transport_contract import PIECE, Pair, TransportContract, connect
from pushkv.transport.base import Proof, WriteStatus
from pushkv.transport.host import this_host
from pushkv.transport.nixl import NixlSettings, NixlTransport
from pushkv.transport.nixl_errors import MEANING, is_peer_lost, nixl_errors, translate
from pushkv.transport.nixl_import import NixlModule, find_nixl, refuse_broken_writes
from pushkv.transport.nixl_path import Evidence, Lanes, describe

REAL = find_nixl()
NO_LANES = Lanes(frozenset(), ())


def module_with(agent: type[Any], version: tuple[int, ...] = REAL.version) -> NixlModule:
    """The real bindings with another agent class."""
    bindings = ModuleType("bindings")
    vars(bindings).update({name: getattr(REAL.bindings, name) for name in dir(REAL.bindings) if name[0] != "_"})
    vars(bindings)["nixlAgent"] = agent
    return NixlModule("altered", version, bindings)


def pair_with(producer_module: NixlModule, name: str) -> Pair:
    producer = NixlTransport(NixlSettings(f"prefill-{name}"), module=producer_module)
    return connect(producer, NixlTransport(NixlSettings(f"decode-{name}")), this_host())


class TestOldLists(TransportContract):
    """A version without strided rows keeps the contract."""

    def make_pair(self) -> Pair:
        return pair_with(NixlModule(REAL.module, (1, 4, 1), REAL.bindings), "flat")


class TestListsOlderThanTheVersionSays(TransportContract):
    """So does a build whose version promises strided rows that it lacks."""

    def make_pair(self) -> Pair:
        class Old(REAL.bindings.nixlAgent):  # type: ignore[name-defined, misc]
            def prepXferDlist(self, *arguments: Any) -> Any:
                if len(arguments) == 4:
                    raise TypeError("incompatible function arguments")
                return super().prepXferDlist(*arguments)

        return pair_with(module_with(Old), "old")


# -- finding it ---------------------------------------------------------------


def test_finding_nixl_imports_no_torch() -> None:
    code = (
        "import sys; from pushkv.transport.nixl import NixlTransport; "
        "from pushkv.transport.nixl_import import find_nixl; "
        "assert not any(name.startswith('nixl') for name in sys.modules); find_nixl(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_nixl_says_how_to_install_it() -> None:
    with pytest.raises(TransportUnavailable, match=r"pip install --no-deps nixl-cu12==1\.5\.1 && pip install numpy"):
        find_nixl(installed=lambda name: False)


def test_a_broken_nixl_says_what_broke() -> None:
    def fail(name: str) -> ModuleType:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    with pytest.raises(TransportUnavailable, match=r"nixl_cu13: libcudart\.so\.13"):
        find_nixl(import_module=fail, installed=lambda name: name == "nixl_cu13")


@pytest.mark.parametrize(
    ("torch_version", "first"),
    [
        (SimpleNamespace(cuda="13.0", hip=None), "nixl_cu13"),
        (SimpleNamespace(cuda="12.8", hip=None), "nixl_cu12"),
        (SimpleNamespace(cuda=None, hip="6.2"), "nixl_rocm"),
        (SimpleNamespace(cuda=None, hip=None), "nixl_cu12"),
    ],
)
def test_an_imported_torch_decides(monkeypatch: pytest.MonkeyPatch, torch_version: object, first: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=torch_version))
    found = find_nixl(import_module=lambda name: ModuleType(name), installed=lambda name: True)
    assert found.module == first


@pytest.mark.parametrize("version", [(1, 2, 0), (1, 3, 1), (0, 10), ()])
def test_writes_over_efa_are_refused_before_1_3_2(version: tuple[int, ...]) -> None:
    old = NixlModule("nixl_old", version, REAL.bindings)
    with pytest.raises(TransportUnavailable, match=r"flushing.*use NIXL 1\.3\.2 or later"):
        NixlTransport(NixlSettings("efa", backend="LIBFABRIC"), module=old)
    refuse_broken_writes(old, "UCX", {})
    refuse_broken_writes(old, "LIBFABRIC", {"FI_PROVIDER": "tcp"})
    refuse_broken_writes(NixlModule("nixl_new", (1, 3, 2), REAL.bindings), "LIBFABRIC", {})


def test_a_backend_that_does_not_load_says_what_it_needs() -> None:
    class Unloadable(REAL.bindings.nixlAgent):  # type: ignore[name-defined, misc]
        def createBackend(self, *arguments: Any) -> Any:
            raise REAL.bindings.nixlNotFoundError("NIXL_ERR_NOT_FOUND")

    with pytest.raises(TransportUnavailable, match=r"cannot start its backend LIBFABRIC.*libfabric\.so\.1"):
        NixlTransport(NixlSettings("x", backend="LIBFABRIC"), module=module_with(Unloadable))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"agent": ""}, "epoch"),
        ({"agent": "a", "backend": "UXC"}, "'UXC'; use one of UCX, LIBFABRIC"),
        ({"agent": "a", "parameters": {"num_workers": 2}}, "num_workers"),
        ({"agent": "a", "parameters": {"ucx_error_handling_mode": "none"}}, "must stay 'peer'"),
        ({"agent": "a", "progress_thread_delay_us": -1}, "-1"),
        ({"agent": "a", "backend": "LIBFABRIC", "progress_thread": False}, "hangs"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NixlSettings(**settings)


def test_parameters_reach_the_backend() -> None:
    seen: list[tuple[str, dict[str, str]]] = []

    class Spy(REAL.bindings.nixlAgent):  # type: ignore[name-defined, misc]
        def createBackend(self, backend: str, parameters: dict[str, str]) -> Any:
            seen.append((backend, parameters))
            return super().createBackend(backend, parameters)

    NixlTransport(NixlSettings("spy", parameters={"num_workers": "2"}), module=module_with(Spy)).claim()
    assert seen == [("UCX", {"num_workers": "2"})]


# -- errors ---------------------------------------------------------------------


def test_every_exception_of_the_bindings_is_known() -> None:
    raised = {name for name in dir(REAL.bindings) if name.endswith("Error")}
    assert raised == set(MEANING)
    assert len(nixl_errors(REAL.bindings)) == 12


@pytest.mark.parametrize("name", sorted(MEANING))
def test_every_exception_is_translated(name: str) -> None:
    error = getattr(REAL.bindings, name)("NIXL_ERR")
    translated = translate(error, "do it")
    assert isinstance(translated, TransportError)
    assert isinstance(translated, PeerLost) is (name == "nixlRemoteDisconnectError") is is_peer_lost(error)
    assert "do it" in str(translated)
    assert name in str(translated)


class Flaky(REAL.bindings.nixlAgent):  # type: ignore[name-defined, misc]
    """An agent whose posts and states go as told, and which counts what is released."""

    post: str | None = None
    state: str | None = None
    released = 0

    def postXferReq(self, *arguments: Any) -> Any:
        if Flaky.post is not None:
            raise getattr(REAL.bindings, Flaky.post)("NIXL_ERR")
        return super().postXferReq(*arguments)

    def getXferStatus(self, handle: int) -> Any:
        if Flaky.state == "stuck":
            return REAL.bindings.NIXL_IN_PROG
        if Flaky.state is not None:
            raise getattr(REAL.bindings, Flaky.state)("NIXL_ERR")
        return super().getXferStatus(handle)

    def releaseXferReq(self, handle: int) -> Any:
        Flaky.released += 1
        return super().releaseXferReq(handle)


@pytest.fixture
def flaky() -> Iterator[Pair]:
    Flaky.post = Flaky.state = None
    Flaky.released = 0
    pair = pair_with(module_with(Flaky), "flaky")
    yield pair
    pair.close()


def write(pair: Pair) -> int:
    agent = pair.consumer.transport.agent
    return pair.producer.transport.write(agent, pair.producer.pieces((0, 64)), pair.consumer.pieces((0, 64)), b"x")


@pytest.mark.parametrize("where", ["post", "state"])
def test_a_failure_after_the_hand_over_is_a_result(flaky: Pair, where: str) -> None:
    setattr(Flaky, where, "nixlBackendError")
    number = write(flaky)
    (result,) = flaky.producer.transport.poll()
    assert (result.write, result.status, result.peer_lost, result.reached) == (
        number,
        WriteStatus.FAILED,
        False,
        True,
    )
    assert "nixlBackendError" in result.error
    assert flaky.producer.transport.poll() == []
    assert Flaky.released == 0, "a released handle's bytes still travel"
    setattr(Flaky, where, None)
    assert flaky.finish(write(flaky)).status is WriteStatus.DONE
    assert Flaky.released == 1
    flaky.producer.transport.close()
    assert Flaky.released == 2


@pytest.mark.parametrize("where", ["post", "state"])
def test_a_lost_peer_is_remembered_until_it_is_removed(flaky: Pair, where: str) -> None:
    setattr(Flaky, where, "nixlRemoteDisconnectError")
    write(flaky)
    (result,) = flaky.producer.transport.poll()
    assert result.status is WriteStatus.FAILED
    assert result.peer_lost
    setattr(Flaky, where, None)
    agent = flaky.consumer.transport.agent
    with pytest.raises(PeerLost):
        write(flaky)
    with pytest.raises(PeerLost):
        flaky.producer.transport.send(agent, b"x")
    assert flaky.producer.transport.writes_ended(agent) is Proof.NONE, "a disconnect is no proof"
    flaky.producer.transport.remove_peer(agent)
    flaky.producer.transport.add_peer(flaky.consumer.transport.metadata(), None)
    assert flaky.finish(write(flaky)).status is WriteStatus.DONE


def test_removing_a_peer_fails_its_writes_in_flight(flaky: Pair) -> None:
    Flaky.state = "stuck"
    number = write(flaky)
    assert flaky.producer.transport.poll() == []
    flaky.producer.transport.remove_peer(flaky.consumer.transport.agent)
    (result,) = flaky.producer.transport.poll()
    assert (result.write, result.status, result.reached) == (number, WriteStatus.FAILED, True)
    assert Flaky.released == 0


# -- the rest ---------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = pair_with(REAL, "plain")
    yield pair
    pair.close()


def test_strided_indices_in_any_order_and_type(pair: Pair) -> None:
    transport = pair.producer.transport
    prepared = transport.prepare(
        pair.consumer.transport.agent, pair.producer.lattice((0, PIECE, 64)), pair.consumer.lattice((0, PIECE, 64))
    )
    order = np.random.default_rng(1).permutation(64)[::2]
    write = transport.write_indexed(prepared, order.astype(np.int64)[::-1], order[::-1], b"x")  # type: ignore[arg-type]
    pair.finish(write)
    for i in order:
        np.testing.assert_array_equal(
            pair.consumer.memory[i * PIECE :][:PIECE], pair.producer.memory[i * PIECE :][:PIECE]
        )


def test_a_large_notification_passes(pair: Pair) -> None:
    payload = bytes(1 << 20)
    pair.producer.transport.send(pair.consumer.transport.agent, payload)
    assert pair.payloads(1) == [payload]


def test_a_sender_without_a_readable_name_costs_its_batch_alone(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    bindings = REAL.bindings
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.syncMode = bindings.NIXL_THREAD_SYNC_RW
    config.pthrDelay = 1000
    stranger = bindings.nixlAgent(b"\xff\xfe", config)
    stranger.createBackend("UCX", {})
    stranger.loadRemoteMD(pair.consumer.transport.metadata())
    stranger.genNotif(pair.consumer.transport.agent, b"hello")
    pair.until(lambda: "not UTF-8" in caplog.text)
    assert not pair.arrived
    pair.producer.transport.send(pair.consumer.transport.agent, b"after it")
    pair.until(lambda: bool(pair.arrived))
    assert pair.arrived == [(pair.producer.transport.agent, b"after it")]


def test_without_telemetry_the_count_is_unknown() -> None:
    settings = NixlSettings("prefill-quiet", capture_telemetry=False)
    pair = connect(NixlTransport(settings), NixlTransport(NixlSettings("decode-quiet")))
    number = write(pair)
    assert pair.finish(number).status is WriteStatus.DONE
    assert pair.producer.transport.descriptors(number) is None
    pair.close()


@pytest.mark.parametrize(
    ("tls", "devices", "rdma", "cma"),
    [
        ("all", (), False, True),
        ("all", ("mlx5_0",), True, True),
        ("tcp", ("mlx5_0",), False, False),
        ("tcp,cma", ("mlx5_0",), False, True),
        ("tcp,sm,self", ("mlx5_0",), False, True),
        ("rc,tcp", ("mlx5_0",), True, False),
        ("^ib", ("mlx5_0",), True, False),
    ],
)
def test_the_lanes_are_bounded_by_environment_and_devices(
    tls: str, devices: tuple[str, ...], rdma: bool, cma: bool
) -> None:
    lanes = Lanes.of(tls, devices)
    assert (lanes.rdma, lanes.cma) == (rdma, cma)


def test_the_path_says_what_it_does_not_know(pair: Pair) -> None:
    assert pair.producer.transport.path(pair.consumer.transport.agent) in (
        "UCX: cma, notifications over tcp",
        "UCX: tcp",
        "UCX: RDMA (mlx5_0) or less; UCX does not say which",
    )
    assert "does not say" in describe("UCX", Lanes.of("all", ("mlx5_0",)), None, device_memory=False)
    assert "does not say" in describe("UCX", NO_LANES, None, device_memory=True)
    assert describe("UCX", NO_LANES, None, device_memory=False) == "UCX: tcp, or cma if the peer is on this machine"
    assert describe("UCX", Lanes.of("tcp", ()), None, device_memory=False) == "UCX: tcp"
    assert describe("LIBFABRIC", NO_LANES, None, device_memory=False).startswith("LIBFABRIC: provider")


class _Dead:
    same_network = True

    def dead(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("backend", "lanes", "device_memory"),
    [("LIBFABRIC", NO_LANES, False), ("UCX", Lanes.of("all", ("mlx5_0",)), False), ("UCX", NO_LANES, True)],
)
def test_death_alone_proves_nothing_elsewhere(backend: str, lanes: Lanes, device_memory: bool) -> None:
    evidence = Evidence(backend, lanes)
    for _ in range(3):
        assert evidence.of_death("peer", _Dead(), device_memory=device_memory) is Proof.NONE  # type: ignore[arg-type]
    assert evidence.of_death("peer", None, device_memory=False) is Proof.NONE
