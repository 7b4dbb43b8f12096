"""A collector of OpenTelemetry's spans over OTLP/HTTP, as processes under test send them."""

import contextlib
import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.patience import until


class SeenSpan(NamedTuple):
    """One span that was received. Times, of its events too, are nanoseconds since 1970; ids are
    hexadecimal, and `parent` is "" at the root."""

    service: str
    worker: str
    life: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any]
    events: dict[str, int]
    status: str
    why: str

    @property
    def failed(self) -> bool:
        return self.status == "ERROR"


class Collector:
    """An endpoint for `OTEL_EXPORTER_OTLP_ENDPOINT`, at `url`, on a loopback port.

    While `open` is not set it takes requests and does not answer.
    """

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.asked = 0  # requests that have come
        self.open = threading.Event()
        self.open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.asked += 1
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.open.wait()
                assert self.path == "/v1/traces"
                collector.spans += spans_of(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Write no line to stderr."""

            def handle(self) -> None:
                # The process may be killed while it is answered.
                with contextlib.suppress(ConnectionError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of(self, trace: str) -> list[SeenSpan]:
        """The spans of one trace, by the time at which they begin."""
        found = [span for span in self.spans if span.trace == trace]
        return sorted(found, key=lambda span: (span.begin_ns, -span.end_ns))

    def wait_for(self, trace: str, *names: str) -> list[SeenSpan]:
        """The spans of one trace, once there is one for each of the names ("decode: decode")."""

        def missing() -> list[str]:
            left = list(names)
            for span in self.of(trace):
                if label(span) in left:
                    left.remove(label(span))
            return left

        until(lambda: not missing(), state=lambda: [missing(), sorted(map(label, self.of(trace)))])
        return self.of(trace)


def label(span: SeenSpan) -> str:
    """Role and name, as tests name a span."""
    return f"{span.service.removeprefix('prefixkv-')}: {span.name}"


def spans_of(sent: ExportTraceServiceRequest) -> list[SeenSpan]:
    found = []
    for resource in sent.resource_spans:
        about = facts_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            assert scope.scope.name == "prefixkv"
            for span in scope.spans:
                found.append(
                    SeenSpan(
                        about["service.name"], about.get("prefixkv.worker", ""),
                        about["service.instance.id"], span.name,
                        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                        span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                        span.trace_state, span.start_time_unix_nano, span.end_time_unix_nano,
                        facts_of(span.attributes),
                        {event.name: event.time_unix_nano for event in span.events},
                        trace_pb2.Status.StatusCode.Name(span.status.code)
                        .removeprefix("STATUS_CODE_"),
                        span.status.message,
                    )
                )  # fmt: skip
    return found


def facts_of(attributes: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in attributes}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)
