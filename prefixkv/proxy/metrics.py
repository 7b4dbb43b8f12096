"""What a proxy counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from prefixkv.serving.api import RequestMetrics


class ProxyMetrics(RequestMetrics):
    """`prefill` are the URLs of the prefill servers."""

    def __init__(self, routing: Callable[[], Mapping[str, int]], prefill: Collection[str]) -> None:
        super().__init__("proxy", routing)
        self._prefill = prefill
        # By request that decode has not answered yet: its prefill server ("" without one), and when
        # it was sent, time.time().
        self.waiting: dict[Any, tuple[str, float]] = {}
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
        self.collectors += [self.retried, self.recomputed, self.cut]

    def collect(self) -> list[Metric]:
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
        for name in ("", *self._prefill):
            times = [sent_s for prefill, sent_s in sent if prefill == name]
            waiting.add_metric([name], len(times))
            oldest.add_metric([name], min(times, default=0.0))
        return [*super().collect(), waiting, oldest]
