"""The trace recorder, and the Chrome trace made of its recordings."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from pushkv.errors import ConfigError
from pushkv.trace import Recording, Trace, chrome, now, write_chrome

MICROSECOND = 1000


def recorded(*spans: tuple[str, int, int], track: str = "engine", process: str = "prefill") -> Recording:
    trace = Trace(process)
    for name, start, end in spans:
        trace.span(name, track, name, start * MICROSECOND, end * MICROSECOND)
    return trace.recording()


def rows_of(made: dict) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}


def events_of(made: dict, phase: str) -> list[dict]:
    return [event for event in made["traceEvents"] if event["ph"] == phase]


def test_spans_and_instants_become_complete_and_instant_events():
    trace = Trace("prefill")
    trace.span("prefill", "engine", "r1", 5_000_000, 5_002_500, tokens=12, cached=False)
    trace.instant("offer", "transfer", "r1", 5_001_000, bytes=4096)
    made = chrome([trace.recording()])
    span, instant = events_of(made, "X")[0], events_of(made, "i")[0]
    assert (span["name"], span["cat"], span["ts"], span["dur"]) == ("prefill", "pushkv", 0.0, 2.5)
    assert span["args"] == {"key": "r1", "tokens": 12, "cached": False}
    assert (instant["ts"], instant["s"], instant["args"]["bytes"]) == (1.0, "t", 4096)
    assert span["pid"] == instant["pid"]
    assert span["tid"] != instant["tid"]
    assert made["otherData"] == {"clock": "CLOCK_MONOTONIC", "origin_ns": 5_000_000, "dropped": 0}


def test_processes_and_tracks_have_names():
    made = chrome([recorded(("a", 1, 2)), recorded(("b", 1, 2), track="transfer", process="decode")])
    names = [event["args"]["name"] for event in made["traceEvents"] if event["name"] == "process_name"]
    assert [name.partition(" (pid ")[0] for name in names] == ["prefill", "decode"]
    assert rows_of(made) == {(1, 1): "engine", (2, 1): "transfer"}


def test_two_recordings_of_one_operating_system_process_stay_apart():
    made = chrome([recorded(("a", 1, 2)), recorded(("b", 1, 2), process="decode")])
    assert {event["pid"] for event in events_of(made, "X")} == {1, 2}


def test_events_come_in_order_of_time_with_the_outer_span_first():
    made = chrome([recorded(("late", 9, 10), ("inner", 2, 3), ("outer", 2, 8)), recorded(("other", 5, 6))])
    assert [event["name"] for event in events_of(made, "X")] == ["outer", "inner", "other", "late"]
    phases = [event["ph"] for event in made["traceEvents"]]
    assert phases == sorted(phases, key=lambda phase: phase != "M")


def test_arrows_join_processes_by_name_and_key():
    tail, head = Trace("decode"), Trace("prefill")
    for key in ("r1", "r2"):
        tail.flow_start("offer", "transfer", key, 1000)
        head.flow_end("offer", "transfer", key, 2000)
    head.flow_start("write", "transfer", "r1", 3000)
    made = chrome([tail.recording(), head.recording()])
    starts, ends = events_of(made, "s"), events_of(made, "f")
    assert [event["id"] for event in starts] == [1, 2, 3]
    assert [event["id"] for event in ends] == [1, 2]
    assert all(isinstance(event["id"], int) for event in starts)
    assert all(event["bp"] == "e" for event in ends)
    assert {event["pid"] for event in starts[:2]} != {event["pid"] for event in ends}
    assert {event["name"] for event in ends} == {"offer"}


def test_spans_that_cross_get_rows_of_their_own_and_nested_ones_share():
    made = chrome([recorded(("a", 0, 10), ("inside a", 2, 5), ("crosses a", 4, 12), ("after a", 10, 11))])
    rows = {event["name"]: rows_of(made)[event["pid"], event["tid"]] for event in events_of(made, "X")}
    assert rows == {"a": "engine", "inside a": "engine", "after a": "engine", "crosses a": "engine #2"}


def test_arrows_and_instants_sit_on_the_row_of_their_span():
    trace = Trace("decode")
    trace.span("wait", "requests", "r1", 0, 9000)
    trace.span("wait", "requests", "r2", 1000, 10_000)
    trace.flow_end("write", "requests", "r2", 5000)
    trace.instant("arrived", "requests", "r1", 5000)
    trace.instant("arrived", "requests", "nobody", 5000)
    made = chrome([trace.recording()])
    spans = {event["args"]["key"]: event["tid"] for event in events_of(made, "X")}
    assert spans["r1"] != spans["r2"]
    assert events_of(made, "f")[0]["tid"] == spans["r2"]
    assert [event["tid"] for event in events_of(made, "i")] == [spans["r1"], 1]


def test_a_span_that_ends_before_it_starts_has_no_length():
    assert events_of(chrome([recorded(("a", 5, 3))]), "X")[0]["dur"] == 0


def test_a_recording_travels_as_bytes():
    trace = Trace("prefill")
    trace.span("write", "transfer", "r1", 1, 2, bytes=4096, ratio=0.5, path="UCX", late=None)
    trace.flow_start("write", "transfer", "r1", 1)
    recording = trace.recording()
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(recording), type=Recording)
    assert received == recording
    assert chrome([received]) == chrome([recording])


def test_events_of_two_processes_are_on_one_clock(tmp_path):
    program = (
        "import sys, msgspec\n"
        "from pushkv.trace import Trace, now\n"
        "trace = Trace('child'); start = now()\n"
        "trace.span('work', 'main', 'r1', start, now())\n"
        "trace.flow_end('ask', 'main', 'r1', start)\n"
        "sys.stdout.buffer.write(msgspec.msgpack.encode(trace.recording()))\n"
    )
    trace = Trace("parent")
    before = now()
    trace.flow_start("ask", "main", "r1", before)
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60).stdout
    trace.span("ask", "main", "r1", before, now())
    child = msgspec.msgpack.decode(answer, type=Recording)
    path = tmp_path / "both.trace.json"
    write_chrome(path, [trace.recording(), child])

    made = json.loads(path.read_text(encoding="utf-8"))
    outer, inner = (next(e for e in events_of(made, "X") if e["name"] == name) for name in ("ask", "work"))
    assert outer["ts"] < inner["ts"]
    assert inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"]
    assert outer["pid"] != inner["pid"]
    assert child.pid != trace.recording().pid
    (start,), (end,) = events_of(made, "s"), events_of(made, "f")
    assert start["id"] == end["id"]
    assert start["ts"] < end["ts"]


def test_moments_default_to_the_system_wide_clock():
    trace = Trace("prefill")
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    trace.instant("a", "t", "k")
    trace.flow_start("b", "t", "k")
    trace.flow_end("b", "t", "k")
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    times = [event[4] for event in trace.recording().events]
    assert before <= times[0] <= times[1] <= times[2] <= after


def test_many_threads_lose_nothing():
    trace = Trace("prefill")

    def work(number: int) -> None:
        for index in range(2000):
            trace.instant("tick", f"thread {number}", str(index), index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made = chrome([trace.recording()])
    assert len(events_of(made, "i")) == 16_000
    assert len(rows_of(made)) == 8


def test_a_disabled_trace_records_nothing():
    trace = Trace.disabled()
    trace.span("a", "t", "k", 0, 1)
    trace.instant("a", "t", "k")
    trace.flow_start("a", "t", "k")
    trace.flow_end("a", "t", "k")
    assert trace.recording().events == []
    assert chrome([trace.recording()])["otherData"]["origin_ns"] == 0


def test_beyond_the_limit_events_are_counted():
    trace = Trace("prefill", limit=3)
    for index in range(5):
        trace.instant("a", "t", "k", index)
    assert len(trace.recording().events) == 3
    assert chrome([trace.recording()])["otherData"]["dropped"] == 2


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/x\.json.*No such file"):
        write_chrome(tmp_path / "nowhere" / "x.json", [])
