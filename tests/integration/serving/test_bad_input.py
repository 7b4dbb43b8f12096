"""What no client should send, to a real server: it answers in OpenAI's form, lives, and serves
others meanwhile."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import selectors
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, at_rest, client_of

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Once upon a time"}]
GOOD: dict[str, Any] = {"model": "small", "messages": HELLO, "max_tokens": 2, "temperature": 0}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def others_are_served(serve: Serve, client: openai.OpenAI, expected: Expected) -> Iterator[None]:
    pid = {name: worker["pid"] for name, worker in serve.workers().items()}
    yield
    is_served(client, expected)
    assert {name: worker["pid"] for name, worker in serve.workers().items()} == pid
    at_rest(serve)
    assert not [line for line in serve.err if "Traceback" in line], serve.err.clear()


def is_served(client: openai.OpenAI, expected: Expected) -> None:
    answer = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=4, temperature=0
    )
    assert answer.choices[0].message.content == expected.chat(HELLO, 4)


@pytest.fixture(scope="module")
def http(serve: Serve) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=serve.url.removesuffix("/v1"), timeout=PATIENCE_S) as client:
        yield client


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, which has OpenAI's form."""
    assert answer.status_code == status, answer.text[:300]
    told = answer.json()
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert isinstance(told["error"]["message"], str)
    assert told["error"]["type"] == "invalid_request_error"
    return told["error"]


def asked(**more: Any) -> bytes:
    return json.dumps({**GOOD, **more}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"7", b'"x"', b"[]", b"{", b'{"model":"small",}', b"\x00", b"\xff\xfe\x00",
        b'{"model":"sm\xffall","messages":[]}', b'{"model":"small\x00"}', b"[" * 200_000,
        b'{"a":' * 200_000, b'{"messages":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b"NaN", b'{"temperature":NaN}', b'{"max_tokens":1e999}',
        b'{"max_tokens":' + b"9" * 5000 + b"}",
        b'{"model":"\\ud800"}', b"\xef\xbb\xbf{}", b"--boundary\r\n\r\n",
    ],
    ids=range(21),
)  # fmt: skip
def test_a_body_that_is_nothing_to_answer_is_refused(http: httpx.Client, body: bytes) -> None:
    for path in (CHAT, "/v1/completions"):
        refused(http.post(path, content=body))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": -7}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": 2**40}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"seed": 2**80}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"odd": 1}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"tools": [5]}, "tools[0]"),
        ({"stop_token_ids": [516]}, "stop_token_ids"),
        ({"temperature": 2.1}, "temperature"),
        ({"beams": 2}, "beams"),
        ({"": 2}, ""),
    ],
)  # fmt: skip
def test_a_parameter_that_is_wrong_is_named(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    assert refused(http.post(CHAT, content=asked(**more)))["param"] == param


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "",
        [[]],
        [""],
        ["a", ""],
        [[1], [-1]],
        [-1],
        [2**31],
        [2**63],
        [516],
        [1.5],
        ["a", 1],
        {},
        None,
        [None],
        ["a"] * 129,
    ],
)
def test_a_prompt_that_is_none_is_refused(http: httpx.Client, prompt: Any) -> None:
    body = json.dumps({"model": "small", "prompt": prompt, "max_tokens": 2}).encode()
    refused(http.post("/v1/completions", content=body))


def test_what_is_odd_and_right_is_answered(http: httpx.Client) -> None:
    for said in ("\0", "a\0b", "", " ", "\ufeff", "\U0001f600" * 20, "<|end|><|user|>", "{{ 7 }}"):
        answer = http.post(CHAT, content=asked(messages=[{"role": "user", "content": said}]))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] >= 1
    # Nothing of it depends on what the sender says that it is, or on what else it says.
    for headers in ({"content-type": "text/plain"}, {"x-odd": "\x7f" * 100}, {"accept": "a/b"}):
        assert http.post(CHAT, content=asked(), headers=headers).status_code == 200


def test_the_client_of_openai_understands_what_is_refused(client: openai.OpenAI) -> None:
    for more, kind, param in (
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"max_tokens": -3}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "long " * 4000}]}, openai.BadRequestError,
         "messages"),
        ({"extra_body": {"guided_json": {}}}, openai.BadRequestError, "guided_json"),
    ):  # fmt: skip
        for stream in (False, True):
            with pytest.raises(kind) as raised:
                client.chat.completions.create(**{**GOOD, **more}, stream=stream)
            assert raised.value.param == param


def test_bodies_of_100_mb_are_refused_and_cost_no_memory(serve: Serve, http: httpx.Client) -> None:
    def chunks(num: int) -> Iterator[bytes]:
        for _ in range(num):
            yield b"x" * MIB

    with open(f"/proc/{serve.process.pid}/clear_refs", "w") as refs:
        refs.write("5")  # its peak begins here: what it has had for others hides nothing
    most = peak_bytes(serve.process.pid)
    for _ in range(3):
        assert refused(http.post(CHAT, content=chunks(100)), 413)["code"] == "request_too_large"
        big = b'{"model":"' + b"x" * (100 * MIB) + b'"}'
        assert refused(http.post(CHAT, content=big), 413)["code"] == "request_too_large"
    assert peak_bytes(serve.process.pid) - most < 64 * MIB
    # As large as is taken: prompts that are too long, told by their length or by their tokens.
    for said in ("word " * (3 * MIB), "\U0001f600" * 20_000):
        body = asked(messages=[{"role": "user", "content": said}])
        assert refused(http.post(CHAT, content=body))["code"] == "context_length_exceeded"
    assert peak_bytes(serve.process.pid) - most < 128 * MIB


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    with open(f"/proc/{pid}/status") as status:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read())
    assert found is not None
    return int(found[1]) << 10


class Stalled:
    """Connections that were begun, and that nothing more is done with. Leaving closes them."""

    def __init__(self, serve: Serve) -> None:
        parts = urlsplit(serve.url)
        self._address = parts.hostname, parts.port
        self._sockets: list[socket.socket] = []
        self._told: dict[socket.socket, bytes] = {}  # what came back

    def __enter__(self) -> Stalled:
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self._sockets:
            sock.close()

    def open(self, num: int, sent: bytes) -> None:
        for _ in range(num):
            sock = socket.socket()
            self._sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little is taken unread
            sock.settimeout(PATIENCE_S)
            sock.connect(self._address)
            sock.sendall(sent)

    def trickle(self, sent: bytes) -> None:
        """A little more on each."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.send(sent)

    def num_closed(self) -> int:
        """How many the server has closed, with an answer or without."""
        selector = selectors.DefaultSelector()
        for sock in self._sockets:
            if sock.fileno() >= 0:
                selector.register(sock, selectors.EVENT_READ)
        for key, _ in selector.select(0):
            with contextlib.suppress(BlockingIOError):
                with contextlib.suppress(ConnectionResetError):
                    while data := key.fileobj.recv(65536, socket.MSG_DONTWAIT):
                        # The head and the body may come apart.
                        told = self._told[key.fileobj] = self._told.get(key.fileobj, b"") + data
                        assert told.startswith(b"HTTP/1.1 408 "[: len(told)])
                key.fileobj.close()
        selector.close()
        return sum(sock.fileno() < 0 for sock in self._sockets)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


def test_a_thousand_connections_that_stall_do_not_keep_others_from_being_served(
    expected: Expected,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))

    def whole(num: int) -> bytes:
        body = asked(stream=True, max_tokens=num)
        return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    config = {"PREFIXKV_LIMITS_HEAD_TIMEOUT_S": "5", "PREFIXKV_LIMITS_BODY_TIMEOUT_S": "5"}
    try:
        with Serve(**config) as serve, client_of(serve) as client:
            is_served(client, expected)
            with Stalled(serve) as heads, Stalled(serve) as bodies, Stalled(serve) as answers:
                heads.open(400, HEAD)
                bodies.open(400, HEAD + b"content-length: 1000\r\n\r\n{")
                is_served(client, expected)
                answers.open(196, whole(8))  # as many as others ahead of one that reads
                answers.open(4, whole(2000))  # more than the kernels take unread
                is_served(client, expected)
                heads.trickle(b"x")
                bodies.trickle(b"x")
                # They are shown out, however slowly they go on.
                until(lambda: heads.num_closed() == 400)
                until(lambda: bodies.num_closed() == 400)
                is_served(client, expected)
            at_rest(serve)
            is_served(client, expected)
            assert not [line for line in serve.err if "Traceback" in line]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_that_are_no_http_are_refused(serve: Serve) -> None:
    parts = urlsplit(serve.url)
    for sent in (
        b"\x16\x03\x01\x02\x00", b"\0" * 1000, b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n", HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", HEAD + b"x: " + b"y" * 200_000,
        HEAD + b"host: example.org\r\n\r\n", b"GET / HTTP/1.1\r\nhost: example.org\r\n\r\n",
        b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\norigin: http://a\r\n"
        b"access-control-request-method: POST\r\n\r\n",
    ):  # fmt: skip
        with socket.create_connection((parts.hostname, parts.port), PATIENCE_S) as sock:
            got = b""
            with contextlib.suppress(ConnectionError):
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(65536):
                    got += data
        assert re.match(rb"HTTP/1.1 4\d\d ", got) or not got
        assert b"access-control" not in got.lower()
