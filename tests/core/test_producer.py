"""The producer's machine: rendezvous, outcomes, custody of sources, and what it remembers."""

from __future__ import annotations

import msgspec
import pytest
from protocol import PROMPT, TOKENS, blocks, consumer, key, offer, only, order, owed, posted, producer, sent, stage

from pushkv.core.commands import AskProof, Command, Ended, Post, Released, Send, StageEnded, StageReleased
from pushkv.core.limits import Limits
from pushkv.core.messages import Ack, Cancel, Credit, Drained, Failed, Grant, Offer, Renew, Ring
from pushkv.core.outcome import Outcome
from pushkv.core.producer import ProducerMachine
from pushkv.core.states import Source
from pushkv.errors import ProtocolError

CANCEL = Cancel(key(), 1, Outcome.CANCELLED)


def matched(ready: int = TOKENS) -> tuple[ProducerMachine, list[Post]]:
    """A producer that has met an offer with a stage, and what it posted."""
    machine = producer()
    machine.receive("c0", offer(), 0.0)
    stage(machine, ready)
    return machine, only(machine.commands(), Post)


class TestRendezvous:
    def test_an_offer_waits_for_its_stage(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        assert sent(machine.commands(), Ack) == [Ack(1)]
        stage(machine)
        (post,) = only(machine.commands(), Post)
        assert (post.peer, post.key, post.source, post.target) == ("c0", key(), blocks(7), blocks(1))
        assert post.complete.spans == post.complete.whole == owed(0, TOKENS)

    def test_a_stage_waits_for_its_offer(self) -> None:
        machine = producer()
        stage(machine)
        machine.receive("c0", offer(), 0.0)
        assert posted(machine.commands()) == [(0, TOKENS)]

    def test_parts_are_posted_as_they_are_computed_and_once(self) -> None:
        machine, first = matched(ready=3)
        machine.receive("c0", offer(), 0.0)
        stage(machine, 3)
        stage(machine, 5)
        stage(machine, TOKENS)
        more = only(machine.commands(), Post)
        assert [(post.start, post.stop) for post in first + more] == [(0, 3), (3, 5), (5, TOKENS)]
        assert [post.complete.part for post in first + more] == [0, 1, 2]
        assert [post.complete.whole for post in first + more] == [None, None, owed(0, TOKENS)]

    def test_complete_when_all_have_landed(self) -> None:
        machine, (post,) = matched()
        machine.write_done(post.write, 1.0)
        machine.write_done(post.write, 1.0)
        assert machine.commands() == [
            Ended(key(), Outcome.COMPLETE),
            StageEnded("t", Outcome.COMPLETE),
            StageReleased("t"),
        ]
        assert (machine.open_transfers, machine.reading, machine.staged) == (0, 0, 0)

    def test_where_nothing_is_owed_nothing_is_posted(self) -> None:
        machine = ProducerMachine(0, "p0")
        machine.connected("c0", lambda start, stop, end: (), 0.0)
        machine.receive("c0", offer(), 0.0)
        stage(machine)
        assert Ended(key(), Outcome.COMPLETE) in machine.commands()

    @pytest.mark.parametrize(
        ("changes", "outcome", "says"),
        [
            ({"prompt": b"q" * 32}, Outcome.REJECTED_PROMPT, "digest is 7171"),
            ({"prompt_tokens": 9}, Outcome.REJECTED_PROMPT, "has 9 tokens, the staged one 8"),
            ({"stop": 9}, Outcome.REJECTED_TOKENS, "tokens 0 to 9"),
            ({"start": 8, "stop": 7}, Outcome.REJECTED_TOKENS, "tokens 8 to 7"),
            ({"into": Ring(blocks(1).tables)}, Outcome.REJECTED_GEOMETRY, "no staging slots"),
        ],
    )
    def test_an_offer_that_does_not_fit_the_stage(self, changes: dict, outcome: Outcome, says: str) -> None:
        machine = producer()
        stage(machine)
        machine.receive("c0", msgspec.structs.replace(offer(), **changes), 0.0)
        commands = machine.commands()
        (failed,) = sent(commands, Failed)
        assert not only(commands, Post)
        assert failed.outcome is outcome
        assert says in failed.detail

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            (("t", blocks(1), PROMPT, TOKENS, 9), "stages 9 of 8"),
            (("t", blocks(1), PROMPT, TOKENS, 2), "goes back from 3 to 2"),
            (("t", blocks(1), b"q" * 32, TOKENS, 4), "staged already for another prompt"),
            (("t", blocks(1), PROMPT, TOKENS, 4, 0.0, 3), "waits for siblings: 1, and now 3: say the same in every"),
            (("t", blocks(1), PROMPT, TOKENS, 4, 0.0, 0), "siblings: 1, and now as many as the offers say"),
        ],
    )
    def test_a_stage_that_contradicts_itself(self, args: tuple, says: str) -> None:
        machine = producer()
        stage(machine, 3)
        with pytest.raises(ProtocolError, match=says):
            machine.stage(*args, *([] if len(args) > 5 else [0.0]))
        assert machine.commands() == []

    def test_one_prompt_for_several_siblings(self) -> None:
        machine = producer()
        machine.stage("t", blocks(7), PROMPT, TOKENS, TOKENS, 0.0, siblings=2)
        for sequence in (1, 2):
            machine.receive("c0", msgspec.structs.replace(offer(sequence), key=key(sibling=sequence)), 0.0)
        first, second = only(machine.commands(), Post)
        machine.write_done(first.write, 0.0)
        assert not only(machine.commands(), StageEnded)
        machine.write_failed(second.write, Outcome.TRANSPORT_ERROR, "broke", 0.0, reached=False)
        machine.receive("c0", Cancel(key(sibling=2), 2, Outcome.TRANSPORT_ERROR), 0.0)
        (end,) = only(machine.commands(), StageEnded)
        assert end == StageEnded("t", Outcome.TRANSPORT_ERROR, "broke"), "with the words of the one that failed"


class TestCancel:
    def test_before_the_offer_it_is_answered_and_kills_it(self) -> None:
        machine = producer()
        machine.receive("c0", CANCEL, 0.0)
        machine.receive("c0", offer(), 0.0)
        stage(machine)
        commands = machine.commands()
        assert sent(commands, Drained) == [Drained(key(), 1)]
        assert not only(commands, Post)

    def test_before_the_stage(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        machine.receive("c0", CANCEL, 0.0)
        commands = machine.commands()
        assert Ended(key(), Outcome.CANCELLED, "the consumer ended it") in commands
        assert sent(commands, Drained) == [Drained(key(), 1)]

    def test_during_the_write_it_is_answered_when_that_has_ended(self) -> None:
        machine, (post,) = matched(ready=3)
        machine.receive("c0", CANCEL, 0.0)
        stage_again = machine.commands()
        assert not sent(stage_again, Drained)
        assert not only(stage_again, StageReleased)
        machine.write_done(post.write, 0.0)
        commands = machine.commands()
        assert sent(commands, Drained) == [Drained(key(), 1)]
        assert only(commands, StageReleased)

    def test_after_it_every_one_is_answered(self) -> None:
        machine, (post,) = matched()
        machine.write_done(post.write, 0.0)
        machine.commands()
        for _ in range(3):
            machine.receive("c0", CANCEL, 0.0)
            assert sent(machine.commands(), Drained) == [Drained(key(), 1)]

    def test_while_a_write_is_stuck_the_answer_is_failed(self) -> None:
        machine, (post,) = matched()
        machine.write_failed(post.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
        machine.commands()
        machine.receive("c0", CANCEL, 0.0)
        commands = machine.commands()
        assert not sent(commands, Drained)
        assert [failed.stuck for failed in sent(commands, Failed)] == [True]

    def test_of_an_earlier_attempt_leaves_a_later_one_alone(self) -> None:
        """Late or twice: the stage goes on for the attempt that is served."""
        machine = producer()
        machine.receive("c0", offer(2, attempt=1), 0.0)
        stage(machine, 3)
        for _ in range(2):
            machine.receive("c0", CANCEL, 0.0)
        stage(machine, TOKENS)
        commands = machine.commands()
        assert posted(commands) == [(0, 3), (3, TOKENS)]
        assert not only(commands, StageEnded)
        for post in only(commands, Post):
            machine.write_done(post.write, 0.0)
        assert only(machine.commands(), StageEnded) == [StageEnded("t", Outcome.COMPLETE)]

    def test_before_the_stage_it_need_not_wait_for_the_deadline(self) -> None:
        machine = producer()
        machine.receive("c0", CANCEL, 0.0)
        stage(machine)
        commands = machine.commands()
        assert only(commands, StageEnded) == [StageEnded("t", Outcome.CANCELLED)]
        assert only(commands, StageReleased)

    def test_of_a_later_attempt_ends_the_earlier_one(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        machine.receive("c0", Cancel(key(1), 2, Outcome.CANCELLED), 0.0)
        assert [failed.outcome for failed in sent(machine.commands(), Failed)] == [Outcome.SUPERSEDED]


class TestAttempts:
    def test_a_later_one_ends_the_earlier(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        machine.receive("c0", offer(2, attempt=1), 0.0)
        stage(machine)
        commands = machine.commands()
        assert [(failed.sequence, failed.outcome) for failed in sent(commands, Failed)] == [(1, Outcome.SUPERSEDED)]
        assert [post.key for post in only(commands, Post)] == [key(1)]

    def test_an_earlier_one_that_comes_late_is_not_served(self) -> None:
        machine = producer()
        stage(machine)
        machine.receive("c0", offer(2, attempt=1), 0.0)
        machine.receive("c0", offer(), 0.0)
        assert [post.key for post in only(machine.commands(), Post)] == [key(1)]

    def test_another_sibling_is_no_attempt(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        machine.receive("c0", msgspec.structs.replace(offer(2), key=key(1, sibling=1)), 0.0)
        assert not sent(machine.commands(), Failed)


class TestSources:
    def test_a_failed_write_holds_them_until_there_is_proof(self) -> None:
        machine, (post,) = matched()
        machine.write_failed(post.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
        machine.receive("c0", CANCEL, 0.0)
        assert not only(machine.commands(), StageReleased)
        assert machine.custody() == {Source.STUCK: 1}
        machine.fire(("proof", "c0"), 0.0)
        assert only(machine.commands(), AskProof) == [AskProof("c0")]
        machine.writes_ended("c0", 0.0)
        assert only(machine.commands(), StageReleased)

    def test_one_of_four_siblings_fails_and_the_other_three_end_first(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        for ready in (2, 4, 6, 8):
            stage(machine, ready)
        posts = only(machine.commands(), Post)
        machine.write_failed(posts[1].write, Outcome.TRANSPORT_ERROR, "broke", 0.0, reached=False)
        machine.receive("c0", CANCEL, 0.0)
        for post in (posts[0], posts[2]):
            machine.write_done(post.write, 0.0)
        commands = machine.commands()
        assert len(only(commands, Ended)) == 1
        assert not sent(commands, Drained)
        assert not only(commands, StageReleased)
        machine.write_done(posts[3].write, 0.0)
        commands = machine.commands()
        assert sent(commands, Drained)
        assert only(commands, StageReleased)

    def test_a_write_that_never_left_reads_nothing(self) -> None:
        machine, (post,) = matched()
        machine.write_failed(post.write, Outcome.TRANSPORT_ERROR, "refused", 0.0, reached=False)
        (failed,) = sent(machine.commands(), Failed)
        assert not failed.stuck
        assert machine.reading == 0

    def test_preempted_it_goes_on_from_the_first_unsent_token(self) -> None:
        machine, (post,) = matched(ready=3)
        machine.preempt("t")
        assert not only(machine.commands(), StageReleased)
        with pytest.raises(ProtocolError, match="preempted and its blocks are still read"):
            stage(machine, 5)
        machine.write_done(post.write, 0.0)
        assert only(machine.commands(), StageReleased)
        machine.stage("t", blocks(9), PROMPT, TOKENS, 2, 0.0)
        machine.stage("t", blocks(9), PROMPT, TOKENS, TOKENS, 0.0)
        (more,) = only(machine.commands(), Post)
        assert (more.start, more.stop, more.source) == (3, TOKENS, blocks(9))

    def test_unstaged_the_consumer_is_told_and_has_the_last_word(self) -> None:
        machine, (post,) = matched()
        machine.unstage("t", 0.0)
        commands = machine.commands()
        assert only(commands, StageEnded) == [StageEnded("t", Outcome.CANCELLED)]
        assert sent(commands, Failed)
        assert not only(commands, Ended)
        machine.receive("c0", Cancel(key(), 1, Outcome.COMPLETE), 0.0)
        assert [end.outcome for end in only(machine.commands(), Ended)] == [Outcome.COMPLETE]
        machine.write_done(post.write, 0.0)
        assert only(machine.commands(), StageReleased)

    def test_unstaged_whoever_offers_later_is_told_until_it_is_staged_anew(self) -> None:
        machine = producer()
        stage(machine)
        machine.unstage("t", 0.0, Outcome.CANCELLED, "the client has gone")
        machine.commands()
        machine.receive("c0", offer(), 0.0)
        (failed,) = sent(machine.commands(), Failed)
        assert (failed.outcome, failed.detail) == (Outcome.CANCELLED, "the client has gone")
        stage(machine)
        machine.receive("c0", offer(2, attempt=1), 0.0)
        assert only(machine.commands(), Post)


class TestTime:
    def test_failed_is_repeated_until_answered_and_insists(self) -> None:
        machine = producer()
        machine.receive("c0", offer(), 0.0)
        machine.close(0.0)
        machine.commands()
        insisted = []
        now = 0.0
        for _ in range(5):
            now = machine.timers.next() or now
            machine.tick(now)
            insisted += [command.insist for command in machine.commands()]
        assert insisted == [False, True, True, True, True]
        machine.receive("c0", CANCEL, now)
        machine.tick(now + 100)
        assert not sent(machine.commands(), Failed)

    def test_renew_keeps_a_lease_and_never_extends_the_deadline(self) -> None:
        machine = producer(Limits(lease=10.0))
        machine.receive("c0", msgspec.structs.replace(offer(), remaining=30.0), 0.0)
        for now in range(1, 30):
            machine.tick(now)
            machine.receive("c0", Renew(1, 10.0), now)
        assert machine.open_transfers == 1
        assert not only(machine.commands(), Ended)
        machine.tick(30.0)
        assert only(machine.commands(), Ended) == [Ended(key(), Outcome.EXPIRED, "its deadline passed")]

    def test_an_offer_is_not_started_after_its_lease(self) -> None:
        machine, _ = matched(ready=3)
        machine.tick(10.0)
        (failed,) = sent(machine.commands(), Failed)
        stage(machine, TOKENS, now=10.0)
        assert failed.outcome is Outcome.EXPIRED
        assert not only(machine.commands(), Post)

    def test_what_is_in_flight_outlives_the_lease(self) -> None:
        machine, (post,) = matched()
        machine.tick(10.0)
        machine.write_done(post.write, 11.0)
        assert only(machine.commands(), Ended) == [Ended(key(), Outcome.COMPLETE)]

    def test_a_stage_without_an_offer_ends_by_its_deadline(self) -> None:
        machine = producer(Limits(stage_deadline=5.0))
        stage(machine)
        machine.tick(5.0)
        ends = machine.commands()
        assert [end.outcome for end in only(ends, StageEnded)] == [Outcome.EXPIRED]
        assert only(ends, StageReleased)
        assert machine.timers.next() is None


class TestPeers:
    def test_a_lost_consumer_ends_its_transfers_and_keeps_custody(self) -> None:
        machine, (post,) = matched()
        machine.peer_lost("c0", "silence", 0.0)
        commands = machine.commands()
        assert only(commands, Ended) == [Ended(key(), Outcome.PEER_LOST, "silence")]
        assert not only(commands, StageReleased)
        machine.write_done(post.write, 0.0)
        assert only(machine.commands(), StageReleased)

    def told(self, commands: list[Command]) -> list[tuple[int, Outcome, str, bool]]:
        """What went over the control connection about offers that failed."""
        sends = [c for c in only(commands, Send) if isinstance(c.message, Failed) and c.insist]
        return [(c.message.sequence, c.message.outcome, c.message.detail, c.message.stuck) for c in sends]

    def test_a_lost_consumer_is_told_at_once_of_all_that_is_open(self) -> None:
        """It may be there, and wait: the producer alone has seen a loss. By the way that may not be broken."""
        machine, (post,) = matched()
        machine.receive("c0", offer(2, transfer="waits"), 0.0)
        machine.receive("c0", offer(3, transfer="failing", prompt=b"x" * 32), 0.0)
        stage(machine, transfer="failing")
        machine.receive("c0", offer(4, transfer="stuck"), 0.0)
        stage(machine, transfer="stuck")
        (stuck,) = only(machine.commands(), Post)[-1:]
        machine.write_failed(stuck.write, Outcome.TRANSPORT_ERROR, "broke", 0.0)
        machine.receive("c0", offer(5, transfer="done"), 0.0)
        stage(machine, transfer="done")
        (done,) = only(machine.commands(), Post)
        machine.write_done(done.write, 0.0)
        machine.commands()
        machine.peer_lost("c0", "its path broke", 0.0)
        why = (Outcome.PEER_LOST, "its path broke")
        assert self.told(machine.commands()) == [
            (1, *why, False), (2, *why, False), (3, *why, False), (4, *why, True)
        ]  # fmt: skip
        machine.peer_lost("c0", "again", 0.0)
        machine.write_done(post.write, 0.0)
        assert not self.told(machine.commands())

    def test_it_is_told_again_when_it_is_back_until_it_says_that_it_knows(self) -> None:
        machine = producer()
        for sequence in (1, 2, 3):
            machine.receive("c0", offer(sequence, transfer=f"t{sequence}"), 0.0)
        machine.peer_lost("c0", "silence", 0.0)
        machine.commands()
        machine.connected("c0", owed, 0.0)
        assert [told[0] for told in self.told(machine.commands())] == [1, 2, 3]
        machine.receive("c0", Cancel(key(transfer="t2"), 2, Outcome.PEER_LOST), 0.0)
        machine.receive("c0", Renew(2, 10.0), 0.0)
        machine.commands()
        machine.connected("c0", owed, 0.0)
        assert [told[0] for told in self.told(machine.commands())] == [3]

    def test_it_is_told_when_it_offers_again_what_ended_by_its_loss(self) -> None:
        """It has not heard an Ack, and would take one for a promise."""
        machine, _ = matched()
        machine.receive("c0", offer(2, transfer="other"), 0.0)
        machine.peer_lost("c0", "silence", 0.0)
        machine.connected("c0", owed, 0.0)
        machine.commands()
        for sequence, transfer in ((1, "t"), (2, "other")):
            machine.receive("c0", offer(sequence, transfer=transfer), 0.0)
            commands = machine.commands()
            assert [told[:2] for told in self.told(commands)] == [(sequence, Outcome.PEER_LOST)]
            assert not sent(commands, Ack)

    def test_what_it_is_told_ends_its_transfers_with_that_reason(self) -> None:
        """Both machines, by the control connection alone."""
        ours, theirs = producer(), consumer()
        theirs.offer(order(), 0.0)
        (offered,) = sent(theirs.commands(), Offer)
        ours.receive("c0", offered, 0.0)
        ours.peer_lost("c0", "its path broke", 0.0)
        (failed,) = sent(ours.commands(), Failed)
        theirs.receive("p0", failed, 0.0)
        commands = theirs.commands()
        assert only(commands, Ended) == [Ended(key(), Outcome.PEER_LOST, "its path broke")]
        assert not only(commands, Released)
        (cancel,) = sent(commands, Cancel)
        ours.connected("c0", owed, 0.0)
        ours.commands()
        ours.receive("c0", cancel, 0.0)
        (drained,) = sent(ours.commands(), Drained)
        theirs.receive("p0", drained, 0.0)
        assert only(theirs.commands(), Released)
        ours.connected("c0", owed, 0.0)
        assert not ours.commands()

    def test_back_again_it_still_refuses_what_was_over(self) -> None:
        machine = producer()
        machine.receive("c0", CANCEL, 0.0)
        machine.peer_lost("c0", "silence", 0.0)
        machine.connected("c0", owed, 0.0)
        machine.receive("c0", offer(), 0.0)
        stage(machine)
        assert not only(machine.commands(), Post)

    def test_proof_ends_all_and_the_epoch_for_good(self) -> None:
        machine, (post,) = matched()
        machine.writes_ended("c0", 0.0)
        commands = machine.commands()
        assert only(commands, Ended)
        assert only(commands, StageReleased)
        machine.connected("c0", owed, 0.0)
        machine.receive("c0", offer(), 0.0)
        machine.write_done(post.write, 0.0)
        assert machine.commands() == []
        assert machine.counts["stray"] == 1

    def test_strangers_and_what_is_not_for_a_producer(self) -> None:
        machine = producer()
        machine.receive("c9", offer(), 0.0)
        machine.receive("c0", Grant(1, 0, Credit(0, 0)), 0.0)
        machine.receive("c0", offer(1 + Limits().window), 0.0)
        machine.writes_ended("c9", 0.0)
        machine.peer_lost("c9", "?", 0.0)
        machine.fire(("deadline", "c0", 99), 0.0)
        machine.fire(("no such timer",), 0.0)
        assert machine.commands() == []
        assert machine.counts == {"stray": 1, "stray grant": 1, "beyond the window": 1}

    def test_closing_it_refuses_new_offers(self) -> None:
        machine = producer()
        machine.receive("c0", offer(transfer="early"), 0.0)
        machine.close(0.0)
        machine.receive("c0", offer(2, transfer="late"), 0.0)
        assert [failed.outcome for failed in sent(machine.commands(), Failed)] == [Outcome.REJECTED_CLOSING] * 2

    def test_closing_it_ends_stages_that_serve_nobody(self) -> None:
        machine, (post,) = matched(ready=3)
        stage(machine, transfer="alone")
        machine.commands()
        machine.close(0.0)
        ends = machine.commands()
        assert [(end.transfer, end.outcome) for end in only(ends, StageEnded)] == [
            ("alone", Outcome.REJECTED_CLOSING)
        ]
        assert [released.transfer for released in only(ends, StageReleased)] == ["alone"]
        stage(machine, TOKENS)
        (last,) = only(machine.commands(), Post)
        assert (last.start, last.stop) == (3, TOKENS), "what has met goes on"
        for one in (post, last):
            machine.write_done(one.write, 0.0)
        assert [end.outcome for end in only(machine.commands(), StageEnded)] == [Outcome.COMPLETE]
        stage(machine, transfer="new")
        assert [end.outcome for end in only(machine.commands(), StageEnded)] == [Outcome.REJECTED_CLOSING]


class TestBounds:
    def test_too_many_unmatched_offers_are_refused_for_good(self) -> None:
        machine = producer(Limits(unmatched=2))
        for sequence in (1, 2, 3):
            machine.receive("c0", offer(sequence, transfer=f"t{sequence}"), 0.0)
        assert [failed.sequence for failed in sent(machine.commands(), Failed)] == [3]
        machine.receive("c0", Cancel(key(transfer="t1"), 1, Outcome.CANCELLED), 0.0)
        machine.receive("c0", offer(3, transfer="t3"), 0.0)
        assert [failed.outcome for failed in sent(machine.commands(), Failed)] == [Outcome.REJECTED_BUSY]

    def test_too_many_stages_are_refused(self) -> None:
        machine = producer(Limits(unmatched=1))
        stage(machine)
        with pytest.raises(ProtocolError, match="one stage more than the limit of 1"):
            stage(machine, transfer="u")

    def test_100_000_offers_that_never_match_leave_it_flat(self) -> None:
        """And rule 6 still holds: a Cancel that overtakes its Offer kills it, and what was over stays so."""
        limits = Limits(window=64, unmatched=32)
        machine = producer(limits)
        largest = 0
        for sequence in range(1, 100_001):
            floor = max(1, sequence - 40)
            machine.receive("c0", offer(sequence, floor=floor, transfer=f"t{sequence}"), 0.0)
            if sequence > 40:
                machine.receive("c0", Cancel(key(transfer=f"t{floor}"), floor, Outcome.EXPIRED), 0.0)
            machine.commands()
            largest = max(largest, _size(machine))
        assert largest <= 3 * limits.window
        assert len(machine.timers) <= 2 * limits.window
        machine.receive("c0", Cancel(key(transfer="x"), 100_002, Outcome.CANCELLED), 0.0)
        machine.receive("c0", offer(100_002, floor=99_960, transfer="x"), 0.0)
        machine.receive("c0", offer(99_961, floor=99_960, transfer="t99961"), 0.0)
        machine.receive("c0", offer(7, transfer="t7"), 0.0)
        for transfer in ("x", "t7"):
            stage(machine, transfer=transfer)
        assert not only(machine.commands(), Post)


def _size(machine: ProducerMachine) -> int:
    (customer,) = machine._book.customers.values()
    return len(customer.live) + len(customer.dead) + len(list(machine._book))
