"""What clients of a front and of a proxy can make them hold, and how long they can keep them from
others. Each runs in a process of its own; its memory is read, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import resource
import socket
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.support.patience import PATIENCE_S
from tests.support.processes import Child, children, processor_s


class Memory:
    """What a process takes more than when this was made, at its peak."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        self._before = self._field("VmRSS")

    def grown(self) -> int:
        """Bytes."""
        return self._field("VmHWM") - self._before

    def _field(self, name: str) -> int:
        with open(f"/proc/{self._pid}/status") as file:
            (line,) = [line for line in file if line.startswith(name)]
        return int(line.split()[1]) << 10


MIB = 1 << 20
STANDS_STILL_S = 1.0  # of processor time; it was 5 to 14 s, and is at most two tenths


class Serving(Child):
    """A process that serves HTTP."""

    def __init__(self, main: Callable[..., None], *args: Any) -> None:
        super().__init__(main, *args)
        self.url, self.status_url = self.hello

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, bytes]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", path, raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Its event loop answers all the while: it does little between a question and its answer,
        however long that takes beside other processes."""
        longest, stop = [0.0], threading.Event()

        def ask() -> None:
            while not stop.is_set():
                before_s = processor_s(self.pid)
                url = urlsplit(self.status_url).netloc
                with contextlib.closing(http.client.HTTPConnection(url, timeout=PATIENCE_S)) as one:
                    one.request("GET", "/health")
                    assert one.getresponse().read()
                longest[0] = max(longest[0], processor_s(self.pid) - before_s)
                time.sleep(0.02)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert longest[0] < STANDS_STILL_S


# --- a front --------------------------------------------------------------------------------------


async def _front(pipe: Any) -> None:
    from prefixkv.engines.hf.small import CHAT_TEMPLATE, small_tokenizer
    from prefixkv.serving.text import Texts
    from tests.support.fronts import fronted

    async with fronted(Texts(small_tokenizer(), CHAT_TEMPLATE), context=16_384) as (front, _):
        pipe.send((front.server.url, front.status.url))
        await asyncio.Event().wait()


def _serve_front(pipe: Any) -> None:
    asyncio.run(_front(pipe))


@pytest.fixture(scope="module")
def front() -> Iterator[Serving]:
    with children(Serving) as start:
        made = start(_serve_front)
        answers(made)
        yield made


def answers(front: Serving) -> None:
    status, body = front.post("/v1/completions", {"model": "small", "prompt": "hello"})
    assert status == 200, body


def times(num: int, item: str) -> str:
    """A JSON list of equal items."""
    return "[" + ",".join([item] * num) + "]"


def chat(messages: str, **more: str) -> bytes:
    fields = {"model": '"small"', "max_tokens": "2", "messages": messages, **more}
    return ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()


def completion(prompt: str) -> bytes:
    return f'{{"model":"small","prompt":{prompt}}}'.encode()


EMPTY = '{"role":"user","content":""}'
TEXT = '{"type":"text","text":""}'
ONE = times(1, EMPTY)
NUMBERED = {f"{number:07d}": "1" for number in range(1_000_000)}
HEAVY = {
    "540k messages": lambda: chat(times(540_000, EMPTY)),
    "600k parts": lambda: chat(times(1, f'{{"role":"user","content":{times(600_000, TEXT)}}}')),
    "7M tokens": lambda: completion(times(7_000_000, "1")),
    "1M parameters": lambda: chat(ONE, **NUMBERED),
    "5M stops": lambda: chat(ONE, stop=times(5_000_000, '""')),
    "nested": lambda: chat("[" * 8_000_000),
    "a long bias": lambda: chat(
        ONE, logit_bias="{" + ",".join(f'"{name}":1' for name in NUMBERED) + "}"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HEAVY)
def test_a_body_of_very_many_things(front: Serving, what: str) -> None:
    body = HEAVY[what]()
    assert len(body) <= 16 * MIB
    path = "/v1/chat/completions" if b'"messages"' in body[:100] else "/v1/completions"
    memory = Memory(front.pid)
    with front.watched():
        status, told = front.post(path, body)
    assert status == 400, told
    assert len(told) < 1000
    assert memory.grown() < 256 * MIB
    answers(front)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cache_salt", "user", "stop", "metadata"])
def test_a_text_of_megabytes_is_not_kept(front: Serving, name: str) -> None:
    memory = Memory(front.pid)
    for number in range(20):
        body = {"model": "small", "prompt": "hello", name: f"{number}" * (4 * MIB)}
        status, _ = front.post("/v1/completions", body)
        assert status == (200 if name == "metadata" else 400)
    assert memory.grown() < 96 * MIB


@pytest.mark.slow
def test_a_body_that_is_too_large_is_read_and_not_kept(front: Serving) -> None:
    memory = Memory(front.pid)
    assert front.post("/v1/completions", b"x" * (100 * MIB))[0] == 413
    assert memory.grown() < 64 * MIB


# --- descriptors ----------------------------------------------------------------------------------


async def _with_few_descriptors(pipe: Any, free: int) -> None:
    """A server of this process's own, which counts what is logged."""
    from prefixkv.serving.config import ListenSettings
    from prefixkv.serving.http import json_response, make_app
    from prefixkv.serving.status import bind

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)

    async def show(_: Request) -> Response:
        return json_response(lines)

    app = make_app([Route("/lines", show)])
    server, status = bind(app, make_app([Route("/health", show)]), ListenSettings())
    most = len(os.listdir("/proc/self/fd")) + free
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    await status.start()
    await server.start()
    pipe.send((server.url, status.url))
    await asyncio.Event().wait()


def _serve_with_few_descriptors(pipe: Any, free: int) -> None:
    asyncio.run(_with_few_descriptors(pipe, free))


def test_without_descriptors_new_connections_wait_and_others_go_on() -> None:
    with children(Serving) as start:
        server = start(_serve_with_few_descriptors, 30)
        where = urlsplit(server.url)
        kept = http.client.HTTPConnection(where.netloc, timeout=PATIENCE_S)

        def lines() -> list[str]:
            kept.request("GET", "/lines")
            found: list[str] = json.loads(kept.getresponse().read())
            return found

        with contextlib.closing(kept):
            assert lines() == []
            idle = [socket.create_connection((where.hostname, where.port)) for _ in range(60)]
            try:
                while not (told := lines()):
                    pass
                assert "takes no new connections for now" in told[0]
                for _ in range(200):
                    assert lines() == told
                # Probes come through all the while.
                for _ in range(5):
                    probe = http.client.HTTPConnection(urlsplit(server.status_url).netloc)
                    with contextlib.closing(probe):
                        probe.request("GET", "/health")
                        assert probe.getresponse().status == 200
            finally:
                for one in idle:
                    one.close()
            other = http.client.HTTPConnection(where.netloc, timeout=PATIENCE_S)
            with contextlib.closing(other):
                other.request("GET", "/lines")
                assert other.getresponse().status == 200


# --- a proxy --------------------------------------------------------------------------------------

TRACE = 'Traceback (most recent call last):\n  File "/srv/engine/core.py", line 7\nat 10.1.2.3:8000'


async def _proxy(pipe: Any, server: str) -> None:
    from prefixkv.proxy.config import ProxyConfig, ServerAt
    from prefixkv.proxy.server import Proxy
    from prefixkv.serving.config import ListenSettings

    at = [ServerAt(server, "one")]
    made = Proxy(ProxyConfig(listen=ListenSettings()), at, at)
    await made.start()
    pipe.send((made.server.url, made.status.url))
    await asyncio.Event().wait()


async def _engine(pipe: Any) -> None:
    """A server of an engine, by the `user` of what it is asked."""
    from prefixkv.serving.config import Limits
    from prefixkv.serving.http import HttpServer, make_app

    zeros = zlib.compressobj(9, wbits=31)
    bomb = b"".join(zeros.compress(bytes(MIB)) for _ in range(600)) + zeros.flush()

    async def say(request: Request) -> Response:
        raw = await request.body()
        match json.loads(raw).get("user") if len(raw) < MIB else None:
            case "bomb":
                return Response(bomb, headers={"content-encoding": "gzip"})
            case "long":
                return StreamingResponse(endless(), media_type="application/json")
            case "event":
                return StreamingResponse(endless(), media_type="text/event-stream")
            case "trace":
                return Response(TRACE, 500)
            case "trace as json":
                return Response(json.dumps({"error": {"message": TRACE}}), 500)
            case "bad request":
                return Response(json.dumps({"error": {"message": TRACE}}), 400)
            case "key":
                return Response(json.dumps({"error": {"message": "wrong key sk-1"}}), 401)
        return Response(json.dumps({"usage": {"prompt_tokens": 1}}))

    async def endless() -> AsyncGenerator[bytes, None]:
        for _ in range(600):
            yield bytes(MIB)

    async def models(_: Request) -> Response:
        return Response(TRACE, 500)

    routes = [
        Route("/v1/completions", say, methods=["POST"]),
        Route("/v1/chat/completions", say, methods=["POST"]),
        Route("/v1/models", models),
    ]
    engine = HttpServer(make_app(routes), "127.0.0.1", 0, Limits())
    await engine.start()
    pipe.send((engine.url, ""))
    await asyncio.Event().wait()


def _serve_proxy(pipe: Any, server: str) -> None:
    asyncio.run(_proxy(pipe, server))


def _serve_engine(pipe: Any) -> None:
    asyncio.run(_engine(pipe))


@pytest.fixture(scope="module")
def proxy() -> Iterator[Serving]:
    with children(Serving) as start:
        made = start(_serve_proxy, start(_serve_engine).url)
        assert made.post("/v1/completions", {"prompt": "hello"})[0] == 200
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("user", ["bomb", "long", "event"])
def test_what_a_server_says_is_not_unpacked_and_not_held_without_bound(
    proxy: Serving, user: str, stream: bool
) -> None:
    memory = Memory(proxy.pid)
    with contextlib.suppress(http.client.HTTPException), proxy.watched():
        proxy.post("/v1/completions", {"prompt": "hello", "user": user, "stream": stream})
    assert memory.grown() < 300 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("user", ["trace", "trace as json", "bad request", "key"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("prompt", ["hello", ["one", "two"]])
def test_what_goes_wrong_on_a_server_is_not_told_to_a_client(
    proxy: Serving, user: str, path: str, prompt: Any
) -> None:
    what = "messages" if "chat" in path else "prompt"
    status, body = proxy.post(path, {what: prompt, "user": user})
    assert status >= 400
    told = json.loads(body)["error"]["message"]
    for inner in ("Traceback", "core.py", "10.1.2.3", "127.0.0.1", "http://", "sk-1"):
        assert inner not in told
    assert "(request " in told
