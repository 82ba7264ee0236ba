"""A recorder of what happened when, and a writer of Chrome traces that Perfetto reads.

Times are nanoseconds of :func:`now`, the system-wide monotonic clock: one clock for all processes
of a host, so recordings of several processes are merged without any correction.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from pushkv.errors import ConfigError

Value = str | int | float | bool | None
Event = tuple[int, str, str, str, int, int, dict[str, Value]]
"""Kind, name, track, key, start and end in nanoseconds, arguments. Plain, so that recording is one append."""

now = time.monotonic_ns
"""The clock of every trace, in nanoseconds."""

CATEGORY = "pushkv"
DEFAULT_LIMIT = 1_000_000


class Kind(IntEnum):
    """What an event is; the first field of :data:`Event`."""

    SPAN = 0
    INSTANT = 1
    FLOW_START = 2
    FLOW_END = 3


class Recording(msgspec.Struct, frozen=True):
    """What one process recorded; msgspec encodes it, so that one process can send it to another.

    ``dropped`` events did not fit under the recorder's limit.
    """

    process: str
    pid: int
    events: list[Event]
    dropped: int = 0


class Trace:
    """Records events of one process, from any thread. A disabled one returns at once from every call.

    ``track`` names a row of the picture, such as a thread; ``key`` names what the event belongs to,
    such as a transfer. Beyond ``limit`` events are counted and dropped, so that memory stays bounded.
    """

    def __init__(self, process: str, *, enabled: bool = True, limit: int = DEFAULT_LIMIT) -> None:
        self.process = process
        self.enabled = enabled
        self.dropped = 0
        self._limit = limit
        self._events: list[Event] = []

    @classmethod
    def disabled(cls) -> Trace:
        """A trace that records nothing."""
        return cls("", enabled=False)

    def span(self, name: str, track: str, key: str, start_ns: int, end_ns: int, **args: Value) -> None:
        """Something that lasted from ``start_ns`` to ``end_ns``."""
        if self.enabled:
            self._add((Kind.SPAN, name, track, key, start_ns, end_ns, args))

    def instant(self, name: str, track: str, key: str, at_ns: int | None = None, **args: Value) -> None:
        """Something that happened at one moment, by default now."""
        if self.enabled:
            moment = now() if at_ns is None else at_ns
            self._add((Kind.INSTANT, name, track, key, moment, moment, args))

    def flow_start(self, name: str, track: str, key: str, at_ns: int | None = None) -> None:
        """The tail of an arrow; the head is the ``flow_end`` of equal name and key, in any process.

        Viewers tie both ends to the span of that moment on that track, so let one be there.
        """
        if self.enabled:
            moment = now() if at_ns is None else at_ns
            self._add((Kind.FLOW_START, name, track, key, moment, moment, {}))

    def flow_end(self, name: str, track: str, key: str, at_ns: int | None = None) -> None:
        """The head of the arrow that :meth:`flow_start` began."""
        if self.enabled:
            moment = now() if at_ns is None else at_ns
            self._add((Kind.FLOW_END, name, track, key, moment, moment, {}))

    def recording(self) -> Recording:
        """What was recorded until now; recording goes on."""
        return Recording(self.process, os.getpid(), list(self._events), self.dropped)

    def _add(self, event: Event) -> None:
        # list.append is atomic; a race at the limit costs at most one event a thread too many.
        if len(self._events) < self._limit:
            self._events.append(event)
        else:
            self.dropped += 1


def write_chrome(path: str | os.PathLike[str], recordings: Sequence[Recording]) -> None:
    """Merge recordings of several processes of one host into a Chrome trace in JSON.

    Raises ConfigError when the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(chrome(recordings)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the trace to {os.fspath(path)!r}: {error.strerror}; name another file"
        ) from error


def chrome(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The Chrome trace as an object: microseconds since the first event, in order of time.

    Each recording is a process, each track one thread row of it or, where spans overlap without
    nesting, several.
    """
    origin = min((event[4] for recording in recordings for event in recording.events), default=0)
    arrows = _Numbers()
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for pid, recording in enumerate(recordings, start=1):
        rows = _rows(recording.events)
        metadata += _metadata(pid, recording, [name for name, _ in rows])
        for tid, (_, members) in enumerate(rows, start=1):
            events += (_chrome_event(event, origin, pid, tid, arrows) for event in members)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": metadata + events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "CLOCK_MONOTONIC",
            "origin_ns": origin,
            "dropped": sum(recording.dropped for recording in recordings),
        },
    }


class _Numbers(dict[tuple[str, str], int]):
    """Numbers for arrows: Perfetto reads ids of flows as integers only."""

    def __missing__(self, key: tuple[str, str]) -> int:
        self[key] = len(self) + 1
        return self[key]


def _metadata(pid: int, recording: Recording, rows: Iterable[str]) -> Iterator[dict[str, Any]]:
    name = f"{recording.process} (pid {recording.pid})"
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, row in enumerate(rows, start=1):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _chrome_event(event: Event, origin: int, pid: int, tid: int, arrows: _Numbers) -> dict[str, Any]:
    kind, name, _, key, start, end, args = event
    made: dict[str, Any] = {"name": name, "cat": CATEGORY, "pid": pid, "tid": tid, "ts": (start - origin) / 1000}
    if kind == Kind.SPAN:
        return made | {"ph": "X", "dur": max(end - start, 0) / 1000, "args": {"key": key, **args}}
    if kind == Kind.INSTANT:
        return made | {"ph": "i", "s": "t", "args": {"key": key, **args}}
    made |= {"id": arrows[name, key], "args": {"key": key}}
    return made | ({"ph": "s"} if kind == Kind.FLOW_START else {"ph": "f", "bp": "e"})


def _rows(events: Iterable[Event]) -> list[tuple[str, list[Event]]]:
    """The thread rows of a process, named, tracks in the order in which they appear."""
    tracks: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        tracks[event[2]].append(event)
    rows = []
    for track, members in tracks.items():
        for number, lane in enumerate(_lanes(members), start=1):
            rows.append((track if number == 1 else f"{track} #{number}", lane))
    return rows


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Split a track so that in each lane spans nest or follow one another: viewers drop those that cross."""
    lanes: list[list[Event]] = [[]]
    open_ends: list[list[int]] = [[]]
    points: list[Event] = []
    for event in sorted(events, key=lambda event: (event[4], -event[5])):
        if event[0] != Kind.SPAN:
            points.append(event)
            continue
        lane = next((index for index, ends in enumerate(open_ends) if _fits(ends, event)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[lane].append(event)
        open_ends[lane].append(event[5])
    for point, lane in zip(points, _lanes_of_points(lanes, points), strict=True):
        lanes[lane].append(point)
    return lanes


def _fits(ends: list[int], event: Event) -> bool:
    """Whether a span nests in the lane's open spans, given the ends of those; closes the ones that are over."""
    while ends and ends[-1] <= event[4]:
        ends.pop()
    return not ends or event[5] <= ends[-1]


def _lanes_of_points(lanes: list[list[Event]], points: Iterable[Event]) -> list[int]:
    """For each point the lane with a span of its key around it; else the first."""
    spans: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for number, lane in enumerate(lanes):
        for event in lane:
            spans[event[3]].append((event[4], event[5], number))
    return [next((lane for start, end, lane in spans[point[3]] if start <= point[4] <= end), 0) for point in points]
