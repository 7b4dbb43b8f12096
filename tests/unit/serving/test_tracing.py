"""Traces: of a proxy, before servers that do on command what vLLM's do; of a worker's records; when
they are asked for, and what is said where they cannot be had. Of whole processes:
tests/integration/serving/test_traces.py."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.responses import Response

from prefixkv.engines.hf.small import small_tokenizer
from prefixkv.errors import ConfigError
from prefixkv.proxy.server import Proxy
from prefixkv.serving import http as ports
from prefixkv.serving import tracing as traces
from prefixkv.serving.config import (
    ListenSettings,
    PrefillWorkerConfig,
    ProxyConfig,
    ServerAt,
    WorkerSettings,
)
from prefixkv.serving.fleet import Fleet
from prefixkv.serving.front import Front
from prefixkv.serving.log import RequestRecord
from prefixkv.serving.openai import Usage
from prefixkv.serving.text import Texts
from prefixkv.serving.tracing import NodeSpans, Tracing, asked_by, make_tracing
from prefixkv.serving.worker import PrefillWorker
from tests.support.collector import Collector
from tests.support.patience import NEVER_S, PATIENCE_S
from tests.support.patience import until as wait_until
from tests.support.ports import free_port
from tests.support.processes import run_python
from tests.support.scenes import until
from tests.unit.proxy.test_server import (
    Engine,
    Say,
    Stage,
    never,
    played,
    refusing,
    run,
    streaming,
    well,
)

ROLES = ("decode", "prefill")
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=of-the-client"}


class Memory:
    """The spans that have been written, in this process."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        """In the order in which they began."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory()
    monkeypatch.setattr(ports, "make_tracing", lambda *who: memory.tracing)
    yield memory
    for span in memory.spans:
        assert format(span.context.trace_id, "032x") == TRACE  # every client here has this one


def id_of(span: ReadableSpan) -> str:
    return format(span.context.span_id, "016x")


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return format(span.parent.span_id, "016x")


def failed(span: ReadableSpan) -> bool:
    return not span.status.is_ok and span.status.status_code.name == "ERROR"


# --- a proxy --------------------------------------------------------------------------------------


def in_turn() -> tuple[list[Say], list[Say]]:
    """A prefill and a decode server; decode answers once prefill was asked."""
    asked = asyncio.Event()

    async def prefill(engine: Engine, body: dict[str, Any]) -> Response:
        asked.set()
        return await well(engine, body)

    async def decode(engine: Engine, body: dict[str, Any]) -> Response:
        await asked.wait()
        return await well(engine, body)

    return [prefill], [decode]


def test_servers_of_a_proxy_are_called_within_the_clients_trace(memory: Memory) -> None:
    async def scene(stage: Stage) -> None:
        asked = {"model": "m", "max_tokens": 7, "prompt": "hello"}
        answer = await stage.client.post("/v1/completions", json=asked, headers=CLIENT)
        assert answer.status_code == 200
        await until(lambda: memory.named("text_completion"))
        (root,) = memory.named("text_completion")
        assert parent_of(root) == SPAN
        assert root.attributes is not None
        assert dict(root.attributes) | {
            "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "m",
            "gen_ai.request.max_tokens": 7, "gen_ai.request.stream": False,
            "http.response.status_code": 200,
        } == dict(root.attributes)  # fmt: skip
        assert {root.attributes[f"prefixkv.{role}_matched_pages"] for role in ROLES} == {0}
        for engine, role in (stage.decode[0], "decode"), (stage.prefill[0], "prefill"):
            (call,) = memory.named(role)
            assert (parent_of(call), call.kind.name) == (id_of(root), "CLIENT")
            assert call.attributes["url.full"] == f"{engine.server.url}/v1/completions"
            (head,) = engine.heads
            assert head["traceparent"] == f"00-{TRACE}-{id_of(call)}-01"
            assert head["tracestate"] == CLIENT["tracestate"]
        assert not any(map(failed, memory.spans))

    run(scene, *in_turn())


def test_prefill_that_is_let_go_is_no_error_and_a_client_that_leaves_is_one(
    memory: Memory,
) -> None:
    async def scene(stage: Stage) -> None:
        body = {"prompt": "hello", "stream": True}
        asked = stage.client.stream("POST", "/v1/completions", json=body, headers=CLIENT)
        async with asked as answer:
            await anext(answer.aiter_raw())
            await until(lambda: memory.named("prefill"))  # after its grace
        await until(lambda: memory.named("text_completion"))
        assert [span.name for span in memory.spans if failed(span)] == ["text_completion"]
        (root,) = memory.named("text_completion")
        assert root.attributes["error.type"] == root.attributes["prefixkv.outcome"] == "aborted"
        assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0

    run(scene, [never], [streaming()])


def test_each_attempt_of_a_proxy_has_its_spans_and_those_that_failed_say_why(
    memory: Memory,
) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.client.post("/v1/completions", json={"prompt": "x"}, headers=CLIENT)
        assert answer.status_code == 200
        await until(lambda: memory.named("text_completion"))
        sent, loads = memory.named("prefill"), memory.named("decode")
        assert [span.status.description for span in sent] == ["status 500"]
        assert [failed(span) for span in loads] == [True, False]  # given up, then alone
        assert not failed(memory.named("text_completion")[0])

    async def waits(engine: Engine, body: dict[str, Any]) -> Response:
        return await (never if "kv_transfer_params" in body else well)(engine, body)

    run(scene, [refusing(500)], [waits])


@played()
async def test_a_proxy_without_any_server_left_is_an_error_and_a_refused_request_is_none(
    stage: Stage, memory: Memory
) -> None:
    for say, status in (500, 502), (400, 400):
        stage.decode[0].say = refusing(say)
        answer = await stage.client.post("/v1/completions", json={"prompt": "x"}, headers=CLIENT)
        assert answer.status_code == status
    await until(lambda: len(memory.named("text_completion")) == 2)
    broken, refused = memory.named("text_completion")
    assert [failed(broken), failed(refused)] == [True, False]
    assert broken.attributes["http.response.status_code"] == 502
    assert refused.attributes["error.type"] == "400"
    said = [span.attributes["prefixkv.outcome"] for span in (broken, refused)]
    assert said == ["failed", "refused"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        (CLIENT, CLIENT),
        ({"traceparent": CLIENT["traceparent"]}, {"traceparent": CLIENT["traceparent"]}),
        ({"traceparent": "00-00", "tracestate": "a=b"}, {}),
        ({"tracestate": "a=b"}, {}),
        ({**CLIENT, "tracestate": "a=" + "b" * 5000}, {"traceparent": CLIENT["traceparent"]}),
        ({"traceparent": CLIENT["traceparent"] + "-" + "x" * 5000}, {}),
    ],
)
def test_a_proxy_that_writes_no_spans_passes_its_clients_context_on(
    sent: dict[str, str], seen: dict[str, str]
) -> None:
    async def scene(stage: Stage) -> None:
        assert not stage.proxy._tracing.writes
        await stage.client.post("/v1/completions", json={"prompt": "x"}, headers=sent)
        for engine in (*stage.prefill, *stage.decode):
            (head,) = engine.heads
            got = {name: head[name] for name in ("traceparent", "tracestate") if name in head}
            assert got == seen

    run(scene, *in_turn())


# --- a worker -------------------------------------------------------------------------------------


class Node:
    """What `NodeSpans.follow` asks of a node."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []

    def on_ended(self, listener: Any) -> None:
        self.listeners.append(listener)


def test_each_answer_of_a_worker_has_a_span_whatever_comes_in_between() -> None:
    memory, node = Memory(), Node()
    facts: dict[str, Any] = {
        "side": "decode", "error": None, "outcome": "finished", "room": 2**64 - 1, "retries": 1,
        "namespace": "salt", "arrived_at": 1e9, "admitted_s": 0.25, "transferred_s": None,
        "first_token_s": 0.5, "ended_s": 1.0,
    }  # fmt: skip

    async def scene() -> None:
        spans = NodeSpans(memory.tracing, "decode")
        spans.follow(node, asyncio.get_running_loop())
        (ended,) = node.listeners
        with spans.asked(Headers(CLIENT), "here", 2) as headers:
            assert dict(headers) == CLIENT
        # 1. Another of its name is refused, and leaves the first one its place.
        with pytest.raises(KeyError), spans.asked(Headers({}), "here"):
            raise KeyError("is here already")
        # 2. One that is refused, and whose record comes all the same.
        with pytest.raises(KeyError), spans.asked(Headers(CLIENT), "refused"):
            raise KeyError("no")
        failure = {"rid": "here/1", "outcome": "failed", "error": "TransferError: no"}
        records = [{"rid": "refused/0"}, {"rid": "unknown/0"}, failure, {"rid": "here/0"}]
        for record in [*records, {"rid": "here/0"}]:
            await asyncio.to_thread(ended, {**facts, **record}, 0.0)
        await until(lambda: len(memory.spans) == 2)
        await asyncio.sleep(0)
        assert not spans._asked

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    lost, whole = memory.named("decode")
    assert {parent_of(lost), parent_of(whole)} == {SPAN}
    assert dict(whole.attributes) == {
        "prefixkv.rid": "here/0", "prefixkv.outcome": "finished", "prefixkv.retries": 1,
        "prefixkv.room": str(2**64 - 1),  # beyond what an int may be there
    }  # fmt: skip
    assert (whole.start_time, whole.end_time) == (10**18, 10**18 + 10**9)
    events = {event.name: event.timestamp - 10**18 for event in whole.events}
    assert events == {"admitted": 250_000_000, "first_token": 500_000_000}
    assert [failed(span) for span in (lost, whole)] == [True, False]
    assert lost.status.description == "TransferError: no"


# --- attributes -----------------------------------------------------------------------------------


def test_attributes_have_the_names_of_the_conventions() -> None:
    memory = Memory()
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    parent = memory.tracing.context_of(Headers(CLIENT))
    trace = memory.tracing.start("x", parent, SpanKind.SERVER, {})
    # A seed of 64 bits is OpenAI's right, and more than a span may carry; no client's objects are.
    asked = {"model": "m", "max_tokens": 5, "n": 3, "seed": 2**63, "top_p": {}, "top_k": None}
    trace.describe_request("/v1/chat/completions", asked | {"temperature": 0.5}, "m")
    record = RequestRecord()
    record.fields = {"id": "r", **asdict(Usage(7, 4, cached_tokens=2)), "first_token_s": 0.25}
    trace.fail("http://me:secret@host/v1 said \udcff")
    trace.end_answer(record)
    (written,) = memory.spans
    names = {name for name in written.attributes if name.startswith("gen_ai.")}
    assert len(names) > 10
    assert names <= known
    assert written.attributes["gen_ai.usage.input_tokens"] == 7
    assert written.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert not names & {"gen_ai.request.seed", "gen_ai.request.top_p", "gen_ai.request.top_k"}
    assert written.name == "chat m"
    assert written.attributes["gen_ai.request.max_tokens"] == 5
    assert written.status.description == "http://host/v1 said ?"


def test_the_hit_that_a_proxy_knows_is_read_from_the_cache() -> None:
    memory = Memory()
    parent = memory.tracing.context_of(Headers(CLIENT))
    trace = memory.tracing.start("x", parent, SpanKind.SERVER, {})
    record = RequestRecord()
    record.fields = {"id": "r", "prompt_tokens": 7, "decode_hit_tokens": 3}
    trace.end_answer(record)
    (written,) = memory.spans
    assert written.attributes["gen_ai.usage.cache_read.input_tokens"] == 3


# --- whether there are any ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_TRACES_EXPORTER": ""}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": " None "}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"}, ""),
        ({"OTEL_SERVICE_NAME": "chat"}, ""),
    ],
)
def test_variables_ask_for_traces(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], name: str
) -> None:
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    assert asked_by() == name


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkins"}, "exporter 'zipkins' is not installed"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
         "exporter 'http/json' is not installed"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
         "exporter 'otlp_proto_grpc' is not installed"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "max_queue_size"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], why: str
) -> None:
    for variable, text in environ.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER asks for traces") as raised:
        make_tracing("front")
    assert why in str(raised.value)


def test_the_resource_is_what_the_environment_says_and_else_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")

    def about() -> dict[str, Any]:
        tracing = make_tracing("decode", "decode-0")
        assert tracing._provider is not None
        resource = tracing._provider.resource
        tracing.close()
        return dict(resource.attributes)

    ours = about()
    assert (ours["service.name"], ours["prefixkv.worker"]) == ("prefixkv-decode", "decode-0")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.version=7,deployment.environment=a")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    given = about()
    assert (given["service.name"], given["service.version"]) == ("chat", "7")
    assert given["deployment.environment"] == "a"


def test_the_last_spans_are_sent_at_the_end_which_does_not_wait_for_a_collector_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(round(1000 * NEVER_S)))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(NEVER_S))
        for is_open in (True, False):
            if not is_open:
                collector.open.clear()
            tracing = make_tracing("front")
            tracing.start(f"open {is_open}", Context(), SpanKind.SERVER, {}).end()
            monkeypatch.setattr(traces, "_CLOSE_S", PATIENCE_S if is_open else 0.2)
            began_s = time.monotonic()
            tracing.close()
            assert time.monotonic() - began_s < PATIENCE_S
            assert [span.name for span in collector.spans] == ["open True"]
        collector.open.set()


@pytest.mark.parametrize("kind", ["front", "proxy", "worker"])
@pytest.mark.parametrize("lacks", ["a port", "its second port", "an exporter"])
def test_what_does_not_start_leaves_no_thread_and_no_port(
    kind: str, lacks: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exporter = "zipkin" if lacks == "an exporter" else "otlp"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    before, log = set(threading.enumerate()), str(tmp_path / "log")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        if lacks != "a port":
            ports.reverse()
        listen = ListenSettings(port=ports[0], status_port=ports[1], request_log=log)

        async def main() -> None:
            fleet = Fleet("key")
            try:
                if kind == "front":
                    Front(fleet, Texts(small_tokenizer()), "small", listen)
                elif kind == "proxy":
                    at = [ServerAt("http://127.0.0.1:1", "x")]
                    Proxy(ProxyConfig(listen=listen), at, at)
                else:
                    settings = WorkerSettings(num_pages=8, listen=listen)
                    await PrefillWorker(PrefillWorkerConfig(worker=settings)).start()
            finally:
                await fleet.close()

        why = exporter if lacks == "an exporter" else "cannot be bound"
        with pytest.raises(ConfigError, match=why):
            asyncio.run(main())
        (free,) = {*ports} - {taken.getsockname()[1]}
        socket.create_server(("127.0.0.1", free)).close()
    wait_until(lambda: not any(map(_is_ours, set(threading.enumerate()) - before)))


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name in ("traces", "prefixkv-requests") or thread.name.startswith("Otel")


SERVERS = "['proxy', '--prefill', 'http://127.0.0.1:1=a', '--decode', 'http://127.0.0.1:2=b']"


def test_opentelemetry_sdk_is_not_imported_unless_it_is_asked_for() -> None:
    program = (
        "import sys; from prefixkv.serving import front, worker; "
        "from prefixkv.proxy import server; "
        "from prefixkv.serving.tracing import make_tracing; "
        "print(make_tracing('front').writes); "
        "print([name for name in sys.modules if name.startswith('opentelemetry.') "
        "and name.split('.')[1] in ('sdk', 'exporter', 'propagate')])"
    )
    # A variable of the SDK that no list of propagators knows is not read either.
    ran = run_python(program, OTEL_PROPAGATORS="b4")
    assert ran.stdout == "False\n[]\n", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "propagators", "why"),
    [
        ("opentelemetry.sdk", "", "pip install 'prefixkv[otel]'"),
        ("opentelemetry.exporter.otlp.proto.http", "", "pip install 'prefixkv[otel]'"),
        ("none", "b4", "Propagator b4 not found"),
    ],
)
def test_what_is_missing_is_said_by_a_command_in_one_line(
    missing: str, propagators: str, why: str
) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; "
        f"from prefixkv.cli.main import run_command as r; print(r({SERVERS}))"
    )
    ran = run_python(program, OTEL_TRACES_EXPORTER="otlp", OTEL_PROPAGATORS=propagators)
    assert ran.stdout == "2\n", ran.stderr
    (line,) = ran.stderr.splitlines()
    assert line.startswith("prefixkv: OTEL_TRACES_EXPORTER asks for traces")
    assert why in line
