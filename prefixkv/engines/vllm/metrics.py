"""Counters in the classes in which vLLM carries them to its log and to Prometheus."""

from __future__ import annotations

from typing import Any

from prefixkv.engines.vllm.compat import KVConnectorPromMetrics, KVConnectorStats
from prefixkv.engines.vllm.stats import GAUGES, METRICS, added
from prefixkv.engines.vllm.versions import check_overrides


class PrefixKVStats(KVConnectorStats):
    """Counts of an interval, by the names of `stats.METRICS`."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> PrefixKVStats:
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PrefixKVMetrics(KVConnectorPromMetrics):
    """Prometheus metrics: a counter `vllm:prefixkv_..._total` per count, and the gauges."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, texts: dict[str, str], **more: Any) -> dict[str, Any]:
            return {
                name: kind(
                    name=f"vllm:prefixkv_{name}", documentation=text, labelnames=labelnames, **more
                )
                for name, text in texts.items()
            }

        self._counters = make(self._counter_cls, METRICS)
        self._gauges = make(self._gauge_cls, GAUGES, multiprocess_mode="mostrecent")
        # At 0 from the start: a gauge that was never set would be missing, not 0. Only changes
        # come.
        for labels in per_engine_labelvalues.values():
            for gauge in self._gauges.values():
                gauge.labels(*labels).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(number)
            elif name in self._gauges:
                self._gauges[name].labels(*labels).set(number)


check_overrides(PrefixKVStats, KVConnectorStats)
check_overrides(PrefixKVMetrics, KVConnectorPromMetrics)
