"""Connections that stall, to a real server: others are served meanwhile. Workers that stand still,
as SIGSTOP makes them: they are there, and do not answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import selectors
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai

from tests.support.patience import PATIENCE_S, until
from tests.support.served import Expected, Serve, at_rest, client_of, get, said_by

HELLO = [{"role": "user", "content": "Once upon a time"}]


def is_served(client: openai.OpenAI, expected: Expected) -> None:
    answer = client.chat.completions.create(
        model="small", messages=HELLO, max_tokens=4, temperature=0
    )
    assert answer.choices[0].message.content == expected.chat(HELLO, 4)


def asked(**more: Any) -> bytes:
    good = {"model": "small", "messages": HELLO, "max_tokens": 2, "temperature": 0}
    return json.dumps({**good, **more}).encode()


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
                # Where it was refused and reset already, there is nothing left to shut.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                while data := sock.recv(65536):
                    got += data
        assert re.match(rb"HTTP/1.1 4\d\d ", got) or not got
        assert b"access-control" not in got.lower()


NUM = 12
GREETING = [{"role": "user", "content": "Hello"}]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_front_says_that_a_worker_is_silent_and_has_requests_wait_for_the_only_one(
    serve: Serve, expected: Expected
) -> None:
    with client_of(serve) as client, ThreadPoolExecutor(2) as pool:
        hello = partial(said_by, client, GREETING, NUM)
        assert hello() == expected.chat(GREETING, NUM)
        with stopped(serve.workers()["decode-0"]["pid"]):
            until(lambda: get(f"{serve.status}/health")[0] == 503)
            _, told = get(f"{serve.status}/health")
            assert told["status"] == "silent"
            silent = {name: worker["silent"] for name, worker in told["workers"].items()}
            assert silent == {"decode-0": True, "prefill-0": False}
            assert serve.figures()['prefixkv_front_routing{what="silent"}'] == 1
            waiting = [pool.submit(hello) for _ in range(2)]
            assert not wait(waiting, 1.0, FIRST_COMPLETED).done
        until(lambda: get(f"{serve.status}/health")[0] == 200)
        for said in (*waiting, pool.submit(hello)):
            assert said.result(PATIENCE_S) == expected.chat(GREETING, NUM)
