"""The consumer's machine: offers, arrivals, one outcome, and custody that ends on proof."""

from __future__ import annotations

from itertools import pairwise

import pytest
from protocol import TOKENS, complete, consumer, key, only, order, producer, sent, stage

from pushkv.core.commands import AskProof, Ended, Post, Released, Send
from pushkv.core.consumer import ConsumerMachine
from pushkv.core.limits import Limits
from pushkv.core.messages import Ack, Blocks, Cancel, Drained, Failed, Offer, Ready, Renew
from pushkv.core.outcome import Outcome
from pushkv.core.receiving import Order
from pushkv.core.states import Target
from pushkv.errors import GeometryError, ProtocolError


def offered(peers: tuple[str, ...] = ("p0",)) -> tuple[ConsumerMachine, list[Offer]]:
    """A consumer that has offered a block, and the offers."""
    machine = consumer(peers=peers)
    machine.offer(order(peers=peers), 0.0)
    return machine, sent(machine.commands(), Offer)


class TestOffers:
    def test_one_to_every_rank_that_owes_something(self) -> None:
        machine, offers = offered(("p0", "p1"))
        assert [each.sequence for each in offers] == [1, 1]
        assert offers[0].nonce != offers[1].nonce
        assert (offers[0].remaining, offers[0].floor, offers[0].start, offers[0].stop) == (120.0, 1, 0, TOKENS)
        assert machine.custody() == {Target.OFFERED: 2}
        assert machine.held_blocks() == machine.held_blocks(Target.OFFERED) == 1

    def test_it_is_repeated_until_seen_with_what_is_left_of_the_deadline(self) -> None:
        machine, (first,) = offered()
        machine.tick(0.1)
        (again,) = sent(machine.commands(), Offer)
        assert (again.sequence, again.nonce, again.remaining) == (first.sequence, first.nonce, 119.9)
        machine.receive("p0", Ack(1), 0.2)
        machine.tick(3.0)
        assert not sent(machine.commands(), Offer)

    def test_unseen_it_goes_over_the_control_connection(self) -> None:
        machine, _ = offered()
        insisted = []
        for now in (0.1, 0.31, 0.8):
            machine.tick(now)
            insisted += [command.insist for command in only(machine.commands(), Send)]
        assert insisted == [False, True, True]

    def test_a_block_that_lacks_proof_is_not_offered_again(self) -> None:
        machine, _ = offered()
        machine.cancel(key(), 0.0)
        with pytest.raises(GeometryError, match=r"offers blocks \[0\] of group 0 .* wait for its release"):
            machine.offer(order(attempt=1), 0.0)
        machine.offer(order(attempt=1, block=1), 0.0)
        machine.receive("p0", Drained(key(), 1), 0.0)
        machine.offer(order(attempt=2), 0.0)

    def test_a_key_that_is_not_newer(self) -> None:
        machine = consumer()
        machine.offer(order(attempt=1), 0.0)
        for attempt in (0, 1):
            with pytest.raises(ProtocolError, match="not newer than attempt 1"):
                machine.offer(order(attempt=attempt, block=1), 0.0)

    def test_to_a_producer_that_is_not_connected(self) -> None:
        with pytest.raises(ProtocolError, match="offered to p0, which is not connected"):
            consumer(peers=()).offer(order(), 0.0)

    def test_an_attempt_ends_the_one_before(self) -> None:
        machine, _ = offered()
        machine.offer(order(attempt=1, block=1), 0.0)
        commands = machine.commands()
        assert only(commands, Ended) == [Ended(key(), Outcome.SUPERSEDED, "attempt 1 follows")]
        assert sent(commands, Cancel) == [Cancel(key(), 1, Outcome.SUPERSEDED)]

    def test_beyond_the_window_they_wait_and_the_floor_says_what_is_over(self) -> None:
        machine = consumer(Limits(window=2))
        for number in range(4):
            machine.offer(order(block=number, transfer=f"t{number}"), 0.0)
        assert [each.sequence for each in sent(machine.commands(), Offer)] == [1, 2]
        assert machine.custody() == {Target.OFFERED: 2, Target.QUEUED: 2}
        machine.cancel(key(transfer="t1"), 0.0)
        machine.receive("p0", Drained(key(transfer="t1"), 2), 0.0)
        assert not sent(machine.commands(), Offer)
        machine.cancel(key(transfer="t0"), 0.0)
        machine.receive("p0", Drained(key(transfer="t0"), 1), 0.0)
        assert [(each.sequence, each.floor) for each in sent(machine.commands(), Offer)] == [(3, 3), (4, 3)]

    def test_one_that_waits_is_cancelled_without_a_word(self) -> None:
        machine = consumer(Limits(window=1))
        for number in range(2):
            machine.offer(order(block=number, transfer=f"t{number}"), 0.0)
        machine.commands()
        machine.cancel(key(transfer="t1"), 0.0)
        assert only(machine.commands(), Released) == [Released(key(transfer="t1"))]

    def test_nothing_owed_is_complete_at_once(self) -> None:
        machine = consumer()
        machine.offer(Order(key(), Blocks(()), b"p" * 32, TOKENS, 0, 0, {"p0": ()}), 0.0)
        assert machine.commands() == [Ended(key(), Outcome.COMPLETE), Released(key())]


class TestArrivals:
    def test_complete_when_every_rank_has_sent_all_it_owes(self) -> None:
        machine, (first, second) = offered(("p0", "p1"))
        machine.receive("p0", complete(first.nonce, 0, 0, 4), 0.0)
        assert not machine.commands()
        machine.receive("p1", complete(second.nonce, 1, 6, 8, (4, 8)), 0.0)
        machine.receive("p1", complete(second.nonce, 0, 4, 6), 0.0)
        assert machine.commands() == [Ended(key(), Outcome.COMPLETE), Released(key())]
        assert machine.held_blocks() == 0

    def test_duplicates_strays_and_late_ones(self) -> None:
        machine, (first,) = offered()
        part = complete(first.nonce, 0, 0, 4)
        for peer, message in (
            ("p0", part),
            ("p0", part),
            ("p0", complete(b"?" * 16, 1, 4, 8)),
            ("p9", complete(first.nonce, 1, 4, 8)),
            ("p0", Ack(77)),
            ("p0", Drained(key(), 77)),
            ("p0", Ready(1, 1)),
        ):
            machine.receive(peer, message, 0.0)
        assert not machine.commands()
        machine.receive("p0", complete(first.nonce, 1, 4, 8), 0.0)
        machine.commands()
        machine.receive("p0", part, 0.0)
        assert not machine.commands()
        assert machine.counts["duplicate complete"] == 1
        assert machine.counts["stray complete"] == 2

    def test_a_nonce_of_another_rank_is_a_stray(self) -> None:
        machine, (_, second) = offered(("p0", "p1"))
        machine.receive("p0", complete(second.nonce, 0, 4, 8), 0.0)
        assert machine.counts["stray complete"] == 1

    @pytest.mark.parametrize(
        "wrong",
        [(0, 0, 9, None), (0, 0, 8, (0, 9)), (0, 0, 8, (0, 7))],
        ids=["a span not owed", "a larger whole", "a smaller whole"],
    )
    def test_what_does_not_fit_is_rejected_and_its_coverage_proves_nothing(self, wrong: tuple) -> None:
        machine, (first,) = offered()
        machine.receive("p0", complete(first.nonce, *wrong), 0.0)
        assert [end.outcome for end in only(machine.commands(), Ended)] == [Outcome.REJECTED_GEOMETRY]
        machine.receive("p0", complete(first.nonce, 1, 0, 8), 0.0)
        assert not only(machine.commands(), Released)
        machine.receive("p0", Drained(key(), 1), 0.0)
        assert only(machine.commands(), Released)


class TestCustody:
    def test_cancelled_it_waits_for_every_rank(self) -> None:
        machine, _ = offered(("p0", "p1"))
        machine.cancel(key(), 0.0)
        machine.cancel(key(), 0.0)
        assert len(only(machine.commands(), Ended)) == 1
        machine.receive("p0", Drained(key(), 1), 0.0)
        machine.receive("p0", Drained(key(), 1), 0.0)
        assert not only(machine.commands(), Released)
        machine.receive("p1", Drained(key(), 1), 0.0)
        assert only(machine.commands(), Released) == [Released(key())]

    def test_cancelled_but_covered(self) -> None:
        machine, (first,) = offered()
        machine.cancel(key(), 0.0)
        machine.receive("p0", complete(first.nonce, 0, 0, 8, (0, 8)), 0.0)
        commands = machine.commands()
        assert [end.outcome for end in only(commands, Ended)] == [Outcome.CANCELLED]
        assert only(commands, Released)

    def test_cancel_is_repeated_until_answered(self) -> None:
        machine, _ = offered()
        machine.cancel(key(), 0.0)
        machine.commands()
        for _ in range(20):
            machine.tick(machine.timers.next() or 0.0)
        assert len(sent(machine.commands(), Cancel)) > 3
        machine.receive("p0", Drained(key(), 1), 50.0)
        assert machine.timers.next() is None or not machine.transfers()

    def test_a_deadline_ends_the_transfer_and_not_custody(self) -> None:
        machine, _ = offered()
        machine.tick(120.0)
        commands = machine.commands()
        assert [end.outcome for end in only(commands, Ended)] == [Outcome.EXPIRED]
        assert not only(commands, Released)
        assert machine.holds(key())

    def test_drained_counts_only_once_it_was_asked_for(self) -> None:
        machine, _ = offered()
        machine.receive("p0", Drained(key(), 1), 0.0)
        assert machine.counts["stray drained"] == 1
        assert machine.custody() == {Target.OFFERED: 1}

    def test_failed_ends_the_transfer_and_is_answered(self) -> None:
        machine, _ = offered(("p0", "p1"))
        machine.receive("p0", Failed(key(), 1, Outcome.REJECTED_PROMPT, "another digest"), 0.0)
        commands = machine.commands()
        assert only(commands, Ended) == [Ended(key(), Outcome.REJECTED_PROMPT, "another digest")]
        assert [command.peer for command in only(commands, Send)] == ["p0", "p1"]
        assert not only(commands, Released)

    def test_failed_after_all_has_come_is_answered_with_complete(self) -> None:
        machine, (first,) = offered()
        machine.receive("p0", complete(first.nonce, 0, 0, 8), 0.0)
        machine.commands()
        machine.receive("p0", Failed(key(), 1, Outcome.CANCELLED, ""), 0.0)
        assert sent(machine.commands(), Cancel) == [Cancel(key(), 1, Outcome.COMPLETE)]

    def test_failed_again_after_all_has_come_is_answered_with_what_it_came_to(self) -> None:
        """The Cancel that told the producer was lost; the bytes that it had posted before it failed have come."""
        machine, (first,) = offered()
        machine.receive("p0", Failed(key(), 1, Outcome.REJECTED_CLOSING, ""), 0.0)
        machine.receive("p0", complete(first.nonce, 0, 0, 8), 0.0)
        assert only(machine.commands(), Released)
        machine.receive("p0", Failed(key(), 1, Outcome.REJECTED_CLOSING, ""), 0.0)
        assert sent(machine.commands(), Cancel) == [Cancel(key(), 1, Outcome.REJECTED_CLOSING)]

    def test_what_a_producer_has_not_heard_is_remembered_within_the_window(self) -> None:
        machine = consumer(Limits(window=2))
        for number in range(4):
            machine.offer(order(transfer=f"t{number}"), 0.0)
            (first,) = sent(machine.commands(), Offer)
            machine.receive("p0", Failed(first.key, first.sequence, Outcome.CANCELLED, ""), 0.0)
            machine.receive("p0", complete(first.nonce, 0, 0, 8), 0.0)
        assert [machine._pairings["p0"].verdict(sequence) for sequence in (2, 3, 4)] == [
            Outcome.COMPLETE,
            Outcome.CANCELLED,
            Outcome.CANCELLED,
        ]

    def test_a_stuck_write_is_quarantined_until_proof(self) -> None:
        machine, _ = offered()
        machine.receive("p0", Failed(key(), 1, Outcome.TRANSPORT_ERROR, "broke", stuck=True), 0.0)
        machine.commands()
        machine.tick(0.0)
        commands = machine.commands()
        assert machine.held_blocks(Target.QUARANTINED) == 1
        assert only(commands, AskProof) == [AskProof("p0")]
        assert sent(commands, Cancel)
        machine.writes_ended("p0", 1.0)
        assert only(machine.commands(), Released)


class TestPeers:
    def test_loss_ends_transfers_and_quarantines(self) -> None:
        machine, _ = offered(("p0", "p1"))
        machine.peer_lost("p0", "silence", 0.0)
        machine.peer_lost("p0", "silence", 0.0)
        commands = machine.commands()
        assert only(commands, Ended) == [Ended(key(), Outcome.PEER_LOST, "silence")]
        assert machine.custody() == {Target.QUARANTINED: 1, Target.DRAINING: 1}
        machine.receive("p1", Drained(key(), 1), 0.0)
        machine.tick(0.0)
        commands = machine.commands()
        assert only(commands, AskProof)
        assert not only(commands, Released)
        machine.writes_ended("p0", 0.0)
        assert only(machine.commands(), Released)

    def test_back_again_it_asks_for_drained(self) -> None:
        machine, _ = offered()
        machine.peer_lost("p0", "silence", 0.0)
        machine.commands()
        machine.connected("p0", 1.0)
        commands = machine.commands()
        assert sent(commands, Cancel) == [Cancel(key(), 1, Outcome.PEER_LOST)]
        machine.receive("p0", Drained(key(), 1), 1.0)
        assert only(machine.commands(), Released)

    def test_back_again_the_floor_comes_first(self) -> None:
        """A producer that missed it would take the Cancel for one beyond its window, and never answer."""
        machine = consumer(Limits(window=2))
        for number in range(3):
            machine.offer(order(block=number, transfer=f"t{number}"), 0.0)
            machine.cancel(key(transfer=f"t{number}"), 0.0)
            if number < 2:
                machine.receive("p0", Drained(key(transfer=f"t{number}"), number + 1), 0.0)
        machine.peer_lost("p0", "silence", 0.0)
        machine.commands()
        machine.connected("p0", 1.0)
        messages = [command.message for command in only(machine.commands(), Send)]
        assert messages == [Renew(3, 10.0), Cancel(key(transfer="t2"), 3, Outcome.CANCELLED)]

    def test_proof_ends_an_epoch_for_good(self) -> None:
        machine, _ = offered()
        machine.writes_ended("p0", 0.0)
        assert only(machine.commands(), Released)
        machine.connected("p0", 0.0)
        with pytest.raises(ProtocolError, match="not connected"):
            machine.offer(order(attempt=1), 0.0)

    def test_renewed_four_times_a_lease_as_long_as_anything_is_open(self) -> None:
        machine = consumer(Limits(lease=0.3, deadline=3.0))
        for number in range(128):
            machine.offer(order(block=number, transfer=f"t{number}"), 0.0)
        machine.commands()
        renewed = []
        while (now := machine.timers.next() or 9.0) < 3.0:
            machine.tick(now)
            renewed += [now for _ in sent(machine.commands(), Renew)]
        assert all(later - earlier <= 0.08 for earlier, later in pairwise(renewed))
        assert 39 <= len(renewed) <= 41
        machine.peer_lost("p0", "silence", 3.0)
        machine.tick(4.0)
        assert not sent(machine.commands(), Renew)

    def test_unknown_peers_and_timers_are_fine(self) -> None:
        machine = consumer()
        machine.peer_lost("p9", "?", 0.0)
        machine.writes_ended("p9", 0.0)
        machine.cancel(key(), 0.0)
        for timer in (("resend", key(), "p0"), ("renew", "p9"), ("proof", "p9"), ("deadline", key()), ("what",)):
            machine.fire(timer, 0.0)
        machine.receive("p9", Ack(1), 0.0)
        assert machine.commands() == []
        assert machine.counts == {"stray": 1}


def test_the_two_machines_by_themselves() -> None:
    """One transfer in two parts, message by message."""

    source, target = producer(), consumer()
    target.offer(order(), 0.0)
    for message in sent(target.commands(), Offer):
        source.receive("c0", message, 0.0)
    for message in sent(source.commands(), Ack):
        target.receive("p0", message, 0.0)
    for ready in (5, TOKENS):
        stage(source, ready)
        for post in only(source.commands(), Post):
            target.receive("p0", post.complete, 0.0)
            source.write_done(post.write, 0.0)
    assert Ended(key(), Outcome.COMPLETE) in source.commands()
    assert target.commands() == [Ended(key(), Outcome.COMPLETE), Released(key())]
    assert source.timers.next() is None or source.open_transfers == 0
