"""A fleet, over real sockets, before workers that do on command what real ones do by chance: fail,
refuse, end in the middle. With real ones: tests/integration/serving."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal
from unittest.mock import patch

import httpx
import msgspec
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.cache.events import EventFeed
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.serving import fleet as fleets
from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.fleet import Fleet, Start
from prefixkv.serving.front import Front
from prefixkv.serving.http import ApiError, App, HttpServer, Stream, json_response
from prefixkv.serving.text import Texts
from prefixkv.serving.wire import Ask, EventTap, FenceRequest, LostPeer, TokenEvent, WorkerInfo
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.scenes import played_by, until

LIMITS = Limits(1 << 20, NEVER_S, NEVER_S, NEVER_S, NEVER_S)
PROMPT = list(range(40))
TOKEN = TokenEvent(token=7)
END = TokenEvent(token=8, position=1, finish="length")
Say = Callable[[], AsyncGenerator[TokenEvent, None]]
LOST = [LostPeer("peer", "1f", "silent", 3)]


class Worker:
    """What a front asks of a worker. `say` is its answer, or a status with which it refuses."""

    def __init__(self, role: Literal["prefill", "decode"], name: str, say: Say | int) -> None:
        self.role, self.name, self.say = role, name, say
        self.asked: list[Ask] = []
        self.under_way = 0
        self.fenced: list[FenceRequest] = []
        self.fence_statuses: list[int] = []  # what it answers first
        self.lost_status = 200
        self.cache = RadixCache(page_size=4)
        self._next_page = 0
        self.tap = EventTap(EventFeed(self.cache, name, 1).take, lambda call: call())
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/events", self._events),
            Route("/fence", self._fence, methods=["POST"]),
            Route("/lost", self._lost),
        ]
        self.server = HttpServer(App(routes), "127.0.0.1", 0, LIMITS)

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            self.role, self.name, self.server.url, "", f"tcp://{self.name}", "m", "m", 4, 64, 256,
            1000, "1", 0,
        )  # fmt: skip

    def insert(self, tokens: list[int]) -> None:
        pages = np.arange(self._next_page, self._next_page + len(tokens) // 4, dtype=np.int32)
        self._next_page += len(pages)
        self.cache.insert(tokens, pages)
        self.tap.after_step()

    async def _generate(self, request: Request) -> Response:
        self.asked.append(msgspec.json.decode(await request.body(), type=Ask))
        if isinstance(self.say, int):
            raise ApiError(self.say, "not this one")
        self.under_way += 1
        return Stream(self._lines(self.say()), "x", end=self._over)

    async def _lines(self, answer: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[bytes, None]:
        async for said in answer:
            line = msgspec.json.encode(said) + b"\n"
            yield line[:5]  # lines come in pieces of any size
            yield line[5:] + b"\n"

    async def _over(self) -> None:
        self.under_way -= 1

    async def _events(self, _: Request) -> Response:
        return Stream(self.tap.frames(), "x")

    async def _fence(self, request: Request) -> Response:
        status = self.fence_statuses.pop(0) if self.fence_statuses else 202
        if status == 202:
            self.fenced.append(msgspec.json.decode(await request.body(), type=FenceRequest))
        return Response(status_code=status)

    async def _lost(self, _: Request) -> Response:
        return json_response(LOST, self.lost_status)


async def well() -> AsyncGenerator[TokenEvent, None]:
    yield TOKEN
    yield END


async def fails() -> AsyncGenerator[TokenEvent, None]:
    yield TokenEvent(finish="error", error="no memory")


async def computes_nan() -> AsyncGenerator[TokenEvent, None]:
    yield TokenEvent(finish="error", error="AbortedError: NotFiniteError: NaN for 'r' at /srv/a")


async def says_nothing() -> AsyncGenerator[TokenEvent, None]:
    return
    yield


async def breaks() -> AsyncGenerator[TokenEvent, None]:
    yield TOKEN


async def never() -> AsyncGenerator[TokenEvent, None]:
    yield TOKEN
    await asyncio.Event().wait()


class Stage:
    """A fleet and its workers."""

    def __init__(self, prefill: int, decode: list[Say | int]) -> None:
        self.prefill = [Worker("prefill", f"p{i}", well) for i in range(prefill)]
        self.decode = [Worker("decode", f"d{i}", say) for i, say in enumerate(decode)]
        self.fleet = Fleet()

    def answer(self, rid: str = "r", **more: Any) -> AsyncGenerator[TokenEvent, None]:
        return self.fleet.generate(Ask(rid, PROMPT, "", max_new_tokens=2, **more))

    async def said(self, **more: Any) -> list[TokenEvent]:
        return [one async for one in self.answer(**more)]

    def places_taken(self) -> dict[str, float]:
        """The work of requests in progress, by role: that of those that have ended fades."""
        return {
            role: sum(worker.open_work for worker in router._workers.values())
            for role, router in self.fleet.routers.items()
        }


def run(scene: Callable[[Stage], Awaitable[None]], decode: list[Say | int], prefill: int) -> None:
    async def main() -> None:
        stage = Stage(prefill, decode)
        workers = [*stage.prefill, *stage.decode]
        try:
            for worker in workers:
                await worker.server.start()
                stage.fleet.add(worker.info)
            await asyncio.wait_for(scene(stage), PATIENCE_S)
            assert not any(stage.places_taken().values())
            await until(lambda: not any(worker.under_way for worker in workers))
        finally:
            await stage.fleet.close()
            for worker in workers:
                await worker.server.stop()

    asyncio.run(main())


played = played_by(run)


@played([well], 1)
async def test_a_worker_that_cannot_work_with_the_others_is_not_taken(stage: Stage) -> None:
    fleet, (info,) = stage.fleet, [one.info for one in stage.decode]
    for change, why in (
        ({"name": "d1", "identity": "another"}, "d1 has 'another', p0 'm'"),
        ({"name": "d1", "page_size": 8}, "pages of 8 tokens, d0 of 4"),
        ({"name": "d0", "page_size": 6}, "d0 and p0: .*6.*4"),
        ({"name": "p0"}, "a decode and a prefill worker are named p0"),
    ):
        with pytest.raises(ConfigError, match=why):
            fleet.add(msgspec.structs.replace(info, life="2", **change))
    assert [one.life for one in fleet.workers] == ["1", "1"]
    assert await stage.said() == [TOKEN, END]


@played([well], 1)
async def test_a_request_says_where_its_prefill_is(stage: Stage) -> None:
    assert await stage.said(namespace="s") == [TOKEN, END]
    (asked,), (prefill,) = stage.decode[0].asked, stage.prefill
    assert asked == Ask(
        "r#0", PROMPT, "tcp://p0", prefill_url=prefill.server.url, max_new_tokens=2, namespace="s"
    )
    assert stage.fleet.retried == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", [fails, says_nothing, 503, 500])
def test_what_has_failed_is_not_asked_again(way: Say | int) -> None:
    """Two of three decode workers fail: an attempt each at most, with another prefill worker."""

    async def scene(stage: Stage) -> None:
        for number in range(3):
            assert await stage.said(rid=f"r{number}") == [TOKEN, END]
        asks = [ask for worker in stage.decode for ask in worker.asked]
        for number in range(3):
            tried = [ask for ask in asks if ask.rid.startswith(f"r{number}#")]
            assert len({ask.rid for ask in tried}) == len(tried)  # each attempt has its own id
            assert len({ask.prefill for ask in tried}) == min(2, len(tried))
        for worker in stage.decode:
            rids = [ask.rid.split("#")[0] for ask in worker.asked]
            assert len(set(rids)) == len(rids), "asked again for what it failed at"
        assert len(stage.decode[2].asked) == 3
        assert stage.fleet.retried == len(asks) - 3 > 0

    run(scene, [way, way, well], 2)


@pytest.mark.parametrize(
    ("decode", "prefill", "more", "end", "asked", "why"),
    [
        # 1. An attempt that fails is followed by another, up to the third, also on the only worker.
        ([fails] * 4, 1, {}, (503, "worker_lost"), [1, 1, 1], "."),
        ([says_nothing], 1, {}, (503, "worker_lost"), [3], "."),
        # 2. What would fail everywhere, what has begun, and what is the client's fault is not.
        ([computes_nan] * 2, 1, {}, (500, "not_finite"), [1], "numbers that are not finite"),
        ([breaks, breaks], 1, {}, (503, "worker_lost"), [1], "."),
        ([well], 1, {"num_samples": 2}, (503, "worker_lost"), [1], "ended"),  # one of two has
        ([400], 1, {}, (400, None), [1], "not this one"),
        # 3. Without a prefill worker no place is taken on decode.
        ([well], 0, {}, (503, "not_ready"), [], "no prefill worker is ready"),
    ],
)
def test_how_an_attempt_fails_decides_whether_there_is_another(
    decode: list[Say | int], prefill: int, more: Any, end: Any, asked: list[int], why: str
) -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(ApiError, match=why) as raised:
            await stage.said(**more)
        assert (raised.value.status, raised.value.code) == end
        assert "/srv" not in raised.value.message
        asks = [[ask.rid for ask in worker.asked] for worker in stage.decode]
        assert sorted(len(rids) for rids in asks if rids) == asked
        attempts = sorted(rid for rids in asks for rid in rids)
        assert attempts == [f"r#{number}" for number in range(sum(asked))]
        assert stage.fleet.retried == stage.fleet.stats()["retried"] == max(sum(asked) - 1, 0)

    run(scene, decode, prefill)


@played([never], 1)
async def test_an_answer_that_is_not_wanted_ends_on_its_worker(stage: Stage) -> None:
    stream = stage.answer()
    await anext(stream)
    assert stage.decode[0].under_way
    assert stage.places_taken() == {"prefill": 11.0, "decode": 11.0}
    await stream.aclose()
    await until(lambda: not stage.decode[0].under_way)


@patch.multiple(fleets, _AGAIN_S=0.01)
@played([well], 1)
async def test_a_lost_life_is_told_to_all_that_are_here_and_that_come(stage: Stage) -> None:
    prefill, decode = stage.prefill[0], stage.decode[0]
    prefill.fence_statuses = [503, 500]  # it is told until it has taken it
    first, second = FenceRequest("d9", "a"), FenceRequest("d9", "b")
    stage.fleet.fence(first)
    await until(lambda: prefill.fenced and decode.fenced)
    late = Worker("decode", "late", well)
    await late.server.start()
    stage.fleet.add(late.info)
    stage.fleet.fence(second)
    await until(lambda: len(prefill.fenced) == len(late.fenced) == len(decode.fenced) == 2)
    assert prefill.fenced == decode.fenced == late.fenced == [first, second]
    assert not prefill.fence_statuses
    stage.fleet.remove("late")
    await late.server.stop()


@played([well, well, well], 1)
async def test_what_workers_hold_for_lost_peers_is_asked_of_those_that_answer(stage: Stage) -> None:
    stage.decode[1].lost_status = 500
    await stage.decode[2].server.stop()
    assert await stage.fleet.lost() == {"p0": LOST, "d0": LOST}


@played([well], 1)
async def test_an_operator_sees_lost_lives_and_says_which_are_dead(stage: Stage) -> None:
    listen = ListenSettings(port=0, status_port=0)
    front = Front(stage.fleet, Texts(small_tokenizer(), CHAT_TEMPLATE), "m", listen)
    await front.status.start()
    async with httpx.AsyncClient(base_url=front.status.url) as operator:

        async def fence(name: str, life: str) -> int:
            return (await operator.post("/fence", json={"name": name, "life": life})).status_code

        shown = (await operator.get("/lost")).json()
        assert shown == [{"name": "peer", "life": "1f", "held": {"p0": 3, "d0": 3}}]
        assert await fence("d0", "1") == 409, "it serves"
        assert await fence("peer", "2f") == 404, "no worker holds anything for it"
        # One that was started by hand stays in the fleet for as long as its machine is away.
        away = {"name": "peer", "life": "1f", "url": "http://127.0.0.1:9"}
        lost = msgspec.structs.replace(stage.decode[0].info, **away)
        stage.fleet.add(lost)
        assert (await operator.get("/lost")).json() == []
        assert await fence("peer", "1f") == 409
        assert stage.fleet.fenced == []
        stage.fleet.members["peer"].silent = True
        assert (await operator.get("/lost")).json() == shown

        async def comes_back() -> dict[str, list[LostPeer]]:
            stage.fleet.members["peer"].silent = False
            return {"p0": LOST}

        with patch.object(stage.fleet, "lost", comes_back):
            assert await fence("peer", "1f") == 409, "it serves by then"
        stage.fleet.members["peer"].silent = True
        assert [await fence("peer", "1f") for _ in range(2)] == [202, 202]
    with pytest.raises(ConfigError, match="peer life 1f was fenced: restart it"):
        stage.fleet.add(lost)
    peer = FenceRequest("peer", "1f")
    await until(lambda: stage.prefill[0].fenced == stage.decode[0].fenced == [peer])
    await front.server.stop()
    await front.status.stop()


@played([well], 1)
async def test_a_worker_is_removed_by_its_life(stage: Stage) -> None:
    fleet = stage.fleet
    assert fleet.ready
    assert (fleet.context, fleet.vocab_size) == (256, 1000)
    assert not fleet.remove("d0", life="2")
    assert not fleet.remove("nowhere")
    assert fleet.ready
    assert fleet.remove("d0", life="1")
    assert not fleet.remove("d0")
    assert not fleet.ready
    fleet.add(msgspec.structs.replace(stage.decode[0].info, life="2"))
    fleet.add(msgspec.structs.replace(stage.decode[0].info, life="3"))
    assert fleet.members["d0"].info.life == "3"
    assert fleet.stats()["decode_workers"] == 1
    assert await stage.said() == [TOKEN, END]


@patch.multiple(fleets, _AGAIN_S=0.01)
@played([well], 1)
async def test_a_router_that_misses_a_batch_starts_over(stage: Stage) -> None:
    worker, router = stage.decode[0], stage.fleet.routers["decode"]
    pages = lambda: router.stats()["known_pages"]  # noqa: E731
    await until(lambda: worker.tap._followers)
    worker.insert(list(range(100, 108)))
    await until(lambda: pages() == 2)
    worker.tap._seq += 1  # one is lost on its way
    worker.insert(list(range(200, 212)))
    await until(lambda: worker.tap._used and (worker.tap.after_step() or pages() == 5))
    assert router.stats()["out_of_sync"] >= 1
    assert router.stats()["workers_out_of_sync"] == 0


@patch.multiple(fleets, _TICK_S=0.002)
@played([well], 1)
async def test_a_worker_is_silent_whenever_its_stream_is(stage: Stage) -> None:
    worker, fleet = stage.decode[0], stage.fleet
    for number in range(3):
        await until(lambda: "d0" in fleet.silent)
        worker.insert(list(range(8 * number, 8 * number + 8)))
        await until(lambda: "d0" not in fleet.silent)


@pytest.mark.parametrize("joined", [False, True])
def test_a_request_waits_for_a_worker_that_is_alone_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    monkeypatch.setattr(fleets, "_TICK_S", 0.002)
    monkeypatch.setattr(fleets, "_GIVEN_UP_TICKS", 1 << 40)
    speaks = asyncio.Event()

    async def stands_still() -> AsyncGenerator[TokenEvent, None]:
        await speaks.wait()
        yield TOKEN
        yield END

    async def scene(stage: Stage) -> None:
        fleet, other = stage.fleet, Worker("decode", "d1", well)
        asked = asyncio.create_task(stage.said())
        await until(lambda: {"d0", "p0"} <= set(fleet.silent) and stage.decode[0].under_way)
        assert not fleet.ready
        later = asyncio.create_task(stage.said(rid="later"))  # it may come even now
        await until(lambda: stage.decode[0].under_way == 2)
        await asyncio.sleep(0.05)
        assert not asked.done()
        if joined:
            await other.server.start()
            fleet.add(other.info)
        else:
            speaks.set()
        assert await asked == await later == [TOKEN, END]
        assert fleet.retried == len(other.asked) == 2 * joined
        await other.server.stop()

    run(scene, [stands_still], 1)


def test_no_request_waits_for_a_worker_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "_TICK_S", 0.002)

    async def stands_still() -> AsyncGenerator[TokenEvent, None]:
        await asyncio.Event().wait()
        yield TOKEN

    async def scene(stage: Stage) -> None:
        given_up = lambda: all(one.given_up for one in stage.fleet.members.values())  # noqa: E731
        for number in range(2):  # the second comes when it has been given up
            with pytest.raises(ApiError, match=r"worker is ready, [dp]0 is silent") as raised:
                await stage.said(rid=f"r{number}")
            assert (raised.value.status, raised.value.code) == (503, "not_ready")
            await until(given_up)
            assert stage.fleet.retried == 1
        # It is asked again when it speaks. No tick comes meanwhile, on however slow a machine.
        monkeypatch.setattr(fleets, "_TICK_S", NEVER_S)
        await asyncio.sleep(0.01)
        stage.decode[0].say = well
        for worker in (*stage.prefill, *stage.decode):
            worker.insert(list(range(8)))
        await until(lambda: not stage.fleet.silent)
        assert await stage.said(rid="last") == [TOKEN, END]

    run(scene, [stands_still], 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@played([well], 1)
async def test_a_request_waits_for_a_worker_that_is_being_started(
    stage: Stage, role: Literal["prefill", "decode"], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = stage.fleet
    (worker,) = stage.prefill if role == "prefill" else stage.decode
    fleet.starts = [Start(role)]
    fleet.remove(worker.name)
    requests = [asyncio.create_task(stage.said(rid=f"r{i}")) for i in range(3)]
    leaves = asyncio.create_task(stage.said(rid="leaves"))
    with pytest.raises(ApiError) as raised:
        await stage.said(rid="late", deadline_s=0.01)
    assert (raised.value.status, raised.value.code) == (503, "not_ready")
    leaves.cancel()
    assert not any(one.done() for one in requests)
    assert not stage.decode[0].asked
    fleet.add(msgspec.structs.replace(worker.info, life="2"))
    assert f"{worker.name} is back" in caplog.text
    assert await asyncio.gather(*requests) == [[TOKEN, END]] * 3
    assert fleet.retried == 0
    assert {ask.rid for ask in stage.decode[0].asked} == {"r0#0", "r1#0", "r2#0"}


@pytest.mark.parametrize(
    ("timeout_s", "coming"),
    [
        (NEVER_S, ", a decode worker is starting"),
        (-1.0, ""),  # both are late
    ],
)
@played([well], 1)
async def test_no_request_waits_where_no_worker_is_being_started(
    stage: Stage, timeout_s: float, coming: str
) -> None:
    fleet = stage.fleet
    fleet._start_timeout_s = timeout_s
    fleet.starts = [Start("decode"), Start("prefill")]
    if timeout_s > 0:
        fleet.starts[1].gone_s = None  # it is given up
    fleet.remove("p0")
    fleet.remove("d0")
    with pytest.raises(ApiError) as raised:
        await stage.said()
    assert (raised.value.status, raised.value.code) == (503, "not_ready")
    assert str(raised.value) == f"no decode and no prefill worker is ready{coming}"
    assert raised.value.response().headers["retry-after"] == "1"


@played([well], 1)
async def test_a_request_whose_worker_is_lost_waits_for_the_next_one(stage: Stage) -> None:
    fleet = stage.fleet
    fleet.starts = [Start("decode")]

    async def dies() -> AsyncGenerator[TokenEvent, None]:
        fleet.remove("d0")
        return
        yield

    stage.decode[0].say = dies
    asked = asyncio.create_task(stage.said())
    await until(lambda: fleet.retried == 1)
    stage.decode[0].say = well
    fleet.add(msgspec.structs.replace(stage.decode[0].info, life="2"))
    assert await asked == [TOKEN, END]
