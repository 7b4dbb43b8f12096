"""Spans of requests for OpenTelemetry, the extra `otel`: one trace per request over all processes.

    front    chat NAME
             - generate           each attempt
    decode       - decode         each answer on its worker
    prefill      - prefill        each job

A proxy writes `chat NAME`, and below it `decode` and `prefill`. W3C headers carry the context. The
standard variables of OpenTelemetry turn it on (`asked_by`); without them no span is written, and
the context of a client that is traced goes on. A node's spans are made of its request log: what has
happened to the request are a span's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
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

from prefixkv import __version__
from prefixkv.errors import ConfigError
from prefixkv.serving.log import RequestRecord, current_record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXTRA: Final = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")

_CLOSE_S: Final = 3.0  # for the last spans to reach the collector, at the end of a process
_TEXT_CHARS: Final = 500
_ASKING: Final = (
    "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
)  # fmt: skip
_BY_PROTOCOL: Final = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_LOGS_OF_HEADERS: Final = ("opentelemetry.trace.span", "opentelemetry.baggage.propagation")
_PASSWORD: Final = re.compile(r"//[^/\s@]*@")
_ASKED: Final = {
    "model": "model", "max_tokens": "max_tokens", "n": "choice.count",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
}  # fmt: skip

_ANSWERED: Final = {
    "id": "prefixkv.rid", "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "first_token_s": "gen_ai.response.time_to_first_chunk",
}  # fmt: skip

Attributes = Mapping[str, Any]
Handler = Callable[[Request], Awaitable[Response]]
_GIVEN_UP: Final = (asyncio.CancelledError, GeneratorExit)


# --- whether and where to spans go ----------------------------------------------------------------


def variables() -> dict[str, str]:
    """Return OpenTelemetry's variables, for a process that does not inherit the environment."""
    return {name: text for name, text in os.environ.items() if name.startswith("OTEL_")}


def asked_by() -> str:
    """Return the variable that asks for traces; "" if none does.

    These are `OTEL_TRACES_EXPORTER`, unless it is "none", and the addresses of a collector;
    `OTEL_SDK_DISABLED=true` overrides them. Empty is the same as not set, by OpenTelemetry's rules.
    """
    is_off = _variable("OTEL_SDK_DISABLED").lower() == "true"
    if is_off or _variable("OTEL_TRACES_EXPORTER").lower() == "none":
        return ""
    return next(filter(_variable, _ASKING), "")


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def make_tracing(role: str, name: str = "") -> Tracing:
    """Return one that writes no spans where no variable asks for traces. Raises ConfigError if a
    package is missing, or a variable has a value that cannot be used.

    Args:
        role: "front", "proxy", "decode" or "prefill": `service.name` is prefixkv-ROLE unless a
            variable names it.
        name: the worker's, the resource's `prefixkv.worker`.
    """
    variable = asked_by()
    try:
        return Tracing(_provider(role, name) if variable else None)
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
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # All exporters are made before the first processor, which starts a thread.
    names = _variable("OTEL_TRACES_EXPORTER") or "otlp"
    exporters = [_exporter(one.strip()) for one in names.split(",")]
    ours = {"service.name": f"prefixkv-{role}", "service.version": __version__}
    if name:
        ours["prefixkv.worker"] = name
    # `create` prefers its arguments to the environment, which is put over them again.
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    # Not at exit: a collector that does not answer would hold the process.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str) -> Any:
    """Raises ImportError for an exporter that is not installed."""
    if name == "otlp":
        protocol = _variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        protocol = protocol or _variable("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
        name = _BY_PROTOCOL.get(protocol, protocol)
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ImportError(f"exporter {name!r} is not installed")
    return found[name].load()()


class Tracing:
    """The spans of one process; none is written without `provider`, the SDK's. Used on one event
    loop, but for the SDK's thread that sends them: a collector that is slow or gone costs spans,
    and requests nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self.writes, self._provider = provider is not None, provider
        self.propagator: Any = TraceContextTextMapPropagator()
        if provider is not None:
            from opentelemetry import propagate

            self.propagator = propagate.get_global_textmap()
        self._tracer = (provider or NoOpTracerProvider()).get_tracer("prefixkv", __version__)
        # Each says at WARNING what is wrong with a client's header: clients could fill the log.
        for name in _LOGS_OF_HEADERS:
            logging.getLogger(name).setLevel(logging.ERROR)

    def start(
        self, name: str, parent: Context, kind: SpanKind, attributes: Attributes,
        start_ns: int | None = None,
    ) -> OpenSpan:  # fmt: skip
        """Start a span below `parent`, at `start_ns` since 1970 or now."""
        facts = _sendable(attributes)
        span = self._tracer.start_span(name, parent, kind, facts, start_time=start_ns)
        return OpenSpan(self, span, set_span_in_context(span, parent))

    def context_of(self, headers: Headers) -> Context:
        """Return what headers carry; empty if they are malformed."""
        context: Context = self.propagator.extract(headers, Context())
        return context

    def headers_of(self, context: Context) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        self.propagator.inject(headers, context)
        return headers

    def traced(self, handler: Handler) -> Handler:
        """Return `handler` with a span, `current`, which ends when its answer has been sent."""

        async def run(request: Request) -> Response:
            current_record().span = self.start(
                f"{request.method} {request.url.path}", self.context_of(request.headers),
                SpanKind.SERVER,
                {"http.request.method": request.method, "url.path": request.url.path,
                 "url.scheme": request.url.scheme},
            )  # fmt: skip
            return await handler(request)

        return run

    def close(self) -> None:
        """Send the spans that are left, for `_CLOSE_S` at most; later ones are dropped."""
        if self._provider is not None:
            # A thread that may be left behind: the exporter's own time-out is longer.
            thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
            thread.start()
            thread.join(_CLOSE_S)


class OpenSpan:
    """One span while its work goes on."""

    def __init__(self, tracing: Tracing, span: Span, context: Context) -> None:
        self.context, self._tracing, self._span = context, tracing, span
        self.failed = False

    @property
    def headers(self) -> Mapping[str, str]:
        """They carry the trace on."""
        return self._tracing.headers_of(self.context)

    def add(self, attributes: Attributes) -> None:
        """Values that cannot be sent are left out."""
        self._span.set_attributes(_sendable(attributes))

    def fail(self, why: str | BaseException, kind: str = "failed") -> None:
        """Have the span end as an error; the first call counts."""
        if isinstance(why, BaseException):
            kind = type(why).__name__
            why, kind = ("given up", "aborted") if isinstance(why, _GIVEN_UP) else (str(why), kind)
        if not self.failed:
            self.failed = True
            self.add({"error.type": kind})
            self._span.set_status(StatusCode.ERROR, _clean(why))

    def note(self, event: str, time_ns: int) -> None:
        self._span.add_event(event, timestamp=time_ns)

    def end(self, end_ns: int | None = None) -> None:
        """End and write the span, now or at a time in nanoseconds since 1970."""
        self._span.end(end_ns)

    def end_answer(self, record: RequestRecord) -> None:
        """End the span of a request whose answer has been sent, or whose client has left, with what
        its line in the request log says."""
        status, has_left = record.status, record.has_left
        facts = {**record.fields, "outcome": record.outcome}
        cached = facts.get("cached_tokens", facts.get("decode_hit_tokens"))  # a proxy's
        self.add(
            {f"prefixkv.{name}": value for name, value in facts.items() if not name.endswith("_s")}
            | {name: facts.get(field) for field, name in _ANSWERED.items()}
            | {"gen_ai.usage.cache_read.input_tokens": cached}
            | {"http.response.status_code": None if has_left else status}
        )
        # By OpenTelemetry's conventions a server's span is no error where the client is at fault.
        if has_left:
            self.fail("the client left", "aborted")
        elif status >= 500:
            self.fail(f"status {status}", str(status))
        elif record.is_error:
            self.add({"error.type": str(status)})
        self.end()

    @contextmanager
    def call(
        self, name: str, attributes: Attributes, may_be_cut: bool = False
    ) -> Iterator[OpenSpan]:
        """A span of a request to another process, until its answer has ended. What ends it early is
        its error, unless it `may_be_cut`."""
        step = self._tracing.start(name, self.context, SpanKind.CLIENT, attributes)
        try:
            yield step
        except BaseException as error:
            if not (may_be_cut and isinstance(error, _GIVEN_UP)):
                step.fail(error)
            raise
        finally:
            step.end()

    def describe_request(self, path: str, body: Attributes, name: str = "") -> None:
        """Add what a client has asked for, by OpenAI's names. `name`: that of the model, where it
        is none that the client has chosen."""
        operation = "chat" if "chat" in path else "text_completion"
        self._span.update_name(f"{operation} {name}".rstrip())
        self.add(
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": name and "prefixkv"}
            | {f"gen_ai.request.{shown}": body.get(key) for key, shown in _ASKED.items()}
            | {"gen_ai.request.stream": bool(body.get("stream"))}
        )


def _sendable(attributes: Attributes) -> dict[str, Any]:
    """Leave out what a span cannot carry: None, objects, and integers beyond 64 bits, one of which
    would cost the whole batch."""
    return {
        name: _clean(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if isinstance(value, str | float | tuple)
        or (isinstance(value, int) and -(2**63) <= value < 2**63)
    }


def _clean(text: str) -> str:
    """Return a text for a span: as UTF-8 can carry it, and without names and passwords in URLs.

    >>> _clean("http://me:secret@10.0.0.1:8000/v1 said 503")
    'http://10.0.0.1:8000/v1 said 503'
    """
    # One lone surrogate would cost the whole batch.
    text = text[:_TEXT_CHARS].encode("utf-8", "replace").decode()
    return _PASSWORD.sub("//", text)


_NO_SPAN: Final = Tracing().start("", Context(), SpanKind.INTERNAL, {})


def current() -> OpenSpan:
    """Return the span of the request that this task serves; tasks that it starts have the same."""
    span: OpenSpan = current_record().span or _NO_SPAN
    return span


# --- a worker's requests --------------------------------------------------------------------------

_NOT_SHOWN: Final = ("side", "namespace", "error", "arrived_at")  # of a record; and its times


class NodeSpans:
    """Spans of the requests of a node, each made once its request has ended, so that no step waits.
    Used on the event loop; the engine's thread calls only what `follow` hands to the node."""

    def __init__(self, tracing: Tracing, role: str) -> None:
        self._tracing, self._role = tracing, role
        # By the engine's id: the context of who has asked, and how many answers have not ended.
        self._asked: dict[str, tuple[Context, int]] = {}

    def follow(self, node: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Called before the engine's thread starts."""

        def ended(record: dict[str, Any], _: float) -> None:
            # The engine goes on at once: spans are made on the event loop, which may have ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._write, record)

        if self._tracing.writes:
            node.on_ended(ended)

    @contextmanager
    def asked(self, headers: Headers, rid: str, num: int = 1) -> Iterator[Mapping[str, str]]:
        """Yield headers that carry a request's trace on, while it is handed to the engine, whose id
        `rid` is. Its `num` answers get a span each, none if an exception says that it is
        refused."""
        context = self._tracing.context_of(headers)
        # One that is here already is refused by the engine, and must not take the other's place.
        is_new = self._tracing.writes and rid not in self._asked
        if is_new:  # before the engine has it: it may end before the call returns
            self._asked[rid] = context, num
        try:
            yield self._tracing.headers_of(context)
        except BaseException:
            if is_new:
                self._asked.pop(rid, None)
            raise

    def forget(self, rid: str) -> None:
        """A request has ended: samples that its engine held back have no record."""
        self._asked.pop(rid, None)

    def _write(self, record: dict[str, Any]) -> None:
        # On a decode node each answer is a request, "RID/sample".
        rid = record["rid"].rpartition("/")[0] if self._role == "decode" else record["rid"]
        if rid not in self._asked:
            return  # of a request that was refused
        context, left = self._asked.pop(rid)
        if left > 1:
            self._asked[rid] = context, left - 1
        times = {
            name.removesuffix("_s"): round((record["arrived_at"] + time_s) * 1e9)
            for name, time_s in record.items() if name.endswith("_s") and time_s is not None
        }  # fmt: skip
        facts = {
            f"prefixkv.{name}": value for name, value in record.items()
            if name not in _NOT_SHOWN and not name.endswith("_s")
        }  # fmt: skip
        # A number of 64 bits without a sign, which the protocol does not carry.
        facts["prefixkv.room"] = str(record["room"])
        begun_ns = round(record["arrived_at"] * 1e9)
        span = self._tracing.start(self._role, context, SpanKind.SERVER, facts, begun_ns)
        end_ns = times.pop("ended")
        for name, time_ns in times.items():
            span.note(name, time_ns)
        if record["outcome"] in ("failed", "aborted"):
            span.fail(record["error"] or record["outcome"], record["outcome"])
        span.end(end_ns)
