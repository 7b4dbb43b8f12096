"""The proxy: each request gets a room. Decode is asked first, prefill as soon as decode has the
request. If prefill fails before decode has answered, another is tried; at last decode computes the
prompt.

A `BoundedAffinityRouter` matches the prompt's text in pages of `_PAGE_BYTES`, so a conversation
stays where its KV is. It sees no cache events, only where this proxy has sent prompts.

vLLM reports the cached tokens of a prompt if it was started with `--enable-prompt-tokens-details`.
In an answer that is not streamed prefixkv's connector reports them too.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv import Hints
from prefixkv.errors import ConfigError
from prefixkv.proxy.metrics import ProxyMetrics
from prefixkv.serving import interrupts
from prefixkv.serving.api import ApiError, SessionFields, failed, is_inner, refused
from prefixkv.serving.client import make_client, pieces_of
from prefixkv.serving.config import ProxyConfig, ServerAt
from prefixkv.serving.http import (
    Entrance,
    Stream,
    count_samples,
    decode_body,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.log import HEADER, Rate, RequestRecord, current_record
from prefixkv.serving.router import BoundedAffinityRouter
from prefixkv.serving.tracing import current
from prefixkv.spi import TOKEN_BYTES, page_keys

logger = logging.getLogger("prefixkv.proxy")

Role = Literal["prefill", "decode"]

BATCH: Final = 128
"""Most prompts of one request."""

PARAMS: Final = "kv_transfer_params"
_DATA: Final = b"data: "
_WHOLE: Final = re.compile(rb".*(?:\n\r?\n|\r\r)", re.DOTALL)  # events: a line ends in three ways
# How a stream says a 5xx; a 4xx is the request's fault.
_FAILED: Final = re.compile(rb'^data: \{"error"(?!.*"code": ?4\d\d\b)', re.MULTILINE)
_SEVERAL: Final = re.compile(rb'\[\s*[\["]')  # a list of texts, or of lists of tokens
_PAGE_BYTES: Final = 1024
_HELD_S: Final = 1800.0  # how long a prompt counts as cached where it was sent
_ATTEMPTS: Final = 3  # with prefill; one more follows without
_AVOIDED_S: Final = 5.0  # how long an unreachable server gets no requests
_LINES_PER_S: Final = 0.2  # of the log, about one server: clients ask again at once
_GRACE_S: Final = 1.0  # for prefill's answer after decode's first piece
# Of a server's headers, by which clients know when to ask again.
_PASSED: Final = ("retry-after", "ratelimit", "x-ratelimit-", "x-should-retry")
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
    """A failed attempt that another attempt may repair, without `server`; "": with the same.
    `is_refused`: prefill does not take the request, so another one need not be asked."""

    def __init__(self, why: str, server: str = "", is_refused: bool = False) -> None:
        super().__init__(why)
        self.server, self.is_refused = server, is_refused


class _Asked(NamedTuple):
    """What a client asks for. `body` has JSON (`msgspec.Raw`), and what the proxy has set."""

    path: str
    body: dict[str, Any]
    line: RequestRecord
    is_whole: bool  # not streamed

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def field(self) -> str:
        return "messages" if self.is_chat else "prompt"

    def one_token(self) -> dict[str, Any]:
        """Ask for the same prompt and one greedy token, which is never read."""
        one = {"n": 1, "stream": False, "temperature": 0, "max_tokens": 1}
        if self.is_chat:
            one["max_completion_tokens"] = 1
        kept = {name: value for name, value in self.body.items() if name not in _NOT_FOR_PREFILL}
        return kept | one


class ServerAnswer(NamedTuple):
    """Its head and first piece have arrived; all of it, if it is not streamed. Of a stream the rest
    is still to be read from the connection."""

    status: int
    media_type: str
    first: bytes
    rest: AsyncGenerator[bytes, None]
    connection: AsyncExitStack

    def said(self, server: str) -> str:
        return f"{server} said {self.status}: {self.first[:500]!r}"


class _ServerSide:
    """Servers of one role, the router over them, and those to avoid for now. Raises ConfigError if
    there is no server, or two of one name."""

    def __init__(self, role: Role, servers: Sequence[ServerAt]) -> None:
        self.role: Role = role
        self.servers = {server.url: server for server in servers}
        self.router = BoundedAffinityRouter(expect_s=_HELD_S)
        self._avoided_until_s: dict[str, float] = {}  # time.monotonic()
        if not servers:
            raise ConfigError(f"there is no {role} server: --{role} URL=...")
        if len(self.servers) < len(servers):
            raise ConfigError(f"a {role} server is named twice")
        for name in self.servers:
            self.router.add_worker(name)

    @contextlib.contextmanager
    def chosen(self, keys: Sequence[bytes], lost: Collection[str]) -> Iterator[ServerAt | None]:
        """Count a request at a server; None if all are lost. An avoided server is taken only if no
        other one is left."""
        left = [name for name in self.servers if name not in lost]
        well = [name for name in left if not self.is_avoided(name)]
        if not left:
            yield None
            return
        route = self.router.route(keys, time.monotonic(), among=well or left)
        current().add({f"prefixkv.{self.role}_matched_pages": route.matched_pages})
        try:
            yield self.servers[route.worker]
        finally:
            self.router.ended(route, time.monotonic())

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
        self.metrics = ProxyMetrics(self._routing, self.sides["prefill"].servers)
        self.rates: defaultdict[str, Rate] = defaultdict(partial(Rate, 1.0, _LINES_PER_S))
        super().__init__("proxy", config.listen)
        serve = self._tracing.traced(self._serve)
        routes = [
            Route("/v1/chat/completions", serve, methods=["POST"]),
            Route("/v1/completions", serve, methods=["POST"]),
            *(Route(path, self._show_health, methods=["GET", "POST"]) for path in _OPEN),
            *(Route(path, self._pass_on, methods=["GET", "POST"]) for path in _TO_DECODE),
            Route("/{path:path}", _unknown, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        self._bind(routes, _OPEN, self.metrics.collectors)
        # No bound on connections: a request holds two at once, and under a bound requests that hold
        # one could wait for each other.
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_note_sent)
        self.client = make_client(config.servers_key, config.answer_timeout_s, None, trace)

    def health(self) -> tuple[bool, dict[str, Any]]:
        states: dict[str, dict[str, str]] = {
            role: {name: "avoided" if side.is_avoided(name) else "ok" for name in side.servers}
            for role, side in self.sides.items()
        }
        ok = not self.draining and "ok" in states["decode"].values()
        state = "draining" if self.draining else "ok" if ok else "no decode server"
        return ok, {"status": state, **states}

    def _routing(self) -> dict[str, int]:
        return {
            f"{role}_{name}": number
            for role, side in self.sides.items()
            for name, number in side.router.stats().items()
        }

    async def start(self) -> None:
        """The status port opens first, so that probes see a proxy that is about to start."""
        await self.status.start()
        await self.server.start()

    async def _close(self) -> None:
        await self.client.close()

    # --- what is asked ----------------------------------------------------------------------------

    async def _pass_on(self, request: Request) -> Response:
        """Forward a request to the first decode server that can be reached."""
        side = self.sides["decode"]
        body = b"" if request.method == "GET" else await read_body(request, self._limits)
        head = {"content-type": request.headers.get("content-type", "application/json")}
        # Servers that were reached lately come first; an avoided one is still better than none.
        for name in sorted(side.servers, key=side.is_avoided):
            url = name + request.url.path
            content = io.BytesIO(body) if body else None
            asked = self.client.request(request.method, url, data=content, headers=head)
            try:
                async with asked as answer:
                    found = await answer.read()
                    _pass_headers(answer)
            except aiohttp.ClientError:
                side.avoid(name)
                continue
            if answer.status >= 400:
                raise refusal_of(url, answer.status, found, body)
            return Response(found, answer.status, media_type=answer.headers.get("content-type"))
        raise ApiError(503, "no decode server is reached", "server_error", "not_ready")

    async def _serve(self, request: Request) -> Response:
        """Check the few parameters that steer the proxy itself. Raises ApiError 400, or 503 while
        the proxy ends."""
        line = current_record()
        body, given = parameters_of(await read_body(request, self._limits))
        asked = _Asked(request.url.path, body, line, not given.stream)
        current().describe_request(asked.path, msgspec.structs.asdict(given))
        if asked.field not in body:
            raise refused(asked.field, "is missing")
        # A client that set them would choose the room and the peers that the engines use.
        if bytes(body.pop(PARAMS, b"null")) != b"null":
            raise refused(PARAMS, "is the proxy's to set")
        hints = given.hints(request)
        if hints != Hints():
            body[PARAMS] = {"hints": msgspec.to_builtins(hints)}
        if hints.session:  # vLLM's cache events name it
            body["session_id"] = hints.session
        body.pop("kv_hints", None)  # vLLM's field of that name is an envelope
        # Checked after the body has been read: draining may have begun meanwhile.
        if self.draining:
            raise ApiError(503, "the proxy is ending", "server_error", "not_ready")
        rid = self._new_rid(line.id[:100])
        line.fields |= {"id": rid, "stream": not asked.is_whole}
        is_alone, num = given.computes_alone(asked.is_chat), max(given.n or 1, 1)
        return await run_until_disconnect(request, self._answer(request, asked, num, is_alone))

    async def _answer(self, request: Request, asked: _Asked, num: int, is_alone: bool) -> Response:
        """Have decode answer, with KV from prefill where it helps. Raises ApiError.

        1. Decode computes the prompt itself, whatever its cache holds: `is_alone`.
        2. Several prompts, or several answers (`n` > 1): a room is one prompt's, so each is brought
           by a request of its own for one token. The request itself then finds all in decode's
           cache.
        3. One prompt and one answer: the request has a room itself.
        """
        cached = None
        with self.metrics.counted() as line:
            prompts = (
                [asked.body[asked.field]] if asked.is_chat else prompts_of(asked.body["prompt"])
            )
            num *= len(prompts)
            count_samples(request, num)
            if num > 1 and not is_alone:
                cached = await self._bring(asked, prompts)
            async with AsyncExitStack() as held:
                run = _ProxiedRequest(self, asked, transfers=num == 1 and not is_alone)
                answer = await run.answer(held)
                self.metrics.begun(line)
                if asked.is_whole:
                    content, counted = retold(answer.first, cached)
                    line.fields |= counted
                    return Response(content, answer.status, media_type=answer.media_type)
                # `Stream` calls `end` when the client has read all of it or has left; until then
                # what the run holds belongs to the stream.
                return Stream(
                    self._pieces(answer, cached, line), answer.media_type,
                    end=held.pop_all().aclose,
                )  # fmt: skip

    async def _bring(self, asked: _Asked, prompts: Sequence[msgspec.Raw]) -> int | None:
        """Have the KV of prompts sent to decode's cache, by a request each. Returns how many tokens
        were there before, if decode says so. Raises ApiError; where one fails the others end."""

        async def bring(prompt: msgspec.Raw) -> int | None:
            body = asked.one_token() | {asked.field: prompt}
            run = _ProxiedRequest(self, asked._replace(body=body, is_whole=True), transfers=True)
            async with AsyncExitStack() as held:
                return retold((await run.answer(held)).first, None)[1].get("decode_hit_tokens")

        try:
            async with asyncio.TaskGroup() as group:
                runs = [group.create_task(bring(prompt)) for prompt in prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first one is the answer
        counts = [count for run in runs if (count := run.result()) is not None]
        # One unknown count makes the sum unknown.
        return sum(counts) if len(counts) == len(runs) else None

    async def _pieces(
        self, answer: ServerAnswer, cached: int | None, line: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        """Yield a streamed answer, with `cached` in its usage if that is known. If the server is
        lost midway, the stream ends with an error event: its status has been sent already."""

        try:
            # Only whole events go out, so that the error event is not read as part of a torn one.
            async for events in whole_events(answer.first, answer.rest):
                piece, counted = retold_events(events, cached)
                # Before it goes out: a client that leaves after it has its line with these counts.
                line.fields |= counted
                if _FAILED.search(piece):
                    self._failed(line, "decode has failed", "server_error")
                yield piece
        except aiohttp.ClientError as error:
            why, kind = "decode was lost", type(error).__name__
            self._failed(line, f"{why}: {error}", kind)
            body = failed(502, why, f"{kind} {error}", "worker_lost").body()
            yield b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _failed(self, line: RequestRecord, why: str, kind: str) -> None:
        """Count a stream that ends with an error event."""
        self.metrics.cut.inc()
        line.fields["outcome"] = "failed"
        current().fail(why, kind)


def _pass_headers(answer: aiohttp.ClientResponse) -> None:
    current_record().headers = {
        name: value for name, value in answer.headers.items() if name.lower().startswith(_PASSED)
    }


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

    def __init__(self, proxy: Proxy, asked: _Asked, *, transfers: bool) -> None:
        self._proxy, self._asked, self._transfers = proxy, asked, transfers
        # JSON without its last character: the closing bracket or quote is what the next turn
        # replaces.
        text = bytes(asked.body[asked.field])[:-1]
        self._keys = page_keys(text, _PAGE_BYTES // TOKEN_BYTES)
        self._broke: set[str] = set()  # decode servers whose connection broke once

    async def answer(self, held: AsyncExitStack) -> ServerAnswer:
        """Return decode's answer; `held` gets what is to end with it on either server. Raises
        ApiError: 502, 503, or decode's own refusal."""
        proxy, lost = self._proxy, set[str]()
        attempts_left = _ATTEMPTS if self._transfers else 0
        while True:
            # All of an attempt ends before the next one: their rooms must not compete.
            async with AsyncExitStack() as stack:
                decode = stack.enter_context(proxy.sides["decode"].chosen(self._keys, lost))
                if decode is None:
                    # Their errors were logged as they came, at a bounded rate.
                    detail = f"{', '.join(filter(None, lost))} failed, and no decode server is left"
                    raise failed(503, "no decode server is reached", detail, "not_ready")
                # Without one it is the last attempt: decode computes the prompt.
                prefill = None
                if attempts_left > 0:
                    prefill = stack.enter_context(proxy.sides["prefill"].chosen(self._keys, lost))
                if self._transfers and prefill is None:
                    proxy.metrics.recomputed.inc()
                try:
                    answer = await self._attempt(stack, decode, prefill)
                except LostError as error:
                    if proxy.rates[error.server or decode.url].take(time.monotonic()):
                        logger.warning("%s", error)
                    lost.add(error.server)
                    if prefill is None and error.server:
                        why = "the servers that were asked have failed"
                        raise failed(502, why, str(error), "worker_lost") from None
                    proxy.metrics.retried.inc()
                    attempts_left = 0 if error.is_refused else attempts_left - 1
                else:
                    await held.enter_async_context(stack.pop_all())
                    return answer

    async def _attempt(
        self, stack: AsyncExitStack, decode: ServerAt, prefill: ServerAt | None
    ) -> ServerAnswer:
        """Ask decode, and prefill once decode has the request. Raises LostError, and ApiError for a
        refusal."""
        asked, line = self._asked, self._asked.line
        load, send = dict(asked.body), asked.one_token()
        line.mark("asked")
        line.fields["attempts"] = line.fields.get("attempts", 0) + 1
        line.fields |= {"decode": decode.url, "prefill": prefill.url if prefill else None}
        # One for each attempt: engines name requests by it, and none takes one twice.
        rid = f"{line.fields['id']}#{line.fields['attempts']}"
        if prefill is not None:
            # A new room each time: nothing that arrives late for an earlier one can match it.
            room = line.fields["room"] = secrets.randbits(63)
            params = {"room": room, **load.get(PARAMS, {})}
            load[PARAMS] = {"do_remote_prefill": True, "prefill": prefill.at, **params}
            send[PARAMS] = {"do_remote_decode": True, "decode": decode.at, **params}
        is_sent = asyncio.Event()
        loading = self._start(stack, "decode", decode.url, load, rid, is_sent)
        loading.add_done_callback(lambda _: is_sent.set())
        waiting = self._proxy.metrics.waiting
        waiting[loading] = "" if prefill is None else prefill.url, time.time()
        loading.add_done_callback(waiting.pop)
        if prefill is not None:
            # Decode first: while it is not reached nothing is begun on prefill.
            await is_sent.wait()
        # Decode already done means it failed or refused: prefill has nothing to send.
        if prefill is not None and not loading.done():
            sending = self._start(stack, "prefill", prefill.url, send, rid)
            await asyncio.wait((sending, loading), return_when=asyncio.FIRST_COMPLETED)
            # Prefill answered first: if it failed, decode is not worth waiting for. What prefill
            # refuses, decode is asked alone at last, and says in its own words.
            if not loading.done():
                sending.result()
            await asyncio.wait((loading,))
            # Only now: while decode has said nothing it may still wait for prefill's KV.
            grace_s = 0.0 if asked.is_whole else _GRACE_S
            asyncio.get_running_loop().call_later(grace_s, sending.cancel)
        answer = await loading
        if answer.status >= 500 or _FAILED.search(answer.first):
            # A 5xx of a request with a room may come from a transfer that failed: the next attempt
            # takes another prefill server. Without a room decode itself is at fault.
            raise LostError(answer.said(decode.url), (prefill or decode).url)
        if answer.status >= 400:
            given = msgspec.json.encode(asked.body)
            raise refusal_of(decode.url, answer.status, answer.first, given)
        return answer

    def _start(
        self, stack: AsyncExitStack, role: Role, server: str, body: dict[str, Any], rid: str,
        is_sent: asyncio.Event | None = None,
    ) -> asyncio.Task[ServerAnswer]:  # fmt: skip
        """Ask a server, until `stack` is closed."""
        asking = asyncio.create_task(self._ask(role, server, body, f"{rid}.{role}", is_sent))
        stack.push_async_callback(_end, asking)
        return asking

    async def _ask(
        self, role: Role, server: str, body: dict[str, Any], rid: str,
        is_sent: asyncio.Event | None,
    ) -> ServerAnswer:  # fmt: skip
        """POST `body`; `is_sent` is set once it leaves. Raises LostError for a server that is lost,
        or is to prefill and refuses."""
        client, url = self._proxy.client, server + self._asked.path
        content = io.BytesIO(msgspec.json.encode(body))
        try:
            async with AsyncExitStack() as stack:
                # Its span ends with the connection. Prefill is cut once decode has its KV.
                step = stack.enter_context(
                    current().call(role, {"url.full": url}, may_be_cut=role == "prefill")
                )
                head = {"content-type": "application/json", HEADER: rid, **step.headers}
                asked = client.post(url, data=content, headers=head, trace_request_ctx=is_sent)
                answer = await stack.enter_async_context(asked)
                step.add({"http.response.status_code": answer.status})
                if role == "decode":
                    _pass_headers(answer)
                media_type = answer.headers.get("content-type", "application/json")
                rest, kept = pieces_of(client, answer), AsyncExitStack()
                if answer.status >= 400:
                    step.fail(f"status {answer.status}", str(answer.status))
                if self._asked.is_whole or role == "prefill" or answer.status >= 400:
                    first = b"".join([piece async for piece in rest])
                else:
                    first = await anext(rest, b"")
                    # From here on the answer owns the connection; every failure before closes it.
                    kept = stack.pop_all()
        except aiohttp.ClientError as error:
            # Not its repr, which may have the headers that were sent, and the servers' key.
            why = f"{server} was lost: {type(error).__name__} {error}"
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                self._proxy.sides[role].avoid(server)  # which never saw the request
            # A kept connection may break since it was idle for too long: once that is no loss.
            elif role == "decode" and server not in self._broke:
                self._broke.add(server)
                raise LostError(why) from None
            raise LostError(why, server) from None
        found = ServerAnswer(answer.status, media_type, first, rest, kept)
        if role == "prefill" and found.status >= 400:
            # These are the client's fault, whichever server is asked.
            raise LostError(found.said(server), server, found.status in (400, 413, 422))
        return found


async def _end(asking: asyncio.Task[ServerAnswer]) -> None:
    """Closing the connection ends the request at the server."""
    asking.cancel()
    await asyncio.wait((asking,))
    # It may have finished before the cancellation: then its answer may hold a connection.
    if not asking.cancelled() and asking.exception() is None:
        await asking.result().connection.aclose()


# --- bodies: decoded only as far as needed -------------------------------------------------------


class Steering(SessionFields, kw_only=True):
    """The parameters that a proxy looks at itself."""

    stream: bool | None = None
    n: int | None = None
    # For traces.
    model: Any = None
    max_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    seed: Any = None
    # By which vLLM computes a prompt on decode: see `computes_alone`.
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"null")
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = 0

    def computes_alone(self, is_chat: bool) -> bool:
        """Return whether vLLM computes this prompt on decode, whatever its cache holds. Beams are
        separate requests without our parameters, and log-probabilities of a prompt need all of it
        computed; a chat with `echo` computes them unless `top_logprobs` is null."""
        number = self.top_logprobs if is_chat else self.logprobs
        return bool(
            self.use_beam_search
            or self.prompt_logprobs is not None
            or (self.echo and number is not None)
            or bytes(self.prompt_embeds) != b"null"
        )


def parameters_of(body: bytes) -> tuple[dict[str, Any], Steering]:
    """Return all members as JSON, and those that steer the proxy. Raises ApiError 400."""
    members = decode_body(body, dict[str, msgspec.Raw])
    # Copies: the body itself, with the blanks in it, does not live as long as the answer.
    return {name: raw.copy() for name, raw in members.items()}, decode_body(body, Steering)


def prompts_of(prompt: msgspec.Raw) -> list[msgspec.Raw]:
    """Return the prompts: one text or list of tokens, or several of either. Raises ApiError if
    there are more than `BATCH`."""
    text, prompts = bytes(prompt), [prompt]
    if _SEVERAL.match(text):
        prompts = decode_body(text, list[msgspec.Raw])
    if len(prompts) > BATCH:
        raise refused("prompt", f"has {len(prompts)} prompts, {BATCH} at most are taken")
    return prompts


class _RefusedError(ApiError):
    """What a server said of a request, in its own words."""

    def __init__(self, status: int, answer: bytes) -> None:
        super().__init__(status, "the request is refused")
        self._answer = answer

    def response(self) -> Response:
        return Response(self._answer, self.status, media_type="application/json")


def refusal_of(url: str, status: int, answer: bytes, asked: bytes) -> ApiError:
    """Make the error of a server's own words, if they are about the request, and hold no address,
    path or trace that the client did not send."""
    detail = f"{url} said {status}: {answer[:1000]!r}"
    # A wrong key or a broken server is trouble between proxy and server.
    if status in (401, 403) or status >= 500:
        why = "the servers that were asked have failed"
        return failed(502 if status < 500 else status, why, detail, "worker_lost")
    if words := _decoded(answer):
        plain = msgspec.json.encode(words).decode()  # without escapes that hide anything
        if not is_inner(plain, asked.decode("utf-8", "replace")):
            return _RefusedError(status, answer)
    return failed(status, "the request is refused", detail, "refused")


def _decoded(answer: bytes) -> dict[str, Any]:
    """Return an answer or event as a JSON object; empty if it is none."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _object(parsed: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object; empty if it is none: another server's words."""
    found = parsed.get(name)
    return found if isinstance(found, dict) else {}


def retold(answer: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Return an answer or event with the cached tokens in its usage, `cached` if given, and without
    what the connector adds for the proxy alone; and the tokens that it counts, by their names in
    the request log. An answer without usage is returned as it is."""
    parsed = _decoded(answer)
    usage, ours = _object(parsed, "usage"), _object(_object(parsed, PARAMS), "prefixkv")
    if not usage:
        return answer, {}
    details = _object(usage, "prompt_tokens_details")
    known = (cached, ours.get("cached_tokens"), details.get("cached_tokens"))
    cached = next((one for one in known if type(one) is int), None)
    # The room and addresses in them are not a client's; an error report is.
    if PARAMS in parsed and "error" not in ours:
        parsed[PARAMS] = None
    counts = {"prompt_tokens": usage.get("prompt_tokens"),
              "output_tokens": usage.get("completion_tokens", 0)}  # fmt: skip
    if cached is not None:
        usage["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        counts["decode_hit_tokens"] = cached
    is_counted = all(type(count) is int for count in counts.values())
    return msgspec.json.encode(parsed), counts if is_counted else {}


def retold_events(events: bytes, cached: int | None) -> tuple[bytes, dict[str, int]]:
    """Do as `retold` with whole events. The last count holds: with `continuous_usage_stats` each is
    of the answer so far."""
    lines, counts = events.splitlines(keepends=True), dict[str, int]()
    for number, line in enumerate(lines):
        # Nearly all lines are passed on without decoding.
        if line.startswith(_DATA) and b'"prompt_tokens' in line:
            text = line.rstrip(b"\r\n")
            told, counted = retold(text[len(_DATA) :], cached)
            lines[number] = _DATA + told + line[len(text) :]
            counts |= counted
    return b"".join(lines), counts


async def whole_events(piece: bytes, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Cut a stream, which begins with `piece`, into whole server-sent events. If an exception
    breaks it off within an event, that rest is left out: an error event sent after it would be read
    as part of it."""
    rest = b""
    while piece:
        rest += piece
        if events := _WHOLE.match(rest):
            yield events[0]
            rest = rest[events.end() :]
        piece = await anext(pieces, b"")
    # A stream that ends in order may lack the last blank line.
    if rest:
        yield rest


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
        interrupts.say(f"{proxy.server.url}/v1 (health and metrics: {proxy.status.url})")
        await signals.stop.wait()
        if not await signals.end(proxy.stop(config.listen.drain_timeout_s)):
            await proxy.stop()
        return 0

    return asyncio.run(main())
