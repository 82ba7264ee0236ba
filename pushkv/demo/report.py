"""What a run shows: its numbers, whether it went well, and both as a table and as one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pushkv.core.outcome import Outcome
from pushkv.demo.generate import SAFE_GAP
from pushkv.demo.router import RAW_BYTES, Run
from pushkv.demo.settings import Layout, Side
from pushkv.demo.tables import format_bytes, format_facts, format_table
from pushkv.demo.timeline import Course, courses
from pushkv.demo.workload import Request

HEADER = ("request", "prompt", "offered", "parts", "bytes", "descriptors", "handover ms", "TTFT ms", "tokens")


@dataclass(frozen=True)
class Times:
    """Milliseconds; 0 where there is nothing to count."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Times:
        """The percentiles of durations in seconds."""
        values = np.fromiter(seconds, float) * 1e3
        if not values.size:
            return cls(0.0, 0.0)
        return cls(*(round(float(value), 3) for value in np.percentile(values, (50, 99))))


class Judgement:
    """A run, looked at."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.courses = courses(run.reports)
        self.stats: Counter[str] = Counter()
        for spec, report in run.reports.items():
            if spec.side is Side.PREFILL:
                self.stats.update(report.stats)

    def equal(self, request: Request) -> bool:
        """Whether a request's tokens are those of the single-process run."""
        generation = self.run.generated[request.name].generation
        return generation is not None and generation.tokens == self.run.reference[request.name].tokens

    @property
    def tokens_equal(self) -> bool:
        """Whether all requests' are."""
        return all(self.equal(request) for request in self.run.requests)

    @property
    def least_gap(self) -> float:
        """How far the second best logit lay behind at the closest call, in both ways of computing."""
        decoded = [word.generation for word in self.run.generated.values() if word.generation]
        return min(generation.least_gap for generation in [*decoded, *self.run.reference.values()])

    @property
    def troubles(self) -> list[str]:
        """What went otherwise than it should, a sentence each; empty for a run that went well."""
        found = []
        for name, word in self.run.generated.items():
            if word.outcome is not Outcome.COMPLETE:
                found.append(f"{name} ended as {word.outcome.value}: {word.detail or 'no detail'}")
        found += [f"{one.name} has other tokens" for one in self.run.requests if not self.equal(one)]
        if self.least_gap < SAFE_GAP:
            found.append(f"two logits came as near as {self.least_gap:.2g}, so that equal tokens prove little")
        for spec, report in self.run.reports.items():
            bad = {name: one.value for name, one in report.outcomes.items() if one is not Outcome.COMPLETE}
            found += [f"{spec.name} ended {name} as {value}" for name, value in bad.items()]
            if not report.released or not report.closed:
                found.append(f"{spec.name} did not get all blocks back")
        return found

    def handover(self, ahead: bool | None = None) -> Times:
        """From 'prefill done' to 'KV received', of all requests or of those offered ahead, or late."""
        return Times.of(
            self._course(one).handover / 1e9
            for one in self.run.requests
            if self._received(one) and ahead in (None, one.name in self.run.ahead)
        )

    def from_offer(self) -> Times:
        """Of the requests offered late: from the offer, which found the prompt computed, to 'KV received'."""
        late = (self._course(one) for one in self.run.requests if one.name not in self.run.ahead)
        return Times.of((one.received - one.offered) / 1e9 for one in late if one.received and one.offered)

    def ttft(self) -> Times:
        """From the dispatch of all requests to each one's first token."""
        starts = (self._course(one).first_token - self.run.dispatched_ns for one in self.run.requests)
        return Times.of(start / 1e9 for start in starts if start > 0)

    def _received(self, request: Request) -> bool:
        return self._course(request).received > 0

    def _course(self, request: Request) -> Course:
        return self.courses.get(request.name, Course())

    def as_json(self) -> dict[str, Any]:
        """One object; times in milliseconds."""
        run, handover, ttft, raw = self.run, self.handover(), self.ttft(), Times.of(self.run.raw_seconds)
        ahead, late, from_offer = self.handover(True), self.handover(False), self.from_offer()
        return {
            "ok": not self.troubles,
            "tokens_equal": self.tokens_equal,
            "requests": len(run.requests),
            "bytes": self.stats["bytes"],
            "transport": run.nixl,
            "path": run.path,
            "descriptors": self.stats["descriptors"],
            "descriptors_before": self.stats["descriptors before"],
            "writes": self.stats["writes"],
            "handover_ms_p50": handover.p50,
            "handover_ms_p99": handover.p99,
            "handover_ahead_ms_p50": ahead.p50,
            "handover_ahead_ms_p99": ahead.p99,
            "handover_late_ms_p50": late.p50,
            "handover_late_ms_p99": late.p99,
            "late_offer_to_received_ms_p50": from_offer.p50,
            "late_offer_to_received_ms_p99": from_offer.p99,
            "raw_write_bytes": RAW_BYTES,
            "raw_write_ms_p50": raw.p50,
            "raw_write_ms_p99": raw.p99,
            "ttft_ms_p50": ttft.p50,
            "ttft_ms_p99": ttft.p99,
            "least_gap": round(self.least_gap, 6),
            "seconds": round((run.finished_ns - run.dispatched_ns) / 1e9, 3),
            "prefill": _layout(run.settings.prefill),
            "decode": _layout(run.settings.decode),
            "troubles": self.troubles,
        }

    def as_table(self) -> str:
        """For people: a line a request, the sums, and the verdict."""
        rows = format_table(HEADER, [self._row(request) for request in self.run.requests])
        verdict = "ALL TOKENS EQUAL to those of one process alone" if self.tokens_equal else "TOKENS DIFFER"
        return "\n\n".join([rows, format_facts(self._facts()), "\n".join([verdict, *self.troubles])])

    def _row(self, request: Request) -> tuple[object, ...]:
        course = self._course(request)
        ttft = (course.first_token - self.run.dispatched_ns) / 1e6
        return (
            request.name,
            len(request.prompt),
            "ahead" if request.name in self.run.ahead else "late",
            course.parts,
            format_bytes(course.bytes),
            course.descriptors,
            round(course.handover / 1e6, 2) if course.received else "-",
            round(ttft, 1) if course.first_token else "-",
            "equal" if self.equal(request) else "DIFFER",
        )

    def _facts(self) -> list[tuple[str, object]]:
        stats, run = self.stats, self.run
        merged = f"{stats['descriptors before']} before merging, {stats['descriptors']} after"
        facts: list[tuple[str, object]] = [
            ("prefill", _described(run.settings.prefill)),
            ("decode", _described(run.settings.decode)),
            ("moved", f"{format_bytes(stats['bytes'])} of {len(run.requests)} requests in {stats['writes']} WRITEs"),
            ("by", f"{run.nixl}, {run.path}"),
            ("descriptors", merged),
            ("TTFT", _pair(self.ttft())),
            ("prefill done to KV received", _pair(self.handover())),
            ("  offered ahead", _pair(self.handover(True))),
            ("  offered late", _pair(self.handover(False))),
            ("  offered late, from the offer", _pair(self.from_offer())),
        ]
        if run.raw_seconds:
            facts.append((f"raw NIXL WRITE of {format_bytes(RAW_BYTES)}", _pair(Times.of(run.raw_seconds))))
        return facts


def _pair(times: Times) -> str:
    return f"p50 {times.p50:.2f} ms, p99 {times.p99:.2f} ms"


def _described(layout: Layout) -> str:
    ranks = f"{layout.tp} rank{'s' if layout.tp > 1 else ''}"
    return f"{ranks}, blocks of {layout.block_size} tokens, {layout.order}"


def _layout(layout: Layout) -> dict[str, object]:
    return {"tp": layout.tp, "block_size": layout.block_size, "order": layout.order}
