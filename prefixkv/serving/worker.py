"""One worker as a process: one model, one node, one `EngineLoop`, and two HTTP servers, one for its
requests (`wire`) and one for its health and metrics; its signals, and its end with its parent.

The engine has a thread of its own; everything else runs on one event loop. Calls reach the engine
by `EngineLoop.post`; its outputs come back by one `call_soon_threadsafe` per step.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
import numpy as np
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prefixkv import DecodeConfig, PrefillConfig, PrefixKVError
from prefixkv.engines.hf.requests import AnswerToken, Generate, PrefillJob
from prefixkv.errors import CallerError, CapacityError, ClosedError, DrainingError
from prefixkv.serving import interrupts
from prefixkv.serving.client import make_client, wait_set
from prefixkv.serving.config import (
    KINDS,
    OPTION_NAMES,
    DecodeWorkerConfig,
    PrefillWorkerConfig,
    WorkerConfig,
    WorkerSettings,
)
from prefixkv.serving.http import ApiError, Entrance, Stream, json_response
from prefixkv.serving.log import current_record
from prefixkv.serving.tracing import NodeSpans
from prefixkv.serving.wire import (
    LIFE_SIGN_S,
    Announcement,
    Ask,
    EventTap,
    FenceRequest,
    LostPeer,
    TokenEvent,
    WorkerInfo,
    front_rid,
    namespace_of,
)
from prefixkv.settings import load

logger = logging.getLogger("prefixkv.worker")

READY: Final = "ready "
"""Begins a worker's line on stdout once it serves; its `WorkerInfo` as JSON follows."""

REFUSED: Final = "refused "
"""Begins the line on stdout of a worker that cannot start with its settings; why, as JSON."""

_PR_SET_PDEATHSIG: Final = 1
_END_S: Final = 10.0
_JOB_TIMEOUT_S: Final = 20.0
_REASON_CHARS: Final = 500
_TICK_S: Final = 0.2
_WINDOWS_OF_PREFILL: Final = 32  # prompts with a window that are computed or on their way at once

T = TypeVar("T")
S = TypeVar("S", bound=Generate | PrefillJob)
C = TypeVar("C", DecodeConfig, PrefillConfig)


class Worker(Entrance):
    """Serves on the running event loop, from `start` to the end of `run`. It may be made in any
    thread; everything else belongs to the loop. `info` exists once `start` has returned."""

    role: str
    info: WorkerInfo
    loop: Any = None  # the `EngineLoop`; None until the model is loaded

    def __init__(self, config: WorkerConfig) -> None:
        self.config, self.settings = config, config.worker
        super().__init__(self.role, config.worker.listen, config.node.name)
        self._ended = asyncio.Event()  # the grace of `drain` is over
        self._spans = NodeSpans(self._tracing, self.role)

    async def start(self) -> None:
        """Load the model and serve. Raises ConfigError, with nothing left open."""
        try:
            # Loading takes seconds to minutes: in a thread, so that the loop answers signals
            # meanwhile.
            self.engine = await asyncio.to_thread(self._make_engine)
            try:
                await self._serve()
            except BaseException:
                # The engine's thread does not run yet, so this thread may close the engine.
                self.engine.close()
                raise
        except BaseException:
            await self.stop()
            raise

    async def _serve(self) -> None:
        from prefixkv.engines.hf import EngineLoop

        self._asyncio, engine, node = asyncio.get_running_loop(), self.engine, self.engine.node
        self.loop = EngineLoop(engine, self._after_step, name=self.role)
        self._events = EventTap(node.take_cache_events, self._asyncio.call_soon_threadsafe)
        routes = [
            Route("/info", self._info),
            Route("/events", self._stream_events),
            Route("/audit", self._audit, methods=["POST"]),
            Route("/lost", self._list_lost_peers),
            Route("/fence", self._fence, methods=["POST"]),
            *self._routes(),
        ]
        self._bind(routes, node=node)
        if (file := self._file) is not None:
            node.on_ended(lambda record, _: file.write({"id": front_rid(record["rid"]), **record}))
        model, layout = engine.model, node.pool.layout
        # After binding, since a port of 0 has become a number only now.
        self.info = WorkerInfo(
            role=self.role,  # type: ignore[arg-type]
            name=node.peer_id.name, url=self.server.url, status_url=self.status.url,
            endpoint=getattr(engine, "endpoint", ""), model=model.name,
            identity=f"{model.identity.model} {model.identity.weights_version}",
            page_size=layout.page_size, num_pages=layout.num_pages,
            context=min(model.context, layout.num_pages * layout.page_size),
            vocab_size=model.vocab_size, pid=os.getpid(), life=f"{node.peer_id.incarnation:x}",
            alone=getattr(self.config.node, "failure_policy", "") == "local",
        )  # fmt: skip
        self._spans.follow(node, self._asyncio)
        await self.server.start()
        await self.status.start()
        self.loop.start()

    async def run(self) -> bool:
        """Serve until drained or stopped. Returns False if the engine has failed."""
        while self.loop.alive and not self._ended.is_set():
            # The engine's thread cannot set an event of this loop when it dies, so it is polled.
            await wait_set(self._ended, _TICK_S)
        await self.close()
        return self.loop.error is None

    def drain(self) -> None:
        """Accept no more requests; `run` returns when all in progress have ended, or after
        `drain_timeout_s`. A second call ends the wait at once."""
        if self.loop.draining:
            self._ended.set()
            return
        self.loop.drain()
        self._asyncio.call_later(self.settings.listen.drain_timeout_s, self._ended.set)

    async def close(self) -> None:
        """End the engine and HTTP servers now. Idempotent."""
        self.loop.stop()
        if self.loop.alive:
            await asyncio.to_thread(self.loop.join, 10.0)
        # After the engine's thread has ended, so that no output follows; before the servers stop,
        # so that every open stream still gets its last line.
        self._after_engine_end()
        await self.stop(grace_s=1.0)

    def health(self) -> tuple[bool, dict[str, Any]]:
        state = (
            "failed" if self.loop.error is not None
            else "ended" if not self.loop.alive
            else "draining" if self.loop.draining
            else "ok"
        )  # fmt: skip
        return state == "ok", {"status": state, **msgspec.to_builtins(self.info)}

    # --- for its kinds ----------------------------------------------------------------------------

    def _make_engine(self) -> Any:
        raise NotImplementedError

    def _routes(self) -> list[Route]:
        raise NotImplementedError

    def _make_pool(self, model: Any, shared: bool = False, **windows: int) -> Any:
        """`windows`: what `make_pool` gets of a group of layers with a window."""
        settings = self.settings
        return model.make_pool(
            settings.num_pages, settings.page_size, settings.layout, shared,
            window_pages=settings.window_pages, **windows,
        )  # fmt: skip

    def _after_step(self) -> None:
        """Called on the engine's thread."""
        self._events.after_step()

    def _after_engine_end(self) -> None:
        """The engine produces nothing more."""

    async def _info(self, _: Request) -> Response:
        """It is none any more of one that drains: a front sends no further requests then."""
        if self.loop.draining:
            raise ApiError(503, "the worker drains", "server_error", "not_ready")
        return json_response(self.info)

    async def _audit(self, _: Request) -> Response:
        await self._call(lambda engine: engine.audit())
        return Response(status_code=204)

    async def _stream_events(self, _: Request) -> Response:
        return Stream(self._events.frames(), "application/octet-stream")

    async def _list_lost_peers(self, _: Request) -> Response:
        lost = await self._call(lambda engine: engine.node.lost_peers())
        listed = [
            LostPeer(peer.name, f"{peer.incarnation:x}", why, held)
            for peer, (why, held) in lost.items()
        ]
        return json_response(listed)

    async def _fence(self, request: Request) -> Response:
        """A process is dead, so what the node holds for it may be used again."""
        asked = await self._read(request, FenceRequest)
        try:
            incarnation = int(asked.life, 16)
        except ValueError:
            raise ApiError(400, f"life: {asked.life!r} is no hexadecimal number") from None
        await self._call(lambda engine: engine.node.fence(asked.name, incarnation))
        return Response(status_code=202)

    async def _call(self, call: Callable[[Any], T]) -> T:
        """Run `call(engine)` on the engine's thread. Raises ApiError for errors of prefixkv: 503
        for load and shutdown, 400 for a caller's mistake, 500 for others."""
        made: Future[T] = Future()

        def run(engine: Any) -> None:
            try:
                made.set_result(call(engine))
            except PrefixKVError as error:
                made.set_exception(error)

        try:
            self.loop.post(run)
            done = asyncio.wrap_future(made)
            # A thread that dies never runs what was posted, so the wait looks once a second.
            while not (await asyncio.wait((done,), timeout=1.0))[0]:
                if not self.loop.alive:
                    raise ClosedError("the engine has ended")
            return done.result()
        except PrefixKVError as error:
            is_busy = isinstance(error, DrainingError | ClosedError | CapacityError)
            if isinstance(error, CallerError) and not is_busy:
                raise ApiError(400, str(error), code=_name(error)) from None
            status = 503 if is_busy else 500
            raise ApiError(status, str(error), "server_error", _name(error)) from None


class PrefillWorker(Worker):
    """Computes the prompts that decode workers send it."""

    role = "prefill"
    config: PrefillWorkerConfig

    def _make_engine(self) -> Any:
        from prefixkv.engines.hf import PrefillEngine

        chunk_tokens = self.config.chunk_tokens
        model, node = _model(self.settings, self.config.node)
        requests = min(node.max_running, _WINDOWS_OF_PREFILL)
        pool = self._make_pool(
            model, requests=requests, step_tokens=chunk_tokens, checkpoints=node.checkpoints
        )
        return PrefillEngine(model, pool, node, chunk_tokens)

    def _routes(self) -> list[Route]:
        return [Route("/jobs", self._job, methods=["POST"])]

    async def _job(self, request: Request) -> Response:
        job = await self._read(request, PrefillJob)
        current_record().fields["id"] = front_rid(job.rid)
        job = _for_engine(job)
        with self._spans.asked(request.headers, job.rid):
            await self._call(lambda engine: engine.submit(job))
        return Response(status_code=202)


class _OpenRequest:
    """One request, from /generate to its last line. Owned by the event loop."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.outputs: deque[TokenEvent] = deque()
        self.has_output = asyncio.Event()
        self.left = ask.num_samples  # samples that have not ended
        self.error = ""  # why this worker aborted it, if it did
        self.headers: Mapping[str, str] = {}  # that carry its trace to prefill

    def queue_output(self, output: TokenEvent) -> None:
        """An abort that this worker caused becomes an error with its cause."""
        if output.finish == "abort" and self.error:
            output = msgspec.structs.replace(output, finish="error", error=self.error)
        self.left -= output.finish is not None
        self.outputs.append(output)
        self.has_output.set()


class DecodeWorker(Worker):
    """Answers requests, and sends their prompts to prefill workers as jobs."""

    role = "decode"
    config: DecodeWorkerConfig

    def __init__(self, config: DecodeWorkerConfig) -> None:
        super().__init__(config)
        # By rid; an entry goes when its stream ends, by `_end_request`.
        self._open: dict[str, _OpenRequest] = {}
        self._outputs: list[Any] = []  # of the current step; used by the engine's thread alone
        # The loop keeps only weak references to tasks: without this set one may be collected
        # midway.
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        key = self.settings.listen.api_key
        self._client = make_client(key, _JOB_TIMEOUT_S, _JOB_TIMEOUT_S)
        await super().start()

    def _make_engine(self) -> Any:
        from prefixkv.engines.hf import DecodeEngine, load_tokenizer
        from prefixkv.engines.hf.small import small_tokenizer

        models = self.settings.models
        model, node = _model(self.settings, self.config.node)
        # Prefill copies into decode's memory, where it may map it.
        shared = node.transport.backend != "nixl" and models.device == "cpu"
        step_tokens = 1 if node.compute is None else node.compute.chunk_tokens
        pool = self._make_pool(
            model, shared, requests=node.max_running, step_tokens=step_tokens,
            checkpoints=node.checkpoints,
        )  # fmt: skip
        tokenizer = load_tokenizer(models.model) if models.model else small_tokenizer()
        return DecodeEngine(model, pool, node, tokenizer, self.config.thinking, shared)

    def _routes(self) -> list[Route]:
        return [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/announce", self._announce, methods=["POST"]),
        ]

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await self._client.close()

    # --- a request --------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Response:
        ask = await self._read(request, Ask)
        current_record().fields["id"] = front_rid(ask.rid)
        if ask.rid in self._open:
            raise ApiError(400, f"request {ask.rid!r} is here already", code="RequestError")
        wanted = _for_engine(ask)
        # Registered before it is submitted: outputs may come before `_call` returns.
        one = self._open[ask.rid] = _OpenRequest(ask)
        try:
            with self._spans.asked(request.headers, ask.rid, ask.num_samples) as one.headers:
                await self._call(lambda engine: engine.submit(wanted, self._outputs.append))
        except BaseException:
            await self._end_request(one)
            raise
        end = partial(self._end_request, one)
        return Stream(self._lines(one), "application/x-ndjson", end=end)

    async def _announce(self, request: Request) -> Response:
        said = await self._read(request, Announcement)
        namespace = namespace_of(said.namespace)
        await self._call(lambda engine: engine.node.announce(said.session, namespace))
        return Response(status_code=202)

    async def _lines(self, one: _OpenRequest) -> AsyncGenerator[bytes, None]:
        """Yield outputs, and an empty line as a sign of life after `LIFE_SIGN_S` without one."""
        while True:
            await wait_set(one.has_output, LIFE_SIGN_S)
            # Cleared before the queue is read: an output that comes in between sets it again.
            one.has_output.clear()
            lines = [msgspec.json.encode(output) for output in one.outputs]
            one.outputs.clear()
            yield b"\n".join([*lines, b""]) if lines else b"\n"
            if not one.left:
                return

    async def _end_request(self, one: _OpenRequest) -> None:
        """What has not finished is aborted; its node tells prefill's."""
        if self._open.pop(one.ask.rid, None) is not None and one.left:
            self._abort_request(one)
        elif not one.left:
            self._spans.forget(one.ask.rid)

    # --- from the engine --------------------------------------------------------------------------

    def _after_step(self) -> None:
        super()._after_step()
        jobs = self.engine.take_prefill_jobs()
        if jobs or self._outputs:
            # One wakeup of the loop per step, however many outputs the step has.
            self._asyncio.call_soon_threadsafe(self._dispatch_step, jobs, [*self._outputs])
            self._outputs.clear()

    def _dispatch_step(self, jobs: list[Any], outputs: list[Any]) -> None:
        """Send jobs to prefill workers, and outputs to the requests that wait for them."""
        # A request that was given up meanwhile is not in `_open`: its jobs and outputs are dropped.
        for job in jobs:
            one = self._open.get(job.answer_rid.rpartition("/")[0])
            if one is not None:
                task = asyncio.create_task(self._send_job(one, job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for output in outputs:
            one = self._open.get(output.rid)
            if one is not None:
                one.queue_output(_event_of(output))

    def _after_engine_end(self) -> None:
        """Give every open request an error for each sample that has not ended."""
        for one in self._open.values():
            for sample in range(one.left):
                one.queue_output(TokenEvent(sample, finish="error", error="the worker has ended"))

    # --- to prefill -------------------------------------------------------------------------------

    async def _send_job(self, one: _OpenRequest, job: Any) -> None:
        """A job that is not accepted ends its request, unless the node computes prompts itself."""
        url, how = one.ask.prefill_url, "refused it"
        try:
            salt = "" if job.namespace is None else job.namespace.salt
            sent = structs.replace(job, tokens=job.tokens.tolist(), namespace=salt)
            body = io.BytesIO(msgspec.json.encode(sent))
            asked = self._client.post(f"{url}/jobs", data=body, headers=one.headers)
            async with asked as answer:
                said = (await answer.read())[:_REASON_CHARS].decode(errors="replace")
            why = "" if answer.status == 202 else f"{answer.status} {said}"
        except (aiohttp.ClientError, TimeoutError) as error:
            how, why = "does not answer", f"{type(error).__name__} {error}"
        if why:
            reason = f"the prefill worker at {url} {how}: {why}"
            logger.warning("%s: %s", job.rid, reason)
            if self.config.node.compute is not None:
                with contextlib.suppress(ClosedError):
                    self.loop.post(lambda engine: engine.give_up_job(job, reason[:_REASON_CHARS]))
                return
            # Set before the abort is posted: the output that it causes is reported with this cause.
            one.error = reason
            self._abort_request(one)

    def _abort_request(self, one: _OpenRequest) -> None:
        def abort(engine: Any) -> None:
            engine.abort(one.ask.rid)
            # Behind the records of what has ended by it.
            self._asyncio.call_soon_threadsafe(self._spans.forget, one.ask.rid)

        with contextlib.suppress(ClosedError):
            self.loop.post(abort)


# --- messages to and from the engine's own types --------------------------------------------------


def make_worker(config: WorkerConfig) -> PrefillWorker | DecodeWorker:
    if isinstance(config, PrefillWorkerConfig):
        return PrefillWorker(config)
    return DecodeWorker(config)


def _model(settings: WorkerSettings, node: C) -> tuple[Any, C]:
    """Load the model, and return it with the node's config. Raises ConfigError."""
    with interrupts.importing():
        import torch

        from prefixkv.engines.hf import load_model
        from prefixkv.engines.hf.small import small_model

    models, context = settings.models, settings.models.context or None
    if models.threads:
        torch.set_num_threads(models.threads)
    options: dict[str, Any] = {"device": models.device, "context": context}
    if models.dtype:
        options["dtype"] = models.dtype
    model: Any = (
        load_model(models.model, **options) if models.model else small_model(models.seed, **options)
    )
    # Two workers that differ then name the option of ours that sets the field they differ in.
    model.identity = replace(model.identity, option_names=OPTION_NAMES)
    return model, model.configured(node, settings.num_pages, settings.page_size)


def _event_of(output: Any) -> TokenEvent:
    error = "" if output.error is None else f"{_name(output.error)}: {output.error}"
    fields = {name: getattr(output, name) for name in AnswerToken.__struct_fields__}
    return TokenEvent(**fields, error=error)


def _for_engine(asked: S) -> S:
    """Return a request with tokens as int64, whose range the engine checks, and with a namespace.
    Raises ApiError 400."""
    try:
        tokens = np.array(asked.tokens, np.int64)
        return structs.replace(asked, tokens=tokens, namespace=namespace_of(asked.namespace))
    except OverflowError:
        raise ApiError(400, "tokens have to be in [0, 2**31)", code="TokenError") from None
    except PrefixKVError as error:
        raise ApiError(400, str(error), code=_name(error)) from None


def _name(error: BaseException) -> str:
    return type(error).__name__


# --- its process ----------------------------------------------------------------------------------


def run_worker(config: WorkerConfig) -> int:
    """Run until SIGTERM or SIGINT has drained the worker; a second signal ends it at once. Returns
    the exit status. Raises ConfigError if it cannot start."""
    if config.worker.parent:
        die_with(config.worker.parent)
    interrupts.log_to_stderr()
    return asyncio.run(_run_worker(config))


def run_child(role: str) -> int:
    """Do as `prefixkv worker` for a process that has checked the settings and put them into the
    environment. It starts sooner: nothing of the command line is imported."""
    try:
        return run_worker(load(KINDS[role], None, os.environ, {}))
    except (CallerError, CapacityError) as error:
        # One line for all workers: the process that started them prints it.
        interrupts.say(REFUSED + msgspec.json.encode(str(error)).decode())
        return 2
    except PrefixKVError as error:
        sys.exit(f"prefixkv: {error}")


async def _run_worker(config: WorkerConfig) -> int:
    worker = make_worker(config)
    serving, signals = False, 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        # 1. While the model loads there is nothing to drain, and loading cannot be interrupted.
        # 2. The first signal drains; the second ends the drain, with `_END_S` to close.
        # 3. A third one, or a close that hangs, ends the process without more ado.
        if not serving or signals > 2:
            os._exit(1)
        worker.drain()
        if signals == 2:
            asyncio.get_running_loop().call_later(_END_S, os._exit, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    await worker.start()
    serving = True
    try:
        interrupts.keep_what_is_loaded()
        interrupts.say(READY + msgspec.json.encode(worker.info).decode())
        return 0 if await worker.run() else 1
    finally:
        await worker.close()


def die_with(parent: int) -> None:
    """Have Linux kill this process when `parent` is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Asked after prctl: a parent that died before it sends no signal, but is no parent any more.
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1]))
