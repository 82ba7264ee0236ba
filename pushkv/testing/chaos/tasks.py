"""What the parent tells its children, and what they tell it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

LAYERS, TOKENS, CONTENT = 2, 4, 32 << 10
"""Layers, tokens a block, bytes a token and layer: blocks of 256 KiB."""
BLOCKS = 160
MOST_TOKENS = 64
SLOT_BYTES, SLOTS = 8 * LAYERS * CONTENT, 8
"""Of each side, where parts land in slots: few, so that they run dry."""


@dataclass(frozen=True)
class How:
    """How bytes cross: whether all parts go through slots, and whether they are verified."""

    landing: bool = False
    verify: bool = False


@dataclass(frozen=True)
class Job:
    """One request: which prompt, how long, under which transfer id."""

    transfer: str
    prompt: int
    tokens: int
    mismatch: bool = False


@dataclass(frozen=True)
class Stage:
    """To a producer: compute a job's KV in chunks and stage it, perhaps give its blocks back in between or abort."""

    job: Job
    chunk: int
    pause: float
    preempt: bool
    abort: bool


@dataclass(frozen=True)
class Offer:
    """To a consumer: offer blocks for a job to the producer at this address; ``cancel`` after so many seconds."""

    job: Job
    address: str
    start: int
    attempt: int
    cancel: float | None


@dataclass(frozen=True)
class Know:
    """To a consumer: these are the producers' addresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Say how things are; answered by State."""


@dataclass(frozen=True)
class Close:
    """Close the endpoint; answered by Closed."""


Task: TypeAlias = Stage | Offer | Know | Report | Close


@dataclass(frozen=True)
class Up:
    """A child is there; a producer tells its address."""

    address: str = ""


@dataclass(frozen=True)
class Outcomes:
    """An attempt has ended at this child."""

    transfer: str
    epoch: str
    attempt: int
    outcome: str


@dataclass(frozen=True)
class Skipped:
    """An offer was not made: no blocks, or no connection."""

    transfer: str
    attempt: int


@dataclass(frozen=True)
class State:
    """How a child is: transfers or stages without an outcome, blocks in custody, counters.

    ``asked``: it answers a Report; others come by themselves now and then.
    """

    open: int
    held: int
    linked: int = 0
    late_bytes: int = 0
    stats: dict[str, int] = field(default_factory=dict)
    held_for: tuple[str, ...] = ()
    asked: bool = False


@dataclass(frozen=True)
class Closed:
    """The endpoint is closed; whether custody had ended."""

    clear: bool


@dataclass(frozen=True)
class Wrong:
    """A rule is broken."""

    rule: str
    detail: str


Answer: TypeAlias = Up | Outcomes | Skipped | State | Closed | Wrong
