"""What the owner of a watched socket takes of it, and of which connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from prefixkv.connections import MOST_PARTS, Bounds, Connection, Watched, Watcher, receive
from prefixkv.wakeups import wait_readable
from tests.models.patience import PATIENCE_S, until

BOUNDS = Bounds(64 << 10, 16, 128 << 10, 1 << 20, 4 << 20, 64, 1 << 20)
PARTS = 50_000
_NO_DESCRIPTOR = 1_000_000  # of libzmq
MANY_PARTS = "connections_cut: a message of many parts"


@contextmanager
def router(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[tuple[zmq.Socket[bytes], Watched]]:
    """A ROUTER that is watched, and bound."""
    sock, watcher = context.socket(zmq.ROUTER), Watcher("test")
    watched = watcher.watch_bound(sock, "test", BOUNDS)
    try:
        sock.bind("tcp://127.0.0.1:0")
        yield sock, watched
    finally:
        sock.disable_monitor()
        watcher.close()
        if watched.monitor is not None:
            watched.monitor.close()
        sock.close(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def turns(sock: zmq.Socket[bytes], watched: Watched) -> Iterator[list[list[zmq.Frame]]]:
    """The messages of each turn of the owner."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        messages: list[list[zmq.Frame]] = []
        if watched.may_sleep(sock):
            wait_readable(watched.fd, 0.01)
        watched.is_waiting = False
        try:
            while (received := receive(sock, watched)) is not None:
                messages.append(received[0])
        except zmq.Again:
            watched.found_empty()
        yield messages


def test_a_message_of_many_parts_takes_many_turns(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Its sender is cut before it is read to its end, and what others say is read after it."""
    with router(context) as (sock, watched), context.socket(zmq.DEALER) as sender:
        sender.connect(sock.LAST_ENDPOINT)
        sender.send(b"first")
        assert next(messages for messages in turns(sock, watched) if messages)
        until(lambda: bool(watched.connections))  # one that is not known yet is not cut
        sender.send_multipart([b""] * PARTS)
        most, cut_in_turn, ended_in_turn = 0, 0, 0
        for number, messages in enumerate(turns(sock, watched)):
            assert all(not frames for frames in messages)
            if watched.counters[MANY_PARTS] and not cut_in_turn:
                cut_in_turn = number
            most += watched.skipped_bytes > 0
            if messages:
                ended_in_turn = number
                break
        assert most >= 4
        assert cut_in_turn < ended_in_turn
        assert watched.counters[MANY_PARTS] == 1
        assert not watched.skipped_bytes
        with context.socket(zmq.DEALER) as other:
            other.connect(sock.LAST_ENDPOINT)
            other.send(b"hello")
            messages = next(messages for messages in turns(sock, watched) if messages)
            assert [frame.bytes for frame in messages[0][1:]] == [b"hello"]


def test_a_message_of_the_most_parts_is_taken_whole(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with router(context) as (sock, watched), context.socket(zmq.DEALER) as sender:
        sender.connect(sock.LAST_ENDPOINT)
        sender.send_multipart([b"x"] * (MOST_PARTS - 1))  # and the route
        messages = next(messages for messages in turns(sock, watched) if messages)
        assert len(messages[0]) == MOST_PARTS
        # A connection that the watcher does not know yet has its message dropped, and is not cut.
        until(lambda: bool(watched.connections))
        sender.send_multipart([b"x"] * MOST_PARTS)
        assert next(messages for messages in turns(sock, watched) if messages) == [[]]
        assert watched.counters[MANY_PARTS] == 1


def test_what_an_earlier_connection_left_is_not_laid_to_the_next(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """The next may have the descriptor of one whose messages are still read."""
    with (
        router(context) as (_, watched),
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(socket.create_connection(listener.getsockname())) as client,
        closing(listener.accept()[0]) as link,
    ):
        client.sendall(bytes(100))
        connection = Connection(link, link.fileno(), 0.0)
        until(lambda: connection.look() or connection.received == 100)
        watched.connections[_NO_DESCRIPTOR] = connection
        try:
            assert connection.can_have_brought(100)
            assert not connection.can_have_brought(101)
            watched.took(_NO_DESCRIPTOR, 50_000)
            assert connection.taken == 100
        finally:
            del watched.connections[_NO_DESCRIPTOR]
