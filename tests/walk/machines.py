"""Machine states by number: what a machine does in a state is computed once and remembered.

Joint states are millions, the states of one machine are thousands, so the walk runs each machine's code once for
each (state, input) and looks the rest up.

A state is taken up to what can never matter, so that many states become one:

* Counters of drops, limits, and the words of a detail decide nothing. Outcomes that the machines treat alike are
  one (:func:`plain`).
* Timers: which may fire is a function of the rest of the state (``due`` of :mod:`walk.timing`), and any of them may
  fire at any time. That a machine really has set what it must, and that what it has set besides does nothing, is
  checked for every state that a machine is ever in, before it is taken for its like.
* ``tries`` and ``acked`` decide when a message is repeated and by which way, and so does ``untold``, which Failed is.
  In the walk a message once sent can be delivered for ever, so a repetition is nothing new.
* The floor, lease and rest of time of an offer that has been admitted were used when it came.
* Where an offer is over, why it failed; where nothing more will be posted for it, how far it was posted. Whether a
  Cancel is still to be answered: the Cancel stays in the network until it is. Of a stage that is over, only whether
  its blocks are still out.
* Indexes over what is listed elsewhere (their agreement is checked, too).
* WRITEs are numbered by (consumer epoch, sequence, part) instead of in the order they were posted, and so are the
  generations of landing slots, by (producer epoch, attempt, part). Free slots have no order: one is as good as
  another.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from pushkv.core.commands import AskProof, Command, Gather, Post, Scatter, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.messages import Credit, Grant, Offer
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.sending import Serving
from pushkv.core.stages import Stage
from pushkv.core.states import Sending, TransitionError
from pushkv.errors import GeometryError, ProtocolError
from walk.errors import Violation

M = TypeVar("M")
W = TypeVar("W", Post, Gather)
_ATOMS = (str, int, float, bytes, bool, type(None), frozenset, Enum, msgspec.Struct)
_NEVER_MATTERS = ("counts", "limits", "nonce", "owed", "streaming", "detail", "timers", "_out", "_commands")
_REPETITIONS = ("tries", "acked", "untold", "ready_tries")
_LISTED_ELSEWHERE = ("_by_write", "_by_transfer", "_next_write", "pool", "_pool", "_generation")
_IN_ORDER = ("_order", "_wanted", "_queues")
_IGNORED = frozenset(_NEVER_MATTERS + _REPETITIONS + _LISTED_ELSEWHERE)


class Step(NamedTuple):
    """What a machine does with one input: its state after, its commands, and its words if it refused."""

    after: int
    commands: tuple[Command, ...]
    refusal: str


def plain(outcome: Outcome) -> Outcome:
    """An outcome up to what the machines do about it: all failures that no other attempt follows are alike."""
    if outcome.rejected:
        return Outcome.REJECTED_PROMPT
    return outcome if outcome in (Outcome.COMPLETE, Outcome.SUPERSEDED) else Outcome.CANCELLED


def freeze(value: Any) -> Any:
    """A hashable picture of a machine's state, without what never matters."""
    if isinstance(value, Outcome):
        return plain(value)
    if isinstance(value, Offer):
        return (value.key, value.sequence, value.nonce, value.into)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Serving):
        return _freeze_serving(value)
    if isinstance(value, Stage) and value.over:
        return (value.transfer, value.blocks is None)
    if isinstance(value, dict):
        return tuple(
            (freeze(key), freeze(item)) for key, item in sorted(value.items(), key=lambda pair: repr(pair[0]))
        )
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return tuple(freeze(item) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    names = [
        *getattr(value, "__dict__", ()),
        *(n for base in type(value).__mro__ for n in getattr(base, "__slots__", ())),
    ]
    return tuple(_field(name, getattr(value, name)) for name in names if name not in _IGNORED)


def _field(name: str, value: Any) -> Any:
    if name == "_queues":
        return tuple((peer, tuple(queue)) for peer, queue in value.items())
    if name in _IN_ORDER:
        return tuple((key, freeze(item)) for key, item in value.items())
    return freeze(value)


def _freeze_serving(serving: Serving) -> Any:
    going = serving.state in (Sending.OFFERED, Sending.MATCHED)
    slots = (freeze(serving.shares), frozenset(serving.unposted)) if serving.lands else ()
    return (
        freeze(serving.offer),
        serving.state,
        serving.custody,
        frozenset(serving.writes),
        (serving.sent, serving.ahead, serving.parts) if going and serving.unsent else None,
        freeze(serving.failing) if serving.state is Sending.FAILING else None,
        *slots,
    )


class Machines(Generic[M]):
    """Numbered states of one kind of machine. ``check`` sees every state, also those taken for their like."""

    def __init__(self, check: Callable[[M], None]) -> None:
        self._check = check
        self._numbers: dict[Any, int] = {}
        self._pickles: list[bytes] = []
        self._facts: dict[tuple[int, str], Any] = {}
        self.steps: dict[tuple[int, Any], Step] = {}

    def __len__(self) -> int:
        return len(self._pickles)

    def number(self, machine: M) -> int:
        """The number of a machine's state."""
        self._check(machine)
        frozen = freeze(machine)
        known = self._numbers.get(frozen)
        if known is None:
            known = self._numbers[frozen] = len(self._pickles)
            self._pickles.append(pickle.dumps(machine))
        return known

    def fact(self, state: int, ask: Callable[[M], Any]) -> Any:
        """Something asked of a state, once; ``ask`` is a named function."""
        key = (state, ask.__name__)
        if key not in self._facts:
            self._facts[key] = ask(pickle.loads(self._pickles[state]))
        return self._facts[key]

    def step(self, state: int, method: str, *args: Any) -> Step:
        """Call a method in a state."""
        key = (state, (method, args))
        known = self.steps.get(key)
        if known is None:
            known = self.steps[key] = self._run(state, method, args)
        return known

    def _run(self, state: int, method: str, args: tuple[Any, ...]) -> Step:
        machine: Any = pickle.loads(self._pickles[state])
        if method == "fire":
            machine.timers.cancel(args[0])
        try:
            getattr(machine, method)(*args)
        except TransitionError as error:
            raise Violation(f"the tables: {error}") from error
        except (ProtocolError, GeometryError) as refusal:
            return Step(state, (), f"{type(refusal).__name__}: {refusal}")
        machine.counts.clear()
        commands = tuple(command for command in machine.commands() if not isinstance(command, AskProof))
        if isinstance(machine, ProducerMachine):
            commands = _renumber(machine, commands)
        elif machine.slots.count:
            commands = _regenerate(machine, commands)
        if machine.slots.count:
            machine.slots._free = deque(sorted(machine.slots._free))
        return Step(self.number(machine), commands, "")


def _renumber(machine: ProducerMachine, commands: tuple[Command, ...]) -> tuple[Command, ...]:
    return tuple(
        _rename(machine, command) if isinstance(command, (Post, Gather)) else command for command in commands
    )


def _rename(machine: ProducerMachine, command: W) -> W:
    book = machine._book
    book._next_write = 1
    serving = book._by_write.pop(command.write)
    packed = machine._staging._packed.pop(command.write) if isinstance(command, Gather) else None
    part = command.complete.part if packed is None else packed.complete.part
    write = 1000 * (1 + int(command.peer[1:])) + 10 * serving.offer.sequence + part
    for writes in (serving.writes, serving.unposted):
        if command.write in writes:
            writes.discard(command.write)
            writes.add(write)
    if packed is not None:
        packed.write, machine._staging._packed[write] = write, packed
    book._by_write[write] = serving
    return replace(command, write=write)


def _regenerate(machine: ConsumerMachine, commands: tuple[Command, ...]) -> tuple[Command, ...]:
    machine._ring._generation = 0
    named: dict[Credit, Credit] = {}
    for berth in machine._ring._berths.values():
        if berth.generation < 1000:
            old, rank = berth.credit, 1 + "pq".index(berth.peer[0])
            berth.generation = 1000 * rank + 100 * int(berth.peer[1:]) + 10 * berth.key.attempt + berth.part
            named[old] = berth.credit
    return tuple(_credited(command, named) for command in commands)


def _credited(command: Command, named: dict[Credit, Credit]) -> Command:
    if isinstance(command, Send) and isinstance(command.message, Grant):
        credit = named.get(command.message.credit, command.message.credit)
        return replace(command, message=msgspec.structs.replace(command.message, credit=credit))
    if isinstance(command, Scatter):
        credit = named.get(Credit(command.slot, command.generation), Credit(command.slot, command.generation))
        return replace(command, generation=credit.generation)
    return command
