"""The two ports of a process: for requests, and for its health and metrics."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.http import HttpServer, json_response, make_app
from prefixkv.serving.log import Outcomes, RequestFile
from prefixkv.serving.tracing import make_tracing
from prefixkv.settings import is_loopback_host

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
    key = "" if is_loopback_host(listen.status_host) else listen.api_key
    return make_app(everything, key, open_paths=["/health"])


def bind(
    app: ASGIApp, status: ASGIApp, listen: ListenSettings, limits: Limits | None = None
) -> tuple[HttpServer, HttpServer]:
    """Bind the servers for requests and for status. `limits` of `app` are by default those of
    `listen`. Raises ConfigError if an address cannot be bound, with neither left open."""
    asked = HttpServer(app, listen.host, listen.port, limits or listen.limits)
    try:
        return asked, HttpServer(status, listen.status_host, listen.status_port, listen.limits)
    except BaseException:
        asked.close()
        raise


class Entrance:
    """What clients of a front or a proxy come to: both ports, the request log, traces and ids.
    Used on one event loop. `kind` names it in metrics, logs and traces."""

    server: HttpServer
    status: HttpServer

    def __init__(self, kind: str, listen: ListenSettings) -> None:
        self.draining = False
        self._listen, self._limits = listen, listen.limits
        self._file = RequestFile(listen.request_log) if listen.request_log else None
        self._outcomes = Outcomes(kind, {"node": kind, "side": kind}, self._file)
        # Request ids: unique over processes by the prefix, within this one by the number.
        self._prefix, self._num = secrets.token_hex(8), 0
        self._tracing = make_tracing(kind)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests are accepted, and the body of /health."""
        raise NotImplementedError

    def _bind(
        self, routes: Sequence[BaseRoute], open_paths: Sequence[str], collectors: Sequence[Any],
        status_routes: Sequence[BaseRoute] = (),
    ) -> None:  # fmt: skip
        """Raises ConfigError where an address cannot be bound."""
        listen = self._listen
        most = self._limits.max_requests_per_client
        app = make_app(routes, listen.api_key, open_paths, most, self._outcomes)
        metrics = [*collectors, *self._outcomes.collectors]
        status = status_app(self.health, (), listen, metrics, status_routes)
        self.server, self.status = bind(app, status, listen)

    def _new_rid(self, request_id: str) -> str:
        """It begins with the id in the header, and is unique, even if clients use that again."""
        self._num += 1
        return f"{request_id}-{self._prefix}-{self._num}"

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, and give those in progress `grace_s` seconds to end."""
        self.draining = True
        await self.server.stop(grace_s)
        await self.status.stop()
        await self._close()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        await self._tracing.close()

    async def _close(self) -> None:
        """Close what answers come through, once none is sent any more."""
        raise NotImplementedError
