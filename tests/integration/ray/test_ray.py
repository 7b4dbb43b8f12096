"""`prefixkv serve --ray` on a cluster of three Ray nodes: served as elsewhere, a prefill worker
killed in the middle of a transfer, and one whose node is lost.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env ray`. The workers are on
one machine and would prove each other's death themselves, so that is turned off: only what Ray's
nodes prove, and what an operator says, gives pages back.
"""

import http.client
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import openai
import pytest

from tests.support.collector import Collector
from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, client_of, get, said_by

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
HELLO = [{"role": "user", "content": "Hello there, tell me something about cats and boats."}]
LONG = [300 + i % 100 for i in range(3400)]  # 54 chunks
DECODE = 'prefixkv_{}{{node="decode-0",{}="{}"}}'


class OnRay(Serve):
    python = PYTHON


class NotStartedError(Exception):
    """Ray does not run here."""


class Nodes:
    """The process of `nodes.py`."""

    def __init__(self) -> None:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("PREFIXKV")}
        self.process = subprocess.Popen(
            [PYTHON, "-m", "tests.integration.ray.nodes"], cwd=ROOT, env={**clean, **QUIET},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            self.address = self._answer()
        except NotStartedError:
            self.close()
            raise

    def ask(self, *order: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise NotStartedError(f"the cluster has ended with {self.process.wait(PATIENCE_S)}")

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    assert PYTHON, "PREFIXKV_ENGINE_PYTHON is not set"
    try:
        nodes = Nodes()
    except NotStartedError as error:
        pytest.skip(f"Ray's nodes did not start, what they said is above: {error}")
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector | None]:
    """None where the interpreter has no OpenTelemetry."""
    tried = subprocess.run([PYTHON, "-c", "import opentelemetry.exporter.otlp.proto.http"],
                           capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    if tried.returncode:
        yield None
        return
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def serve(nodes: Nodes, collector: Collector | None) -> Iterator[Serve]:
    environ = {
        **QUIET, "PREFIXKV_CONTROL_PROVE_DEATH": "false", "PREFIXKV_CONTROL_DRAIN_TIMEOUT_S": "1",
    }  # fmt: skip
    if collector is not None:
        # The nodes do not have them: the actors have them from the command.
        environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with OnRay("--ray", nodes.address, "--chunk-tokens", "64", **environ) as serve:
        yield serve
        serve.signal()
        assert serve.ended() == 0, serve.err


@pytest.fixture(scope="module")
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    with client_of(serve) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


def lost(serve: Serve) -> list[dict[str, Any]]:
    status, told = get(f"{serve.status}/lost")
    assert status == 200
    return told


def fence(serve: Serve, name: str, life: str) -> int:
    body = json.dumps({"name": name, "life": life}).encode()
    asked = urllib.request.Request(f"{serve.status}/fence", body, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def pages(serve: Serve, *states: str) -> int:
    """Of the decode worker."""
    figures = serve.figures("decode-0")
    return int(sum(figures[DECODE.format("pages", "state", state)] for state in states))


def say_hello(client: openai.OpenAI, expected: Expected) -> None:
    assert said_by(client, HELLO, 24) == expected.chat(HELLO, 24)


def begin_and_stop(serve: Serve, nodes: Nodes) -> tuple[dict[str, Any], http.client.HTTPConnection]:
    """The prefill worker, stopped by a signal in the middle of a transfer, and what waits for the
    answer."""
    until(lambda: get(f"{serve.status}/health")[0] == 200)
    prefill = nodes.ask("found", "prefill-0")
    place = urlsplit(serve.url)
    transfer = DECODE.format("queue_requests", "queue", "transfer")
    sent = 'prefixkv_sent_bytes_total{node="prefill-0"}'
    for number in range(20):  # a transfer may have ended before this process looks
        # Not the same twice: what is cached is not sent.
        prompt = [(int(prefill["life"], 16) + number) % 97 + 200, *LONG]
        body = json.dumps({"model": "small", "prompt": prompt, "max_tokens": 5, "temperature": 0})
        waiting = http.client.HTTPConnection(str(place.netloc), timeout=PATIENCE_S)
        before = serve.figures("prefill-0")[sent]
        waiting.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        until(lambda before=before: serve.figures("prefill-0")[sent] > before)
        os.kill(prefill["pid"], signal.SIGSTOP)
        if serve.figures("decode-0")[transfer] == 1:
            assert pages(serve, "owned", "held") >= len(LONG) // 16
            return prefill, waiting
        os.kill(prefill["pid"], signal.SIGCONT)
        assert waiting.getresponse().status == 200
        waiting.close()
    raise AssertionError("each transfer has ended before it was stopped")


def is_another(serve: Serve, pid: int) -> bool:
    """Ray has started the prefill worker anew."""
    return serve.workers().get("prefill-0", {"pid": pid})["pid"] != pid


def test_actors_answer_as_generate_does(
    nodes: Nodes, serve: Serve, client: openai.OpenAI, expected: Expected
) -> None:
    say_hello(client, expected)
    first = [nodes.ask("found", name) for name in ("prefill-0", "decode-0")]
    assert first[0]["node"] != first[1]["node"]
    told = serve.workers()
    assert [told[name]["pid"] for name in ("prefill-0", "decode-0")] == [w["pid"] for w in first]
    for worker in first:
        assert not nodes.ask("has_ended", worker["life"]), "it lives"
    assert lost(serve) == []
    assert fence(serve, "prefill-0", first[0]["life"]) == 409
    assert fence(serve, "prefill-0", "abc") == 404
    say_hello(client, expected)


def test_the_spans_of_front_and_actors_are_one_trace(
    client: openai.OpenAI, collector: Collector | None
) -> None:
    if collector is None:
        pytest.skip("the interpreter has no OpenTelemetry: the spans of actors were NOT looked at")
    trace = "0af7651916cd43dd8448eb211c80319c"
    client.completions.create(
        model="small", prompt="Tell me of salt.", max_tokens=4, temperature=0,
        extra_headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    )  # fmt: skip

    def workers() -> set[tuple[str, str]]:
        return {(one.service, one.worker) for one in collector.spans if one.trace == trace}

    wanted = {("prefixkv-decode", "decode-0"), ("prefixkv-prefill", "prefill-0")}
    services = {"prefixkv-front", "prefixkv-decode", "prefixkv-prefill"}
    # The front's span ends last.
    until(
        lambda: wanted <= workers() and {service for service, _ in workers()} == services,
        state=lambda: str(workers()),
    )


def test_a_prefill_worker_killed_in_a_transfer_is_fenced_once_its_end_is_proved(
    nodes: Nodes, serve: Serve, client: openai.OpenAI, expected: Expected
) -> None:
    prefill, waiting = begin_and_stop(serve, nodes)
    os.kill(prefill["pid"], signal.SIGKILL)
    until(lambda: is_another(serve, prefill["pid"]))
    assert nodes.ask("has_ended", prefill["life"])
    answer = waiting.getresponse()
    assert answer.status in (200, 503), answer.read()
    waiting.close()
    until(lambda: not pages(serve, "owned", "held", "quarantined"))
    until(lambda: lost(serve) == [])
    say_hello(client, expected)
    assert fence(serve, "prefill-0", prefill["life"]) == 202, "it is known to be dead"


def test_pages_held_for_a_worker_of_a_lost_node_wait_for_an_operator(
    nodes: Nodes, serve: Serve, client: openai.OpenAI, expected: Expected
) -> None:
    prefill, waiting = begin_and_stop(serve, nodes)
    waiting.close()
    nodes.ask("lose_node_of", prefill["life"])
    until(lambda: is_another(serve, prefill["pid"]))
    until(lambda: pages(serve, "quarantined") > 0)
    say_hello(client, expected)
    os.kill(prefill["pid"], 0)  # it may write as soon as it goes on
    (told,) = lost(serve)
    quarantined = pages(serve, "quarantined")
    assert told["held"] == {"decode-0": quarantined}
    assert (told["name"], told["life"]) == ("prefill-0", prefill["life"])
    os.kill(prefill["pid"], signal.SIGKILL)
    assert fence(serve, "prefill-0", nodes.ask("found", "prefill-0")["life"]) == 409
    say_hello(client, expected)
    assert pages(serve, "quarantined") == quarantined, "nothing has said that it is dead"
    assert fence(serve, told["name"], told["life"]) == 202
    until(lambda: not pages(serve, "owned", "held", "quarantined"))
    assert lost(serve) == []
    say_hello(client, expected)
