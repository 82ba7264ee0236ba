"""What the demo's processes say to one another: the command plays the router, each rank is an engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from pushkv.core.outcome import Outcome
from pushkv.demo.generate import Generation
from pushkv.demo.workload import Request
from pushkv.trace import Recording


@dataclass(frozen=True)
class Ready:
    """A rank has registered its cache; a prefill rank listens on ``address``."""

    address: str = ""


@dataclass(frozen=True)
class Connect:
    """To a decode rank: the addresses of all prefill ranks."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Connected:
    """A decode rank is connected; ``path`` says what will move the bytes, in words."""

    path: str


@dataclass(frozen=True)
class Dispatch:
    """To rank 0 of prefill, to every rank of decode: requests to take up, in order."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Offered:
    """A decode rank has offered its blocks for a request."""

    name: str


@dataclass(frozen=True)
class Prefilled:
    """Prefill has computed a request's prompt."""

    name: str


@dataclass(frozen=True)
class Generated:
    """Decode is done with a request; ``generation`` is None unless its KV came whole."""

    name: str
    outcome: Outcome
    detail: str = ""
    generation: Generation | None = None


@dataclass(frozen=True)
class Finish:
    """To rank 0 of a side: there are no more requests; end once all blocks are back."""


@dataclass(frozen=True)
class Report:
    """A rank's last word.

    ``outcomes`` are those of its transfers (decode) or stages (prefill) by request, ``keys`` the names under which
    the trace knows its transfers, ``released`` whether all its blocks were back in the pool at the end.
    """

    recording: Recording
    stats: Mapping[str, int]
    outcomes: Mapping[str, Outcome]
    released: bool
    closed: bool
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A rank cannot go on, and why."""

    detail: str


FromRank: TypeAlias = Ready | Connected | Offered | Prefilled | Generated | Report | Failure
ToRank: TypeAlias = Connect | Dispatch | Finish
