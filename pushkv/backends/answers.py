"""Asking a backend what it says of itself, where it may be anybody's: whatever it raises is told as its own fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from pushkv.backends.base import Check, DataPath, Fence, MemoryBackend
from pushkv.backends.machine import Machine
from pushkv.errors import BackendError, PushKVError, first_line

T = TypeVar("T")


def own_checks(backend: MemoryBackend, *, probe: bool) -> tuple[Check, ...]:
    """The backend's checks. Raises BackendError where it raises, or says what is no check."""
    return _checks(backend, "cannot check itself", lambda: backend.check(probe=probe))


def path_checks(backend: MemoryBackend, path: DataPath, *, probe: bool = True) -> tuple[Check, ...]:
    """What the backend says of a data path. Raises as :func:`own_checks` does."""
    return _checks(backend, f"cannot check the way over {path.mover}", lambda: backend.check_path(path, probe=probe))


def is_present(backend: MemoryBackend, machine: Machine) -> bool:
    """Whether the backend sees its device in the machine. Raises BackendError where it raises."""
    return _asked(backend, "cannot say whether its device is here", lambda: bool(backend.present(machine)))


def asked(backend: MemoryBackend, what: str, ask: Callable[[], T]) -> T:
    """What a call of the backend gives; its own errors of PushKV's as they are.

    Raises BackendError for anything else that it raises, with ``what`` the backend could not do.
    """
    return _asked(backend, what, ask, passing=PushKVError)


def blamed(backend: MemoryBackend, what: str, error: BaseException) -> BackendError:
    """The error that says what a backend could not do, and that it is its own."""
    told = f"{type(error).__name__}: {first_line(error)}"
    return BackendError(f"memory backend {backend.name!r} {what}, {told}; report it to its author")


def has_passed(fence: Fence) -> bool:
    """Whether a fence has passed. Raises whatever it raises, and BackendError where it says neither yes nor no."""
    done = fence.done()
    if not isinstance(done, (bool, np.bool_)):
        raise BackendError(f"{type(fence).__name__}.done() returned {done!r:.80}, which is neither True nor False")
    return bool(done)


def _checks(backend: MemoryBackend, what: str, ask: Callable[[], Iterable[Check]]) -> tuple[Check, ...]:
    def told() -> tuple[Check, ...]:
        checks = tuple(ask())
        if odd := [one for one in checks if not isinstance(one, Check)]:
            raise TypeError(f"{odd[0]!r:.80} is no Check")
        return checks

    return _asked(backend, what, told)


def _asked(
    backend: MemoryBackend, what: str, ask: Callable[[], T], passing: type[BaseException] = KeyboardInterrupt
) -> T:
    try:
        return ask()
    except (KeyboardInterrupt, passing):
        raise
    except BaseException as error:  # also SystemExit: a plug-in that leaves takes nobody along
        raise blamed(backend, what, error) from error
