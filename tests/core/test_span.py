"""Coverage: what is covered counts, not what comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol import owed

from pushkv.core.span import FEW, SPLINTERS, Coverage, Span, same_spans


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


rectangles = st.builds(
    lambda group, layer, layers, token, tokens: Span(group, layer, layer + layers, token, token + tokens),
    st.integers(0, 1), st.integers(2, 6), st.integers(0, 2), st.integers(4, 40), st.integers(0, 3),
)  # fmt: skip


@given(st.lists(st.lists(rectangles, min_size=1, max_size=6), max_size=3), st.lists(rectangles, max_size=12))
def test_many_spans_are_taken_as_few_are(parts: list[list[Span]], more: list[Span]) -> None:
    """What fits is taken and what does not is refused, also where it is marked what has come."""
    whole = (Span(0, 2, 8, 4, 44), Span(1, 3, 8, 8, 44))
    column = tuple(Span(0, layer, layer + 1, token, token + 1) for layer in (2, 3) for token in range(4, 44))
    assert len(column) > FEW
    for begun in ([], [column]):
        coverage, taken = Coverage(whole), set()
        for number, spans in enumerate([*begun, *map(tuple, parts), *((one,) for one in more)]):
            elements = [(one.group, layer, token) for one in spans for layer in range(one.layer_start, one.layer_stop)
                        for token in range(one.token_start, one.token_stop)]  # fmt: skip
            fits = all(any(one.within(owed) for owed in whole) for one in spans)
            if fits and len(elements) == len(set(elements)) and taken.isdisjoint(elements):
                assert coverage.add(number, spans)
                taken.update(elements)
                continue
            with pytest.raises(ValueError, match=r"not owed|a second time"):
                coverage.add(number, spans)
            break
        assert coverage.full == (not coverage.disputed and len(taken) == sum(one.area for one in whole))


def test_thousands_of_spans_cost_what_they_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared one with another, those of one frame kept a consumer from all its other peers for seconds."""
    compared = 0
    overlaps = Span.overlaps

    def counted(one: Span, other: Span) -> bool:
        nonlocal compared
        compared += 1
        return overlaps(one, other)

    monkeypatch.setattr(Span, "overlaps", counted)
    coverage = Coverage((Span(0, 0, 2, 0, 2048),))
    every = [Span(0, layer, layer + 1, token, token + 1) for layer in range(2) for token in range(2048)]
    for part in range(64):
        assert not coverage.full
        assert coverage.add(part, tuple(every[64 * part : 64 * part + 64]))
    assert coverage.full
    assert compared <= FEW * FEW
    with pytest.raises(ValueError, match="a second time"):
        coverage.add(64, (Span(0, 0, 1, 7, 8),))


def test_a_part_in_splinters_is_refused() -> None:
    """Each of them would have to be planned; no producer cuts what it owes into that many."""
    splinters = tuple(Span(0, 0, 1, token, token + 1) for token in range(2 * SPLINTERS + 1))
    coverage = Coverage((Span(0, 0, 1, 0, 1000),))
    assert coverage.add(0, splinters[1:])
    with pytest.raises(ValueError, match="comes in 129 spans of 1"):
        Coverage(coverage.owed).add(0, splinters)
