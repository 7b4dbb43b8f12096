"""Workers as processes by themselves, and a fleet of them in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from pathlib import Path

import msgspec
import pytest

from prefixkv.engines.hf.requests import Sampling
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import ApiError
from prefixkv.serving.process import READY
from prefixkv.serving.wire import Ask, TokenEvent, WorkerInfo
from tests.support.patience import PATIENCE_S
from tests.support.served import Expected, Served, get

KEY = {"PREFIXKV_API_KEY": "secret"}
PROMPT = list(range(300, 350))


def info_of(worker: Served) -> WorkerInfo:
    return msgspec.json.decode(worker.line(READY)[len(READY) :], type=WorkerInfo)


async def said(fleet: Fleet, ask: Ask) -> list[TokenEvent]:
    return [one async for one in fleet.generate(ask)]


def asked(rid: str, num: int = 12) -> Ask:
    return Ask(rid, PROMPT, "", Sampling(ignore_end=True), num)


def test_workers_of_a_file_answer_a_fleet_and_drain(tmp_path: Path, expected: Expected) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('name = "d"\npage_size = 8\nthreads = 1\n[control]\nheartbeat_s = 0.5\n')
    options = ("--page-size", "8", "--threads", "1", "--drain-timeout-s", "100")
    with (
        Served(
            "worker", "decode", "--config", str(file), "--drain-timeout-s", "100", **KEY
        ) as decode,
        Served("worker", "prefill", "--name", "p", *options, **KEY) as prefill,
    ):
        infos = info_of(decode), info_of(prefill)
        assert [info.name for info in infos] == ["d", "p"]
        assert infos[0].page_size == 8

        async def main() -> None:
            fleet = Fleet("secret")
            with pytest.raises(ApiError, match="no decode and no prefill worker is ready"):
                await said(fleet, asked("early"))
            for info in infos:
                fleet.add(info)
            answers = [await said(fleet, asked(f"r{i}")) for i in range(2)]
            tokens = expected.tokens(PROMPT, 12)
            assert [[one.token for one in answer] for answer in answers] == [tokens] * 2
            assert answers[1][-1].hit_tokens == 48
            assert answers[1][-1].finish == "length"
            wrong = msgspec.structs.replace(asked("wrong"), tokens=[5, 10_000])
            with pytest.raises(ApiError, match="not in the vocabulary") as raised:
                await said(fleet, wrong)
            assert raised.value.status == 400
            # Both drain while an answer runs: it ends, and then they do.
            stream = fleet.generate(asked("long", 400))
            first = await anext(stream)
            for worker in (prefill, decode):
                worker.signal()
            rest = [one async for one in stream]
            assert len([first, *rest]) == 400
            assert rest[-1].finish == "length"
            with pytest.raises(ApiError) as raised:
                await said(fleet, asked("late"))
            assert raised.value.status == 503
            await fleet.close()

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
        assert decode.ended() == prefill.ended() == 0


def test_a_worker_is_asked_at_two_ports_and_dies_at_its_second_signal() -> None:
    mine = ("--parent", str(os.getpid()))
    with Served("worker", "prefill", "--threads", "1", "--name", "p", *mine, **KEY) as worker:
        info = info_of(worker)
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
