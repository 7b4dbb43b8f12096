"""The proxy: each request gets a room. Decode is asked first, prefill as soon as decode has the
request. If prefill fails before decode has answered, another is tried; at last decode computes the
prompt.

A `BoundedAffinityRouter` matches the prompt's text in pages of `_PAGE_BYTES`, so a conversation
stays where its KV is. It sees no cache events, only where this proxy has sent prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any, Final, Literal, NamedTuple

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv import Hints
from prefixkv.errors import ConfigError
from prefixkv.proxy.bodies import (
    PARAMS,
    cached_tokens,
    data_of,
    decoded,
    parameters_of,
    prompts_of,
    refusal_of,
    retold,
    retold_events,
    whole_events,
)
from prefixkv.proxy.config import ProxyConfig, ServerAt
from prefixkv.proxy.metrics import ProxyMetrics
from prefixkv.serving import interrupts
from prefixkv.serving.client import make_client, pieces_of
from prefixkv.serving.failures import ApiError, Rate, failed, refused
from prefixkv.serving.hints import SessionFields
from prefixkv.serving.http import (
    Stream,
    count_samples,
    decode_body,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.record import HEADER, RequestRecord, current_record
from prefixkv.serving.router import BoundedAffinityRouter
from prefixkv.serving.router import Route as ServerRoute
from prefixkv.serving.status import Entrance
from prefixkv.serving.tracing import current
from prefixkv.spi import TOKEN_BYTES, page_keys

logger = logging.getLogger("prefixkv.proxy")

Role = Literal["prefill", "decode"]

_PAGE_BYTES: Final = 1024
_HELD_S: Final = 1800.0  # how long a prompt counts as cached where it was sent
_ATTEMPTS: Final = 3  # with prefill; one more follows without
_AVOIDED_S: Final = 5.0  # how long an unreachable server gets no requests
_LINES_PER_S: Final = 0.2  # of the log, about one server: clients ask again at once
_GRACE_S: Final = 1.0
"""Wait for prefill's answer after decode's first piece, and for decode's after prefill's
refusal."""
_OPEN: Final = ("/health", "/ping")  # probes of load balancers carry no key
_TO_DECODE: Final = ("/v1/models", "/version", "/tokenize", "/detokenize")
_NOT_FOR_PREFILL: Final = (
    "stream_options", "stream_interval", "min_tokens", "best_of", "use_beam_search",
    "logprobs", "top_logprobs", "logprob_token_ids", "echo", "seed", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "structured_outputs", "repetition_detection",
    "thinking_token_budget", "return_token_ids", PARAMS,
)  # fmt: skip
"""Parameters that prefill is not sent: they say how tokens are drawn and reported. Prefill draws
one token, which is never read, and decode is the server that reports an error in them. It has
transfer parameters of its own."""


class LostError(Exception):
    """A failed attempt that another attempt may repair, without `servers`."""

    def __init__(self, why: str, *servers: str) -> None:
        super().__init__(why)
        self.servers = servers


class _RefusedError(Exception):
    """Decode refuses one of several prompts: `answer` goes to the client."""

    def __init__(self, answer: ServerAnswer) -> None:
        super().__init__(answer)
        self.answer = answer


class ServerAnswer(NamedTuple):
    """Its head and first piece have arrived. Of a stream the rest is still to be read, from a
    connection that `close` gives back."""

    head: aiohttp.ClientResponse
    first: bytes
    rest: AsyncGenerator[bytes, None]
    connection: contextlib.AsyncExitStack

    @property
    def status(self) -> int:
        return self.head.status

    @property
    def media_type(self) -> str:
        return self.head.headers.get("content-type", "application/json")

    def refusal(self, asked: bytes) -> Response:
        return refusal_of(str(self.head.url), self.status, self.first, asked)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        yield self.first
        async for piece in self.rest:
            yield piece

    async def close(self) -> None:
        await self.connection.aclose()


class _ServerSide:
    """Servers of one role, the router over them, and those to avoid for now. Raises ConfigError if
    there is no server, or two of one name."""

    def __init__(self, role: Role, servers: Sequence[ServerAt]) -> None:
        self.servers = {server.url: server for server in servers}
        self.router = BoundedAffinityRouter(expect_s=_HELD_S)
        self._avoided_until_s: dict[str, float] = {}  # time.monotonic()
        if not servers:
            raise ConfigError(f"there is no {role} server: --{role} URL=...")
        if len(self.servers) < len(servers):
            raise ConfigError(f"a {role} server is named twice")
        for name in self.servers:
            self.router.add_worker(name)

    def choose(self, keys: Sequence[bytes], lost: Collection[str]) -> ServerRoute | None:
        """None if all are lost. An avoided server is taken only if no other one is left."""
        left = [name for name in self.servers if name not in lost]
        well = [name for name in left if not self.is_avoided(name)]
        return self.router.route(keys, time.monotonic(), among=well or left) if left else None

    def avoid(self, name: str) -> None:
        self._avoided_until_s[name] = time.monotonic() + _AVOIDED_S

    def is_avoided(self, name: str) -> bool:
        return self._avoided_until_s.get(name, 0.0) > time.monotonic()


class Proxy(Entrance):
    """Used on the running loop. Raises ConfigError if a role has no server, a server is named
    twice, or an address cannot be bound."""

    def __init__(
        self, config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]
    ) -> None:
        self.sides: dict[Role, _ServerSide] = {
            "prefill": _ServerSide("prefill", prefill), "decode": _ServerSide("decode", decode),
        }  # fmt: skip
        # Runs that decode has not answered yet: `ProxyMetrics`.
        self.waiting: dict[_ProxiedRequest, tuple[str, float]] = {}
        self.metrics = ProxyMetrics(self.sides, self.waiting)
        self._lines: dict[str, Rate] = {}  # of the log, by server
        super().__init__("proxy", config.listen)
        serve = self._tracing.traced(self._serve)
        routes = [
            Route("/v1/chat/completions", serve, methods=["POST"]),
            Route("/v1/completions", serve, methods=["POST"]),
            *(Route(path, self._health, methods=["GET", "POST"]) for path in _OPEN),
            *(Route(path, self._pass_on, methods=["GET", "POST"]) for path in _TO_DECODE),
            Route("/{path:path}", _unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        self._bind(routes, _OPEN, self.metrics.collectors)
        # No bound on connections: a request holds two at once, and under a bound requests that hold
        # one could wait for each other.
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_sent)
        self._client = make_client(config.servers_key, config.answer_timeout_s, None, trace)

    def health(self) -> tuple[bool, dict[str, Any]]:
        states: dict[str, dict[str, str]] = {
            role: {name: "avoided" if side.is_avoided(name) else "ok" for name in side.servers}
            for role, side in self.sides.items()
        }
        ok = not self.draining and "ok" in states["decode"].values()
        state = "draining" if self.draining else "ok" if ok else "no decode server"
        return ok, {"status": state, **states}

    async def start(self) -> None:
        """The status port opens first, so that probes see a proxy that is about to start."""
        await self.status.start()
        await self.server.start()

    async def _close(self) -> None:
        await self._client.close()

    def warn(self, server: str, why: str) -> None:
        if self._lines.setdefault(server, Rate(1.0, _LINES_PER_S)).take(time.monotonic()):
            logger.warning("%s", why)

    # --- what is asked ----------------------------------------------------------------------------

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if self.health()[0] else 503)

    async def _pass_on(self, request: Request) -> Response:
        """Forward a request to the first decode server that can be reached."""
        side = self.sides["decode"]
        body = b"" if request.method == "GET" else await read_body(request, self._limits)
        head = {"content-type": request.headers.get("content-type", "application/json")}
        # Servers that were reached lately come first; an avoided one is still better than none.
        for name in sorted(side.servers, key=side.is_avoided):
            url = name + request.url.path
            content = io.BytesIO(body) if body else None
            asked = self._client.request(request.method, url, data=content, headers=head)
            try:
                async with asked as answer:
                    found = await answer.read()
            except aiohttp.ClientError:
                side.avoid(name)
                continue
            if answer.status >= 400:
                return refusal_of(url, answer.status, found, body)
            return Response(found, answer.status, media_type=answer.headers.get("content-type"))
        raise ApiError(503, "no decode server is reached", "server_error", "not_ready")

    async def _serve(self, request: Request) -> Response:
        """Check the few parameters that steer the proxy itself. Raises ApiError 400, or 503 while
        the proxy ends."""
        body, path = parameters_of(await read_body(request, self._limits)), request.url.path
        current().describe_request(path, body)
        field = "messages" if _is_chat(path) else "prompt"
        if field not in body:
            raise refused(field, "is missing")
        # A client that set them would choose the room and the peers that the engines use.
        if PARAMS in body:
            raise refused(PARAMS, "is the proxy's to set")
        for name, kind in (("stream", bool), ("n", int)):
            if not isinstance(body.get(name) or kind(), kind):
                raise refused(name, f"is {body[name]!r}")
        said = {name: body[name] for name in SessionFields.__struct_fields__ if name in body}
        hints = decode_body(msgspec.json.encode(said), SessionFields).hints(request)
        if hints != Hints():
            body[PARAMS] = {"hints": msgspec.to_builtins(hints)}
        if hints.session:  # vLLM's cache events name it
            body["session_id"] = hints.session
        body.pop("kv_hints", None)  # vLLM's field of that name is an envelope
        # Checked after the body has been read: draining may have begun meanwhile.
        if self.draining:
            raise ApiError(503, "the proxy is ending", "server_error", "not_ready")
        line = current_record()
        rid = self._new_rid(line.id[:100])
        line.fields |= {"id": rid, "stream": bool(body.get("stream"))}
        return await run_until_disconnect(request, self._count(request, body, field, line))

    async def _count(
        self, request: Request, body: dict[str, Any], field: str, line: RequestRecord
    ) -> Response:
        """Answer, and count how that ended. Raises ApiError."""
        outcome = "aborted"
        try:
            answer = await self._answer(request, body, field, line)
            outcome = "finished" if answer.status_code < 400 else "refused"
            return answer
        except ApiError:
            outcome = "failed"
            raise
        finally:
            self.metrics.requests.labels(outcome).inc()
            line.fields["outcome"] = outcome

    async def _answer(
        self, request: Request, body: dict[str, Any], field: str, line: RequestRecord
    ) -> Response:
        """Have decode answer, with KV from prefill where it helps. Raises ApiError.

        1. Decode computes the prompt itself, whatever its cache holds (`_is_decodes_alone`).
        2. Several prompts, or several answers (`n` > 1): a room is one prompt's, so each is brought
           by a request of its own for one token. The request itself then finds all in decode's
           cache.
        3. One prompt and one answer: the request has a room itself.
        """
        begun_s, path = time.monotonic(), request.url.path
        prompts = [body[field]] if _is_chat(path) else prompts_of(body[field])
        num = len(prompts) * (body.get("n") or 1)
        count_samples(request, num)
        alone = _is_decodes_alone(body, path)
        cached: int | None = None
        if num > 1 and not alone:
            asks = [{**_for_prefill(body, path), field: prompt} for prompt in prompts]
            try:
                async with asyncio.TaskGroup() as group:  # where one fails the others end
                    runs = [group.create_task(self._bring(path, one, field, line)) for one in asks]
            except ExceptionGroup as errors:
                first = errors.exceptions[0]  # is the answer
                if isinstance(first, _RefusedError):
                    return first.answer.refusal(msgspec.json.encode(body))
                raise first from None
            counts = [run.result() for run in runs]
            # One unknown count makes the sum unknown.
            cached = None if None in counts else sum(map(int, counts))  # type: ignore[arg-type]
        run = _ProxiedRequest(self, path, body, field, line, transfers=num == 1 and not alone)
        answer = await run.answer()
        ttft_s = time.monotonic() - begun_s
        self.metrics.ttft.observe(ttft_s)
        line.mark("first_token")
        current().add({"gen_ai.response.time_to_first_chunk": ttft_s})
        if body.get("stream") and answer.status < 400:
            # `Stream` calls `end` when the client has read all of it or has left; until then the
            # run, with its place in the routers, belongs to the stream.
            return Stream(
                self._pieces(answer, cached, line), self._limits, answer.media_type,
                end=lambda: run.end(answer),
            )  # fmt: skip
        try:
            if answer.status >= 400:
                return answer.refusal(msgspec.json.encode(body))
            content, counted = retold(answer.first, cached)
            line.fields |= counted
            return Response(content, answer.status, media_type=answer.media_type)
        finally:
            await run.end(answer)

    async def _bring(
        self, path: str, body: dict[str, Any], field: str, line: RequestRecord
    ) -> int | None:
        """Have the KV of one prompt sent to decode's cache, by a request of its own. Returns how
        many tokens were there before, if decode says so. Raises _RefusedError, ApiError."""
        run = _ProxiedRequest(self, path, body, field, line, transfers=True)
        answer = await run.answer()
        await run.end(answer)  # not streamed: all of it is in `first`
        if answer.status >= 400:
            raise _RefusedError(answer)
        return cached_tokens(decoded(answer.first))

    async def _pieces(
        self, answer: ServerAnswer, cached: int | None, line: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        """Yield a streamed answer, with `cached` in its usage if that is known. If the server is
        lost midway, the stream ends with an error event: its status has been sent already."""
        try:
            # Only whole events go out, so that the error event is not read as part of a torn one.
            async for events in whole_events(answer.pieces()):
                piece, counted = retold_events(events, cached)
                # Before it goes out: a client that leaves after it has its line with these counts.
                line.fields |= counted
                yield piece
        except aiohttp.ClientError as error:
            self.metrics.cut.inc()
            line.fields["outcome"] = "failed"
            current().fail(f"decode was lost: {error!r}", type(error).__name__)
            body = failed(502, "decode was lost", repr(error), "worker_lost").body()
            yield b"data: " + msgspec.json.encode(body) + b"\n\n"

    async def ask(
        self, role: Role, url: str, body: dict[str, Any], whole: bool, rid: str,
        sent: asyncio.Event | None = None,
    ) -> ServerAnswer:  # fmt: skip
        """POST `body`, and return when the answer's first piece is here, or all of it for `whole`
        and for errors. `rid` is the request's id there; `sent` is set once the request leaves.
        Raises aiohttp.ClientError."""
        async with contextlib.AsyncExitStack() as stack:
            # Its span ends with the connection. Prefill is cut once decode has its KV.
            step = stack.enter_context(
                current().part(role, {"url.full": url}, is_call=True, may_be_cut=role == "prefill")
            )
            head = {"content-type": "application/json", HEADER: rid, **step.headers}
            content = io.BytesIO(msgspec.json.encode(body))
            asked = self._client.post(url, data=content, headers=head, trace_request_ctx=sent)
            answer = await stack.enter_async_context(asked)
            step.add({"http.response.status_code": answer.status})
            if answer.status >= 400:
                step.fail(f"status {answer.status}", str(answer.status))
            pieces = pieces_of(self._client, answer)
            if whole or answer.status >= 400:
                found = b"".join([piece async for piece in pieces])
                return ServerAnswer(answer, found, pieces, contextlib.AsyncExitStack())
            first = await anext(pieces, b"")
            # From here on the answer owns the connection; every failure before closes it.
            return ServerAnswer(answer, first, pieces, stack.pop_all())


async def _note_sent(_: object, context: Any, __: object) -> None:
    if isinstance(sent := context.trace_request_ctx, asyncio.Event):
        sent.set()


class _ProxiedRequest:
    """One request on its servers: its attempts, and what must end with it.

    A room ends on both sides, whatever happens to HTTP. Prefill computes nothing before decode has
    promised its pages, so a room that decode does not load costs prefill no block. Prefill's
    request ends when its connection closes:
    1. when decode has answered, by an error too: at once, or `_GRACE_S` after the first piece of a
       stream, since prefill's own answer may come a little later than decode's first token;
    2. when the client leaves or an attempt fails: at once, together with decode's request;
    3. if decode was not reached, prefill is not asked at all.
    """

    def __init__(
        self, proxy: Proxy, path: str, body: dict[str, Any], field: str, line: RequestRecord, *,
        transfers: bool,
    ) -> None:  # fmt: skip
        self._proxy, self._path, self._body, self._line = proxy, path, body, line
        self._transfers, self._whole = transfers, not body.get("stream")
        self._keys = page_keys(data_of(body[field]), _PAGE_BYTES // TOKEN_BYTES)
        # What this attempt holds; `end` releases it: the routers' count of each server's load, and
        # prefill's request.
        self._routes: list[tuple[_ServerSide, ServerRoute]] = []
        self._sending: asyncio.Task[ServerAnswer] | None = None
        self._broke: set[str] = set()  # decode servers whose connection broke once

    async def answer(self) -> ServerAnswer:
        """Return decode's answer, also an error of the client's. Raises ApiError 502, 503."""
        lost: set[str] = set()
        attempts_left = _ATTEMPTS if self._transfers else 0
        while True:
            decode = self._choose_server("decode", lost)
            if decode is None:
                # Their errors were logged as they came, at a bounded rate.
                detail = f"{', '.join(lost)} failed, and no decode server is left"
                raise failed(503, "no decode server is reached", detail, "not_ready")
            # Without one it is the last attempt: decode computes the prompt.
            prefill = self._choose_server("prefill", lost) if attempts_left else None
            attempts_left -= 1
            if self._transfers and prefill is None:
                self._proxy.metrics.recomputed.inc()
            try:
                return await self._attempt(decode, prefill)
            except LostError as error:
                self._proxy.warn(error.servers[0] if error.servers else decode.url, str(error))
                # Both end before the next attempt: its room must not compete with this one.
                await self.end(None)
                lost.update(error.servers)
                if prefill is None:
                    why = "the servers that were asked have failed"
                    raise failed(502, why, str(error), "worker_lost") from None
                self._proxy.metrics.retried.inc()
            except BaseException:
                await self.end(None)
                raise

    def _choose_server(self, role: Role, lost: Collection[str]) -> ServerAt | None:
        """Count the request at the server until `end`. None if all are lost."""
        side = self._proxy.sides[role]
        with current().part("routing", {"prefixkv.role": role}) as step:
            route = side.choose(self._keys, lost)
            if route is None:
                return None
            step.add({"prefixkv.server": route.worker, "prefixkv.pages": route.matched_pages})
        self._routes.append((side, route))
        return side.servers[route.worker]

    async def _attempt(self, decode: ServerAt, prefill: ServerAt | None) -> ServerAnswer:
        """Ask decode, and prefill once decode has the request. Raises LostError."""
        proxy, body, line = self._proxy, dict(self._body), self._line
        line.mark("asked")
        line.add(attempts=1)
        line.fields |= {"decode": decode.url, "prefill": prefill.url if prefill else None}
        # One for each attempt: engines name requests by it, and none takes one twice.
        rid = f"{line.fields['id']}#{line.fields['attempts']}"
        if prefill is not None:
            # A new room each time: nothing that arrives late for an earlier one can match it.
            room = line.fields["room"] = secrets.randbits(63)
            params = {"room": room, **body.get(PARAMS, {})}
            body[PARAMS] = {"do_remote_prefill": True, "prefill": prefill.at, **params}
            send = _for_prefill(self._body, self._path)
            send[PARAMS] = {"do_remote_decode": True, "decode": decode.at, **params}
        sent, answer = asyncio.Event(), None
        asked = proxy.ask(
            "decode", decode.url + self._path, body, self._whole, f"{rid}.decode", sent
        )
        loading = asyncio.create_task(asked)
        loading.add_done_callback(lambda _: sent.set())
        proxy.waiting[self] = "" if prefill is None else prefill.url, time.time()
        try:
            if prefill is not None:
                # Decode first: while it is not reached nothing is begun on prefill.
                await sent.wait()
            # Decode already done means it failed or refused: prefill has nothing to send.
            if prefill is not None and not loading.done():
                asked = proxy.ask("prefill", prefill.url + self._path, send, True, f"{rid}.prefill")
                sending = self._sending = asyncio.create_task(asked)
                await asyncio.wait((sending, loading), return_when=asyncio.FIRST_COMPLETED)
                # Prefill answered first: that decides whether decode is worth waiting for.
                if not loading.done():
                    await self._check_sent(sending, loading, prefill)
            answer = await loading
            # Only now: while decode has said nothing it may still wait for prefill's KV.
            if self._sending is not None:
                grace_s = 0.0 if self._whole else _GRACE_S
                asyncio.get_running_loop().call_later(grace_s, self._sending.cancel)
        except aiohttp.ClientError as error:
            raise self._lost("decode", decode.url, error) from None
        finally:
            proxy.waiting.pop(self, None)
            # On every way out but success, so that no request is left there.
            if answer is None:
                await _end(loading)
        if answer.status >= 500:
            await answer.close()
            # A 5xx of a request with a room may come from a transfer that failed: the next attempt
            # takes another prefill server. Without a room decode itself is at fault.
            why = f"{decode.url} said {answer.status}: {answer.first[:500]!r}"
            raise LostError(why, decode.url if prefill is None else prefill.url)
        return answer

    async def _check_sent(
        self, sending: asyncio.Task[ServerAnswer], loading: asyncio.Task[ServerAnswer],
        prefill: ServerAt,
    ) -> None:  # fmt: skip
        """Raise LostError if prefill, which has answered before decode, did not compute the prompt:
        without this server, or without any where decode is to be asked alone."""
        try:
            sent = sending.result()
        except aiohttp.ClientError as error:
            raise self._lost("prefill", prefill.url, error) from None
        why = f"{prefill.url} said {sent.status}: {sent.first[:500]!r}"
        # Faults of this server or of its configuration (key, path, load), not of the request.
        if sent.status >= 500 or sent.status in (401, 403, 404, 429):
            raise LostError(why, prefill.url)
        if sent.status >= 400:  # decode finds the same, in its own words, or can do without prefill
            await asyncio.wait((loading,), timeout=_GRACE_S)
            if not loading.done():
                raise LostError(why, *self._proxy.sides["prefill"].servers)

    def _lost(self, role: Role, server: str, error: Exception) -> LostError:
        why = f"{server} was lost: {error!r}"
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            self._proxy.sides[role].avoid(server)  # which never saw the request
        # A kept connection may break since it was idle for too long: once that is no loss.
        elif role == "decode" and server not in self._broke:
            self._broke.add(server)
            return LostError(why)
        return LostError(why, server)

    async def end(self, answer: ServerAnswer | None) -> None:
        """End everything that is held on either server. Idempotent."""
        # All is taken out of `self` before the first await: a second call, or a cancellation in
        # between, then finds nothing to end twice.
        routes, self._routes = self._routes, []
        sending, self._sending = self._sending, None
        for side, route in routes:
            side.router.ended(route, time.monotonic())
        if answer is not None:
            await answer.close()
        if sending is not None:
            await _end(sending)


async def _end(task: asyncio.Task[ServerAnswer]) -> None:
    """Closing the connection ends the request at the server."""
    task.cancel()
    await asyncio.wait((task,))
    # It may have finished before the cancellation: then its answer may hold a connection.
    if not task.cancelled() and task.exception() is None:
        await task.result().close()


def _for_prefill(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Ask for the same prompt and one greedy token, which is never read."""
    one = {"n": 1, "stream": False, "temperature": 0, "max_tokens": 1}
    if _is_chat(path):
        one["max_completion_tokens"] = 1
    return {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL} | one


def _is_chat(path: str) -> bool:
    return path.endswith("/chat/completions")


def _is_decodes_alone(body: dict[str, Any], path: str) -> bool:
    """Return whether vLLM computes this prompt on decode, whatever its cache holds. Beams are
    separate requests without our parameters, and log-probabilities of a prompt need all of it
    computed; a chat with `echo` computes them unless `top_logprobs` is null."""
    number = body.get("top_logprobs", 0) if _is_chat(path) else body.get("logprobs")
    return bool(
        body.get("use_beam_search")
        or body.get("prompt_logprobs") is not None
        or (body.get("echo") and number is not None)
        or body.get("prompt_embeds") is not None
    )


async def _unknown(request: Request) -> Response:
    known = ", ".join(("/v1/chat/completions", "/v1/completions", *_OPEN, *_TO_DECODE))
    why = f"the proxy does not pass on {request.url.path}; it knows {known}"
    raise ApiError(404, why, code="not_found")


def run_proxy(config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]) -> int:
    """Run until SIGTERM or SIGINT; requests in progress then may end, and a second signal ends them
    at once. Returns the exit status. Raises ConfigError."""
    interrupts.log_to_stderr()

    async def main() -> int:
        proxy, signals = Proxy(config, prefill, decode), interrupts.Signals()
        signals.heed()
        try:
            await proxy.start()
        except BaseException:
            await proxy.stop()
            raise
        interrupts.keep_what_is_loaded()
        print(f"{proxy.server.url}/v1 (health and metrics: {proxy.status.url})", flush=True)
        await signals.stop.wait()
        if not await signals.end(proxy.stop(config.listen.drain_timeout_s)):
            await proxy.stop()
        return 0

    return asyncio.run(main())
