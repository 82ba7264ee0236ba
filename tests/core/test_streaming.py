"""Streaming: which parts leave while a prompt is computed, chunk by chunk and layer by layer."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol import PROMPT, TOKENS, blocks, key, offer, only, owed, producer, sent, stage

from pushkv.core.commands import Ended, Gather, Post, PostSlot, StageEnded, StageReleased
from pushkv.core.limits import Limits
from pushkv.core.messages import Cancel, Credit, Drained, Failed, Grant, Ring
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.ring import SlotPool
from pushkv.core.span import Coverage, Span
from pushkv.core.streaming import Ahead, Reach, Stream, Streaming, advance, clip
from pushkv.errors import ProtocolError

LAYERS = (4, 2)
"""Layers of two groups."""
Cell = tuple[int, int, int]


def two_groups(start: int, stop: int, _end: int = TOKENS) -> tuple[Span, ...]:
    """Two groups of several layers, of every token."""
    if start >= stop:
        return ()
    return tuple(Span(group, 0, layers, start, stop) for group, layers in enumerate(LAYERS))


def common(counts: tuple[int, ...]) -> tuple[int, ...] | None:
    """All of both groups is no count."""
    return None if counts == LAYERS else counts


def cells(spans: tuple[Span, ...]) -> set[Cell]:
    """(group, layer, token) of each element."""
    return {
        (span.group, layer, token)
        for span in spans
        for layer in range(span.layer_start, span.layer_stop)
        for token in range(span.token_start, span.token_stop)
    }


def computed_cells(there: Reach) -> set[Cell]:
    """The same of what is computed."""
    ahead = there.ahead or Ahead(there.tokens, (0, 0))
    early = tuple(
        Span(group, 0, layers, there.tokens, ahead.until) for group, layers in enumerate(ahead.layers) if layers
    )
    return cells(two_groups(0, there.tokens) + early)


reaches = st.builds(
    lambda tokens, more, layers: Reach(tokens, Ahead(tokens + more, layers) if more and any(layers) else None),
    st.integers(0, TOKENS),
    st.integers(0, 4),
    st.tuples(st.integers(0, 4), st.integers(0, 2)),
)


class TestSteps:
    @settings(deadline=None)
    @given(st.lists(reaches, max_size=8))
    def test_what_is_sent_is_computed_disjoint_and_in_the_end_all_of_it(self, ways: list[Reach]) -> None:
        at, done = Reach(0), set[Cell]()
        for there in [*ways, Reach(TOKENS + 4)]:  # each may be less than the one before: computed again
            strips, after = advance(at, there)
            for strip in strips:
                new = cells(clip(two_groups(strip.start, strip.stop), strip))
                assert not new & done
                assert new <= computed_cells(there)
                done |= new
            assert done == computed_cells(after)
            assert after.tokens >= at.tokens
            at = after
        assert done == computed_cells(Reach(TOKENS + 4))

    @given(reaches, reaches)
    def test_all_that_is_computed_goes_where_chunks_follow_each_other(self, first: Reach, second: Reach) -> None:
        _, at = advance(Reach(0), first)
        assert at == first
        begun = first.ahead.until if first.ahead is not None else first.tokens
        if second.tokens >= begun:
            assert advance(at, second)[1] == second

    @given(st.lists(st.integers(0, TOKENS + 3), max_size=5), st.integers(1, 5))
    def test_parts_end_where_blocks_end_and_the_last_at_the_offers_end(self, ways: list[int], grid: int) -> None:
        streaming = Streaming(grid=grid)
        for ready in ways:
            there = streaming.reach(Reach(ready, Ahead(ready + 3, (1, 0))), TOKENS)
            for edge in (there.tokens, there.ahead.until if there.ahead is not None else 0):
                assert edge == TOKENS or edge % grid == 0
                assert edge <= min(ready + 3, TOKENS)

    def test_what_each_choice_lets_go(self) -> None:
        there = Reach(5, Ahead(8, (2, 1)))
        takes = {stream: Streaming(stream).reach(there, TOKENS) for stream in Stream}
        assert takes == {Stream.REQUEST: Reach(0), Stream.CHUNK: Reach(5), Stream.LAYER: there}
        assert Streaming(Stream.REQUEST).reach(there, 5) == Reach(5)

    def test_all_layers_of_a_chunk_are_the_chunk(self) -> None:
        there = Reach(2, Ahead(TOKENS, LAYERS))
        for stream in Stream:
            assert Streaming(stream, common).reach(there, TOKENS) == Reach(TOKENS)

    def test_layers_that_are_not_owed_are_none(self) -> None:
        there = Streaming(common=lambda counts: (0, 0)).reach(Reach(2, Ahead(6, (3, 1))), TOKENS)
        assert there == Reach(2)


def streaming_producer(streaming: Streaming | None = None) -> ProducerMachine:
    """A producer that has c0's offer."""
    machine = ProducerMachine(0, "p0", Limits())
    machine.connected("c0", two_groups, 0.0, streaming=streaming or Streaming(common=common))
    machine.receive("c0", offer(), 0.0)
    return machine


def compute(machine: ProducerMachine, ready: int, layers: tuple[int, int] | None = None) -> list[Post]:
    """What is posted once this much is computed."""
    machine.stage("t", blocks(7), PROMPT, TOKENS, ready, 0.0, layers=layers)
    return only(machine.commands(), Post)


class TestMachine:
    def test_layers_leave_as_they_are_computed_and_cover_what_is_owed(self) -> None:
        machine, posts = streaming_producer(), list[Post]()
        for stop in (4, TOKENS):
            for layers in ((1, 1), (3, 1), LAYERS):
                posts += compute(machine, stop, layers)
        coverage = Coverage(two_groups(0, TOKENS))
        for post in posts:
            assert not coverage.full
            coverage.add(post.complete.part, post.complete.spans, post.complete.whole)
            assert post.alone
            assert len(post.complete.spans) == 1
            machine.write_done(post.write, 0.0)
        assert coverage.full
        assert [post.complete.whole for post in posts] == [None] * 9 + [two_groups(0, TOKENS)]
        assert machine.commands()[-2:] == [StageEnded("t", Outcome.COMPLETE), StageReleased("t")]

    def test_an_offer_that_comes_late_gets_all_there_is_at_once(self) -> None:
        machine = ProducerMachine(0, "p0", Limits())
        machine.connected("c0", two_groups, 0.0, streaming=Streaming(common=common))
        assert not compute(machine, 4)
        assert not compute(machine, 6, (2, 0))
        machine.receive("c0", offer(), 0.0)
        first, second = only(machine.commands(), Post)
        assert (first.alone, first.complete.spans) == (False, two_groups(0, 4))
        assert (second.alone, second.complete.spans) == (True, (Span(0, 0, 2, 4, 6),))

    def test_a_part_that_is_not_worth_it_waits_for_more_but_the_last_does_not(self) -> None:
        machine = streaming_producer(
            Streaming(common=common, worth=lambda spans: sum(span.area for span in spans) > 11)
        )
        assert not compute(machine, 1)
        assert not compute(machine, 2, (3, 1))
        (whole,) = compute(machine, 2)
        assert whole.complete.spans == two_groups(0, 2)
        assert not compute(machine, TOKENS - 1, (2, 0))
        early, late = compute(machine, TOKENS - 1, (4, 1))
        assert (early.complete.spans, late.complete.spans) == ((Span(0, 0, 4, 2, 7),), (Span(1, 0, 1, 2, 7),))
        assert len(compute(machine, TOKENS)) == 2

    def test_preempted_between_layers_it_goes_on_from_what_is_not_sent(self) -> None:
        machine = streaming_producer()
        done = cells(tuple(span for post in compute(machine, 6, (2, 0)) for span in post.complete.spans))
        machine.preempt("t")
        assert not machine.commands(), "a WRITE still reads"
        with pytest.raises(ProtocolError, match="preempted"):
            machine.stage("t", blocks(3), PROMPT, TOKENS, 3, 0.0)
        machine.write_done(1, 0.0)
        assert machine.commands() == [StageReleased("t")]
        for ready, layers in ((3, (1, 0)), (3, None), (6, (1, 1)), (TOKENS, (4, 1)), (TOKENS, None)):
            for post in compute(machine, ready, layers):
                new = cells(post.complete.spans)
                assert not new & done
                done |= new
        assert done == cells(two_groups(0, TOKENS))

    def test_cancelled_between_layers_nothing_more_is_posted_and_drained_waits_for_the_write(self) -> None:
        machine = streaming_producer()
        (post,) = compute(machine, 6, (2, 0))
        machine.receive("c0", Cancel(key(), 1, Outcome.CANCELLED), 0.0)
        assert not sent(machine.commands(), Drained)
        with pytest.raises(ProtocolError, match="is over and its blocks are still read"):
            compute(machine, 6)
        machine.write_done(post.write, 0.0)
        commands = machine.commands()
        assert sent(commands, Drained) == [Drained(key(), 1)]
        assert only(commands, StageReleased)

    def test_one_of_several_layers_writes_that_fails_ends_the_transfer(self) -> None:
        machine = streaming_producer()
        first, second = compute(machine, 6, (2, 1))
        machine.write_failed(first.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
        assert [failed.stuck for failed in sent(machine.commands(), Failed)] == [True]
        machine.write_done(second.write, 0.0)
        assert not compute(machine, TOKENS)
        assert not only(machine.commands(), StageReleased)

    def test_two_consumers_that_owe_other_layers(self) -> None:
        machine = ProducerMachine(0, "p0", Limits())
        machine.connected("c0", owed, 0.0, streaming=Streaming(common=lambda counts: None if counts[0] else (0,)))
        machine.connected("c1", two_groups, 0.0, streaming=Streaming(common=common))
        for peer in ("c0", "c1"):
            made = offer()
            machine.receive(
                peer, msgspec.structs.replace(made, key=msgspec.structs.replace(made.key, epoch=peer)), 0.0
            )
        machine.stage("t", blocks(7), PROMPT, TOKENS, TOKENS, 0.0, siblings=2, layers=(2, 0))
        by_peer = {post.peer: post.complete for post in only(machine.commands(), Post)}
        assert by_peer["c0"].whole == owed(0, TOKENS), "its one layer is there: that is all"
        assert by_peer["c1"].spans == (Span(0, 0, 2, 0, TOKENS),)

    def test_whole_requests_leave_whole(self) -> None:
        machine = streaming_producer(Streaming(Stream.REQUEST, common))
        assert not compute(machine, 5)
        assert not compute(machine, TOKENS, (4, 1))
        (post,) = compute(machine, TOKENS, LAYERS)
        assert post.complete.spans == post.complete.whole == two_groups(0, TOKENS)

    @pytest.mark.parametrize(
        ("ready", "layers", "says"),
        [(9, (1, 1), "stages 9 of 8"), (3, (1, 1), "stages 3 of 8"), (3, None, "goes back")],
    )
    def test_a_stage_that_contradicts_itself(self, ready: int, layers: tuple[int, int] | None, says: str) -> None:
        machine = streaming_producer()
        compute(machine, 5)
        with pytest.raises(ProtocolError, match=says):
            compute(machine, ready, layers)


class TestLanding:
    def cut(self, spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
        """Parts of two tokens of a span."""
        return tuple(
            (msgspec.structs.replace(span, token_start=start, token_stop=stop),)
            for span in spans
            for start, stop in pairwise([*range(span.token_start, span.token_stop, 2), span.token_stop])
        )

    def machine(self, slots: int) -> ProducerMachine:
        machine = ProducerMachine(0, "p0", Limits(), slots=SlotPool(slots))
        machine.connected("c0", two_groups, 0.0, self.cut, Streaming(common=common))
        machine.receive("c0", msgspec.structs.replace(offer(), into=Ring(blocks(1).tables)), 0.0)
        return machine

    def test_layers_are_gathered_as_they_are_computed_and_one_after_a_preemption_waits_for_its_layers(self) -> None:
        machine, gathered = self.machine(1), list[Gather]()
        machine.stage("t", blocks(7), PROMPT, TOKENS, 4, 0.0, layers=(2, 1))
        gathered += only(machine.commands(), Gather)
        assert [one.spans for one in gathered] == [(Span(0, 0, 2, 0, 2),)], "one slot, one part"
        machine.preempt("t")
        machine.gathered(gathered[0].write, 0.0)
        assert only(machine.commands(), StageReleased), "nothing reads the blocks any more"
        machine.receive("c0", Grant(1, 0, Credit(0, 1)), 0.0)
        assert len(only(machine.commands(), PostSlot)) == 1
        machine.stage("t", blocks(3), PROMPT, TOKENS, 4, 0.0, layers=(1, 0))
        machine.write_done(gathered[0].write, 0.0)
        assert not only(machine.commands(), Gather), "its layers are not computed again"
        machine.stage("t", blocks(3), PROMPT, TOKENS, 4, 0.0, layers=(2, 0))
        done = self.drain(machine, gathered)
        assert done == cells((Span(0, 0, 2, 0, 4),))
        machine.stage("t", blocks(3), PROMPT, TOKENS, TOKENS, 0.0)
        assert self.drain(machine, gathered) == cells(two_groups(0, TOKENS))
        assert self.ended == [Ended(key(), Outcome.COMPLETE)]

    def drain(self, machine: ProducerMachine, gathered: list[Gather]) -> set[Cell]:
        """Gather, grant and WRITE one part after the other; what has been gathered in all, each cell once."""
        while commands := machine.commands():
            self.ended = only(commands, Ended)
            for one in only(commands, Gather):
                gathered.append(one)
                machine.gathered(one.write, 0.0)
                machine.receive("c0", Grant(1, len(gathered) - 1, Credit(0, len(gathered))), 0.0)
                machine.write_done(one.write, 0.0)
        spans = [span for one in gathered for span in one.spans]
        assert sum(span.area for span in spans) == len(cells(tuple(spans)))
        return cells(tuple(spans))


def test_a_stage_of_layers_alone_is_one_that_waits() -> None:
    machine = producer()
    machine.stage("t", blocks(7), PROMPT, TOKENS, 4, 0.0, layers=(0,))
    machine.receive("c0", offer(), 0.0)
    assert not only(machine.commands(), Post)
    stage(machine)
    assert len(only(machine.commands(), Post)) == 1
