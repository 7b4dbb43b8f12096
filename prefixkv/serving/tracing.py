"""Spans of requests for OpenTelemetry, the extra `otel`: one trace per request over all processes.

    front    chat NAME
             - routing, generate                                  each attempt
    decode     - generate                                         one request on its worker
                 - queue, transfer, flight, first token, decode   between the times of its record
    prefill        - prefill                                      one job
                     - promise, queue, compute, send

A proxy writes `chat NAME`, `routing`, `decode` and `prefill`. W3C headers carry the context. The
standard variables of OpenTelemetry turn it on (`asked_by`); without them no span is written, and
the context of a client that is traced goes on. A node's spans are made from the request
log once its request has ended, so that no step waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracerProvider,
    Span,
    SpanKind,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import Message, Receive, Scope, Send

from prefixkv import __version__
from prefixkv.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from prefixkv.serving.openai import Usage
    from prefixkv.serving.wire import Ask

EXTRA: Final = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")

_CLOSE_S: Final = 3.0  # for the last spans to reach the collector, at the end of a process
_WHY_CHARS: Final = 500
_NAME_CHARS: Final = 256
_EXPORTERS: Final = "opentelemetry_traces_exporter"  # entry points of the SDK
_BY_PROTOCOL: Final = {
    "": "otlp_proto_http", "http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"
}  # fmt: skip
_LOGS_OF_HEADERS: Final = ("opentelemetry.trace.span", "opentelemetry.baggage.propagation")
_PASSWORD: Final = re.compile(r"//[^/\s@]*@")

Attributes = Mapping[str, Any]
NO_FACTS: Final[Attributes] = {}
Handler = Callable[[Request], Awaitable[Response]]


# --- whether and where to spans go ----------------------------------------------------------------


def variables() -> dict[str, str]:
    """Return OpenTelemetry's variables, for a process that does not inherit the environment."""
    return {name: text for name, text in os.environ.items() if name.startswith("OTEL_")}


def asked_by() -> str:
    """Return the variable that asks for traces; "" if none does.

    These are `OTEL_TRACES_EXPORTER`, unless it is "none", and the addresses of a collector;
    `OTEL_SDK_DISABLED=true` overrides them. Empty is the same as not set, by OpenTelemetry's rules.
    """
    given = {name: text.strip() for name, text in variables().items()}
    exporters = given.get("OTEL_TRACES_EXPORTER", "")
    if given.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporters.lower() == "none":
        return ""
    names = (
        "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    )  # fmt: skip
    return next((name for name in names if given.get(name)), "")


def make_tracing(role: str, name: str = "") -> Tracing:
    """Return one that writes no spans where no variable asks for traces. Raises ConfigError if a
    package is missing, or a variable has a value that cannot be used.

    Args:
        role: "front", "proxy", "decode" or "prefill": `service.name` is prefixkv-ROLE unless a
            variable names it.
        name: the worker's, the resource's `prefixkv.worker`.
    """
    variable = asked_by()
    if not variable:
        return Tracing()
    try:
        return Tracing(_provider(role, name))
    except ImportError as error:
        raise ConfigError(
            f"{variable} asks for traces, which need {', '.join(EXTRA)} ({error}): "
            "pip install 'prefixkv[otel]', or set OTEL_TRACES_EXPORTER=none"
        ) from None
    # The SDK raises what its parsers and other packages' exporters raise.
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        raise ConfigError(f"{variable} asks for traces: {error}") from None


def _provider(role: str, name: str) -> TracerProvider:
    """Raises ImportError, and what the SDK raises for a variable."""
    # Reads the variable of the propagators, and may raise: before anything has a thread.
    import opentelemetry.propagate  # noqa: F401
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # All exporters are made before the first processor, which starts a thread.
    names = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    exporters = [_exporter(one.strip())() for one in names.split(",")]
    given = Resource.create().attributes
    ours = {
        "service.name": f"prefixkv-{role}",
        "service.version": __version__,
        **({"prefixkv.worker": name} if name else {}),
    }
    # `create` prefers its arguments to the environment, so what the environment says is left out.
    unset = {
        key: text for key, text in ours.items()
        if str(given.get(key, "unknown_service")).startswith("unknown_service")
    }  # fmt: skip
    # Not at exit: a collector that does not answer would hold the process.
    provider = TracerProvider(resource=Resource.create(unset), shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str) -> Any:
    """Raises ValueError for an exporter that is not installed."""
    if name == "otlp":
        given = variables()
        of_traces = given.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "").strip()
        protocol = of_traces or given.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()
        name = _BY_PROTOCOL.get(protocol, protocol)
    there = entry_points(group=_EXPORTERS)
    if name not in there.names:
        if name == _BY_PROTOCOL[""]:
            raise ImportError(f"no {EXTRA[1]}")
        names = ", ".join(sorted({"otlp", "none", *there.names}))
        raise ValueError(f"exporter {name!r} is not installed; there are {names}")
    return there[name].load()


class Tracing:
    """The spans of one process; none is written without `provider`, the SDK's. Used on one event
    loop, but for the SDK's thread that sends them: a collector that is slow or gone costs spans,
    and requests nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self.writes = provider is not None
        self._closing: threading.Thread | None = None
        self._provider = provider
        self._propagator: Any = TraceContextTextMapPropagator()
        if provider is not None:
            from opentelemetry import propagate

            self._propagator = propagate.get_global_textmap()
        self.tracer = (provider or NoOpTracerProvider()).get_tracer("prefixkv", __version__)
        # Each says at WARNING what is wrong with a client's header: clients could fill the log.
        for name in _LOGS_OF_HEADERS:
            logging.getLogger(name).setLevel(logging.ERROR)

    def extract(self, headers: Headers) -> Context:
        """Return the context that headers carry; an empty one if it is malformed."""
        names = [name for name in self._propagator.fields if name in headers]
        context: Context = self._propagator.extract(
            {name: headers.getlist(name) for name in names}, Context()
        )
        return context

    def inject(self, context: Context) -> dict[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context)
        return headers

    def start(
        self, name: str, context: Context, kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = NO_FACTS, start_ns: int | None = None,
    ) -> OpenSpan:  # fmt: skip
        """Start a span below `context`, at `start_ns` since 1970 or now."""
        facts = _sendable(attributes)
        span = self.tracer.start_span(name, context, kind, facts, start_time=start_ns)
        return OpenSpan(self, span, set_span_in_context(span, context))

    async def close(self) -> None:
        """Send the spans that are left, for `_CLOSE_S` at most; later ones are dropped."""
        self.give_up()
        until_s = time.monotonic() + _CLOSE_S
        while self._closing and self._closing.is_alive() and time.monotonic() < until_s:
            await asyncio.sleep(0.01)

    def give_up(self) -> None:
        """Close without waiting: for a process that does not start, and so has no spans."""
        if self._provider is not None and self._closing is None:
            # A thread that may be left behind: the exporter's own time-out is longer.
            shutdown = self._provider.shutdown
            self._closing = threading.Thread(target=shutdown, name="traces", daemon=True)
            self._closing.start()


class OpenSpan:
    """One span while its work goes on; `headers` carry the trace on."""

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self.context, self._tracing, self._span = context, tracing, span
        self.failed = False
        # Made once, at the start: `inject` follows the context's sampling flag too.
        self.headers: Mapping[str, str] = tracing.inject(context)

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def add(self, attributes: Attributes) -> None:
        """Values that cannot be sent are left out."""
        self._span.set_attributes(_sendable(attributes))

    def fail(self, why: str, kind: str = "failed") -> None:
        """Have the span end as an error; the first call counts."""
        if not self.failed:
            self.failed = True
            self.add({"error.type": kind})
            self._span.set_status(StatusCode.ERROR, _clean(why[:_WHY_CHARS]))

    def end(self, end_ns: int | None = None) -> None:
        """End and write the span, now or at a time in nanoseconds since 1970."""
        self._span.end(end_ns)

    def call(
        self, name: str, attributes: Attributes = NO_FACTS, *, may_be_cut: bool = False
    ) -> AbstractContextManager[OpenSpan]:  # fmt: skip
        """Return a context: a span of a request to another process, until its answer has ended.
        `may_be_cut`: giving it up before its end is no error."""
        return self.part(name, attributes, SpanKind.CLIENT, may_be_cut)

    @contextmanager
    def part(
        self, name: str, attributes: Attributes = NO_FACTS, kind: SpanKind = SpanKind.INTERNAL,
        may_be_cut: bool = False,
    ) -> Iterator[OpenSpan]:  # fmt: skip
        """A span of this process's own work. What ends it early is its error."""
        step = self._tracing.start(name, self.context, kind, attributes)
        try:
            yield step
        except BaseException as error:
            why = _why_cut(error)
            if not (may_be_cut and why[1] == "aborted"):
                step.fail(*why)
            raise
        finally:
            step.end()

    def describe_ask(self, ask: Ask, model: str, chat: bool, streamed: bool) -> None:
        """Add what a front's client has asked for."""
        sampling, shown = ask.sampling, model[:_NAME_CHARS]
        asked = {"model": model, "max_tokens": ask.max_new_tokens, "n": ask.num_samples}
        operation = self.describe_body("chat" if chat else "", {**asked, "stream": streamed})
        self._span.update_name(f"{operation} {shown}")
        self.add(
            {
                "gen_ai.provider.name": "prefixkv",
                "gen_ai.request.temperature": float(sampling.temperature),
                "gen_ai.request.top_p": float(sampling.top_p),
                "gen_ai.request.top_k": sampling.top_k or None,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.response.model": shown,
                "prefixkv.rid": ask.rid,
            }
        )

    def describe_body(self, path: str, body: Attributes) -> str:
        """Add what a proxy's client has asked for; return the operation."""
        operation = "chat" if "chat" in path else "text_completion"
        # A client's own values, which nothing has checked: of another type they are left out.
        model, most, n = (body.get(name) for name in ("model", "max_tokens", "n"))
        self._span.update_name(operation)  # clients choose the model's name
        self.add(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": model[:_NAME_CHARS] if isinstance(model, str) else None,
                "gen_ai.request.max_tokens": most if type(most) is int else None,
                "gen_ai.request.choice.count": n if type(n) is int and n > 1 else None,
                "gen_ai.request.stream": bool(body.get("stream")),
            }
        )
        return operation

    def describe_answer(self, usage: Usage, finishes: Sequence[str], ttft_s: float | None) -> None:
        told = usage.body()
        self.add(
            {
                "gen_ai.usage.input_tokens": told["prompt_tokens"],
                "gen_ai.usage.output_tokens": told["completion_tokens"],
                "gen_ai.usage.cache_read.input_tokens":
                    told["prompt_tokens_details"]["cached_tokens"],
                **{f"prefixkv.{name}": number for name, number in told["prefixkv"].items()},
                "gen_ai.response.finish_reasons": finishes,
                "gen_ai.response.time_to_first_chunk": ttft_s,
            }
        )  # fmt: skip


def _sendable(attributes: Attributes) -> dict[str, Any]:
    """Leave out None and integers beyond 64 bits, one of which would cost the whole batch."""
    return {
        name: _clean(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None and not (isinstance(value, int) and not -(2**63) <= value < 2**63)
    }  # fmt: skip


def _clean(text: str) -> str:
    """Return a text for a span: as UTF-8 can carry it, and without names and passwords in URLs.

    >>> _clean("http://me:secret@10.0.0.1:8000/v1 said 503")
    'http://10.0.0.1:8000/v1 said 503'
    """
    # One lone surrogate would cost the whole batch.
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return _PASSWORD.sub("//", text) if "@" in text else text


def _why_cut(error: BaseException) -> tuple[str, str]:
    """Return why a step's span fails, and the class of the error."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "given up", "aborted"
    return str(error), type(error).__name__


# --- a front's and a proxy's requests -------------------------------------------------------------


_NO_SPAN: Final = Tracing().start("", Context())
_current: Final[ContextVar[OpenSpan]] = ContextVar("prefixkv_trace", default=_NO_SPAN)


def current() -> OpenSpan:
    """Return the span of the request that this task serves; tasks that it starts have the same."""
    return _current.get()


class TracedEndpoint:
    """An application that runs `handler` within a span, `current`, until its answer has been
    sent."""

    def __init__(self, tracing: Tracing, handler: Handler) -> None:
        self._tracing, self._app = tracing, request_response(handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._tracing.start(
            f"{scope['method']} {scope['path']}", self._tracing.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": scope["path"],
             "url.scheme": scope["scheme"]},
        )  # fmt: skip
        status, is_whole = 0, False

        async def watch(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        token = _current.set(span)
        try:
            await self._app(scope, receive, watch)
            _end_answer(span, status, is_whole)
        except BaseException as error:
            span.fail(*_why_cut(error))
            raise
        finally:
            _current.reset(token)
            span.end()


def _end_answer(span: OpenSpan, status: int, is_whole: bool) -> None:
    """Set the status of a request's span by its answer, unless it has failed before."""
    # 1. 499 is made up where the client has left before there was an answer; it was not sent.
    # 2. A stream that was not sent to its end: the client has left too.
    # 3. By OpenTelemetry's conventions a server's span is no error where the client is at fault.
    if status == 499 or not is_whole:
        span.fail("the client left", "aborted")
        return
    span.add({"http.response.status_code": status})
    if status >= 500:
        span.fail(f"status {status}", str(status))
    elif status >= 400:
        span.add({"error.type": str(status)})


# --- a worker's requests --------------------------------------------------------------------------

PHASES: Final = {
    "decode": (
        ("queue", "admitted_s", ("hit_tokens", "host_tokens", "shared_tokens")),
        ("transfer", "transferred_s", ("peer", "asked_bytes", "skipped_bytes", "retries")),
        ("compute", "transferred_s", ("decode_computed_tokens", "skipped_bytes", "retries")),
        ("flight", "committed_s", ("shared_tokens",)),
        ("load", "committed_s", ("host_tokens", "shared_tokens")),
        ("first token", "first_token_s", ()),
        ("decode", "ended_s", ("output_tokens", "retractions")),
    ),
    "prefill": (
        ("promise", "promised_s", ("peer", "decode_hit_tokens")),
        ("queue", "started_s", ()),
        ("compute", "computed_s", ("prompt_tokens", "hit_tokens", "chunks")),
        ("send", "ended_s", ("peer", "sent_bytes", "skipped_bytes")),
    ),
}
"""By side, its spans in order: the name, the field of the record with the time at which it ends,
and the fields that it shows as `prefixkv.FIELD`. The first begins when the request arrives, each
other one where the one before it ends. Of "transfer" and "compute" a request has one, of "flight"
and "load" one at most."""

_SHOWN: Final = (
    "room", "generation", "outcome", "peer", "prompt_tokens", "hit_tokens", "host_tokens",
    "shared_tokens", "decode_hit_tokens", "decode_computed_tokens", "output_tokens", "asked_bytes",
    "sent_bytes", "skipped_bytes", "chunks", "retries", "retractions",
)  # fmt: skip


def phases_of(record: Attributes) -> list[tuple[str, float, float, Sequence[str]]]:
    """Return the spans of a record of the request log: (name, begin, end, fields), in seconds since
    the request arrived. The last one is the one that was under way when the request ended.

    >>> phases_of({"side": "prefill", "promised_s": 1.0, "started_s": None, "computed_s": None,
    ...            "ended_s": 1.5})[1]
    ('queue', 1.0, 1.5, ())
    """
    ended_s = record["ended_s"]
    found: list[tuple[str, float, float, Sequence[str]]] = []
    begun_s = 0.0
    for name, until, fields in PHASES[record["side"]]:
        # Without a load from host memory, or a flight of another request, the KV is in the tree as
        # soon as it is here. One with both waits for the load (`DecodeJournal.committed`).
        if name == "load" and not record["host_tokens"]:
            continue
        if record["side"] == "decode" and name in ("transfer", "compute"):
            is_here = record.get("decode_computed_tokens") and not record["asked_bytes"]
            if (name == "compute") != bool(is_here):
                continue
        if name == "flight" and (record["host_tokens"] or not record["shared_tokens"]):
            continue
        until_s = record[until]
        if until_s is None:
            found.append((name, begun_s, ended_s, fields))
            break
        # A request that is admitted again may have one of its first times after a later step's.
        until_s = max(begun_s, until_s)
        found.append((name, begun_s, until_s, fields))
        begun_s = until_s
    return found


class _LiveRequest:
    def __init__(self, span: OpenSpan, num: int) -> None:
        self.span, self.num = span, num
        self.left = num  # answers that have not ended
        self.end_ns = 0
        # One offset for all times of a request: two clocks could put a step outside of it.
        self.offset_ns = time.time_ns() - time.monotonic_ns()


class NodeSpans:
    """Spans of the requests of a node. Used on the event loop; the engine's thread calls only what
    `follow` hands to the node."""

    def __init__(self, tracing: Tracing, role: str) -> None:
        self._tracing, self._role = tracing, role
        self._live: dict[str, _LiveRequest] = {}

    def follow(self, node: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Called before the engine's thread starts."""

        def ended(record: dict[str, Any], arrived_s: float) -> None:
            # The engine goes on at once: spans are made on the event loop. It may have ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._write, record, arrived_s)

        if self._tracing.writes:
            node.on_ended(ended)

    @contextmanager
    def begin(self, headers: Headers, rid: str, num: int = 1) -> Iterator[OpenSpan]:
        """Return a context in which a request is handed to the engine: an exception ends its span,
        which otherwise ends with the last of its `num` answers. `rid` is the engine's."""
        tracing = self._tracing
        span = tracing.start(
            "generate" if self._role == "decode" else "prefill", tracing.extract(headers),
            SpanKind.SERVER, {"prefixkv.rid": rid[:_NAME_CHARS]}, time.time_ns(),
        )  # fmt: skip
        # One that is here already is refused by the engine, and must not take the other's place.
        # What the sampler leaves out has no steps either.
        is_kept = span.is_recording and rid not in self._live
        if is_kept:
            # Before the engine has it: it may end before the call returns.
            self._live[rid] = _LiveRequest(span, num)
        try:
            yield span
        except BaseException as error:
            span.fail(*_why_cut(error))
            if is_kept:
                self._live.pop(rid, None)
            is_kept = False
            raise
        finally:
            if not is_kept:
                span.end()

    def _write(self, record: dict[str, Any], arrived_s: float) -> None:
        """Write the spans of one record, and with the last answer that of the request."""
        rid, sample = record["rid"], ""
        if self._role == "decode":
            rid, _, sample = rid.rpartition("/")
        live = self._live.get(rid)
        if live is None:
            return  # not sampled, or of a request that was refused
        begun_ns = live.offset_ns + round(arrived_s * 1e9)
        end_ns = begun_ns + round(record["ended_s"] * 1e9)
        # Several answers to one prompt are requests of their own on the node: a span for each.
        several = live.num > 1
        span = live.span
        if several:
            facts = {"prefixkv.sample": int(sample)}
            span = self._tracing.start("answer", span.context, attributes=facts, start_ns=begun_ns)
        self._fill(span, record, begun_ns)
        if several:
            span.end(end_ns)
            if span.failed:
                live.span.fail("an answer has failed", record["outcome"])
        live.end_ns = max(live.end_ns, end_ns)
        live.left -= 1
        if not live.left:
            del self._live[rid]
            live.span.end(live.end_ns)

    def _fill(self, span: OpenSpan, record: dict[str, Any], begun_ns: int) -> None:
        """Write what a record says. An error is also one of the step that was under way."""
        # A room is a number of 64 bits without a sign, which the protocol does not carry.
        shown = {**record, "room": str(record["room"])}
        span.add({f"prefixkv.{name}": shown[name] for name in _SHOWN if name in shown})
        is_error = record["outcome"] in ("failed", "aborted")
        why = record["error"] or record["outcome"]
        if is_error:
            span.fail(why, record["outcome"])
        phases = phases_of(record)
        for name, from_s, to_s, fields in phases:
            facts = {f"prefixkv.{field}": shown[field] for field in fields}
            from_ns, to_ns = (begun_ns + round(second * 1e9) for second in (from_s, to_s))
            step = self._tracing.start(name, span.context, attributes=facts, start_ns=from_ns)
            if is_error and name == phases[-1][0]:
                step.fail(why, record["outcome"])
            step.end(to_ns)

    async def close(self) -> None:
        """End what is open, and send the last spans. Idempotent."""
        live, self._live = self._live, {}
        for one in live.values():
            one.span.fail("the worker has ended", "aborted")
            one.span.end()
        await self._tracing.close()
