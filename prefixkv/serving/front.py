"""OpenAI's interface over a fleet of workers.

The front turns text into tokens, has the fleet answer, and turns outputs into bodies or server-sent
events. Tokens that a client has not received when it leaves are not computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from prefixkv.engines.hf.folder import OPENAI, SamplingDefaults
from prefixkv.serving.api import AnnouncedTurn, RequestMetrics, refused
from prefixkv.serving.client import numbered
from prefixkv.serving.config import ListenSettings
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.http import (
    ApiError,
    Entrance,
    Stream,
    count_samples,
    json_response,
    read_body,
    run_until_disconnect,
)
from prefixkv.serving.log import current_record
from prefixkv.serving.openai import (
    AnswerLogprobs,
    Answers,
    ChatRequest,
    CompletionRequest,
    Usage,
    event,
    model,
    parse,
    too_long,
    unknown_model,
)
from prefixkv.serving.text import TextError, Texts, TokenTexts
from prefixkv.serving.tracing import current
from prefixkv.serving.wire import (
    Announcement,
    Ask,
    FenceRequest,
    TokenEvent,
    part_rid,
    salt_digest,
)
from prefixkv.spi import MAX_SESSION_CHARS

logger = logging.getLogger("prefixkv.front")

PAGE: Final = {"/": "chat.html", "/chat.js": "chat.js", "/chat.css": "chat.css"}
"""The chat page: paths and files. They hold nothing secret, so they need no key."""

# They restrict the page: only what the server sends runs, and asks that server alone.
_PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}
Outputs = AsyncGenerator[TokenEvent, None]
_WAITING: Final = 8192  # tokens of prompts of one request that wait at once for each worker
_SHORT: Final = 4096  # characters of a text that is tokenized in the event loop
_MESSAGE: Final = 64  # template time of one message, in characters of tokenizer time


class Front(Entrance):
    """Raises ConfigError if an address cannot be bound.

    `answer_tokens` is the most tokens of a chat's answer without a bound of its own; 0: all the
    room. `defaults` say how tokens are drawn for requests that do not.
    """

    def __init__(
        self, fleet: Fleet, texts: Texts, name: str, listen: ListenSettings,
        answer_tokens: int = 0, defaults: SamplingDefaults = OPENAI,
    ) -> None:  # fmt: skip
        super().__init__("front", listen)
        self.fleet, self.texts, self.name = fleet, texts, name
        self._defaults = defaults
        self._token_texts = TokenTexts(texts.tokenizer)
        self._answer_tokens = answer_tokens
        self._created = int(time.time())
        self.metrics = _FrontMetrics(fleet)
        chat, complete = (
            self._tracing.traced(partial(self._serve, kind))
            for kind in (ChatRequest, CompletionRequest)
        )
        routes = [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/sessions/{name:path}", self._announce, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._models, methods=["GET"]),
            Route("/health", self._show_health, methods=["GET"]),
            *(Route(path, show_page, methods=["GET"]) for path in PAGE),
        ]
        status_routes = [
            Route("/sd", self._discover),
            Route("/lost", self._list_lost),
            Route("/fence", self._fence, methods=["POST"]),
        ]
        self._bind(routes, (*PAGE, "/health"), self.metrics.collectors, status_routes)

    def health(self) -> tuple[bool, dict[str, Any]]:
        ok = self.fleet.ready and not self.draining
        silent = self.fleet.silent
        state = "draining" if self.draining else "ok" if ok else "silent" if silent else "starting"
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

    async def _list_lost(self, _: Request) -> Response:
        """Answer GET /lost: the lives that do not serve, and what each worker holds for them."""
        held: dict[FenceRequest, dict[str, int]] = {}
        for worker, peers in (await self.fleet.lost()).items():
            for peer in peers:
                held.setdefault(FenceRequest(peer.name, peer.life), {})[worker] = peer.held
        return json_response(
            [
                {"name": life.name, "life": life.life, "held": held[life]}
                for life in held.keys() - self.fleet.lives
            ]
        )

    async def _fence(self, request: Request) -> Response:
        asked = await self._read(request, FenceRequest)
        # 1. It serves at this moment: fencing it would let others reuse pages that it writes.
        # 2. It is fenced already: nothing to do.
        # 3. It is unknown: refused, since a mistyped life must not pass for a fenced one.
        # 4. It is lost: believe the operator.
        peers = chain.from_iterable((await self.fleet.lost()).values())
        if asked in self.fleet.lives:  # also one that has come back while the workers were asked
            raise ApiError(409, f"{asked.name} life {asked.life} serves", code="worker_lives")
        if asked not in self.fleet.fenced:
            if asked not in {FenceRequest(peer.name, peer.life) for peer in peers}:
                raise ApiError(404, f"{asked.name} life {asked.life}: unknown", code="no_such_life")
            logger.warning("%s life %s is fenced: an operator said so", asked.name, asked.life)
            self.fleet.fence(asked)
        return Response(status_code=202)

    # --- what is asked ----------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        about = model(self.name, self._created, self.fleet.context, self._defaults.temperature)
        name = request.path_params.get("name")
        if name is None:
            return json_response({"object": "list", "data": [about]})
        if name != self.name:
            raise unknown_model(name)
        return json_response(about)

    async def _serve(
        self, kind: type[ChatRequest] | type[CompletionRequest], request: Request
    ) -> Response:
        asked = parse(await read_body(request, self._limits), kind)
        current_record().take_id(asked.request_id)
        return await run_until_disconnect(request, self._answer(request, asked))

    async def _chat_tokens(self, asked: ChatRequest) -> list[int]:
        messages, variables = asked.messages, asked.variables
        # Rendering costs time per message too, so a lot of short ones count as a long text; so do
        # variables, which the template may write as often as it likes.
        size = len(msgspec.json.encode((messages, variables))) + _MESSAGE * len(messages)
        try:
            return await _tokens(
                partial(self.texts.chat, messages, variables, self.fleet.context), size
            )
        except TextError as error:
            raise refused("messages", f"is refused: {error}") from None

    async def _prompt_tokens(self, asked: CompletionRequest) -> list[list[int]]:
        # Many short texts cost as much as a long one, so their sum counts for each.
        size = sum(len(prompt) for prompt in asked.prompts if isinstance(prompt, str))
        return [
            await _tokens(partial(self.texts.plain, prompt, self.fleet.context), size)
            if isinstance(prompt, str)
            else prompt
            for prompt in asked.prompts
        ]

    async def _announce(self, request: Request) -> Response:
        """Have what host memory has of a session loaded before its next turn comes."""
        said = await self._read(request, AnnouncedTurn, b"{}")
        name = request.path_params["name"]
        if not 0 < len(name) <= MAX_SESSION_CHARS:
            raise refused("session", f"has to have 1 to {MAX_SESSION_CHARS} characters")
        salt = salt_digest(said.cache_salt) if said.cache_salt else ""
        await self.fleet.announce(Announcement(name, salt))
        return Response(status_code=202)

    async def _answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        """Bound the answers' length by the fleet's context, and answer. Raises ApiError."""
        if asked.model != self.name:
            raise unknown_model(asked.model)
        if isinstance(asked, ChatRequest):
            prompts, param = [await self._chat_tokens(asked)], "messages"
        else:
            prompts, param = await self._prompt_tokens(asked), "prompt"
        if self.draining:
            raise ApiError(503, "the server is ending", "server_error", "not_ready")
        # What follows is of the workers that are there now.
        await self.fleet.wait_for_workers()
        # Checked here, since a worker would report it only after the request was placed.
        num = self.fleet.vocab_size
        given = [("stop_token_ids", asked.stop_token_ids), *((param, tokens) for tokens in prompts)]
        for name, tokens in given:
            if tokens and not 0 <= min(tokens) <= max(tokens) < num:
                raise refused(name, f"has tokens that are not in [0, {num})")
        sampling, hints = asked.sampling(**self._defaults._asdict()), asked.hints(request)
        # Special tokens have no text in an answer: a string that is one stops it by the token.
        found = map(self.texts.tokenizer.token_to_id, sampling.stop)
        stops = *sampling.stop_tokens, *(t for t in found if not self._token_texts.is_shown(t))
        sampling = msgspec.structs.replace(sampling, stop_tokens=stops)
        # The salt is the client's secret: workers and their caches see only a digest of it.
        salt = salt_digest(asked.cache_salt) if asked.cache_salt else ""
        # Workers separate the parts of their own ids by "/".
        rid = self._new_rid(current_record().id.replace("/", "%2F"))
        count_samples(request, len(prompts) * asked.n)
        # All are checked before the first is asked: one that is refused refuses the call.
        mosts = [self._most_tokens(len(tokens), asked, param) for tokens in prompts]
        drawn = {name: getattr(sampling, name) for name in (*SamplingDefaults._fields, "seed")}
        about = {"model": self.name, "max_tokens": mosts[-1], "n": asked.n, "stream": asked.stream}
        current().describe_request(request.url.path, about | drawn, self.name)
        # All prompts have one id in the request log; workers need one for each.
        parts = [part_rid(rid, number) for number in range(len(prompts))] if prompts[1:] else [rid]
        asks = [
            Ask(part, tokens, "", sampling, most, asked.n, salt, hints=hints)
            for part, tokens, most in zip(parts, prompts, mosts, strict=True)
        ]
        current_record().fields |= {
            "id": rid, "stream": asked.stream, "prompts": len(asks), "samples": asked.n,
        }  # fmt: skip
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = AnswerLogprobs(self._token_texts, isinstance(asked, ChatRequest))
        usage = Usage(sum(map(len, prompts)))
        answers, outputs = Answers(rid, asked, usage, logprobs), self._outputs(asks, usage)
        if not asked.stream:
            async with aclosing(outputs):
                return json_response(answers.whole([output async for output in outputs]))
        try:
            # The status line is sent with the first piece, so wait until the first output is known:
            # a failure before it has its own status.
            first = await anext(outputs)
        # Closing the generator aborts the request on its worker.
        except BaseException:
            await outputs.aclose()
            raise
        events = _events(first, outputs, answers)
        return Stream(events, "text/event-stream", end=outputs.aclose)

    async def _outputs(self, asks: list[Ask], usage: Usage) -> Outputs:
        """Have the fleet answer, an `Ask` per prompt, and count tokens, hits and outcome. Answer
        number `i * n + sample` is of prompt `i`, as OpenAI counts. Raises ApiError."""
        metrics, trace, finishes = self.metrics, current(), list[str]()
        with metrics.counted() as line:
            try:
                most = max(2, _WAITING // max(len(ask.tokens) for ask in asks))
                places = asyncio.Semaphore(most * max(1, len(self.fleet.workers)))
                stream = numbered([self._in_turn(ask, places) for ask in asks])
                async with aclosing(stream):
                    async for number, output in stream:
                        if output.token is not None:
                            if not usage.output_tokens:
                                metrics.begun(line)
                            usage.output_tokens += 1
                            # All samples share one prompt, so its parts count once.
                            if output.sample == output.position == 0:
                                usage.add_prompt(len(asks[number].tokens), output)
                        if output.finish is not None:
                            finishes.append(output.finish)
                        if number:
                            sample = number * asks[0].num_samples + output.sample
                            output = msgspec.structs.replace(output, sample=sample)
                        yield output
            finally:
                metrics.count(usage)
                line.fields |= msgspec.structs.asdict(usage)
                trace.add({"gen_ai.response.finish_reasons": tuple(finishes)})

    async def _in_turn(self, ask: Ask, places: asyncio.Semaphore) -> Outputs:
        """Hold a place until the first output: prompts of others come before those that have none
        yet. It holds none where it waits for its reader."""
        async with AsyncExitStack() as place, aclosing(self.fleet.generate(ask)) as outputs:
            await place.enter_async_context(places)
            async for output in outputs:
                await place.aclose()
                yield output

    def _most_tokens(
        self, num_prompt: int, asked: ChatRequest | CompletionRequest, param: str
    ) -> int:
        """Raises ApiError if the context has no room for an answer."""
        if not num_prompt:
            raise refused(param, "has no tokens")
        most, least = asked.most_tokens, asked.min_tokens
        room = self.fleet.context - num_prompt
        if room < 1 or max(most or 0, least) > room:
            raise too_long(num_prompt, max(most or 0, least), self.fleet.context, param)
        # A client that asks for many tokens at least has not asked for the default of most.
        return most if most is not None else min(room, max(least, self._answer_tokens or room))


async def _events(
    first: TokenEvent, outputs: Outputs, answers: Answers
) -> AsyncGenerator[bytes, None]:
    """A failure midway ends the events by an error event, without the last ones."""
    try:
        if piece := answers.piece(first):
            yield piece
        async for output in outputs:
            if piece := answers.piece(output):
                yield piece
    # The status 200 has been sent, so the error travels as an event.
    except ApiError as error:
        yield event(error.body())
    else:
        yield answers.end()


async def show_page(request: Request) -> Response:
    file = Path(__file__).with_name(PAGE[request.url.path])
    return FileResponse(file, headers=_PAGE_HEADERS)


async def _tokens(encode: Callable[[], list[int]], size: int) -> list[int]:
    """Tokenize a text that costs the time of `size` characters; a long one in a thread."""
    return encode() if size <= _SHORT else await asyncio.to_thread(encode)


class _FrontMetrics(RequestMetrics):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__("front", fleet.stats)
        self._tokens = Counter(
            "prefixkv_front_tokens",
            "Tokens: of prompts, those of them that were hit on decode (of these, in its host "
            "memory) and on prefill, those that decode computed, of answers.",
            ["kind"], registry=None,
        )  # fmt: skip
        self.count(Usage(0))
        self.collectors.append(self._tokens)

    def count(self, usage: Usage) -> None:
        counts = msgspec.structs.asdict(usage)
        for kind in ("prompt", "decode_hit", "prefill_hit", "decode_host", "decode_computed"):
            self._tokens.labels(kind).inc(counts[f"{kind}_tokens"])
        self._tokens.labels("answer").inc(usage.output_tokens)
