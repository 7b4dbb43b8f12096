"""A decode worker in this process, with a prefill server that does on command what a real one does
by chance: it takes a job late, or refuses it, or cannot be reached."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.config import DecodeConfig
from prefixkv.engines.hf.requests import PrefillJob, Sampling
from prefixkv.serving.config import (
    DecodeWorkerConfig,
    Limits,
    ListenSettings,
    ModelSettings,
    WorkerSettings,
)
from prefixkv.serving.http import ApiError, App, HttpServer
from prefixkv.serving.tracing import NodeSpans, Tracing
from prefixkv.serving.wire import Ask, TokenEvent
from prefixkv.serving.worker import DecodeWorker
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.scenes import played_by, until

MIB = 1 << 20
LIMITS = Limits(MIB, NEVER_S, NEVER_S, NEVER_S, NEVER_S)
PROMPT = list(range(300, 350))
RID = "r"
JOB = "d/r/0.0"


class Prefill:
    """A prefill worker's HTTP server. It answers a job with `status` and `says` once `takes` is
    set, and computes none."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.taken: list[str] = []
        self.status, self.says = 202, b""
        self.takes = asyncio.Event()
        self.takes.set()
        routes = [Route("/jobs", self._job, methods=["POST"])]
        self.server = HttpServer(App(routes), "127.0.0.1", 0, LIMITS)

    async def _job(self, request: Request) -> Response:
        job = msgspec.json.decode(await request.body(), type=PrefillJob)
        self.jobs.append(job.rid)
        await self.takes.wait()
        if self.status == 202:
            self.taken.append(job.rid)
        return Response(self.says, self.status, media_type="text/plain; charset=utf-8")


class Stage:
    """A decode worker, a prefill server and a client."""

    def __init__(self, worker: DecodeWorker, prefill: Prefill, client: httpx.AsyncClient) -> None:
        self.worker, self.prefill, self.client = worker, prefill, client

    def ask(self, url: str = "", **more: Any) -> bytes:
        how = Sampling(ignore_end=True)
        # No node listens at this address: the job is all that prefill hears.
        ask = Ask(
            RID, PROMPT, "tcp://127.0.0.1:1", how, 4, prefill_url=url or self.prefill.server.url
        )
        return msgspec.json.encode(msgspec.structs.replace(ask, **more))

    def open(self, **more: Any) -> Any:
        return self.client.stream("POST", "/generate", content=self.ask(**more))

    async def at_rest(self) -> None:
        """Wait until the worker holds nothing for a request."""

        while self.worker._open or self.worker._tasks or await self.live():
            await asyncio.sleep(0.01)
        await self.worker._call(lambda engine: engine.audit())

    async def live(self) -> list[str]:
        """The requests that the engine has."""
        return await self.worker._call(lambda engine: list(engine._asked))


async def last_said(answer: httpx.Response) -> TokenEvent:
    lines = [line async for line in answer.aiter_lines() if line]
    return msgspec.json.decode(lines[-1], type=TokenEvent)


def run(scene: Callable[[Stage], Awaitable[None]]) -> None:
    settings = WorkerSettings(
        num_pages=64, models=ModelSettings(threads=1), listen=ListenSettings(limits=LIMITS)
    )

    async def main() -> None:
        worker = DecodeWorker(DecodeWorkerConfig(settings, DecodeConfig(name="d")))
        prefill = Prefill()
        await prefill.server.start()
        await worker.start()
        client = httpx.AsyncClient(base_url=worker.info.url, timeout=PATIENCE_S, trust_env=False)
        stage = Stage(worker, prefill, client)
        try:
            await asyncio.wait_for(scene(stage), PATIENCE_S)
            await asyncio.wait_for(stage.at_rest(), PATIENCE_S)
        finally:
            prefill.takes.set()
            await client.aclose()
            await worker.close()
            await prefill.server.stop()

    asyncio.run(main())


played = played_by(run)


@pytest.mark.parametrize("takes", [True, False])
@played()
async def test_a_client_that_leaves_ends_its_request_also_while_prefill_takes_its_job(
    stage: Stage, takes: bool
) -> None:
    if not takes:
        stage.prefill.takes.clear()
    async with stage.open():
        await until(lambda: stage.prefill.taken if takes else stage.prefill.jobs)
    while await stage.live():
        await asyncio.sleep(0.01)
    stage.prefill.takes.set()
    # It has not failed by itself.
    assert await stage.worker._call(lambda engine: engine.node.counters["aborted"]) == 1


@played()
async def test_of_a_request_that_is_left_no_trace_is_kept_for_samples_that_never_began(
    stage: Stage,
) -> None:
    spans = stage.worker._spans = NodeSpans(Tracing(TracerProvider()), "decode")
    loop = asyncio.get_running_loop()
    await stage.worker._call(lambda engine: spans.follow(engine.node, loop))
    async with stage.open(num_samples=40):
        await until(lambda: stage.prefill.jobs)
        assert [*spans._asked] == [RID]
    await until(lambda: not spans._asked)


@played()
async def test_a_request_ends_at_its_deadline(stage: Stage) -> None:
    async with stage.open(deadline_s=0.2) as answer:
        said = await last_said(answer)
    assert said.finish == "error"
    assert "deadline" in said.error.lower()


@pytest.mark.parametrize("says", [b"no room", b"\xff\xfe not here", b"x" * MIB, None])
@played()
async def test_a_request_ends_where_prefill_does_not_take_its_job(
    stage: Stage, says: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """None: it is not reached."""
    stage.prefill.status, stage.prefill.says = 503, says or b""
    url = "http://127.0.0.1:1" if says is None else stage.prefill.server.url
    async with stage.open(url=url) as answer:
        said = await last_said(answer)
    assert said.finish == "error"
    shown = (says or b"")[:7].decode(errors="replace")
    how = "does not answer" if says is None else f"refused it: 503 {shown}"
    assert said.error.startswith(f"the prefill worker at {url} {how}")
    assert f"{JOB}: {said.error}" in caplog.text
    assert len(said.error) < 1000


@played()
async def test_a_second_request_of_the_same_id_is_refused_and_the_first_goes_on(
    stage: Stage,
) -> None:
    async with stage.open(num_samples=2) as first:
        await until(lambda: len(stage.prefill.taken) == 2)
        second = await stage.client.post("/generate", content=stage.ask())
        assert second.status_code == 400
        assert f"request '{RID}' is here already" in second.text
        await stage.worker._call(lambda engine: None)  # what was posted before has been done
        assert stage.worker._open[RID].left == 2
        assert first.status_code == 200
    assert len(stage.prefill.jobs) == 2
    while await stage.live():
        await asyncio.sleep(0.01)
    # Its id is free again.
    async with stage.open():
        await until(lambda: len(stage.prefill.jobs) == 3)


def test_what_waits_when_a_worker_ends_is_told_so_once_for_each_answer() -> None:
    async def scene(stage: Stage) -> None:
        async with stage.open(num_samples=2) as answer:
            await until(lambda: len(stage.prefill.taken) == 2)
            closing = asyncio.create_task(stage.worker.close())
            lines = [line async for line in answer.aiter_lines() if line]
            await closing
        told = [msgspec.json.decode(line, type=TokenEvent) for line in lines]
        assert sorted((said.sample, said.finish) for said in told) == [(0, "error"), (1, "error")]

    with pytest.raises(ApiError, match="ended"):  # `at_rest` finds the engine ended
        run(scene)
