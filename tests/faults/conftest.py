"""Children and networks for the fault tests, gone after each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from faults.cast import Cast
from faults.namespaces import TwoNetworks, missing


@pytest.fixture
def cast() -> Iterator[Cast]:
    """Starts children and ends them."""
    made = Cast()
    yield made
    made.end()


@pytest.fixture
def networks() -> Iterator[TwoNetworks]:
    """Two namespaces and their links. CI has what they need, so there it is an error if anything is missing."""
    lacking = missing()
    if lacking and os.environ.get("CI") == "true":
        pytest.fail(lacking)
    if lacking:
        pytest.skip(lacking)
    made = TwoNetworks()
    yield made
    made.close()


@pytest.fixture(params=["tcp"])
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What UCX may use, in the children."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)
