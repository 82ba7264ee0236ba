"""Getting a memory backend: by name, or for an array.

The process has one registry, filled on first use and kept; :func:`get_backend` and :func:`backend_for` ask it.
There is no fallback anywhere: the backend that owns a device serves it, or the error says why not.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from pushkv.backends.answers import own_checks
from pushkv.backends.base import Check, MemoryBackend, Verdict, device_type_of
from pushkv.discovery import DISABLE, Entry, discover
from pushkv.errors import BackendError, UnclaimedDevice, first_line
from pushkv.hookspecs import BackendRecord

_log = logging.getLogger(__name__)


class State(Enum):
    """The four things a listing says of a backend."""

    READY = "ready"
    UNAVAILABLE = "unavailable"
    BROKEN = "broken"
    DISABLED = "disabled"


@dataclass(frozen=True)
class Status:
    """How a backend stands, why where it is not ready, and the checks that were made."""

    state: State
    reason: str = ""
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        return f"{self.state.value}: {self.reason}" if self.reason else self.state.value


class Registry:
    """The memory backends of a process: what was found, and an instance of each one that was asked for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(entries)
        self._lock = threading.RLock()
        self._loaded: dict[str, MemoryBackend] = {}
        self._checked: set[str] = set()

    def get(self, name: str) -> MemoryBackend:
        """The backend of that name, loaded and past its checks; one instance a registry.

        Raises BackendError when it is unknown, disabled or broken, or fails a check.
        """
        backend = self.load(self._entry(name))
        with self._lock:
            if name not in self._checked:
                _require_usable(name, own_checks(backend, probe=True))
                self._checked.add(name)
        return backend

    def for_array(self, array: object) -> MemoryBackend:
        """The backend that owns the device the array lives on, past its checks.

        Raises UnclaimedDevice when none claims it, BackendError when two do or when its owner cannot be used.
        """
        kind = device_type_of(array)
        owners = [entry for entry in self.entries if _claims(entry, kind) and not entry.disabled]
        if not owners:
            raise self._unclaimed(kind, str(getattr(array, "device", kind)))
        if len(owners) > 1:
            named = " and ".join(f"{entry.name!r} of {entry.source}" for entry in owners)
            raise BackendError(f"device type {kind!r} is claimed by {named}; name one of them in {DISABLE}")
        return self.get(owners[0].name)

    def use(self, backend: MemoryBackend) -> None:
        """Serve this instance under its name from now on: one that was made with settings, or for a test.

        Its checks are run when it is first asked for. Raises BackendError when no backend of that name is listed.
        """
        entry = self._entry(backend.name)
        with self._lock:
            self._loaded[entry.name] = backend
            self._checked.discard(entry.name)

    def load(self, entry: Entry) -> MemoryBackend:
        """The entry's backend, whatever its checks say. Raises BackendError when it is disabled or broken."""
        record = _record(entry)
        with self._lock:
            if record.name not in self._loaded:
                self._loaded[record.name] = _instance(record, entry.source)
            return self._loaded[record.name]

    def status(self, entry: Entry, *, probe: bool) -> Status:
        """How the entry stands. Without ``probe`` no device library is imported to find out."""
        if entry.disabled:
            return Status(State.DISABLED)
        if entry.fault is not None:
            return Status(State.BROKEN, entry.fault.reason)
        try:
            checks = own_checks(self.load(entry), probe=probe)
        except BackendError as error:
            return Status(State.BROKEN, str(error))
        failed = _first_failure(checks)
        return Status(State.READY, "", checks) if failed is None else Status(State.UNAVAILABLE, str(failed), checks)

    def close(self) -> None:
        """Close every backend that was loaded; a later lookup loads it anew."""
        with self._lock:
            for backend in self._loaded.values():
                backend.close()
            self._loaded.clear()
            self._checked.clear()

    def _entry(self, name: str) -> Entry:
        """The entry of that name, an enabled one first: of two with one name all but one are disabled."""
        for entry in sorted(self.entries, key=lambda entry: entry.disabled):
            if entry.name == name:
                return entry
        raise BackendError(
            f"no memory backend is named {name!r} (known: {self._known()}); correct the name or install its plug-in"
        )

    def _known(self) -> str:
        return ", ".join(entry.name for entry in self.entries if entry.record is not None) or "none"

    def _unclaimed(self, kind: str, device: str) -> UnclaimedDevice:
        """The error for a device that nobody claims, with what stands in the way where that can be told."""
        remedy, cause = f"install the distribution whose plug-in claims {kind!r}", None
        for entry in self.entries:
            if entry.name == kind or _claims(entry, kind):
                remedy, cause = _obstacle(entry), entry.fault.error if entry.fault else None
        error = UnclaimedDevice(f"no memory backend claims the device {device!r} (known: {self._known()}); {remedy}")
        error.__cause__ = cause
        return error


def _claims(entry: Entry, kind: str) -> bool:
    return entry.record is not None and kind in entry.record.device_types


def _obstacle(entry: Entry) -> str:
    """Why this entry cannot be loaded, and what to do, as a phrase."""
    if entry.disabled:
        return f"{entry.name!r} of {entry.source} is disabled; take it out of {DISABLE}"
    reason = entry.fault.reason if entry.fault else "it brings no backend of that name"
    return f"{entry.name!r} of {entry.source} is broken, {reason}; repair or uninstall that distribution"


def _record(entry: Entry) -> BackendRecord:
    if entry.record is not None and not entry.disabled:
        return entry.record
    cause = entry.fault.error if entry.fault else None
    raise BackendError(f"memory backend {_obstacle(entry)}") from cause


def _instance(record: BackendRecord, source: str) -> MemoryBackend:
    """Import the record's class and make one. Raises BackendError with the record's hint."""
    module, _, attribute = record.load.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and what panics of extension modules come as
        told = f"{type(error).__name__}: {first_line(error)}"
        remedy = record.hint or "repair or uninstall that distribution"
        raise BackendError(
            f"memory backend {record.name!r} of {source} cannot be loaded, {told}; {remedy}"
        ) from error
    if not isinstance(made, MemoryBackend):
        raise BackendError(
            f"memory backend {record.name!r} of {source} is no MemoryBackend; derive {record.load} from it"
        )
    own = getattr(made, "name", None), getattr(made, "device_types", None)
    if own != (record.name, record.device_types):
        raise BackendError(
            f"memory backend {record.name!r} of {source} calls itself {own[0]!r} for {own[1]};"
            f" its record says {record.name!r} for {record.device_types}: make them alike"
        )
    return made


def _first_failure(checks: Iterable[Check]) -> Check | None:
    return next((check for check in checks if check.verdict is Verdict.FAIL), None)


def _require_usable(name: str, checks: tuple[Check, ...]) -> None:
    failed = _first_failure(checks)
    if failed is not None:
        raise BackendError(f"memory backend {name!r} cannot be used: {failed}")
    for check in checks:
        if check.verdict is Verdict.WARN:
            _log.warning("memory backend %r: %s", name, check)


_registry: Registry | None = None
_registry_lock = threading.Lock()


def registry() -> Registry:
    """The process's registry, filled on the first call. Raises as :func:`pushkv.discovery.discover` does."""
    global _registry
    with _registry_lock:
        if _registry is None:
            _registry = Registry(discover(os.environ))
        return _registry


def get_backend(name: str) -> MemoryBackend:
    """The memory backend of that name (stable); see :meth:`Registry.get`."""
    return registry().get(name)


def backend_for(array: object) -> MemoryBackend:
    """The memory backend that owns the array's device (stable); see :meth:`Registry.for_array`."""
    return registry().for_array(array)
