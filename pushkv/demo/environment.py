"""Environment variables of the demo's processes. Imports nothing that reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
"""For each process: matrices this small are not worth a second thread, and two engines share the machine."""


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for processes started inside; NIXL's own chatter is off unless it was asked for."""
    before = dict(os.environ)
    os.environ.update(settings)
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
