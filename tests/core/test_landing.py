"""Landing on the two machines: credits, turns, what is scattered, dropped, quarantined, and when blocks are free."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from protocol import TOKENS, blocks, key, offer, only, order, owed, sent, stage

from pushkv.core.commands import Ended, Gather, PostSlot, Released, Scatter, StageEnded, StageReleased
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Cancel, Complete, Credit, Drained, Failed, Grant, Offer, Ready, Renew, Ring
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.receiving import Order
from pushkv.core.ring import SlotPool
from pushkv.core.span import Span
from pushkv.core.states import Pack, Slot, Source, Target
from pushkv.errors import GeometryError

PART = 2
"""Tokens that fit a slot; a prompt is four parts."""


def cut(spans: tuple[Span, ...]) -> tuple[tuple[Span, ...], ...]:
    return tuple(
        owed(*edges)
        for span in spans
        for edges in pairwise([*range(span.token_start, span.token_stop, PART), span.token_stop])
    )


def landing(attempt: int = 0, block: int = 0, transfer: str = "t", peers: tuple[str, ...] = ("p0",)) -> Order:
    return replace(order(attempt, block, peers, transfer), into=Ring(blocks(block).tables))


def landing_offer(sequence: int = 1, transfer: str = "t", attempt: int = 0) -> Offer:
    into = Ring(blocks(sequence).tables)
    return msgspec.structs.replace(offer(sequence, transfer=transfer, attempt=attempt), into=into)


def consumer(slots: int = 4, peers: tuple[str, ...] = ("p0",), pool: SlotPool | None = None) -> ConsumerMachine:
    machine = ConsumerMachine(Limits(), slots=pool or SlotPool(slots))
    for peer in peers:
        machine.connected(peer, 0.0)
    return machine


def producer(slots: int = 8, peers: tuple[str, ...] = ("c0",)) -> ProducerMachine:
    machine = ProducerMachine(0, "p0", Limits(), slots=SlotPool(slots))
    for peer in peers:
        machine.connected(peer, owed, 0.0, cut)
    return machine


def arrival(nonce: bytes, grant: Grant, last: bool = False) -> Complete:
    """What rides on the WRITE of the part that was granted this slot."""
    start = grant.part * PART
    whole = owed(0, TOKENS) if last else None
    return Complete(nonce, 0, "p0", grant.part, owed(start, start + PART), whole, grant.credit)


def offered(
    machine: ConsumerMachine, transfer: str = "t", block: int = 0, parts: int = 0
) -> tuple[Offer, list[Grant]]:
    """An order that was offered, and what the peer was granted once it had this many parts."""
    machine.offer(landing(transfer=transfer, block=block), 0.0)
    (made,) = sent(machine.commands(), Offer)
    if parts:
        machine.receive("p0", Ready(made.sequence, parts), 0.0)
    return made, sent(machine.commands(), Grant)


class TestConsumer:
    def test_granted_written_scattered_returned_and_complete_with_the_last_scatter(self) -> None:
        machine = consumer(8)
        made, grants = offered(machine, parts=4)
        assert [grant.part for grant in grants] == [0, 1, 2, 3]
        assert len({grant.credit for grant in grants}) == 4
        for grant in grants:
            machine.receive("p0", arrival(made.nonce, grant), 1.0)
        scatters = only(machine.commands(), Scatter)
        assert [(one.slot, one.spans, one.end) for one in scatters] == [
            (grant.credit.slot, owed(grant.part * 2, grant.part * 2 + 2), TOKENS) for grant in grants
        ]
        for one in scatters[:-1]:
            machine.scattered(one.slot, one.generation, 2.0)
        assert not machine.commands()
        machine.scattered(scatters[-1].slot, scatters[-1].generation, 2.0)
        assert machine.commands() == [Ended(key(), Outcome.COMPLETE), Released(key())]
        assert len(machine.slots) == 8
        assert not machine.transfers()

    def test_a_credit_is_good_for_one_write(self) -> None:
        machine = consumer(1)
        made, (first,) = offered(machine, parts=4)
        for _ in range(3):
            machine.receive("p0", arrival(made.nonce, first), 0.0)
        (scatter,) = only(machine.commands(), Scatter)
        machine.scattered(scatter.slot, scatter.generation, 0.0)
        (again,) = sent(machine.commands(), Grant)
        assert (again.part, again.credit.slot) == (1, first.credit.slot)
        assert again.credit.generation > first.credit.generation
        machine.receive("p0", arrival(made.nonce, first), 0.0)
        assert not only(machine.commands(), Scatter)
        assert machine.counts["duplicate complete"] == 3

    @pytest.mark.parametrize("change", ["slot", "generation", "part", "peer", "none"])
    def test_a_credit_of_somebody_elses_is_none(self, change: str) -> None:
        machine = consumer(8, ("p0", "p1"))
        made, (first, second, *_) = offered(machine, parts=2)
        part = arrival(made.nonce, first)
        credits = {
            "slot": second.credit,
            "generation": Credit(first.credit.slot, first.credit.generation + 1),
            "part": first.credit,
            "peer": first.credit,
            "none": None,
        }
        wrong = msgspec.structs.replace(part, credit=credits[change], part=1 if change == "part" else 0)
        machine.receive("p1" if change == "peer" else "p0", wrong, 0.0)
        assert not machine.commands()
        machine.receive("p0", part, 0.0)
        assert len(only(machine.commands(), Scatter)) == 1

    def test_a_ready_again_is_answered_with_the_same_credits(self) -> None:
        machine = consumer()
        made, grants = offered(machine, parts=2)
        machine.receive("p0", Ready(made.sequence, 2), 0.0)
        machine.receive("p0", Ready(made.sequence, 1), 0.0)
        assert sent(machine.commands(), Grant) == grants * 2
        machine.receive("p0", arrival(made.nonce, grants[0]), 0.0)
        machine.receive("p0", Ready(made.sequence, 2), 0.0)
        assert sent(machine.commands(), Grant) == grants[1:]

    def test_a_ring_that_is_dry_delays(self) -> None:
        machine = consumer(2)
        made, grants = offered(machine, parts=4)
        assert [grant.part for grant in grants] == [0, 1]
        machine.tick(5.0)
        assert not sent(machine.commands(), Grant)
        machine.receive("p0", arrival(made.nonce, grants[0]), 6.0)
        (scatter,) = only(machine.commands(), Scatter)
        machine.scattered(scatter.slot, scatter.generation, 6.0)
        (third,) = sent(machine.commands(), Grant)
        assert (third.part, third.credit.slot) == (2, grants[0].credit.slot)

    def test_the_deadline_holds_while_the_ring_is_dry(self) -> None:
        machine = consumer(1)
        offered(machine, "a", 0, parts=1)
        made, grants = offered(machine, "b", 1, parts=1)
        assert not grants
        machine.tick(120.0)
        outcomes = {one.key.transfer: one.outcome for one in only(machine.commands(), Ended)}
        assert outcomes == {"a": Outcome.EXPIRED, "b": Outcome.EXPIRED}
        assert made.sequence == 2

    def test_no_peer_can_take_the_ring_from_the_others(self) -> None:
        machine = consumer(8, ("p0", "p1", "p2"))
        for number, peer in enumerate(("p0", "p1", "p2")):
            machine.offer(landing(transfer=peer, block=number, peers=(peer,)), 0.0)
        granted: Counter[str] = Counter()
        for peer in ("p0", "p1", "p2"):
            machine.receive(peer, Ready(1, 8), 0.0)
            granted[peer] = len(sent(machine.commands(), Grant))
        assert granted == {"p0": 6, "p1": 2, "p2": 0}
        machine.cancel(key(transfer="p0"), 0.0)
        machine.commands()
        machine.receive("p0", Drained(key(transfer="p0"), 1), 0.0)
        assert len(sent(machine.commands(), Grant)) > 0
        assert machine.landing_slots()[Slot.GRANTED] <= 8

    def test_peers_take_turns(self) -> None:
        machine = consumer(1, ("p0", "p1"))
        for number, peer in enumerate(("p0", "p1")):
            machine.offer(landing(transfer=peer, block=number, peers=(peer,)), 0.0)
        nonces = {one.key.transfer: one.nonce for one in sent(machine.commands(), Offer)}
        turns = []
        machine.receive("p0", Ready(1, 3), 0.0)
        machine.receive("p1", Ready(1, 3), 0.0)
        for _ in range(4):
            commands = machine.commands()
            ((peer, grant),) = [(c.peer, c.message) for c in commands if isinstance(getattr(c, "message", 0), Grant)]
            turns.append(peer)
            machine.receive(peer, arrival(nonces[peer], grant), 0.0)
            (scatter,) = only(machine.commands(), Scatter)
            machine.scattered(scatter.slot, scatter.generation, 0.0)
        assert turns[1:] == ["p0", "p1", "p0"]

    def test_after_a_cancel_the_blocks_are_free_at_once_and_the_slots_on_proof(self) -> None:
        machine = consumer(4)
        made, grants = offered(machine, parts=2)
        machine.cancel(key(), 0.0)
        commands = machine.commands()
        assert commands[0] == Ended(key(), Outcome.CANCELLED, "cancelled by the engine")
        assert only(commands, Released) == [Released(key())]
        assert machine.landing_slots() == {Slot.QUARANTINED: 2}
        assert (machine.held_blocks(), machine.holds(key()), len(machine.slots)) == (0, False, 2)
        machine.receive("p0", arrival(made.nonce, grants[0]), 0.0)
        assert not only(machine.commands(), Scatter)
        assert machine.landing_slots() == {Slot.QUARANTINED: 1}
        machine.receive("p0", Drained(key(), made.sequence), 0.0)
        assert (len(machine.slots), machine.transfers()) == (4, [])
        assert not only(machine.commands(), Released)

    def test_the_blocks_wait_for_a_scatter_that_runs(self) -> None:
        machine = consumer()
        made, (grant, *_) = offered(machine, parts=1)
        machine.receive("p0", arrival(made.nonce, grant), 0.0)
        (scatter,) = only(machine.commands(), Scatter)
        machine.cancel(key(), 0.0)
        machine.receive("p0", Drained(key(), made.sequence), 0.0)
        assert not only(machine.commands(), Released)
        assert machine.holds(key())
        machine.scattered(scatter.slot, scatter.generation, 0.0)
        assert only(machine.commands(), Released) == [Released(key())]
        assert not machine.transfers()

    def test_blocks_that_are_free_may_be_offered_while_the_slots_wait_for_proof(self) -> None:
        machine = consumer()
        offered(machine, parts=1)
        machine.cancel(key(), 0.0)
        machine.offer(landing(attempt=1), 0.0)
        (made,) = sent(machine.commands(), Offer)
        assert made.sequence == 2

    def test_a_lost_peers_slots_wait_for_the_transports_evidence(self) -> None:
        machine = consumer()
        offered(machine, parts=2)
        machine.peer_lost("p0", "gone", 0.0)
        assert only(machine.commands(), Released) == [Released(key())]
        assert machine.landing_slots() == {Slot.QUARANTINED: 2}
        assert machine.custody() == {Target.QUARANTINED: 1}
        machine.connected("p0", 1.0)
        assert len(machine.slots) == 2
        machine.writes_ended("p0", 2.0)
        assert (len(machine.slots), machine.transfers()) == (4, [])

    def test_a_scatter_that_fails_fails_the_transfer_once_it_has_ended(self) -> None:
        machine = consumer()
        made, (grant, *_) = offered(machine, parts=1)
        machine.receive("p0", arrival(made.nonce, grant), 0.0)
        (scatter,) = only(machine.commands(), Scatter)
        machine.scattered(scatter.slot, scatter.generation, 0.0, "the device is lost")
        commands = machine.commands()
        (ended,) = only(commands, Ended)
        assert (ended.outcome, "the device is lost" in ended.detail) == (Outcome.TRANSPORT_ERROR, True)
        assert only(commands, Released) == [Released(key())]
        assert len(machine.slots) == 4
        machine.scattered(scatter.slot, scatter.generation, 0.0)
        assert not machine.commands()

    def test_a_part_that_does_not_fit_rejects_and_its_slot_waits_for_proof(self) -> None:
        machine = consumer()
        made, (grant, *_) = offered(machine, parts=1)
        part = msgspec.structs.replace(arrival(made.nonce, grant), spans=owed(0, TOKENS + 1))
        machine.receive("p0", part, 0.0)
        assert [one.outcome for one in only(machine.commands(), Ended)] == [Outcome.REJECTED_GEOMETRY]
        assert machine.landing_slots() == {Slot.QUARANTINED: 1}

    def test_who_wants_more_slots_than_it_fills_is_found_out(self) -> None:
        machine = consumer(8)
        made, grants = offered(machine, parts=5)
        for grant in grants[:4]:
            machine.receive("p0", arrival(made.nonce, grant), 0.0)
        for scatter in only(machine.commands(), Scatter):
            machine.scattered(scatter.slot, scatter.generation, 0.0)
        assert [one.outcome for one in only(machine.commands(), Ended)] == [Outcome.REJECTED_GEOMETRY]
        assert machine.landing_slots() == {Slot.QUARANTINED: 1}

    @pytest.mark.parametrize("message", [Ready(1, TOKENS + 1), Ready(9, 1)])
    def test_a_ready_for_more_than_is_owed_or_for_nothing_is_dropped(self, message: Ready) -> None:
        machine = consumer()
        offered(machine)
        machine.receive("p0", message, 0.0)
        assert not machine.commands()
        assert machine.counts["ready beyond what is owed"] + machine.counts["stray ready"] == 1

    def test_a_ready_for_an_offer_of_blocks_is_dropped(self) -> None:
        machine = consumer()
        machine.offer(order(), 0.0)
        machine.commands()
        machine.receive("p0", Ready(1, 1), 0.0)
        assert not machine.commands()

    def test_without_a_ring_nothing_is_landed(self) -> None:
        with pytest.raises(GeometryError, match="no landing ring"):
            consumer(0).offer(landing(), 0.0)

    def test_what_an_earlier_life_gives_back_is_granted(self) -> None:
        pool = SlotPool(1)
        earlier, later = consumer(pool=pool), consumer(pool=pool)
        first, _ = offered(earlier, parts=1)
        second, grants = offered(later, parts=1)
        assert not grants
        earlier.cancel(key(), 0.0)
        earlier.receive("p0", Drained(key(), first.sequence), 0.0)
        later.tick(1.0)
        assert len(sent(later.commands(), Grant)) == 1
        assert second.sequence == 1


def matched(machine: ProducerMachine, ready: int = TOKENS) -> list[Gather]:
    """What is gathered for an offer that meets its stage."""
    machine.receive("c0", landing_offer(), 0.0)
    stage(machine, ready)
    return only(machine.commands(), Gather)


def granted(machine: ProducerMachine, part: int, slot: int = 0) -> None:
    machine.receive("c0", Grant(1, part, Credit(slot, part + 1)), 0.0)


class TestProducer:
    def test_gathered_granted_written_and_complete(self) -> None:
        machine = producer()
        machine.receive("c0", landing_offer(), 0.0)
        stage(machine)
        commands = machine.commands()
        gathers = only(commands, Gather)
        assert sent(commands, Ready) == [Ready(1, 4)]
        assert [(one.spans, one.source, one.target, one.end) for one in gathers] == [
            (owed(at, at + 2), blocks(7), Ring(blocks(1).tables), TOKENS) for at in (0, 2, 4, 6)
        ]
        assert len({one.slot for one in gathers}) == 4
        for part, gather in enumerate(gathers):
            machine.gathered(gather.write, 0.0)
            granted(machine, part, 5)
        posts = only(machine.commands(), PostSlot)
        assert [(one.slot, one.complete.part, one.complete.credit) for one in posts] == [
            (gather.slot, part, Credit(5, part + 1)) for part, gather in enumerate(gathers)
        ]
        assert [one.complete.whole for one in posts] == [None, None, None, owed(0, TOKENS)]
        for post in posts:
            machine.write_done(post.write, 1.0)
        assert machine.commands() == [
            Ended(key(), Outcome.COMPLETE),
            StageEnded("t", Outcome.COMPLETE),
            StageReleased("t"),
        ]
        assert len(machine.slots) == 8

    @pytest.mark.parametrize("grant_first", [True, False])
    def test_a_part_goes_out_when_it_is_both_gathered_and_granted(self, grant_first: bool) -> None:
        machine = producer()
        (gather,) = matched(machine, PART)
        steps = [lambda: granted(machine, 0), lambda: machine.gathered(gather.write, 0.0)]
        for step in steps if grant_first else reversed(steps):
            assert not only(machine.commands(), PostSlot)
            step()
        assert len(only(machine.commands(), PostSlot)) == 1

    def test_a_grant_again_changes_nothing(self) -> None:
        machine = producer()
        (gather,) = matched(machine, PART)
        granted(machine, 0, 1)
        granted(machine, 0, 2)
        machine.gathered(gather.write, 0.0)
        machine.gathered(gather.write, 0.0)
        granted(machine, 0, 3)
        granted(machine, 7, 3)
        (post,) = only(machine.commands(), PostSlot)
        assert post.complete.credit == Credit(1, 1)
        assert machine.counts["stray grant"] == 3

    def test_parts_wait_for_staging_slots_and_ready_counts_those_that_have_one(self) -> None:
        machine = producer(2)
        machine.receive("c0", landing_offer(), 0.0)
        stage(machine)
        commands = machine.commands()
        first, second = only(commands, Gather)
        assert sent(commands, Ready) == [Ready(1, 2)]
        machine.gathered(first.write, 0.0)
        granted(machine, 0)
        machine.write_done(first.write, 0.0)
        commands = machine.commands()
        assert [one.slot for one in only(commands, Gather)] == [first.slot]
        assert sent(commands, Ready) == [Ready(1, 3)]
        assert second.slot != first.slot

    def test_ready_is_said_again_until_all_are_granted(self) -> None:
        machine = producer()
        matched(machine, 2 * PART)
        granted(machine, 0)
        for now in (0.2, 0.6, 1.4):
            machine.tick(now)
            assert sent(machine.commands(), Ready) == [Ready(1, 2)]
        granted(machine, 1)
        machine.tick(9.0)
        assert not sent(machine.commands(), Ready)

    def test_after_a_cancel_nothing_goes_out_and_drained_waits_for_gathers_and_writes(self) -> None:
        machine = producer()
        first, second, third, _ = matched(machine)
        for part, gather in enumerate((first, second)):
            machine.gathered(gather.write, 0.0)
            if not part:
                granted(machine, 0)
        machine.commands()
        machine.receive("c0", Cancel(key(), 1, Outcome.CANCELLED), 0.0)
        assert not sent(machine.commands(), Drained)
        assert machine.staging_slots() == {Pack.WRITING: 1, Pack.GATHERING: 2}
        granted(machine, 1)
        machine.gathered(third.write, 0.0)
        machine.write_done(first.write, 0.0)
        assert not sent(machine.commands(), Drained)
        machine.gathered(third.write + 1, 0.0)
        commands = machine.commands()
        assert sent(commands, Drained) == [Drained(key(), 1)]
        assert not only(commands, PostSlot)
        assert len(machine.slots) == 8

    def test_a_preempted_stage_is_released_when_its_gathers_have_ended_whatever_its_writes_do(self) -> None:
        machine = producer()
        first, second = matched(machine, 2 * PART)
        machine.gathered(first.write, 0.0)
        granted(machine, 0)
        machine.preempt("t")
        assert not only(machine.commands(), StageReleased)
        machine.gathered(second.write, 0.0)
        assert only(machine.commands(), StageReleased) == [StageReleased("t")]
        assert machine.custody() == {Source.READING: 1}
        stage(machine, TOKENS)
        assert [one.spans for one in only(machine.commands(), Gather)] == [owed(4, 6), owed(6, 8)]

    def test_parts_that_were_cut_wait_for_the_recomputed_tokens(self) -> None:
        machine = producer(1)
        (first,) = matched(machine, 2 * PART)
        machine.preempt("t")
        machine.gathered(first.write, 0.0)
        granted(machine, 0)
        machine.write_done(first.write, 0.0)
        machine.commands()
        machine.stage("t", blocks(9), b"p" * 32, TOKENS, PART, 0.0)
        assert not only(machine.commands(), Gather)
        machine.stage("t", blocks(9), b"p" * 32, TOKENS, 2 * PART, 0.0)
        (second,) = only(machine.commands(), Gather)
        assert (second.spans, second.source) == (owed(2, 4), blocks(9))

    def test_a_write_that_fails_strands_its_slot_and_not_the_blocks(self) -> None:
        machine = producer()
        (gather,) = matched(machine, PART)
        machine.gathered(gather.write, 0.0)
        granted(machine, 0)
        machine.commands()
        machine.write_failed(gather.write, Outcome.TRANSPORT_ERROR, "reset", 0.0)
        commands = machine.commands()
        assert [one.stuck for one in sent(commands, Failed)] == [True]
        machine.receive("c0", Cancel(key(), 1, Outcome.TRANSPORT_ERROR), 0.0)
        assert only(machine.commands(), StageReleased) == [StageReleased("t")]
        assert machine.staging_slots() == {Pack.STUCK: 1}
        assert len(machine.slots) == 7
        machine.writes_ended("c0", 1.0)
        assert len(machine.slots) == 8

    def test_a_write_that_never_reached_the_transport_frees_its_slot(self) -> None:
        machine = producer()
        (gather,) = matched(machine, PART)
        machine.gathered(gather.write, 0.0)
        granted(machine, 0)
        machine.write_failed(gather.write, Outcome.TRANSPORT_ERROR, "no path", 0.0, reached=False)
        assert len(machine.slots) == 8

    def test_a_gather_that_fails_fails_the_transfer(self) -> None:
        machine = producer()
        first, second = matched(machine, 2 * PART)
        machine.gathered(first.write, 0.0, "the device is lost")
        (failed,) = sent(machine.commands(), Failed)
        assert (failed.outcome, "the device is lost" in failed.detail) == (Outcome.TRANSPORT_ERROR, True)
        assert machine.staging_slots() == {Pack.GATHERING: 1}
        machine.gathered(second.write, 0.0)
        assert len(machine.slots) == 8

    def test_a_stage_is_held_while_a_gather_reads_it_even_when_its_peer_is_proven_gone(self) -> None:
        machine = producer()
        (gather,) = matched(machine, PART)
        machine.peer_lost("c0", "gone", 0.0)
        machine.unstage("t", 0.0)
        machine.writes_ended("c0", 0.0)
        assert not only(machine.commands(), StageReleased)
        machine.gathered(gather.write, 0.0)
        assert only(machine.commands(), StageReleased) == [StageReleased("t")]
        assert len(machine.slots) == 8

    def test_the_lease_ends_what_is_gathered_and_not_granted(self) -> None:
        machine = producer()
        machine.receive("c0", Renew(1, 10.0), 0.0)
        gathers = matched(machine)
        for gather in gathers:
            machine.gathered(gather.write, 0.0)
        machine.tick(10.0)
        assert [one.outcome for one in sent(machine.commands(), Failed)][-1] is Outcome.EXPIRED
        assert len(machine.slots) == 8

    def test_consumers_take_turns_at_the_staging_slots(self) -> None:
        machine = producer(8, ("c0", "c1"))
        machine.connected("c1", owed, 0.0, lambda spans: tuple((Span(0, 0, 1, t, t + 1),) for t in range(8)))
        machine.receive("c1", landing_offer(transfer="u"), 0.0)
        stage(machine, transfer="u")
        assert len(only(machine.commands(), Gather)) == 6
        assert len(matched(machine)) == 2

    def test_without_staging_slots_a_ring_is_refused(self) -> None:
        machine = ProducerMachine(0, "p0")
        machine.connected("c0", owed, 0.0)
        machine.receive("c0", landing_offer(), 0.0)
        stage(machine)
        (failed,) = sent(machine.commands(), Failed)
        assert failed.outcome is Outcome.REJECTED_GEOMETRY

    def test_a_later_attempt_supersedes_and_is_served(self) -> None:
        machine = producer()
        gathers = matched(machine, PART)
        machine.receive("c0", landing_offer(2, attempt=1), 0.0)
        commands = machine.commands()
        assert [one.outcome for one in sent(commands, Failed)] == [Outcome.SUPERSEDED]
        assert [one.spans for one in only(commands, Gather)] == [owed(0, PART)]
        machine.gathered(gathers[0].write, 0.0)
        assert machine.staging_slots() == {Pack.GATHERING: 1}


class TestTogether:
    """Both machines, and a world that carries out what they ask in an order of its choosing."""

    @pytest.mark.parametrize("seed", range(40))
    def test_any_order_completes_and_gives_every_slot_back(self, seed: int) -> None:
        rng = __import__("random").Random(seed)
        ours, theirs = producer(rng.randint(1, 5)), consumer(rng.randint(1, 5))
        theirs.offer(landing(), 0.0)
        stage(ours, PART)
        now, todo, ended = 0.0, [], []
        while len(ended) < 2:
            for peer, machine in (("p0", theirs), ("c0", ours)):
                for command in machine.commands():
                    todo += [(peer, command)] * (2 if hasattr(command, "message") and rng.random() < 0.2 else 1)
                    ended += [command] if isinstance(command, Ended) else []
            if now > 0.5:
                stage(ours, TOKENS)
            now += 0.05
            assert now < 100.0
            ours.tick(now)
            theirs.tick(now)
            rng.shuffle(todo)
            for _ in range(min(len(todo), rng.randint(0, 3))):
                _, command = todo.pop()
                if isinstance(command, Gather):
                    ours.gathered(command.write, now)
                elif isinstance(command, Scatter):
                    theirs.scattered(command.slot, command.generation, now)
                elif isinstance(command, PostSlot):
                    theirs.receive("p0", command.complete, now)
                    ours.write_done(command.write, now)
                elif hasattr(command, "message") and rng.random() < 0.8:
                    if command.peer == "p0":
                        ours.receive("c0", command.message, now)
                    else:
                        theirs.receive("p0", command.message, now)
        assert {one.outcome for one in ended} == {Outcome.COMPLETE}
        assert len(ours.slots) == ours.slots.count
        assert len(theirs.slots) == theirs.slots.count
