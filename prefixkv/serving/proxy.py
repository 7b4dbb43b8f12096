"""`prefixkv proxy`: OpenAI's interface over prefill and decode servers of an engine with prefixkv's
connector (`docs/vllm.md`).

Each request gets a room. Decode is asked first, prefill as soon as decode has the request. If
prefill fails before decode has answered, another is tried; at last decode computes the prompt.

A `BoundedAffinityRouter` matches the prompt's text in pages of `_PAGE_BYTES`, so a conversation
stays where its KV is. It sees no cache events, only where this proxy has sent prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx
import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.errors import ConfigError
from prefixkv.serving import interrupts, usage
from prefixkv.serving.client import make_client
from prefixkv.serving.config import ProxyConfig, ServerAt
from prefixkv.serving.failures import failed
from prefixkv.serving.http import (
    ApiError,
    Stream,
    count_samples,
    make_app,
    read_body,
    refused,
    run_until_disconnect,
)
from prefixkv.serving.ids import HEADER, id_of
from prefixkv.serving.openai import event
from prefixkv.serving.outcomes import Outcomes, RequestLine, line_of
from prefixkv.serving.passing import (
    ANSWER_BYTES,
    BATCH,
    ServerAnswer,
    data_of,
    parameters_of,
    prompts_of,
    refusal_of,
)
from prefixkv.serving.process import keep_what_is_loaded, log_to_stderr
from prefixkv.serving.request_file import RequestFile
from prefixkv.serving.router import BoundedAffinityRouter
from prefixkv.serving.router import Route as ServerRoute
from prefixkv.serving.status import bind, status_app
from prefixkv.serving.streams import TooMuchError, read_all
from prefixkv.serving.tracing import TracedEndpoint, current, make_tracing
from prefixkv.serving.wire import part_rid
from prefixkv.spi import TOKEN_BYTES, page_keys

logger = logging.getLogger("prefixkv.proxy")

Role = Literal["prefill", "decode"]

_PAGE_BYTES: Final = 1024
_HELD_S: Final = 1800.0  # how long a prompt counts as cached where it was sent
_ATTEMPTS: Final = 3  # with prefill; one more follows without
_AVOIDED_S: Final = 5.0  # how long an unreachable server gets no requests
_CONNECT_S: Final = 5.0
_KEPT_S: Final = 2.0  # an idle connection; servers close theirs after 5 s or later
_PARAMS: Final = "kv_transfer_params"
_GRACE_S: Final = 1.0
"""Wait for prefill's answer after decode's first piece, and for decode's after prefill's
refusal."""
_SAY_EACH_S: Final = 5.0  # at most one log line per server in this time
_TO_DECODE: Final = ("/version", "/tokenize", "/detokenize")
_NOT_FOR_PREFILL: Final = (
    "stream_options", "stream_interval", "min_tokens", "best_of", "use_beam_search",
    "logprobs", "top_logprobs", "logprob_token_ids", "echo", "seed", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "length_penalty", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "include_stop_str_in_output", "structured_outputs", "repetition_detection",
    "thinking_token_budget", "return_token_ids",
)  # fmt: skip
"""Parameters that prefill is not sent: they say how tokens are drawn and reported. Prefill draws
one token, which is never read, and decode is the server that reports an error in them."""


class _AloneError(Exception):
    """Prefill refuses a request that decode may accept: decode is asked alone."""


class _RefusedError(Exception):
    """Decode refuses one of the prompts: `answer` goes to the client."""

    def __init__(self, answer: ServerAnswer) -> None:
        super().__init__(answer)
        self.answer = answer


class LostError(Exception):
    """A failed attempt that another attempt may repair, without `servers`."""

    def __init__(self, why: str, *servers: str) -> None:
        super().__init__(why)
        self.servers = servers


@dataclass(slots=True, eq=False)
class _ServerSide:
    """Servers of one role, the router over them, and those to avoid for now."""

    role: Role
    servers: dict[str, ServerAt]
    router: BoundedAffinityRouter
    avoided: dict[str, float] = field(default_factory=dict)  # by name, time.monotonic()

    @classmethod
    def of(cls, role: Role, servers: Sequence[ServerAt]) -> _ServerSide:
        """Raises ConfigError if there is no server, or two of one name."""
        if not servers:
            raise ConfigError(f"there is no {role} server: --{role} URL=...")
        if len({server.name for server in servers}) < len(servers):
            raise ConfigError(f"a {role} server is named twice")
        router = BoundedAffinityRouter(expect_s=_HELD_S)
        for server in servers:
            router.add_worker(server.name)
        return cls(role, {server.name: server for server in servers}, router)

    def choose(self, keys: Sequence[bytes], lost: Collection[str]) -> ServerRoute | None:
        """None if all are lost. An avoided server is taken only if no other one is left."""
        now_s = time.monotonic()
        left = [name for name in self.servers if name not in lost]
        well = [name for name in left if self.avoided.get(name, 0.0) <= now_s]
        return self.router.route(keys, now_s, among=well or left) if left else None

    def avoid(self, name: str) -> None:
        """Send nothing there for `_AVOIDED_S` while another one is left."""
        self.avoided[name] = time.monotonic() + _AVOIDED_S

    def is_avoided(self, name: str) -> bool:
        return self.avoided.get(name, 0.0) > time.monotonic()

    def states(self) -> dict[str, str]:
        return {name: "avoided" if self.is_avoided(name) else "ok" for name in self.servers}


class Proxy:
    """Owned by one event loop. Raises ConfigError if a role has no server, a server is named twice,
    or an address cannot be bound."""

    def __init__(
        self, config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]
    ) -> None:
        listen = config.listen
        self.draining = False
        self._limits = listen.limits
        self.sides: dict[Role, _ServerSide] = {
            "prefill": _ServerSide.of("prefill", prefill),
            "decode": _ServerSide.of("decode", decode),
        }
        self.metrics = _ProxyMetrics(self)
        self._file = RequestFile(listen.request_log) if listen.request_log else None
        self._outcomes = Outcomes("proxy", {"node": "proxy", "side": "proxy"}, self._file)
        # Request ids: unique over proxies by the prefix, within this one by the number.
        self._prefix, self._num = secrets.token_hex(8), 0
        tracing = self._tracing = make_tracing("proxy")
        # Probes of load balancers carry no key, so /health and /ping are open. The last route
        # answers every other path by an error in OpenAI's form.
        app = make_app(
            [
                Route(
                    "/v1/chat/completions", TracedEndpoint(tracing, self._chat), methods=["POST"]
                ),
                Route("/v1/completions", TracedEndpoint(tracing, self._complete), methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ping", self._health, methods=["GET", "POST"]),
                *(Route(path, self._pass_on, methods=["GET", "POST"]) for path in _TO_DECODE),
                Route("/{path:path}", _unknown, methods=[*_ANY_METHOD]),
            ],
            listen.api_key,
            open_paths=["/health", "/ping"],
            max_requests_per_client=listen.limits.max_requests_per_client,
        )
        collectors = [*self.metrics.collectors, self._outcomes]
        status = status_app(self.health, (), listen, collectors)
        try:
            self.server, self.status = bind(self._outcomes.watch(app), status, listen)
        except BaseException:  # its thread has no other end
            tracing.give_up()
            raise
        key = config.servers_key
        # It has no cap on connections: a request holds two at once, and under a cap requests that
        # hold one could wait for each other.
        self._client = make_client(
            # Uncompressed: a few packed bytes may expand to very many, and are passed on anyway.
            {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {}),
            httpx.Timeout(config.answer_timeout_s, connect=_CONNECT_S), _KEPT_S,
        )  # fmt: skip
        # Runs that decode has not answered yet: prefill's name ("" without one), time.time().
        self.waiting: dict[_ProxiedRequest, tuple[str, float]] = {}
        # By server: no log line until then (time.monotonic()), and how many were left out.
        self._log_limits: dict[str, tuple[float, int]] = {}

    def health(self) -> tuple[bool, dict[str, Any]]:
        states: dict[str, Any] = {role: side.states() for role, side in self.sides.items()}
        ok = not self.draining and "ok" in states["decode"].values()
        state = "draining" if self.draining else "ok" if ok else "no decode server"
        return ok, {"status": state, **states}

    async def start(self) -> None:
        """The status port opens first, so that probes see a proxy that is about to start."""
        await self.status.start()
        await self.server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Accept no more requests, and give those in progress `grace_s` seconds to end."""
        self.draining = True
        await self.server.stop(grace_s)
        await self.status.stop()
        # Last: the answers that the server still sends come through this client.
        await self._client.aclose()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        await self._tracing.close()

    # --- what is asked ----------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return await self._pass_on(request)

    async def _pass_on(self, request: Request) -> Response:
        """Forward a request to the first decode server that can be reached."""
        side = self.sides["decode"]
        body = b"" if request.method == "GET" else await read_body(request, self._limits)
        head = {"content-type": request.headers.get("content-type", "application/json")}
        # Servers that were reached lately come first; an avoided one is still better than none.
        for name in sorted(side.servers, key=lambda name: side.is_avoided(name)):
            url = f"{side.servers[name].url}{request.url.path}"
            asked = self._client.stream(request.method, url, content=body or None, headers=head)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    response = await stack.enter_async_context(asked)
                    rest = response.aiter_raw()
                    content = await read_all(rest, ANSWER_BYTES)
                    # The answer takes the connection over; where reading fails the stack closes it.
                    answer = ServerAnswer(response, content, rest, stack.pop_all())
            except (httpx.HTTPError, TooMuchError):
                side.avoid(name)
                continue
            await answer.close()
            if answer.status >= 400:
                return refusal_of(answer, body)
            return answer.whole(content)
        raise ApiError(503, "no decode server is reached", "server_error", "not_ready")

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.health()[0] else 503)

    def warn(self, server: str, why: str) -> None:
        """Log at most one line per `_SAY_EACH_S` and server: clients that retry at once would
        otherwise fill the log. The next line counts those left out."""
        now_s = time.monotonic()
        until_s, unsaid = self._log_limits.get(server, (0.0, 0))
        if now_s < until_s:
            self._log_limits[server] = until_s, unsaid + 1
            return
        again = f" ({unsaid} more like this meanwhile)" if unsaid else ""
        logger.warning("%s%s", why, again)
        self._log_limits[server] = now_s + _SAY_EACH_S, 0

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, "messages")

    async def _complete(self, request: Request) -> Response:
        return await self._serve(request, "prompt")

    async def _serve(self, request: Request, prompt_field: str) -> Response:
        """Check the few parameters that steer the proxy itself. `prompt_field` names the prompt's
        parameter. Raises ApiError 400, or 503 while the proxy ends."""
        body = parameters_of(await read_body(request, self._limits))
        current().describe_body(request.url.path, body)
        if prompt_field not in body:
            raise refused(prompt_field, "is missing")
        # A client that set them would choose the room and the peers that the engines use.
        if _PARAMS in body:
            raise refused(_PARAMS, "is the proxy's to set")
        for name, kind in (("stream", bool), ("n", int)):
            if not isinstance(body.get(name) or kind(), kind):
                raise refused(name, f"is {body[name]!r}")
        # Checked after the body has been read: draining may have begun meanwhile.
        if self.draining:
            raise ApiError(503, "the proxy is ending", "server_error", "not_ready")
        line = line_of(request.scope)
        self._num += 1
        # It begins with the id in the header, and is unique, even if clients use that again.
        rid = f"{id_of(request.scope)[:100]}-{self._prefix}-{self._num}"
        line.fields |= {"id": rid, "stream": bool(body.get("stream"))}
        return await run_until_disconnect(request, self._answer(request, body, prompt_field, line))

    async def _answer(
        self, request: Request, body: dict[str, Any], prompt_field: str, line: RequestLine
    ) -> Response:
        """Have decode answer, with KV from prefill where it helps. Raises ApiError."""
        begun_s, path = time.monotonic(), request.url.path
        outcome = "aborted"
        try:
            prompts = (
                prompts_of(body[prompt_field]) if prompt_field == "prompt" else [body[prompt_field]]
            )
            if len(prompts) > BATCH:
                raise refused(
                    prompt_field, f"has {len(prompts)} prompts, {BATCH} at most are taken"
                )
            count_samples(request, len(prompts) * (body.get("n") or 1))
            # How the prompt's KV comes to decode:
            # 1. decode computes it itself, whatever its cache holds (`alone`);
            # 2. several prompts, or several answers (`n` > 1): a room carries one prompt, so each
            #    prompt is brought by a request of its own for one token. The request itself then
            #    finds all of them in decode's cache;
            # 3. one prompt and one answer: the request has a room itself (`transfers`).
            alone = _is_decodes_alone(body, path)
            many = not alone and (len(prompts) > 1 or (body.get("n") or 1) > 1)
            cached: int | None = None
            if many:  # a room is one prompt's: each is brought by a request of its own
                one = _for_prefill(body, path)
                async with asyncio.TaskGroup() as group:  # where one fails the others end
                    bringing = [
                        group.create_task(
                            self._bring(path, {**one, prompt_field: prompt}, prompt_field, line)
                        )
                        for prompt in prompts
                    ]
                # One unknown count makes the sum unknown.
                found = [task.result() for task in bringing]
                cached = sum(found) if None not in found else None  # type: ignore[arg-type]
            transfers = not many and not alone
            run = _ProxiedRequest(
                self, path, body, data_of(body[prompt_field]), line, transfers=transfers
            )
            answer = await run.answer()
            ttft_s = time.monotonic() - begun_s
            self.metrics.ttft.observe(ttft_s)
            line.mark("first_token")
            current().add({"gen_ai.response.time_to_first_chunk": ttft_s})
            status = answer.status
            outcome = "finished" if status < 400 else "refused"
            if body.get("stream") and status < 400:
                pieces = self._pieces(answer, cached, line)
                # `Stream` calls `end` when the client has read all of it or has left; until then
                # the run, with its place in the routers, belongs to the stream.
                end = lambda: run.end(answer)  # noqa: E731
                stream = Stream(pieces, self._limits, answer.media_type, end=end)
                stream.headers.update(answer.packing)
                return stream
            try:
                if status >= 400:
                    return refusal_of(answer, msgspec.json.encode(body))
                # A compressed body is passed on as it is: it is not decoded here.
                content = answer.first if answer.packing else usage.of_answer(answer.first, cached)
                line.fields |= usage.counts_of(content)
                return answer.whole(content)
            finally:
                await run.end(answer)
        except ApiError:
            outcome = "failed"
            raise
        except ExceptionGroup as errors:
            # The task group has ended the other prompts' requests. The first failure is the answer.
            first = errors.exceptions[0]
            if isinstance(first, _RefusedError):
                outcome, refusal = "refused", first.answer
                return refusal_of(refusal, msgspec.json.encode(body))
            outcome = "failed"
            raise first from None
        finally:
            self.metrics.requests.labels(outcome).inc()
            line.fields["outcome"] = outcome

    async def _bring(
        self, path: str, body: dict[str, Any], prompt_field: str, line: RequestLine
    ) -> int | None:
        """Have the KV of one prompt sent to decode's cache, by a request of its own. Returns how
        many tokens were there before, if decode says so. Raises _RefusedError, ApiError."""
        data = data_of(body[prompt_field])
        run = _ProxiedRequest(self, path, body, data, line, transfers=True)
        answer = await run.answer()
        # The whole answer is in `first` (not streamed), so both connections can end before it is
        # read.
        await run.end(answer)
        if answer.status >= 400:
            raise _RefusedError(answer)
        return usage.cached_tokens(answer.first)

    async def _pieces(
        self, answer: ServerAnswer, cached: int | None, line: RequestLine
    ) -> AsyncGenerator[bytes, None]:
        """Yield a streamed answer, with `cached` in its usage if that is known. If the server is
        lost midway, the stream ends with an error event: its status has been sent already."""

        async def pieces() -> AsyncGenerator[bytes, None]:
            yield answer.first
            async for piece in answer.rest:
                yield piece

        if answer.packing:
            async for piece in pieces():
                yield piece
            return
        try:
            # Only whole events go out, so that the error event below is not read as part of a torn
            # one.
            stream = usage.whole_events(pieces())
            if cached is not None:
                stream = usage.of_stream(stream, cached)
            async for piece in stream:
                # Before it goes out: a client that leaves after it has its line with these counts.
                line.fields |= usage.counts_of_events(piece)
                yield piece
        except (httpx.HTTPError, TooMuchError) as error:
            self.metrics.cut.inc()
            line.fields["outcome"] = "failed"
            current().fail(f"decode was lost: {error!r}", type(error).__name__)
            yield event(failed(502, "decode was lost", repr(error), "worker_lost").body())

    # --- one request on two servers ---------------------------------------------------------------

    async def ask(
        self, role: Role, url: str, body: dict[str, Any], whole: bool, rid: str,
        sent: asyncio.Event | None = None,
    ) -> ServerAnswer:  # fmt: skip
        """POST `body`, and return when the answer's first piece is here, or all of it for `whole`
        and for errors. `rid` is the request's id there; `sent` is set once the request has left.
        Raises httpx.HTTPError, or TooMuchError for more than `ANSWER_BYTES`."""

        async def trace(name: str, info: Any) -> None:
            if sent is not None and name.endswith("send_request_body.complete"):
                sent.set()

        async with contextlib.AsyncExitStack() as stack:
            content = msgspec.json.encode(body)
            # Its span ends when the answer is closed. Prefill is cut once decode has its KV.
            step = stack.enter_context(
                current().call(role, {"url.full": url}, may_be_cut=role == "prefill")
            )
            head = {"content-type": "application/json", HEADER: rid, **step.headers}
            request = self._client.stream(
                "POST", url, content=content, headers=head, extensions={"trace": trace}
            )
            response = await stack.enter_async_context(request)
            step.add({"http.response.status_code": response.status_code})
            if response.status_code >= 400:
                step.fail(f"status {response.status_code}", str(response.status_code))
            rest = response.aiter_raw()
            if whole or response.status_code >= 400:
                first = await read_all(rest, ANSWER_BYTES)
            else:
                first = await anext(rest, b"")
            # From here on the answer owns the connection; every failure before closes it.
            return ServerAnswer(response, first, rest, stack.pop_all())


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
        self, proxy: Proxy, path: str, body: dict[str, Any], data: bytes, line: RequestLine, *,
        transfers: bool,
    ) -> None:  # fmt: skip
        self._proxy, self._path, self._body, self._line = proxy, path, body, line
        self._transfers = transfers
        self._keys = page_keys(data, _PAGE_BYTES // TOKEN_BYTES)
        self._whole = not body.get("stream")
        # What this attempt holds; `end` releases it: the routers' count of each server's load,
        # prefill's request, and the task that ends that request after the grace.
        self._routes: list[tuple[_ServerSide, ServerRoute]] = []
        self._sending: asyncio.Task[ServerAnswer] | None = None
        self._letting_go: asyncio.Task[None] | None = None
        self._broke: set[str] = set()  # decode servers whose connection broke once

    async def answer(self) -> ServerAnswer:
        """Return decode's answer, also an error of the client's. Raises ApiError 502, 503."""
        lost: set[str] = set()
        # Attempts with prefill, if the request has a room, then one where decode computes the
        # prompt.
        attempts = [True] * _ATTEMPTS * self._transfers + [False]
        for number, transfers in enumerate(attempts):
            last = number == len(attempts) - 1
            decode = self._choose_server("decode", lost)
            if decode is None:
                # Their errors were logged as they came, at a bounded rate.
                detail = f"{', '.join(lost)} failed, and no decode server is left"
                raise failed(503, "no decode server is reached", detail, "not_ready")
            prefill = self._choose_server("prefill", lost) if transfers else None
            # No prefill server is left: skip to the last attempt. Decode was placed above, so the
            # router's count of it goes back first, or its load would stay too high.
            if transfers and prefill is None:
                self._release_routes()
                continue
            if self._transfers and prefill is None:
                self._proxy.metrics.recomputed.inc()
            try:
                return await self._attempt(decode, prefill)
            except _AloneError:
                # Prefill cannot serve it, on any server: all count as lost, which leaves the last
                # attempt.
                await self.end(None)
                lost.update(self._proxy.sides["prefill"].servers)
            except LostError as error:
                self._proxy.warn(error.servers[0] if error.servers else decode.name, str(error))
                # End both requests before the next attempt: its room must not compete with this
                # one.
                await self.end(None)
                lost.update(error.servers)
                if last:
                    why = "the servers that were asked have failed"
                    raise failed(502, why, str(error), "worker_lost") from None
                self._proxy.metrics.retried.inc()
            except BaseException:
                await self.end(None)
                raise
        raise AssertionError

    def _choose_server(self, role: Role, lost: Collection[str]) -> ServerAt | None:
        """Count the request at the server until `_release_routes`. None if all are lost."""
        side = self._proxy.sides[role]
        with current().part("routing", {"prefixkv.role": role}) as step:
            route = side.choose(self._keys, lost)
            if route is None:
                return None
            step.add({"prefixkv.server": route.worker, "prefixkv.pages": route.matched_pages})
        self._routes.append((side, route))
        return side.servers[route.worker]

    async def _attempt(self, decode: ServerAt, prefill: ServerAt | None) -> ServerAnswer:
        """Ask decode, and prefill once decode has the request. Raises LostError, _AloneError."""
        proxy, body, line = self._proxy, dict(self._body), self._line
        line.mark("asked")
        line.add(attempts=1)
        line.fields |= {"decode": decode.name, "prefill": prefill.name if prefill else None}
        # One for each attempt: engines name requests by it, and none takes one twice.
        rid = part_rid(line.fields["id"], line.fields["attempts"])
        if prefill is not None:
            # A new room for each attempt: nothing that arrives late for an earlier one can match
            # it.
            room = line.fields["room"] = secrets.randbits(63)
            body[_PARAMS] = {"do_remote_prefill": True, "room": room, "prefill": prefill.at}
            send = {
                **_for_prefill(self._body, self._path),
                _PARAMS: {"do_remote_decode": True, "room": room, "decode": decode.at},
            }  # fmt: skip
        sent = asyncio.Event()
        url = decode.url + self._path
        loading = asyncio.create_task(
            proxy.ask("decode", url, body, self._whole, f"{rid}.decode", sent)
        )
        proxy.waiting[self] = "" if prefill is None else prefill.name, time.time()
        answer: ServerAnswer | None = None
        try:
            if prefill is not None:
                # Decode first: while it is not reached nothing is begun on prefill.
                await _first(loading, asyncio.create_task(sent.wait()))
            # Decode already done means it failed or refused: prefill has nothing to send.
            if prefill is not None and not loading.done():
                url = prefill.url + self._path
                self._sending = asyncio.create_task(
                    proxy.ask("prefill", url, send, True, f"{rid}.prefill")
                )
                both = (self._sending, loading)
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                # Prefill answered first, so its outcome decides whether decode is worth waiting
                # for.
                if not loading.done():
                    await self._check_sent(self._sending, loading, prefill)
            answer = await loading
            # Only now: while decode has said nothing it may still wait for prefill's KV.
            self._schedule_prefill_end()
        except TooMuchError as error:
            raise LostError(f"{decode.name} said too much: {error}", decode.name) from None
        except httpx.HTTPError as error:
            if _is_unreached(error):
                proxy.sides["decode"].avoid(decode.name)
                self._broke.add(decode.name)
            # A kept connection may break since it was idle for too long: once that is no loss.
            names = [decode.name] if decode.name in self._broke else []
            self._broke.add(decode.name)
            raise LostError(f"{decode.name} was lost: {error!r}", *names) from None
        finally:
            proxy.waiting.pop(self, None)
            # Close decode's connection on every way out but success, so that no request is left
            # there.
            if answer is None:  # also where it had just come
                await _end(loading)
        if answer.status >= 500:
            await answer.close()
            # A 5xx of a request with a room may come from a transfer that failed: the next attempt
            # takes another prefill server. Without a room decode itself is at fault.
            why = f"{decode.name} said {answer.status}: {answer.first[:500]!r}"
            names = [prefill.name] if prefill is not None else [decode.name]
            raise LostError(why, *names)
        return answer

    def _schedule_prefill_end(self) -> None:
        """Decode has answered, or has begun to."""
        if self._sending is not None:
            grace_s = 0.0 if self._whole else _GRACE_S
            self._letting_go = asyncio.create_task(_end_after(self._sending, grace_s))

    async def _check_sent(
        self,
        sending: asyncio.Task[ServerAnswer],
        loading: asyncio.Task[ServerAnswer],
        prefill: ServerAt,
    ) -> None:
        """Raise if prefill, which has answered before decode, did not compute the prompt: LostError
        where another server may, _AloneError where decode is to be asked alone."""
        try:
            sent = sending.result()
        except TooMuchError as error:
            raise LostError(f"{prefill.name} said too much: {error}", prefill.name) from None
        except httpx.HTTPError as error:
            if _is_unreached(error):
                self._proxy.sides["prefill"].avoid(prefill.name)
            raise LostError(f"{prefill.name} was lost: {error!r}", prefill.name) from None
        status = sent.status
        # Faults of this server or of its configuration (key, path, load), not of the request.
        if status >= 500 or status in (401, 403, 404, 429):
            why = f"{prefill.name} said {status}: {sent.first[:500]!r}"
            raise LostError(why, prefill.name)
        if status >= 400:  # decode finds the same, in its own words, or can do without prefill
            await asyncio.wait((loading,), timeout=_GRACE_S)
            if not loading.done():
                raise _AloneError

    def _release_routes(self) -> None:
        now_s = time.monotonic()
        for side, route in self._routes:
            side.router.ended(route, now_s)
        self._routes.clear()

    async def end(self, answer: ServerAnswer | None) -> None:
        """End everything that is held on either server. Idempotent."""
        # Take every resource out of `self` before the first await: a second call, or a cancellation
        # in between, then finds nothing to end twice.
        self._release_routes()
        sending, self._sending = self._sending, None
        letting_go, self._letting_go = self._letting_go, None
        if answer is not None:
            await answer.close()
        if letting_go is not None:
            # Before `sending` is ended: the two would otherwise cancel and close it side by side.
            letting_go.cancel()
            await asyncio.wait((letting_go,))
        if sending is not None:  # also where letting it go has begun
            await _end(sending)


async def _end_after(task: asyncio.Task[ServerAnswer], grace_s: float) -> None:
    """End a request after giving it `grace_s` seconds to end by itself."""
    await asyncio.wait((task,), timeout=grace_s)
    await _end(task)


async def _first(wanted: asyncio.Task[Any], other: asyncio.Task[Any]) -> None:
    """Wait until one of two tasks is done, then cancel `other`."""
    try:
        await asyncio.wait((wanted, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()


async def _end(task: asyncio.Task[ServerAnswer]) -> None:
    """Closing the connection ends the request at the server."""
    task.cancel()
    await asyncio.wait((task,))
    # It may have finished before the cancellation: then its answer holds an open connection.
    if not task.cancelled() and task.exception() is None:
        await task.result().close()


def _is_unreached(error: httpx.HTTPError) -> bool:
    """Return whether the server never saw the request."""
    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))


def _for_prefill(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Ask for the same prompt and one greedy token, which is never read."""
    one = {"n": 1, "stream": False, "temperature": 0, "max_tokens": 1}
    if _is_chat(path):
        one["max_completion_tokens"] = 1
    kept = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    return {**kept, **one}


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
    """Answer any other path by an error that lists those that there are."""
    known = "/v1/chat/completions, /v1/completions, /v1/models, /health, /ping"
    raise ApiError(
        404, f"the proxy does not pass on {request.url.path}; it knows {known}, "
        f"{', '.join(_TO_DECODE)}", code="not_found",
    )  # fmt: skip


_ANY_METHOD: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")


class _ProxyMetrics:
    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self.requests = Counter(
            "prefixkv_proxy_requests", "Requests by how they ended; a stream counts with its first "
            "piece, see prefixkv_proxy_cut.", ["outcome"], registry=None,
        )  # fmt: skip
        self.retried = Counter(
            "prefixkv_proxy_retried", "Attempts that failed and were made again.", registry=None
        )
        self.recomputed = Counter(
            "prefixkv_proxy_recomputed", "Requests that decode was asked to compute itself, since "
            "no prefill server was left.", registry=None,
        )  # fmt: skip
        self.cut = Counter(
            "prefixkv_proxy_cut", "Streams that ended with an error event.", registry=None
        )
        self.ttft = Histogram(
            "prefixkv_proxy_ttft_seconds", "From a request to decode's first piece.", registry=None
        )
        self.collectors = [
            self.requests, self.retried, self.recomputed, self.cut, self.ttft, self
        ]  # fmt: skip
        # All rows are there from the start, so that a rate sees the first request that fails.
        for outcome in ("finished", "refused", "failed", "aborted"):
            self.requests.labels(outcome)

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            "prefixkv_proxy_routing", "What the routers count.", labels=["role", "what"]
        )
        for role, side in self._proxy.sides.items():
            for name, number in side.router.stats().items():
                family.add_metric([role, name], number)
        waiting = GaugeMetricFamily(
            "prefixkv_proxy_rooms_waiting", "Requests to which decode has said nothing yet, by the "
            "prefill server of their room; none: without a room.", labels=["prefill"],
        )  # fmt: skip
        oldest = GaugeMetricFamily(
            "prefixkv_proxy_oldest_waiting_timestamp_seconds", "When the oldest of these was sent, "
            "0 without one.", labels=["prefill"],
        )  # fmt: skip
        since: dict[str, list[float]] = {
            name: [] for name in ("", *self._proxy.sides["prefill"].servers)
        }
        # Collected in a thread (`status.status_app`): copy first, the event loop changes the dict.
        for name, since_s in [*self._proxy.waiting.values()]:
            since[name].append(since_s)
        for name, times in since.items():
            waiting.add_metric([name], len(times))
            oldest.add_metric([name], min(times, default=0.0))
        return [family, waiting, oldest]


def run_proxy(config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]) -> int:
    """Run until SIGTERM or SIGINT; requests in progress then may end, and a second signal ends them
    at once. Returns the exit status. Raises ConfigError."""
    log_to_stderr()

    async def main() -> int:
        proxy = Proxy(config, prefill, decode)
        stop, at_once = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (at_once if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            # Signals are handled before it serves: one that comes during the start is not lost.
            await proxy.start()
        except BaseException:
            await proxy.stop()
            raise
        keep_what_is_loaded()
        print(f"{proxy.server.url}/v1 (health and metrics: {proxy.status.url})", flush=True)
        await stop.wait()
        # `stop` twice is safe: the second call, without grace, cuts what the first still waits for.
        ending = asyncio.create_task(proxy.stop(config.listen.drain_timeout_s))
        cut = asyncio.create_task(at_once.wait())
        await asyncio.wait((ending, cut), return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await proxy.stop()
        cut.cancel()
        await ending
        return 0

    return interrupts.run(main)
