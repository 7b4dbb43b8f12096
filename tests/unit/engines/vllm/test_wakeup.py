"""Wakeups from a worker to an engine that rests, over real sockets and threads."""

import os
import threading
from queue import Queue
from typing import Any

import pytest

from prefixkv.engines.vllm.wakeup import WakeupListener, wake_by

LONG_S = 60.0


def test_a_rest_ends_once_by_a_workers_events_and_by_any_input() -> None:
    events, inputs = [os.eventfd(0) for _ in range(2)], Queue[Any]()
    before = os.listdir("/proc/self/fd")
    with WakeupListener("wake up") as listener:
        listener.rest(inputs, 0.0)
        wake_by(listener.address + "other", events)  # of a stranger
        wake_by(listener.address, events[:1])
        wake_by(listener.address, events[1:])
        for event in events:
            os.eventfd_write(event, 1)
            for _ in range(2):  # it was not taken
                listener.rest(inputs, LONG_S)
                assert inputs.get_nowait() == "wake up"
            os.eventfd_read(event)
        assert listener.num_senders == 2
        assert not any(map(os.get_inheritable, listener._fds)), "a child process keeps it"
        for _ in range(9):
            listener.rest(inputs, 0.05)
            if inputs.empty():
                break
            inputs.get_nowait()  # rung before it was taken
        else:
            raise AssertionError("it rings without an event")
        inputs.put(1)
        listener.rest(inputs, LONG_S)
        assert inputs.get_nowait() == 1
        listener.close()
    assert os.listdir("/proc/self/fd") == before, "its own, and those that it was sent"
    for event in events:
        os.close(event)
    with pytest.raises(OSError, match="refused"):
        wake_by(listener.address, [])


def test_where_no_thread_starts_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        WakeupListener(None)
    assert os.listdir("/proc/self/fd") == before
