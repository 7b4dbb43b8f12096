"""The connections of a socket by which no message has come are bounded, and no other is ended."""

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import zmq

from prefixkv.runtime import channel as connections
from prefixkv.runtime.channel import Newcomers, set_bounds
from tests.support.patience import PATIENCE_S, until

MOST = 16
MANY = 60


class Bound:
    """A socket and its newcomers; `turn` is what its owner does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> None:
        self.sock = context.socket(kind)
        self.counters: Counter[str] = Counter()
        set_bounds(self.sock, 1024, 16, 1 << 16)
        # Else libzmq ends some of the silent by itself where this process stands still for 10 s.
        self.sock.setsockopt(zmq.HANDSHAKE_IVL, 0)
        self.newcomers = Newcomers(self.sock, MOST, self.counters)
        self.sock.bind(address)
        self.endpoint = self.sock.getsockopt_string(zmq.LAST_ENDPOINT)
        self.heard: list[bytes] = []

    def turn(self) -> None:
        self.newcomers.read()
        while self.sock.type == zmq.ROUTER and self.sock.poll(0):
            parts = self.sock.recv_multipart(copy=False)
            self.newcomers.heard(parts[-1])
            self.heard.append(parts[-1].bytes)

    def connect(self) -> socket.socket:
        """A connection that says nothing."""
        host, _, port = self.endpoint.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def is_over(sock: socket.socket) -> bool:
    """Whether the other end has ended it."""
    sock.setblocking(False)
    try:
        while sock.recv(1024):  # libzmq's greeting
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bound(stack: ExitStack, kind: int = zmq.ROUTER, address: str = "tcp://127.0.0.1:*") -> Bound:
    context: Any = stack.enter_context(zmq.Context())
    made = Bound(context, kind, address)
    stack.callback(lambda: (made.newcomers.close(), made.sock.close(linger=0)))
    return made


def dealer(stack: ExitStack, address: str, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
    sock = stack.enter_context(zmq.Context()).socket(kind)
    stack.callback(sock.close, linger=0)
    sock.connect(address)
    return sock


def test_of_many_connections_that_never_shake_hands_the_oldest_are_ended(stack: ExitStack) -> None:
    router = bound(stack)
    peer = dealer(stack, router.endpoint)
    peer.send(b"first")
    until(lambda: router.heard, step=router.turn)
    strangers = [stack.enter_context(closing(router.connect())) for _ in range(MANY)]
    until(lambda: router.counters["connections_cut"] == MANY - MOST, step=router.turn)
    until(lambda: all(map(is_over, strangers[: MANY - MOST])), step=router.turn)
    assert not any(map(is_over, strangers[MANY - MOST :]))
    # One that has sent a message is none of them, and a new peer is let in.
    peer.send(b"second")
    dealer(stack, router.endpoint).send(b"new")
    until(lambda: {b"second", b"new"} <= set(router.heard), step=router.turn)


def test_subscribers_are_bounded(stack: ExitStack) -> None:
    publisher = bound(stack, zmq.PUB)
    stays = [stack.enter_context(closing(publisher.connect())) for _ in range(MOST)]
    until(lambda: len(publisher.newcomers._accepted) == MOST, step=publisher.turn)
    late = dealer(stack, publisher.endpoint, zmq.SUB)
    late.setsockopt(zmq.SUBSCRIBE, b"")
    until(lambda: publisher.counters["connections_cut"] == 1, step=publisher.turn)
    until(lambda: is_over(stays[0]))

    def said() -> None:
        publisher.sock.send(b"event")
        publisher.turn()

    until(lambda: late.poll(0), step=said)


def test_a_connection_that_has_gone_gives_its_place_back(stack: ExitStack) -> None:
    router = bound(stack)
    for _ in range(3 * MOST):
        with closing(router.connect()):
            until(lambda: router.newcomers._accepted, step=router.turn)
        until(lambda: not router.newcomers._accepted, step=router.turn)
    assert not router.counters


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(stack: ExitStack) -> None:
    router = bound(stack)
    ours, theirs = socket.socketpair()
    server = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
    other = stack.enter_context(closing(socket.create_connection(server.getsockname())))
    file = os.open("/dev/null", os.O_RDONLY)
    stack.callback(os.close, file)
    with ours, theirs:
        for fd in (ours.fileno(), other.fileno(), file, 1 << 20):
            router.newcomers._end(fd)
        assert not is_over(theirs)
    assert not is_over(other)
    assert not router.counters


def test_connections_that_are_not_tcp_are_not_ended(stack: ExitStack, tmp_path: Any) -> None:
    router = bound(stack, address=f"ipc://{tmp_path}/socket")
    peers = [dealer(stack, router.endpoint) for _ in range(MOST + 4)]
    until(lambda: len(router.newcomers._accepted) >= MOST, step=router.turn)
    for peer in peers:
        peer.send(b"hello")
    until(lambda: len(router.heard) == len(peers), step=router.turn)
    assert not router.counters


def test_a_quarter_of_the_descriptors_is_the_most(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (100, 100))
    context: Any = stack.enter_context(zmq.Context())
    with closing(context.socket(zmq.ROUTER)) as sock:
        newcomers = Newcomers(sock, 1000, Counter())
        assert newcomers._most == 25
        newcomers.close()
