"""The ledger of blocks, which the soak and the chaos trust."""

from __future__ import annotations

import numpy as np
import pytest

from pushkv.testing.broken import Broken, Rule
from pushkv.testing.ledger import Ledger
from pushkv.testing.patterns import HOLE, KV_VALUES, Prompts, canary


@pytest.fixture
def array() -> np.ndarray:
    return np.zeros((2, 4, 3), np.uint8)


@pytest.fixture
def ledger(array: np.ndarray) -> Ledger:
    return Ledger("d0", array, 1)


def test_the_last_block_given_back_is_taken_first(ledger: Ledger) -> None:
    assert ledger.take(5, "r") is None
    taken = ledger.take(3, "r")
    assert taken == [3, 2, 1]
    assert ledger.owned() == ["r"]
    ledger.give_back([2])
    assert ledger.take(1, "s") == [2]
    assert ledger.free == 1


def test_blocks_are_full_of_holes_when_taken_and_of_canaries_when_free(ledger: Ledger, array: np.ndarray) -> None:
    assert (array == canary(0)).all()
    taken = ledger.take(1, "r")
    assert taken == [3]
    assert (array[:, 3] == HOLE).all()
    ledger.give_back(taken)
    assert (array[:, 3] == canary(1)).all()


def test_a_touched_block_is_found(ledger: Ledger, array: np.ndarray) -> None:
    ledger.check()
    array[1, 2, 0] = 7
    with pytest.raises(Broken, match=r"block 2 of d0 holds \[7\] and should hold 251") as found:
        ledger.check()
    assert found.value.rule is Rule.CANARY
    ledger.take(1, "r")
    with pytest.raises(Broken):
        ledger.take(1, "r")


def test_given_back_twice(ledger: Ledger) -> None:
    taken = ledger.take(1, "r")
    assert taken is not None
    ledger.give_back(taken)
    with pytest.raises(Broken, match="given back twice"):
        ledger.give_back(taken)


def test_a_broken_rule_is_not_hidden_by_what_survives_errors() -> None:
    assert not issubclass(Broken, Exception)


def test_prompts_differ_and_are_no_canaries() -> None:
    prompts = Prompts((2, 3), 10)
    assert prompts.kv(1).shape == (10, 2, 3)
    assert (prompts.kv(1) == prompts.kv(1)).all()
    assert (prompts.kv(1) != prompts.kv(2)).mean() > 0.9
    assert prompts.kv(5).max() < KV_VALUES
