"""The fake device, for every test of this folder. It stays in the process: run the folder by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pushkv.backends.neuron import NeuronBackend
from pushkv.plugins import registry
from pushkv.testing.neuron import FakeHost, FakeNeuron, Flavour

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

MakeNeuron = Callable[..., FakeNeuron]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """A Trn2 with two chips and two NICs."""
    return FakeHost.trn2(tmp_path)


@pytest.fixture(params=list(Flavour), ids=lambda flavour: flavour.name.lower())
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """Each of the two torch backends."""
    told: Flavour = request.param
    return told


@pytest.fixture
def neuron(host: FakeHost, flavour: Flavour) -> Iterator[FakeNeuron]:
    """The device, with the registry's backend on its machine."""
    fake = FakeNeuron(host, flavour).install()
    registry().use(NeuronBackend(host.machine()))
    yield fake
    registry().close()
