"""Ranks that share a request's tokens out: what two of them have in common, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pushkv.core.common import CommonTokens
from pushkv.core.compat import compatibility
from pushkv.core.covering import uncovered
from pushkv.core.geometry import BlockTable, CacheGroup, Geometry, Kind, Stripe
from pushkv.core.laid import LaidCopy
from pushkv.core.layouts import Shard, dense_array, group_of_layers, shard
from pushkv.core.parts import PartPlans, cut, span_bytes
from pushkv.core.plan import plan_copy
from pushkv.core.span import Coverage, Span
from pushkv.core.template import PairTemplate, writers
from pushkv.errors import GeometryError, GeometryMismatch

BLOCK = 8
ALL = Shard(0, 1, 1)


def group(share: Shard = ALL, *, block: int = BLOCK, blocks: int = 64, **more: Any) -> CacheGroup:
    """One layer of a head, keys and values apart."""
    array = dense_array("SBNC", {"S": 2, "B": blocks, "N": block, "C": 4}, 4, "float32")
    return group_of_layers({"layer": array}, "SBNC", share, **more)


def dealt(index: int, count: int, width: int = BLOCK, **more: Any) -> Geometry:
    return Geometry((group(Shard(0, 1, 1, stripe=Stripe(index, count, width)), **more),))


PLAIN = Geometry((group(),))


def held(stripe: Stripe, token: int) -> bool:
    return token // stripe.width % stripe.count == stripe.index


@st.composite
def stripes(draw: st.DrawFn) -> Stripe:
    count = draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
    return Stripe(draw(st.integers(0, count - 1)), count, draw(st.sampled_from([1, 2, 3, 4, 8])))


@settings(max_examples=300, deadline=None)
@given(stripes(), stripes(), st.integers(0, 150), st.integers(0, 60), st.integers(0, 60))
def test_common_tokens_are_those_that_both_hold(one: Stripe, other: Stripe, start: int, more: int, most: int) -> None:
    common, stop, end = CommonTokens.of(one, other), start + more, start + more + most
    both = [token for token in range(end) if held(one, token) and held(other, token)]
    assert common.before(end) == len(both)
    assert [common.past(count) for count in range(len(both) + 1)] == [0, *(token + 1 for token in both)]
    assert common.count((start, stop)) == sum(start <= token < stop for token in both)
    runs = zip(*common.runs((start, stop)), strict=True)
    assert [token for low, high in runs for token in range(low, high)] == [t for t in both if start <= t < stop]
    # Ranges that partition a request still do when they are trimmed, and say what they hold.
    first, second, whole = (common.trim(each) for each in ((start, stop), (stop, end), (start, end)))
    assert (first[1], (first[0], second[1])) == (second[0], whole)
    assert common.count(first) == common.count((start, stop))
    assert common.trim(first) == first
    assert first[1] <= stop
    if first[0] < first[1]:
        inside = [token for token in both if start <= token < stop]
        assert common.ends(first) == (inside[0], inside[-1])
    assert common.every == all(held(one, token) and held(other, token) for token in range(common.period))
    assert common.empty == (not any(held(one, token) and held(other, token) for token in range(common.period)))


@pytest.mark.parametrize(("count", "width"), [(2, 1), (2, 4), (4, 8), (3, 2)])
def test_a_token_lies_where_vllms_slot_mapping_puts_it(count: int, width: int) -> None:
    """Its formula: of a virtual block of ``block * count`` tokens each rank keeps its runs one after the other."""
    virtual = BLOCK * count
    for token in range(3 * virtual):
        offset = token % virtual
        for index in range(count):
            stripe = Stripe(index, count, width)
            if offset // width % count == index:
                slot = token // virtual * BLOCK + offset // (count * width) * width + offset % width
                assert stripe.before(token) == slot == stripe.places(np.array([token]))[0]
            else:
                assert not stripe.holds(np.array([token]))[0]


def test_ranks_that_would_hold_copies_share_tokens_out() -> None:
    assert [shard(2, rank, 8, stripes=2, width=16) for rank in range(4)] == [
        Shard(0, 1, 2, 0, 2, Stripe(0, 2, 16)),
        Shard(0, 1, 2, 0, 2, Stripe(1, 2, 16)),
        Shard(0, 1, 2, 1, 2, Stripe(0, 2, 16)),
        Shard(0, 1, 2, 1, 2, Stripe(1, 2, 16)),
    ]
    assert shard(1, 5, 8, stripes=8).stripe == Stripe(5, 8, 1)
    with pytest.raises(GeometryError, match=r"held 4 times .* shared out to 3 ranks; the latter must divide"):
        shard(2, 0, 8, stripes=3)
    with pytest.raises(GeometryError, match=r"held 1 times .* to 2 ranks"):
        shard(8, 0, 4, stripes=2)


class TestWhoOwesWhat:
    def test_each_rank_owes_its_own_tokens(self) -> None:
        ranks = [PairTemplate(dealt(index, 2), PLAIN) for index in range(2)]
        assert not uncovered(ranks)
        assert ranks[0].owed((0, 30)) == (Span(0, 0, 1, 0, 24),)
        assert ranks[1].owed((0, 30)) == (Span(0, 0, 1, 0, 30),)
        assert [span_bytes(rank, rank.owed((0, 30))[0]) for rank in ranks] == [16 * 32, 14 * 32]

    def test_of_a_short_prompt_some_owe_nothing(self) -> None:
        ranks = [PairTemplate(dealt(index, 4), PLAIN) for index in range(4)]
        assert [bool(rank.owed((0, 9))) for rank in ranks] == [True, True, False, False]
        assert [bool(rank.owed((17, 20))) for rank in ranks] == [False, False, True, False]
        assert all(rank.writes for rank in ranks)

    @pytest.mark.parametrize(("ours", "theirs"), [(2, 4), (4, 2), (4, 4), (1, 3), (3, 1)])
    def test_consumer_ranks_are_written_to_by_those_with_their_tokens(self, ours: int, theirs: int) -> None:
        sources = [dealt(index, ours) if ours > 1 else PLAIN for index in range(ours)]
        for index in range(theirs):
            target = dealt(index, theirs) if theirs > 1 else PLAIN
            fewest = min(ours, theirs)
            chosen = [rank for rank in range(ours) if rank % fewest == index % fewest]
            assert writers(sources, target) == tuple(chosen)
            assert not uncovered([PairTemplate(source, target) for source in sources])

    def test_a_stripe_that_nobody_has_is_named(self) -> None:
        lines = uncovered([PairTemplate(dealt(index, 4), PLAIN) for index in (0, 1, 3)])
        assert lines == [
            "group 0, layer 'layer': heads [0, 1) are held, [0, 1) of stripe 0 of 4, 8 tokens wide, "
            "[0, 1) of stripe 1 of 4, 8 tokens wide, [0, 1) of stripe 3 of 4, 8 tokens wide would be written"
        ]
        twice = [dealt(0, 2), dealt(1, 2), dealt(3, 4)]
        assert len(uncovered([PairTemplate(one, PLAIN) for one in twice])) == 1
        assert (
            "of stripe 1 of 2, 8 tokens wide are held, none" in uncovered([PairTemplate(dealt(0, 2), dealt(1, 2))])[0]
        )

    def test_parts_that_stream_cover_the_whole(self) -> None:
        """However a prompt is computed, what leaves with each chunk makes up what is owed."""
        for width in (1, 4, 8):
            pair = PairTemplate(dealt(1, 4, width), dealt(1, 2, 8))
            whole = pair.owed((5, 200))
            coverage = Coverage(whole)
            edges = [5, 6, 30, 64, 65, 100, 140, 200]
            for part, tokens in enumerate(pairwise(edges)):
                if spans := pair.owed(tokens, end=200):
                    assert not coverage.full
                    coverage.add(part, spans)
            assert coverage.full

    def test_a_window_moves_its_last_tokens_alone(self) -> None:
        window = {"kind": Kind.WINDOW, "window": 20}
        pair = PairTemplate(dealt(0, 2, **window), Geometry((group(**window),)))
        (span,) = pair.owed((0, 100))
        assert (
            pair.pairs[0].common.count((span.token_start, span.token_stop)) == 12
        )  # of [80, 100): [80, 88), [96, 100)


class TestPlans:
    def test_blocks_dealt_out_whole_are_copied_whole(self) -> None:
        """With runs of a block, rank 1 of 2 has blocks 1, 3 and 5 of a request one after the other."""
        pair = PairTemplate(dealt(1, 2), PLAIN)
        plan = plan_copy(
            pair.source, pair.target, [BlockTable(0, [4, 9, 2])], [BlockTable(0, [10, 11, 12, 13, 14, 15])], (0, 48),
            template=pair,
        )  # fmt: skip
        row, side = BLOCK * 16, 64 * BLOCK * 16
        assert plan.source_offset.tolist() == [4 * row, 9 * row, 2 * row] + [side + n * row for n in (4, 9, 2)]
        assert plan.target_offset.tolist() == [11 * row, 13 * row, 15 * row] + [side + n * row for n in (11, 13, 15)]
        assert plan.length.tolist() == [row] * 6
        assert plan.source_index is not None

    def test_tokens_dealt_out_one_by_one_are_copied_so(self) -> None:
        pair = PairTemplate(dealt(0, 2, 1), PLAIN)
        plan = plan_copy(
            pair.source, pair.target, [BlockTable(0, [4])], [BlockTable(0, [10, 11])], (0, 16), template=pair
        )
        assert plan.length.tolist() == [16] * 16
        assert plan.source_index is None

    def test_the_same_stripe_on_both_sides_is_as_plain(self) -> None:
        for width in (1, 4, 8):
            pair = PairTemplate(dealt(1, 2, width), dealt(1, 2, width))
            tables = [BlockTable(0, [4, 9])], [BlockTable(0, [10, 11])]
            plan = plan_copy(pair.source, pair.target, *tables, (0, 32), template=pair)
            assert plan.length.tolist() == [BLOCK * 16] * 4
            (copy,) = PartPlans(pair).gather(*tables, pair.owed((0, 32)), 32)
            assert isinstance(copy, LaidCopy)

    def test_a_block_of_each_rank_is_of_as_many_tokens_as_all_ranks_hold(self) -> None:
        pair = PairTemplate(dealt(1, 2), PLAIN)
        with pytest.raises(
            GeometryError,
            match=r"Tokens \[0, 48\) .* lie in logical blocks \[0, 3\) of 8 tokens; the source table holds \[0, 2\)",
        ):
            plan_copy(
                pair.source, pair.target, [BlockTable(0, [4, 9])], [BlockTable(0, range(6))], (0, 48), template=pair
            )

    def test_slots_hold_whole_blocks_where_they_can(self) -> None:
        pair = PairTemplate(dealt(1, 2), PLAIN)
        assert pair.pairs[0].grids == (8, 8)
        assert PairTemplate(dealt(1, 2, 1), PLAIN).pairs[0].grids == (8, 4)
        assert PairTemplate(dealt(2, 4, 4), dealt(1, 2, 8)).pairs[0].grids == (8, 4)
        owed = pair.owed((0, 100))
        parts = cut(pair, owed, 20 * 32)
        assert [[pair.pairs[0].common.count((s.token_start, s.token_stop)) for s in part] for part in parts] == [
            [16], [16], [16],
        ]  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(
        ("stripe", "more", "told"),
        [
            (Stripe(2, 2, 8), {}, "is stripe 2 of 2; count from 0"),
            (Stripe(-1, 2, 8), {}, "is stripe -1 of 2"),
            (Stripe(0, 0, 8), {}, "is stripe 0 of 0"),
            (Stripe(0, 1 << 20, 8), {}, "is stripe 0 of 1048576; .* at most 4096"),
            (Stripe(0, 2, 3), {}, "stripes of 3 tokens and blocks of 8; the former must divide"),
            (Stripe(0, 2, 16), {}, "stripes of 16 tokens and blocks of 8"),
            (Stripe(0, 2, 0), {}, "stripes of 0 tokens"),
            (Stripe(0, 2, 1), {"kind": Kind.STATE, "slot_tokens": 8}, "of a state, which has no tokens to share out"),
        ],
    )
    def test_a_stripe_that_cannot_be(self, stripe: Stripe, more: dict[str, Any], told: str) -> None:
        array = (
            dense_array("BC", {"B": 8, "C": 4}, 4, "f")
            if more
            else dense_array("BNC", {"B": 8, "N": 8, "C": 4}, 4, "f")
        )
        made = group_of_layers({"a": array}, "BC" if more else "BNC", Shard(0, 1, 1, stripe=stripe), **more)
        with pytest.raises(GeometryError, match=told):
            Geometry((made,)).check()

    def test_stripes_that_hardly_ever_meet(self) -> None:
        odd = Geometry((group(Shard(0, 1, 1, stripe=Stripe(0, 4093, 1)), block=1),))
        even = Geometry((group(Shard(0, 1, 1, stripe=Stripe(0, 4096, 1)), block=1),))
        with pytest.raises(GeometryMismatch, match="repeat after 16764928 only; set interleave sizes that divide"):
            PairTemplate(odd, even)

    def test_whole_blocks_that_no_block_of_the_other_side_is(self) -> None:
        whole = {"whole_blocks": True}
        packed = Geometry((group(**whole),))
        assert PairTemplate(dealt(0, 2, 8, **whole), packed).writes
        assert PairTemplate(dealt(0, 2, 4, **whole), dealt(0, 2, 4, **whole)).writes
        with pytest.raises(GeometryMismatch, match="tokens of group 0's whole blocks: stripe 0 of 2, 4 tokens wide"):
            PairTemplate(dealt(0, 2, 4, **whole), packed)
        assert dealt(0, 2, 8, **whole).grain == 16


def test_how_tokens_are_dealt_out_is_not_what_must_be_equal() -> None:
    assert compatibility(dealt(0, 2)).digest == compatibility(dealt(3, 4, 1)).digest == compatibility(PLAIN).digest


def test_it_travels() -> None:
    packed = msgspec.msgpack.encode(dealt(1, 2, 4))
    assert msgspec.msgpack.decode(packed, type=Geometry) == dealt(1, 2, 4)
