"""What is easy to get wrong in a connector that pushes. Each test fails when its mistake is made.

The fourth, to wait for WRITEs in ``handle_preemptions`` instead of pinning blocks, is in ``test_preemption``.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from cases import PROMPT, Balance, continued, counts, legs, pair
from fake_engine import FakeEngine, Scene, until

from pushkv.backends.cpu import CpuBackend
from pushkv_vllm import compat
from pushkv_vllm.directives import Directives, Reports


def reported(engine: FakeEngine) -> list[Counter[str]]:
    """Count, for each rank, what it reports as received."""
    seen = [Counter[str]() for _ in engine.workers]
    for worker, counter in zip(engine.workers, seen, strict=True):
        results = worker.connector.get_transfer_results

        def counted(finished: Any, results: Any = results, counter: Counter[str] = counter) -> Any:
            made = results(finished)
            counter.update(made.finished_recving)
            return made

        worker.connector.get_transfer_results = counted
    return seen


def connect(prefill: FakeEngine, decode: FakeEngine) -> None:
    """Have a request pushed from one to the other, so that they are connected."""
    one, other = legs(prefill, "first")
    prefill.add("p-first", [7, *PROMPT], one)
    decode.add("d-first", [7, *PROMPT], other, 2)
    until(lambda: "d-first" in decode.finished, prefill, decode)
    assert decode.loaded["d-first"] == len(PROMPT)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_1_every_rank_reports_every_request_once(scene: Scene, policy: str) -> None:
    """Whether its KV comes, fails, or it is aborted; and nothing is reported as sent."""
    prefill, decode = pair(scene, {"ranks": 2}, {"ranks": 2, "policy": policy, "settings": (("deadline", 3.0),)})
    balance = Balance(prefill, decode)
    seen = reported(decode)
    for name in ("comes", "fails", "aborted", "malformed"):
        one, other = legs(prefill, name)
        if name == "comes":
            prefill.add("p", PROMPT, one)
        decode.add(name, [len(name), *PROMPT], other if name != "malformed" else other | {"n": -1}, 2)
        if name == "comes":
            decode.tokens[name] = [len(name), *PROMPT]
    decode.step()
    decode.abort("aborted")
    until(lambda: {"fails", "malformed"} <= decode.finished.keys(), prefill, decode)
    for _ in range(20):
        decode.step()
    balance.settle()
    assert [dict(counter) for counter in seen] == [dict.fromkeys(("comes", "fails", "aborted", "malformed"), 1)] * 2


def test_2_no_block_is_free_before_proof(scene: Scene) -> None:
    """A WRITE is held up, its transfer runs out of time, the request fails at once, and its blocks stay away."""
    prefill, decode = pair(scene, decode={"settings": (("deadline", 2.0),)})
    balance = Balance(prefill, decode)
    connect(prefill, decode)
    one, other = legs(prefill, "t")
    for producer in prefill.producers:
        scene.network.stall(producer.agent)
    prefill.add("p", PROMPT, one)
    decode.add("d", PROMPT, other, 3)
    until(lambda: "d" in decode.finished, prefill, decode)
    for _ in range(5):
        decode.step()
        prefill.step()
    needed = -(-(len(PROMPT) - 1) // decode.shape.block_size)
    assert balance.free[1] - decode.free_blocks == needed
    assert prefill.free_blocks < balance.free[0]
    decode.add("e", PROMPT[::-1], None, 3)
    until(lambda: "e" in decode.finished, decode)
    scene.network.release()
    balance.settle()
    assert decode.tokens["e"] == continued(PROMPT[::-1], 3)


class Gate:
    """A fence that is passed when the test says so."""

    def __init__(self, *, passed: bool) -> None:
        self.passed = passed

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        until(self.done)


def test_3_nothing_is_read_before_the_fence(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks run when work is queued; KV is there when the device has done it.

    A later prompt, whose step is done, is pushed whole meanwhile: there was time for the first one.
    """
    prefill, decode = pair(scene)
    connect(prefill, decode)
    gates = [Gate(passed=False), Gate(passed=True)]
    prompts = [PROMPT, PROMPT[::-1]]
    for number, gate in enumerate(gates):
        monkeypatch.setattr(CpuBackend, "fence", lambda *_, gate=gate: gate)
        one, other = legs(prefill, f"t-{number}")
        prefill.add(f"p-{number}", prompts[number], one)
        decode.add(f"d-{number}", prompts[number], other, 3)
        until(lambda name=f"p-{number}": name in prefill.finished, prefill, decode)
    until(lambda: "d-1" in decode.finished, prefill, decode)
    assert counts(decode)["received"] == 2  # the one that connected them, and the later prompt
    assert "d-0" not in decode.loaded
    gates[0].passed = True
    until(lambda: "d-0" in decode.finished, prefill, decode)
    assert decode.tokens["d-0"] == continued(PROMPT, 3)


def test_5_a_failure_is_told_together_with_the_end(scene: Scene) -> None:
    """Told alone it would be held back until all ranks have ended, which without the end never comes."""
    ranks = {"ranks": 2, "window": 6}
    prefill, decode = pair(scene, {"window": 6}, ranks | {"settings": (("deadline", 2.0),)})
    connect(prefill, decode)
    told: list[tuple[set[str], set[str]]] = []
    for worker in decode.workers:
        results = worker.connector.get_transfer_results

        def watched(finished: Any, results: Any = results) -> Any:
            made = results(finished)
            told.append((set(made.failed_recving), set(made.finished_recving)))
            return made

        worker.connector.get_transfer_results = watched
    decode.add("d", PROMPT, legs(prefill, "t")[1], 3)
    until(lambda: "d" in decode.finished, decode)
    assert all(failed <= received for failed, received in told)
    assert sum("d" in failed for failed, _ in told) == 2


def told_of_no_blocks(engine: FakeEngine) -> None:
    """Have the engine name no blocks when a request is finished, as it does after a failed load."""
    connector = engine.scheduler.connector
    finished = connector.request_finished_all_groups
    connector.request_finished_all_groups = lambda request, blocks: finished(request, tuple([] for _ in blocks))


def test_6_what_was_offered_is_remembered(scene: Scene) -> None:
    """A WRITE is under way when the request is aborted: its blocks stay away until it is not, then all come back."""
    prefill, decode = pair(scene)
    balance = Balance(prefill, decode)
    connect(prefill, decode)
    told_of_no_blocks(decode)
    one, other = legs(prefill, "t")
    for producer in prefill.producers:
        scene.network.stall(producer.agent)
    prefill.add("p", PROMPT, one)
    decode.add("d", PROMPT, other, 3)
    until(lambda: prefill.producers[0].stats().get("writes", 0) == 2, prefill, decode)
    decode.abort("d")
    for _ in range(20):
        decode.step()
        prefill.step()
    assert balance.free[1] - decode.free_blocks == -(-(len(PROMPT) - 1) // decode.shape.block_size)
    scene.network.release()
    balance.settle()


def test_6_an_offer_that_nobody_has_taken_is_cancelled(scene: Scene) -> None:
    prefill, decode = pair(scene)
    balance = Balance(prefill, decode)
    connect(prefill, decode)
    told_of_no_blocks(decode)
    decode.add("d", PROMPT, legs(prefill, "t")[1], 3)
    decode.step()
    decode.abort("d")
    balance.settle()


def test_7_places_stay_places_where_a_window_has_forgotten_blocks(scene: Scene) -> None:
    """Null blocks in front of a window group's table are neither offered nor dropped from the count."""
    prefill, decode = pair(scene, {"window": 6}, {"window": 6})
    one, other = legs(prefill, "t")
    orders: list[Any] = []
    begin = decode.workers[0].connector.bind_connector_metadata

    def watched(directives: Directives) -> None:
        orders.extend(directives.offers)
        begin(directives)

    decode.workers[0].connector.bind_connector_metadata = watched
    prefill.add("p", PROMPT, one)
    decode.add("d", PROMPT, other, 9)
    until(lambda: "d" in decode.finished, prefill, decode)
    (order,) = orders
    size = decode.shape.block_size
    assert order.firsts[0] == 0
    assert order.firsts[1] == (len(PROMPT) - 1 - 6 + 1) // size
    assert all(0 not in table for table in order.tables)
    assert decode.tokens["d"] == continued(PROMPT, 9)


def test_7_every_group_that_is_pushed_is_left_alone_by_zeroing(scene: Scene) -> None:
    _, decode = pair(scene, {"window": 6}, {"window": 6})
    assert tuple(decode.scheduler.connector.get_loaded_kv_cache_group_ids(None)) == (0, 1)


@pytest.mark.parametrize("told", [True, False], ids=["tables-told", "tables-kept"])
def test_8_lists_are_copied_and_parameters_left_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """In one process the runner lengthens the scheduler's own lists, and siblings share their parameters.

    Before 0.32 the scheduler did not tell the present table, and the connector keeps it up itself.
    """
    if not told:
        monkeypatch.setattr(compat, "table_now", lambda *_: None)
    prefill, decode = pair(scene, {"batched": 16}, {"caching": False})
    one, other = legs(prefill, "t", n=2)
    before = dict(one), dict(other)
    prefill.add("p", PROMPT, one)
    parts: list[Any] = []
    take_tables = prefill.take_tables

    def lengthened(output: Any) -> None:
        parts.extend(output.kv_connector_metadata.parts)
        take_tables(output)
        for new in output.scheduled_new_reqs:
            for table in new.block_ids:
                table.append(63)

    monkeypatch.setattr(prefill, "take_tables", lengthened)
    for number in range(2):
        decode.add(f"{number}_d", PROMPT, other, 3)
    until(lambda: len(decode.finished) == 2, prefill, decode)
    assert len(parts) == 3
    assert all(63 not in table for part in parts for table in part.tables)
    assert (one, other) == before


def test_9_being_asked_decides_nothing(scene: Scene) -> None:
    """The engine asks again and again while it has no room, and may not take the answer."""
    prefill, decode = pair(scene)
    one, other = legs(prefill, "t")
    request = decode.add("d", PROMPT, other, 3)
    connector = decode.scheduler.connector
    for local in (0, 4, 8, 0):
        assert connector.get_num_new_matched_tokens(request, local) == (len(PROMPT) - 1 - local, True)
    assert connector.get_num_new_matched_tokens(request, 40) == (0, False)
    prefill.add("p", PROMPT, one)
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(PROMPT, 3)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_9_an_answer_that_is_not_taken_frees_prefill(scene: Scene) -> None:
    prefill, decode = pair(scene)
    balance = Balance(prefill)
    one, other = legs(prefill, "t")
    prefill.add("p", PROMPT, one)
    request = decode.add("d", PROMPT, other, 3)
    request.skip_reading_prefix_cache = True
    until(lambda: "d" in decode.finished, prefill, decode)
    assert decode.tokens["d"] == continued(PROMPT, 3)
    assert counts(decode) == {"declined": 1}
    balance.settle()


def test_10_no_hook_of_a_worker_waits(scene: Scene) -> None:
    """Not for a connection, not for a WRITE that is held up: a worker that waits holds all its requests up."""
    prefill, decode = pair(scene)
    for producer in prefill.producers:
        scene.network.stall(producer.agent)
    one, other = legs(prefill, "t")
    prefill.add("p", PROMPT, one)
    decode.add("nowhere", PROMPT, other | {"transfer_id": "x", "remote_port": 1}, 3)
    decode.add("d", PROMPT[::-1], other, 3)
    slowest = 0.0
    for _ in range(50):
        began = time.thread_time()
        clock = time.monotonic()
        prefill.step()
        decode.step()
        # A step's own work is counted out: what is left of its time it has waited, for processors included.
        slowest = max(slowest, time.monotonic() - clock - (time.thread_time() - began))
    assert "d" not in decode.finished
    assert slowest < decode.scheduler.connector._scheduler._settings.connect_timeout / 2


def test_reports_of_ranks_add_up() -> None:
    one = Reports(Counter(a=1), {"a": "x"}, Counter(t=1), Counter({("t", 0): 1}), {"t": "complete"})
    both = one.aggregate(Reports(Counter(a=1, b=1), {}, Counter(t=1), Counter({("t", 0): 1}), {}))
    assert both.released == {"a": 2, "b": 1}
    assert both.over == {"t": 2}
    assert both.reclaimed == {("t", 0): 2}
    assert both.failed == {"a": "x"}
    assert not Reports()
