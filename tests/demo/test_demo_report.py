"""What the demo makes of a run: percentiles, verdict, table and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pushkv.cli import main
from pushkv.core.outcome import Outcome
from pushkv.demo.generate import Generation
from pushkv.demo.report import Judgement, Times
from pushkv.demo.router import Run
from pushkv.demo.settings import DemoSettings, RankSpec, Side
from pushkv.demo.words import Generated, Report
from pushkv.demo.workload import Request
from pushkv.trace import Trace

MS = 1_000_000
REQUESTS = (Request("request-0", (1, 2, 3), 2), Request("request-1", (4, 5), 2))
TOKENS = {"request-0": Generation((7, 8), (0.5, 0.25)), "request-1": Generation((9, 1), (0.5, 0.125))}


def made_run() -> Run:
    """A run of two requests: one received 2 ms after its prefill, the other 4 ms."""
    prefill, decode = Trace("prefill"), Trace("decode")
    for number, request in enumerate(REQUESTS):
        key, start = f"key {number}", number * 10 * MS
        prefill.instant("prefill done", "engine", request.name, start)
        prefill.span("WRITE", "transfers", key, start, start + MS, bytes=1024, descriptors=3)
        decode.instant("offer sent", "transfers", key, start + MS)
        decode.span("offer to end", "transfers", key, start, start + (number + 1) * 2 * MS)
        decode.instant("first token", "requests", request.name, start + 5 * MS)
    settings = DemoSettings()
    outcomes = dict.fromkeys(TOKENS, Outcome.COMPLETE)
    stats = {"bytes": 2048, "writes": 2, "descriptors": 6, "descriptors before": 8}
    keys = {"request-0": "key 0", "request-1": "key 1"}
    reports = {
        RankSpec(settings, Side.PREFILL, 0, 4): Report(prefill.recording(), stats, outcomes, True, True),
        RankSpec(settings, Side.DECODE, 0, 4): Report(decode.recording(), {"bytes": 5}, outcomes, True, True, keys),
    }
    generated = {name: Generated(name, Outcome.COMPLETE, "", one) for name, one in TOKENS.items()}
    return Run(
        settings, REQUESTS, TOKENS, frozenset(["request-0"]), generated, reports, -5 * MS, 20 * MS,
        "NIXL 1", "a path", (0.001, 0.003),
    )  # fmt: skip


def doctored(run: Run, **changes: Any) -> Run:
    """The run with another last token, or with other changes to what was generated for the first request."""
    name = REQUESTS[0].name
    changes = changes or {"generation": Generation((7, 9), (0.5, 0.25))}
    return replace(run, generated={**run.generated, name: replace(run.generated[name], **changes)})


def test_the_numbers_come_from_the_recordings() -> None:
    found = Judgement(made_run()).as_json()
    assert (found["ok"], found["tokens_equal"], found["requests"]) == (True, True, 2)
    assert (found["bytes"], found["descriptors"], found["descriptors_before"]) == (2048, 6, 8)
    assert (found["handover_ms_p50"], found["handover_ms_p99"]) == (3.0, 3.98)
    assert (found["handover_ahead_ms_p50"], found["handover_late_ms_p50"]) == (2.0, 4.0)
    assert found["late_offer_to_received_ms_p50"] == 3.0
    assert (found["ttft_ms_p50"], found["raw_write_ms_p50"], found["seconds"]) == (15.0, 2.0, 0.025)


def test_a_good_run_has_no_troubles_and_says_equal() -> None:
    judgement = Judgement(made_run())
    assert judgement.troubles == []
    assert "ALL TOKENS EQUAL" in judgement.as_table()


def with_report(run: Run, **changes: Any) -> Run:
    first, *_ = run.reports
    return replace(run, reports={**run.reports, first: replace(run.reports[first], **changes)})


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (doctored(made_run()), "request-0 has other tokens"),
        (
            doctored(made_run(), outcome=Outcome.EXPIRED, detail="too late", generation=None),
            "request-0 ended as expired: too late",
        ),
        (doctored(made_run(), generation=Generation((7, 8), (0.5, 1e-4))), "two logits came as near as 0.0001"),
        (with_report(made_run(), released=False), "prefill did not get all blocks back"),
        (with_report(made_run(), closed=False), "prefill did not get all blocks back"),
        (with_report(made_run(), outcomes={"request-0": Outcome.CANCELLED}), "prefill ended request-0 as cancelled"),
    ],
)
def test_whatever_went_otherwise_is_told(run: Run, words: str) -> None:
    judgement = Judgement(run)
    assert any(words in trouble for trouble in judgement.troubles)
    assert judgement.as_json()["ok"] is False
    assert words in judgement.as_table()


def test_other_tokens_make_the_exit_code_and_the_json_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pushkv.demo.router.run_demo", lambda *_: doctored(made_run()))
    assert main(["demo", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["tokens_equal"]) == (False, False)


def test_no_times_are_zero() -> None:
    assert Times.of([]) == Times(0.0, 0.0)
