"""Breadth-first over every reachable joint state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from walk.moves import moves
from walk.world import Rules, Violation, World


@dataclass
class Walked:
    """What a walk saw; ``broken`` is the rule that broke, with the shortest way there."""

    states: int = 0
    transitions: int = 0
    producer_states: int = 0
    consumer_states: int = 0
    whole: bool = True
    broken: str = ""
    path: list[str] = field(default_factory=list)


def walk(rules: Rules, most: int = 10_000_000) -> Walked:
    """Visit every state reachable from the start, or the first ``most`` of them (``whole`` says which)."""
    start = rules.start()
    start = rules.after_c(start, rules.cs.step(start.c, "connected", "p0", 0.0))
    came: dict[World, tuple[World, str] | None] = {start: None}
    queue = deque([start])
    seen = Walked()
    while queue:
        world = queue.popleft()
        last = ""
        try:
            rules.check(world)
            for last, move in moves(rules, world):
                seen.transitions += 1
                after = rules.saturate(move)
                if after not in came:
                    came[after] = (world, last)
                    queue.append(after)
        except Violation as violation:
            seen.broken = str(violation)
            seen.path = _path(came, world)
            break
        if len(came) >= most:
            seen.whole = False
            break
    seen.states, seen.producer_states, seen.consumer_states = len(came), len(rules.ps), len(rules.cs)
    return seen


def _path(came: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    path: list[str] = []
    while (step := came[world]) is not None:
        world, name = step
        path.append(name)
    return path[::-1]
