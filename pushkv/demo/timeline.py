"""What the recordings of all ranks say about each request: when what happened, and how much moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pushkv.demo.settings import RankSpec, Side
from pushkv.demo.words import Report
from pushkv.trace import Event, Kind


@dataclass
class Course:
    """One request's way through both sides; times in nanoseconds, over ranks the last of each.

    ``received`` is when the transfer ended on the transfer threads of all decode ranks: from then on decode may
    start. ``parts``, ``bytes`` and ``descriptors`` sum up the WRITEs of all prefill ranks.
    """

    offered: int = 0
    prefilled: int = 0
    received: int = 0
    first_token: int = 0
    parts: int = 0
    bytes: int = 0
    descriptors: int = 0

    @property
    def handover(self) -> int:
        """Nanoseconds from 'prefill done' to 'KV received'; 0 where all that decode asked for came before.

        (It does not ask for the prompt's last token, which may be a chunk of its own.)
        """
        return max(0, self.received - self.prefilled)


def courses(reports: Mapping[RankSpec, Report]) -> dict[str, Course]:
    """The course of every request that any rank has recorded."""
    names: dict[str, str] = {}
    for report in reports.values():
        names.update({key: name for name, key in report.keys.items()})
    found: dict[str, Course] = {}
    for side, event in _events(reports):
        name = names.get(event[3], event[3])
        if name:
            _note(found.setdefault(name, Course()), side, event)
    return found


def _events(reports: Mapping[RankSpec, Report]) -> Iterator[tuple[Side, Event]]:
    for spec, report in reports.items():
        yield from ((spec.side, event) for event in _of_requests(report.recording.events))


def _of_requests(events: Iterable[Event]) -> Iterator[Event]:
    return (event for event in events if event[0] in (Kind.SPAN, Kind.INSTANT))


def _note(course: Course, side: Side, event: Event) -> None:
    _, name, _, _, start, end, args = event
    match side, name:
        case Side.PREFILL, "prefill done":
            course.prefilled = max(course.prefilled, start)
        case Side.PREFILL, "WRITE":
            course.parts += 1
            course.bytes += int(args["bytes"] or 0)
            course.descriptors += int(args["descriptors"] or 0)
        case Side.DECODE, "offer sent":
            course.offered = max(course.offered, start)
        case Side.DECODE, "offer to end":
            course.received = max(course.received, end)
        case Side.DECODE, "first token":
            course.first_token = max(course.first_token, start)
