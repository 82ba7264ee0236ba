"""The connector's settings, from ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pushkv.config import EndpointConfig, NixlConfig, read_config
from pushkv.core.limits import Limits
from pushkv.errors import ConfigError

Layout = Literal["block", "engine", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
Landing = Literal["device", "auto", "direct", "landing"]
GPU_SLOT = 256 << 20
"""Bytes of a slot on a GPU: what is done for a part takes longer than copying a small one."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may stand in ``kv_connector_extra_config``.

    Where this engine is reached: ``host`` is what its ranks listen on and ``advertise`` what they tell others, by
    default the same. A prefill engine's first rank listens on ``port`` plus its data-parallel rank; all other ranks
    take any free port, which peers learn from the first. ``key_file``, ``allow``, ``peers`` and
    ``listen_to_the_network_without_a_key`` are :class:`pushkv.EndpointConfig`'s.

    ``producers`` maps prefill engines' ids to ``host:port``, for requests that name an engine alone; these are
    connected to at the start. ``deadline`` is by when a request's KV is there or has failed, in seconds from its
    offer, ``hold`` how long a prefill engine keeps a computed prompt for an offer, ``connect_timeout`` how long a
    first connection may take. ``silence`` and ``stall`` are :class:`pushkv.EndpointConfig`'s: after how many seconds
    a peer without a word counts as lost, and a call into the data mover as stuck; longer ones suit a machine whose
    processors are taken.

    ``landing``, ``landing_bytes`` and ``slot_bytes`` are :class:`pushkv.EndpointConfig`'s. By default GPUs get
    ``auto`` with four slots of 256 MiB, whose memory is taken beside the engine's, and everything else ``direct``.

    ``stream`` is a prefill engine's: what leaves while a prompt is computed. ``chunk``: what each step adds;
    ``layer``: also layers of the step that runs, unless it is in a CUDA graph of the whole model, where nobody is
    told of layers; ``auto``: that on GPUs in steps of 32 MiB of KV and more, else as ``chunk``, and keeps parts of
    less than 4 MiB for the next; ``request``: nothing.

    ``layout`` is what is asked of the engine: ``block`` for blocks outermost wherever it can, ``engine`` for what it
    takes by itself, or one of its own names. ``model`` names what both engines must have in common, by default a
    digest of the model's configuration. ``idle_wait`` is for how many seconds the scheduler may sleep in a step
    without tokens; 0 never. ``switch_interval`` is after how many seconds Python takes the interpreter from a thread
    of a worker's that another waits for (:func:`sys.setswitchinterval`; 0.005 by itself): at worst the transfer
    thread waits so long whenever a call into the data mover returns; 0 leaves it as it is. ``nixl`` and ``limits``
    are :class:`pushkv.NixlConfig`'s and :class:`pushkv.Limits`'.
    """

    host: str = "127.0.0.1"
    port: int = 7100
    advertise: str = ""
    key_file: str = ""
    allow: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    listen_to_the_network_without_a_key: bool = False
    producers: dict[str, str] = {}
    deadline: float = 120.0
    hold: float = 120.0
    connect_timeout: float = 10.0
    silence: float = 5.0
    stall: float = 5.0
    layout: Layout = "block"
    landing: Landing = "device"
    landing_bytes: int = 0
    slot_bytes: int = 0
    model: str = ""
    stream: Literal["auto", "request", "chunk", "layer"] = "auto"
    idle_wait: float = 0.003
    switch_interval: float = 0.0002
    nixl: NixlConfig = NixlConfig()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        for name in ("deadline", "hold", "connect_timeout", "silence", "stall"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"{name} is {getattr(self, name)}; give seconds above 0, at most a day.")
        if not 0 <= self.idle_wait <= 0.1:
            raise ConfigError(f"idle_wait is {self.idle_wait}; give seconds from 0 to 0.1.")
        if not 0 <= self.switch_interval <= 0.1:
            raise ConfigError(f"switch_interval is {self.switch_interval}; give seconds from 0 to 0.1.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give one from 0 (any free one) to 65535.")

    def endpoint(self, engine: str, rank: int, port: int, device: str) -> EndpointConfig:
        """The settings of one rank's endpoint; ``device`` is the type of what its cache lies on."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        told = f"[{self.advertise}]" if ":" in self.advertise else self.advertise
        return EndpointConfig(
            engine=engine,
            rank=rank,
            bind=f"{host}:{port}",
            advertise=f"{told}:0" if told else "",
            peers=self.peers,
            key_file=self.key_file,
            allow=self.allow,
            listen_to_the_network_without_a_key=self.listen_to_the_network_without_a_key,
            connect_timeout=self.connect_timeout,
            silence=self.silence,
            stall=self.stall,
            nixl=self.nixl,
            limits=self.limits,
            stream=self.stream,
            # vLLM shares whole blocks only, so that the last one of a prompt is its request's alone.
            free_tail=True,
            layers=self.layers(device),
            **self._by_device(device),
            # The connector pins what waits for proof; the engine sees by its free blocks how much that is.
            quarantine_limit=1.0,
        )

    def layers(self, device: str) -> bool:
        """Whether a prefill engine on this type of device stages layers of a step."""
        return self.stream == "layer" or (self.stream == "auto" and device == "cuda")

    def _by_device(self, device: str) -> dict[str, Any]:
        gpu = device == "cuda"
        way = self.landing if self.landing != "device" else "auto" if gpu else "direct"
        slot = self.slot_bytes or (GPU_SLOT if gpu else 0)
        sizes = {"landing_bytes": self.landing_bytes or (4 * slot if slot else 0), "slot_bytes": slot}
        return {"landing": way, **{name: size for name, size in sizes.items() if size}}


def read_settings(extra: Mapping[str, Any] | None) -> Settings:
    """The settings in ``kv_connector_extra_config``. Raises ConfigError naming what is wrong."""
    return read_config(Settings, extra or {})
