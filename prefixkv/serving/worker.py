"""One worker as a process: one model, one node, one `EngineLoop`, and two HTTP servers: what
others ask of it (`wire`), and its health and metrics.

The engine has a thread of its own; all else runs in one event loop. What goes to the engine goes by
`EngineLoop.post`; what comes from it, one `call_soon_threadsafe` a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

import httpx
import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv import PrefixKVError
from prefixkv.serving.config import (
    OPTION_NAMES,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    WorkerConfig,
    WorkerSettings,
)
from prefixkv.serving.feed import EventTap
from prefixkv.serving.http import (
    ApiError,
    HttpServer,
    Stream,
    decode_body,
    json_response,
    make_app,
    read_body,
)
from prefixkv.serving.status import bind, status_app
from prefixkv.serving.waits import wait_set
from prefixkv.serving.wire import (
    LIFE_SIGN_S,
    Abort,
    Ask,
    Fence,
    How,
    Job,
    Lost,
    Said,
    WorkerInfo,
    namespace_of,
)
from prefixkv.spi import CallerError, CapacityError, ClosedError, DrainingError, TokenError

logger = logging.getLogger("prefixkv.worker")

_MAX_JOB_BYTES: Final = 64 << 20
_JOB_TIMEOUT_S: Final = 20.0
_TICK_S: Final = 0.2

T = TypeVar("T")


class Worker:
    """A worker that serves on the running event loop, from `start` to the end of `run`.

    Made in any thread; everything else is the loop's. `info` is there once `start` has returned.
    """

    role: str
    info: WorkerInfo

    def __init__(self, config: WorkerConfig) -> None:
        self.config, self.settings = config, config.worker
        self._stop = asyncio.Event()  # no grace any more
        self._servers: list[HttpServer] = []

    async def start(self) -> None:
        """Load the model and serve. Raises ConfigError, with nothing left open."""
        self.engine = await asyncio.to_thread(self._make_engine)
        from prefixkv.engines.hf import EngineLoop

        self._asyncio = asyncio.get_running_loop()
        try:
            self.loop: EngineLoop[Any] = EngineLoop(self.engine, self._after_step, name=self.role)
            self._bind()
            self.loop.start()
        except BaseException:
            self.engine.close()
            for server in self._servers:
                server.close()
            raise
        try:
            for server in self._servers:
                await server.start()
        except BaseException:
            await self.close()
            raise

    def _bind(self) -> None:
        """Both servers, and `info`."""
        listen, engine = self.settings.listen, self.engine
        self._events = EventTap(engine.node.take_cache_events, self._asyncio.call_soon_threadsafe)
        routes = [
            Route("/info", self._info),
            Route("/events", self._follow),
            Route("/audit", self._audit, methods=["POST"]),
            Route("/lost", self._lost),
            Route("/fence", self._fence, methods=["POST"]),
            *self._routes(),
        ]
        app = make_app(routes, listen.api_key, max_bodies_bytes=self._limits.max_bodies_bytes)
        status_of = status_app(self.health, [engine.node], listen)
        asked, status = bind(app, status_of, listen, self._limits)
        self._servers += [asked, status]
        model, layout = engine.model, engine.node.pool.layout
        self.info = WorkerInfo(
            role=self.role,  # type: ignore[arg-type]
            name=engine.node.peer_id.name, url=asked.url, status_url=status.url,
            endpoint=getattr(engine, "endpoint", ""), model=model.name,
            identity=f"{model.identity.model} {model.identity.weights_version}",
            page_size=layout.page_size, num_pages=layout.num_pages,
            context=min(model.context, layout.num_pages * layout.page_size),
            vocab_size=model.vocab_size, pid=os.getpid(),
            life=f"{engine.node.peer_id.incarnation:x}",
        )  # fmt: skip

    async def run(self) -> bool:
        """Until it was drained or stopped, or the engine has failed: False then."""
        while self.loop.alive and not self._stop.is_set():
            await wait_set(self._stop, _TICK_S)
        await self.close()
        return self.loop.error is None

    def drain(self) -> None:
        """Take no more; `run` returns when all that lives has ended, or after `drain_timeout_s`.
        Again: at once."""
        if self.loop.draining:
            self._stop.set()
            return
        self.loop.drain()
        self._asyncio.call_later(self.settings.listen.drain_timeout_s, self._stop.set)

    async def close(self) -> None:
        """End everything now; after `start`. Again: no-op."""
        self.loop.stop()
        if self.loop.alive:
            await asyncio.to_thread(self.loop.join, 10.0)
        self._ended()
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(grace_s=1.0)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether it takes what is asked, and how it is."""
        state = (
            "failed" if self.loop.error is not None
            else "ended" if not self.loop.alive
            else "draining" if self.loop.draining
            else "ok"
        )  # fmt: skip
        about = msgspec.to_builtins(self.info)
        return state == "ok", {"status": state, **about}

    # --- for its kinds ----------------------------------------------------------------------------

    def _make_engine(self) -> Any:
        raise NotImplementedError

    def _routes(self) -> list[Route]:
        raise NotImplementedError

    def _after_step(self) -> None:
        """On the engine's thread."""
        self._events.after_step()

    def _ended(self) -> None:
        """The engine has ended: nothing more comes from it."""

    @property
    def _limits(self) -> Any:
        limits = self.settings.listen.limits
        most = max(limits.max_body_bytes, _MAX_JOB_BYTES)
        in_sum = max(limits.max_bodies_bytes, 2 * most)
        return replace(limits, max_body_bytes=most, max_bodies_bytes=in_sum)

    async def _info(self, _: Request) -> Response:
        return json_response(self.info)

    async def _audit(self, _: Request) -> Response:
        await self._call(lambda engine: engine.audit())
        return Response(status_code=204)

    async def _follow(self, _: Request) -> Response:
        limits = self.settings.listen.limits
        return Stream(self._events.frames(), limits, "application/octet-stream")

    async def _lost(self, _: Request) -> Response:
        lost = await self._call(lambda engine: engine.node.lost_peers())
        told = [
            Lost(peer.name, f"{peer.incarnation:x}", why, held)
            for peer, (why, held) in lost.items()
        ]
        return json_response(told)

    async def _fence(self, request: Request) -> Response:
        asked = await self._read(request, Fence)
        try:
            incarnation = int(asked.life, 16)
        except ValueError:
            raise ApiError(400, f"life: {asked.life!r} is no hexadecimal number") from None
        await self._call(lambda engine: engine.node.fence(asked.name, incarnation))
        return Response(status_code=202)

    async def _read(self, request: Request, kind: type[T]) -> T:
        return decode_body(await read_body(request, self._limits), kind)

    async def _call(self, call: Callable[[Any], T]) -> T:
        """What `call(engine)` returns, made on its thread. Raises ApiError for what it raises of
        ours."""
        done: asyncio.Future[T] = self._asyncio.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if done.cancelled():
                return
            done.set_exception(error) if error is not None else done.set_result(result)

        def run(engine: Any) -> None:
            try:
                result, error = call(engine), None
            except PrefixKVError as raised:
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._asyncio.call_soon_threadsafe(settle, result, error)

        try:
            self.loop.post(run)
            while not (await asyncio.wait((done,), timeout=1.0))[0]:
                if not self.loop.alive:
                    raise ClosedError("the engine has ended")
            return done.result()
        except (DrainingError, ClosedError, CapacityError) as error:
            raise ApiError(503, str(error), "server_error", _name(error)) from None
        except CallerError as error:
            raise ApiError(400, str(error), code=_name(error)) from None
        except PrefixKVError as error:
            raise ApiError(500, str(error), "server_error", _name(error)) from None


class PrefillWorker(Worker):
    """Computes what decode workers ask for."""

    role = "prefill"
    config: PrefillWorkerConfig

    def _make_engine(self) -> Any:
        from prefixkv.engines.hf import PrefillEngine

        model, pool = _model_and_pool(self.settings)
        return PrefillEngine(model, pool, self.config.node, self.config.chunk_tokens)

    def _routes(self) -> list[Route]:
        return [
            Route("/jobs", self._job, methods=["POST"]),
            Route("/abort", self._abort, methods=["POST"]),
        ]

    async def _job(self, request: Request) -> Response:
        job = _prefill_job(await self._read(request, Job))
        await self._call(lambda engine: engine.submit(job))
        return Response(status_code=202)

    async def _abort(self, request: Request) -> Response:
        asked = await self._read(request, Abort)
        await self._call(lambda engine: [engine.abort(rid) for rid in asked.rids])
        return Response(status_code=202)


class _Open:
    """One request that is being answered."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.said: deque[Said] = deque()
        self.news = asyncio.Event()
        self.left = ask.num_samples  # answers that have not ended
        self.jobs: list[str] = []  # that prefill was told of
        self.error = ""  # why it was aborted here

    def hear(self, said: Said) -> None:
        if said.finish == "abort" and self.error:
            said = msgspec.structs.replace(said, finish="error", error=self.error)
        self.left -= said.finish is not None
        self.said.append(said)
        self.news.set()


class DecodeWorker(Worker):
    """Answers; it tells prefill workers what to compute."""

    role = "decode"
    config: DecodeWorkerConfig

    def __init__(self, config: DecodeWorkerConfig) -> None:
        super().__init__(config)
        self._open: dict[str, _Open] = {}
        self._outputs: list[Any] = []  # of the step under way; the engine's thread's
        self._tasks: set[asyncio.Task[None]] = set()
        key = config.worker.listen.api_key
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=_JOB_TIMEOUT_S, limits=httpx.Limits(max_connections=None), trust_env=False,
        )  # fmt: skip

    def _make_engine(self) -> Any:
        from prefixkv.engines.hf import DecodeEngine

        model, pool = _model_and_pool(self.settings)
        return DecodeEngine(model, pool, self.config.node, _tokenizer(self.settings.models.model))

    def _routes(self) -> list[Route]:
        return [Route("/generate", self._generate, methods=["POST"])]

    async def close(self) -> None:
        await super().close()
        for task in list(self._tasks):
            task.cancel()
        await self._client.aclose()

    # --- a request --------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        ask = await self._read(request, Ask)
        if ask.rid in self._open:
            raise ApiError(400, f"request {ask.rid!r} is here already", code="RequestError")
        try:
            wanted = _generate_of(ask)
        except PrefixKVError as error:
            raise ApiError(400, str(error), code=_name(error)) from None
        one = self._open[ask.rid] = _Open(ask)
        try:
            await self._call(lambda engine: engine.submit(wanted, self._heard))
        except BaseException:
            await self._give_up(one)
            raise
        limits = self.settings.listen.limits
        return Stream(
            self._lines(one), limits, "application/x-ndjson", end=lambda: self._give_up(one)
        )

    async def _lines(self, one: _Open) -> AsyncGenerator[bytes, None]:
        while True:
            await wait_set(one.news, LIFE_SIGN_S)
            one.news.clear()
            lines = [msgspec.json.encode(said) for said in one.said]
            one.said.clear()
            yield b"\n".join([*lines, b""]) if lines else b"\n"
            if not one.left:
                return

    async def _give_up(self, one: _Open) -> None:
        """Nobody waits for it any more. What has not ended is aborted, here and at prefill."""
        if self._open.pop(one.ask.rid, None) is None or not one.left:
            return
        with contextlib.suppress(ClosedError):
            self.loop.post(lambda engine: engine.abort(one.ask.rid))
        self._abort_jobs(one)

    # --- from the engine --------------------------------------------------------------------------

    def _heard(self, output: Any) -> None:
        self._outputs.append(output)

    def _after_step(self) -> None:
        super()._after_step()
        jobs = self.engine.take_prefill_jobs()
        outputs, self._outputs = self._outputs, []
        if jobs or outputs:
            self._asyncio.call_soon_threadsafe(self._carry, jobs, outputs)

    def _carry(self, jobs: list[Any], outputs: list[Any]) -> None:
        """Jobs to prefill, outputs to those that wait for them."""
        for job in jobs:
            one = self._open.get(_rid_of(job.rid))
            if one is not None:
                one.jobs.append(job.rid)
                self._spawn(self._send_job(one, job))
        for output in outputs:
            one = self._open.get(output.rid)
            if one is not None:
                one.hear(_said(output))
                if output.finish in ("abort", "error"):
                    self._abort_jobs(one)

    def _ended(self) -> None:
        for one in self._open.values():
            for sample in range(one.left):
                one.hear(Said(sample, finish="error", error="the worker has ended"))

    # --- to prefill -------------------------------------------------------------------------------

    async def _send_job(self, one: _Open, job: Any) -> None:
        url = one.ask.prefill_url
        try:
            body = msgspec.json.encode(_job_of(job))
            answer = await self._client.post(f"{url}/jobs", content=body)
            why = "" if answer.status_code == 202 else f"{answer.status_code} {answer.text[:500]}"
        except httpx.HTTPError as error:
            why = f"{type(error).__name__} {error}"
        if why:
            logger.warning("prefill at %s does not take %s: %s", url, job.rid, why)
            one.error = f"the prefill worker at {url} does not take it: {why}"
            with contextlib.suppress(ClosedError):
                self.loop.post(lambda engine: engine.abort(one.ask.rid))
        elif self._open.get(one.ask.rid) is not one:  # it was given up meanwhile
            await self._send_abort(url, [job.rid])

    def _abort_jobs(self, one: _Open) -> None:
        rids, one.jobs = one.jobs, []
        if rids:
            self._spawn(self._send_abort(one.ask.prefill_url, rids))

    async def _send_abort(self, url: str, rids: list[str]) -> None:
        """Prefill hears it over the node as well, unless the two have not met yet."""
        with contextlib.suppress(httpx.HTTPError):
            await self._client.post(f"{url}/abort", content=msgspec.json.encode(Abort(rids)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# --- what is said, in the words of the engine -----------------------------------------------------


def make_worker(config: WorkerConfig) -> PrefillWorker | DecodeWorker:
    """The worker that a configuration is of."""
    if isinstance(config, PrefillWorkerConfig):
        return PrefillWorker(config)
    return DecodeWorker(config)


def _model_and_pool(settings: WorkerSettings) -> tuple[Any, Any]:
    import torch

    from prefixkv.engines.hf import load_model
    from prefixkv.engines.hf.small import small_model

    models = settings.models
    if models.threads:
        torch.set_num_threads(models.threads)
    options: dict[str, Any] = {"device": models.device, "context": models.context or None}
    if models.dtype:
        options["dtype"] = models.dtype
    if models.model:
        model = load_model(models.model, **options)
    else:
        model = small_model(models.seed, **options)
    model.identity = replace(model.identity, option_names=OPTION_NAMES)
    return model, model.make_pool(settings.num_pages, settings.page_size, settings.layout)


def _tokenizer(folder: str) -> Any:
    from prefixkv.engines.hf import load_tokenizer
    from prefixkv.engines.hf.small import small_tokenizer

    return load_tokenizer(folder) if folder else small_tokenizer()


def _generate_of(ask: Ask) -> Any:
    from prefixkv.engines.hf import Generate, Sampling

    return Generate(
        ask.rid, _tokens(ask.tokens), ask.prefill, Sampling(**msgspec.structs.asdict(ask.sampling)),
        ask.max_new_tokens, ask.num_samples, namespace_of(ask.salt), priority=ask.priority,
        deadline_s=ask.deadline_s,
    )  # fmt: skip


def _said(output: Any) -> Said:
    error = "" if output.error is None else f"{_name(output.error)}: {output.error}"
    return Said(
        output.sample, output.position, output.token, output.text, output.finish, error,
        output.hit_tokens, output.prefill_hit_tokens, output.shared_tokens,
    )  # fmt: skip


def _job_of(job: Any) -> Job:
    choice = job.choice
    return Job(
        job.rid, job.tokens.tolist(), job.prefill, job.decode, job.room, job.generation,
        "" if job.namespace is None else job.namespace.salt, job.cacheable, job.is_known,
        How(**asdict(choice.sampling)), choice.seed, choice.sample, choice.position,
    )  # fmt: skip


def _prefill_job(job: Job) -> Any:
    from prefixkv.engines.hf import PrefillJob, Sampling
    from prefixkv.engines.hf.sampling import Choice

    try:
        sampling = Sampling(**msgspec.structs.asdict(job.sampling))
        choice = Choice(sampling, job.seed, job.sample, job.position)
        return PrefillJob(
            job.rid, _tokens(job.tokens), job.prefill, job.decode, job.room, job.generation,
            namespace_of(job.salt), job.cacheable, choice, job.is_known,
        )  # fmt: skip
    except PrefixKVError as error:
        raise ApiError(400, str(error), code=_name(error)) from None


def _tokens(tokens: list[int]) -> Any:
    try:
        return np.array(tokens, np.int64)
    except OverflowError:
        raise TokenError("tokens have to be in [0, 2**31)") from None


def _rid_of(job: str) -> str:
    """The request of a job "worker/request/sample.generation"."""
    return job.rsplit("/", 2)[1]


def _name(error: BaseException) -> str:
    return type(error).__name__
