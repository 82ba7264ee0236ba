"""Coverage: what is covered counts, not what comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol import owed

from pushkv.core.span import Coverage, Span, same_spans


def test_full_when_covered() -> None:
    coverage = Coverage(owed(0, 8))
    assert coverage.add(1, owed(4, 8), owed(0, 8))
    assert not coverage.full
    assert coverage.add(0, owed(0, 4))
    assert coverage.full


def test_a_duplicate_counts_once() -> None:
    coverage = Coverage(owed(0, 8))
    assert coverage.add(0, owed(0, 4))
    assert not coverage.add(0, owed(0, 4))
    assert not coverage.full


@pytest.mark.parametrize(
    ("part", "spans", "whole", "says"),
    [
        (0, owed(0, 5), None, "twice with different spans"),
        (1, owed(3, 6), None, "a second time"),
        (1, owed(4, 9), None, "not owed"),
        (1, (Span(1, 0, 1, 4, 8),), None, "not owed"),
        (1, (Span(0, 0, 2, 4, 8),), None, "not owed"),
        (1, (Span(0, 0, 1, 6, 6),), None, "not owed"),
        (1, (*owed(4, 6), *owed(5, 8)), None, "a second time"),
        (1, owed(4, 8), owed(0, 9), "the whole is said to be"),
    ],
)
def test_what_does_not_fit_disputes_it_for_good(
    part: int, spans: tuple[Span, ...], whole: tuple[Span, ...] | None, says: str
) -> None:
    coverage = Coverage(owed(0, 8))
    coverage.add(0, owed(0, 4))
    with pytest.raises(ValueError, match=says):
        coverage.add(part, spans, whole)
    coverage.add(2, owed(4, 8))
    assert coverage.disputed
    assert not coverage.full


@given(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=60))
def test_full_exactly_when_every_part_has_come(arrivals: list[tuple[int, bool]]) -> None:
    """16 tokens in parts of one token each, two groups by turns, in any order, any number of times."""
    whole = tuple(Span(group, 0, 3, 0, 8) for group in (0, 1))
    coverage, come = Coverage(whole), set()
    for number, last in arrivals:
        part = (Span(number % 2, 0, 3, number // 2, number // 2 + 1),)
        assert coverage.add(number, part, whole if last else None) == (number not in come)
        come.add(number)
        assert coverage.full == (len(come) == 16)


def test_nothing_owed_is_covered() -> None:
    assert Coverage(()).full


def test_the_same_spans_in_another_order() -> None:
    assert same_spans([*owed(0, 1), *owed(2, 3)], [*owed(2, 3), *owed(0, 1)])
    assert not same_spans(owed(0, 1), owed(0, 2))
