"""Wakeups from a worker to an engine that rests, over real sockets and threads."""

from __future__ import annotations

import os
import threading
from queue import Queue
from typing import Any

import pytest

from prefixkv.engines.vllm.wakeup import WakeupListener, WakeupSender, rest

LONG_S = 60.0


def test_a_sender_rings_once_each_time_it_is_armed_and_ends_the_rest() -> None:
    event, inputs = os.eventfd(0), Queue[Any]()
    with WakeupListener("wake up") as listener, WakeupSender(listener.address, [event]) as sender:
        listener.inputs = inputs
        os.eventfd_write(event, 1)
        rest(inputs, 0.05)
        assert inputs.empty()
        for _ in range(2):  # what it rang for first was not taken
            sender.arm()
            rest(inputs, LONG_S)
            assert inputs.get_nowait() == "wake up"
            rest(inputs, 0.05)
            assert inputs.empty()
        inputs.put(1)
        rest(inputs, LONG_S)
        assert inputs.get_nowait() == 1
        listener.close()
        sender.arm()  # nobody hears it
        sender.close()
    os.close(event)
    with pytest.raises(OSError, match="refused"):
        WakeupSender(listener.address, [])


def test_where_no_thread_starts_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with WakeupListener(None) as listener:
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(threading.Thread, "start", fail)
        for make in (
            lambda: WakeupListener(None),
            lambda: WakeupSender(listener.address, []),
        ):
            with pytest.raises(RuntimeError, match="new thread"):
                make()
        assert os.listdir("/proc/self/fd") == before
