"""The HTTP servers of a process: bounds on connections, bodies and times, records of requests, and
errors in OpenAI's form.

A handler takes a Starlette `Request` and returns a `Response`. `read_body` reads what was sent,
`Stream` sends an answer piece by piece, `run_until_disconnect` computes an answer in one body; the
last two cancel the work for a client that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Sequence
from email.utils import formatdate
from functools import partial
from typing import Any, Final, TypeVar

import h11
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from prefixkv.errors import ConfigError
from prefixkv.serving.api import ApiError as ApiError
from prefixkv.serving.config import Limits, ListenSettings
from prefixkv.serving.log import HEADER, Outcomes, Rate, RequestFile, begin_record, current_record
from prefixkv.serving.tracing import current, make_tracing
from prefixkv.settings import is_loopback_host

logger = logging.getLogger("prefixkv.http")

_HEAD_BYTES: Final = 64 << 10
_OPEN_FILES: Final = 65_536
_FULL_PAUSE_S: Final = 0.1  # before another look whether there are fewer connections
_CUT_S: Final = 5.0  # for what a cancelled answer still does
_END_PAUSE_S: Final = 0.01  # before another look whether all answers have ended
_ACKED: Final = slice(120, 128)  # of the kernel's `struct tcp_info`: `tcpi_bytes_acked`
_TAKE: Final = "prefixkv.take"
_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")
_SERVER: Final = re.compile(r"(?i)^https?://[^/]*")  # of a target in absolute form
_FIELD: Final = re.compile(
    r"Object (?:contains (unknown)|missing required) field `(.*)`", re.DOTALL
)
_THINGS: Final = 1 << 17
# So many and one more outside of texts, in one look that never goes back.
_MANY: Final = re.compile(
    rb'(?:(?:[^"\[{:]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?)*+[\[{:]){%d}+' % (_THINGS + 1), re.DOTALL
)

# Clients cause these lines: by what is no HTTP, and by leaving a stream or reading no more of it.
_CAUSED: Final = re.compile(r"socket.send\(\) raised|ASGI callable returned without completing")
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
for _name in ("uvicorn.error", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: not _CAUSED.match(str(record.msg)))
_full_lines = Rate(1.0, 1 / 60)

T = TypeVar("T")


# --- applications ---------------------------------------------------------------------------------


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class App:
    """Routes with a key, a bound on what one client asks at once, records of requests, and errors
    in OpenAI's form.

    Args:
        api_key: what `Authorization: Bearer ...` must carry. "": no key; then only programs of this
            machine and pages of this server itself are answered.
        open_paths: paths that need no key.
        max_requests_per_client: as in `Limits`.
        outcomes: gets the record of each request.
    """

    def __init__(
        self, routes: Sequence[BaseRoute], api_key: str = "", open_paths: Collection[str] = (),
        max_requests_per_client: int = 0, outcomes: Outcomes | None = None,
    ) -> None:  # fmt: skip
        self._router = Router(routes, redirect_slashes=False)
        self._key, self._open, self._outcomes = api_key, open_paths, outcomes
        self._most = max_requests_per_client
        self._answers: Counter[str] = Counter()  # under way, by the client's address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = _SERVER.sub("", scope["path"])
        record, outcomes = begin_record(scope), self._outcomes
        client, taken = (scope.get("client") or ("",))[0], 0

        def take(num: int) -> None:
            nonlocal taken
            others = self._answers[client] - taken
            if self._most and others + num > self._most:
                why = f"{num} answers beside {others} of this client: at most {self._most} at once"
                if num > self._most:
                    raise ApiError(400, why, code="invalid_value", param="n")
                raise ApiError(429, why, "rate_limit_error", "rate_limit_exceeded")
            self._answers[client] += num - taken
            taken = num

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(record.headers)
                headers[HEADER], headers["date"] = record.id, formatdate(usegmt=True)
                # Counted before it is sent: its client finds it counted.
                if outcomes is not None and record.is_error:
                    outcomes.refused(record)
            await send(message)
            if message["type"] == "http.response.body":
                record.sent(len(message.get("body", b"")), not message.get("more_body", False))

        # With "app" Starlette raises what it has no route for.
        scope[_TAKE], scope["app"] = take, self
        try:
            # The key first: a client without it takes no room from others.
            self._check(scope)
            take(1)
            await self._router(scope, receive, send_recorded)
        except BaseException as error:
            # 1. It is given up, or its answer has begun: uvicorn ends the connection, and logs why.
            if record.status or not isinstance(error, Exception):
                current().fail(error)
                if isinstance(error, asyncio.CancelledError):  # `cut` has ended the connection
                    return
                raise
            # 2. It has no answer yet.
            await _answer_of(error)(scope, receive, send_recorded)
        finally:
            self._answers[client] -= taken
            if not self._answers[client]:
                del self._answers[client]
            current().end_answer(record)
            if outcomes is not None:
                outcomes.ended(record)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Takes the same time wherever the two differ: no key is guessed byte by byte.
            is_right = hmac.compare_digest(given.strip().encode(), self._key.encode())
            if not (is_right and scheme.lower() == "bearer") and scope["path"] not in self._open:
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            return
        # Pages of other sites in a browser on this machine: `Host` names the page's own site if its
        # name was made to resolve to this machine (DNS rebinding), and `Origin` the site of a page
        # that calls this server directly. Programs send no Origin.
        host, origin = headers.get("host", ""), headers.get("origin", "")
        named = _HOST.fullmatch(host)
        if host and not (named and is_loopback_host(named[1].strip("[]").lower())):
            why = f"the server has no API key, so it is not to be reached as {host!r}"
            raise ApiError(403, why, code="host_not_allowed")
        if origin and origin != f"http://{host}":
            why = f"the server has no API key, so a page of {origin!r} may not use it"
            raise ApiError(403, why, code="origin_not_allowed")


def _answer_of(error: Exception) -> Response:
    """Answer an error. Of one that nothing has foreseen the log has all, the client nothing."""
    if isinstance(error, ApiError):
        return error.response()
    record = current_record()
    if isinstance(error, HTTPException):  # of the routes
        why = f"{record.method} {record.path}: {error.detail}"
        response = ApiError(error.status_code, why).response()
        response.headers.update(error.headers or {})
        return response
    current().fail(error)
    logger.error("request %s failed", record.id, exc_info=error)
    return ApiError(500, "the server failed; its log says why", "server_error").response()


def count_samples(request: Request, num: int) -> None:
    """Count a request as `num` answers until it is answered. Raises ApiError 429 if these are too
    many for its client now, 400 if they always are."""
    request.scope[_TAKE](num)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return a body. Raises ApiError: 413 if it is too large, 408 if it is late, 400 if its sender
    leaves.

    A body that is too large is read to its end, and dropped: a client that is still sending would
    not read the answer.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                pieces.append(piece)
                if size > limits.max_body_bytes:
                    pieces.clear()
    except ClientDisconnect:  # not logged as a failure: the client left
        raise ApiError(400, "the body did not come to its end") from None
    except TimeoutError:
        if size <= limits.max_body_bytes:
            why = f"the body did not come within {limits.body_timeout_s:g} s"
            raise ApiError(408, why, code="request_timeout") from None
    if size > limits.max_body_bytes:
        why = f"the body is larger than {limits.max_body_bytes} bytes"
        raise ApiError(413, why, code="request_too_large")
    return b"".join(pieces)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Return JSON as a value of `kind`. Raises ApiError 400, which names the place of an error.

    Lists, objects and members are bounded, even where `kind` keeps none: Python's collector goes
    through all of them again and again while more are made, and all other clients wait.
    """
    # Counted with those in texts first, which is quick.
    if sum(map(body.count, (b"[", b"{", b":"))) > _THINGS and _MANY.match(body):
        raise ApiError(400, f"the body has more than {_THINGS} lists, objects and members")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_decoded(error) from None


def not_decoded(error: Exception, name: str = "") -> ApiError:
    """Make the error for what msgspec does not take, below the parameter `name`."""
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {error}")
    why, _, where = str(error).partition(" - at `$")
    where = f"{name}{where.rstrip('`')}".lstrip(".")[:100]
    code = "invalid_value"
    if not where and (field := _FIELD.fullmatch(why)):
        where = field[2][:100]
        code = "unknown_parameter" if field[1] else "missing_required_parameter"
        why = "is not known here" if field[1] else "is missing"
    return ApiError(400, f"{where or 'the body'}: {why[:200]}", code=code, param=where or None)


class Stream(Response):
    """An answer sent piece by piece. If the client leaves or stops reading, the generator is
    cancelled at its `yield` or `await`. `end` is called once at the end, also if the client left
    before the generator had begun: its `finally` does not run then."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], media_type: str,
        end: Callable[[], Awaitable[object]] | None = None,
    ) -> None:  # fmt: skip
        self.status_code, self.background, self.media_type = 200, None, media_type
        self._pieces, self._end = pieces, end
        # Neither caches nor a buffering proxy (nginx) may hold pieces back.
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _first_of(asyncio.create_task(self._send(send)), receive)
        finally:
            if self._end is not None:
                await self._end()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with contextlib.aclosing(self._pieces):
            await send(start)
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Cancel `work` if the client leaves first."""
    # Status 499 is never seen: the client has left.
    task = asyncio.create_task(work)
    return await _first_of(task, request.receive) or Response(status_code=499)


async def _first_of(task: asyncio.Task[T], receive: Receive) -> T | None:
    """Return the task's result, or None, with the task ended, if the client left before."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(leave())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        # The task goes first: where both are done the answer is complete, so it counts.
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, leaving):
            one.cancel()
        # Wait until both have really ended: their `finally` blocks release what the request holds.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, leaving, return_exceptions=True)


# --- servers --------------------------------------------------------------------------------------


class HttpServer:
    """One listening socket, served in tasks of the running loop; port 0 picks a free one. Raises
    ConfigError if the address cannot be bound.

    It has connections for a fourth of the descriptors that are free when it starts: what is asked
    for a request needs up to two more each, and probes have a server of their own.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, limits: Limits) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be bound: {error}") from None
        # For its connections. asyncio does this only for sockets that were made by naming TCP;
        # without it each answer's second piece waits 40 ms for the client's receipt.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = Config(
            app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, h11_max_incomplete_event_size=_HEAD_BYTES,
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
        )  # fmt: skip
        self.state = ServerState()  # connections, and tasks that answer
        self._make_protocol = partial(_Protocol, limits, config, self.state)
        self._connecting: set[asyncio.Task[Any]] = set()
        self._most = 0  # connections

    @property
    def url(self) -> str:
        """For clients on this machine: a wildcard host is shown as loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        # Descriptors are numbered from 0 on: the socket's number tells how many were open.
        self._most = (_raise_file_limit() - self._socket.fileno()) // 4
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one connection; the loop calls again if there are more. Beyond `_most` they wait
        in the kernel: uvicorn's own bound counts them only once they are there."""
        loop = asyncio.get_running_loop()
        try:
            if len(self.state.connections) + len(self._connecting) >= self._most:
                raise OSError(f"it has {self._most}")
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # its client has left
            return
        except OSError as error:
            if _full_lines.take(time.monotonic()):
                logger.warning("%s takes no new connections for now: %s", self.url, error)
            loop.remove_reader(self._socket)
            loop.call_later(_FULL_PAUSE_S, self._listen)
            return
        connection.setblocking(False)
        task = loop.create_task(loop.connect_accepted_socket(self._make_protocol, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more, and wait at most `grace_s` for the answers in progress. A further call,
        even during the first, ends with its own wait."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        self.close()
        if self._connecting:
            await asyncio.wait(self._connecting)
        connections, tasks = self.state.connections, self.state.tasks
        for connection in list(connections):
            connection.shutdown()  # after its answer, if there is one in progress
        for patience_s in (grace_s, _CUT_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    while connections or tasks:
                        await asyncio.sleep(_END_PAUSE_S)
            self.cut()
        if tasks:
            logger.warning("%s stops with %d answers that do not end", self.url, len(tasks))

    def cut(self) -> None:
        for connection in list(self.state.connections):
            connection.transport.abort()
        # Aborting a connection does not end the task that computes its answer.
        for task in list(self.state.tasks):
            task.cancel()

    def close(self) -> None:
        self._socket.close()


class _Protocol(H11Protocol):
    """Closes a connection if the head of a request does not arrive in time: a client that sends
    single bytes would hold it as long as it likes. And one whose client has read nothing for
    `write_timeout_s` of what waits for it, in the midst of its answer or behind it."""

    def __init__(self, limits: Limits, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None
        self._read = b""  # bytes that had been read at the last look, if more waited; as in memory

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._look()

    def _look(self) -> None:
        # Not TCP_USER_TIMEOUT: it also cuts a client that reads steadily, as long as its window is
        # smaller than a segment that waits.
        info = self.transport.get_extra_info("socket").getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.stop
        )
        read = info[_ACKED] if self.transport.get_write_buffer_size() else b""
        if read and read == self._read:
            self.transport.abort()
        self._read = read
        self._next_look = self.loop.call_later(self._limits.write_timeout_s, self._look)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # 1. The head is complete: `read_body` has the time-out from here on.
        # 2. A later head on a kept connection has begun: its time starts with its first byte, since
        #    uvicorn's idle time-out covers only a connection without any.
        # 3. So does that of a body whose request is answered already: nothing reads it.
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not is_answered:
            self._stop_waiting()
        elif self._late is None and (is_answered or self.conn.trailing_data[0]):
            self._wait()

    def send_400_response(self, msg: str) -> None:
        # Where another answer has begun there is no place for this one.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._next_look.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._late = self.loop.call_later(self._limits.head_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _raise_file_limit() -> int:
    """Raise the limit on open files, one per connection, as far as 65,536, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if 0 <= soft < wanted:  # RLIM_INFINITY is below 0
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft < 0 else soft


class Entrance:
    """Both ports of a process, for requests and for its health and metrics; its request log, traces
    and ids. Used on one event loop. `kind` names it in metrics, logs and traces, `name` its node in
    traces. Raises ConfigError, with nothing left open."""

    server: HttpServer
    status: HttpServer

    def __init__(self, kind: str, listen: ListenSettings, name: str = "") -> None:
        self.draining = False
        self._kind, self._listen, self._limits = kind, listen, listen.limits
        self._file: RequestFile | None = None
        self._servers: list[HttpServer] = []
        # Request ids: unique over processes by the prefix, within this one by the number.
        self._prefix, self._num = secrets.token_hex(8), 0
        with contextlib.ExitStack() as opened:
            if listen.request_log:
                self._file = RequestFile(listen.request_log)
                opened.callback(self._file.close)
            self._tracing = make_tracing(kind, name)
            opened.callback(self._tracing.close)
            self._opened = opened.pop_all()

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether requests are accepted, and the body of /health."""
        raise NotImplementedError

    async def _show_health(self, _: Request) -> Response:
        """Load balancers carry no key, so only the state is told."""
        ok, state = self.health()
        return json_response({"status": state["status"]}, 200 if ok else 503)

    def _bind(
        self, routes: Sequence[BaseRoute], open_paths: Sequence[str] = (),
        collectors: Sequence[Any] = (), status_routes: Sequence[BaseRoute] = (), node: Any = None,
    ) -> None:  # fmt: skip
        """`node`: of a worker, which writes the lines of the requests that it answers."""
        listen, kind, who = self._listen, self._kind, self._kind
        most = listen.limits.max_requests_per_client
        if node is not None:
            # Imported only here: a front and a proxy have no node, and need not load its runtime.
            from prefixkv.spi import NodeCollector

            kind, who, most = "worker", node.peer_id.name, 0
            collectors = NodeCollector(node), *collectors
        outcomes = Outcomes(kind, {"node": who, "side": self._kind}, self._file)
        registry = CollectorRegistry(auto_describe=False)
        for collector in (*collectors, *outcomes.collectors):
            registry.register(collector)

        async def show_health(_: Request) -> Response:
            ok, state = self.health()
            return json_response(state, 200 if ok else 503)

        def show_metrics(_: Request) -> Response:  # not async, so Starlette runs it in a thread
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        everything = [
            Route("/health", show_health), Route("/metrics", show_metrics), *status_routes
        ]  # fmt: skip
        # A loopback port needs no key, so that scrapers of this machine need no secret.
        key = "" if is_loopback_host(listen.status_host) else listen.api_key
        app = App(routes, listen.api_key, open_paths, most, outcomes)
        status = App(everything, key, open_paths=["/health"])
        with self._opened.pop_all() as opened:
            self.server = HttpServer(app, listen.host, listen.port, listen.limits)
            opened.callback(self.server.close)
            self.status = HttpServer(status, listen.status_host, listen.status_port, listen.limits)
            self._opened = opened.pop_all()
        self._servers = [self.server, self.status]

    async def _read(self, request: Request, kind: type[T], default: bytes = b"") -> T:
        return decode_body(await read_body(request, self._limits) or default, kind)

    def _new_rid(self, request_id: str) -> str:
        """It begins with the id in the header, and is unique, even if clients use that again."""
        self._num += 1
        return f"{request_id}-{self._prefix}-{self._num}"

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, and give those in progress `grace_s` seconds to end.
        Idempotent."""
        self.draining = True
        for server in self._servers:
            await server.stop(grace_s)
        await self._close()
        await asyncio.to_thread(self._opened.close)

    async def _close(self) -> None:
        """Close what answers come through, once none is sent any more."""
