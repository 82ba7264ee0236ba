"""Which parts leave while a prompt is computed: how far it is computed, how far it is sent, and the step between.

A prompt is computed chunk after chunk of tokens, and a chunk layer after layer. So what is there is always of one
shape, a :class:`Reach`: all layers of the first tokens, and of the tokens that follow the first layers alone. What is
sent is of that shape too. The step from one to the other is a few rectangles (:class:`Strip`) that are disjoint from
all before: a rectangle that was begun is finished before the next is, so that what is sent keeps its shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import msgspec

from pushkv.core.span import Span

Counts = tuple[int, ...]
"""So many layers of each cache group, from the first on."""
Spans = tuple[Span, ...]


class Stream(Enum):
    """The smallest part that may leave before the others are computed."""

    REQUEST = "request"
    """All that an offer asks for, at once."""
    CHUNK = "chunk"
    """All layers of the tokens that a step of the engine has computed."""
    LAYER = "layer"
    """Some layers of the tokens that are being computed."""


class Ahead(NamedTuple):
    """Of the tokens up to ``until`` the first ``layers`` are there."""

    until: int
    layers: Counts


class Reach(NamedTuple):
    """All layers of tokens 0 to ``tokens``, and some of those that follow."""

    tokens: int
    ahead: Ahead | None = None


class Strip(NamedTuple):
    """Tokens ``start`` to ``stop`` of layers ``low`` to ``high`` of each group; None: to the last."""

    start: int
    stop: int
    low: Counts = ()
    high: Counts | None = None

    @property
    def whole(self) -> bool:
        """Whether it is of all layers."""
        return not any(self.low) and self.high is None


def advance(sent: Reach, there: Reach) -> tuple[list[Strip], Reach]:
    """What may be sent now, in order, and how far everything is sent then."""
    begun, at = _go_on(sent, there)
    fresh, at = _begin(at, there)
    return begun + fresh, at


def _go_on(sent: Reach, there: Reach) -> tuple[list[Strip], Reach]:
    """Finish the tokens that some layers were sent of, as far as that goes."""
    if sent.ahead is None:
        return [], sent
    strips, tokens, (until, layers) = [], sent.tokens, sent.ahead
    stop = min(there.tokens, until)
    if stop > tokens:
        strips.append(Strip(tokens, stop, layers))
        tokens = stop
    if tokens == until:
        return strips, Reach(tokens)
    if there.ahead is not None and there.ahead.until >= until:
        more = tuple(max(pair) for pair in zip(layers, there.ahead.layers, strict=True))
        if more != layers:
            strips.append(Strip(tokens, until, layers, more))
            layers = more
    return strips, Reach(tokens, Ahead(until, layers))


def _begin(sent: Reach, there: Reach) -> tuple[list[Strip], Reach]:
    """Take up tokens that nothing was sent of."""
    if sent.ahead is not None:
        return [], sent
    strips, tokens = [], sent.tokens
    if there.tokens > tokens:
        strips.append(Strip(tokens, there.tokens))
        tokens = there.tokens
    if there.ahead is None or there.ahead.until <= tokens:
        return strips, Reach(tokens)
    strips.append(Strip(tokens, there.ahead.until, (), there.ahead.layers))
    return strips, Reach(tokens, there.ahead)


def clip(spans: Spans, strip: Strip) -> Spans:
    """The parts of spans that lie in a strip's layers."""
    if strip.whole:
        return spans
    clipped = []
    for span in spans:
        low = max(span.layer_start, strip.low[span.group] if strip.low else 0)
        high = span.layer_stop if strip.high is None else min(span.layer_stop, strip.high[span.group])
        if low < high:
            clipped.append(msgspec.structs.replace(span, layer_start=low, layer_stop=high))
    return tuple(clipped)


def _same(counts: Counts) -> Counts | None:
    return counts


@dataclass(frozen=True)
class Streaming:
    """How a producer rank streams to one consumer rank.

    ``common`` turns layers as the producer counts them into layers as spans do, None where that is all that is owed.
    A part ends at a multiple of ``grid`` tokens, where the blocks of both sides end, unless the offer ends there.
    One that is not ``worth`` it waits for more; the last one never does. Unless layers lie ``apart``, some layers of
    a block are more pieces than all of them, and leave by themselves only where they are gathered into slots.
    """

    stream: Stream = Stream.LAYER
    common: Callable[[Counts], Counts | None] = _same
    grid: int = 1
    apart: bool = True
    worth: Callable[[Spans], bool] = bool

    def reach(self, computed: Reach, stop: int, *, lands: bool = False) -> Reach:
        """How much of an offer up to token ``stop`` may be sent, where this much is computed; ``lands``: in slots."""
        ready, ahead = self._owed(computed)
        if self.stream is Stream.REQUEST:
            return Reach(stop if ready >= stop else 0)
        tokens = self._whole(ready, stop)
        if ahead is None or self.stream is Stream.CHUNK or not (self.apart or lands):
            return Reach(tokens)
        until = self._whole(ahead.until, stop)
        return Reach(tokens, Ahead(until, ahead.layers)) if until > tokens else Reach(tokens)

    def _owed(self, computed: Reach) -> Reach:
        """The same in the layers that are owed."""
        ready, ahead = computed
        if ahead is None:
            return computed
        layers = self.common(ahead.layers)
        if layers is None:
            return Reach(ahead.until)
        return Reach(ready, Ahead(ahead.until, layers) if any(layers) else None)

    def _whole(self, tokens: int, stop: int) -> int:
        return stop if tokens >= stop else tokens - tokens % self.grid

    def there(self, spans: Spans, computed: Reach) -> bool:
        """Whether all of these spans is computed."""
        ready, ahead = self._owed(computed)
        return all(
            span.token_stop <= ready
            or (ahead is not None and span.token_stop <= ahead.until and span.layer_stop <= ahead.layers[span.group])
            for span in spans
        )
