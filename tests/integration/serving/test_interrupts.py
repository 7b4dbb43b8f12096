"""Ctrl-C at every line that asyncio runs to make a loop, run a coroutine on it and close it, one
after the other: it arrives, once, and nothing is printed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import warnings
from asyncio import base_events
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from prefixkv.serving import interrupts
from prefixkv.serving.launch import _signal
from tests.support.patience import PATIENCE_S

ASYNCIO = str(Path(base_events.__file__).parent)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    gc.freeze()  # what is there already need not be looked at after each line
    yield
    gc.unfreeze()
    signal.signal(signal.SIGINT, before)


class Pressed:
    """Ctrl-C at the `at`-th line of asyncio or of `interrupts`. As a context."""

    def __init__(self, at: int) -> None:
        self.left, self.pressed = at, False
        self.complaints: list[Any] = []

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not (file.startswith(ASYNCIO) or file == interrupts.__file__):
            return None
        if event == "line" and not self.pressed:
            self.left -= 1
            if self.left < 0:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self) -> Pressed:
        self._hook, sys.unraisablehook = sys.unraisablehook, self.complaints.append
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.collect()  # destructors print what they have to say
        sys.unraisablehook = self._hook


@pytest.mark.parametrize("handled", [False, True], ids=["by asyncio", "by the coroutine"])
def test_ctrl_c_arrives_once_wherever_it_comes(handled: bool) -> None:
    ended: list[str] = []

    async def main() -> str:
        stop = asyncio.Event()
        if handled:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            return "stopped" if stop.is_set() else "done"
        finally:
            ended.append("cleaned up")

    at = 0
    seen = {"interrupted early": 0, "interrupted late": 0, "stopped": 0}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        while True:
            ended.clear()
            with Pressed(at) as key:
                try:
                    found = interrupts.run(main)
                except KeyboardInterrupt:
                    found = "interrupted late" if ended else "interrupted early"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert key.complaints == []
            if not key.pressed:
                break
            # 1. It is raised, or the coroutine that handles it has heard it.
            # 2. A coroutine that has ended before its handler was called has done its work.
            if found in seen:
                seen[found] += 1
            else:
                assert handled
                assert found == "done"
                assert ended
            at += 1
    assert found == "done"
    assert [str(one.message) for one in warned] == []
    assert seen["interrupted early"] > 100
    assert seen["interrupted late"] > 20
    assert (seen["stopped"] > 0) == handled


def test_a_second_ctrl_c_does_not_wait_for_the_coroutine() -> None:
    went_on: list[str] = []

    async def stubborn() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
            went_on.append("after the first")
            await asyncio.sleep(PATIENCE_S)
        finally:
            signal.raise_signal(signal.SIGINT)
            went_on.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        interrupts.run(stubborn)
    assert went_on == ["after the first"]


def test_a_signal_to_a_child_that_has_ended_leaves_its_status_to_who_waits() -> None:
    """asyncio waits for it in a thread, and logs a child that another call has taken."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type]
        assert child.returncode is None
        assert os.waitpid(child.pid, 0) == (child.pid, 7 << 8)
        _signal(child, signal.SIGKILL)  # type: ignore[arg-type] # nothing has its number any more
        child.returncode = 7
