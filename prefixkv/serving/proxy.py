"""`prefixkv proxy`: OpenAI's requests, each placed on a prefill and a decode server of an engine
that has prefixkv's connector (vLLM's: `docs/vllm.md`).

It draws a room for each request and asks both servers at once; what decode answers goes to the
client as it comes. Where prefill fails before anything was said, another one is tried, and last of
all decode is asked to compute the prompt itself. What was not said when a client left is ended on
both.

A prompt's place is chosen by its text: pages of `_PAGE_BYTES` of it are what a
`BoundedAffinityRouter` is told, so that a conversation stays where its KV is. It follows no cache
events; it goes by where it has sent prompts itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httpx
import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv.cache.events import page_keys
from prefixkv.cache.radix_key import TOKEN_BYTES
from prefixkv.errors import ConfigError
from prefixkv.routing import BoundedAffinityRouter
from prefixkv.routing import Route as Place
from prefixkv.serving.abandoned import Abandoned
from prefixkv.serving.config import ProxyConfig, ServerAt
from prefixkv.serving.http import (
    ApiError,
    Stream,
    decode_body,
    make_app,
    read_body,
    unless_gone,
)
from prefixkv.serving.openai import event, refused
from prefixkv.serving.process import log_to_stderr
from prefixkv.serving.status import bind, status_app

logger = logging.getLogger("prefixkv.proxy")

Role = Literal["prefill", "decode"]

_PAGE_BYTES: Final = 1024
_HELD_S: Final = 1800.0  # a prompt counts as cached where it went
_ATTEMPTS: Final = 3  # with prefill; then one more without
_AVOIDED_S: Final = 5.0  # a server that could not be reached
_CONNECT_S: Final = 5.0
_KEPT_S: Final = 2.0  # an idle connection; servers close theirs after five seconds, and later
_BATCH: Final = 128  # prompts of one request
_PARAMS: Final = "kv_transfer_params"
_NOT_FOR_PREFILL: Final = (
    "stream_options", "min_tokens", "logprobs", "top_logprobs", "echo", "best_of",
    "use_beam_search",
)  # fmt: skip


class LostError(Exception):
    """An attempt failed that another may make good. `servers` are not to be asked again."""

    def __init__(self, why: str, *servers: str) -> None:
        super().__init__(why)
        self.servers = servers


@dataclass(slots=True, eq=False)
class _Answer:
    """What decode says: the head and the first piece are here, the rest is to come."""

    response: httpx.Response
    first: bytes
    rest: AsyncIterator[bytes]
    stack: contextlib.AsyncExitStack

    @property
    def media_type(self) -> str:
        return str(self.response.headers.get("content-type", "application/json"))

    async def close(self) -> None:
        await self.stack.aclose()


@dataclass(slots=True, eq=False)
class _Side:
    """The servers of one role."""

    role: Role
    servers: dict[str, ServerAt]
    router: BoundedAffinityRouter
    avoided: dict[str, float] = field(default_factory=dict)  # until when

    @classmethod
    def of(cls, role: Role, servers: Sequence[ServerAt]) -> _Side:
        if not servers:
            raise ConfigError(f"there is no {role} server: --{role} URL=...")
        if len({server.name for server in servers}) < len(servers):
            raise ConfigError(f"a {role} server is named twice")
        router = BoundedAffinityRouter(expect_s=_HELD_S)
        for server in servers:
            router.add_worker(server.name)
        return cls(role, {server.name: server for server in servers}, router)

    def place(self, keys: Sequence[bytes], lost: Collection[str]) -> Place | None:
        """Where a request goes; None where every server is lost."""
        now_s = time.monotonic()
        left = [name for name in self.servers if name not in lost]
        well = [name for name in left if self.avoided.get(name, 0.0) <= now_s]
        return self.router.route(keys, now_s, among=well or left) if left else None

    def avoid(self, name: str) -> None:
        self.avoided[name] = time.monotonic() + _AVOIDED_S

    def states(self) -> dict[str, str]:
        now_s = time.monotonic()
        return {
            name: "avoided" if self.avoided.get(name, 0.0) > now_s else "ok"
            for name in self.servers
        }


class Proxy:
    """See the module's text. Used on one event loop.

    Args:
        config: where it listens, and its limits.
        prefill, decode: the servers.
    Raises: ConfigError where there is no server of a kind, one is named twice, or an address cannot
        be bound.
    """

    def __init__(
        self, config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]
    ) -> None:
        listen = config.listen
        self.draining = False
        self._limits = listen.limits
        self.sides: dict[Role, _Side] = {
            "prefill": _Side.of("prefill", prefill),
            "decode": _Side.of("decode", decode),
        }
        self.metrics = _Metrics(self)
        app = make_app(
            [
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ],
            listen.api_key,
            max_requests_per_client=listen.limits.max_requests_per_client,
        )
        status = status_app(self.health, (), listen, self.metrics.collectors)
        self.server, self.status = bind(app, status, listen)
        key = config.servers_key
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.answer_timeout_s, connect=_CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEPT_S
            ),
            trust_env=False,
        )
        self._abandoned = {name: Abandoned() for name in self.sides["decode"].servers}

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether it takes requests, and which servers it could not reach of late."""
        states: dict[str, Any] = {role: side.states() for role, side in self.sides.items()}
        ok = not self.draining and "ok" in states["decode"].values()
        state = "draining" if self.draining else "ok" if ok else "no decode server"
        return ok, {"status": state, **states}

    async def start(self) -> None:
        await self.status.start()
        await self.server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more requests; those under way have `grace_s` to end."""
        self.draining = True
        await self.server.stop(grace_s)
        for abandoned in self._abandoned.values():
            await abandoned.stop()
        await self.status.stop()
        await self._client.aclose()

    # --- what is asked ----------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        for name, server in self.sides["decode"].servers.items():
            try:
                answer = await self._client.get(f"{server.url}/v1/models")
            except httpx.HTTPError:
                self.sides["decode"].avoid(name)
                continue
            return Response(answer.content, answer.status_code, media_type="application/json")
        raise ApiError(503, "no decode server is reached", "server_error", "not_ready")

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, "messages")

    async def _complete(self, request: Request) -> Response:
        return await self._serve(request, "prompt")

    async def _serve(self, request: Request, what: str) -> Response:
        body = decode_body(await read_body(request, self._limits), dict[str, Any])
        if what not in body:
            raise refused(what, "is missing")
        if _PARAMS in body:
            raise refused(_PARAMS, "is the proxy's to set")
        for name, kind in (("stream", bool), ("n", int)):
            if not isinstance(body.get(name) or kind(), kind):
                raise refused(name, f"is {body[name]!r}")
        if self.draining:
            raise ApiError(503, "the proxy is ending", "server_error", "not_ready")
        return await unless_gone(request, self._answer(request.url.path, body, what))

    async def _answer(self, path: str, body: dict[str, Any], what: str) -> Response:
        begun_s = time.monotonic()
        outcome = "aborted"
        try:
            prompts = _prompts(body[what]) if what == "prompt" else [body[what]]
            if len(prompts) > _BATCH:
                raise refused(what, f"has {len(prompts)} prompts, {_BATCH} at most are taken")
            many = len(prompts) > 1 or (body.get("n") or 1) > 1
            if many:  # a room is one prompt's: each is brought by a request of its own
                one = {**body, "n": 1, "stream": False, **_one_token(path)}
                for name in _NOT_FOR_PREFILL:
                    one.pop(name, None)
                async with asyncio.TaskGroup() as group:  # where one fails the others end
                    for prompt in prompts:
                        group.create_task(self._bring(path, {**one, what: prompt}, what))
            run = _Run(self, path, body, _data(body[what], what), transfers=not many)
            answer = await run.answer()
            self.metrics.ttft.observe(time.monotonic() - begun_s)
            outcome = "finished" if answer.response.status_code < 400 else "refused"
            if body.get("stream") and answer.response.status_code < 400:
                return Stream(
                    self._pieces(answer), self._limits, answer.media_type,
                    end=lambda: run.end(answer),
                )  # fmt: skip
            try:
                return Response(
                    answer.first, answer.response.status_code, media_type=answer.media_type
                )
            finally:
                await run.end(answer)
        except ApiError:
            outcome = "failed"
            raise
        except ExceptionGroup as errors:
            outcome = "failed"
            raise errors.exceptions[0] from None
        finally:
            self.metrics.requests.labels(outcome).inc()

    async def _bring(self, path: str, body: dict[str, Any], what: str) -> None:
        """Have a prompt's KV come to decode's cache."""
        run = _Run(self, path, body, _data(body[what], what), transfers=True)
        await run.end(await run.answer())

    async def _pieces(self, answer: _Answer) -> AsyncGenerator[bytes, None]:
        try:
            yield answer.first
            async for piece in answer.rest:
                yield piece
        except httpx.HTTPError as error:
            self.metrics.cut.inc()
            lost = ApiError(502, f"decode was lost: {error!r}", "server_error", "worker_lost")
            yield event(lost.body())

    # --- one request on two servers ---------------------------------------------------------------

    async def ask(self, url: str, body: dict[str, Any], whole: bool) -> _Answer:
        """Ask one server. Returns when its first piece is here, or all of it. Raises
        httpx.HTTPError."""
        async with contextlib.AsyncExitStack() as stack:
            content = msgspec.json.encode(body)
            head = {"content-type": "application/json"}
            request = self._client.stream("POST", url, content=content, headers=head)
            response = await stack.enter_async_context(request)
            rest = response.aiter_bytes()
            if whole or response.status_code >= 400:
                first = await response.aread()
            else:
                first = await anext(rest, b"")
            return _Answer(response, first, rest, stack.pop_all())

    def abandon(self, decode: ServerAt, room: int, prefill: str) -> None:
        """A request with this room was for decode, which was not reached, or was lost before it
        said anything: if it never had it, prefill would hold the KV for a long time."""
        self._abandoned[decode.name].add(self._client, decode, room, prefill)


class _Run:
    """One request: its attempts, and what has to be ended with it."""

    def __init__(
        self, proxy: Proxy, path: str, body: dict[str, Any], data: bytes, *, transfers: bool
    ) -> None:
        self._proxy, self._path, self._body = proxy, path, body
        self._transfers = transfers
        self._keys = page_keys(data, _PAGE_BYTES // TOKEN_BYTES)
        self._whole = not body.get("stream")
        self._places: list[tuple[_Side, Place]] = []
        self._sending: asyncio.Task[_Answer] | None = None
        self._broke: set[str] = set()  # decode servers whose connection broke once

    async def answer(self) -> _Answer:
        """What decode says, an error of the client's included. Raises ApiError 502, 503."""
        lost: set[str] = set()
        attempts = [True] * _ATTEMPTS * self._transfers + [False]
        for number, transfers in enumerate(attempts):
            last = number == len(attempts) - 1
            decode = self._place("decode", lost)
            if decode is None:
                raise ApiError(503, "no decode server is reached", "server_error", "not_ready")
            prefill = self._place("prefill", lost) if transfers else None
            if transfers and prefill is None:
                self._leave()
                continue
            if self._transfers and prefill is None:
                self._proxy.metrics.recomputed.inc()
            try:
                return await self._attempt(decode, prefill)
            except LostError as error:
                logger.warning("%s", error)
                await self.end(None)
                lost.update(error.servers)
                if last:
                    raise ApiError(502, str(error), "server_error", "worker_lost") from None
                self._proxy.metrics.retried.inc()
            except BaseException:
                await self.end(None)
                raise
        raise AssertionError

    def _place(self, role: Role, lost: Collection[str]) -> ServerAt | None:
        side = self._proxy.sides[role]
        place = side.place(self._keys, lost)
        if place is None:
            return None
        self._places.append((side, place))
        return side.servers[place.worker]

    async def _attempt(self, decode: ServerAt, prefill: ServerAt | None) -> _Answer:
        """Raises LostError, and ApiError for what prefill says of a client's error."""
        proxy, body = self._proxy, dict(self._body)
        if prefill is not None:
            room = secrets.randbits(63)
            body[_PARAMS] = {"do_remote_prefill": True, "room": room, "prefill": prefill.at}
            send = {
                **self._body, "stream": False, "n": 1, **_one_token(self._path),
                _PARAMS: {"do_remote_decode": True, "room": room, "decode": decode.at},
            }  # fmt: skip
            for name in _NOT_FOR_PREFILL:
                send.pop(name, None)
            self._sending = asyncio.create_task(proxy.ask(prefill.url + self._path, send, True))
        loading = asyncio.create_task(proxy.ask(decode.url + self._path, body, self._whole))
        answer: _Answer | None = None
        try:
            if self._sending is not None and prefill is not None:
                both = (self._sending, loading)
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not loading.done():
                    await self._check_sent(self._sending, prefill)
            answer = await loading
        except httpx.HTTPError as error:
            if _is_unreached(error):
                proxy.sides["decode"].avoid(decode.name)
                self._broke.add(decode.name)
            if prefill is not None:
                proxy.abandon(decode, body[_PARAMS]["room"], prefill.at)
            # A kept connection may break since it was idle for too long: once that is no loss.
            names = [decode.name] if decode.name in self._broke else []
            self._broke.add(decode.name)
            raise LostError(f"{decode.name} was lost: {error!r}", *names) from None
        finally:
            if answer is None:  # also where it had just come
                await _end(loading)
        if answer.response.status_code >= 500:
            await answer.close()
            why = f"{decode.name} said {answer.response.status_code}: {answer.first[:500]!r}"
            names = [prefill.name] if prefill is not None else [decode.name]
            raise LostError(why, *names)
        return answer

    async def _check_sent(self, sending: asyncio.Task[_Answer], prefill: ServerAt) -> None:
        """Prefill has answered before decode said anything: whether it was well."""
        try:
            sent = sending.result()
        except httpx.HTTPError as error:
            if _is_unreached(error):
                self._proxy.sides["prefill"].avoid(prefill.name)
            raise LostError(f"{prefill.name} was lost: {error!r}", prefill.name) from None
        status = sent.response.status_code
        if status >= 500 or status in (401, 403, 404, 429):
            why = f"{prefill.name} said {status}: {sent.first[:500]!r}"
            raise LostError(why, prefill.name)
        if status >= 400:
            message = _message(sent.first)
            raise ApiError(status, message, code="refused_by_prefill")

    def _leave(self) -> None:
        now_s = time.monotonic()
        for side, place in self._places:
            side.router.ended(place, now_s)
        self._places.clear()

    async def end(self, answer: _Answer | None) -> None:
        """Everything of it, on both servers. Again: no-op."""
        self._leave()
        sending, self._sending = self._sending, None
        if answer is not None:
            await answer.close()
        if sending is not None:
            await _end(sending)


async def _end(task: asyncio.Task[_Answer]) -> None:
    """A request is no longer wanted: its connection is closed, which ends it on the server."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and task.exception() is None:
        await task.result().close()


def _is_unreached(error: httpx.HTTPError) -> bool:
    return isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))


def _one_token(path: str) -> dict[str, Any]:
    if path.endswith("/chat/completions"):
        return {"max_completion_tokens": 1, "max_tokens": 1}
    return {"max_tokens": 1}


def _prompts(prompt: Any) -> list[Any]:
    """The prompts of a request: a text, tokens, or several of either."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]


def _data(prompt: Any, what: str) -> bytes:
    """A prompt as bytes such that the next turn's begin with this one's."""
    if what == "messages" and isinstance(prompt, list):
        return b"".join(map(msgspec.json.encode, prompt))
    return prompt.encode() if isinstance(prompt, str) else msgspec.json.encode(prompt)[:-1]


def _message(body: bytes) -> str:
    try:
        told = msgspec.json.decode(body)
        return str(told["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        return body[:500].decode("utf-8", "replace")


class _Metrics:
    """Of the proxy."""

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

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            "prefixkv_proxy_routing", "What the routers count.", labels=["role", "what"]
        )
        for role, side in self._proxy.sides.items():
            for name, number in side.router.stats().items():
                family.add_metric([role, name], number)
        return [family]


def run_proxy(config: ProxyConfig, prefill: Sequence[ServerAt], decode: Sequence[ServerAt]) -> int:
    """Serve until SIGTERM or SIGINT lets what is under way end; a second one ends at once. Returns
    the exit status. Raises ConfigError."""
    log_to_stderr()

    async def main() -> int:
        proxy = Proxy(config, prefill, decode)
        stop, at_once = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (at_once if stop.is_set() else stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            await proxy.start()
        except BaseException:
            await proxy.stop()
            raise
        print(f"{proxy.server.url}/v1 (health and metrics: {proxy.status.url})", flush=True)
        await stop.wait()
        ending = asyncio.create_task(proxy.stop(config.listen.drain_timeout_s))
        cut = asyncio.create_task(at_once.wait())
        await asyncio.wait((ending, cut), return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await proxy.stop()
        cut.cancel()
        await ending
        return 0

    return asyncio.run(main())
