"""Times of single calls, warm or cold: a cold one comes after a copy on the same core that leaves
nothing of it in the caches, as a post or a step of the model does."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

COLD_BYTES = 8 << 20  # copied before each cold call

P = ParamSpec("P")
T = TypeVar("T")

Row = dict[str, Any]


@contextmanager
def no_collector() -> Iterator[None]:
    """Collect garbage now, and none in what follows."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Samples:
    """Times of one kind of call."""

    cold = False
    """Whether each call comes after a copy of `COLD_BYTES`; of all samples at once, since the calls
    between those that are measured belong to it."""

    _copied = np.ones(COLD_BYTES, np.uint8), np.zeros(COLD_BYTES, np.uint8)

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._thread: list[float] = []

    def take(self, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Make the call and note its times; returns what it returns."""
        if Samples.cold:
            np.copyto(self._copied[1], self._copied[0])
        thread, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*args, **more)
        self._wall.append(time.perf_counter_ns() - wall)
        self._thread.append(time.thread_time_ns() - thread)
        return result

    def seconds(self, is_cpu: bool = False) -> list[float]:
        """Each call's time: on the wall, or of the thread."""
        return [ns * 1e-9 for ns in (self._thread if is_cpu else self._wall)]

    def shared_by(self, count: int) -> Samples:
        """Each of `count` things' share of the times."""
        found = Samples()
        found._wall = [ns / count for ns in self._wall]
        found._thread = [ns / count for ns in self._thread]
        return found

    def clear(self) -> None:
        self._wall.clear()
        self._thread.clear()

    def figures(self) -> Row:
        """P50 and P99 in microseconds, the two clock readings of the thread's time not taken
        off."""
        return {
            f"{clock}us_p{percent}": round(float(np.percentile(took_ns, percent)) / 1e3, 1)
            for clock, took_ns in (("", self._wall), ("cpu_", self._thread))
            for percent in (50, 99)
        } | {"samples": len(self._wall)}

    @classmethod
    @contextmanager
    def all_cold(cls) -> Iterator[None]:
        """Calls are cold within."""
        cls.cold = True
        try:
            yield
        finally:
            cls.cold = False
