"""Traces of `prefixkv serve`: what its processes send to a collector of OpenTelemetry's."""

import os
import secrets
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.support.collector import Collector, SeenSpan, label
from tests.support.patience import until
from tests.support.served import Serve, at_rest

HELLO = [{"role": "user", "content": "Hello there, tell me something about cats and boats."}]
DECODE = ("admitted", "transferred", "committed", "first_token")
PREFILL = ("promised", "started", "computed")
WHOLE = ("front: chat small", "front: generate", "decode: decode", "prefill: prefill")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def serve(collector: Collector) -> Iterator[Serve]:
    with Serve("--chunk-tokens", "64", **sending_to(collector.url)) as serve:
        yield serve


def sending_to(url: str, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "20", **more}


class Caller:
    """A client with a span of its own, whose context it sends."""

    def __init__(self, flags: str = "01") -> None:
        self.trace, self.span = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {
            "traceparent": f"00-{self.trace}-{self.span}-{flags}",
            "tracestate": "vendor=of-the-client",
        }


def ask(client: openai.OpenAI, messages: list[dict[str, str]], num: int, **more: object):
    return client.chat.completions.create(
        model="small", messages=messages, max_tokens=num, temperature=0, **more
    )


def by_label(spans: list[SeenSpan]) -> dict[str, SeenSpan]:
    found = {label(span): span for span in spans}
    assert len(found) == len(spans), sorted(map(label, spans))
    return found


def assert_in_order(span: SeenSpan, *names: str) -> None:
    """These are its events, at times within it."""
    times = [span.events[name] for name in names]
    assert span.events.keys() == {*names}
    assert times == sorted(times)
    assert span.begin_ns <= times[0] <= times[-1] <= span.end_ns


def test_one_trace_a_request_from_the_clients_span_to_the_prefill_worker(
    serve: Serve, client: openai.OpenAI, collector: Collector
) -> None:
    caller = Caller()
    made = ask(client, HELLO, 12, extra_headers=caller.headers)
    spans = by_label(collector.wait_for(caller.trace, *WHOLE))
    assert spans.keys() == set(WHOLE)

    root, attempt = spans["front: chat small"], spans["front: generate"]
    decode, prefill = spans["decode: decode"], spans["prefill: prefill"]
    assert root.parent == caller.span
    assert attempt.parent == root.id
    assert (decode.parent, prefill.parent) == (attempt.id, attempt.id)
    kinds = [root.kind, attempt.kind, decode.kind, prefill.kind]
    assert kinds == ["SERVER", "CLIENT", "SERVER", "SERVER"]
    assert {span.state for span in spans.values()} == {"vendor=of-the-client"}
    assert not any(span.failed for span in spans.values())

    # 1. Times: those of one process follow on one another, those of two processes as they must.
    assert_in_order(decode, *DECODE)
    assert_in_order(prefill, *PREFILL)
    assert root.begin_ns <= attempt.begin_ns <= decode.begin_ns <= prefill.begin_ns
    assert decode.end_ns <= attempt.end_ns <= root.end_ns
    assert decode.events["admitted"] <= prefill.events["promised"]
    assert prefill.events["computed"] <= decode.events["transferred"]

    # 2. Facts, by the conventions where there are some.
    usage = made.usage
    assert (
        root.facts
        | {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "small",
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.response.finish_reasons": ["length"],
            "prefixkv.decode_hit_tokens": 0,
            "prefixkv.sent_tokens": usage.prompt_tokens,
            "http.response.status_code": 200,
            "url.path": "/v1/chat/completions",
        }
        == root.facts
    )
    assert 0 < root.facts["gen_ai.response.time_to_first_chunk"] < 60
    assert made.id.endswith(root.facts["prefixkv.rid"])
    assert attempt.facts["prefixkv.decode"] == "decode-0"
    assert attempt.facts["prefixkv.prefill"] == "prefill-0"
    assert (decode.worker, prefill.worker, root.worker) == ("decode-0", "prefill-0", "")
    assert decode.facts["prefixkv.prompt_tokens"] == usage.prompt_tokens
    assert decode.facts["prefixkv.output_tokens"] == 12
    assert decode.facts["prefixkv.room"] == prefill.facts["prefixkv.room"]
    sent = prefill.facts["prefixkv.sent_bytes"]
    assert sent == decode.facts["prefixkv.asked_bytes"] > 0

    # 3. The same again, streamed, hits on both sides, and says so.
    caller = Caller()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, HELLO, 8, extra_headers=caller.headers, **options))
    split = chunks[-1].usage.prefixkv
    assert split["decode_hit_tokens"] > 0
    spans = by_label(collector.wait_for(caller.trace, *WHOLE))
    root = spans["front: chat small"]
    assert root.facts | {f"prefixkv.{name}": number for name, number in split.items()} == root.facts
    assert root.facts["gen_ai.usage.cache_read.input_tokens"] == split["decode_hit_tokens"]
    assert root.facts["gen_ai.request.stream"] is True
    assert spans["decode: decode"].facts["prefixkv.hit_tokens"] == split["decode_hit_tokens"]
    assert spans["decode: decode"].facts["prefixkv.skipped_bytes"] > 0
    assert spans["prefill: prefill"].facts["prefixkv.hit_tokens"] == split["prefill_hit_tokens"]
    at_rest(serve)


def test_several_answers_have_a_span_each(client: openai.OpenAI, collector: Collector) -> None:
    caller = Caller()
    made = client.completions.create(
        model="small", prompt="Once upon a time there were three of them", max_tokens=6, n=3,
        temperature=1, extra_headers=caller.headers,
    )  # fmt: skip
    assert len(made.choices) == 3
    names = ["front: text_completion small", *["decode: decode", "prefill: prefill"] * 3]
    spans = collector.wait_for(caller.trace, *names)
    (root,) = [span for span in spans if span.parent == caller.span]
    assert root.facts["gen_ai.request.choice.count"] == 3
    assert root.facts["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert root.facts["gen_ai.usage.output_tokens"] == made.usage.completion_tokens
    (attempt,) = [span for span in spans if label(span) == "front: generate"]
    answers = [span for span in spans if span.name == "decode"]
    rids = {answer.facts["prefixkv.rid"].rpartition("/")[2] for answer in answers}
    assert rids == {"0", "1", "2"}
    jobs = [span for span in spans if span.name == "prefill"]
    assert {span.parent for span in (*answers, *jobs)} == {attempt.id}


def test_a_context_that_is_malformed_begins_another_trace_and_an_unsampled_one_none(
    client: openai.OpenAI, collector: Collector
) -> None:
    unsampled, after = Caller(flags="00"), Caller()
    ask(client, HELLO, 3, extra_headers=unsampled.headers)
    malformed = {"traceparent": f"00-{after.trace}-{after.span}"}
    rid = ask(client, HELLO, 2, extra_headers=malformed).id.removeprefix("chatcmpl-")

    def roots() -> list[SeenSpan]:
        return [span for span in collector.spans if span.facts.get("prefixkv.rid") == rid]

    until(roots)
    (root,) = roots()
    assert (root.trace == after.trace, root.parent) == (False, "")
    collector.wait_for(root.trace, *WHOLE)
    assert collector.of(unsampled.trace) == []


def test_a_client_that_leaves_is_an_error_of_every_span_that_was_under_way(
    serve: Serve, client: openai.OpenAI, collector: Collector
) -> None:
    options = {"stream": True, "extra_body": {"ignore_eos": True}}
    caller = Caller()
    stream = ask(client, HELLO, 3000, extra_headers=caller.headers, **options)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    spans = by_label(collector.wait_for(caller.trace, *WHOLE))
    failed = {name for name, span in spans.items() if span.failed}
    assert failed == {"front: chat small", "front: generate", "decode: decode"}
    assert {spans[name].facts["error.type"] for name in failed} == {"aborted"}
    assert spans["front: chat small"].facts["gen_ai.usage.output_tokens"] >= 4


def test_a_worker_that_dies_is_an_error_of_the_fronts_span(
    serve: Serve, client: openai.OpenAI, collector: Collector
) -> None:
    caller = Caller()
    options = {"stream": True, "extra_body": {"ignore_eos": True}}
    stream = ask(client, HELLO, 3000, extra_headers=caller.headers, **options)
    next(stream)
    pid = serve.workers()["decode-0"]["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="decode-0 was lost"):
        list(stream)
    spans = by_label(collector.wait_for(caller.trace, "front: chat small", "front: generate"))
    assert spans["front: chat small"].failed
    assert "decode-0 was lost" in spans["front: generate"].why
