"""What the router counts, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from pushkv_vllm.router.fleet import Fleet, Server

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Ending(Enum):
    """How a client's request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """The request's own fault: malformed, too large, or refused by a server as such."""
    OVERLOADED = "overloaded"
    """The queue was full, or it waited in it for too long."""
    FAILED = "failed"
    BROKEN = "broken"
    """It failed after its stream had begun."""
    DISCONNECTED = "disconnected"


class Metrics:
    """Counters and histograms; gauges are read off the fleet and the gate when they are asked for."""

    def __init__(self, fleet: Fleet, queue: Callable[[], tuple[int, int]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by how they ended", "endpoint", "ending")
        self.dispatches = self._counter(
            "dispatches", "Dispatches to servers; more than one a request are retries", "kind"
        )
        self.failed_legs = self._counter("failed_legs", "Legs that failed", "server", "role", "status")
        self.alone = self._counter("alone", "Requests whose prompt decode computed itself", "reason")
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's body to its first event")
        self.prefill_leg = self._histogram("prefill_leg_seconds", "Duration of prefill legs")
        self.handoff = self._histogram(
            "handoff_seconds", "Time to first token minus the prefill leg, both legs at once"
        )
        self.queued = self._histogram("queue_seconds", "Wait before the dispatch")
        self.registry.register(_Gauges(fleet, queue))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pushkv_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"pushkv_router_{name}", text, buckets=SECONDS, registry=self.registry)

    def page(self) -> bytes:
        """All of it in Prometheus's text format."""
        text: bytes = generate_latest(self.registry)
        return text


class _Gauges:
    """The present state, collected when it is asked for."""

    def __init__(self, fleet: Fleet, queue: Callable[[], tuple[int, int]]) -> None:
        self._fleet = fleet
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        running, waiting = self._queue()
        for name, text, value in (
            ("running", "Requests dispatched", running),
            ("waiting", "Requests in the queue", waiting),
        ):
            yield GaugeMetricFamily(f"pushkv_router_{name}", text, value=value)
        by_server: tuple[tuple[str, str, Callable[[Server], float]], ...] = (
            ("server_up", "Whether the server is healthy", lambda server: float(server.up)),
            ("server_requests", "Unfinished requests", lambda server: server.requests),
            ("server_outstanding_tokens", "Estimated tokens of unfinished requests", lambda server: server.tokens),
        )
        for name, text, read in by_server:
            family: Any = GaugeMetricFamily(f"pushkv_router_{name}", text, labels=("server", "role"))
            for server in self._fleet.servers:
                family.add_metric((server.url, server.role), read(server))
            yield family
