"""Health and metrics of a process, on a port of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from prefixkv.serving.config import Limits, ListenSettings, is_loopback
from prefixkv.serving.http import HttpServer, StatusServer, json_response, make_app

Health = Callable[[], tuple[bool, dict[str, Any]]]


def status_app(
    health: Health, nodes: Sequence[Any], listen: ListenSettings, collectors: Sequence[Any] = (),
    routes: Sequence[BaseRoute] = (),
) -> ASGIApp:  # fmt: skip
    """Make the application of a status port: /health (200, or 503 while nothing is accepted) and
    /metrics. `health` returns whether requests are accepted, and the body of /health."""
    registry = CollectorRegistry(auto_describe=False)
    # Imported only here: a front and a proxy have no node, and need not load its runtime.
    if nodes:
        from prefixkv.spi import NodeCollector

        registry.register(NodeCollector(*nodes))
    for collector in collectors:
        registry.register(collector)

    async def show_health(_: Request) -> Response:
        ok, state = health()
        return json_response(state, 200 if ok else 503)

    def show_metrics(_: Request) -> Response:  # not async, so Starlette runs it in a thread
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    everything = [Route("/health", show_health), Route("/metrics", show_metrics), *routes]
    # A loopback port needs no key, so that scrapers of this machine need no secret.
    key = "" if is_loopback(listen.status_host) else listen.api_key
    return make_app(everything, key, open_paths=["/health"])


def bind(
    app: ASGIApp, status: ASGIApp, listen: ListenSettings, limits: Limits | None = None
) -> tuple[HttpServer, HttpServer]:
    """Bind the servers for requests and for status. `limits` of `app` are by default those of
    `listen`. Raises ConfigError if an address cannot be bound, with neither left open."""
    asked = HttpServer(app, listen.host, listen.port, limits or listen.limits)
    try:
        return asked, StatusServer(status, listen.status_host, listen.status_port, listen.limits)
    except BaseException:
        asked.close()
        raise
