"""Common ground of the HTTP servers: bounds on bodies and times, and errors in OpenAI's form.

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
import socket
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Sequence,
)
from http import HTTPStatus
from typing import Any, Final, TypeVar

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefixkv.errors import ConfigError
from prefixkv.serving.config import Limits
from prefixkv.serving.failures import ApiError as ApiError
from prefixkv.serving.failures import Rate
from prefixkv.serving.log import Outcomes
from prefixkv.serving.record import HEADER, begin_record, current_record
from prefixkv.serving.tracing import current
from prefixkv.settings import is_loopback_host

logger = logging.getLogger("prefixkv.http")

_HEAD_BYTES: Final = 64 << 10
_OPEN_FILES: Final = 65_536
_FULL_PAUSE_S: Final = 0.1  # before another look whether there are fewer connections
_TAKE: Final = "prefixkv.take"
_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?")
_FIELD: Final = re.compile(
    r"Object (?:contains (unknown)|missing required) field `(.*)`", re.DOTALL
)

# Clients cause these lines: by what is no HTTP, and by leaving a stream or reading no more of it.
_CAUSED: Final = re.compile(r"socket.send\(\) raised|ASGI callable returned without completing")
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
for _name in ("uvicorn.error", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: not _CAUSED.match(str(record.msg)))
_full_lines = Rate(1.0, 1 / 60)

T = TypeVar("T")


# --- errors ---------------------------------------------------------------------------------------


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an HTTP error of Starlette's routing in OpenAI's form, with its headers."""
    assert isinstance(error, HTTPException)
    why = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, why).response()
    response.headers.update(error.headers or {})
    return response


async def _on_failure(_: Request, error: Exception) -> Response:
    """The log has the exception, the client gets no detail."""
    logger.error("request %s failed", current_record().id, exc_info=error)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return ApiError(status, "the server failed; its log says why", "server_error").response()


# --- applications ---------------------------------------------------------------------------------


def make_app(
    routes: Sequence[BaseRoute], api_key: str = "", open_paths: Collection[str] = (),
    max_requests_per_client: int = 0, outcomes: Outcomes | None = None,
) -> ASGIApp:  # fmt: skip
    """Add a key, bounds, records, and errors in OpenAI's form.

    Args:
        api_key: what `Authorization: Bearer ...` must carry. "": no key; then only programs of this
            machine and pages of this server itself are answered.
        open_paths: paths that need no key.
        max_requests_per_client: as in `Limits`.
        outcomes: gets the record of each request.
    """
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_failure,
        },
    )  # fmt: skip
    app.router.redirect_slashes = False

    def check(scope: Scope) -> None:
        if not api_key:
            _check_loopback(Headers(scope=scope))
        elif scope["path"] not in open_paths:
            _check_key(Headers(scope=scope), api_key)

    return _Recorded(app, check, max_requests_per_client, outcomes)


def _check_key(headers: Headers, api_key: str) -> None:
    given = headers.get("authorization", "").encode()
    # Takes the same time wherever the two differ, so a key cannot be guessed byte by byte.
    if not hmac.compare_digest(given, f"Bearer {api_key}".encode()):
        raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def _check_loopback(headers: Headers) -> None:
    """Refuse pages of other sites in a browser on this machine: `Host` names the page's own site if
    its name was made to resolve to this machine (DNS rebinding), and `Origin` the site of a page
    that calls this server directly. Programs send no Origin."""
    host, origin = headers.get("host", ""), headers.get("origin", "")
    found = _HOST.fullmatch(host)
    if host and not (found and is_loopback_host(found[1].strip("[]").lower())):
        why = f"the server has no API key, so it is not to be reached as {host!r}"
        raise ApiError(403, why, code="host_not_allowed")
    if origin and origin != f"http://{host}":
        why = f"the server has no API key, so a page of {origin!r} may not use it"
        raise ApiError(403, why, code="origin_not_allowed")


class _Recorded:
    """An application whose requests are checked, counted by client, and have a record."""

    def __init__(
        self, app: ASGIApp, check: Callable[[Scope], None], most: int, outcomes: Outcomes | None
    ) -> None:
        self._app, self._check, self._most, self._outcomes = app, check, most, outcomes
        self._answers: Counter[str] = Counter()  # under way, by the client's address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
                MutableHeaders(scope=message)[HEADER] = record.id
                # Counted before it is sent: its client finds it counted.
                if outcomes is not None and record.is_error:
                    outcomes.refused(record)
                await send(message)
            else:
                await send(message)
                record.sent(len(message.get("body", b"")), not message.get("more_body", False))

        scope[_TAKE] = take
        try:
            # The key first: a client without it takes no room from others.
            self._check(scope)
            take(1)
            await self._app(scope, receive, send_recorded)
        except ApiError as error:
            await error.response()(scope, receive, send_recorded)
        except BaseException as error:
            current().fail_by(error)
            raise
        finally:
            self._answers[client] -= taken
            if not self._answers[client]:
                del self._answers[client]
            current().end_answer(record)
            if outcomes is not None:
                outcomes.ended(record)


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
    """Return JSON as a value of `kind`. Raises ApiError 400, which names the place of an error."""
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
    """An answer sent piece by piece, each in the time of `limits`. If the client leaves or stops
    reading, the generator is cancelled at its `yield` or `await`. `end` is called once at the end,
    also if the client left before the generator had begun: its `finally` does not run then."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], limits: Limits, media_type: str,
        end: Callable[[], Awaitable[object]] | None = None,
    ) -> None:  # fmt: skip
        self.status_code, self.background, self.media_type = 200, None, media_type
        self._pieces, self._limits, self._end = pieces, limits, end
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
                # Per piece: a client that reads slowly but steadily is served, one that stops is
                # cut.
                try:
                    async with asyncio.timeout(self._limits.write_timeout_s):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                except TimeoutError:
                    return  # uvicorn closes the connection
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

    It has connections for a fourth of the descriptors that are free when it is made: what is asked
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
        # uvicorn makes one protocol per connection from a class, so the time-out travels in a
        # subclass.
        protocol = type("Protocol", (_Protocol,), {"head_timeout_s": limits.head_timeout_s})
        self._server = _Uvicorn(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, proxy_headers=False, h11_max_incomplete_event_size=_HEAD_BYTES,
                timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None
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
        self._task = asyncio.create_task(self._server.serve([]))
        while not self._server.started:
            # The server's task ended before it served: raise its error, do not wait on.
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one connection; the loop calls again if there are more. Beyond `_most` they wait
        in the kernel: uvicorn's own bound counts them only once they are there."""
        loop = asyncio.get_running_loop()
        try:
            if len(self._server.server_state.connections) + len(self._connecting) >= self._most:
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
        task = loop.create_task(
            loop.connect_accepted_socket(self._server.make_protocol, connection)
        )
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more, and wait at most `grace_s` for the answers in progress. A further call,
        even during the first, ends with its own wait."""
        if self._task is not None and self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
        self.close()
        if self._task is None:
            return
        if self._connecting:
            await asyncio.wait(self._connecting)
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=grace_s)
        if not self._task.done():
            self._server.cut()
            await asyncio.wait((self._task,))

    def close(self) -> None:
        self._socket.close()


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def make_protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def cut(self) -> None:
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        # Aborting a connection does not end the task that computes its answer.
        for task in list(self.server_state.tasks):
            task.cancel()


class _Protocol(H11Protocol):
    """Closes a connection if the head of a request does not arrive in time: a client that sends
    single bytes would hold it as long as it likes."""

    head_timeout_s = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # 1. The head is complete: `read_body` has the time-out from here on.
        # 2. A later head on a kept connection has begun: its time starts with its first byte, since
        #    uvicorn's idle time-out covers only a connection without any.
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None and self.conn.trailing_data[0]:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._late = self.loop.call_later(self.head_timeout_s, self.transport.abort)

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
