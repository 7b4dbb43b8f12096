"""A front, over real sockets, before a worker that says yes to all it is asked."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.front import Front
from prefixkv.serving.http import App, HttpServer
from prefixkv.serving.text import Texts
from prefixkv.serving.wire import WorkerInfo


@asynccontextmanager
async def fronted(
    texts: Texts, *, context: int = 4096, **more: Any
) -> AsyncGenerator[tuple[Front, list[Any]]]:
    """The front of a model of 516 tokens, and what its worker is asked."""
    asked: list[Any] = []

    async def generate(request: Request) -> Response:
        asked.append(json.loads(await request.body()))
        return Response(b'{"finish":"stop","text":"yes","token":1}\n')

    async def events(request: Request) -> Response:
        async def signs() -> AsyncGenerator[bytes, None]:
            while True:
                yield bytes(4)
                await asyncio.sleep(0.5)

        return StreamingResponse(signs())

    routes = [
        *(Route(path, generate, methods=["POST"]) for path in ("/generate", "/announce")),
        Route("/events", events),
    ]
    async with AsyncExitStack() as stack:
        worker = HttpServer(App(routes), "127.0.0.1", 0, Limits())
        await worker.start()
        stack.push_async_callback(worker.stop, 0)
        fleet = Fleet()
        for role in ("prefill", "decode"):
            fleet.add(
                WorkerInfo(
                    role=role, name=role, url=worker.url, status_url="", endpoint="tcp://127.0.0.1:1",
                    model="small", identity="small", page_size=16, num_pages=1024, context=context,
                    vocab_size=516, life=role, pid=1,
                )
            )  # fmt: skip
        front = Front(fleet, texts, "small", ListenSettings(port=0, status_port=0), **more)
        stack.push_async_callback(front.stop, 0)
        await front.server.start()
        await front.status.start()
        yield front, asked
