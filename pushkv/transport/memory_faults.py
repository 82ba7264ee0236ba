"""What can go wrong on the in-process network, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum

from pushkv.errors import ConfigError


class OnDeath(Enum):
    """What becomes of a WRITE's bytes when the process that posted it dies."""

    CMA = "cma"
    """They end with the process: it was the one that copied."""
    TCP = "tcp"
    """They go on: the kernel holds them and the target's agent copies them in, any time later."""


@dataclass(frozen=True)
class Faults:
    """How often and how much a network misbehaves; probabilities a message or a WRITE.

    ``delay`` is drawn evenly between its two ends, in seconds; ``late`` is how long after the error the
    bytes of a failed WRITE, or of one orphaned over tcp, may still land. Raises ConfigError.
    """

    drop: float = 0.0
    """A notification is lost, that of a WRITE included."""
    duplicate: float = 0.0
    """A notification comes twice."""
    reorder: float = 0.0
    """A notification does not wait for those sent before it."""
    stall: float = 0.0
    """A WRITE stays in progress until :meth:`Network.release`."""
    fail: float = 0.0
    """A WRITE ends with an error while its bytes are under way."""
    corrupt: float = 0.0
    """One byte of a WRITE lands as another."""
    delay: tuple[float, float] = (0.0, 0.0)
    late: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self)[:6]:
            chance = getattr(self, field.name)
            if not 0.0 <= chance <= 1.0:
                raise ConfigError(f"Faults.{field.name} is {chance}; a probability lies between 0 and 1.")
        if not 0.0 <= self.delay[0] <= self.delay[1]:
            raise ConfigError(f"Faults.delay is {self.delay}; give (least, most) in seconds.")
        if self.late < 0.0:
            raise ConfigError(f"Faults.late is {self.late}; give seconds, 0 or more.")


@dataclass(frozen=True)
class Cut:
    """A fault on the links of one agent, to one peer or (None) to all of them."""

    agent: str
    peer: str | None = None

    def covers(self, sender: str, receiver: str) -> bool:
        """Whether it lies on the way from ``sender`` to ``receiver``, in that direction."""
        return self.agent == sender and self.peer in (None, receiver)

    def touches(self, one: str, other: str) -> bool:
        """Whether it lies between the two, in either direction."""
        return self.covers(one, other) or self.covers(other, one)
