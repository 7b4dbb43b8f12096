"""Workers as child processes, where the process says what no worker of ours does."""

import asyncio
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import pytest
import yarl
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict, CIMultiDictProxy

from prefixkv.engines.hf.requests import Sampling
from prefixkv.errors import ConfigError
from prefixkv.serving import interrupts, launch
from prefixkv.serving.config import FrontConfig, ServeConfig
from prefixkv.serving.fleet import Fleet, WorkerLostError
from prefixkv.serving.http import ApiError
from prefixkv.serving.launch import Child, Followed, _signal
from prefixkv.serving.wire import Ask, TokenEvent, WorkerInfo
from prefixkv.serving.worker import READY
from tests.support.patience import PATIENCE_S
from tests.support.scenes import in_loop, until

INFO = WorkerInfo(
    role="decode", name="d", url="", status_url="", endpoint="", model="m", identity="m 0",
    page_size=16, num_pages=1, context=16, vocab_size=2, life="1", pid=1,
)  # fmt: skip

URL = yarl.URL("http://d")
CONNECTION = ConnectionKey("d", 80, False, True, None, None, None)
ASKED = aiohttp.RequestInfo(URL, "GET", CIMultiDictProxy(CIMultiDict()), URL)


def test_a_worker_that_the_fleet_does_not_take_is_an_error_and_ends() -> None:
    line = READY + msgspec.json.encode(INFO).decode()
    program = f"import time; print({line!r}, flush=True); time.sleep(1e6)"

    def refuse(info: WorkerInfo) -> None:
        assert info == INFO
        raise ConfigError("another model")

    async def main() -> None:
        gone: list[tuple[str, str]] = []
        fleet = SimpleNamespace(add=refuse, remove=lambda *life: gone.append(life))
        child = Child("decode", os.environ, fleet, [sys.executable, "-c", program])
        with pytest.raises(ConfigError, match="another model"):
            await child.ready
        process = child._process
        await child.end(0)
        assert process is not None
        assert process.returncode is not None
        assert gone == [("d", "1")]

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


@in_loop
async def test_a_child_loads_no_command_line_and_its_settings_are_refused_as_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    environ = {**os.environ, "PREFIXKV_PORT": "65536", "PYTHONPROFILEIMPORTTIME": "1"}
    child = Child("decode", environ, SimpleNamespace())
    with pytest.raises(ConfigError, match="PORT"):
        await child.ready
    await child.end(0)
    loaded = {line.rpartition("|")[2].strip() for line in capfd.readouterr().err.splitlines()}
    assert "prefixkv.serving.config" in loaded
    assert not {"typer", "rich.console", "prefixkv.cli"} & loaded


@in_loop
async def test_a_fleet_that_is_closed_takes_no_worker() -> None:
    """One may become ready while all are being ended."""
    fleet = Fleet("key")
    fleet.add(INFO)
    assert fleet.workers == [INFO]
    await fleet.close()
    fleet.add(INFO)
    assert not fleet.workers


def test_a_child_says_that_it_is_started_and_that_it_is_given_up() -> None:
    line = READY + msgspec.json.encode(INFO).decode()

    async def main() -> None:
        under_way: list[bool] = []
        note = lambda *_: under_way.append(child.gone_s is not None)  # noqa: E731
        within = [sys.executable, "-c", f"print({line!r}, flush=True)"]
        child = Child("decode", os.environ, SimpleNamespace(add=note, remove=note), within)
        # It ends at once, and is started again.
        await until(lambda: len(under_way) == 4)
        await child.end(0)
        assert all(under_way)
        assert child.gone_s is None

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_what_cannot_be_written_ends_neither_a_worker_nor_its_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library of a worker says something on stdout, and the disk of the log is full."""
    line = READY + msgspec.json.encode(INFO).decode()
    program = f"print('hello'); print({line!r}, flush=True); __import__('time').sleep(1e6)"

    async def main() -> None:
        here: list[str] = []
        fleet = SimpleNamespace(add=lambda info: here.append(info.name), remove=lambda *_: None)
        child = Child("decode", os.environ, fleet, [sys.executable, "-c", program])
        await child.ready
        assert here == ["d"]
        await child.end(0)

    def write(_: str) -> int:
        raise OSError(errno.ENOSPC, "no space")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(write=write, flush=lambda: None))
    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    interrupts.say("it is ready")


class Asleep(launch.Launch[ServeConfig]):
    """Its one worker says nothing."""

    def __init__(self) -> None:
        listen = replace(ServeConfig().listen, port=0, status_port=0)
        super().__init__(replace(ServeConfig(), listen=listen), "key")

    async def _begin(self, fleet: Fleet, name: str) -> None:
        program = [sys.executable, "-c", "import time; time.sleep(1e6)"]
        self._workers.append(Child("decode", os.environ, fleet, program))
        await until(lambda: self.process is not None)

    @property
    def process(self) -> Any:
        (worker,) = self._workers
        return cast(Child, worker)._process


@in_loop
async def test_what_the_front_cannot_load_ends_the_workers_that_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeper = Asleep()

    def fail(folder: str) -> None:
        assert sleeper.process.returncode is None, "it starts meanwhile"
        raise ConfigError("no template")

    monkeypatch.setattr(launch, "load_texts", fail)
    monkeypatch.setattr(launch, "_END_S", 0.1)
    with pytest.raises(ConfigError, match="no template"):
        await sleeper.run()
    assert sleeper.process.returncode is not None
    assert gc.isenabled()


def test_a_start_that_is_stopped_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "_END_S", 0.1)

    async def main() -> int:
        sleeper = Asleep()
        asyncio.get_running_loop().call_later(0.2, sleeper.signals.stop.set)
        return await sleeper.run()

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE_S)) == 0
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


class ByHand:
    """A fleet before workers that were started by hand, and what each URL says of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = "/models/m"
        self.fleet, self.at = Fleet("key"), dict[str, WorkerInfo | aiohttp.ClientError]()
        monkeypatch.setattr(self.fleet, "info_of", self._info_of)
        monkeypatch.setattr(launch, "_LOOK_S", 0.01)

    async def _info_of(self, url: str) -> WorkerInfo:
        said = self.at.get(url, aiohttp.ClientConnectionError(f"nobody is at {url}"))
        if isinstance(said, Exception):
            raise said
        return msgspec.structs.replace(said, url=url)

    def says(self, url: str, **info: str) -> None:
        self.at[url] = msgspec.structs.replace(INFO, **info)

    def taken(self) -> set[str]:
        return {info.name for info in self.fleet.workers}

    async def follow(self, *urls: str) -> list[Followed]:
        followed = [Followed(url, self.fleet, self.model) for url in urls]
        await asyncio.sleep(0.1)
        return followed

    async def end(self, followed: list[Followed]) -> None:
        await asyncio.gather(*(one.end(0) for one in followed))
        await self.fleet.close()


@in_loop
async def test_workers_are_replaced_by_those_of_another_model_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hands = ByHand(monkeypatch)
    hands.says("http://a", name="a", identity="old")
    hands.says("http://b", name="b", identity="old")
    followed = await hands.follow("http://a", "http://b")
    assert hands.taken() == {"a", "b"}
    hands.says("http://a", name="a", identity="new", life="2")
    await until(lambda: hands.taken() == {"b"})  # a's former life is over
    hands.says("http://b", name="b", identity="new", life="2")
    await until(lambda: hands.taken() == {"a", "b"})  # a is taken once it fits
    assert {info.identity for info in hands.fleet.workers} == {"new"}
    await hands.end(followed)


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (aiohttp.ClientConnectorError(CONNECTION, ConnectionRefusedError(111, "refused")), True),
        (aiohttp.ClientResponseError(ASKED, (), status=503), True),  # it drains
        (aiohttp.ClientConnectorError(CONNECTION, OSError(113, "no route")), False),
        (aiohttp.SocketTimeoutError(), False),
    ],
)
@in_loop
async def test_requests_wait_for_a_worker_that_is_started_again(
    monkeypatch: pytest.MonkeyPatch, error: aiohttp.ClientError, ends: bool
) -> None:
    hands = ByHand(monkeypatch)
    hands.says("http://d", name="d")
    hands.says("http://p", name="p", role="prefill")
    followed = await hands.follow("http://d", "http://p")
    hands.fleet.starts = followed
    hands.at["http://d"] = error
    await asyncio.sleep(0.1)
    assert hands.taken() == ({"p"} if ends else {"d", "p"})
    asking = asyncio.create_task(hands.fleet.wait_for_workers())
    await asyncio.sleep(0.1)
    assert asking.done() is not ends
    hands.says("http://d", name="d", life="2")
    await asking
    await hands.end(followed)


@in_loop
async def test_a_request_waits_for_a_worker_of_which_the_front_does_not_know_yet_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All tries found it gone within 10 ms, and its client read 503."""
    hands = ByHand(monkeypatch)
    hands.says("http://d", name="d")
    hands.says("http://p", name="p", role="prefill")
    hands.fleet.starts = followed = await hands.follow("http://d", "http://p")
    refused = aiohttp.ClientConnectorError(CONNECTION, ConnectionRefusedError(111, "refused"))
    monkeypatch.setattr(launch, "_LOOK_S", 0.3)
    await asyncio.sleep(0.05)
    hands.at["http://d"] = refused

    async def lost(*_: object) -> AsyncGenerator[TokenEvent, None]:
        raise WorkerLostError("d was lost")
        yield

    monkeypatch.setattr("prefixkv.serving.fleet.outputs_of", lost)
    asked = Ask("r", [1, 2], "", Sampling(), 1, 1)
    asking = asyncio.ensure_future(anext(hands.fleet.generate(asked)))
    await asyncio.wait((asking,), timeout=1.5)
    assert not asking.done()
    assert followed[0].gone_s is not None
    asking.cancel()
    await hands.end(followed)


@in_loop
async def test_requests_wait_half_a_minute_for_a_worker_that_nothing_starts() -> None:
    """Who has started it by hand may have ended it for good."""
    front = launch.FrontLaunch(FrontConfig(workers="http://127.0.0.1:9"))
    fleet = Fleet("key", front.config.start_timeout_s)
    await front._begin(fleet, "")
    (worker,) = fleet.starts = front._workers
    worker.gone_s = time.monotonic() - 31
    with pytest.raises(ApiError, match="no decode and no prefill worker is ready"):
        await asyncio.wait_for(fleet.wait_for_workers(), 1)
    await worker.end(0)
    await fleet.close()


@in_loop
async def test_a_worker_with_the_name_of_another_one_does_not_take_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hands = ByHand(monkeypatch)
    hands.says("http://a", life="1")
    hands.says("http://b", life="2")
    followed = await hands.follow("http://a", "http://b")
    assert [info.url for info in hands.fleet.workers] == ["http://a"]
    (line,) = [text for text in caplog.messages if "http://b" in text]
    assert "not taken: http://a has its name, 'd'" in line
    hands.fleet.members["d"].silent = True  # it may have moved
    await until(lambda: hands.fleet.workers[0].url == "http://b")
    await hands.end(followed)


@in_loop
async def test_why_a_worker_is_not_reached_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hands = ByHand(monkeypatch)
    with caplog.at_level(logging.WARNING):
        followed = await hands.follow("http://a")
        (line,) = caplog.messages
        assert "http://a is not taken: nobody is at http://a" in line
        hands.says("http://a")
        await until(lambda: bool(hands.fleet.workers))
    await hands.end(followed)


@pytest.mark.parametrize(
    ("folder", "model"), [("", "m"), ("/models/m", "small model made from seed 0")]
)
@in_loop
async def test_a_front_without_the_workers_model_takes_none(
    folder: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would make tokens of another model."""
    hands = ByHand(monkeypatch)
    hands.model = folder
    hands.says("http://a", model=model)
    followed = await hands.follow("http://a")
    assert not hands.fleet.workers
    assert f"its model is {model!r}" in caplog.text
    await hands.end(followed)


def test_a_signal_to_a_child_that_has_ended_leaves_its_status_to_who_waits() -> None:
    """asyncio waits for it in a thread, and logs a child that another call has taken."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type]
        assert child.returncode is None
        assert os.waitpid(child.pid, 0) == (child.pid, 7 << 8)
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type] # nothing has its number any more
        child.returncode = 7
