"""Workers as processes by themselves, a fleet of them in this one, and `prefixkv front` before
them."""

import asyncio
import os
import signal
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from prefixkv.engines.hf.requests import Sampling
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.wire import Ask, TokenEvent, WorkerInfo
from prefixkv.serving.worker import READY
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Served, client_of, get

KEY = {"PREFIXKV_API_KEY": "secret"}
PROMPT = list(range(300, 350))
NUM = 12


def started(role: str, *more: str) -> tuple[Served, WorkerInfo]:
    made = Served("worker", role, "--threads", "1", *more, **KEY)
    return made, msgspec.json.decode(made.line(READY)[len(READY) :], type=WorkerInfo)


def test_workers_answer_a_front_are_taken_back_and_drain(
    tmp_path: Path, expected: Expected
) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('name = "d"\npage_size = 8\n[control]\nheartbeat_s = 0.5\n')
    patient = ("--drain-timeout-s", "100")
    prefill, of_prefill = started("prefill", "--name", "p", "--page-size", "8", *patient)
    killed, of_decode = started("decode", "--config", str(file))
    assert [of_decode.name, of_prefill.name, of_decode.page_size] == ["d", "p", 8]
    urls = f"{of_prefill.url},{of_decode.url}"
    front = Served("front", "--workers", urls, "--workers-key", "secret", "--port", "0",
                   "--status-port", "0")  # fmt: skip
    tokens = expected.tokens(PROMPT, NUM)
    with prefill, killed, front:
        words = front.line("small: ").split()
        status = words[-1].rstrip(")")
        until(lambda: get(f"{status}/health")[0] == 200)
        with client_of(SimpleNamespace(url=words[1])) as client:  # type: ignore[arg-type]

            def answer() -> Any:
                return client.completions.create(
                    model="small", prompt=PROMPT, max_tokens=NUM, temperature=0
                )

            for hits in (0, 48):
                made = answer()
                assert made.choices[0].text == expected.text(tokens)
                assert made.usage.prefixkv["decode_hit_tokens"] == hits
            killed.signal(signal.SIGKILL)
            killed.ended()
            port = str(urlsplit(of_decode.url).port)
            decode, again = started("decode", "--config", str(file), "--port", port, *patient)
            with decode:
                until(lambda: again.name in get(f"{status}/health")[1]["workers"])
                assert answer().choices[0].text == expected.text(tokens)
                front.signal()
                assert front.ended() == 0
                drain = drained([prefill, decode], [of_prefill, again], tokens)
                asyncio.run(asyncio.wait_for(drain, PATIENCE_S))
                assert decode.ended() == prefill.ended() == 0


async def drained(workers: list[Served], infos: list[WorkerInfo], tokens: list[int]) -> None:
    """Both end while an answer runs, which they let end."""
    fleet = Fleet("secret")

    async def said(rid: str, prompt: list[int] = PROMPT) -> list[TokenEvent]:
        return [one async for one in fleet.generate(asked(rid, prompt))]

    def asked(rid: str, prompt: list[int] = PROMPT, num: int = NUM) -> Ask:
        return Ask(rid, prompt, "", Sampling(ignore_end=True), num)

    async def look() -> None:
        """As a front does all the time."""
        while True:
            await fleet.info_of(infos[1].url)

    with pytest.raises(ApiError, match="no decode and no prefill worker is ready"):
        await said("early")
    for info in infos:
        fleet.add(info)
    assert [one.token for one in await said("r")] == tokens
    with pytest.raises(ApiError, match="not in the vocabulary") as raised:
        await said("wrong", [5, 10_000])
    assert raised.value.status == 400
    stream = fleet.generate(asked("long", num=400))
    first = await anext(stream)
    for worker in workers:
        worker.signal()
    with pytest.raises(aiohttp.ClientResponseError, match="503"):
        await look()
    rest = [one async for one in stream]
    assert len([first, *rest]) == 400
    assert rest[-1].finish == "length"
    with pytest.raises(ApiError) as raised:
        await said("late")
    assert raised.value.status == 503
    await fleet.close()


def test_a_worker_is_asked_at_two_ports_and_dies_at_its_second_signal() -> None:
    mine = ("--parent", str(os.getpid()))
    worker, info = started("prefill", "--name", "p", *mine)
    with worker:
        status, told = get(f"{info.status_url}/health")
        assert (status, told["status"], told["name"]) == (200, "ok", "p")
        with urllib.request.urlopen(f"{info.status_url}/metrics") as answer:
            assert b'prefixkv_pages{node="p",state="free"}' in answer.read()
        assert get(f"{info.url}/health")[0] == 401
        worker.signal()
        worker.signal(signal.SIGINT)
        worker.ended()


def test_a_worker_whose_parent_is_another_does_not_start() -> None:
    with Served("worker", "prefill", "--parent", str(os.getpid() + 1)) as stray:
        assert stray.ended() == 1
        assert not stray.out
