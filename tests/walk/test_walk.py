"""The walks, and the mutants that they must catch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from walk.mutants import MUTANTS, Mutant
from walk.walks import LARGER_WALKS, WALKS, Walk

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_CHOSEN = LARGER_WALKS if os.environ.get("PUSHKV_WALK") == "full" else WALKS


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


def test_the_page_about_the_protocol_names_every_walk_and_mutant() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for each in (*WALKS, *LARGER_WALKS):
        assert f"| {each.name} |" in page
    for mutant in MUTANTS:
        assert f"| {mutant.name} | {mutant.rule} | *{mutant.caught_by}* |" in page
