"""Scenes for the runtime's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pushkv.transport.memory import Network
from runtime.scene import Clock, Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    """Endpoints over a network where everything happens at once."""
    made = Scene(Network(immediate=True))
    yield made
    made.close()


@pytest.fixture
def timed() -> Iterator[Callable[[Network], Scene]]:
    """Makes a scene over a network with a clock, which runs until the test is over."""
    scenes: list[Scene] = []
    clocks: list[Clock] = []

    def make(network: Network) -> Scene:
        scenes.append(Scene(network))
        clocks.append(Clock(network).start())
        return scenes[-1]

    yield make
    for one in scenes:
        one.close()
    for clock in clocks:
        clock.stop()
