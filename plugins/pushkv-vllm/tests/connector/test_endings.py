"""Requests that do not go as they should: each ends, for its reason, by the engine's policy; blocks come back."""

from __future__ import annotations

from typing import Any

import pytest
from cases import PROMPT, Balance, continued, counts, has_open, legs, pair
from fake_engine import FakeEngine, Scene, until

from pushkv_vllm.directives import Reports

OUTCOMES = ("fail", "recompute")
QUICK = (("deadline", 1.0), ("hold", 1.0), ("connect_timeout", 1.0))


def ends_by_policy(decode: FakeEngine, name: str, prompt: list[int] = PROMPT) -> None:
    """A request whose KV has not come has failed, or was computed here after all."""
    if decode.shape.policy == "fail":
        assert str(decode.finished[name]) == "error"
        assert name not in decode.loaded
    else:
        assert decode.tokens[name] == continued(prompt, 3)
        assert decode.loaded[name] < len(prompt) - 1


def listen(decode: FakeEngine) -> list[str]:
    """Why loads have failed, as workers tell it."""
    reasons: list[str] = []
    half = decode.scheduler.connector._scheduler._decode
    reports = half.reports

    def listening(told: Reports) -> None:
        reasons.extend(told.failed.values())
        reports(told)

    half.reports = listening
    return reasons


@pytest.mark.parametrize("policy", OUTCOMES)
class TestByTheDeadline:
    """The cases in which nothing that decode waits for ever comes."""

    def test_the_prefill_leg_is_never_sent(self, scene: Scene, policy: str) -> None:
        prefill, decode = pair(scene, decode={"policy": policy, "settings": QUICK})
        balance = Balance(prefill, decode)
        decode.add("d", PROMPT, legs(prefill, "t")[1], 3)
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()
        assert counts(decode) == {"failed": 1}

    def test_decode_comes_after_the_prompt_was_given_up(self, scene: Scene, policy: str) -> None:
        prefill, decode = pair(scene, {"settings": QUICK}, {"policy": policy, "settings": QUICK})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT, one)
        until(lambda: counts(prefill).get("not sent"), prefill)
        decode.add("d", PROMPT, other, 3)
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()

    def test_the_ids_differ(self, scene: Scene, policy: str) -> None:
        prefill, decode = pair(scene, {"settings": QUICK}, {"policy": policy, "settings": QUICK})
        balance = Balance(prefill, decode)
        prefill.add("p", PROMPT, legs(prefill, "t-1")[0])
        decode.add("d", PROMPT, legs(prefill, "t-2")[1], 3)
        until(lambda: "d" in decode.finished and counts(prefill), prefill, decode)
        ends_by_policy(decode, "d")
        assert counts(prefill) == {"not sent": 1}
        balance.settle()

    def test_prefill_dies_after_the_handshake(self, scene: Scene, policy: str) -> None:
        prefill, decode = pair(scene, decode={"policy": policy, "settings": QUICK})
        balance = Balance(decode)
        first = legs(prefill, "t-1")
        prefill.add("p", PROMPT, first[0])
        decode.add("d-1", PROMPT, first[1], 3)
        until(lambda: "d-1" in decode.finished, prefill, decode)
        where = legs(prefill, "t-2")[1]
        scene.kill(prefill)
        other = [*PROMPT[:3], *PROMPT]
        decode.add("d-2", other, where, 3)
        until(lambda: "d-2" in decode.finished, decode)
        ends_by_policy(decode, "d-2", other)
        balance.settle()

    def test_nobody_is_at_the_address(self, scene: Scene, policy: str) -> None:
        prefill, decode = pair(scene, decode={"policy": policy, "settings": QUICK})
        balance = Balance(decode)
        asked = legs(prefill, "t")[1] | {"remote_port": 1}
        decode.add("d", PROMPT, asked, 3)
        reasons = listen(decode)
        until(lambda: "d" in decode.finished, decode)
        ends_by_policy(decode, "d")
        assert [reason.split(":")[0] for reason in reasons] == ["peer lost"]
        balance.settle()


@pytest.mark.parametrize("policy", OUTCOMES)
@pytest.mark.parametrize("ranks", [1, 2])
class TestAtOnce:
    """What is known not to come ends long before the deadline (two minutes)."""

    def test_another_prompt(self, scene: Scene, policy: str, ranks: int) -> None:
        prefill, decode = pair(scene, {"ranks": ranks}, {"policy": policy, "ranks": ranks})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT[::-1], one)
        decode.add("d", PROMPT, other, 3)
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()

    @pytest.mark.parametrize(
        "changes",
        [{"transfer_id": None}, {"transfer_id": 7}, {"remote_host": None}, {"remote_port": "x"}, {"n": 0}],
        ids=str,
    )
    def test_parameters_that_cannot_be_followed(
        self, scene: Scene, policy: str, ranks: int, changes: dict[str, Any]
    ) -> None:
        prefill, decode = pair(scene, {"ranks": ranks}, {"policy": policy, "ranks": ranks})
        balance = Balance(prefill, decode)
        decode.add("d", PROMPT, legs(prefill, "t")[1] | changes, 3)
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()

    def test_prefill_is_aborted(self, scene: Scene, policy: str, ranks: int) -> None:
        prefill, decode = pair(scene, {"ranks": ranks, "batched": 16}, {"policy": policy, "ranks": ranks})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT, one)
        decode.add("d", PROMPT, other, 3)
        prefill.step()
        decode.step()
        prefill.abort("p")
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()

    def test_prefill_is_aborted_before_it_was_scheduled(self, scene: Scene, policy: str, ranks: int) -> None:
        prefill, decode = pair(scene, {"ranks": ranks}, {"policy": policy, "ranks": ranks})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        decode.add("d", PROMPT, other, 3)
        until(lambda: all(producer.stats().get("handshakes refused", 0) == 0 and has_open(producer)
                          for producer in prefill.producers), decode)  # fmt: skip
        prefill.add("p", PROMPT, one)
        prefill.abort("p")
        until(lambda: "d" in decode.finished, prefill, decode)
        ends_by_policy(decode, "d")
        balance.settle()


class TestAborts:
    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("steps", range(6))
    def test_decode_at_any_moment(self, scene: Scene, steps: int, ranks: int) -> None:
        prefill, decode = pair(scene, {"batched": 16}, {"ranks": ranks})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        prefill.add("p", PROMPT, one)
        decode.add("d", PROMPT, other, 30)
        for number in range(steps):
            (prefill if number % 2 else decode).step()
        decode.abort("d")
        until(lambda: "p" in prefill.finished, prefill, decode)
        balance.settle()

    def test_one_after_the_other_under_one_public_id(self, scene: Scene) -> None:
        """A retry is another dispatch: it has a transfer id of its own, and the first one's end does not touch it."""
        prefill, decode = pair(scene)
        balance = Balance(prefill, decode)
        for attempt in range(3):
            one, other = legs(prefill, f"t-{attempt}", attempt=attempt)
            prefill.add(f"p-{attempt}", PROMPT, one)
            decode.add(f"d-{attempt}", [*PROMPT[::-1]] if attempt == 1 else PROMPT, other, 3)
            if attempt < 2:
                decode.step()
                decode.abort(f"d-{attempt}")
        until(lambda: "d-2" in decode.finished, prefill, decode)
        assert decode.tokens["d-2"] == continued(PROMPT, 3)
        balance.settle()

    def test_a_transfer_id_that_is_open_already(self, scene: Scene) -> None:
        prefill, decode = pair(scene)
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t")
        decode.add("d-1", PROMPT, other, 3)
        decode.add("d-2", PROMPT, other, 3)
        until(lambda: "d-2" in decode.finished, decode)
        assert str(decode.finished["d-2"]) == "error"
        prefill.add("p", PROMPT, one)
        until(lambda: "d-1" in decode.finished, prefill, decode)
        assert decode.tokens["d-1"] == continued(PROMPT, 3)
        balance.settle()


class TestSiblings:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_all_get_their_kv_from_one_prompt(self, scene: Scene, ranks: int) -> None:
        prefill, decode = pair(scene, decode={"ranks": ranks, "caching": False})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t", n=3)
        prefill.add("p", PROMPT, one)
        for number in range(3):
            decode.add(f"{number}_d", PROMPT, other, 2 + number)
        until(lambda: len(decode.finished) == 3, prefill, decode)
        for number in range(3):
            assert decode.tokens[f"{number}_d"] == continued(PROMPT, 2 + number)
            assert decode.loaded[f"{number}_d"] == len(PROMPT) - 1
        balance.settle()

    def test_one_is_aborted_and_the_others_go_on(self, scene: Scene) -> None:
        prefill, decode = pair(scene, decode={"caching": False})
        balance = Balance(prefill, decode)
        one, other = legs(prefill, "t", n=3)
        for number in range(3):
            decode.add(f"{number}_d", PROMPT, other, 2)
        decode.step()
        decode.abort("1_d")
        prefill.add("p", PROMPT, one)
        until(lambda: {"0_d", "2_d"} <= decode.finished.keys(), prefill, decode)
        balance.settle()
