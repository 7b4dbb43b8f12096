"""Jobs of a decode worker, before a prefill worker that says what none of ours does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.engines.hf.requests import PrefillJob
from prefixkv.serving.client import make_client
from prefixkv.serving.config import Limits
from prefixkv.serving.http import HttpServer, make_app
from prefixkv.serving.wire import Ask
from prefixkv.serving.worker import DecodeWorker, _OpenRequest
from tests.support.patience import NEVER_S
from tests.support.scenes import in_loop

LIMITS = Limits(1 << 20, NEVER_S, NEVER_S, NEVER_S, NEVER_S)


@pytest.mark.parametrize("said", [b"\xff\xfe not here", b"x" * (1 << 20)])
@in_loop
async def test_whatever_prefill_answers_ends_the_request_with_its_words(said: bytes) -> None:
    async def refuse(_: Request) -> Response:
        return Response(said, 404, media_type="text/plain; charset=utf-8")

    app = make_app([Route("/jobs", refuse, methods=["POST"])])
    server = HttpServer(app, "127.0.0.1", 0, LIMITS)
    await server.start()
    posted: list[Any] = []
    worker = DecodeWorker.__new__(DecodeWorker)
    worker.loop = SimpleNamespace(post=posted.append)  # type: ignore[assignment]
    worker.config = SimpleNamespace(node=SimpleNamespace(compute=None))  # type: ignore[assignment]
    async with make_client("", NEVER_S) as worker._client:
        one = _OpenRequest(Ask("r", [1], "", prefill_url=server.url))
        job = PrefillJob("d/r/0.0", np.array([1]), "", "d", 1)  # type: ignore[arg-type]
        await worker._send_job(one, job)
    await server.stop()
    assert "refused it: 404" in one.error
    assert len(one.error) < 1000
    assert len(posted) == 1
