"""Finding memory backends: the built-in ones first, then the entry-point group ``pushkv``.

pluggy validates and calls the hooks. It is not left to find or to combine the plug-ins: on one shared
registry a plug-in can shadow, break or hide another. Here each is tried on a registry of its own, so
that what is wrong with one is recorded against that one alone, and names that meet are an error.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import pluggy

from pushkv import hookspecs
from pushkv.errors import BackendError, ConfigError, first_line
from pushkv.hookspecs import PROJECT, BackendRecord

BUILTINS = ("pushkv.backends.cpu", "pushkv.backends.cuda", "pushkv.backends.neuron")
"""The built-in plug-ins: modules that hold the hook. The order is the order of the listing."""

DISABLE = "PUSHKV_DISABLE"
"""Environment variable: names of backends, plug-ins or distributions to leave out, separated by commas."""


@dataclass(frozen=True)
class Fault:
    """Why a plug-in brings nothing: a phrase for people, and the error itself."""

    reason: str
    error: BaseException


@dataclass(frozen=True)
class Entry:
    """A memory backend that was found, or a plug-in that could not be.

    ``source`` is the distribution with its version. Without a ``record`` nothing but the plug-in's name is known:
    it has a ``fault``, or is ``disabled`` and was not imported.
    """

    name: str
    source: str
    record: BackendRecord | None = None
    disabled: bool = False
    fault: Fault | None = None


@dataclass(frozen=True)
class Candidate:
    """A plug-in before it is imported. ``spelling`` is how its distribution declares it."""

    name: str
    distribution: str
    version: str
    spelling: str
    load: Callable[[], object]
    builtin: bool = False

    @property
    def source(self) -> str:
        """The distribution and its version, for people."""
        return f"{self.distribution} {self.version}"


def discover(environ: Mapping[str, str], builtins: Sequence[str] = BUILTINS) -> tuple[Entry, ...]:
    """Find the memory backends of this process.

    Raises BackendError, naming both distributions, when two bring the same name, and ConfigError when PUSHKV_DISABLE
    names nothing that is here. A plug-in that is broken in itself becomes an entry with a fault.
    """
    disable = Disable(environ.get(DISABLE, ""))
    candidates = [*map(_builtin, builtins), *_declared()]
    _refuse_shared_names((c.name, c.source) for c in candidates if not disable.covers(c))
    entries = [entry for candidate in candidates for entry in _entries(candidate, disable)]
    _refuse_shared_names((entry.name, entry.source) for entry in entries if not entry.disabled)
    disable.refuse_unknown(candidates, entries)
    return tuple(entries)


class Disable:
    """The names in PUSHKV_DISABLE."""

    def __init__(self, setting: str) -> None:
        self._names = {_normal(name): name.strip() for name in setting.split(",") if name.strip()}

    def covers(self, candidate: Candidate) -> bool:
        """Whether the whole plug-in is left out, so that it is not even imported."""
        return any(_normal(name) in self._names for name in (candidate.name, candidate.distribution))

    def names(self, backend: str) -> bool:
        """Whether this backend is left out."""
        return _normal(backend) in self._names

    def refuse_unknown(self, candidates: Iterable[Candidate], entries: Iterable[Entry]) -> None:
        """Raise ConfigError for a name that is nothing here: a typing error leaves on what was meant to be off."""
        backends = sorted({entry.name for entry in entries})
        known = {*backends, *(name for c in candidates for name in (c.name, c.distribution))}
        for name in self._names.keys() - set(map(_normal, known)):
            raise ConfigError(
                f"{DISABLE} names {self._names[name]!r}, which is no backend, plug-in or distribution here"
                f" (backends: {', '.join(backends)}); correct it or take it out"
            )


def _normal(name: str) -> str:
    """Names of distributions are equal when only case and the kind of separator differ."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _builtin(module: str) -> Candidate:
    distribution, version = own_distribution()
    name = module.rpartition(".")[2]
    return Candidate(name, distribution, version, module, lambda: importlib.import_module(module), builtin=True)


def own_distribution() -> tuple[str, str]:
    """PushKV's own name and version; of a source tree that is not installed the version is unknown."""
    try:
        return PROJECT, metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        return PROJECT, "(not installed)"


def _declared() -> Iterator[Candidate]:
    """The plug-ins that installed distributions declare, in the order of the import path.

    A distribution that the path holds twice counts once, the first, as for an import.
    """
    seen: set[str] = set()
    for distribution in filter(_declares, metadata.distributions()):
        name = _distribution_name(distribution)
        if name is not None and _normal(name) not in seen:
            seen.add(_normal(name))
            yield from _declared_by(metadata.distribution(name), name)


def _declares(distribution: metadata.Distribution) -> bool:
    """Whether the distribution has our group, by its raw text: parsing all metadata would cost more than the rest."""
    try:
        return f"[{PROJECT}]" in (distribution.read_text("entry_points.txt") or "")
    except (OSError, ValueError):  # unreadable or not UTF-8: not one of ours
        return False


def _distribution_name(distribution: metadata.Distribution) -> str | None:
    """None for the remains of an interrupted installation: a folder without a name in it."""
    try:
        return distribution.metadata["Name"] or None
    except Exception:  # whatever broken metadata raises, it is not ours to stop for
        return None


def _declared_by(distribution: metadata.Distribution, name: str) -> Iterator[Candidate]:
    version = distribution.version
    try:
        points = [point for point in distribution.entry_points if point.group == PROJECT]
    except Exception as error:  # one malformed line makes all of the file unreadable
        yield Candidate(name, name, version, "entry_points.txt", _raiser(error))
        return
    for point in points:
        yield Candidate(point.name, name, version, f"{point.name} = {point.value}", point.load)


def _raiser(error: Exception) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def _entries(candidate: Candidate, disable: Disable) -> list[Entry]:
    covered = disable.covers(candidate)
    if covered and not candidate.builtin:
        return [Entry(candidate.name, candidate.source, disabled=True)]
    try:
        records = _records(candidate)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in's module may do anything: leave, or panic in an extension
        reason = f"{candidate.spelling!r} fails with {type(error).__name__}: {first_line(error)}"
        return [Entry(candidate.name, candidate.source, fault=Fault(reason, error))]
    return [
        Entry(record.name, candidate.source, record, disabled=covered or disable.names(record.name))
        for record in records
    ]


def _records(candidate: Candidate) -> list[BackendRecord]:
    """Import one plug-in and ask its hook, on a pluggy registry of its own.

    So a raising hook aborts no other's, a plug-in that fails its validation cannot stay
    registered, none shadows another by coming later, and a misspelt hook, which only
    check_pending() tells, is told of the plug-in that has it.
    """
    registry = pluggy.PluginManager(PROJECT)
    registry.add_hookspecs(hookspecs)
    registry.register(candidate.load(), name=candidate.name)
    registry.check_pending()
    implementations = registry.hook.pushkv_backends.get_hookimpls()
    if not implementations:
        raise BackendError("it implements no hook of PushKV; mark its pushkv_backends() with @hookimpl")
    answers = registry.hook.pushkv_backends()
    if len(answers) < len(implementations):  # pluggy drops a None
        raise BackendError("its pushkv_backends() returned None; return a list of BackendRecord, be it empty")
    return [record for answer in answers for record in _checked(answer)]


def _checked(answer: Any) -> Iterator[BackendRecord]:
    for record in answer:
        if not isinstance(record, BackendRecord):
            raise BackendError(f"pushkv_backends() returned {record!r}; return a list of BackendRecord")
        yield record


def _refuse_shared_names(named: Iterable[tuple[str, str]]) -> None:
    """Raise BackendError when two plug-ins bring one name: whichever was taken, somebody would be surprised."""
    owner: dict[str, str] = {}
    for name, source in named:
        if name in owner:
            raise BackendError(
                f"the memory backend {name!r} is brought by two plug-ins, of {owner[name]} and of {source};"
                f" uninstall one, or name its distribution in {DISABLE}"
            )
        owner[name] = source
