"""Settings of the router, checked when they are made."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import Enum
from urllib.parse import urlsplit

from pushkv.errors import ConfigError


class Mode(Enum):
    """In which order the two legs of a request go."""

    PUSH = "push"
    """Both at once; decode offers its blocks while prefill computes."""
    SEQUENTIAL = "sequential"
    """Prefill first; what it answers as ``kv_transfer_params`` goes to decode (the way of connectors that pull)."""


class Shape(Enum):
    """Whose ``kv_transfer_params`` are sent when both legs go at once."""

    PUSHKV = "pushkv"
    STOCK = "stock"
    """vLLM's ``NixlPushConnector``."""


@dataclass(frozen=True)
class PrefillServer:
    """A prefill server: where its API is, and what decode is told of it.

    ``kv_host`` and ``kv_port`` are its connector's control address, ``tp`` and ``dp`` its tensor and data parallel
    sizes.
    """

    url: str
    kv_host: str = ""
    kv_port: int = 0
    engine: str = ""
    tp: int = 1
    dp: int = 1


@dataclass(frozen=True)
class DecodeServer:
    """A decode server: where its API is."""

    url: str


@dataclass(frozen=True)
class RouterConfig:
    """All settings. Times are in seconds, sizes in bytes. Raises ConfigError for what cannot be.

    ``attempts`` is how often a request is dispatched before it fails. ``patience`` is how long a request waits for a
    healthy server. ``silence`` bounds the wait for a stream's first and next event and for a prefill leg,
    ``answer_limit`` the wait for an answer that is not streamed, ``client_stall`` how long a client may leave unread
    what it asked for.
    """

    prefill: tuple[PrefillServer, ...]
    decode: tuple[DecodeServer, ...]
    mode: Mode = Mode.PUSH
    shape: Shape = Shape.PUSHKV
    host: str = "127.0.0.1"
    port: int = 8000
    attempts: int = 2
    decode_alone: bool = False
    patience: float = 5.0
    max_body: int = 32 * 2**20
    max_running: int = 512
    max_queue: int = 1024
    queue_limit: float = 60.0
    body_limit: float = 60.0
    connect_limit: float = 5.0
    silence: float = 150.0
    answer_limit: float = 1800.0
    client_stall: float = 60.0
    health_interval: float = 2.0
    health_limit: float = 5.0
    health_failures: int = 3
    shutdown_limit: float = 30.0
    forward: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prefill or not self.decode:
            raise ConfigError(
                f"{len(self.prefill)} prefill and {len(self.decode)} decode servers are given; give one of each."
            )
        urls = [server.url for server in self.prefill] + [server.url for server in self.decode]
        for url in urls:
            if urls.count(url) > 1:
                raise ConfigError(f"Server {url} is given {urls.count(url)} times; give each once.")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < _least(field.name):
                raise ConfigError(f"{field.name} is {value}; give {_least(field.name):g} or more.")
        if self.mode is Mode.PUSH:
            for server in self.prefill:
                self._check_reachable(server)

    def _check_reachable(self, server: PrefillServer) -> None:
        if not server.kv_host or not server.kv_port:
            raise ConfigError(
                f"Prefill server {server.url} has no kv=HOST:PORT; decode has to be told where its connector listens."
            )
        if self.shape is Shape.STOCK and not server.engine:
            raise ConfigError(f"Prefill server {server.url} has no engine=ID; the stock connector asks for it.")


def _least(name: str) -> float:
    """The least value of a number among the settings."""
    if name in ("port", "max_queue"):
        return 0
    return 1 if name in ("attempts", "max_running", "health_failures", "max_body") else 0.001


def parse_prefill(text: str) -> PrefillServer:
    """``URL[,kv=HOST:PORT][,engine=ID][,tp=N][,dp=N]``. Raises ConfigError."""
    url, *rest = text.split(",")
    known: dict[str, str] = {}
    for part in rest:
        name, sign, value = part.partition("=")
        if not sign or not value or name not in ("kv", "engine", "tp", "dp") or name in known:
            raise ConfigError(
                f"{part!r} in {text!r} is not understood; give kv=HOST:PORT, engine=ID, tp=N or dp=N, each once."
            )
        known[name] = value
    host, port = _address(known["kv"]) if "kv" in known else ("", 0)
    return PrefillServer(
        _url(url), host, port, known.get("engine", ""), _count(known, "tp"), _count(known, "dp")
    )  # fmt: skip


def parse_decode(text: str) -> DecodeServer:
    """``URL``. Raises ConfigError."""
    return DecodeServer(_url(text))


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{text!r} is no server's address; give one like http://10.0.0.7:8000.")
    return text.rstrip("/")


def _address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})", text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"{text!r} is no control address; give one like 10.0.0.7:7100.")
    return match[1].strip("[]"), int(match[2])


def _count(known: dict[str, str], name: str) -> int:
    text = known.get(name, "1")
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}; give a whole number from 1 to 9999.")
    return int(text)
