"""Making the data mover that a config names."""

from __future__ import annotations

from collections.abc import Callable

from pushkv.config import EndpointConfig
from pushkv.errors import ConfigError
from pushkv.transport.base import Transport

TransportFactory = Callable[[str], Transport]
"""Makes the data mover of an agent with this name."""


def transport_factory(config: EndpointConfig) -> TransportFactory:
    """What makes this config's data movers. Raises ConfigError where it cannot be made from a config alone."""
    if config.transport != "nixl":
        raise ConfigError(
            "transport 'memory' works inside one process: pass transport=lambda a: MemoryTransport(net, a)"
        )

    def make(agent: str) -> Transport:
        from pushkv.transport.nixl import NixlSettings, NixlTransport

        nixl = config.nixl
        return NixlTransport(
            NixlSettings(
                agent,
                backend=nixl.backend,
                parameters=nixl.parameters,
                progress_thread_delay_us=nixl.progress_thread_delay_us,
            )
        )

    return make
