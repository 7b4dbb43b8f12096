"""The prover's thread: what it says of processes is tested in test_proved_death.py."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec
import pytest

from prefixkv.config import ControlConfig
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import ProcessLife
from prefixkv.runtime.death import HeldLife, ProverThread
from tests.support.patience import until


def a_dead_life() -> ProcessLife:
    """Of a process that has ended and was waited for."""
    code = (
        "import msgspec, sys; from prefixkv.runtime.death import HeldLife; "
        "sys.stdout.buffer.write(msgspec.msgpack.encode(HeldLife().life))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return msgspec.msgpack.decode(done.stdout, type=ProcessLife)


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PeerId] = []
    prover = ProverThread("p", ControlConfig(), False, told.append)
    peer, life = PeerId("d", 1), a_dead_life()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        prover.submit(peer, life)
        other = ProverThread("q", ControlConfig(), False, told.append)
        other.submit(peer, life)
        other.close()
    assert told == []
    prover.submit(peer, life)
    until(lambda: told == [peer])
    prover.close()


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
