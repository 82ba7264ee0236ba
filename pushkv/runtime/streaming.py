"""What a producer's ``stream`` setting comes to for one consumer rank."""

from __future__ import annotations

from pushkv.core.parts import part_bytes
from pushkv.core.span import Span
from pushkv.core.streaming import Stream, Streaming
from pushkv.core.template import PairTemplate

WORTH = 4 << 20
"""Bytes of the least part that ``auto`` lets go early: a part costs a plan, a WRITE and a notification, about a
millisecond whatever it holds, in which 3 MiB cross at 3 GB/s."""


def streaming_of(setting: str, template: PairTemplate) -> Streaming:
    """How parts are made for the consumer rank of this pair."""

    def worth(spans: tuple[Span, ...]) -> bool:
        return part_bytes(template, spans) >= WORTH

    auto = setting == "auto"
    stream = Stream.LAYER if auto else Stream(setting)
    apart = template.layers_apart
    return Streaming(stream, template.common_layers, template.token_grid, apart, worth if auto else bool)
