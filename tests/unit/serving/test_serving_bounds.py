"""What clients of a front can make it hold, and how long they can keep it from others. It runs in a
process of its own; its memory is read, and others are served meanwhile."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.patience import PATIENCE_S
from tests.support.processes import Child, children


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


EMPTY, TEXT = '{"role":"user","content":""}', '{"type":"text","text":""}'
PARAMETERS = {f"{number:07d}": "1" for number in range(1_000_000)}
HEAVY = {
    "messages": lambda: chat(times(540_000, EMPTY)),
    "parts": lambda: chat(times(1, f'{{"role":"user","content":{times(600_000, TEXT)}}}')),
    "tokens": lambda: completion(times(7_000_000, "1")),
    "parameters": lambda: chat(times(1, EMPTY), **PARAMETERS),
    "lists": lambda: completion(times(5_000_000, "[]")),
    "brackets": lambda: chat("[" * 8_000_000),
    "characters": lambda: completion(
        json.dumps("a" * (4 * MIB)) + ',"user":"' + "u" * (4 * MIB) + '"'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", HEAVY)
def test_a_body_of_very_many_things(front: Serving, what: str) -> None:
    body = HEAVY[what]()
    assert len(body) <= 16 * MIB
    path = "/v1/chat/completions" if b'"messages"' in body[:100] else "/v1/completions"
    memory = Memory(front.pid)
    for _ in range(2):
        status, told = front.post(path, body)
        assert status == 400, told
        assert len(told) < 1000
    assert memory.grown() < 256 * MIB
    answers(front)


@pytest.mark.slow
def test_a_body_that_is_too_large_is_read_and_not_kept(front: Serving) -> None:
    memory = Memory(front.pid)
    assert front.post("/v1/completions", b"x" * (100 * MIB))[0] == 413
    assert memory.grown() < 64 * MIB


# --- descriptors ----------------------------------------------------------------------------------


async def _with_few_descriptors(pipe: Any, free: int) -> None:
    """A server of this process's own, which counts what is logged."""
    from prefixkv.serving.config import Limits
    from prefixkv.serving.http import App, HttpServer, json_response

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)

    async def show(_: Request) -> Response:
        return json_response(lines)

    server, status = (
        HttpServer(App([Route(path, show)]), "127.0.0.1", 0, Limits())
        for path in ("/lines", "/health")
    )
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
