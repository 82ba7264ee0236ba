"""Breadth-first over every reachable joint state: to visit all, or for the shortest way to a broken rule."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pushkv.core.messages import Cancel, Complete, Drained, Failed, Offer, TransferKey
from walk.errors import Violation
from walk.fair import FairWeather
from walk.moves import Moves
from walk.rules import Rules
from walk.slots import Copy
from walk.world import BLOCKS, Flight, World


@dataclass
class Walked:
    """What a walk saw; ``broken`` is the rule that broke, with the shortest way there where it was kept."""

    states: int = 0
    transitions: int = 0
    uncovered: int = 0
    """Joint states that no other one stands for, in the end."""
    producer_states: int = 0
    consumer_states: int = 0
    whole: bool = True
    broken: str = ""
    path: list[str] = field(default_factory=list)


class Covered:
    """The worlds that need no further visit.

    Two worlds that differ only in messages on their way, where one has all that the other has: it can do all that
    the other can. Notifications of landed bytes are compared exactly, as the rule about coverage counts them.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._fullest: dict[tuple[Any, ...], list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._fullest.values()))

    def _core(self, w: World) -> tuple[Any, ...]:
        return (w.ps, w.c, self._rules.arrived(w.to_c), w.air, w.untold, w.posted, w.copies, w.seats, w.env)

    def add(self, w: World) -> bool:
        """Whether the world can do something that none seen before can; it is remembered if so."""
        core, to_p, to_c = self._core(w), w.to_p, w.to_c
        known = self._fullest.get(core)
        if known is None:
            self._fullest[core] = [(to_p, to_c)]
            return True
        if any(not to_p & ~theirs and not to_c & ~ours for theirs, ours in known):
            return False
        known[:] = [(theirs, ours) for theirs, ours in known if theirs & ~to_p or ours & ~to_c]
        known.append((to_p, to_c))
        return True

    def __contains__(self, w: World) -> bool:
        return (w.to_p, w.to_c) in self._fullest[self._core(w)]


def walk(rules: Rules, most: int = 100_000_000, fair: bool = False) -> Walked:
    """Visit every state reachable from the start, or the first ``most`` of them (``whole`` says which).

    ``fair``: from each of them, follow fair weather to the end.
    """
    gc.disable()  # millions of tuples, none of them garbage
    try:
        return _walk(rules, most, fair)
    finally:
        gc.enable()


def _walk(rules: Rules, most: int, fair: bool) -> Walked:
    moves, covered, seen = Moves(rules), Covered(rules), Walked()
    weather = FairWeather(moves) if fair else None
    start = rules.start()
    covered.add(start)
    queue = deque([start])
    while queue and not seen.broken:
        world = queue.popleft()
        if world not in covered:
            continue
        seen.states += 1
        try:
            if weather is not None:
                weather.check(world)
            for _, made in moves.of(world):
                seen.transitions += 1
                after = rules.normal(made)
                if covered.add(after):
                    queue.append(after)
        except Violation as violation:
            seen.broken = str(violation)
        if seen.states >= most:
            seen.whole = False
            break
    seen.producer_states, seen.consumer_states, seen.uncovered = len(rules.ps), len(rules.cs), len(covered)
    return seen


def hunt(rules: Rules, most: int = 3_000_000) -> Walked:
    """The same without :class:`Covered`, keeping the way to each state: for what is expected to break."""
    moves, seen = Moves(rules), Walked()
    start = rules.start()
    came: dict[World, tuple[World, Any] | None] = {start: None}
    queue = deque([start])
    while queue and not seen.broken and len(came) < most:
        world = queue.popleft()
        try:
            for name, made in moves.of(world):
                seen.transitions += 1
                after = rules.normal(made)
                if after not in came:
                    came[after] = (world, name)
                    queue.append(after)
        except Violation as violation:
            seen.broken, seen.path = str(violation), _path(came, world, rules.trying)
    seen.states, seen.whole = len(came), not queue
    seen.producer_states, seen.consumer_states = len(rules.ps), len(rules.cs)
    return seen


def _path(came: dict[World, tuple[World, Any] | None], world: World, last: Any) -> list[str]:
    path = [words(last)]
    while (step := came[world]) is not None:
        world, name = step
        path.append(words(name))
    return path[::-1]


def words(name: Any) -> str:
    """A move in words."""
    if isinstance(name, tuple) and not hasattr(name, "_fields"):
        return " ".join(words(part) for part in name)
    if isinstance(name, TransferKey):
        return f"{name.epoch}#{name.attempt}"
    if isinstance(name, Flight):
        where = BLOCKS[name.block] if name.staging < 0 else f"slot {name.block}"
        return f"[{words(name.complete)} of {words(name.key)} from {name.producer} into {where}]"
    if isinstance(name, Copy):
        return f"[tokens {name.spans[0].token_start} to {name.spans[-1].token_stop} of {words(name.key)}]"
    if isinstance(name, Complete):
        tokens = [span.token_start for span in name.spans] + [span.token_stop for span in name.spans]
        return f"part {name.part}, tokens {min(tokens)} to {max(tokens)}"
    if isinstance(name, (Offer, Cancel, Failed, Drained)):
        return f"{type(name).__name__} {words(name.key)}"
    return str(name)
