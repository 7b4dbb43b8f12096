"""What a proxy counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from prefixkv.serving.failures import ApiError
from prefixkv.serving.log import RequestRecord


class ProxyMetrics:
    """`sides` are the servers by role."""

    def __init__(self, sides: Mapping[Any, Any]) -> None:
        self._sides = sides
        # By request that decode has not answered yet: its prefill server ("" without one), and when
        # it was sent, time.time().
        self.waiting: dict[Any, tuple[str, float]] = {}
        self.requests = Counter(
            "prefixkv_proxy_requests", "Requests by how they ended; a stream counts with its first "
            "piece, see prefixkv_proxy_cut.", ["outcome"], registry=None,
        )  # fmt: skip
        self.retried = Counter(
            "prefixkv_proxy_retried", "Attempts that failed and were made again.", registry=None
        )
        self.recomputed = Counter(
            "prefixkv_proxy_recomputed", "Requests that decode was asked to compute itself, since "
            "no prefill server was left.", registry=None,
        )  # fmt: skip
        self.cut = Counter(
            "prefixkv_proxy_cut", "Streams that ended with an error event.", registry=None
        )
        self.ttft = Histogram(
            "prefixkv_proxy_ttft_seconds", "From a request to decode's first piece.", registry=None
        )
        counters = [self.requests, self.retried, self.recomputed, self.cut, self.ttft]
        self.collectors: list[Any] = [*counters, self]
        # All rows are there from the start, so that a rate sees the first request that fails.
        for outcome in ("finished", "refused", "failed", "aborted"):
            self.requests.labels(outcome)

    @contextmanager
    def counted(self, line: RequestRecord) -> Iterator[None]:
        """Count how a request ends, and write it to its line."""
        outcome = "aborted"
        try:
            yield
            outcome = "finished"
        except ApiError as error:
            outcome = "refused" if error.status < 500 else "failed"
            raise
        finally:
            self.requests.labels(outcome).inc()
            line.fields["outcome"] = outcome

    def collect(self) -> list[Metric]:
        routing = GaugeMetricFamily(
            "prefixkv_proxy_routing", "What the routers count.", labels=["role", "what"]
        )
        for role, side in self._sides.items():
            for name, number in side.router.stats().items():
                routing.add_metric([role, name], number)
        waiting = GaugeMetricFamily(
            "prefixkv_proxy_rooms_waiting", "Requests to which decode has said nothing yet, by the "
            "prefill server of their room; none: without a room.", labels=["prefill"],
        )  # fmt: skip
        oldest = GaugeMetricFamily(
            "prefixkv_proxy_oldest_waiting_timestamp_seconds", "When the oldest of these was sent, "
            "0 without one.", labels=["prefill"],
        )  # fmt: skip
        # Collected in a thread: copied first, since the event loop changes it.
        sent = [*self.waiting.values()]
        for name in ("", *self._sides["prefill"].servers):
            times = [sent_s for prefill, sent_s in sent if prefill == name]
            waiting.add_metric([name], len(times))
            oldest.add_metric([name], min(times, default=0.0))
        return [routing, waiting, oldest]
