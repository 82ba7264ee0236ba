"""The bytes of a part in an order that both ranks know, whatever their layouts are, so that both can take a digest.

The order is that of the part's spans, and within a span the ascending order of the consumer's memory, which is the
order of a plan's runs. Runs merge by where the source blocks are, which the consumer does not know; the bytes, one
after the other, are the same however they merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pushkv.core.copies import CopyPlan
from pushkv.core.geometry import BlockTable
from pushkv.core.plan import plan_copy
from pushkv.core.runs import Runs
from pushkv.core.span import Span
from pushkv.core.template import PairTemplate


def source_bytes(plans: Iterable[CopyPlan]) -> Runs:
    """What these plans read, in order."""
    return _joined([plan.reads for plan in plans])


def written_bytes(plans: Iterable[CopyPlan]) -> Runs:
    """What these plans write, in order."""
    return _joined([plan.writes for plan in plans])


def target_bytes(
    template: PairTemplate, target_blocks: Sequence[BlockTable], spans: Iterable[Span], end: int
) -> Runs:
    """Where what the producer sends of these spans lands, byte for byte in the order of :func:`source_bytes`.

    ``end`` is how many tokens the request has, and ``target_blocks`` one table a group. Raises GeometryError for
    spans that no plan can be made of.
    """
    return written_bytes(plan_span(template, _any_blocks(template, span), target_blocks, span, end) for span in spans)


def plan_span(
    template: PairTemplate,
    source_blocks: Sequence[BlockTable],
    target_blocks: Sequence[BlockTable],
    span: Span,
    end: int,
) -> CopyPlan:
    """The plan of one span of a request of ``end`` tokens. Raises GeometryError as :func:`plan_copy` does."""
    return plan_copy(
        template.source,
        template.target,
        source_blocks,
        target_blocks,
        (span.token_start, span.token_stop),
        template=template,
        layers=(span.layer_start, span.layer_stop),
        groups=(span.group,),
        end=end,
    )


def _any_blocks(template: PairTemplate, span: Span) -> list[BlockTable]:
    """Source tables that hold the span: in some blocks or other."""
    tables = []
    for group in template.source.groups:
        first, stop = (group.stripe.before(token) for token in (span.token_start, span.token_stop))
        first, stop = first // group.block_size, -(-stop // group.block_size)
        tables.append(BlockTable(first, np.arange(min(stop - first, group.blocks), dtype=np.int32)))
    return tables


def _joined(many: list[Runs]) -> Runs:
    none = np.zeros(0, np.int64)
    return Runs(
        np.concatenate([none, *(runs.region for runs in many)]),
        np.concatenate([none, *(runs.offset for runs in many)]),
        np.concatenate([none, *(runs.length for runs in many)]),
    )
