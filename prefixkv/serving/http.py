"""Common ground of the HTTP servers: bounds on bodies and times, and errors in OpenAI's form.

A handler takes a Starlette `Request` and returns a `Response`. `read_body` reads what was sent,
`Stream` sends an answer piece by piece, `run_until_disconnect` computes an answer in one body; the
last two cancel the work for a client that leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import re
import resource
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from prefixkv.errors import ConfigError
from prefixkv.serving.config import Limits
from prefixkv.serving.failures import ApiError as ApiError
from prefixkv.serving.failures import OncePerMinute
from prefixkv.serving.ids import RequestIds, current_id
from prefixkv.serving.words import plain_words
from prefixkv.settings import is_loopback_host

logger = logging.getLogger("prefixkv.http")

_DISCARDED_BYTES: Final = 256 << 20  # read and dropped of a body that is too large
BODIES: Final = 8  # of the largest size, that may be arriving at a server at once
_HEAD_BYTES: Final = 64 << 10
_OPEN_FILES: Final = 65_536
_FULL_PAUSE_S: Final = 0.1  # before another look whether there are descriptors
_CLIENT: Final = "prefixkv.client"
_FIELD: Final = re.compile(
    r"Object (?:contains (unknown)|missing required) field `(.*)`", re.DOTALL
)

# Clients cause these warnings, so each text is logged once a minute at most.
logging.getLogger("uvicorn.error").addFilter(OncePerMinute())
_accepts = logging.getLogger("prefixkv.http.accepts")
_accepts.addFilter(OncePerMinute())

T = TypeVar("T")


# --- errors ---------------------------------------------------------------------------------------


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an HTTP error of Starlette's routing in OpenAI's form, with its headers."""
    assert isinstance(error, HTTPException)
    request_line = f"{request.method} {request.url.path}"
    messages = {
        404: f"{request_line}: there is no such path",
        405: f"{request_line}: the path has other methods",
    }
    message = messages.get(error.status_code, error.detail)
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _on_failure(_: Request, error: Exception) -> Response:
    """The log has the exception, the client gets no detail."""
    logger.error("request %s failed", current_id(), exc_info=error)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    return ApiError(status, "the server failed; its log says why", "server_error").response()


# --- applications ---------------------------------------------------------------------------------


def make_app(
    routes: Sequence[BaseRoute], api_key: str = "", open_paths: Sequence[str] = (),
    max_requests_per_client: int = 0,
) -> ASGIApp:  # fmt: skip
    """Add a key, bounds, and errors in OpenAI's form.

    Args:
        api_key: what `Authorization: Bearer ...` must carry. "": no key; then only programs of this
            machine and pages of this server itself are answered.
        open_paths: paths that need no key.
        max_requests_per_client: as in `Limits`.
    """
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_failure,
        },
    )  # fmt: skip
    app.router.redirect_slashes = False
    app.state.bodies = _ArrivingBodies()
    # The key is checked outside the counts: a client without it takes no room from others.
    counted = PerClientLimit(app, max_requests_per_client)
    # The ids are outermost, so that refusals have one too.
    return RequestIds(
        ApiKeyRequired(counted, api_key, frozenset(open_paths))
        if api_key
        else LoopbackOnly(counted)
    )


class LoopbackOnly:
    """An application without a key, bound to a loopback address.

    A browser on this machine may run pages of other sites. Two headers tell such a page apart:
    `Host` names the page's own site if its name was made to resolve to this machine (DNS
    rebinding), and `Origin` names the site of a page that calls this server directly.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Reversed, so that the first header of a name counts where it is repeated.
        headers = dict(reversed(scope["headers"]))
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        error = None
        # 1. A name that is not loopback: DNS rebinding.
        # 2. A page of another origin: cross-site use. Programs send no Origin, and pass.
        if host and not is_loopback_host(_name_of(host)):
            why = f"the server has no API key, so it is not to be reached as {host!r}"
            error = ApiError(403, why, code="host_not_allowed")
        elif origin and origin != f"http://{host}":
            why = f"the server has no API key, so a page of {origin!r} may not use it"
            error = ApiError(403, why, code="origin_not_allowed")
        if error is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Return the name in an HTTP request's `Host` header without its port; "" if it is malformed.

    >>> _name_of("localhost:8000"), _name_of("[::1]:8000"), _name_of("[::1]"), _name_of("::1")
    ('localhost', '::1', '::1', '')
    """
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name if not rest or rest.startswith(":") else ""
    name, _, port = host.partition(":")
    return "" if ":" in port else name.lower()


class ApiKeyRequired:
    """An application that requires a key, except on its open paths."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: frozenset[str]) -> None:
        self._app, self._open_paths = app, open_paths
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in self._open_paths:
            header = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
            # Takes the same time wherever the two differ, so a key cannot be guessed byte by byte.
            if not hmac.compare_digest(header, self._expected):
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class PerClientLimit:
    """Answers at most `most` requests of one client at once, and of those with several samples at
    most `most` samples (0: any number). More get 429, or 400 where one request alone asks for
    more."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most
        # Under way, by the client's address.
        self._requests: Counter[str] = Counter()
        self._samples: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = (scope.get("client") or ("",))[0]
        if self._most and self._requests[client] >= self._most:
            why = f"{self._most} requests of this client are being answered: no more at once"
            error = ApiError(429, why, "rate_limit_error", "rate_limit_exceeded")
            await error.response()(scope, receive, send)
            return
        self._requests[client] += 1
        num_samples = 0

        def take(num: int) -> None:
            nonlocal num_samples
            taken = self._samples[client]
            if self._most and num > 1 and num > self._most:
                raise ApiError(
                    400, f"{num} samples (n, times prompts): at most {self._most} of a client",
                    code="invalid_value", param="n",
                )  # fmt: skip
            if self._most and num > 1 and taken + num > self._most:
                raise ApiError(
                    429, f"{num} samples (n, times prompts) beside {taken} of this client that are "
                    f"being answered: at most {self._most} at once", "rate_limit_error",
                    "rate_limit_exceeded", "n",
                )  # fmt: skip
            # One sample counts as its request alone: no client's many samples keep its chats out.
            num_samples = num if num > 1 else 0
            self._samples[client] += num_samples

        scope[_CLIENT] = take
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests[client] -= 1
            self._samples[client] -= num_samples
            if not self._requests[client]:
                del self._requests[client], self._samples[client]


def count_samples(request: Request, num: int) -> None:
    """Count a request, once, as `num` samples until it is answered. Raises ApiError 429 if these
    are too many for its client now, 400 if they always are (`PerClientLimit`)."""
    request.scope[_CLIENT](num)


class _ArrivingBodies:
    """Bytes of bodies that are not parsed yet, by the time-out of each reader, the body that has
    been arriving for longest first. Used on one event loop."""

    def __init__(self) -> None:
        self.sizes: dict[asyncio.Timeout, int] = {}
        self._num_bytes = 0

    def grow(self, reader: asyncio.Timeout, num_bytes: int, most: int) -> None:
        """Beyond `most` in sum, the reading that has begun first ends: a client that sends slowly
        keeps no other out. No-op for a body that was dropped."""
        if reader not in self.sizes:
            return
        self.sizes[reader] += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > most:
            oldest = next(one for one, size in self.sizes.items() if size)
            self.drop(oldest)
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())

    def drop(self, reader: asyncio.Timeout) -> None:
        """No-op for a body that does not count."""
        self._num_bytes -= self.sizes.pop(reader, 0)


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return a body, to be parsed at once: from here on its bytes do not count. Raises ApiError:
    413 if it is too large, 408 if it is late or others need its room, 400 if its sender leaves.

    A body that is too large is still read to its end, and dropped: a client that is still sending
    would not read the answer.
    """
    pieces: list[bytes] = []
    size = 0
    bodies: _ArrivingBodies = request.app.state.bodies
    try:
        async with asyncio.timeout(limits.body_timeout_s) as reader:
            bodies.sizes[reader] = 0
            async for piece in request.stream():
                size += len(piece)
                # 1. Within the limit: count the piece, then keep it. A body that has to make room
                #    ends at its next `await`, or is whole by then.
                # 2. Just beyond: drop it all at once; the rest is only counted.
                # 3. Far beyond: stop reading, whatever the client does then.
                if size <= limits.max_body_bytes:
                    bodies.grow(reader, len(piece), BODIES * limits.max_body_bytes)
                    pieces.append(piece)
                else:
                    pieces.clear()
                    bodies.drop(reader)
                if size > _DISCARDED_BYTES + limits.max_body_bytes:
                    break
    except ClientDisconnect:  # not logged as a failure: the client left
        raise ApiError(400, "the body did not come to its end") from None
    # Of a body that is too large by then, 413 below says more.
    except TimeoutError:
        if size <= limits.max_body_bytes:
            why = f"the body did not come within {limits.body_timeout_s:g} s"
            if reader not in bodies.sizes:
                why = "the body came too slowly, and others needed its room"
            raise ApiError(408, why, code="request_timeout") from None
    finally:
        bodies.drop(reader)
    if size > limits.max_body_bytes:
        why = f"the body is larger than {limits.max_body_bytes} bytes"
        raise ApiError(413, why, code="request_too_large")
    return b"".join(pieces)


def decode_body(body: bytes, kind: type[T], name: str = "") -> T:
    """Return JSON as a value of `kind`. Raises ApiError 400, which names the place of an error,
    below `name`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        why, _, where = str(error).partition(" - at `$")
        where = f"{name}{where.rstrip('`')}".lstrip(".")[:100]
        code = "invalid_value"
        if not where and (field := _FIELD.fullmatch(why)):
            where = field[2][:100]
            code = "unknown_parameter" if field[1] else "missing_required_parameter"
            why = "is not known here" if field[1] else "is missing"
        else:
            why = plain_words(why)
        raise ApiError(
            400, f"{where or 'the body'} {why}", code=code, param=where or None
        ) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not valid JSON: it is not UTF-8") from None
    except msgspec.DecodeError as error:
        found = re.search(r"\(byte (\d+)\)", str(error))
        at = f": there is an error at byte {found[1]}" if found else ""
        raise ApiError(400, f"the body is not valid JSON{at}") from None


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
                async with asyncio.timeout(self._limits.write_timeout_s):
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
    """One listening socket, served in tasks of the running loop; port 0 picks a free one. It
    accepts connections while they, and what is opened for them, leave two thirds of the descriptors
    that were free at its start. Raises ConfigError if the address cannot be bound."""

    share = 1 / 3
    """Share of the free descriptors that is in use when no more connections are accepted. What is
    asked for a request needs up to two more each."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: Limits) -> None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=2048)
            # For its connections. asyncio does this only for sockets that were made by naming TCP;
            # without it each answer's second piece waits 40 ms for the client's receipt.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setblocking(False)
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be bound: {error}") from None
        self.host, self.port = host, int(self._socket.getsockname()[1])
        # uvicorn makes one protocol per connection from a class, so the time-out travels in a
        # subclass.
        protocol = type("Protocol", (_Protocol,), {"head_timeout_s": limits.head_timeout_s})
        self._server = _Uvicorn(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
                server_header=False, proxy_headers=False,
                timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None
        self._connecting: set[asyncio.Task[Any]] = set()
        self._most = 0  # descriptors

    @property
    def url(self) -> str:
        """For clients on this machine: a wildcard host is shown as loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> None:
        most = allow_connections()
        used = _lowest_free(self._socket)
        self._task = asyncio.create_task(self._server.serve([]))
        while not self._server.started:
            # The server's task ended before it served: raise its error, do not wait on.
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        self._most = used + int((most - used) * self.share)
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one connection, while fewer than `_most` descriptors are open; the loop calls
        again if there are more. Others wait in the kernel. asyncio's own server would take all
        there are, and then log each that it cannot take, again and again."""
        loop = asyncio.get_running_loop()
        try:
            if _lowest_free(self._socket) >= self._most:
                raise OSError(errno.EMFILE, f"{self._most} descriptors are open")
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):  # its client has left
            return
        except OSError as error:
            _accepts.warning("%s takes no new connections for now: %s", self.url, error)
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
        if self._task is None:
            self.close()
            return
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self.close()
        if self._connecting:
            await asyncio.wait(self._connecting)
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=grace_s)
        if not self._task.done():
            self._server.cut()
            await asyncio.wait((self._task,))

    def close(self) -> None:
        self._socket.close()


class StatusServer(HttpServer):
    """Probes are answered also where clients have all the connections that they may have."""

    share = 2 / 3


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


class _Wire:
    """Drops writes once the connection is closing: asyncio would log a line for each piece of a
    stream whose client has left."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class _BoundedHeads(h11.Connection):
    """Takes no head of more than `_HEAD_BYTES`, also where it comes at once: h11 looks only at
    heads that have not come to their end."""

    def next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        num_bytes = len(self.trailing_data[0])
        event = super().next_event()
        if type(event) is h11.Request and num_bytes - len(self.trailing_data[0]) > _HEAD_BYTES:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return event


class _Protocol(H11Protocol):
    """Closes a connection if the head of a request does not arrive in time: a client that sends
    single bytes would hold it as long as it likes."""

    head_timeout_s = 10.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = _BoundedHeads(h11.SERVER, _HEAD_BYTES)
        super().connection_made(_Wire(transport))  # type: ignore[arg-type]
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


def allow_connections() -> int:
    """Raise the limit on open files, one per connection, as far as 65,536, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return _OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def _lowest_free(one: socket.socket) -> int:
    """Return the lowest free descriptor; `one` is any that is open. Raises OSError without one."""
    # O(1), where counting the open ones would look at each.
    free = os.dup(one.fileno())
    os.close(free)
    return free
