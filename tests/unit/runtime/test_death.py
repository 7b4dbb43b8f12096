"""A process is dead where the kernel proves it, and at no other time."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import Mock

import msgspec
import pytest

from prefixkv.config import ControlConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime import death
from prefixkv.runtime.death import HeldLife, ProverThread, has_read_the_dead, is_dead
from tests.support.patience import until

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
    line = child.stdout.readline()
    return msgspec.json.decode(line, type=tuple[ProcessLife, int | None])


@cache
def a_dead_life() -> ProcessLife:
    """Of a process that has ended and was waited for."""
    with process(CHILD) as child:
        life, _ = read_life(child)
        child.kill()
        child.wait()
    return life


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
    life = a_dead_life()
    assert is_dead(life)
    assert not is_dead(msgspec.structs.replace(life, **elsewhere))


def test_another_process_under_the_same_number_is_another() -> None:
    held = HeldLife()
    before = msgspec.structs.replace(held.life, began=held.life.began - 1, holder="nobody's")
    assert is_dead(before)
    assert not is_dead(held.life)
    assert not is_dead(msgspec.structs.replace(before, holder=held.life.holder))
    held.close()
    assert is_dead(before), "what is held of it is all that was left"


def test_what_could_not_be_ended_is_held_until_the_process_ends() -> None:
    held = HeldLife()
    held.close(ended=False)
    assert not is_dead(msgspec.structs.replace(held.life, began=0))


@pytest.mark.parametrize("mounts", [True, False], ids=["its own /proc", "the /proc of others"])
def test_a_process_of_another_pid_namespace(mounts: bool) -> None:
    """It is not dead to us, dead or alive; and where it sees the pids of others, it says nothing of
    itself."""
    own = ["--mount-proc"] if mounts else []
    command = ["unshare", "--pid", "--fork", "--kill-child", *own]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets nobody unshare a pid namespace here")
    with subprocess.Popen(
        [*command, sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            if not mounts:
                assert b"OSError" in child.stderr.read()
                return
            life, _ = read_life(child)
            assert life.pid < 10, "as it is called there"
            assert not is_dead(life)
        finally:
            child.kill()
    until(lambda: is_dead(msgspec.structs.replace(life, pid_space=death._place()[1])))
    assert not is_dead(life)


# --- what the dead have sent ----------------------------------------------------------------------


def drain(conn: socket.socket, left: int) -> None:
    """Read what is left; until then it is on its way."""
    while left:
        assert not has_read_the_dead()
        left -= len(conn.recv(1 << 20))


@pytest.mark.parametrize("is_reset", [False, True], ids=["its end", "a reset"])
def test_what_a_dead_writer_sent_is_on_its_way_until_it_is_read(is_reset: bool) -> None:
    """A kernel whose process has not read all says at its death that the connection is reset; what
    came before can be read all the same. Then no table has it."""
    assert has_read_the_dead()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with process(WRITER, str(server.getsockname()[1])) as child:
            conn, _ = server.accept()
            left = int(child.stdout.readline())
            assert has_read_the_dead(), "its writer lives"
            if is_reset:
                conn.sendall(b"never read there")
            child.kill()
            child.wait()
        with conn:
            if is_reset:  # what its kernel had not sent is lost
                until(lambda: connection_of(conn) is None)
                left = death._unread_bytes_of_tcp(conn.fileno())
                assert left > 0
            drain(conn, left)
            until(has_read_the_dead)
            assert is_reset or conn.recv(1) == b""
            assert has_read_the_dead()


def connection_of(conn: socket.socket) -> death._Connection | None:
    inode = os.fstat(conn.fileno()).st_ino
    return next((row for row in death._connections("tcp") if row.inode == inode), None)


def test_the_last_byte_is_waited_for_and_the_end_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = """
import signal, socket, sys
socket.create_connection(("127.0.0.1", int(sys.argv[1]))).sendall(b"ab")
print(flush=True)
signal.pause()
"""
        with process("sock = None\n" + code, str(server.getsockname()[1])) as child:
            conn, _ = server.accept()
            child.stdout.readline()
        with conn:
            assert conn.recv(1) == b"a"
            assert not has_read_the_dead()
            assert conn.recv(1) == b"b"
            assert has_read_the_dead(), "that nothing follows need not be read"


@pytest.mark.parametrize(
    ("state", "waiting", "remote", "read"),
    [
        (0x01, 0, "0100007F:0001", False),  # open: its kernel may have more
        (0x08, 2, "0100007F:0001", False),  # ended: a byte before the end
        (0x08, 1, "0100007F:0001", True),  # the end alone
        (0x01, 1, "010200C0:0001", True),  # to 192.0.2.1: its other end is in no table of ours
    ],
)
def test_what_a_row_without_another_end_says(
    monkeypatch: pytest.MonkeyPatch, state: int, waiting: int, remote: str, read: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        row = connection_of(server)
        rows = [row._replace(state=state, waiting=waiting, remote=remote)]
        monkeypatch.setattr(death, "_connections", lambda name: rows if name == "tcp" else [])
        assert has_read_the_dead() is read


@pytest.mark.parametrize(
    ("end", "here"),
    [
        ("0100007F:1F90", True),
        ("010200C0:0050", False),  # 192.0.2.1
        ("0000000000000000FFFF00000100007F:1F90", True),  # ::ffff:127.0.0.1
        ("0000000000000000FFFF0000010200C0:0050", False),
        ("B80D0120000000000000000001000000:0050", False),  # 2001:db8::1
    ],
)
def test_which_addresses_are_of_this_machine(end: str, here: bool) -> None:
    assert death._is_here(end) is here


# --- the prover's thread --------------------------------------------------------------------------


def test_a_process_that_lives_is_not_told() -> None:
    told: list[PeerId] = []
    prover = ProverThread("p", ControlConfig(), False, told.append)
    held = HeldLife()
    prover.submit(PeerId("d", 1), held.life)
    dead = PeerId("d", 2)
    prover.submit(dead, a_dead_life())
    until(lambda: bool(told))
    prover.close()
    held.close()
    assert told == [dead]


def test_a_process_that_cannot_tell_which_it_is_looks_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(death, "HeldLife", Mock(side_effect=OSError("no locks")))
    told: list[PeerId] = []
    prover = ProverThread("p", ControlConfig(), False, told.append)
    assert prover.life is None
    prover.submit(PeerId("d", 1), a_dead_life())
    until(lambda: bool(told))
    prover.close()


def test_switched_off_it_tells_and_looks_at_nothing() -> None:
    off = ProverThread("p", ControlConfig(prove_death=False), False, lambda peer: None)
    off.submit(PeerId("d", 2), a_dead_life())
    assert (off.life, off._thread) == (None, None)
    off.close()


@pytest.mark.parametrize("is_written_to", [True, False])
def test_what_the_dead_may_still_write_is_waited_for_where_they_write(
    monkeypatch: pytest.MonkeyPatch, is_written_to: bool
) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(death, "has_read_the_dead", lambda: looks.append(False) or bool(looks[2:]))
    told: list[PeerId] = []
    prover = ProverThread("p", ControlConfig(), is_written_to, told.append)
    peer, life = PeerId("d", 1), a_dead_life()
    for times in (1, 2):
        prover.submit(peer, life)
        until(lambda: not prover._asked)
        assert (len(looks), len(told)) == ((times, 0) if is_written_to else (0, times))
    prover.submit(peer, life)
    until(lambda: not prover._asked)
    assert told == [peer] * (1 if is_written_to else 3)
    prover.close()
