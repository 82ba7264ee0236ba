"""Settings for every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

# Before numpy is imported: BLAS threads that spin would take the cores from the threads under test.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# UCX warns of what tests provoke on purpose (peers that are killed).
os.environ.setdefault("UCX_LOG_LEVEL", "error")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that are run in this process set the level of the library's logs; the next test finds it as it was."""
    level = logging.getLogger("pushkv").level
    yield
    logging.getLogger("pushkv").setLevel(level)
