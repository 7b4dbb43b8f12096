"""What the owner of a watched socket takes of it, and of which connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import zmq

from prefixkv import connections
from prefixkv.connections import (
    MOST_PARTS,
    Bounds,
    Connection,
    Watched,
    Watcher,
    is_empty,
    message_bytes,
    receive,
)
from prefixkv.wakeups import wait_readable
from tests.models.patience import NEVER_S, PATIENCE_S, until

BOUNDS = Bounds(64 << 10, 16, 128 << 10, 1 << 20, 4 << 20, 64, 1 << 20)
PARTS = 50_000
BURST, BURST_BYTES = 64, 8 << 10
_NO_DESCRIPTOR = 1_000_000  # of libzmq
MANY_PARTS = "connections_cut: a message of many parts"


@contextmanager
def router(
    context: zmq.Context[zmq.Socket[bytes]],
) -> Iterator[tuple[zmq.Socket[bytes], Watched, Watcher]]:
    """A ROUTER that is watched, and bound."""
    sock, watcher = context.socket(zmq.ROUTER), Watcher("test")
    watched = watcher.watch_bound(sock, "test", BOUNDS)
    try:
        sock.bind("tcp://127.0.0.1:0")
        yield sock, watched, watcher
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
    with router(context) as (sock, watched, _), context.socket(zmq.DEALER) as sender:
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
    with router(context) as (sock, watched, _), context.socket(zmq.DEALER) as sender:
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
        router(context) as (_, watched, _),
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


def test_a_watcher_looks_once_behind_a_burst(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pauses when bytes come, and counts behind the pause whatever has come until then."""
    monkeypatch.setattr(connections, "ROUND_S", 100 * NEVER_S)
    looks: list[int] = []
    pausing, goes_on = threading.Event(), threading.Event()

    def pause(seconds: float) -> None:
        pausing.set()
        assert goes_on.wait(PATIENCE_S)

    with router(context) as (sock, watched, watcher), context.socket(zmq.DEALER) as sender:

        def look_on() -> None:
            """Wait until the watcher has ended the step that it makes now, and another one."""
            for _ in range(3):
                told = threading.Event()
                watcher._tell(told.set)
                assert told.wait(PATIENCE_S)

        sender.connect(sock.LAST_ENDPOINT)
        sender.send(b"first")
        assert next(messages for messages in turns(sock, watched) if messages)
        until(lambda: bool(watched.connections))
        look_on()
        (connection,) = watched.connections.values()
        before, look = connection.count()[1], Connection.look
        monkeypatch.setattr(Connection, "look", lambda one: (looks.append(1), look(one))[1])
        clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
        monkeypatch.setattr(connections, "time", clock)
        # More than libzmq takes while its owner reads nothing: so bytes are there to be seen.
        for _ in range(BURST):
            sender.send(bytes(BURST_BYTES))
        try:
            assert pausing.wait(PATIENCE_S)
            assert not looks
            # All of it comes while the watcher pauses.
            taken, of_turns = 0, turns(sock, watched)
            while taken < BURST:
                taken += len(next(of_turns))
        finally:
            goes_on.set()
        until(lambda: bool(looks))
        look_on()
        assert len(looks) == 1
        assert connection.received == before + BURST * message_bytes(BURST_BYTES, is_curve=False)


def test_what_libzmq_takes_at_once_is_counted_within_a_round(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone from the kernel before the watcher asks, so no arrival is named."""
    monkeypatch.setattr(connections, "ROUND_S", 0.05)
    monkeypatch.setattr(Watcher, "_note_arrivals", lambda watcher: None)
    with router(context) as (sock, watched, _), context.socket(zmq.DEALER) as sender:
        sender.connect(sock.LAST_ENDPOINT)
        sender.send(b"first")
        assert next(messages for messages in turns(sock, watched) if messages)
        until(lambda: bool(watched.connections))
        (connection,) = watched.connections.values()
        for _ in range(2):
            sender.send(bytes(100))
            assert next(messages for messages in turns(sock, watched) if messages)
            until(lambda: connection.received == connection.count()[1])


def test_a_socket_is_empty_until_it_has_a_message_and_behind_its_last(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as other:
        one.bind("inproc://one")
        other.connect("inproc://one")
        assert is_empty(one)
        for left in range(3):
            other.send(b"%d" % left)
        for _ in range(3):
            assert not is_empty(one)
            one.recv()
        assert is_empty(one)
