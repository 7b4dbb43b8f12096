"""Workers that stand still, as SIGSTOP makes them: they are there, and do not answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager

import msgspec
import pytest

from prefixkv.serving import fleet as fleets
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.process import READY
from prefixkv.serving.wire import Ask, SamplingParams, TokenEvent, WorkerInfo
from tests.support.patience import NEVER_S, PATIENCE_S, until
from tests.support.served import Expected, Serve, Served, client_of, figures_of, get

PROMPT = list(range(300, 350))
NUM = 12
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def till(done: Callable[[], object]) -> None:
    while not done():
        await asyncio.sleep(0.01)


async def said(fleet: Fleet, rid: str) -> list[TokenEvent]:
    ask = Ask(rid, PROMPT, "", "", NUM, sampling=SamplingParams(ignore_end=True))
    return [one async for one in fleet.generate(ask)]


def test_requests_leave_a_worker_that_stands_still_and_come_back(
    expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "SILENCE_S", NEVER_S)  # no time-out of a request ends the test
    monkeypatch.setattr(fleets, "_GIVEN_UP_TICKS", 16)
    tokens = expected.tokens(PROMPT, NUM)
    names = ("d0", "d1", "p")
    options = {
        name: ("worker", "prefill" if name == "p" else "decode", "--name", name, "--threads", "1")
        for name in names
    }

    async def main(infos: dict[str, WorkerInfo]) -> None:
        fleet = Fleet()
        for info in infos.values():
            fleet.add(info)

        async def right(rid: str) -> list[TokenEvent]:
            answer = await said(fleet, rid)
            assert [one.token for one in answer] == tokens
            return answer

        await right("first")
        used, other = sorted(("d0", "d1"), key=lambda name: -cached(infos[name]))
        with stopped(infos[used].pid):
            # It goes where its prompt is, waits there, and is sent elsewhere.
            assert (await right("waits"))[-1].hit_tokens == 0
            assert fleet.retried == 1
            assert fleet.silent == [used]
            assert fleet.ready
            await right("avoids")
            assert fleet.retried == 1
            with stopped(infos[other].pid):
                with pytest.raises(ApiError, match=f"no decode worker is ready.*{used} is silent"):
                    await right("nowhere")
                assert fleet.retried == 2
                assert not fleet.takes_requests
        await till(lambda: not fleet.silent)
        with stopped(infos[other].pid):
            await till(lambda: fleet.silent)
            answer = await right("again")
            assert answer[-1].hit_tokens == 48, "it is used as it was before"
        await till(lambda: not fleet.silent)
        with stopped(infos["p"].pid):
            with pytest.raises(ApiError, match="no prefill worker is ready, p is silent") as raised:
                await right("not computed")
            assert raised.value.status == 503
        await till(lambda: not fleet.silent)
        await right("last")
        await fleet.close()

    with Served(*options["d0"]) as d0, Served(*options["d1"]) as d1, Served(*options["p"]) as p:
        workers = dict(zip(names, (d0, d1, p), strict=True))
        infos = {
            name: msgspec.json.decode(worker.line(READY)[len(READY) :], type=WorkerInfo)
            for name, worker in workers.items()
        }
        asyncio.run(asyncio.wait_for(main(infos), 2 * PATIENCE_S))


def cached(info: WorkerInfo) -> float:
    return figures_of(info.status_url)[f'prefixkv_pages{{node="{info.name}",state="cached"}}']


def test_a_front_says_that_a_worker_is_silent_and_has_requests_wait_for_the_only_one(
    serve: Serve, expected: Expected
) -> None:
    with client_of(serve) as client, ThreadPoolExecutor(2) as pool:

        def hello() -> str | None:
            made = client.chat.completions.create(
                model="small", messages=HELLO, max_tokens=NUM, temperature=0
            )
            return made.choices[0].message.content

        assert hello() == expected.chat(HELLO, NUM)
        with stopped(serve.workers()["decode-0"]["pid"]):
            until(lambda: get(f"{serve.status}/health")[0] == 503)
            _, told = get(f"{serve.status}/health")
            assert told["status"] == "silent"
            silent = {name: worker["silent"] for name, worker in told["workers"].items()}
            assert silent == {"decode-0": True, "prefill-0": False}
            assert serve.figures()['prefixkv_front_routing{what="silent"}'] == 1
            waiting = [pool.submit(hello) for _ in range(2)]
            assert not wait(waiting, 1.0, FIRST_COMPLETED).done
        until(lambda: get(f"{serve.status}/health")[0] == 200)
        for said in (*waiting, pool.submit(hello)):
            assert said.result(PATIENCE_S) == expected.chat(HELLO, NUM)
