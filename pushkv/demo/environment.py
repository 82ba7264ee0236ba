"""What the demo's processes run in: their environment variables, and their bond to the command.

Imports nothing that reads the variables.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait

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


def belong_to_parent() -> None:
    """In a child: leave Ctrl-C, which reaches the whole terminal, to the parent, and end at once when it ends.

    However the parent ends, and also where this process is stuck in a call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
