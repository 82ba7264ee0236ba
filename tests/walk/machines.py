"""Machine states by number: what a machine does in a state is computed once and remembered.

Joint states are millions, the states of one machine are thousands, so the walk runs each machine's code once for
each (state, input) and looks the rest up.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, TypeVar

import msgspec
from pushkv.core.commands import Command
from pushkv.core.outcome import Outcome
from pushkv.core.timers import Timers

M = TypeVar("M")
_ATOMS = (str, int, float, bytes, bool, type(None), frozenset, Enum, msgspec.Struct)
_IGNORED = {"counts", "limits", "nonce", "owed", "_out", "_commands", "detail"}


def plain(outcome: Outcome) -> Outcome:
    """An outcome up to what the machines do about it: all failures that no other attempt follows are alike."""
    if outcome.rejected:
        return Outcome.REJECTED_PROMPT
    return outcome if outcome in (Outcome.COMPLETE, Outcome.SUPERSEDED) else Outcome.CANCELLED


def freeze(value: Any) -> Any:
    """A hashable picture of a machine's state. Timers count by name: the walk lets any of them fire at any time."""
    if isinstance(value, Outcome):
        return plain(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Timers):
        return frozenset(value.pending())
    if isinstance(value, dict):
        return tuple((freeze(key), freeze(item)) for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])))
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return tuple(freeze(item) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    if callable(value) and not hasattr(value, "__dict__"):
        return repr(value)
    names = list(getattr(value, "__dict__", ())) or list(getattr(type(value), "__slots__", ()))
    return tuple(freeze(getattr(value, name)) for name in names if name not in _IGNORED)


class Machines(Generic[M]):
    """Numbered states of one kind of machine."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._pickles: list[bytes] = []
        self._timers: list[tuple[Any, ...]] = []
        self._steps: dict[tuple[int, Any], tuple[int, tuple[Command, ...], str]] = {}
        self._facts: dict[tuple[int, str], Any] = {}

    def __len__(self) -> int:
        return len(self._pickles)

    def number(self, machine: M) -> int:
        """The number of a machine's state."""
        frozen = freeze(machine)
        known = self._numbers.get(frozen)
        if known is None:
            known = self._numbers[frozen] = len(self._pickles)
            self._pickles.append(pickle.dumps(machine))
            self._timers.append(tuple(sorted(machine.timers.pending(), key=repr)))  # type: ignore[attr-defined]
        return known

    def timers(self, state: int) -> tuple[Any, ...]:
        """The timers that are set in a state."""
        return self._timers[state]

    def fact(self, state: int, name: str, ask: Callable[[M], Any]) -> Any:
        """Something asked of a state, once."""
        known = self._facts.get((state, name), self)
        if known is self:
            known = self._facts[state, name] = ask(pickle.loads(self._pickles[state]))
        return known

    def step(self, state: int, method: str, *args: Any) -> tuple[int, tuple[Command, ...], str]:
        """Call a method in a state: the state after, the commands it gave, and its error if it refused."""
        key = (state, (method, args))
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = self._run(state, method, args)
        return known

    def _run(self, state: int, method: str, args: tuple[Any, ...]) -> tuple[int, tuple[Command, ...], str]:
        machine = pickle.loads(self._pickles[state])
        if method == "fire":
            machine.timers.cancel(args[0])
        try:
            getattr(machine, method)(*args)
        except (AssertionError, KeyError, AttributeError, TypeError):
            raise
        except Exception as refusal:
            return state, (), f"{type(refusal).__name__}: {refusal}"
        machine.counts.clear()
        commands = tuple(machine.commands())
        return self.number(machine), commands, ""
