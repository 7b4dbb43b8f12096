"""The server that all of ours are, over real sockets; a client that leaves in the very turns of
the event loop in which something comes for it."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.cache.events import EventBatch
from prefixkv.errors import ConfigError
from prefixkv.serving.client import wait_set
from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.http import (
    ApiError,
    App,
    HttpServer,
    Stream,
    count_samples,
    decode_body,
    json_response,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.log import Outcomes, current_record
from prefixkv.serving.wire import Ask, EventTap, TokenEvent
from prefixkv.serving.worker import DecodeWorker, _OpenRequest
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.scenes import in_loop, played_by

LIMITS = Limits(1000, NEVER_S, NEVER_S, NEVER_S, NEVER_S)


class Site:
    """Handlers that tell what became of them."""

    def __init__(
        self, limits: Limits = LIMITS, api_key: str = "", outcomes: Outcomes | None = None
    ) -> None:
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.go_on = asyncio.Event()
        self.limits = limits
        routes = [
            *(Route(f"/{one.__name__}", one, methods=["GET", "POST"])
              for one in (self.fail, self.refuse, self.stream, self.wait)),
            *(Route(f"/{one.__name__}", one, methods=["POST"]) for one in (self.echo, self.keep)),
        ]  # fmt: skip
        app = App(routes, api_key, ["/refuse"], limits.max_requests_per_client, outcomes)
        self.server = HttpServer(app, "127.0.0.1", 0, limits)

    async def echo(self, request: Request) -> Response:
        line = current_record()
        line.fields["id"] = "r1"
        line.mark("asked")
        if outcome := request.headers.get("outcome"):
            line.fields["outcome"] = outcome
        return json_response(decode_body(await read_body(request, self.limits), dict[str, Any]))

    async def keep(self, request: Request) -> Response:
        body = await read_body(request, self.limits)
        count_samples(request, int(request.headers.get("samples", "1")))
        self.ended.put_nowait("begun")
        await self.go_on.wait()
        return json_response(len(body))

    async def fail(self, _: Request) -> Response:
        raise ZeroDivisionError

    async def refuse(self, _: Request) -> Response:
        raise ApiError(418, "no", code="teapot", param="tea")

    async def stream(self, _: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                yield b"one\n"
                await self.go_on.wait()
                yield b"two\n"
                self.ended.put_nowait("whole")
            except asyncio.CancelledError:
                self.ended.put_nowait("cut")
                raise

        return Stream(pieces(), "text/plain")

    async def wait(self, request: Request) -> Response:
        async def work() -> Response:
            try:
                self.ended.put_nowait("begun")
                await self.go_on.wait()
                return json_response("done")
            except asyncio.CancelledError:
                self.ended.put_nowait("cut")
                raise

        return await run_until_disconnect(request, work())


def serve(
    use: Callable[[Site, httpx.AsyncClient], Awaitable[None]],
    limits: Limits = LIMITS,
    api_key: str = "",
    outcomes: Outcomes | None = None,
) -> None:
    async def main() -> None:
        site = Site(limits, api_key, outcomes)
        await site.server.start()
        async with httpx.AsyncClient(base_url=site.server.url, timeout=PATIENCE_S) as client:
            try:
                await asyncio.wait_for(use(site, client), PATIENCE_S)
            finally:
                await site.server.stop()

    asyncio.run(main())


served = played_by(serve, 2)


def error(answer: httpx.Response) -> tuple[int, str | None]:
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    return answer.status_code, told["code"]


@served()
async def test_every_error_has_openais_form(site: Site, client: httpx.AsyncClient) -> None:
    assert (await client.post("/echo", json={"a": 1})).json() == {"a": 1}
    assert error(await client.get("/nowhere")) == (404, None)
    assert error(await client.get("/echo/")) == (404, None)
    assert error(await client.get("/echo")) == (405, None)
    assert error(await client.get("/fail")) == (500, None)
    assert error(await client.get("/refuse")) == (418, "teapot")
    assert error(await client.post("/echo", content=b"{")) == (400, None)
    assert error(await client.post("/echo", content=b"[1]")) == (400, "invalid_value")


@served()
async def test_a_target_may_name_the_server_too(site: Site, client: httpx.AsyncClient) -> None:
    for begin in (site.server.url, "HTTP://Localhost", ""):
        answer = await client.get("/", extensions={"target": f"{begin}/refuse?a=1".encode()})
        assert error(answer) == (418, "teapot")


@served()
async def test_a_request_keeps_the_id_that_its_client_gave(
    site: Site, client: httpx.AsyncClient
) -> None:
    for path in ("/echo", "/nowhere", "/refuse", "/fail", "/stream"):
        site.go_on.set()
        for text in ("a", "my-id/7:{}", "x" * 128):
            answer = await client.get(path, headers={"x-request-id": text})
            assert answer.headers["x-request-id"] == text
    made = [
        (await client.get("/echo", headers={"x-request-id": text})).headers["x-request-id"]
        for text in ("", "a b", "x" * 129, b"\xe9")
    ]
    assert len({*made}) == 4
    assert {len(one) for one in made} == {32}


@served()
async def test_no_piece_waits_for_the_receipt_of_the_one_before(
    site: Site, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/stream") as answer:
        (connection,) = site.server.state.connections
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        site.go_on.set()
        assert await answer.aread() == b"one\ntwo\n"


@served()
async def test_a_body_that_is_too_large_is_refused_and_its_sender_hears_it(
    site: Site, client: httpx.AsyncClient
) -> None:
    body = json.dumps({"a": "x" * 980}).encode()
    assert (await client.post("/echo", content=body)).status_code == 200
    full = body[:-2] + b"y" * (1000 - len(body)) + body[-2:]
    assert len(full) == 1000
    assert (await client.post("/echo", content=full)).status_code == 200
    too_large = (413, "request_too_large")
    for size in (1001, 20 << 20):
        assert error(await client.post("/echo", content=b"x" * size)) == too_large

    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(50):
            yield b"x" * 100

    assert error(await client.post("/echo", content=chunks())) == too_large
    assert (await client.post("/echo", content=full)).status_code == 200


@pytest.mark.parametrize("more", [0, 300_000])
@served()
async def test_a_head_has_64_kib_or_what_comes_at_once(
    site: Site, client: httpx.AsyncClient, more: int
) -> None:
    begin, end = b"GET /refuse HTTP/1.1\r\nhost: localhost\r\nx: ", b"\r\n\r\n"
    head = begin + b"y" * ((64 << 10) + more - len(begin + end)) + end
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    status = b""
    with contextlib.suppress(ConnectionError):
        writer.write(head)
        await writer.drain()
        status = await reader.readline()
    assert (b" 418 " in status) == (more == 0)
    assert status.startswith(b"HTTP/1.1 4") or not status
    writer.close()


@served(replace(LIMITS, body_timeout_s=0.2))
async def test_a_body_without_end_is_not_read_for_ever(
    site: Site, client: httpx.AsyncClient
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n"
    writer.write(head.encode())
    with contextlib.suppress(ConnectionError):  # its patience ends the test where it is read
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()


@served(api_key="secret")
async def test_without_the_key_nothing_is_answered_but_what_is_open(
    site: Site, client: httpx.AsyncClient
) -> None:
    for said in ("", "Bearer wrong", "secret", "Basic secret"):
        answer = await client.post("/echo", json={}, headers={"authorization": said})
        assert error(answer) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert error(await client.get("/refuse")) == (418, "teapot")
    headers = {"host": "example.org", "origin": "https://example.org"}
    assert error(await client.post("/echo", headers=headers)) == (401, "invalid_api_key")
    for scheme in ("Bearer ", "bearer ", "BEARER  "):  # then any host may ask
        headers["authorization"] = scheme + "secret"
        assert (await client.post("/echo", json={}, headers=headers)).status_code == 200


HOSTS = ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000")
OTHER_HOSTS = (
    "example.org", "localhost.example.org:80", "127.0.0.1.example.org", "localhost@example.org",
    "[::1].example.org", "10.0.0.1", "0.0.0.0:80",
)  # fmt: skip
OTHER_ORIGINS = (
    "http://localhost:2", "http://127.0.0.1:1", "https://localhost:1", "https://example.org",
    "null",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        *(({"host": host}, None) for host in HOSTS),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, None),
        *(({"host": host}, "host_not_allowed") for host in OTHER_HOSTS),
        *(({"host": "localhost:1", "origin": of}, "origin_not_allowed") for of in OTHER_ORIGINS),
    ],
)
@served()
async def test_without_a_key_no_page_of_others_uses_it(
    site: Site, client: httpx.AsyncClient, headers: dict[str, str], code: str | None
) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        answer = await client.request(method, "/echo", headers=headers, content=b"{}")
        told = answer.json().get("error", {"code": None})
        assert told["code"] == code
        assert (answer.status_code == 403) == (code is not None)
        assert [name for name in answer.headers if name.startswith("access-control")] == []


@served()
async def test_a_stream_ends_whole_or_where_its_client_leaves(
    site: Site, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/stream") as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "one"
    assert await site.ended.get() == "cut"
    site.go_on.set()
    assert (await client.get("/stream")).text == "one\ntwo\n"
    assert await site.ended.get() == "whole"


def test_clients_that_leave_their_streams_cost_no_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client that has stopped to read, with pieces on their way to it."""
    filled, go_on = asyncio.Queue[None](), asyncio.Queue[None]()

    async def stream(_: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            for _ in range(400):
                yield bytes(100)
            filled.put_nowait(None)
            await go_on.get()
            for _ in range(40):
                yield bytes(100)

        return Stream(pieces(), "text/plain")

    async def main() -> None:
        server = HttpServer(App([Route("/", stream)]), "127.0.0.1", 0, LIMITS)
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        await server.start()
        loop = asyncio.get_running_loop()
        for _ in range(5):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                await filled.get()
            go_on.put_nowait(None)
            while server.state.tasks:
                await asyncio.sleep(0.001)
        await server.stop()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert not caplog.records


@pytest.mark.parametrize("way", ["stream", "whole", "last"])
@in_loop
async def test_a_client_that_reads_no_more_is_cut_without_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """`last`: the server closes the connection behind its answer, which nobody reads."""
    begun = asyncio.Event()

    async def answer(_: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            while True:
                await asyncio.sleep(0)
                yield bytes(1 << 20)

        begun.set()
        return Stream(pieces(), "text/plain") if way == "stream" else Response(bytes(32 << 20))

    limits = replace(LIMITS, write_timeout_s=0.1)
    server = HttpServer(App([Route("/", answer)]), "127.0.0.1", 0, limits)
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    last = b"connection: close\r\n" if way == "last" else b""
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + last + b"\r\n")
    await begun.wait()
    while server.state.tasks or server.state.connections:
        await asyncio.sleep(0.001)
    writer.transport.abort()
    await server.stop()
    assert not caplog.records


@in_loop
async def test_a_client_that_reads_slowly_but_steadily_is_served() -> None:
    """Its window never holds a whole segment of the server's, so the kernel probes all the time."""

    async def answer(_: Request) -> Response:
        async def pieces() -> AsyncGenerator[bytes, None]:
            while True:
                await asyncio.sleep(0)
                yield bytes(4096)

        return Stream(pieces(), "text/plain")

    limits = replace(LIMITS, write_timeout_s=0.5)
    server = HttpServer(App([Route("/", answer)]), "127.0.0.1", 0, limits)
    await server.start()
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(80):
            assert await loop.sock_recv(client, 4096)
            await asyncio.sleep(0.05)
        assert server.state.connections
    await server.stop()


@served()
async def test_work_for_a_client_that_has_left_ends(site: Site, client: httpx.AsyncClient) -> None:
    asking = asyncio.create_task(client.get("/wait"))
    assert await site.ended.get() == "begun"
    asking.cancel()
    assert await site.ended.get() == "cut"
    site.go_on.set()
    assert (await client.get("/wait")).json() == "done"


@served(replace(LIMITS, max_requests_per_client=2))
async def test_each_client_has_its_own_limit_of_open_requests(
    site: Site, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/stream") as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == "one"
        asking = asyncio.create_task(client.get("/wait"))
        assert await site.ended.get() == "begun"
        refused = await client.get("/wait")
        assert error(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=site.server.url, transport=elsewhere) as other:
            assert (await other.post("/echo", json={})).status_code == 200
        asking.cancel()
        assert await site.ended.get() == "cut"
        while (await client.post("/echo", json={})).status_code == 429:
            await asyncio.sleep(0.001)  # the one that has left is still being ended
    assert await site.ended.get() == "cut"
    site.go_on.set()
    while (await client.get("/stream")).status_code == 429:
        await asyncio.sleep(0.001)
    # Those that were refused, and that failed, are not counted on.
    for _ in range(3):
        assert (await client.get("/refuse")).status_code == 418
        assert error(await client.get("/fail"))[0] == 500
    answers = await asyncio.gather(client.get("/wait"), client.get("/wait"))
    assert [answer.json() for answer in answers] == ["done"] * 2


@served(replace(LIMITS, max_requests_per_client=6))
async def test_each_sample_counts_but_one_of_a_request_alone(
    site: Site, client: httpx.AsyncClient
) -> None:
    async def ask(num: int) -> httpx.Response:
        return await client.post("/keep", content=b"{}", headers={"samples": str(num)})

    kept = [asyncio.create_task(ask(num)) for num in (3, 2)]
    for _ in kept:
        assert await site.ended.get() == "begun"
    for num in (2, 6):
        refused = await ask(num)
        assert error(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert f"{num} answers beside " in refused.text
    never = await ask(7)
    assert error(never) == (400, "invalid_value")
    assert "retry-after" not in never.headers
    kept.append(asyncio.create_task(ask(1)))
    assert await site.ended.get() == "begun"
    site.go_on.set()
    for one in kept:
        assert (await one).status_code == 200
    while (await ask(6)).status_code == 429:
        await asyncio.sleep(0.001)


@served(replace(LIMITS, head_timeout_s=0.2, body_timeout_s=0.2))
async def test_what_does_not_come_is_not_waited_for(site: Site, client: httpx.AsyncClient) -> None:
    for sent in (b"", b"GET /wait HT", b"GET /wait HTTP/1.1\r\nhost: localhost\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()
    # On a slow machine a head may come too late: then it is sent again.
    body = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
    told = b""
    while not told:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
        writer.write(body)
        told = await reader.read()
        writer.close()
    assert told.startswith(b"HTTP/1.1 408 ")
    # The head of a second request, on a connection that had one.
    told = b""
    while not told.endswith(b"teapot"):
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
        writer.write(b"GET /refuse HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with contextlib.suppress(asyncio.IncompleteReadError):
            told = await reader.readuntil(b"teapot")
    writer.write(b"GET /re")
    await reader.read()
    writer.close()


@served(replace(LIMITS, head_timeout_s=0.2))
async def test_the_body_of_a_request_that_is_answered_is_not_waited_for(
    site: Site, client: httpx.AsyncClient
) -> None:
    head, body = b"GET /refuse HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n", bytes(10)
    for num in (1, 10):  # without its end; with it, but no further request follows
        told = b""
        while not told.endswith(b"teapot"):
            reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
            writer.write(head)
            with contextlib.suppress(asyncio.IncompleteReadError):
                told = await reader.readuntil(b"teapot")
        writer.write(body[:num])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


@pytest.mark.parametrize("path", ["stream", "refuse"])
@served()
async def test_what_is_no_body_behind_an_answer_costs_no_line_of_the_log(
    site: Site, client: httpx.AsyncClient, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    head = f"GET /{path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"no number\r\n")
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()
    assert not caplog.records


@in_loop
async def test_stopping_waits_for_what_is_answered_and_then_cuts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site = Site()
    await site.server.start()
    async with httpx.AsyncClient(base_url=site.server.url, timeout=PATIENCE_S) as client:
        asking = asyncio.create_task(client.get("/wait"))
        assert await site.ended.get() == "begun"
        stopping = asyncio.create_task(site.server.stop(PATIENCE_S))
        while True:  # until it takes no more
            try:
                socket.create_connection(("127.0.0.1", site.server.port)).close()
            except ConnectionRefusedError:
                break
            await asyncio.sleep(0.01)
        site.go_on.set()
        assert (await asking).json() == "done"
        await stopping
    site = Site()
    await site.server.start()
    async with httpx.AsyncClient(base_url=site.server.url, timeout=PATIENCE_S) as client:
        asking = asyncio.create_task(client.get("/wait"))
        assert await site.ended.get() == "begun"
        await site.server.stop()
        with pytest.raises(httpx.HTTPError):
            await asking
        assert await site.ended.get() == "cut"
    assert not caplog.records  # each connection of a worker's front, at each of its ends


@in_loop
async def test_stopping_does_not_wait_for_ever_for_an_answer_that_ignores_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prefixkv.serving.http._CUT_S", 0.1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def deaf(_: Request) -> Response:
        begun.set()
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()
        return Response()

    server = HttpServer(App([Route("/", deaf)]), "127.0.0.1", 0, LIMITS)
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await begun.wait()
    await server.stop()
    assert "1 answers that do not end" in caplog.text
    go_on.set()
    writer.transport.abort()


def test_an_address_that_others_reach_needs_a_key_and_one_in_use_is_an_error() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="api_key"):
            ListenSettings(host=host)
        with pytest.raises(ConfigError, match="status_host"):
            ListenSettings(status_host=host)
        assert ListenSettings(host=host, api_key="secret").host == host
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert ListenSettings(host=host).host == host
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be bound"):
            HttpServer(App([]), "127.0.0.1", port, LIMITS)


def test_a_stream_whose_client_left_before_it_began_gives_back_what_it_needs() -> None:
    begun: list[str] = []
    ends: list[str] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        begun.append("begun")
        yield b""

    async def end() -> None:
        ends.append("end")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        await asyncio.Event().wait()  # a client that does not read

    async def main() -> None:
        await Stream(pieces(), "text/plain", end)({}, receive, send)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert (begun, ends) == ([], ["end"])


Source = tuple[AsyncGenerator[bytes, None], Callable[[], None]]
"""What is streamed, and what has more of it come."""


def answer() -> Source:
    one = _OpenRequest(Ask("r", [1], "", max_new_tokens=2000))
    return DecodeWorker._lines(None, one), lambda: one.queue_output(TokenEvent(token=1))  # type: ignore[arg-type]


def feed() -> Source:
    tap = EventTap(lambda snapshot: EventBatch("w", 0, 0.0, ()), lambda call: call())
    return tap.frames(), lambda: tap._deliver(b"frame", True)


async def is_noticed(make: Callable[[], Source], turns: int) -> bool:
    """Whether the stream ends where the client leaves `turns` turns after something has come; so
    many before, if it is negative."""
    lines, come = make()
    gone, ended = asyncio.Event(), asyncio.Event()
    begun = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        begun.set()

    async def end() -> None:
        ended.set()

    stream = Stream(lines, "x", end=end)
    task = asyncio.ensure_future(stream({}, receive, send))
    await begun.wait()
    for _ in range(10):  # it waits for what comes first
        await asyncio.sleep(0)
    first, second = (gone.set, come) if turns < 0 else (come, gone.set)
    first()
    for _ in range(abs(turns)):
        await asyncio.sleep(0)
    second()
    for _ in range(50):  # it goes on coming
        await asyncio.sleep(0)
        come()
        if ended.is_set():
            break
    noticed = ended.is_set()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    return noticed


@pytest.mark.parametrize("make", [answer, feed])
def test_a_client_that_leaves_as_something_comes_is_noticed(make: Callable[[], Source]) -> None:
    found = {turns: asyncio.run(is_noticed(make, turns)) for turns in range(-4, 7)}
    assert all(found.values()), found


@in_loop
async def test_a_wait_ends_in_time_and_when_it_is_set() -> None:
    event = asyncio.Event()
    await wait_set(event, 0.01)
    assert not event.is_set()
    event.set()
    await asyncio.wait_for(wait_set(event, 1e6), 60)
