"""Keeping the words of others out of what a command prints: plug-ins, libraries that they load, C code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def words_aside() -> Iterator[None]:
    """Until it is left, whatever is written to standard output goes to standard error, also what child processes and
    C libraries write; so that what a command prints afterwards is all that stands there."""
    with contextlib.ExitStack() as after, contextlib.redirect_stdout(sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a process without a standard output, or error
            _flush()
            saved = os.dup(1)
            after.callback(os.close, saved)
            os.dup2(2, 1)
            after.callback(os.dup2, saved, 1)
            after.callback(_flush)
        yield


def _flush() -> None:
    """What was said by now goes to where it was meant to."""
    for stream in (sys.__stdout__, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
