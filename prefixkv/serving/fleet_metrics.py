"""The metrics of a whole fleet at the front's status port, and where Prometheus finds each process.

`/metrics` asks all workers at once, each with a time-out and a bound on the bytes taken, and adds
the labels `worker` and `role` to what they say. A worker that does not answer costs only its own
rows. `/sd` names the processes for a Prometheus that scrapes each by itself; it then takes the
front's own rows from `/metrics/front`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import json_response
from prefixkv.serving.streams import TooMuchError

logger = logging.getLogger("prefixkv.fleet")

SCRAPE_S: Final = 2.0
"""Time that a worker has to answer, below the 10 s that Prometheus gives the front."""

SCRAPE_BYTES: Final = 4 << 20
"""Most bytes that are taken of one worker's metrics; it has about 20 KiB."""

FRONT: Final = "front"
"""Name and role of the front itself in `/sd`."""


class _Scraped(NamedTuple):
    """What a worker said; None: it did not answer."""

    worker: str
    role: str
    text: str | None


class FleetMetrics:
    """Metrics of a front and of all its workers. Used on one event loop.

    Args:
        fleet: the workers.
        front: the collectors of the front itself.
        url: returns the address of the front's status port.
    """

    def __init__(self, fleet: Fleet, front: CollectorRegistry, url: Callable[[], str]) -> None:
        self._fleet, self._front, self._url = fleet, front, url
        # One round at a time, for all who ask meanwhile: scrapers cost no worker more than one.
        self._round: asyncio.Task[bytes] | None = None

    @property
    def routes(self) -> list[Route]:
        """Routes of the front's status port: the fleet's metrics, the front's own, the targets."""
        return [
            Route("/metrics", self._show),
            Route("/metrics/front", self._show_front),
            Route("/sd", self._discover),
        ]

    async def _show(self, _: Request) -> Response:
        """Answer GET /metrics of the front's status port for the whole fleet."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._all())
        # Shielded: a request that is cut must not end the round of others.
        return Response(await asyncio.shield(self._round), media_type=CONTENT_TYPE_LATEST)

    def _show_front(self, _: Request) -> Response:  # not async, so Starlette runs it in a thread
        """Answer GET /metrics/front: the front's own metrics, without the fleet's."""
        return Response(generate_latest(self._front), media_type=CONTENT_TYPE_LATEST)

    async def _discover(self, request: Request) -> Response:
        """Answer GET /sd for Prometheus' `http_sd_configs`: the status port of each process of the
        fleet."""
        # A front bound to all addresses is reached under the name that it was asked by.
        front = request.url.netloc or urlsplit(self._url()).netloc
        found = [_target(front, FRONT, FRONT, {"__metrics_path__": "/metrics/front"})]
        found += [
            _target(urlsplit(info.status_url).netloc, info.name, info.role)
            for info in self._fleet.workers.values()
        ]
        return json_response(found)

    async def _all(self) -> bytes:
        """Return the exposition of the front and of all workers of the fleet."""
        scraped = await asyncio.gather(
            *(self._scrape(name, role) for name, role in sorted(self._fleet.roles.items()))
        )
        # Parsing takes some 10 us per sample: not on the event loop, which answers clients.
        return await asyncio.to_thread(_merged, self._front, scraped)

    async def _scrape(self, name: str, role: str) -> _Scraped:
        """Ask one worker of the fleet for its metrics; one that has ended, is silent or says too
        much has none."""
        info = self._fleet.workers.get(name)
        text: str | None = None
        if info is not None:
            with contextlib.suppress(httpx.HTTPError, TooMuchError, TimeoutError, ValueError):
                async with asyncio.timeout(SCRAPE_S):
                    found = await self._fleet.read_status(info, "/metrics", SCRAPE_BYTES)
                text = found.decode()
        return _Scraped(name, role, text)


def _target(
    address: str, worker: str, role: str, more: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return one process of the fleet as Prometheus' HTTP service discovery takes it."""
    return {"targets": [address], "labels": {"worker": worker, "role": role, **(more or {})}}


def _merged(front: CollectorRegistry, scraped: Iterable[_Scraped]) -> bytes:
    """Return one exposition of the front's metrics and of those of the fleet's workers, each family
    once."""
    families: dict[str, Metric] = {}
    _add(families, generate_latest(front).decode(), {})
    up = GaugeMetricFamily(
        "prefixkv_worker_up", "1: the worker's metrics are here; 0: it does not answer.",
        labels=["worker", "role"],
    )  # fmt: skip
    for worker, role, text in scraped:
        is_up = text is not None
        if text is not None:
            labels = {"worker": worker, "role": role}
            try:
                _add(families, text, labels)
            except ValueError as error:
                logger.warning("the metrics of %s are not understood: %s", worker, error)
                is_up = False
        up.add_metric([worker, role], float(is_up))
    return generate_latest(_Families([*families.values(), up]))


def _add(families: dict[str, Metric], text: str, labels: Mapping[str, str]) -> None:
    """Add the fleet's metrics in an exposition to `families`, with `labels` on each sample. Raises
    ValueError for a text that is no exposition."""
    # All rows or none: a text that ends in the middle is no answer.
    found: dict[str, Metric] = {}
    for family in text_string_to_metric_families(text):
        family.samples = [
            Sample(one.name, {**one.labels, **labels}, one.value, one.timestamp)
            for one in family.samples
        ]
        _join(found, {_key(family): family})
    _join(families, found)


def _join(families: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    """Join families of the fleet's metrics by name. One whose type differs from the first is left
    out: its samples cannot be told apart from the others'."""
    for key, family in more.items():
        known = families.setdefault(key, family)
        if known is not family and known.type == family.type:
            known.samples.extend(family.samples)


def _key(family: Metric) -> str:
    """Return the name that a family of the fleet's metrics has in the exposition: a counter's ends
    in `_total` there."""
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


class _Families(Collector):
    """Families that are there already, as a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the families of the fleet's metrics, for prometheus_client."""
        yield from self._families
