"""Which walks are made: a few that together pair all that can happen, and larger ones, up to all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from walk.rules import Rules
from walk.search import Walked, walk
from walk.world import Bounds


@dataclass(frozen=True)
class Walk:
    """One walk, to the end of its bounds; ``fair``: with a look at fair weather from every state."""

    name: str
    bounds: Bounds
    fair: bool = False

    def run(self) -> Walked:
        """Visit every state."""
        return walk(Rules(self.bounds), fair=self.fair)


LANDING = Bounds(parts=1, p_restarts=0, c_restarts=0, preemptions=0, slots=1)
TWO = Bounds(attempts=1, parts=1, ranks=2, p_restarts=0, c_restarts=0, preemptions=0)

QUIET: dict[str, bool] = {"write_errors": False, "losses": False}

WALKS = (
    Walk("2 attempts, 2 parts, a preemption; cancels", Bounds(p_restarts=0, c_restarts=0, **QUIET)),
    Walk("1 attempt, 2 parts, a restart a side; cancels", Bounds(attempts=1, preemptions=0, **QUIET)),
    Walk(
        "2 attempts, a producer's restart; WRITE errors, cancels",
        Bounds(parts=1, c_restarts=0, preemptions=0, losses=False),
    ),
    Walk("2 attempts, a consumer's restart; cancels", Bounds(parts=1, p_restarts=0, preemptions=0, **QUIET)),
    Walk(
        "1 attempt, 2 parts, staged twice, a preemption, refusals; fair weather",
        Bounds(attempts=1, stagings=2, p_restarts=0, c_restarts=0, refusals=True),
        fair=True,
    ),
    Walk(
        "1 attempt, a restart a side, staged twice, refusals; fair weather",
        Bounds(attempts=1, parts=1, stagings=2, preemptions=0, refusals=True),
        fair=True,
    ),
    Walk(
        "2 attempts, staged twice; WRITE errors, cancels, losses; fair weather",
        Bounds(parts=1, stagings=2, p_restarts=0, c_restarts=0),
        fair=True,
    ),
    Walk(
        "1 attempt, 2 parts of 2 layers, a preemption; cancels",
        Bounds(attempts=1, layers=2, p_restarts=0, c_restarts=0, **QUIET),
    ),
    Walk(
        "1 attempt, 2 layers, a preemption, staged twice; WRITE errors, cancels, losses; fair weather",
        Bounds(attempts=1, parts=1, layers=2, stagings=2, p_restarts=0, c_restarts=0),
        fair=True,
    ),
    Walk("2 ranks, 1 attempt; WRITE errors, cancels, losses; fair weather", TWO, fair=True),
    Walk(
        "2 ranks, 1 attempt, a restart of one; cancels",
        replace(TWO, p_restarts=1, write_errors=False, losses=False),
    ),
    Walk("2 ranks, 1 attempt, 2 parts; cancels", replace(TWO, parts=2, write_errors=False, losses=False)),
    Walk(
        "2 ranks, 1 attempt, refusals; cancels; fair weather",
        replace(TWO, refusals=True, write_errors=False, losses=False),
        fair=True,
    ),
    Walk("slots: 2 attempts, 1 slot; WRITE errors, cancels, losses", LANDING),
    Walk("slots: 2 attempts, 2 slots; cancels", replace(LANDING, slots=2, write_errors=False, losses=False)),
    Walk(
        "slots: 1 attempt, 2 parts, a preemption; copy errors, WRITE errors, cancels, losses; fair weather",
        replace(LANDING, attempts=1, parts=2, slot_tokens=1, preemptions=1, copy_errors=True),
        fair=True,
    ),
    Walk(
        "slots: 1 attempt of 2 slots at once, copy errors; cancels, losses; fair weather",
        replace(LANDING, attempts=1, slots=2, staging=2, slot_tokens=1, copy_errors=True, write_errors=False),
        fair=True,
    ),
    Walk(
        "slots: 1 attempt, staged twice, refusals; cancels, losses; fair weather",
        replace(LANDING, attempts=1, stagings=2, refusals=True, write_errors=False),
        fair=True,
    ),
    Walk(
        "slots: 1 attempt, a restart a side; cancels",
        replace(LANDING, attempts=1, p_restarts=1, c_restarts=1, write_errors=False, losses=False),
    ),
)

LONG_WALKS = (
    Walk(
        "2 attempts, 2 parts, a preemption; WRITE errors, cancels, losses",
        Bounds(p_restarts=0, c_restarts=0),
    ),
    Walk(
        "1 attempt, 2 parts, a restart a side; WRITE errors, cancels, losses",
        Bounds(attempts=1, preemptions=0),
    ),
    Walk(
        "2 attempts, a producer's restart, a preemption; WRITE errors, cancels, losses",
        Bounds(parts=1, c_restarts=0),
    ),
    Walk(
        "2 attempts, a consumer's restart; WRITE errors, cancels, losses",
        Bounds(parts=1, p_restarts=0, preemptions=0),
    ),
    Walk(
        "2 ranks, 1 attempt, a restart of one; cancels, losses",
        replace(TWO, p_restarts=1, write_errors=False),
    ),
    Walk(
        "1 attempt, 2 parts of 2 layers, a preemption; WRITE errors, cancels",
        Bounds(attempts=1, layers=2, p_restarts=0, c_restarts=0, losses=False),
    ),
)
"""With everything that :data:`WALKS` has by turns: what `make walk` makes besides those of every build."""

LARGER_WALKS = (
    Walk(
        "2 attempts, 2 layers; WRITE errors, cancels, losses",
        Bounds(parts=1, layers=2, p_restarts=0, c_restarts=0, preemptions=0),
    ),
    Walk("1 attempt, 2 parts, a preemption, a restart a side", Bounds(attempts=1)),
    Walk("2 attempts, a restart a side", Bounds(parts=1, preemptions=0)),
    Walk("2 attempts, 2 parts, a producer's restart", Bounds(c_restarts=0, preemptions=0)),
    Walk("2 attempts, 2 parts, a consumer's restart", Bounds(p_restarts=0, preemptions=0)),
    Walk("slots: 2 attempts, 2 slots; WRITE errors, cancels, losses; fair weather", replace(LANDING, slots=2), True),
    Walk("slots: 2 attempts of 2 parts, 1 slot; WRITE errors, cancels, losses", replace(LANDING, slot_tokens=1)),
)

EVERYTHING = Walk("everything: 2 attempts, 2 parts, a preemption, a restart a side", Bounds())
"""Too much for one core: :mod:`walk.parallel` has walked it to its end, as the page about the protocol says."""
