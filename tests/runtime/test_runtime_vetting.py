"""What the memory's backend says against a data path keeps an endpoint from being made, or a peer from being met."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from scene import cache_of, memory_of

from pushkv import Consumer, EndpointConfig, KVCache, Producer
from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.cpu import CpuBackend
from pushkv.core.memory import Region
from pushkv.errors import BackendError, HandshakeError, RegistrationError, TransportError
from pushkv.transport.memory import MemoryTransport, Network

NO = Check("cable", Verdict.FAIL, "the cable is unplugged", "plug it in")
HARDLY = Check("cable", Verdict.WARN, "the cable is loose", "push it in")


class Picky(CpuBackend):
    """Has something to say about data paths; ``asked`` are those it was asked about."""

    def __init__(self, *, always: Sequence[Check] = (), on_one_machine: Sequence[Check] = ()) -> None:
        self.always, self.on_one_machine = tuple(always), tuple(on_one_machine)
        self.asked: list[DataPath] = []

    def check_path(self, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
        self.asked.append(path)
        return self.always + (self.on_one_machine if path.same_machine else ())


def picky(**checks: Sequence[Check]) -> KVCache:
    return replace(cache_of(memory_of()), backend=Picky(**checks))


def make(role: type[Producer] | type[Consumer], cache: KVCache, network: Network, **settings: str) -> object:
    config = EndpointConfig(engine=role.__name__, **settings)  # type: ignore[arg-type]
    return role(config, cache, transport=lambda agent: MemoryTransport(network, agent))


@pytest.mark.parametrize("role", [Producer, Consumer])
def test_an_endpoint_is_not_made_where_a_push_would_not_work(role: type[Producer] | type[Consumer]) -> None:
    cache, before = picky(always=[HARDLY, NO]), threading.active_count()
    told = "memory of the backend 'cpu' cannot be pushed over UCX: the cable is unplugged; plug it in"
    with pytest.raises(BackendError, match=told):
        make(role, cache, Network(immediate=True))
    assert cache.backend.asked == [DataPath("UCX", cache.regions)]  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_another_data_mover_is_none_of_its_business() -> None:
    cache = picky(always=[NO])
    with make(Producer, cache, Network(immediate=True), transport="memory"):  # type: ignore[attr-defined]
        assert cache.backend.asked == []  # type: ignore[attr-defined]


def test_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with make(Producer, picky(always=[HARDLY]), Network(immediate=True)):  # type: ignore[attr-defined]
        assert "memory of the backend 'cpu' over UCX: the cable is loose; push it in" in caplog.text


@pytest.mark.parametrize("picky_side", ["producer", "consumer"])
def test_a_peer_that_cannot_be_pushed_to_is_refused_with_the_remedy(picky_side: str) -> None:
    network = Network(immediate=True)
    caches = {side: picky(on_one_machine=[NO] if side == picky_side else []) for side in ("producer", "consumer")}
    with (
        make(Producer, caches["producer"], network) as producer,
        make(Consumer, caches["consumer"], network) as consumer,
    ):  # type: ignore[attr-defined]
        with pytest.raises(HandshakeError, match="the cable is unplugged; plug it in"):
            consumer.connect(producer.address)
        assert not consumer._side.agents


class Refuses(MemoryTransport):
    """Takes no memory."""

    closed = False

    def register(self, regions: Sequence[Region]) -> None:
        raise TransportError("NIXL could not register it (nixlBackendError: NIXL_ERR_BACKEND): the backend failed.")

    def close(self) -> None:
        Refuses.closed = True
        super().close()


def test_memory_that_is_not_taken_is_told_with_what_to_look_at() -> None:
    network, before = Network(immediate=True), threading.active_count()
    with pytest.raises(
        RegistrationError, match=r"'cpu' is not registered: .*NIXL_ERR_BACKEND.*look at: the cable is l"
    ):
        Producer(EndpointConfig(engine="p"), picky(always=[HARDLY]), transport=lambda agent: Refuses(network, agent))
    assert Refuses.closed
    assert threading.active_count() == before
