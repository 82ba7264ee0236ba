"""The walks, and the mutants that they must catch."""

from __future__ import annotations

import os

import pytest

from walk.mutants import MUTANTS, Mutant
from walk.walks import LARGER_WALKS, WALKS, Walk

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
