"""Both transports keep one contract."""

from __future__ import annotations

import itertools

from pushkv.testing.transport_contract import Pair, TransportContract, connect
from pushkv.transport.host import this_host
from pushkv.transport.memory import MemoryTransport, Network
from pushkv.transport.nixl import NixlSettings, NixlTransport

_epoch = itertools.count()


class TestMemory(TransportContract):
    """On the virtual clock."""

    def make_pair(self) -> Pair:
        network = Network()
        pair = connect(MemoryTransport(network, "prefill"), MemoryTransport(network, "decode"))
        pair.settle = network.settle
        return pair


class TestMemoryImmediate(TransportContract):
    """Without anybody turning the clock."""

    def make_pair(self) -> Pair:
        network = Network(immediate=True)
        return connect(MemoryTransport(network, "prefill"), MemoryTransport(network, "decode"))


class TestNixl(TransportContract):
    """Two agents in this process, over UCX."""

    def make_pair(self) -> Pair:
        epoch = next(_epoch)
        producer, consumer = (NixlTransport(NixlSettings(f"{side}-{epoch}")) for side in ("prefill", "decode"))
        return connect(producer, consumer, this_host())
