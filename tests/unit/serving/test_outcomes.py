"""Refusals by reason, and lines of the request log, of a whole application over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.serving import outcomes as outcomes_module
from prefixkv.serving.config import Limits
from prefixkv.serving.http import (
    ApiError,
    HttpServer,
    Stream,
    json_response,
    make_app,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.outcomes import MAX_REASONS, Outcomes, line_of
from prefixkv.serving.request_file import RequestFile
from tests.support.patience import NEVER_S, PATIENCE_S

LIMITS = Limits(100, NEVER_S, NEVER_S, NEVER_S, NEVER_S, max_requests_per_client=2)
KEY = {"authorization": "Bearer key"}


class Site:
    """An application that is watched."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "log"
        self.file = RequestFile(str(self.path))
        self.outcomes = Outcomes("front", {"node": "site", "side": "front"}, self.file, **options)
        self.begun = asyncio.Event()
        routes = [
            Route("/echo", self.echo, methods=["POST"]),
            Route("/refuse/{code}", self.refuse, methods=["POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/wait", self.wait, methods=["POST"]),
            Route("/page", self.page),
        ]
        app = make_app(routes, "key", ["/open"], 2)
        self.server = HttpServer(self.outcomes.watch(app), "127.0.0.1", 0, LIMITS)
        self.client = httpx.AsyncClient(
            base_url=self.server.url, timeout=PATIENCE_S, trust_env=False, headers=KEY
        )

    async def echo(self, request: Request) -> Response:
        body = await read_body(request, LIMITS)
        line = line_of(request.scope)
        line.fields |= {"id": "r1", "outcome": body.decode() or "finished"}
        line.mark("asked")
        line.add(attempts=1)
        line.add(attempts=1)
        return json_response("1234")

    async def refuse(self, request: Request) -> Response:
        raise ApiError(400, "no", code=request.path_params["code"])

    async def stream(self, request: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            yield b"one"
            self.begun.set()
            await asyncio.Event().wait()

        return Stream(pieces(), LIMITS, "text/plain")

    async def wait(self, request: Request) -> Response:
        async def work() -> Response:
            self.begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        return await run_until_disconnect(request, work())

    async def page(self, _: Request) -> Response:
        return json_response("page")

    def refused(self) -> dict[tuple[str, str], float]:
        """By status and reason."""
        family = next(iter(self.outcomes.collect()))
        return {(one.labels["status"], one.labels["reason"]): one.value for one in family.samples}

    def lines(self) -> list[dict[str, Any]]:
        """Those that were written, once the file is closed."""
        self.file.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def run(folder: Path, scene: Callable[[Site], Awaitable[None]], **options: Any) -> Site:
    """Play a scene before a site. Returns it, ended."""

    async def main() -> Site:
        site = Site(folder, **options)
        await site.server.start()
        async with asyncio.timeout(PATIENCE_S):
            await scene(site)
        await site.client.aclose()
        await site.server.stop(PATIENCE_S)
        site.file.close()
        return site

    return asyncio.run(main())


@pytest.mark.slow
def test_reasons_are_bounded_in_form_and_number(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        for code in ("a" * 65, "<b>", "1st"):
            assert (await site.client.post(f"/refuse/{code}")).status_code == 400
        assert site.refused() == {("400", "other"): 3}
        for i in range(MAX_REASONS + 20):
            await site.client.post(f"/refuse/code_{i}")
        found = site.refused()
        assert len(found) == MAX_REASONS
        assert sum(found.values()) == MAX_REASONS + 23
        assert found["400", "other"] == 24

    run(tmp_path, scene)


def test_a_line_has_what_its_handler_knows_and_how_it_ended(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.client.post("/echo", headers={"x-request-id": "mine"})
        await site.client.post("/echo", content=b"failed")
        await site.client.get("/page")

    lines = run(tmp_path, scene).lines()
    assert [line["outcome"] for line in lines] == ["finished", "failed"]
    line = lines[0]
    assert 0 <= line.pop("asked_s") <= line.pop("ended_s") < PATIENCE_S
    assert line.pop("arrived_at") > 1e9
    assert line == {
        "node": "site", "side": "front", "id": "r1", "outcome": "finished", "path": "POST /echo",
        "status": 200, "reason": None, "request_id": "mine", "attempts": 2, "answer_bytes": 6,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/stream", "/wait"])
def test_a_client_that_leaves_has_an_aborted_line(tmp_path: Path, path: str) -> None:
    async def scene(site: Site) -> None:
        async def ask() -> None:
            async with site.client.stream("POST", path) as answer:
                async for _ in answer.aiter_raw():
                    pass

        asking = asyncio.create_task(ask())
        await site.begun.wait()
        asking.cancel()
        await asyncio.wait((asking,))

    site = run(tmp_path, scene)
    (line,) = site.lines()
    assert line["outcome"] == "aborted"
    assert site.refused() == {}


def test_a_worker_has_lines_of_what_it_refuses_alone(tmp_path: Path) -> None:
    async def scene(site: Site) -> None:
        await site.client.post("/echo")
        await site.client.post("/refuse/DrainingError")

    (line,) = run(tmp_path, scene, refused_only=True).lines()
    assert (line["outcome"], line["reason"]) == ("refused", "DrainingError")


def test_lines_of_refused_requests_are_bounded_in_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes_module, "_REFUSED_LINES", 5)
    monkeypatch.setattr(outcomes_module, "_REFUSED_PER_S", 0.0)

    async def scene(site: Site) -> None:
        for _ in range(12):
            await site.client.post("/refuse/no")
        await site.client.post("/echo")

    site = run(tmp_path, scene)
    assert [line["outcome"] for line in site.lines()] == ["refused"] * 5 + ["finished"]
    counted = {family.name: family.samples for family in site.outcomes.collect()}
    assert counted["prefixkv_request_log_left_out"][0].value == 7
    assert site.refused() == {("400", "no"): 12}
