"""vLLM servers and routers as processes, and their metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

START_LIMIT = 900.0
"""Seconds in which a server has to come up; on two idle cores it takes about 25."""

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "error",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], T], limit: float, what: str) -> T:
    """Wait for a condition to hold and return it. Raises AssertionError, naming ``what``."""
    end = time.monotonic() + limit
    while True:
        if value := condition():
            return value
        assert time.monotonic() < end, f"{what}: not within {limit:g} s"
        time.sleep(0.1)


class Process:
    """A process that serves HTTP, with its log in a file."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, port: int, *, core: int | None = None,
                 environment: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.name = name
        self.command = list(command)
        self.log = folder / f"{name}.log"
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._core = core
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; ``wait_up`` waits for it."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        if self._core is not None and (os.cpu_count() or 1) > self._core:
            os.sched_setaffinity(self._process.pid, {self._core})

    def wait_up(self, limit: float = START_LIMIT) -> None:
        """Wait until it says that it is healthy. Raises AssertionError with the end of its log."""
        try:
            until(self._up, limit, f"{self.name} comes up")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None

    def _up(self) -> bool:
        assert self.alive, f"{self.name} has ended"
        return self.healthy()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        assert self._process is not None
        return self._process.pid

    def healthy(self) -> bool:
        """Whether its health check passes."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> Metrics:
        """What it counts now."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=300) as answer:
            return Metrics(answer.read().decode())

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pause(self) -> None:
        """Stop it and its children where they are."""
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo :meth:`pause`."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it and its children at once."""
        self._end(signal.SIGKILL, 0)

    def stop(self) -> None:
        """Ask it to end; what does not is killed."""
        self._end(signal.SIGTERM, 20)

    def _end(self, number: int, patience: float) -> None:
        if self._process is None:
            return
        for sign, limit in ((number, patience), (signal.SIGKILL, 20)):
            try:
                os.killpg(self._process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self._process.wait(limit)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait(20)


class VllmServer(Process):
    """A vLLM server of a model. ``kv`` is its KV transfer configuration, None for a server by itself."""

    def __init__(self, name: str, model: Path, folder: Path, kv: Mapping[str, Any] | None = None, *,
                 core: int | None = None, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None,
                 ) -> None:  # fmt: skip
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m",
                   "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
                   "--max-model-len", "4352", "--max-num-seqs", "16", "--no-enable-log-requests",
                   "--disable-uvicorn-access-log", *arguments]  # fmt: skip
        if kv is not None:
            command += ["--kv-transfer-config", json.dumps(kv)]
        super().__init__(name, command, folder, port, core=core, environment=environment)

    def used(self) -> float:
        """The share of KV blocks in use, as of the last step that told."""
        return self.metrics().sum("vllm:kv_cache_usage_perc")

    def step(self) -> None:
        """Have it compute a token for somebody, so that it tells anew what it counts."""
        body = json.dumps({"model": "m", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=300).close()

    def all_free(self, limit: float = 300.0) -> None:
        """Wait until every KV block is free. Raises AssertionError."""

        def free() -> bool:
            self.step()
            return self.used() == 0.0

        until(free, limit, f"{self.name}'s blocks are all free ({self.used():.4f} of them are not)")


class Router(Process):
    """A router process in front of servers."""

    def __init__(self, folder: Path, prefill: Sequence[str], decode: Sequence[str], name: str = "router",
                 arguments: Sequence[str] = ()) -> None:  # fmt: skip
        port = free_port()
        command = [sys.executable, "-m", "pushkv_vllm.router", "--port", str(port), *arguments]
        for text in prefill:
            command += ["--prefill", text]
        for text in decode:
            command += ["--decode", text]
        super().__init__(name, command, folder, port)


class Metrics:
    """A page of Prometheus metrics."""

    def __init__(self, page: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def sum(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that bear these labels; of a counter with or without its ``_total``."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name in (name, f"{name}_total")
            and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def has(self, name: str) -> bool:
        """Whether there is such a metric."""
        return any(sample.name in (name, f"{name}_total") for sample in self._samples)
