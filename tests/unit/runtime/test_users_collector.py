"""A metric collector of the user's that raises: its scrape fails, or its record is lost; the nodes
go on, and say it once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric

from prefixkv.runtime.metrics import NodeCollector
from tests.support.node_pair import NodePair, left, tokens_of
from tests.support.patience import until


class OopsError(Exception):
    """What the user's collector raises."""


class Broken:
    """A collector beside ours, in one registry."""

    def collect(self) -> Iterator[Metric]:
        raise OopsError


class Counts(logging.Handler):
    """Counts the records of requests by a label that the metric does not have."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self.requests = Counter("requests", "By outcome.", ["outcome"], registry=registry)
        self.num_records = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_records += 1
        self.requests.labels(side=record.request["side"]).inc()  # type: ignore[attr-defined]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def counts(registry: CollectorRegistry) -> Iterator[Counts]:
    logger = logging.getLogger("prefixkv.requests")
    handler, level = Counts(registry), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def step(pair: NodePair) -> list[tuple[str, Exception]]:
    """What the nodes' calls raise, and which node's, as both engines take a turn."""
    raised = []
    for side, driver in (("decode", pair.d), ("prefill", pair.p)):
        try:
            driver.step()
        except ValueError as error:
            raised.append((side, error))
    pair.decode.wait(0.002)
    return raised


def test_a_collector_of_requests_that_raises_is_raised_once_and_every_request_ends(
    pair: NodePair, counts: Counts
) -> None:
    rids = [f"r{number}" for number in range(3)]
    for at, rid in enumerate(rids, start=1):
        pair.submit(rid, tokens_of(at, 10))
        raised: list[tuple[str, Exception]] = []

        def ended(rid: str = rid, raised: list[tuple[str, Exception]] = raised) -> bool:
            raised += step(pair)
            nodes = left(pair.decode), left(pair.prefill)
            return not any(nodes) and rid in pair.d.ended and rid in pair.p.sent

        until(ended)
        for _ in range(4):
            raised += step(pair)
        assert sorted(side for side, _ in raised) == ["decode", "prefill"]
        assert all("label" in str(error) for _, error in raised)
        for node in (pair.decode, pair.prefill):
            stats = node.stats()
            assert (stats["user_errors"], stats["control_errors"]) == (at, 0)
            node.audit()
    assert counts.num_records == 2 * len(rids)
    assert pair.d.ended == dict.fromkeys(rids)


def test_a_collector_beside_ours_that_raises_fails_its_scrape_alone(
    pair: NodePair, registry: CollectorRegistry
) -> None:
    registry.register(NodeCollector(pair.decode, pair.prefill))
    broken: Any = Broken()
    registry.register(broken)
    pair.submit("r", tokens_of(1, 10))
    pair.until(lambda: bool(pair.decode.requests))
    with pytest.raises(OopsError):
        generate_latest(registry)
    pair.run("r")
    assert pair.d.ended["r"] is None
    assert pair.decode.stats()["user_errors"] == pair.prefill.stats()["user_errors"] == 0
    registry.unregister(broken)
    assert b'prefixkv_requests_total{node="decode-0",outcome="finished"} 1.0' in generate_latest(
        registry
    )
