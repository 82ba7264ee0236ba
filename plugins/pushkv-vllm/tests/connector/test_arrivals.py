"""Loads that the scheduler hears of before the output of the step in which they were seen."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from cases import PROMPT, Balance, continued, legs, pair
from fake_engine import FakeEngine, Scene, until

from pushkv_vllm.scheduler.arrivals import Arrivals
from pushkv_vllm.wake import Alarm, Bell


def queue(engine: FakeEngine) -> tuple[Any, Any]:
    """A step that is queued, and what it will say: nothing is taken of it yet."""
    output = engine.scheduler.schedule()
    engine.take_tables(output)
    return output, engine.execute(output)


def offered(engine: FakeEngine) -> bool:
    """Whether all of its ranks have offered the one load."""
    halves = [worker.connector._worker._decode for worker in engine.workers]
    return all(load.transfer is not None for half in halves for load in half._loads.values())


def under_way(scene: Scene, ranks: int, others: list[str]) -> tuple[FakeEngine, FakeEngine, Balance]:
    """A pair whose decode engine has offered a load, "d", and computes for ``others`` meanwhile."""
    prefill, decode = pair(scene, decode={"ranks": ranks})
    balance = Balance(prefill, decode)
    for name in others:
        decode.add(name, PROMPT[:9], None, 400)
    decode.add("d", PROMPT, legs(prefill, "t")[1], 3)
    decode.step()
    until(lambda: offered(decode), decode)
    return prefill, decode, balance


def all_have_rung(engine: FakeEngine) -> bool:
    """Whether all of its ranks have told of one load."""
    half = engine.scheduler.connector._scheduler
    half._alarm.sleep(0.001)
    return len(half._alarm._news) == len(engine.workers)


class TestThroughTheScheduler:
    @pytest.mark.parametrize("others", [["runs"], []], ids=["busy", "idle"])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_it_is_scheduled_before_the_output_that_tells_of_it(
        self, scene: Scene, ranks: int, others: list[str]
    ) -> None:
        """A step is queued while the KV is on its way; once that is there, the next step computes with it."""
        prefill, decode, balance = under_way(scene, ranks, others)
        queued, result = queue(decode)
        assert list(queued.num_scheduled_tokens) == others
        prefill.add("p", PROMPT, legs(prefill, "t")[0])
        until(lambda: all_have_rung(decode), prefill)
        decode.scheduler.update_from_output(queued, result)
        following, result = queue(decode)
        assert following.num_scheduled_tokens == dict.fromkeys([*others, "d"], 1)
        decode.scheduler.update_from_output(following, result)  # this one tells of the load again
        until(lambda: {"d", *others} <= set(decode.finished), prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT, 3)
        balance.settle()

    def test_a_scheduler_that_is_woken_sleeps_in_no_step_until_it_has_heard_why(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill, decode = pair(scene)
        half = decode.scheduler.connector._scheduler
        asleep: list[bool] = []
        sleep = half._alarm.sleep
        monkeypatch.setattr(half._alarm, "sleep", lambda seconds: asleep.append(sleep(seconds)) or asleep[-1])
        decode.add("d", PROMPT, legs(prefill, "t")[1], 3)
        until(lambda: len(asleep) > 5 and not asleep[-1], decode)
        before = len(asleep)
        decode.workers[0].connector._worker._bell.ring()
        for _ in range(3):
            decode.step()
        assert asleep[before:] == [True]
        decode.abort("d")

    def test_a_load_of_which_one_rank_alone_has_told_waits(self, scene: Scene) -> None:
        prefill, decode, _ = under_way(scene, 2, ["runs"])
        queued, result = queue(decode)
        half = decode.scheduler.connector._scheduler
        half._decode.arrivals.tell(1, half._decode.arrivals._loads["d"])
        decode.scheduler.update_from_output(queued, result)
        following, result = queue(decode)
        assert list(following.num_scheduled_tokens) == ["runs"]
        decode.scheduler.update_from_output(following, result)
        prefill.add("p", PROMPT, legs(prefill, "t")[0])
        until(lambda: "d" in decode.finished, prefill, decode)
        assert decode.tokens["d"] == continued(PROMPT, 3)

    def test_aborted_once_it_is_there(self, scene: Scene) -> None:
        prefill, decode, balance = under_way(scene, 1, ["runs"])
        queued, result = queue(decode)
        prefill.add("p", PROMPT, legs(prefill, "t")[0])
        until(lambda: all_have_rung(decode), prefill)
        decode.abort("d")
        decode.scheduler.update_from_output(queued, result)
        until(lambda: "runs" in decode.finished, prefill, decode)
        balance.settle()


class TestArrivals:
    def test_early_and_then_no_more(self) -> None:
        arrivals = Arrivals(2)
        load = arrivals.expect("a")
        arrivals.tell(0, load)
        assert arrivals.received([]) == set()
        arrivals.tell(0, load)
        arrivals.tell(1, load)
        assert arrivals.received([]) == {"a"}
        assert arrivals.received(["b"]) == {"b"}
        assert arrivals.received(["a"]) == set()
        assert arrivals.received(["a"]) == {"a"}, "what the output says of another load is news"

    def test_by_the_output_first(self) -> None:
        arrivals = Arrivals(1)
        load = arrivals.expect("a")
        assert arrivals.received(["a"]) == {"a"}
        arrivals.tell(0, load)
        assert arrivals.received([]) == set()

    def test_both_at_once(self) -> None:
        arrivals = Arrivals(1)
        arrivals.tell(0, arrivals.expect("a"))
        assert arrivals.received(["a"]) == {"a"}
        assert arrivals.received([]) == set()

    def test_late_news_of_a_request_id_used_again(self) -> None:
        arrivals = Arrivals(1)
        first = arrivals.expect("a")
        assert arrivals.received(["a"]) == {"a"}
        second = arrivals.expect("a")
        arrivals.tell(0, first)
        assert arrivals.received([]) == set()
        arrivals.tell(0, second)
        assert arrivals.received([]) == {"a"}

    def test_ranks_and_loads_that_are_not(self) -> None:
        arrivals = Arrivals(1)
        load = arrivals.expect("a")
        arrivals.tell(1, load)
        arrivals.tell(0, load + 1)
        arrivals.tell(0, 0)
        assert arrivals.received([]) == set()


class TestDoorbell:
    def test_what_is_told_without_the_secret_is_nothing(self) -> None:
        alarm, bell, stranger = Alarm(), Bell(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bell.doorbell = alarm.doorbell
            bell.tell(3, 1 << 40)
            for datagram in (b"", bytes(26), bytes(25), bytes(27), bytes(60_000), alarm.doorbell.secret):
                stranger.sendto(datagram, alarm.doorbell.address)
            bell.tell(0, 2)
            assert alarm.news() == [(3, 1 << 40), (0, 2)]
            assert alarm.news() == []
        finally:
            bell.close()
            stranger.close()
            alarm.close()

    def test_a_stranger_wakes_nobody(self) -> None:
        alarm, bell, stranger = Alarm(), Bell(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            for datagram in (b"", bytes(26)):
                stranger.sendto(datagram, alarm.doorbell.address)
                assert not alarm.sleep(0.01)
            bell.doorbell = alarm.doorbell
            bell.ring()
            stranger.sendto(b"", alarm.doorbell.address)
            assert alarm.sleep(60)
            assert alarm.news() == []
        finally:
            bell.close()
            stranger.close()
            alarm.close()

    def test_a_stranger_that_never_stops_keeps_the_scheduler_from_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that sends faster than the scheduler takes: there is always one more."""
        alarm, stranger, sent = Alarm(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), 0

        class Flooded:
            def __getattr__(self, name: str) -> Any:
                return getattr(own, name)

            def recv(self, size: int) -> bytes:
                nonlocal sent
                sent += 1
                assert sent < 1_000_000, "it never ends"
                stranger.sendto(b"", alarm.doorbell.address)
                return own.recv(size)

        own = alarm._socket
        monkeypatch.setattr(alarm, "_socket", Flooded())
        try:
            assert alarm.news() == []
            assert not alarm.sleep(0.05)
        finally:
            stranger.close()
            alarm.close()

    def test_news_that_ends_a_sleep_is_kept(self) -> None:
        alarm, bell = Alarm(), Bell()
        try:
            bell.doorbell = alarm.doorbell
            bell.tell(0, 7)
            assert alarm.sleep(60)
            assert alarm.news() == [(0, 7)]
            assert not alarm.sleep(0)
        finally:
            bell.close()
            alarm.close()
        bell.tell(0, 8)  # nobody is there any more

    def test_the_secret_is_in_no_text(self) -> None:
        alarm = Alarm()
        assert repr(alarm.doorbell.secret)[2:-1] not in repr(alarm.doorbell)
        alarm.close()
