"""The walks, and the mutants that they must catch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from walk.mutants import MUTANTS, Mutant
from walk.parallel import walk as walk_by_many
from walk.rules import Rules
from walk.search import walk
from walk.walks import EVERYTHING, LARGER_WALKS, LONG_WALKS, WALKS, Walk
from walk.world import Bounds

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_CHOSEN = {"long": LONG_WALKS, "full": LARGER_WALKS}.get(os.environ.get("PUSHKV_WALK", ""), WALKS)


@pytest.mark.walk
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chosen", _CHOSEN, ids=lambda chosen: chosen.name)
def test_every_rule_holds_in_every_state(chosen: Walk) -> None:
    seen = chosen.run()
    assert not seen.broken
    assert seen.whole


@pytest.mark.walk
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_is_found(mutant: Mutant) -> None:
    seen = mutant.hunt()
    assert seen.broken.startswith(mutant.caught_by), seen.broken or "not caught"
    assert seen.path


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(attempts=1, parts=1, preemptions=0, c_restarts=0),
        Bounds(attempts=1, parts=1, ranks=2, preemptions=0, c_restarts=0, p_restarts=0, losses=False),
        Bounds(attempts=1, parts=1, preemptions=0, c_restarts=0, p_restarts=0, slots=1, slot_tokens=1),
    ],
    ids=["one rank", "two ranks", "slots"],
)
def test_many_processes_see_what_one_does(bounds: Bounds) -> None:
    one, many = walk(Rules(bounds)), walk_by_many(bounds, 3)
    assert walk_by_many(bounds, 1) == one
    assert many.whole
    assert not many.broken
    assert (many.producer_states, many.consumer_states) == (one.producer_states, one.consumer_states)
    assert abs(many.uncovered - one.uncovered) < one.uncovered / 50  # which come first decides which are forgotten


@pytest.mark.parametrize("name", ["E", "nonce", "preempt", "posts on", "first proof", "covered by one"])
def test_many_processes_find_a_broken_rule(name: str) -> None:
    (mutant,) = (one for one in MUTANTS if one.name == name)
    mutated = type("Mutated", (Rules,), {"producer": mutant.producer, "consumer": mutant.consumer})
    assert walk_by_many(mutant.bounds, 2, rules=mutated).broken.startswith(mutant.caught_by)


def test_the_page_about_the_protocol_names_every_walk_and_mutant() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for each in (*WALKS, *LONG_WALKS, *LARGER_WALKS, EVERYTHING):
        assert f"| {each.name} |" in page
    for mutant in MUTANTS:
        assert f"| {mutant.name} | {mutant.rule} | *{mutant.caught_by}* |" in page
