"""The tables of states: closed, each with a way out, and the diagrams in the docs are theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pushkv.core.states import (
    SOURCE,
    TABLES,
    TARGET,
    Slot,
    Source,
    SourceEvent,
    Target,
    TargetEvent,
    TransitionError,
    diagrams,
    step,
)

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_used_and_reached(name: str) -> None:
    table = TABLES[name]
    kind = type(next(iter(table))[0])
    first = next(iter(table))[0]
    reached, more = {first}, [first]
    while more:
        state = more.pop()
        for (before, _), after in table.items():
            if before is state and after not in reached:
                reached.add(after)
                more.append(after)
    assert reached == set(kind)


@pytest.mark.parametrize(("table", "end", "proofs"), [
    (TARGET, Target.ENDED, {TargetEvent.COVER, TargetEvent.DRAIN, TargetEvent.PROVE}),
    (SOURCE, Source.ENDED, {SourceEvent.LAST_DONE, SourceEvent.PROVE}),
])  # fmt: skip
def test_custody_ends_on_proof_alone(table: dict, end: object, proofs: set) -> None:
    never_given = {Target.QUEUED, Source.IDLE}
    ways = {event for (state, event), after in table.items() if after is end and state not in never_given}
    assert ways <= proofs


def test_a_stuck_write_ends_by_proof_only() -> None:
    assert {event for (state, event) in SOURCE if state is Source.STUCK} == {SourceEvent.PROVE}


def test_ended_is_the_end() -> None:
    for table, end in ((TARGET, Target.ENDED), (SOURCE, Source.ENDED)):
        assert not any(state is end for state, _ in table)
    assert Slot.FREE in TABLES["Custody of a landing slot (consumer)"].values()


def test_a_transition_that_is_not_there() -> None:
    with pytest.raises(TransitionError, match="Target has no transition from OFFERED on DRAIN"):
        step(TARGET, Target.OFFERED, TargetEvent.DRAIN)


def test_the_diagrams_in_the_docs_are_generated() -> None:
    page = PAGE.read_text(encoding="utf-8")
    held = page.split("<!-- states: python -m pushkv.core.states -->\n")[1].split("<!-- end of states -->")[0]
    assert held.strip() == diagrams().strip(), "put the output of python -m pushkv.core.states there"
