"""Cells: a layer of a token. What a rank owes of them, what a span holds, what an engine has computed."""

from __future__ import annotations

from typing import NamedTuple

from pushkv.core.span import Span

TOKENS = 2
HALF = 10
Cells = set[tuple[int, int]]
"""(layer, token) pairs."""


class Owes(NamedTuple):
    """What a rank owes: one layer of its own, or all layers where there is one rank, of each token."""

    rank: int
    layers: int = 1

    def __call__(self, start: int, stop: int, _end: int = TOKENS) -> tuple[Span, ...]:
        return (Span(0, self.rank, self.rank + self.layers, start, stop),) if start < stop else ()


def cells_of(spans: tuple[Span, ...]) -> Cells:
    """The cells of spans."""
    return {
        (layer, token)
        for span in spans
        for layer in range(span.layer_start, span.layer_stop)
        for token in range(span.token_start, span.token_stop)
    }


def computed(staged: int, first: int) -> Cells:
    """What an engine has staged (:attr:`walk.world.Seat.staged`) of layers from ``first`` on."""
    until, ready = divmod(staged, HALF)
    return cells_of((Span(0, first, first + 2, 0, ready), Span(0, first, first + 1, 0, until)))
