"""Wakeups from a worker to an engine that rests, over real sockets and threads."""

from __future__ import annotations

import os
import threading
from queue import Queue
from typing import Any

import pytest

from prefixkv.engines.vllm.wakeup import EngineWait, WakeupListener, WakeupSender

LONG_S = 60.0


def test_a_sender_rings_once_each_time_it_is_armed() -> None:
    rung = threading.Semaphore(0)
    event = os.eventfd(0)
    with (
        WakeupListener(rung.release) as listener,
        WakeupSender(listener.address, [event]) as sender,
    ):
        os.eventfd_write(event, 1)
        assert not rung.acquire(timeout=0.05)
        sender.arm()
        assert rung.acquire(timeout=LONG_S)
        assert not rung.acquire(timeout=0.05)
        sender.arm()  # what it rang for was not taken
        assert rung.acquire(timeout=LONG_S)
        listener.close()
        sender.arm()  # nobody hears it
        sender.close()
    os.close(event)
    with pytest.raises(OSError, match="refused"):
        WakeupSender(listener.address, [])


def test_a_ring_or_an_input_ends_the_wait_and_no_ring_is_lost() -> None:
    wait = EngineWait()
    inputs: Queue[Any] = Queue()
    wait.ring()
    wait.wait(inputs, LONG_S)
    for wake in (wait.ring, lambda: inputs.put(1)):
        later = threading.Timer(0.02, wake)
        later.start()
        wait.wait(inputs, LONG_S)
        later.join()
    assert inputs.get() == 1
    wait.wait(inputs, 0.01)


def test_where_no_thread_starts_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with WakeupListener(lambda: None) as listener:
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(threading.Thread, "start", fail)
        for make in (
            lambda: WakeupListener(lambda: None),
            lambda: WakeupSender(listener.address, []),
        ):
            with pytest.raises(RuntimeError, match="new thread"):
                make()
        assert os.listdir("/proc/self/fd") == before
