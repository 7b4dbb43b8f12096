"""OpenAI's interface over a fleet of workers.

The front turns text into tokens, has the fleet answer, and turns outputs into bodies or server-sent
events. Tokens that a client has not received when it leaves are not computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from prefixkv import PrefixKVError
from prefixkv.engines.hf.generation import OPENAI, SamplingDefaults
from prefixkv.serving.config import ListenSettings
from prefixkv.serving.failures import answer_ended, refused
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.hints import AnnouncedTurn
from prefixkv.serving.http import (
    BODIES,
    ApiError,
    Stream,
    count_samples,
    decode_body,
    json_response,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.ids import id_of, take_id
from prefixkv.serving.logprobs import AnswerLogprobs, TokenTexts, joined
from prefixkv.serving.openai import (
    DONE,
    Answers,
    ChatRequest,
    CompletionRequest,
    Usage,
    event,
    model,
    models,
    parse,
    too_long,
    unknown_model,
)
from prefixkv.serving.outcomes import RequestLine, line_of
from prefixkv.serving.page import PAGE_PATHS, page_routes
from prefixkv.serving.status import Entrance
from prefixkv.serving.streams import numbered
from prefixkv.serving.text import TextError, Texts, TooManyTokensError
from prefixkv.serving.tracing import TracedEndpoint, current
from prefixkv.serving.wire import Announcement, Ask, TokenEvent, part_rid, salt_digest
from prefixkv.spi import MAX_SESSION_CHARS

_Asked = ChatRequest | CompletionRequest
_SHORT: Final = 4096  # characters of a text that is tokenized in the event loop
_MESSAGE: Final = 64  # template time of one message, in characters of tokenizer time


class Front(Entrance):
    """Raises ConfigError if an address cannot be bound.

    `answer_tokens` is the most tokens of a chat's answer without a bound of its own; 0: all the
    room. `defaults` say how tokens are drawn for requests that do not. `status_routes` are
    Starlette's, for the status port.
    """

    def __init__(
        self, fleet: Fleet, texts: Texts, name: str, listen: ListenSettings,
        answer_tokens: int = 0, status_routes: Sequence[BaseRoute] = (),
        defaults: SamplingDefaults = OPENAI,
    ) -> None:  # fmt: skip
        super().__init__("front", listen)
        self.fleet, self.texts, self.name = fleet, texts, name
        self._defaults = defaults
        self._token_texts = TokenTexts(texts.tokenizer)
        self._answer_tokens = answer_tokens
        self._created = int(time.time())
        # Held while a long text is tokenized in a thread, by the magnitude of its size: a text
        # waits for those of its own size alone, at most 8 times as long as itself takes.
        self._waiting_bytes = 0  # of bodies; see `_untokenized`
        self._encoding: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.metrics = _FrontMetrics(fleet)
        chat, complete = (
            TracedEndpoint(self._tracing, partial(self._serve, kind))
            for kind in (ChatRequest, CompletionRequest)
        )
        routes = [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/sessions/{name:path}", self._announce, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
            Route("/health", self._show_health, methods=["GET"]),
            *page_routes(),
        ]
        status_routes = [Route("/sd", self._discover), *status_routes]
        self._bind(routes, (*PAGE_PATHS, "/health"), self.metrics.collectors, status_routes)

    def health(self) -> tuple[bool, dict[str, Any]]:
        ok = self.fleet.ready and not self.draining
        silent = self.fleet.silent
        state = (
            "draining" if self.draining
            else "ok" if ok
            else "silent" if silent
            else "starting"
        )  # fmt: skip
        workers = {
            info.name: {
                "url": info.url, "status_url": info.status_url, "pid": info.pid,
                "silent": info.name in silent,
            }
            for info in self.fleet.workers
        }  # fmt: skip
        return ok, {"status": state, "model": self.name, "workers": workers}

    async def _close(self) -> None:
        await self.fleet.close()

    async def _discover(self, request: Request) -> Response:
        """Answer GET /sd for Prometheus' `http_sd_configs`: the status port of each process, also
        of one that has ended, which is then down."""
        # A front bound to all addresses is reached under the name that it was asked by.
        front = request.url.netloc or urlsplit(self.status.url).netloc
        places = [(front, "front", "front")]
        for _, info in sorted(self.fleet.known.items()):
            places.append((urlsplit(info.status_url).netloc, info.name, info.role))
        return json_response(
            [
                {"targets": [address], "labels": {"worker": worker, "role": role}}
                for address, worker, role in places
            ]
        )

    # --- what is asked ----------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        about = self.name, self._created, self.fleet.context, self._defaults.temperature
        name = request.path_params.get("name")
        if name is None:
            return json_response(models(*about))
        if name != self.name:
            raise unknown_model(name)
        return json_response(model(*about))

    async def _show_health(self, _: Request) -> Response:
        """Load balancers carry no key, so the workers are not listed here."""
        ok, state = self.health()
        return json_response({"status": state["status"]}, 200 if ok else 503)

    async def _serve(self, kind: type[Any], request: Request) -> Response:
        body = await read_body(request, self._limits)
        asked: _Asked = parse(body, kind, self.fleet.context or None)
        # A prompt of many tokens takes as much again as JSON: drop that before it waits for its
        # answer.
        num_bytes = len(body)
        del body
        # Here, since what is set in the task below is not seen by what logs a failure.
        take_id(request.scope, asked.request_id)
        return await run_until_disconnect(request, self._answer(request, asked, num_bytes))

    async def _prompts(self, asked: _Asked) -> list[list[int]]:
        """Tokenize what is asked. Raises ApiError 400."""
        if isinstance(asked, CompletionRequest):
            # Many short texts cost as much as a long one, so their sum counts for each.
            size = sum(len(prompt) for prompt in asked.prompt if isinstance(prompt, str))
            return [
                await self._tokens(partial(self.texts.plain, prompt), size, "prompt")
                if isinstance(prompt, str)
                else prompt
                for prompt in asked.prompt
            ]
        messages, variables = asked.messages, asked.variables
        # Rendering costs time per message too, so a lot of short ones count as a long text; so do
        # variables, which the template may write as often as it likes.
        size = len(msgspec.json.encode((messages, variables))) + _MESSAGE * len(messages)
        try:
            encode = partial(self.texts.chat, messages, variables=variables)
            return [await self._tokens(encode, size, "messages")]
        except TextError as error:
            raise refused("messages", f"is refused: {error}") from None

    async def _announce(self, request: Request) -> Response:
        """Have what host memory has of a session loaded before its next turn comes."""
        said = decode_body(await read_body(request, self._limits) or b"{}", AnnouncedTurn)
        name = request.path_params["name"]
        if not 0 < len(name) <= MAX_SESSION_CHARS:
            raise refused("session", f"has to have 1 to {MAX_SESSION_CHARS} characters")
        salt = salt_digest(said.cache_salt) if said.cache_salt else ""
        await self.fleet.announce(Announcement(name, salt))
        return Response(status_code=202)

    @contextlib.contextmanager
    def _untokenized(self, num_bytes: int) -> Iterator[None]:
        """Count the bytes of a body whose texts wait. Raises ApiError where too many do."""
        most = BODIES * self._limits.max_body_bytes
        if self._waiting_bytes and self._waiting_bytes + num_bytes > most:
            raise ApiError(503, "too many long prompts wait", "server_error", "overloaded")
        self._waiting_bytes += num_bytes
        try:
            yield
        finally:
            self._waiting_bytes -= num_bytes

    async def _tokens(self, encode: Callable[..., list[int]], size: int, param: str) -> list[int]:
        """Tokenize a text that costs the time of `size` characters. A long one is tokenized in a
        thread, while its client is there, until it is certain not to fit. Raises ApiError 400."""
        if size <= _SHORT:
            return encode()
        context, has_left = self.fleet.context, False

        def go_on() -> None:
            if has_left:
                raise asyncio.CancelledError

        async with self._encoding[size.bit_length() // 3]:
            work = asyncio.ensure_future(asyncio.to_thread(encode, most=context, go_on=go_on))
            try:
                return await asyncio.shield(work)
            except TooManyTokensError as error:
                raise too_long(error.least, 0, context, param, at_least=True) from None
            finally:
                # The thread ends first: a client that comes and leaves has one at most.
                has_left = True
                await asyncio.wait((work,))

    async def _check(self, name: str) -> None:
        """Raise ApiError for another model, or if nothing can be served at the moment. Waits for
        workers that are being started."""
        if name != self.name:
            raise unknown_model(name)
        if self.draining:
            raise ApiError(503, "the server is ending", "server_error", "not_ready")
        await self.fleet.wait_for_workers()

    async def _answer(self, request: Request, asked: _Asked, num_bytes: int) -> Response:
        """Bound the answers' length by the fleet's context, and answer. Raises ApiError."""
        with self._untokenized(num_bytes):
            await self._check(asked.model)
            prompts = await self._prompts(asked)
        # What follows is of the workers that are there now: they may have gone meanwhile.
        await self._check(asked.model)
        chat, num = isinstance(asked, ChatRequest), self.fleet.vocab_size
        param = "messages" if chat else "prompt"
        # Checked here, since a worker would report it only after the request was placed.
        for name, tokens in (
            ("stop_token_ids", asked.stop_token_ids), *((param, prompt) for prompt in prompts)
        ):  # fmt: skip
            if tokens and not 0 <= min(tokens) <= max(tokens) < num:
                raise refused(name, f"has tokens that are not in [0, {num})")
        sampling, hints = asked.sampling(**self._defaults._asdict()), asked.hints(request)
        # The salt is the client's secret: workers and their caches see only a digest of it.
        salt = salt_digest(asked.cache_salt) if asked.cache_salt else ""
        # Workers separate the parts of their own ids by "/".
        rid = self._new_rid(id_of(request.scope).replace("/", "%2F"))
        asks: list[Ask] = []
        count_samples(request, len(prompts) * asked.num_samples)
        # All are checked before the first is asked: one that is refused refuses the call.
        for number, tokens in enumerate(prompts):
            most = self._most_tokens(len(tokens), asked, param)
            # All prompts have one id in the request log; workers need one for each.
            part = part_rid(rid, number) if len(prompts) > 1 else rid
            ask = Ask(part, tokens, "", sampling, most, asked.num_samples, salt, hints=hints)
            current().describe_ask(ask, self.name, chat, asked.streams)
            asks.append(ask)
        line = line_of(request.scope)
        line.fields |= {
            "id": rid, "stream": asked.streams, "prompts": len(asks),
            "samples": asked.num_samples,
        }  # fmt: skip
        extras = None
        if sampling.logprobs is not None:
            extras = AnswerLogprobs(self._token_texts, chat)
        answers = Answers(rid, self.name, int(time.time()), chat)
        run = _FrontRequest(self, asks, answers, asked, line, extras)
        return await (run.stream() if asked.streams else run.whole())

    def _most_tokens(self, num_prompt: int, asked: _Asked, param: str) -> int:
        """Raises ApiError if the context has no room for an answer."""
        if not num_prompt:
            raise refused(param, "has no tokens")
        most, least = asked.most_tokens, asked.min_tokens or 0
        room = self.fleet.context - num_prompt
        if room < 1 or max(most or 0, least) > room:
            raise too_long(num_prompt, max(most or 0, least), self.fleet.context, param)
        # A client that asks for many tokens at least has not asked for the default of most.
        return most if most is not None else min(room, max(least, self._answer_tokens or room))


class _FrontRequest:
    """One request that is being answered. It has one `Ask` per prompt. Answer number `i * n +
    sample` is of prompt `i`, as OpenAI counts."""

    def __init__(
        self, front: Front, asks: list[Ask], answers: Answers, asked: _Asked, line: RequestLine,
        extras: AnswerLogprobs | None,
    ) -> None:  # fmt: skip
        self._limits, self._metrics, self._line = front._limits, front.metrics, line
        self._answers, self._tells_usage = answers, asked.streams_usage
        self._tells_always = asked.streams_usage_always
        self._num = sum(ask.num_samples for ask in asks)
        self._extras = extras  # None: the texts are all that is shown
        self._prompt_lens = [len(ask.tokens) for ask in asks]
        self._usage = Usage(sum(self._prompt_lens))
        self._begun_s = time.monotonic()
        streams = [front.fleet.generate(ask, self._note_attempt) for ask in asks]
        self._outputs = self._measured(numbered(streams), asked.num_samples)

    def _note_attempt(self, decode: str, prefill: str = "") -> None:
        self._line.mark("asked")
        self._line.fields |= {"decode": decode, "prefill": prefill}
        self._line.add(attempts=1)

    async def whole(self) -> Response:
        texts: list[list[str]] = [[] for _ in range(self._num)]
        finishes: list[str | None] = [None] * self._num
        bodies: list[list[dict[str, Any]]] = [[] for _ in range(self._num)]
        async with contextlib.aclosing(self._outputs):
            async for output in self._outputs:
                texts[output.sample].append(output.text)
                logprobs = self._logprobs(output)
                finishes[output.sample] = output.finish
                if logprobs is not None:
                    bodies[output.sample].append(logprobs)
        whole = ["".join(text) for text in texts]
        found = [joined(parts) if parts else None for parts in bodies]
        return json_response(self._answers.whole(whole, finishes, self._usage, found))

    def _logprobs(self, output: TokenEvent) -> dict[str, Any] | None:
        return None if self._extras is None else self._extras.show(output)

    async def stream(self) -> Response:
        """Begin once the first output has arrived: a failure before it has its own status."""
        try:
            # The status line is sent with the first piece, so wait until the first output is known.
            first = await anext(self._outputs)
        # Closing the generator aborts the request on its worker.
        except BaseException:
            await self._outputs.aclose()
            raise
        return Stream(
            self._events(first), self._limits, "text/event-stream", end=self._outputs.aclose
        )

    async def _events(self, first: TokenEvent) -> AsyncGenerator[bytes, None]:
        """A failure midway ends the events by an error event, without `DONE`."""
        begun: set[int] = set()
        async with contextlib.aclosing(self._outputs):
            try:
                if piece := self._event(first, begun):
                    yield piece
                async for output in self._outputs:
                    if piece := self._event(output, begun):
                        yield piece
            # The status 200 has been sent, so the error travels as an event.
            except ApiError as error:
                yield event(error.body())
                return
        if self._tells_usage:
            yield self._answers.usage(self._usage)
        yield DONE

    def _event(self, output: TokenEvent, begun: set[int]) -> bytes:
        """Return one output's events: its text, behind the sample's opening if it is the first."""
        text, finish, logprobs = output.text, output.finish, self._logprobs(output)
        usage = self._usage if self._tells_always else None
        opening = b"" if output.sample in begun else self._answers.begin(output.sample, usage)
        begun.add(output.sample)
        if not text and finish is None and logprobs is None:
            return opening
        return opening + self._answers.piece(output.sample, text, finish, usage, logprobs)

    async def _measured(
        self, stream: AsyncGenerator[tuple[int, TokenEvent], None], num_samples: int
    ) -> AsyncGenerator[TokenEvent, None]:
        """Number samples over all prompts, and count tokens, hits and outcome. Raises ApiError for
        an answer that its worker has ended."""
        metrics, usage, outcome = self._metrics, self._usage, "aborted"
        trace, ttft_s, finishes = current(), None, list[str]()
        try:
            async with contextlib.aclosing(stream):
                async for number, output in stream:
                    if output.token is not None:
                        if ttft_s is None:
                            ttft_s = time.monotonic() - self._begun_s
                            metrics.ttft.observe(ttft_s)
                            self._line.mark("first_token")
                        usage.completion_tokens += 1
                        # All samples share one prompt, so its parts count once.
                        if output.sample == output.position == 0:
                            usage.add_prompt(self._prompt_lens[number], output)
                    if output.finish is not None:
                        finishes.append(output.finish)
                    if output.finish in ("error", "abort"):
                        trace.fail(output.error)
                        raise answer_ended(output.error)
                    if number:
                        sample = number * num_samples + output.sample
                        output = msgspec.structs.replace(output, sample=sample)
                    yield output
            # Reached only at the end of the stream: a client that leaves raises at `yield`, and the
            # outcome stays "aborted".
            outcome = "finished"
        except (ApiError, PrefixKVError) as error:
            outcome = "failed"
            # A refusal is the client's mistake; its status says so.
            if not isinstance(error, ApiError) or error.status >= 500:
                trace.fail(str(error), type(error).__name__)
            raise
        finally:
            metrics.requests.labels(outcome).inc()
            metrics.count(usage)
            self._line.fields["outcome"] = outcome
            self._line.add(
                output_tokens=usage.completion_tokens, shared_tokens=usage.shared_tokens,
                **{f"{kind}_tokens": number for kind, number in _of_prompts(usage).items()},
            )  # fmt: skip
            trace.describe_answer(usage, finishes, ttft_s)


def _of_prompts(usage: Usage) -> dict[str, int]:
    kinds = "prompt", "decode_hit", "prefill_hit", "decode_host", "decode_computed"
    return {kind: getattr(usage, f"{kind}_tokens") for kind in kinds}


class _FrontMetrics:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.requests = Counter(
            "prefixkv_front_requests", "Requests by how they ended.", ["outcome"], registry=None
        )
        self.ttft = Histogram(
            "prefixkv_front_ttft_seconds", "From a request to its first token.", registry=None
        )
        self._tokens = Counter(
            "prefixkv_front_tokens",
            "Tokens: of prompts, those of them that were hit on decode (of these, in its host "
            "memory) and on prefill, those that decode computed, of answers.",
            ["kind"], registry=None,
        )  # fmt: skip
        # All rows are there from the start, so that a rate sees the first request that fails.
        for outcome in ("finished", "failed", "aborted"):
            self.requests.labels(outcome)
        self.count(Usage(0))
        self.collectors = [self.requests, self.ttft, self._tokens, self]

    def count(self, usage: Usage) -> None:
        for kind, number in {"answer": usage.completion_tokens, **_of_prompts(usage)}.items():
            self._tokens.labels(kind).inc(number)

    def collect(self) -> list[Metric]:
        family = GaugeMetricFamily(
            "prefixkv_front_routing", "What the routers count, by worker's kind.", labels=["what"]
        )
        for name, number in self._fleet.stats().items():
            family.add_metric([name], number)
        return [family]
