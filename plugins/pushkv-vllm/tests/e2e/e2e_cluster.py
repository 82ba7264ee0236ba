"""Prefill and decode servers that belong together, and whose connector they use."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_server import Router, VllmServer, free_port

HERE = str(Path(__file__).parent)
PATIENT = {"connect_timeout": 120.0, "stall": 120.0, "deadline": 900.0, "hold": 900.0}
"""For machines on which everything takes many times as long. ``silence`` is as it comes."""


@dataclass(frozen=True)
class Connector:
    """A connector by its name in vLLM; ``push`` says whether both legs may go at once, ``shape`` is the router's."""

    name: str
    push: bool
    shape: str

    def configuration(self, role: str, engine: str, port: int, side: Side) -> dict[str, Any]:
        """``--kv-transfer-config`` of a server."""
        made: dict[str, Any] = {
            "kv_connector": self.name,
            "kv_role": role,
            "engine_id": engine,
            "kv_load_failure_policy": side.policy,
        }
        if self.shape == "pushkv":
            return made | {"kv_connector_extra_config": {"port": port, **PATIENT, **side.extra}}
        return made | {"kv_buffer_device": "cpu", "kv_connector_extra_config": dict(side.extra),
                       "kv_connector_module_path": "stock_on_cpu"}  # fmt: skip

    def environment(self, port: int) -> dict[str, str]:
        """What vLLM's own connectors read from the environment."""
        if self.shape == "pushkv":
            return {}
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(filter(None, (HERE, os.environ.get("PYTHONPATH"))))}  # fmt: skip


OURS = Connector("PushKVConnector", True, "pushkv")
STOCK_PULL = Connector("NixlConnector", False, "stock")
STOCK_PUSH = Connector("NixlPushConnector", True, "stock")
CONNECTORS = {"pushkv": OURS, "stock-pull": STOCK_PULL, "stock-push": STOCK_PUSH}


@dataclass(frozen=True)
class Side:
    """How a server is set up. ``chunk`` is how many tokens a step computes at most, ``blocks`` the cache's size;
    ``more`` is what its model needs to be told."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    block: int = 32
    blocks: int = 1024
    chunk: int = 2048
    caching: bool = False
    policy: str = "fail"
    extra: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    more: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """How many worker processes the server has."""
        return self.tp * self.pp * self.dp

    def arguments(self) -> list[str]:
        """The same as arguments of ``vllm serve``."""
        caching = "--enable-prefix-caching" if self.caching else "--no-enable-prefix-caching"
        return ["--tensor-parallel-size", str(self.tp), "--pipeline-parallel-size", str(self.pp),
                "--data-parallel-size", str(self.dp), "--block-size", str(self.block), "--num-gpu-blocks-override",
                str(self.blocks), "--max-num-batched-tokens", str(self.chunk), caching,
                *self._stages(), *self.more]  # fmt: skip

    def _stages(self) -> list[str]:
        """On CPU only a warm-up makes what a later stage receives into, and vLLM 0.32 warms up nothing eager."""
        if self.pp == 1:
            return []
        return ["--no-enforce-eager", "--compilation-config", json.dumps({"mode": 2, "backend": "eager"})]


class Cluster:
    """One prefill server and some decode servers, up."""

    def __init__(self, connector: Connector, model: Path, folder: Path, prefill: Side, *decodes: Side) -> None:
        self.connector = connector
        self.folder = folder
        self.prefill_side = prefill
        self.control = free_port()
        self.prefill = self._server("P0", "kv_producer", model, self.control, prefill, 0)
        self.decodes = [
            self._server(f"D{number}", "kv_consumer", model, free_port(), side, 1)
            for number, side in enumerate(decodes)
        ]

    def _server(self, name: str, role: str, model: Path, port: int, side: Side, core: int) -> VllmServer:
        # Each side has a core of its own; several workers of one side spin, and need more than one.
        pinned = core if side.workers == 1 and (os.cpu_count() or 1) > 1 else None
        return VllmServer(name, model, self.folder, self.connector.configuration(role, name, port, side), core=pinned,
                          arguments=side.arguments(),
                          environment={**self.connector.environment(port), **side.environment})  # fmt: skip

    @property
    def decode(self) -> VllmServer:
        """The first decode server."""
        return self.decodes[0]

    @property
    def servers(self) -> list[VllmServer]:
        """All of them."""
        return [self.prefill, *self.decodes]

    @property
    def address(self) -> dict[str, Any]:
        """What the decode leg is told of the prefill server."""
        return {"remote_engine_id": "P0", "remote_host": "127.0.0.1", "remote_port": self.control,
                "tp_size": self.prefill_side.tp}  # fmt: skip

    def start(self) -> None:
        """Start all servers and wait for them. Whatever is up already is left alone."""
        fresh = [server for server in self.servers if not server.alive]
        for server in fresh:
            server.start()
        for server in fresh:
            server.wait_up()

    def stop(self) -> None:
        """End them."""
        for server in self.servers:
            server.stop()

    @contextmanager
    def router(self, *arguments: str, mode: str = "push", shape: str = "") -> Iterator[Router]:
        """A router in front of them, as long as the block lasts."""
        side = self.prefill_side
        spec = f"{self.prefill.url},kv=127.0.0.1:{self.control},engine=P0,tp={side.tp},dp={side.dp}"
        shape = shape or self.connector.shape
        patient = ["--patience", "300", "--silence", "900"]
        made = Router(self.folder, [spec], [server.url for server in self.decodes], f"router-{mode}-{shape}",
                      ["--mode", mode, "--shape", shape, *patient, *arguments])  # fmt: skip
        made.start()
        try:
            made.wait_up()
            yield made
        finally:
            made.stop()

    def all_free(self) -> None:
        """Wait until every block of every server is free. Raises AssertionError."""
        for server in self.servers:
            assert server.alive, f"{server.name} has ended\n{server.tail()}"
            server.all_free()

    def pushed(self) -> float:
        """Requests whose KV came by push, whole, as the decode servers count them."""
        return sum(server.metrics().sum("vllm:pushkv_received") for server in self.decodes)

    def computed(self) -> float:
        """Prompt tokens that the decode servers have computed themselves."""
        return sum(
            server.metrics().sum("vllm:prompt_tokens_by_source", source="local_compute") for server in self.decodes
        )


@contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that is up, as long as the block lasts."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
