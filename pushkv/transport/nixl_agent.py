"""Making a NIXL agent: its settings, its threads, its backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pushkv.errors import ConfigError, TransportUnavailable
from pushkv.transport.nixl_errors import nixl_errors
from pushkv.transport.nixl_import import NixlModule, refuse_broken_writes

BACKENDS = ("UCX", "LIBFABRIC")
IDLE_IS_FREE_US = 10_000
"""With this delay the progress thread costs about 0.3 % of a core (2 % at 1,000); latency stays the same, as what
arrives wakes it."""


@dataclass(frozen=True)
class NixlSettings:
    """How an agent is made.

    ``agent`` is its name and must contain the epoch, since NIXL refuses a name's second life.
    ``parameters`` go to the backend as they are. Raises ConfigError.
    """

    agent: str
    backend: str = "UCX"
    parameters: Mapping[str, str] = field(default_factory=dict)
    progress_thread: bool = True
    progress_thread_delay_us: int = IDLE_IS_FREE_US
    capture_telemetry: bool = True

    def __post_init__(self) -> None:
        if not self.agent:
            raise ConfigError("The agent's name is empty; give it one that contains the epoch.")
        if self.backend not in BACKENDS:
            raise ConfigError(f"NIXL has no memory backend {self.backend!r}; use one of {', '.join(BACKENDS)}.")
        for key, value in self.parameters.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise ConfigError(f"Backend parameter {key!r} is {value!r}; NIXL takes strings, so quote it.")
        if self.parameters.get("ucx_error_handling_mode", "peer") != "peer":
            raise ConfigError(
                "ucx_error_handling_mode must stay 'peer': in any other, a peer's death is not reported and its "
                "WRITEs may take lanes that prove nothing; leave the parameter out."
            )
        if self.progress_thread_delay_us < 0:
            raise ConfigError(f"progress_thread_delay_us is {self.progress_thread_delay_us}; use {IDLE_IS_FREE_US}.")
        if self.backend == "LIBFABRIC" and not self.progress_thread:
            raise ConfigError("LIBFABRIC hangs without its progress thread; leave progress_thread on.")


def make_agent(nixl: NixlModule, settings: NixlSettings) -> Any:
    """Make the agent with its one backend. Raises TransportUnavailable saying what to install or change."""
    refuse_broken_writes(nixl, settings.backend)
    # UCX connects to a peer as it loads its metadata: without this the call lasts as long as the kernel tries, two
    # minutes where nothing answers, and nobody else is served meanwhile.
    os.environ.setdefault("UCX_TCP_CONN_NB", "y")
    bindings: Any = nixl.bindings
    config = bindings.nixlAgentConfig()
    config.useProgThread = settings.progress_thread
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_RW
    config.pthrDelay = settings.progress_thread_delay_us
    config.captureTelemetry = settings.capture_telemetry
    agent = bindings.nixlAgent(settings.agent, config)
    _load_backend(nixl, settings, agent)
    return agent


def _load_backend(nixl: NixlModule, settings: NixlSettings, agent: Any) -> None:
    """Load the backend: that it is listed says nothing, only that a file lies there."""
    try:
        agent.createBackend(settings.backend, dict(settings.parameters))
    except nixl_errors(nixl.bindings) as error:
        plugins = agent.getAvailPlugins()
        listed = settings.backend in plugins
        hint = _LOAD_HINTS[settings.backend] if listed else f"this build has only {', '.join(plugins)}."
        raise TransportUnavailable(
            f"NIXL {nixl.version_text} cannot start its backend {settings.backend} ({type(error).__name__}): {hint}"
        ) from error


_LOAD_HINTS = {
    "UCX": "see UCX_TLS and UCX_LOG_LEVEL=info; shared memory or cma alone are not enough in error mode peer.",
    "LIBFABRIC": "it needs libcuda.so.1, libcudart, libhwloc.so.15 and the libfabric.so.1 NIXL was built with.",
}
