"""What is examined: each backend whose device is here, each data mover that is asked of it, and a push by both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pushkv.backends.answers import is_present, path_checks
from pushkv.backends.base import Check, DataPath, Verdict
from pushkv.backends.machine import Machine
from pushkv.discovery import Entry
from pushkv.doctor.trial import MARK
from pushkv.errors import BackendError
from pushkv.plugins import Registry, State, Status
from pushkv.transport.nixl_log import LOGGING, libfabric_rails, ucx_lanes

TRIAL_S = 120.0
_ANOTHER_HOST = {"UCX_TLS": "^sm,cma,cuda_ipc"}
"""What makes UCX take, on one host, the way that it takes between two."""
_PASS, _WARN, _FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


@dataclass(frozen=True)
class Trial:
    """What came of a push: ``error`` is empty where it went well, ``log`` is what the data mover printed."""

    error: str
    log: str = ""


TryPush = Callable[[str, str, Mapping[str, str]], Trial]
"""Pushes from memory of a backend to memory of the same, by a data mover, under additional environment."""


def try_push(backend: str, mover: str, environment: Mapping[str, str]) -> Trial:
    """Make the push in processes of their own."""
    command = [sys.executable, "-m", "pushkv.doctor.trial", backend, mover]
    settings = {**os.environ, **LOGGING, **environment}
    try:
        done = subprocess.run(
            command, env=settings, capture_output=True, text=True, check=False, timeout=TRIAL_S, errors="replace"
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        log = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return Trial(f"nothing came of it in {TRIAL_S:g} s", log)
    log = done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if MARK in line]
    if not told:
        last = (log.strip().splitlines() or ["nothing was printed"])[-1]
        return Trial(f"its process ended with exit code {done.returncode}: {last[:300]}", log)
    return Trial(str(json.loads(told[-1].partition(MARK)[2])["error"]), log)


@dataclass
class Path:
    """One data mover for one backend, with everything that was looked at."""

    mover: str
    checks: list[Check] = field(default_factory=list)

    @property
    def tried(self) -> bool:
        """Whether a push was made."""
        return any(check.name == "push" for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether a push would work."""
        return all(check.verdict is not _FAIL for check in self.checks)


@dataclass
class Examined:
    """One backend. It is ``considered`` where its device is here or it was asked for by name."""

    entry: Entry
    status: Status
    considered: bool
    paths: list[Path] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way; always, where it is not considered."""
        ready = self.status.state is State.READY and all(path.ok for path in self.paths)
        return ready or not self.considered


@dataclass(frozen=True)
class Doctor:
    """Examines a machine. ``backends`` and ``movers`` narrow it; without them it takes what is here and fits."""

    registry: Registry
    machine: Machine = field(default_factory=Machine)
    backends: Sequence[str] = ()
    movers: Sequence[str] = ()
    try_push: TryPush | None = try_push

    def examine(self) -> list[Examined]:
        """Look at everything. Raises BackendError for a backend that is unknown."""
        known = {entry.name for entry in self.registry.entries}
        if unknown := [name for name in self.backends if name not in known]:
            raise BackendError(f"no memory backend is named {unknown[0]!r}; there are: {', '.join(sorted(known))}.")
        return [self._backend(entry) for entry in self.registry.entries]

    def _backend(self, entry: Entry) -> Examined:
        asked = entry.name in self.backends
        status, here = self.registry.status(entry, probe=True), False
        try:
            here = status.state is State.READY or self._is_here(entry)
        except BackendError as error:
            status = Status(State.BROKEN, str(error), status.checks)
        examined = Examined(entry, status, asked if self.backends else here)
        considered = examined.considered
        if considered and status.state is State.READY:
            examined.paths = [self._path(entry, mover) for mover in self.movers or [self._mover(entry)]]
        return examined

    def _is_here(self, entry: Entry) -> bool:
        """Raises BackendError for a backend that cannot say."""
        if entry.record is None or entry.disabled:
            return False
        try:
            backend = self.registry.load(entry)
        except BackendError:  # which its status says
            return False
        return is_present(backend, self.machine)

    def _mover(self, entry: Entry) -> str:
        """The one that fits: LIBFABRIC where there is EFA or the memory knows no other, else UCX."""
        try:
            by_ucx = path_checks(self.registry.load(entry), DataPath("UCX"), probe=False)
        except BackendError:  # which the path's own checks will say
            by_ucx = ()
        refuses = any(check.name == "mover" and check.verdict is _FAIL for check in by_ucx)
        return "LIBFABRIC" if refuses or any(nic.efa for nic in self.machine.nics()) else "UCX"

    def _path(self, entry: Entry, mover: str) -> Path:
        try:
            path = Path(mover, list(path_checks(self.registry.load(entry), DataPath(mover))))
        except BackendError as error:
            return Path(mover, [Check("path", _FAIL, str(error), "repair or uninstall that plug-in")])
        if self.try_push is None or not path.ok:
            return path
        path.checks += self._tried(entry.name, mover)
        return path

    def _tried(self, backend: str, mover: str) -> Iterator[Check]:
        assert self.try_push is not None
        trial = self.try_push(backend, mover, {})
        if trial.error:
            yield Check("push", _FAIL, f"a push between two processes failed: {trial.error}", "do what it says")
        else:
            yield Check("push", _PASS, "a push between two processes arrived, byte for byte")
        if mover == "LIBFABRIC":
            yield from self._rails(trial.log)
        else:
            yield from self._lanes(backend, trial)

    def _rails(self, log: str) -> Iterator[Check]:
        rails = libfabric_rails(log)
        wanted = "efa" not in self.machine.environ.get("FI_PROVIDER", "efa")
        if not rails.provider:
            yield Check(
                "provider in use", _WARN, "NIXL did not say which provider it uses", "NIXL_LOG_LEVEL=INFO may"
            )
        elif "efa" in rails.provider or (wanted and not rails.fallback):
            yield Check("provider in use", _PASS, f"NIXL made {rails.rails} rails over provider {rails.provider}")
        elif wanted:
            told = self.machine.environ["FI_PROVIDER"]
            found = f"NIXL uses provider {rails.provider}, as FI_PROVIDER={told} wants it: not EFA"
            yield Check("provider in use", _WARN, found, "unset FI_PROVIDER for EFA")
        else:
            found = f"NIXL fell back from EFA to provider {rails.provider}, some 1-3 GB/s"
            yield Check("provider in use", _FAIL, found, "give the container its EFA devices, and see fi_info -p efa")
        if rails.as_system_memory:
            found = "NIXL registered device memory as host memory, without an error: what arrives is something else"
            yield Check("registration", _FAIL, found, "bring the device's runtime up before any agent")

    def _lanes(self, backend: str, trial: Trial) -> Iterator[Check]:
        here = ucx_lanes(trial.log)
        if here.writes:
            yield Check("lanes on this host", _PASS, f"UCX writes by {', '.join(here.writes)}")
        if trial.error or "UCX_TLS" in self.machine.environ:
            return
        assert self.try_push is not None
        elsewhere = self.try_push(backend, "UCX", _ANOTHER_HOST)
        lanes = ucx_lanes(elsewhere.log)
        names = ", ".join(nic.name for nic in self.machine.nics())
        if elsewhere.error:
            found = f"a push by the lanes to other hosts failed: {elsewhere.error}"
            yield Check("lanes to other hosts", _FAIL, found, "see UCX_NET_DEVICES and UCX_LOG_LEVEL=info")
        elif lanes.over_tcp and names:
            found = f"UCX writes by {', '.join(lanes.writes)}, though there are RDMA devices ({names})"
            remedy = "set nixl.backend to 'LIBFABRIC' for EFA; else see ucx_info -d and the container's devices"
            yield Check("lanes to other hosts", _FAIL, found, remedy)
        else:
            yield Check(
                "lanes to other hosts", _PASS, f"UCX writes by {', '.join(lanes.writes) or 'it does not say'}"
            )
