"""One exposition for a fleet, over real sockets, of workers that answer, hang, talk nonsense, end
and come back."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

import httpx
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.serving import fleet_metrics
from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.fleet_metrics import FleetMetrics
from prefixkv.serving.http import HttpServer, Stream, make_app
from prefixkv.serving.status import status_app
from prefixkv.serving.wire import WorkerInfo
from tests.models.patience import NEVER_S, PATIENCE_S
from tests.models.promtool import promtool

LIMITS = Limits(1 << 20, NEVER_S, NEVER_S, NEVER_S, NEVER_S)
TEXT = """\
# HELP prefixkv_hit_tokens_total Those that were cached here.
# TYPE prefixkv_hit_tokens_total counter
prefixkv_hit_tokens_total{node="NAME",namespace="a \\"b\\" \\\\ c"} 7
# HELP prefixkv_wait_seconds How long requests waited.
# TYPE prefixkv_wait_seconds histogram
prefixkv_wait_seconds_bucket{le="0.5",node="NAME"} 1
prefixkv_wait_seconds_bucket{le="+Inf",node="NAME"} 2
prefixkv_wait_seconds_count{node="NAME"} 2
prefixkv_wait_seconds_sum{node="NAME"} 3.5
# HELP prefixkv_locks Prefixes held in the tree.
# TYPE prefixkv_locks gauge
prefixkv_locks{node="NAME"} 0
"""
Say = Callable[[str], Awaitable[Response]]


async def well(name: str) -> Response:
    return Response(TEXT.replace("NAME", name), media_type="text/plain")


async def hangs(name: str) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def trickles(name: str) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"# a byte now and then keeps the connection alive\n"
            await asyncio.sleep(0.01)

    return Stream(pieces(), LIMITS, "text/plain")


async def says_too_much(name: str) -> Response:
    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"# " + b"x" * 65_000 + b"\n"
            await asyncio.sleep(0)  # or its end would never be seen

    return Stream(pieces(), LIMITS, "text/plain")


async def fails(name: str) -> Response:
    return Response(TEXT, 500)


async def is_torn(name: str) -> Response:
    return Response(TEXT.replace("NAME", name)[:-12])


async def is_nonsense(name: str) -> Response:
    return Response(b"<html>\xff</html>")


class Worker:
    """The status port of a worker that says `say`."""

    def __init__(self, role: Literal["prefill", "decode"], name: str, say: Say) -> None:
        self.role, self.name, self.say, self.asked = role, name, say, 0
        app = make_app([Route("/metrics", self._metrics)])
        self.server = HttpServer(app, "127.0.0.1", 0, LIMITS)

    async def _metrics(self, _: Request) -> Response:
        self.asked += 1
        return await self.say(self.name)

    @property
    def info(self) -> WorkerInfo:
        # Nothing is at `url`: the fleet's other questions fail, and are asked again later.
        return WorkerInfo(
            self.role, self.name, "http://127.0.0.1:1", self.server.url, "", "m", "m", 4, 64, 256,
            1000, "1", 0,
        )  # fmt: skip


class Stage:
    """A fleet's metrics on a status port, and a scraper."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        own = prometheus_client.Counter("front_things", "Of the front.", ["what"], registry=None)
        own.labels("one").inc()

        def routes(registry: prometheus_client.CollectorRegistry) -> list[Route]:
            return FleetMetrics(self.fleet, registry, lambda: self.server.url).routes

        status = status_app(lambda: (True, {}), (), ListenSettings(), [own], (), routes)
        self.server = HttpServer(status, "127.0.0.1", 0, LIMITS)
        self.client = httpx.AsyncClient(
            base_url=self.server.url, timeout=PATIENCE_S, trust_env=False
        )

    async def add(self, *workers: Worker) -> None:
        for worker in workers:
            await worker.server.start()
            self.fleet.add(worker.info)

    async def text(self) -> str:
        answer = await self.client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return answer.text

    async def samples(self) -> dict[str, float]:
        return samples_of(await self.text())


def samples_of(text: str) -> dict[str, float]:
    """Every sample by its line's head, of an exposition in which each family is there once."""
    heads = Counts(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert set(heads.values()) <= {1}, heads
    assert len([*text_string_to_metric_families(text)]) == len(heads)
    rows = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
    assert len({name for name, _, _ in rows}) == len(rows), "a sample is there twice"
    return {name: float(number) for name, _, number in rows}


def run(scene: Callable[[Stage], Awaitable[None]], *workers: Worker) -> None:
    async def main() -> None:
        stage = Stage()
        await stage.server.start()
        try:
            await stage.add(*workers)
            async with asyncio.timeout(PATIENCE_S):
                await scene(stage)
        finally:
            await stage.client.aclose()
            for server in (stage.server, *(worker.server for worker in workers)):
                await server.stop()
            await stage.fleet.close()

    asyncio.run(main())


def make(**say: Say) -> list[Worker]:
    """Workers by name: those that begin with p are of prefill."""
    return [
        Worker("prefill" if name.startswith("p") else "decode", name, one)
        for name, one in say.items()
    ]


async def _two_workers(stage: Stage) -> None:
    found = await stage.samples()
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        who = f'node="{name}",role="{role}",worker="{name}"'
        quoted = 'namespace="a \\"b\\" \\\\ c"'
        assert found[f"prefixkv_hit_tokens_total{{{quoted},{who}}}"] == 7
        assert found[f'prefixkv_wait_seconds_bucket{{le="0.5",{who}}}'] == 1
        assert found[f"prefixkv_wait_seconds_sum{{{who}}}"] == 3.5
        assert found[f'prefixkv_worker_up{{role="{role}",worker="{name}"}}'] == 1
    assert found['front_things_total{what="one"}'] == 1


def test_all_workers_are_in_one_exposition_with_their_labels() -> None:
    run(_two_workers, *make(p0=well, d0=well, d1=well))


def test_promtool_finds_nothing_wrong_in_it() -> None:
    async def scene(stage: Stage) -> None:
        found.append(await stage.text())

    found: list[str] = []
    run(scene, *make(p0=well, d0=well))
    promtool("check", "metrics", given=found[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "say",
    [hangs, trickles, says_too_much, fails, is_torn, is_nonsense],
    ids=lambda say: say.__name__,
)
def test_a_worker_that_does_not_answer_costs_only_its_own_rows(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time is what the bad one is given; on a busy machine the good one may need more.
    monkeypatch.setattr(fleet_metrics, "SCRAPE_S", 2.0 if say is says_too_much else 0.5)
    monkeypatch.setattr(fleet_metrics, "SCRAPE_BYTES", 1 << 20)

    async def scene(stage: Stage) -> None:
        good = 'prefixkv_worker_up{role="decode",worker="good"}'
        for _ in range(20):
            found = await stage.samples()
            assert found['prefixkv_worker_up{role="decode",worker="bad"}'] == 0
            if found[good]:
                break
        assert found[good] == 1
        assert found['prefixkv_locks{node="good",role="decode",worker="good"}'] == 0
        assert found['front_things_total{what="one"}'] == 1
        assert not [name for name in found if 'worker="bad"' in name and "_up" not in name]

    run(scene, *make(bad=say, good=well))


def test_a_worker_that_has_ended_is_down_until_it_is_back_at_another_port() -> None:
    up = 'prefixkv_worker_up{role="decode",worker="d0"}'
    rows = 'prefixkv_locks{node="d0",role="decode",worker="d0"}'
    (first,), (second,) = make(d0=well), make(d0=well)

    async def scene(stage: Stage) -> None:
        await first.server.stop()  # it is dead, and its end is not known yet
        assert (await stage.samples())[up] == 0
        stage.fleet.remove("d0")
        found = await stage.samples()
        assert found[up] == 0
        assert rows not in found
        await stage.add(second)
        found = await stage.samples()
        assert (found[up], found[rows]) == (1, 0)
        await second.server.stop()

    run(scene, first)


def test_scrapers_that_come_together_ask_each_worker_once() -> None:
    go_on = asyncio.Event()

    async def waits(name: str) -> Response:
        await go_on.wait()
        return await well(name)

    async def scene(stage: Stage) -> None:
        scrapers = [asyncio.create_task(stage.samples()) for _ in range(5)]
        while not worker.asked:
            await asyncio.sleep(0.005)
        scrapers[0].cancel()  # it leaves, and takes nothing from the others
        await asyncio.sleep(0)
        go_on.set()
        for scraper in scrapers[1:]:
            assert (await scraper)['prefixkv_worker_up{role="decode",worker="d0"}'] == 1
        assert worker.asked == 1
        await stage.samples()
        assert worker.asked == 2, "what was found is not kept"

    (worker,) = make(d0=waits)
    run(scene, worker)


def test_a_family_of_another_type_is_left_out() -> None:
    async def odd(name: str) -> Response:
        return Response(
            "# HELP prefixkv_locks L\n# TYPE prefixkv_locks counter\nprefixkv_locks 9\n"
            "# HELP prefixkv_hit_tokens_total T\n# TYPE prefixkv_hit_tokens_total gauge\n"
            "prefixkv_hit_tokens_total 9\n"
        )

    async def scene(stage: Stage) -> None:
        found = await stage.samples()
        assert found['prefixkv_locks{node="a",role="decode",worker="a"}'] == 0
        assert not [name for name in found if "hit_tokens" in name and 'worker="b"' in name]

    run(scene, *make(a=well, b=odd))


def test_the_targets_are_those_of_prometheus_http_discovery() -> None:
    workers = make(p0=well, d0=well)

    async def scene(stage: Stage) -> None:
        answer = await stage.client.get("/sd")
        assert answer.headers["content-type"] == "application/json"
        address = {one.name: one.server.url.removeprefix("http://") for one in workers}
        expected: list[dict[str, Any]] = [
            {"targets": [stage.server.url.removeprefix("http://")],
             "labels": {"worker": "front", "role": "front", "__metrics_path__": "/metrics/front"}},
            *({"targets": [address[one.name]], "labels": {"worker": one.name, "role": one.role}}
              for one in workers),
        ]  # fmt: skip
        assert answer.json() == expected
        own = samples_of((await stage.client.get("/metrics/front")).text)
        assert 'front_things_total{what="one"}' in own
        assert not [name for name in own if "worker=" in name]

    run(scene, *workers)
