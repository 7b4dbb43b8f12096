"""A process is dead where the kernel proves it, and at no other time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from prefixkv.runtime.death import HeldLife, ProcessLife, has_read_the_dead, is_dead
from tests.models.patience import until

CHILD = """
import os, signal, sys, msgspec
from prefixkv.runtime.death import HeldLife
held = HeldLife()
fork = os.fork() if "fork" in sys.argv else None
if fork == 0:
    signal.pause()
sys.stdout.buffer.write(msgspec.json.encode([held.life, fork]) + b"\\n")
sys.stdout.flush()
signal.pause()
"""
WRITER = """
import os, signal, socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.setblocking(False)
sent = 0
try:
    while True:
        sent += sock.send(bytes(65536))
except BlockingIOError:
    print(sent, flush=True)
signal.pause()
"""


@contextmanager
def process(code: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def read_life(child: subprocess.Popen[bytes]) -> tuple[ProcessLife, int | None]:
    assert child.stdout is not None
    line = child.stdout.readline()
    return msgspec.json.decode(line, type=tuple[ProcessLife, int | None])


def test_a_killed_process_is_dead_once_it_is_reaped_and_a_stopped_one_is_not() -> None:
    with process(CHILD) as child:
        life, _ = read_life(child)
        assert not is_dead(life)
        child.send_signal(signal.SIGSTOP)
        assert not is_dead(life)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_dead(life), "a zombie's other threads may run on"
        child.wait()
        assert is_dead(life)


def test_a_fork_that_lives_holds_the_proof_back() -> None:
    with process(CHILD, "fork") as child:
        life, fork = read_life(child)
        assert fork is not None
        child.kill()
        child.wait()
        assert not is_dead(life)
        os.kill(fork, signal.SIGKILL)
        until(lambda: is_dead(life))


@pytest.mark.parametrize(
    "elsewhere", [{"boot": "another"}, {"pid_space": 1}, {"net_space": 1}], ids=str
)
def test_a_process_that_cannot_be_seen_from_here_is_never_dead(
    elsewhere: dict[str, object],
) -> None:
    with process(CHILD) as child:
        life, _ = read_life(child)
        child.kill()
        child.wait()
    assert is_dead(life)
    assert not is_dead(msgspec.structs.replace(life, **elsewhere))


def test_another_process_under_the_same_number_is_another() -> None:
    held = HeldLife()
    before = msgspec.structs.replace(held.life, began=held.life.began - 1, holder="nobody's")
    assert is_dead(before)
    assert not is_dead(held.life)
    assert not is_dead(msgspec.structs.replace(before, holder=held.life.holder))
    held.close()


def test_what_a_dead_writer_sent_is_on_its_way_until_it_is_read() -> None:
    assert has_read_the_dead()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with process(WRITER, str(server.getsockname()[1])) as child:
            conn, _ = server.accept()
            assert child.stdout is not None
            left = int(child.stdout.readline())
            assert has_read_the_dead(), "its writer lives"
            child.kill()
            child.wait()
        with conn:
            while left:
                assert not has_read_the_dead()
                left -= len(conn.recv(1 << 20))
            until(has_read_the_dead)
