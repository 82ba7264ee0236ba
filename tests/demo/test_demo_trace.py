"""The trace of ``pushkv demo --trace``: every request's way can be followed in it, in causal order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

COUNT = 6
Event = dict[str, Any]
Times = list[tuple[float, float]]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    arguments = [
        "--trace", str(file), "--json", "--no-raw", "--requests", str(COUNT), "--longest", "150",
        "--new-tokens", "4", "--chunk", "40",
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pushkv", "demo", *arguments], capture_output=True, timeout=100, check=True
    )  # fmt: skip
    traced = json.loads(file.read_text())
    assert traced["otherData"]["dropped"] == 0
    found: list[Event] = traced["traceEvents"]
    return found


def ways(events: list[Event]) -> dict[str, dict[str, Times]]:
    """By request and by process and name of the event: when it began and ended."""
    processes = {
        event["pid"]: event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"
    }  # fmt: skip
    found: defaultdict[str, defaultdict[str, Times]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["ph"] in "Xi":
            request = event["args"]["key"].split("/")[0]
            moment = (event["ts"], event["ts"] + event.get("dur", 0.0))
            found[request][f"{processes[event['pid']]} {event['name']}"].append(moment)
    return {name: dict(way) for name, way in found.items() if name.startswith("request-")}


def test_both_processes_are_there_on_one_clock(events: list[Event]) -> None:
    names = {event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"}
    assert names == {"prefill", "decode"}


def test_every_request_can_be_followed_from_its_offer_to_its_tokens(events: list[Event]) -> None:
    found = ways(events)
    assert set(found) == {f"request-{number}" for number in range(COUNT)}
    for name, way in found.items():
        offer = way["decode offer sent"][0][0]
        seen = way["prefill offer seen"][0][0]
        rendezvous = [start for start, _ in way["prefill rendezvous"]]
        writes = sorted(way["prefill WRITE"])
        arrivals = sorted(start for start, _ in way["decode arrival"])
        ended = way["decode offer to end"][0][1]
        assert offer <= seen <= rendezvous[0], name
        assert len(rendezvous) == len(writes) == len(arrivals), name
        assert all(start <= arrival for (start, _), arrival in zip(writes, arrivals, strict=True)), name
        assert arrivals[-1] <= ended <= way["decode first token"][0][0], name
        assert way["decode waits for a step"][0][1] == pytest.approx(way["decode decode"][0][0], abs=1e-3), name
        assert ended <= way["decode waits for a step"][0][0], name


def test_a_part_is_written_only_once_it_is_computed(events: list[Event]) -> None:
    several = 0
    for name, way in ways(events).items():
        computed = sorted(end for _, end in way["prefill prefill"])
        rendezvous = sorted(start for start, _ in way["prefill rendezvous"])
        done = way["prefill prefill done"][0][0]
        assert computed[-1] == pytest.approx(done, abs=1e-3), name
        assert rendezvous[0] >= computed[0], name
        several += len(rendezvous) > 1
    assert several, "no prompt was sent while it was still computed"


def test_half_of_the_requests_are_offered_ahead_and_half_late(events: list[Event]) -> None:
    found = ways(events)
    ahead = {
        name
        for name, way in found.items()
        if way["decode offer sent"][0][0] < min(start for start, _ in way["prefill prefill"])
    }
    late = {name for name, way in found.items() if way["decode offer sent"][0][0] > way["prefill prefill done"][0][0]}
    assert len(ahead) == len(late) == COUNT // 2
    assert ahead | late == set(found)


def test_arrows_lead_from_offers_and_writes_to_where_they_arrive(events: list[Event]) -> None:
    starts = {(event["name"], event["id"]): event["ts"] for event in events if event["ph"] == "s"}
    ends = {(event["name"], event["id"]): event["ts"] for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert {name for name, _ in starts} == {"offer", "KV"}
    assert all(starts[arrow] <= ends[arrow] for arrow in starts)


def test_a_trace_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pushkv", "demo", "--trace", str(tmp_path / "missing" / "trace.json")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "missing" in done.stderr
