"""A prefill and a decode server of SGLang under the transfer backend: whatever a client does with
room numbers, each request is answered right or refused by name, on both servers and soon, and both
live.

`PREFIXKV_ENGINE_PYTHON` is the interpreter of `python -m benchmarks env sglang`. Nothing here may
end by a timeout but the two requests that one server never gets: they are begun first, and waited
for last.
"""

import itertools
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from benchmarks.sglang_serve import SIDES, Pair, make_model

PYTHON = os.environ.get("PREFIXKV_ENGINE_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PREFIXKV_ENGINE_PYTHON is not set")

POOL, RESERVED, CONTEXT = 1024, 32, 2048  # tokens: of decode's pool, kept for output, of a request
TIMEOUT_S = 90  # more than any test waits on a machine with much other work
BLOCKER, BLOCKER_OUTPUT = 560, 320
"""Tokens of a request that leaves no room for one of 400 on decode. It fits beside one that waits
for prefill: SGLang wants room for its whole output and `RESERVED` of each other one."""
NEXT_ROOM = itertools.count(1_000)


class Answer(NamedTuple):
    """What a server said. `ids`: of one output; empty where it refused."""

    status: int
    ids: list[int]
    text: str


class Both(NamedTuple):
    prefill: Answer
    decode: Answer


class Servers:
    """The pair, and threads to ask it from."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.threads = ThreadPoolExecutor(32)

    def ask(self, side: str, path: str, body: dict[str, Any]) -> Answer:
        raw = json.dumps(body).encode()
        url = self.pair.servers[side].url + path
        asked = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=3 * TIMEOUT_S) as answer:
                text = answer.read().decode()
                status = answer.status
        except urllib.error.HTTPError as error:
            return Answer(error.code, [], error.read().decode())
        said = json.loads(text) if text.startswith("{") else {}
        return Answer(status, said.get("output_ids", []), text)

    def both(self, path: str, body: dict[str, Any]) -> tuple[Future[Answer], Future[Answer]]:
        """Prefill's and decode's answer to come."""
        asked = [self.threads.submit(self.ask, side, path, body) for side in ("prefill", "decode")]
        return asked[0], asked[1]

    def begun(self, body: dict[str, Any]) -> tuple[Future[Answer], Future[Answer]]:
        """Returns once decode has said its first token."""
        first = threading.Event()

        def stream() -> Answer:
            raw = json.dumps({**body, "stream": True}).encode()
            url = self.pair.servers["decode"].url + "/generate"
            asked = urllib.request.Request(url, raw, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=3 * TIMEOUT_S) as answer:
                text = answer.readline().decode()
                first.set()
                return Answer(answer.status, [], text + answer.read().decode())

        prefill = self.threads.submit(self.ask, "prefill", "/generate", body)
        decode = self.threads.submit(stream)
        decode.add_done_callback(lambda _: first.set())
        assert first.wait(3 * TIMEOUT_S)
        return prefill, decode

    def body(self, ids: Any, room: Any, output: int = 5, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": True}
        return {
            "input_ids": ids, "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.pair.bootstrap, "bootstrap_room": room,
            "sampling_params": {**sampling, **more.pop("sampling", {})}, **more,
        }  # fmt: skip

    def generate(self, ids: Any, room: Any, output: int = 5, **more: Any) -> Both:
        prefill, decode = self.both("/generate", self.body(ids, room, output, **more))
        return Both(prefill.result(), decode.result())

    def right(self, ids: list[int], output: int = 5) -> list[int]:
        """What decode says to a prompt in a room of its own."""
        said = self.generate(ids, next(NEXT_ROOM), output)
        assert (said.prefill.status, said.decode.status) == (200, 200), said
        assert len(said.decode.ids) == output
        return said.decode.ids

    def live(self) -> bool:
        return all(
            server.process.poll() is None and "Scheduler hit an exception" not in server.told()
            for server in self.pair.servers.values()
        )


def prompt(number: int, length: int = 50) -> list[int]:
    return [3 + (97 * number + 31 * place) % 2000 for place in range(length)]


PROBE = prompt(0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    make_model(folder / "model")
    spoken = folder / "model" / "tokenizer_config.json"
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    spoken.write_text(json.dumps({**json.loads(spoken.read_text()), "chat_template": template}))
    waits = {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": str(TIMEOUT_S),
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": str(TIMEOUT_S),
    }
    options = [
        *SIDES["transfers"], "--dtype", "float32", "--context-length", str(CONTEXT),
        "--log-requests", "--log-requests-level", "0",
    ]  # fmt: skip
    with Pair(
        folder / "model", options, folder, POOL, prefill_tokens=2048, around=waits,
        on_prefill=["--abort-on-priority-when-disabled"], tokenizer=True, python=PYTHON,
    ) as pair:  # fmt: skip
        made = Servers(pair)
        try:
            yield made
        finally:
            made.threads.shutdown(wait=False)


@pytest.fixture(scope="module")
def expected(servers: Servers) -> list[int]:
    return servers.right(PROBE)


@pytest.fixture(scope="module")
def alone(servers: Servers, expected: list[int]) -> dict[str, Future[Answer]]:
    """Of two rooms of which the other server hears nothing."""
    return {
        side: servers.threads.submit(
            servers.ask, side, "/generate", servers.body(prompt(1), next(NEXT_ROOM))
        )
        for side in ("prefill", "decode")
    }


@pytest.fixture(autouse=True)
def goes_on(
    servers: Servers, expected: list[int], alone: dict[str, Future[Answer]]
) -> Iterator[None]:
    """After each test both servers live and the next request is right."""
    yield
    assert servers.live()
    assert servers.right(PROBE) == expected


def refused(answer: Answer, *words: str) -> None:
    """By name, and not by a timeout."""
    assert answer.status >= 400, answer
    assert not answer.ids
    assert "timed out" not in answer.text
    assert any(word in answer.text for word in words), answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_choices_are_refused_and_one_is_served(servers: Servers, path: str) -> None:
    words = " ".join(f"w{number}" for number in prompt(4))
    said = (
        {"messages": [{"role": "user", "content": words}]} if "chat" in path else {"prompt": words}
    )
    for n in (2, 1):
        asked = servers.both(
            path,
            {
                **said, "model": "any", "n": n, "max_tokens": 4, "temperature": 0,
                "bootstrap_host": "127.0.0.1", "bootstrap_port": servers.pair.bootstrap,
                "bootstrap_room": next(NEXT_ROOM),
            },
        )  # fmt: skip
        for answer in [future.result() for future in asked]:
            if n == 2:
                refused(answer, "n is 2")
                assert answer.status == 400
            else:
                assert answer.status == 200, answer


def test_the_largest_number_is_a_room(servers: Servers, expected: list[int]) -> None:
    said = servers.generate(PROBE, 2**63 - 1)
    assert said.decode.ids == expected
    assert said.prefill.status == 200


@pytest.mark.parametrize("others", [PROBE, prompt(5, 60)], ids=["the same prompt", "another"])
def test_one_number_used_twice_at_once(
    servers: Servers, expected: list[int], others: list[int]
) -> None:
    """Each is answered right or refused. By name, but for a half whose other half the other use has
    ended before it came: nothing else comes, so it waits for its time-out."""
    right = {tuple(PROBE): expected, tuple(others): servers.right(others)}
    for room in (next(NEXT_ROOM), next(NEXT_ROOM)):
        asked = [
            (ids, servers.both("/generate", servers.body(ids, room))) for ids in (PROBE, others)
        ]
        for ids, (prefill, decode) in asked:
            said = Both(prefill.result(), decode.result())
            if said.decode.status == 200:
                assert said.decode.ids == right[tuple(ids)]
            late = [answer for answer in said if "timed out" in answer.text]
            assert len(late) <= (others != PROBE)
            assert not any(answer.ids for answer in late)
            for answer in said:
                if answer.status != 200 and answer not in late:
                    refused(answer, "another request's", "PromptMismatch", "another promise")


@pytest.mark.parametrize("length", [POOL - RESERVED + 1, POOL - 7, POOL + 100])
def test_a_prompt_that_can_never_fit_decodes_pool(servers: Servers, length: int) -> None:
    """The first would fit without what is reserved for output; the last exceeds the pool."""
    said = servers.generate(prompt(30, length), next(NEXT_ROOM))
    refused(said.decode, "can never be admitted", "maximum allowed length", "maximum number")
    refused(said.prefill, "can never be admitted", "maximum allowed length", "maximum number")


def test_what_prefill_alone_refuses(servers: Servers) -> None:
    """By an option of its own, before the request is in any queue. Nothing else is asked of it."""
    said = servers.generate(prompt(36), next(NEXT_ROOM), priority=1)
    refused(said.prefill, "Using priority is disabled")
    refused(said.decode, "prefill")


def test_one_body_sent_again_after_it_failed(servers: Servers, expected: list[int]) -> None:
    """As routers do: the same room, and the same name of the request."""
    body = servers.body(prompt(37), next(NEXT_ROOM), rid="again", priority=1)
    for future in servers.both("/generate", body):
        assert future.result().status >= 400
    del body["priority"]
    right = servers.right(prompt(37))
    said = [future.result() for future in servers.both("/generate", body)]
    assert [answer.status for answer in said] == [200, 200], said
    assert said[1].ids == right


def test_one_bad_prompt_of_a_batch(servers: Servers) -> None:
    said = servers.generate([PROBE, prompt(33, POOL + 100), prompt(34)], next(NEXT_ROOM) * 1000)
    for answer in said:
        refused(answer, "maximum allowed length", "maximum number", "bort")
    said = servers.generate([PROBE, prompt(35)], next(NEXT_ROOM) * 1000)
    assert [answer.status for answer in said] == [200, 200]


def test_what_one_server_never_gets_ends_by_its_timeout(
    servers: Servers, alone: dict[str, Future[Answer]]
) -> None:
    for side, future in alone.items():
        answer = future.result()
        assert answer.status >= 400, side
        assert "timed out" in answer.text or "request never came" in answer.text, side


def test_the_longest_prompt_that_fits(servers: Servers) -> None:
    """It needs all of decode's pool, so nothing else holds any of it: those that one server never
    got have ended."""
    servers.right(prompt(31, POOL - RESERVED), output=2)


def test_nothing_is_held_at_the_end(servers: Servers) -> None:
    """SGLang flushes its caches only where no request is left, and then checks its pools."""
    for side in ("prefill", "decode"):
        assert servers.ask(side, "/flush_cache", {}).status == 200, servers.pair.servers[
            side
        ].told()[-2000:]
    test_the_longest_prompt_that_fits(servers)
