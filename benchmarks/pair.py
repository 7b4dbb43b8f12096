"""What the transport's benchmarks share: processes pinned apart, raw NIXL to compare with, and what
else was at work.

A scenario runs in two spawned processes, each pinned to a core of its own where there are two, with
a pipe between them; the one that measures returns the figures.
The machine may have other work: a scenario repeats until enough repetitions were left alone, and
its figures come from those disturbed least. What decides is what others used meanwhile, never what
was measured.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.report import Row
from prefixkv.errors import InternalError, PrefixKVError

PATIENCE_S: Final = 900.0  # of one scenario
_PR_SET_PDEATHSIG: Final = 1
_JOIN_S: Final = 20.0

QUIET_CORES: Final = 0.1  # that others may keep busy during a repetition that counts as left alone

Side = Callable[
    ..., Any
]  # (pipe to the other side, Watch, *arguments); what the first returns are the figures


class WorkerError(PrefixKVError):
    """A process failed; the message is its traceback, or says how it ended."""


# --- processes ------------------------------------------------------------------------------------


def run_pair(
    measuring: Side, serving: Side, *args: Any, cores: int = 1, patience_s: float = PATIENCE_S
) -> Any:
    """Run both sides, each in a process of its own, and return what `measuring` returns.

    Each is pinned to `cores` of its own, where there are so many; 0: to none. Raises WorkerError
    when a side fails.
    """
    context = get_context("spawn")
    ends = dict(zip((measuring, serving), context.Pipe(), strict=True))
    processes, results = [], {}
    for number, (side, end) in enumerate(ends.items()):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_child,
            args=(os.getpid(), number, cores, theirs, side, end, args),
            daemon=True,
        )
        process.start()
        theirs.close()
        end.close()
        processes.append(process)
        results[ours] = side
    try:
        return _result(results, measuring, patience_s)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()


def _result(results: dict[Connection, Side], measuring: Side, patience_s: float) -> Any:
    """What the measuring side returned, once both have ended well. Raises WorkerError."""
    end_s = time.monotonic() + patience_s
    figures: Any = None
    while results:
        ready = wait(list(results), end_s - time.monotonic())
        if not ready:
            raise WorkerError(f"the benchmark did not end within {patience_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            side = results.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise WorkerError(f"the process of {side.__name__} died") from None
            if kind == "error":
                raise WorkerError(f"{side.__name__} failed\n{value}")
            if side is measuring:
                figures = value
    return figures


def _child(
    parent: int,
    number: int,
    num_cores: int,
    results: Connection,
    side: Side,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    die_with(parent)
    cores = sorted(os.sched_getaffinity(0))
    first = number * num_cores
    if num_cores:
        os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(num_cores)})
    try:
        import torch

        torch.set_num_threads(1)
        pipe.send(os.getpid())
        watch = Watch(os.getpid(), pipe.recv())
        results.send(("result", side(pipe, watch, *args)))
    except BaseException:
        results.send(("error", traceback.format_exc()))
        sys.exit(1)


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent is gone, however that came about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


# --- what else was at work ------------------------------------------------------------------------


class Watch:
    """What others did during each of a scenario's repetitions. Counts of the kernel, in steps of 10
    ms."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]

    def _now(self) -> tuple[float, float]:
        cpu = psutil.cpu_times()
        busy = sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0) - getattr(cpu, "guest", 0.0)
        ours = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        return time.monotonic(), busy - ours

    def least_disturbed(
        self, take: Callable[[int], Row], repeats: int, patience_s: float
    ) -> list[Row]:
        """Rows of `take(0)`, `take(1)`, ... until `repeats` were left alone, or `patience_s` have
        passed; of all of them those `repeats` that were disturbed least, each with its
        "foreign_cores" and how many were taken.
        """
        rows: list[Row] = []
        end_s = time.monotonic() + patience_s
        while len(rows) < repeats or (
            sum(row["foreign_cores"] <= QUIET_CORES for row in rows) < repeats
            and time.monotonic() < end_s
        ):
            before_s, before = self._now()
            row = take(len(rows))
            after_s, after = self._now()
            rows.append(
                row | {"foreign_cores": round(max(0.0, after - before) / (after_s - before_s), 3)}
            )
        rows = [row | {"taken": len(rows)} for row in rows]
        return sorted(rows, key=lambda row: float(row["foreign_cores"]))[:repeats]


def load_of(rows: Sequence[Row]) -> Row:
    """What is to be said of the rows that figures come from."""
    foreign = [float(row["foreign_cores"]) for row in rows]
    return {
        "repetitions": len(rows),
        "of_so_many_taken": rows[0]["taken"],
        "foreign_cores_median": round(statistics.median(foreign), 3),
        "foreign_cores_most": max(foreign),
    }


# --- nodes ----------------------------------------------------------------------------------------


class Stuck:
    """A node's loop without progress ends in an error that says how the node stands."""

    def __init__(self, node: Any, patience_s: float = 60.0) -> None:
        self._node, self._patience_s = node, patience_s
        self.moved()

    def moved(self) -> None:
        self._end_s = time.monotonic() + self._patience_s

    def wait(self) -> None:
        """Wait for news. Raises InternalError when a request failed, or nothing has `moved` for too
        long."""
        errors = [req.error for req in self._node.pop_failed()]
        if errors or time.monotonic() > self._end_s:
            raise InternalError(
                f"a request failed ({errors}), or nothing arrives: {self._node.stats()}"
            )
        self._node.wait(self._patience_s)
        if hasattr(self._node, "pop_preallocated"):  # its prefill worker may have answered just now
            self._node.pop_preallocated()

    def until(self, pop: Callable[[], list[Any]]) -> list[Any]:
        """What `pop` returns once it returns something."""
        self.moved()
        while not (found := pop()):
            self.wait()
        return found


# --- statistics -----------------------------------------------------------------------------------


def turn_about(sides: Sequence[str], number: int) -> list[str]:
    """The order of the sides in repetition `number`: each begins in its turn.

    >>> turn_about(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    first = number % len(sides)
    return [*sides[first:], *sides[:first]]


def paired_ratio(rows: Sequence[Mapping[str, float]], a: str, b: str) -> float:
    """The median over repetitions of a / b."""
    return round(statistics.median(row[a] / row[b] for row in rows), 3)


def spread(rows: Sequence[Mapping[str, float]], a: str, b: str) -> list[float]:
    """The least and the greatest of what `paired_ratio` is the median of."""
    ratios = [row[a] / row[b] for row in rows]
    return [round(min(ratios), 3), round(max(ratios), 3)]


def quantiles(values: Sequence[float], unit: float = 1.0, digits: int = 3) -> dict[str, float]:
    """Mean, P50, P90, P99 and the greatest, in units of `unit`."""
    array = np.asarray(values) / unit
    percentiles = {f"p{q}": np.percentile(array, q) for q in (50, 90, 99)}
    found = {"mean": array.mean(), **percentiles, "max": array.max()}
    return {name: round(float(value), digits) for name, value in found.items()}
