"""The two ports of a process: for requests, and for its health and metrics."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from prefixkv.serving.config import ListenSettings
from prefixkv.serving.http import HttpServer, json_response, make_app
from prefixkv.serving.log import Outcomes, RequestFile
from prefixkv.serving.tracing import make_tracing
from prefixkv.settings import is_loopback_host


def bind(app: ASGIApp, status: ASGIApp, listen: ListenSettings) -> tuple[HttpServer, HttpServer]:
    """Bind the servers for requests and for status. Raises ConfigError if an address cannot be
    bound, with neither left open."""
    server = HttpServer(app, listen.host, listen.port, listen.limits)
    try:
        return server, HttpServer(status, listen.status_host, listen.status_port, listen.limits)
    except BaseException:
        server.close()
        raise


class Entrance:
    """Both ports of a process, its request log, traces and ids. Used on one event loop. `kind`
    names it in metrics, logs and traces, `name` its node in traces."""

    server: HttpServer
    status: HttpServer

    def __init__(self, kind: str, listen: ListenSettings, name: str = "") -> None:
        self.draining = False
        self._kind, self._listen, self._limits = kind, listen, listen.limits
        self._file = RequestFile(listen.request_log) if listen.request_log else None
        self._servers: list[HttpServer] = []
        # Request ids: unique over processes by the prefix, within this one by the number.
        self._prefix, self._num = secrets.token_hex(8), 0
        self._tracing = make_tracing(kind, name)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests are accepted, and the body of /health."""
        raise NotImplementedError

    def _bind(
        self, routes: Sequence[BaseRoute], open_paths: Sequence[str] = (),
        collectors: Sequence[Any] = (), status_routes: Sequence[BaseRoute] = (), node: Any = None,
    ) -> None:  # fmt: skip
        """`node`: of a worker, which writes the lines of the requests that it answers. Raises
        ConfigError where an address cannot be bound."""
        listen, kind, who, most = self._listen, self._kind, self._kind, 0
        if node is None:
            most = self._limits.max_requests_per_client
        else:
            kind, who = "worker", node.peer_id.name
        outcomes = Outcomes(kind, {"node": who, "side": self._kind}, self._file)
        app = make_app(routes, listen.api_key, open_paths, most, outcomes)
        registry = CollectorRegistry(auto_describe=False)
        # Imported only here: a front and a proxy have no node, and need not load its runtime.
        if node is not None:
            from prefixkv.spi import NodeCollector

            collectors = NodeCollector(node), *collectors
        for collector in (*collectors, *outcomes.collectors):
            registry.register(collector)
        status = self._status_app(registry, status_routes)
        self.server, self.status = bind(app, status, listen)
        self._servers = [self.server, self.status]

    def _status_app(self, registry: CollectorRegistry, routes: Sequence[BaseRoute]) -> ASGIApp:
        """/health (200, or 503 while nothing is accepted), /metrics and `routes`."""

        async def show_health(_: Request) -> Response:
            ok, state = self.health()
            return json_response(state, 200 if ok else 503)

        def show_metrics(_: Request) -> Response:  # not async, so Starlette runs it in a thread
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        everything = [Route("/health", show_health), Route("/metrics", show_metrics), *routes]
        # A loopback port needs no key, so that scrapers of this machine need no secret.
        key = "" if is_loopback_host(self._listen.status_host) else self._listen.api_key
        return make_app(everything, key, open_paths=["/health"])

    def _new_rid(self, request_id: str) -> str:
        """It begins with the id in the header, and is unique, even if clients use that again."""
        self._num += 1
        return f"{request_id}-{self._prefix}-{self._num}"

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, and give those in progress `grace_s` seconds to end.
        Idempotent."""
        self.draining = True
        for server in self._servers:
            await server.stop(grace_s)
        await self._close()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        await self._tracing.close()

    async def _close(self) -> None:
        """Close what answers come through, once none is sent any more."""
        raise NotImplementedError
