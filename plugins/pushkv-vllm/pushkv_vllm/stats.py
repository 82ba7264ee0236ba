"""What the connector counts, for vLLM's log line and its Prometheus metrics.

Requests are counted once, by the scheduler half; bytes, WRITEs and descriptors by the workers, summed over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "received": "Requests whose KV was pushed here, whole.",
    "failed": "Requests whose KV did not come.",
    "aborted": "Requests that were aborted while their KV was on its way.",
    "declined": "Requests that needed no KV from elsewhere, or ended before any was offered.",
    "sent": "Prompts whose KV was taken, whole, counted by rank.",
    "not sent": "Prompts whose KV was not taken, counted by rank.",
    "preempted": "Prompts that were preempted while they were being sent.",
    "bytes": "Bytes of KV written into other engines' memory.",
    "writes": "WRITEs posted.",
    "descriptors": "Descriptors of those WRITEs.",
}
GAUGES = {
    "open": "Transfers that are open or whose memory is in custody, over ranks.",
    "quarantined": "Transfers that wait for nothing but proof that their memory is out of reach, over ranks.",
    "pinned blocks": "Blocks that are pinned because a WRITE may touch them.",
}
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


@dataclass
class PushKVStats(KVConnectorStats):
    """``data``: ``counts`` and ``gauges`` by name, ``seconds`` from each request's offer until its KV was there."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, empty in (("counts", {}), ("gauges", {}), ("seconds", [])):
            self.data.setdefault(name, empty)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counts": {}, "gauges": {}, "seconds": []}

    def is_empty(self) -> bool:
        """Whether nothing is told."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> PushKVStats:
        """Two ranks', halves' or intervals' stats as one: counts add up, of a gauge the later value stands."""
        counts, gauges = dict(self.data["counts"]), dict(self.data["gauges"])
        for name, value in other.data["counts"].items():
            counts[name] = counts.get(name, 0) + value
        gauges.update(other.data["gauges"])
        return PushKVStats({"counts": counts, "gauges": gauges,
                            "seconds": [*self.data["seconds"], *other.data["seconds"]]})  # fmt: skip

    def reduce(self) -> dict[str, int | float]:
        """What the log line says."""
        told: dict[str, int | float] = {
            f"PushKV {name}": value for name, value in sorted(self.data["counts"].items())
        }
        told |= {f"PushKV {name}": value for name, value in sorted(self.data["gauges"].items())}
        if seconds := sorted(self.data["seconds"]):
            told["PushKV median ms from offer to KV"] = round(seconds[len(seconds) // 2] * 1e3, 2)
            told["PushKV slowest ms from offer to KV"] = round(seconds[-1] * 1e3, 2)
        return told


class Tally:
    """Turns running totals and present values into what has changed since the last time."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._gauges: dict[str, int] = {}

    def take(self, totals: Mapping[str, int], gauges: Mapping[str, int], seconds: list[float]) -> PushKVStats | None:
        """The changes; None where there are none. ``seconds`` is emptied."""
        if totals == self._last and gauges == self._gauges and not seconds:  # as after nearly every step
            return None
        counts = {name: value - self._last.get(name, 0) for name, value in totals.items()}
        counts = {name: value for name, value in counts.items() if value}
        changed = {name: value for name, value in gauges.items() if value != self._gauges.get(name, 0)}
        self._last, self._gauges = dict(totals), dict(gauges)
        if not (counts or changed or seconds):
            return None
        taken = PushKVStats({"counts": counts, "gauges": changed, "seconds": list(seconds)})
        seconds.clear()
        return taken


class PushKVPromMetrics(KVConnectorPromMetrics):
    """``vllm:pushkv_*``, one child an engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {name: self._children(metric_types[Counter], name, doc) for name, doc in COUNTERS.items()}
        self._gauges = {
            name: self._children(metric_types[Gauge], name, doc, multiprocess_mode="mostrecent")
            for name, doc in GAUGES.items()
        }
        self._seconds = self._children(
            metric_types[Histogram], "receive seconds", "Seconds from a request's offer until its KV was there.",
            buckets=SECONDS,
        )  # fmt: skip

    def _children(self, kind: type[Any], name: str, documentation: str, **more: Any) -> dict[int, Any]:
        metric = kind(name=metric_name(name), documentation=documentation, labelnames=self._labelnames, **more)
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of one engine; names of another version of this package are left out."""
        for name, value in transfer_stats_data.get("counts", {}).items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name][engine_idx].set(value)
        for value in transfer_stats_data.get("seconds", ()):
            self._seconds[engine_idx].observe(value)


def metric_name(name: str) -> str:
    """The metric's full name."""
    return "vllm:pushkv_" + name.replace(" ", "_")
