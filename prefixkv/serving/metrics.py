"""What a front and a proxy count of their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from prefixkv.serving.failures import ApiError
from prefixkv.serving.log import RequestRecord, current_record
from prefixkv.serving.tracing import current


class RequestMetrics:
    """`kind` is of the process, `routing` returns what its routers count, by name."""

    def __init__(self, kind: str, routing: Callable[[], Mapping[str, int]]) -> None:
        self._kind, self._routing = kind, routing
        self.requests = Counter(
            f"prefixkv_{kind}_requests", "Requests by how they ended. A proxy counts a stream with "
            "its first piece, and in prefixkv_proxy_cut.", ["outcome"], registry=None,
        )  # fmt: skip
        self.ttft = Histogram(
            f"prefixkv_{kind}_ttft_seconds", "From a request to the first piece of its answer.",
            registry=None,
        )  # fmt: skip
        self.collectors: list[Any] = [self.requests, self.ttft, self]
        # All rows are there from the start, so that a rate sees the first request that fails.
        for outcome in ("finished", "refused", "failed", "aborted"):
            self.requests.labels(outcome)

    @contextmanager
    def counted(self) -> Iterator[RequestRecord]:
        """Count how a request ends, and write it to its line, which is yielded, and its span."""
        line, outcome = current_record(), "aborted"
        try:
            yield line
            outcome = "finished"
        except Exception as error:
            is_refused = isinstance(error, ApiError) and error.status < 500
            outcome = "refused" if is_refused else "failed"
            if not is_refused:
                current().fail(error)
            raise
        finally:
            self.requests.labels(outcome).inc()
            line.fields["outcome"] = outcome

    def begun(self, line: RequestRecord) -> None:
        """Count the time to the first piece of an answer."""
        line.mark("first_token")
        self.ttft.observe(line.fields["first_token_s"])

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            f"prefixkv_{self._kind}_routing", "What the routers count, by servers' kind.",
            labels=["what"],
        )  # fmt: skip
        for name, number in self._routing().items():
            family.add_metric([name], number)
        return [family]
