"""Whether this memory can be pushed over this data mover, asked before it is tried, and why it was not taken."""

from __future__ import annotations

import logging

from pushkv.backends.answers import path_checks
from pushkv.backends.base import DataPath, Verdict
from pushkv.cache import KVCache
from pushkv.config import EndpointConfig
from pushkv.errors import BackendError, HandshakeError, RegistrationError, TransportError
from pushkv.transport.base import Host
from pushkv.transport.host import this_host

log = logging.getLogger(__name__)


def vet(config: EndpointConfig, cache: KVCache) -> None:
    """Ask the memory's backend about the data mover that the config names; warnings are logged.

    Raises BackendError with what was found and the remedy where a push would not work, or not safely.
    """
    if config.transport != "nixl":
        return
    backend, mover = cache.backend, config.nixl.backend
    for check in path_checks(backend, DataPath(mover, cache.regions)):
        if check.verdict is Verdict.FAIL:
            raise BackendError(f"memory of the backend {backend.name!r} cannot be pushed over {mover}: {check}")
        if check.verdict is Verdict.WARN:
            log.warning("memory of the backend %r over %s: %s", backend.name, mover, check)


def vet_peer(config: EndpointConfig, cache: KVCache, host: Host | None) -> None:
    """Refuse a peer that the memory cannot be pushed to or from. Raises HandshakeError with the remedy."""
    if config.transport != "nixl" or host is None or host.machine != this_host().machine:
        return
    path = DataPath(config.nixl.backend, same_machine=True)
    failed = next((one for one in path_checks(cache.backend, path, probe=False) if one.verdict is Verdict.FAIL), None)
    if failed is not None:
        raise HandshakeError(str(failed))


def not_registered(config: EndpointConfig, cache: KVCache, error: TransportError) -> RegistrationError:
    """The error for memory that the data mover did not take, with what the backend's checks say about it."""
    every = path_checks(cache.backend, DataPath(config.nixl.backend, cache.regions))
    suspects = [str(check) for check in every if check.verdict is not Verdict.PASS]
    told = f"; look at: {' · '.join(suspects)}" if suspects else ""
    return RegistrationError(f"memory of the backend {cache.backend.name!r} is not registered: {error}{told}")
