"""Spans of KV, and whether a set of them covers what was owed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

FEW = 32
"""So many spans are compared one with another; beyond that it is marked what is covered, so that a part's spans cost
what they cover, and not the square of their number."""
SPLINTERS = 64
"""A part may have so many spans for each that is owed: a producer cuts one into a few, and each has to be planned."""
_Index = Annotated[int, Meta(ge=0, lt=2**31)]


class Span(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Layers ``layer_start`` to ``layer_stop`` of a group (counted in the layers a rank pair has in common)
    over tokens ``token_start`` to ``token_stop`` of a request."""

    group: _Index
    layer_start: _Index
    layer_stop: _Index
    token_start: _Index
    token_stop: _Index

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.layer_stop - self.layer_start

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return self.token_stop - self.token_start

    @property
    def area(self) -> int:
        """Layers times tokens."""
        return self.layers * self.tokens

    def within(self, other: Span) -> bool:
        """Whether every element of this span is one of the other's."""
        return (
            self.group == other.group
            and other.layer_start <= self.layer_start < self.layer_stop <= other.layer_stop
            and other.token_start <= self.token_start < self.token_stop <= other.token_stop
        )

    def overlaps(self, other: Span) -> bool:
        """Whether the two share an element."""
        return (
            self.group == other.group
            and self.layer_start < other.layer_stop
            and other.layer_start < self.layer_stop
            and self.token_start < other.token_stop
            and other.token_start < self.token_stop
        )


class Coverage:
    """What has arrived of the spans that one producer rank owes.

    Completeness is about what is covered, not about how many notifications came: parts are disjoint and
    lie inside what is owed, so they cover it exactly when the areas are equal. A rank that once said something
    that does not fit (``disputed``) may have more under way than it says: its coverage proves nothing any more.
    """

    __slots__ = ("_marks", "_missing", "disputed", "owed", "parts")

    def __init__(self, owed: tuple[Span, ...]) -> None:
        self.owed = owed
        self.parts: dict[int, tuple[Span, ...]] = {}
        self._missing = sum(span.area for span in owed)
        self.disputed = False
        # Of each span owed, layers by tokens that have come; empty while there are few spans.
        self._marks: tuple[NDArray[np.bool_], ...] = ()

    @property
    def full(self) -> bool:
        """Whether everything owed has arrived."""
        return self._missing == 0 and not self.disputed

    def add(self, part: int, spans: tuple[Span, ...], whole: tuple[Span, ...] | None = None) -> bool:
        """Take a part in; False where it is a duplicate. ``whole`` is what all parts are said to cover.

        Raises ValueError where it does not fit what is owed, or what came before; the coverage is disputed then.
        """
        known = self.parts.get(part)
        if known == spans:
            return False
        try:
            self._check(part, spans, whole)
        except ValueError:
            self.disputed = True
            raise
        self.parts[part] = spans
        self._missing -= sum(span.area for span in spans)
        return True

    def _check(self, part: int, spans: tuple[Span, ...], whole: tuple[Span, ...] | None) -> None:
        if splintered(spans, self.owed):
            raise ValueError(f"part {part} comes in {len(spans)} spans of {len(self.owed)} that are owed")
        if part in self.parts:
            raise ValueError(f"part {part} came twice with different spans")
        if whole is not None and not same_spans(whole, self.owed):
            raise ValueError(f"the whole is said to be {whole}, owed are {self.owed}")
        if not self._marks:
            taken = [span for earlier in self.parts.values() for span in earlier]
            if len(taken) + len(spans) <= FEW:
                self._compare(part, spans, taken)
                return
            self._marks = tuple(np.zeros((one.layers, one.tokens), np.bool_) for one in self.owed)
            for span in taken:
                self._mark(part, span)
        for span in spans:
            self._mark(part, span)

    def _compare(self, part: int, spans: tuple[Span, ...], taken: list[Span]) -> None:
        for span in spans:
            self._place(part, span)
            if any(span.overlaps(other) for other in taken):
                raise ValueError(f"part {part} covers {span} a second time")
            taken.append(span)

    def _mark(self, part: int, span: Span) -> None:
        number = self._place(part, span)
        first, tokens = self.owed[number].layer_start, self.owed[number].token_start
        layers = slice(span.layer_start - first, span.layer_stop - first)
        marks = self._marks[number][layers, span.token_start - tokens : span.token_stop - tokens]
        if marks.any():
            raise ValueError(f"part {part} covers {span} a second time")
        marks[:] = True

    def _place(self, part: int, span: Span) -> int:
        """The number of the span owed that this one is of. Raises ValueError where there is none."""
        for number, owed in enumerate(self.owed):
            if span.within(owed):
                return number
        raise ValueError(f"part {part} covers {span}, which was not owed")


def splintered(spans: tuple[Span, ...], owed: tuple[Span, ...]) -> bool:
    """Whether a part comes in more spans than any producer cuts what is owed into: each costs a plan."""
    return len(spans) > SPLINTERS * (1 + len(owed))


def same_spans(left: Iterable[Span], right: Iterable[Span]) -> bool:
    """Whether two sets of disjoint spans are the same set."""
    return sorted(left) == sorted(right)
