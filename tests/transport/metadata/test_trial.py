"""The child process that peers' metadata is tried in, with real NIXL."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from prefixkv.errors import MetadataError
from prefixkv.protocol.ids import PeerId
from prefixkv.transport.metadata import trial as trial_module
from prefixkv.transport.metadata.nixl_form import nixl_name
from prefixkv.transport.metadata.trial import Trial
from prefixkv.transport.nixl.agent import NixlAgent
from tests.models.node_pair import make_pool
from tests.models.patience import PATIENCE_S, until

PEER = PeerId("decode", 7)


class Tried:
    """A Trial, and a real agent whose metadata is tried in it."""

    def __init__(self, in_child: bool = True) -> None:
        self.told: queue.SimpleQueue[tuple[PeerId, MetadataError | None]] = queue.SimpleQueue()
        self.trial = Trial("test", lambda *what: self.told.put(what), "", in_child)
        self.pool = make_pool()
        self.agent = NixlAgent(nixl_name(PEER), self.pool.layout)

    @property
    def pid(self) -> int:
        until(lambda: self.trial.child_pid is not None)
        assert self.trial.child_pid is not None
        return self.trial.child_pid

    def submit(self, raw: bytes | None = None) -> None:
        self.trial.submit(PEER, raw or self.agent.metadata, self.pool.layout.regions)

    def verdict(self, raw: bytes | None = None) -> MetadataError | None:
        self.submit(raw)
        peer, error = self.told.get(timeout=PATIENCE_S)
        assert peer == PEER
        return error

    @property
    def attack(self) -> bytes:
        """What ends a process that loads it: the first byte of the UCX address changed."""
        raw = bytearray(self.agent.metadata)
        raw[raw.index(b"|c") + 10] = 0xFF
        return bytes(raw)


@pytest.fixture
def tried() -> Iterator[Tried]:
    made = Tried()
    yield made
    made.trial.close()
    assert made.agent.destroy()


@pytest.fixture
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the checks would stop goes through to the child."""
    monkeypatch.setattr(trial_module, "check_metadata", lambda *_: None)


def is_gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_an_honest_peer_passes_and_the_child_stays(tried: Tried) -> None:
    pid = tried.pid
    for _ in range(5):
        assert tried.verdict() is None
    assert tried.pid == pid


def test_metadata_that_is_not_as_known_never_reaches_the_child(tried: Tried) -> None:
    pid = tried.pid
    assert "begins with ff" in str(tried.verdict(tried.attack))
    assert tried.verdict() is None
    assert tried.pid == pid


@pytest.mark.slow
@pytest.mark.usefixtures("_unchecked")
def test_what_ends_a_process_ends_the_child_and_the_next_peer_is_tried_in_another(
    tried: Tried,
) -> None:
    pid = tried.pid
    for _ in range(2):
        assert "SIGABRT" in str(tried.verdict(tried.attack))
        assert tried.verdict() is None
    assert is_gone(pid)


@pytest.mark.usefixtures("_unchecked")
def test_what_nixl_refuses_is_refused_with_its_words(tried: Tried) -> None:
    assert "NIXL_ERR" in str(tried.verdict(tried.agent.metadata[:40]))
    assert tried.verdict() is None


@pytest.mark.slow
def test_a_child_that_is_killed_in_the_middle_refuses_that_peer_alone(tried: Tried) -> None:
    assert tried.verdict() is None  # it is ready for the next one soon
    until(lambda: len(os.listdir(f"/proc/{tried.pid}/task")) >= 1)
    os.kill(tried.pid, signal.SIGSTOP)
    pid = tried.pid
    tried.submit()
    os.kill(pid, signal.SIGKILL)
    _, error = tried.told.get(timeout=PATIENCE_S)
    assert error is None or "SIGKILL" in str(error), "killed before its trial began: another does"
    assert tried.verdict() is None
    assert tried.pid != pid


def test_a_child_that_was_killed_between_two_trials_harms_no_peer(tried: Tried) -> None:
    assert tried.verdict() is None
    pid = tried.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None)
    assert tried.verdict() is None


@pytest.mark.slow
def test_a_trial_that_takes_too_long_is_a_refusal(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried.verdict() is None
    child = tried.trial._ready_child()  # nothing is submitted meanwhile: the thread is idle
    assert child.is_ready()
    os.kill(tried.pid, signal.SIGSTOP)
    monkeypatch.setattr(trial_module, "_TRIAL_LIMIT_S", 0.05)
    assert "more than 0.05 s" in str(tried.verdict())
    monkeypatch.undo()
    # The next child may have been started with the short limit, which a loaded machine exceeds.
    error = tried.verdict()
    assert error is None or "SIGALRM" in str(error)
    assert tried.verdict() is None


def test_close_ends_the_child_also_amid_a_trial(tried: Tried) -> None:
    assert tried.verdict() is None
    pid = tried.pid
    os.kill(pid, signal.SIGSTOP)
    tried.submit()
    tried.trial.close()
    assert is_gone(pid)
    tried.trial.close()
    tried.submit()  # no-op


@pytest.mark.slow
def test_the_child_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import os, signal; from tests.transport.metadata.test_trial import Tried\n"
        "tried = Tried(); assert tried.verdict() is None\n"
        "print(tried.pid, flush=True); os.kill(tried.pid, signal.SIGSTOP)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    until(lambda: is_gone(int(ended.stdout)))


def test_the_child_inherits_no_descriptor_and_imports_neither_torch_nor_prefixkv(
    tried: Tried,
) -> None:
    assert tried.verdict() is None
    links = {fd: os.readlink(f"/proc/{tried.pid}/fd/{fd}") for fd in range(3)}
    assert links[0].startswith("socket:")
    assert links[1] == links[2] == os.devnull
    ours = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if is_link(entry)}
    theirs = {
        os.readlink(entry.path)
        for entry in os.scandir(f"/proc/{tried.pid}/fd")
        if int(entry.name) > 2 and is_link(entry)
    }
    own_kind = ("socket:", "pipe:")
    assert not {link for link in ours & theirs if link.startswith(own_kind)}
    with open(f"/proc/{tried.pid}/maps") as maps:
        assert "torch" not in maps.read()


def is_link(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return bool(os.readlink(entry.path))
    return False


def test_without_a_child_the_checks_are_made_all_the_same() -> None:
    tried = Tried(in_child=False)
    try:
        assert tried.verdict() is None
        assert "begins with ff" in str(tried.verdict(tried.attack))
        assert tried.trial.child_pid is None
    finally:
        tried.trial.close()
        assert tried.agent.destroy()


def test_a_child_that_cannot_be_started_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    made: list[socket.socket] = []
    socketpair = socket.socketpair
    monkeypatch.setattr(trial_module.subprocess, "Popen", refused)
    monkeypatch.setattr(
        trial_module.socket, "socketpair", lambda: (pair := socketpair(), made.extend(pair))[0]
    )
    with pytest.raises(OSError, match="no more processes"):
        trial_module._Child("")
    assert [one.fileno() for one in made] == [-1, -1]
