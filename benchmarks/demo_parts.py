"""Where the first token's time goes with the stand-in engine, cache on, at its load: its own
workers, with a clock at each place where one thread or process hands on to the next.

A part is the median, over the requests of all passes, of the time since the mark before it. Of what
the stand-in does itself (its pipe, the computing that stands for a model's) and of the copy that
NIXL makes the library can make nothing faster.

    python -m benchmarks demo_parts > benchmarks/results/demo_parts.json
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer

from benchmarks.stand_in import workers
from benchmarks.stand_in.options import LOAD_FRACTION, PassPlan, StandInOptions
from prefixkv.cli.figures import machine
from prefixkv.protocol import messages

_FOLDER: Final = "PREFIXKV_BENCHMARKS_MARKS"
_PREFILL, _DECODE = workers._prefill_worker, workers._decode_worker

PARTS: Final = {
    "taken": ("demo", "decode's engine wakes for an arrival"),
    "asked": ("demo", "`Request`, and the pipe to prefill's engine"),
    "added": ("calls", "decode's `add`"),
    "admitted": ("calls", "decode's `pop_preallocated`"),
    "promised": ("hands", "decode's control thread wakes, and handles the command"),
    "heard": ("hands", "zmq, TCP, zmq, prefill's control thread wakes"),
    "begun": ("hands", "it handles the frame, and prefill's engine wakes and pops the request"),
    "computed": ("demo", "the KV is written, for computing it"),
    "given": ("calls", "`send_chunk`"),
    "posting": ("hands", "prefill's control thread, then its transport's, wake and handle it"),
    "written": ("copy", "NIXL writes the pages"),
    "told": ("hands", "prefill's control thread wakes, and handles it"),
    "known": ("hands", "zmq, TCP, zmq, decode's control thread wakes"),
    "committed": ("hands", "it handles the frame; decode's engine wakes; `pop_transferred`"),
}
"""By the mark that ends a part, in the order in which they come."""

Marks = list[tuple[str, Any, float]]
_marks: Marks = []


def _mark(name: str, what: Any) -> None:
    """`what`: a room, or a frame that tells it."""
    _marks.append((name, what, time.perf_counter()))


def _around(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
    """Have a method of a class do this besides; `after` is given what it returns, too."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **more: Any) -> Any:
        if before is not None:
            before(*args)
        result = method(*args, **more)
        if after is not None:
            after(result, *args)
        return result

    setattr(owner, name, call)


def _watch_threads() -> None:
    from prefixkv.control.effects import FrameReceived, SendFrame
    from prefixkv.runtime.control_thread import ControlThread
    from prefixkv.transport.nixl.loop import NixlLoop

    def sends(thread: Any, effect: Any) -> None:
        if isinstance(effect, SendFrame):
            _mark("sends", effect.raw)

    def takes(thread: Any, what: Any, now_s: float) -> None:
        if isinstance(what, FrameReceived):
            _mark("takes", what.raw)

    _around(ControlThread, "_do", sends, None)
    _around(ControlThread, "_take", takes, None)
    _around(NixlLoop, "write", lambda _, job: _mark("posting", job.tag.room), None)
    ended: Callable[..., None] = lambda _, post, *rest: _mark("written", post.job.job.tag.room)  # noqa: E731
    _around(NixlLoop, "_part_ended", ended, None)


def _marked_prefill(*args: Any) -> None:
    """In prefill's process."""
    from prefixkv.runtime.groups import PrefillGroup
    from prefixkv.testing.pair import StandInPrefill

    _watch_threads()
    _around(StandInPrefill, "_begin", lambda _, req: _mark("begun", req.request.room), None)
    _around(
        PrefillGroup, "send_chunk",
        lambda _, req: _mark("computed", req.request.room),
        lambda _, group, req: _mark("given", req.request.room),
    )  # fmt: skip
    _PREFILL(*args)
    _write("prefill")


def _marked_decode(*args: Any) -> None:
    """In decode's."""
    from benchmarks.stand_in.engine import DecodeEngine
    from prefixkv.runtime.groups import DecodeGroup

    def arrives(engine: DecodeEngine, calls: list[Any]) -> None:
        for call in calls:
            _marks.append(("arrived", call.room, engine._start_s + call.arrival_s))
            _mark("taken", call.room)

    def all_of(name: str) -> Callable[..., None]:
        def found(requests: list[Any], group: DecodeGroup) -> None:
            for req in requests:
                _mark(name, req.request.room)

        return found

    _watch_threads()
    _around(DecodeEngine, "_send", arrives, None)
    _around(
        DecodeGroup, "add",
        lambda _, request: _mark("asked", request.room),
        lambda _, group, request: _mark("added", request.room),
    )  # fmt: skip
    _around(DecodeGroup, "pop_preallocated", None, all_of("admitted"))
    _around(DecodeGroup, "pop_transferred", None, all_of("committed"))
    _DECODE(*args)
    _write("decode")


def _write(side: str) -> None:
    names = {
        ("decode", "sends", "Promise"): "promised",
        ("prefill", "takes", "Promise"): "heard",
        ("prefill", "sends", "Outcome"): "told",
        ("decode", "takes", "Outcome"): "known",
    }
    told: Marks = []
    for name, what, at_s in _marks:
        if isinstance(what, bytes):
            body = messages.decode(what).body
            found = names.get((side, name, type(body).__name__))
            if found is not None and isinstance(body, messages.RoomBody):
                told.append((found, body.room, at_s))
        else:
            told.append((name, what, at_s))
    (Path(os.environ[_FOLDER]) / side).write_bytes(pickle.dumps(told))


def _unheard(ended: int) -> None:
    pass


def demo_parts(
    passes: Annotated[int, typer.Option(min=1, help="Timed passes.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the workload and its arrivals.")] = 1,
) -> None:
    """TTFT of the stand-in engine, part by part; JSON on stdout."""
    load_before = os.getloadavg()
    options = StandInOptions(seed=seed)
    workload = options.workload()
    # The processes are told by name what to run, and so import this module.
    vars(workers).update(_prefill_worker=_marked_prefill, _decode_worker=_marked_decode)
    spans: list[tuple[float, float]] = []
    ttft_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        with workers.Workers(options, workload) as both:
            both.wait_ready()
            base = both.run(PassPlan(False, verify=False, rate=None, salt=1), _unheard)
            rate = LOAD_FRACTION * (base.requests - base.failed) / base.duration_s
            for number in range(passes):
                begin_s = time.perf_counter()
                timed = both.run(PassPlan(True, verify=False, rate=rate, salt=2 + number), _unheard)
                spans.append((begin_s, time.perf_counter()))
                ttft_s += timed.ttft_s
        marks: Marks = []
        for side in ("prefill", "decode"):
            marks += pickle.loads((Path(folder) / side).read_bytes())
    requests = [one for span in spans for one in _requests(marks, span)]
    print(json.dumps(_report(requests, ttft_s, rate, seed, load_before[0]), indent=1))


def _requests(marks: Marks, span: tuple[float, float]) -> list[dict[str, float]]:
    """The marks of each request of a pass. Of those that come several times, the first: the last
    chunk's are taken where a request has several."""
    found: dict[int, dict[str, float]] = {}
    for name, room, at_s in sorted(marks, key=lambda mark: mark[2]):
        if span[0] <= at_s <= span[1]:
            times = found.setdefault(room, {})
            if name not in times or name in ("computed", "given", "posting", "written"):
                times[name] = at_s
    return [times for times in found.values() if {"arrived", *PARTS} <= times.keys()]


def _report(
    requests: list[dict[str, float]], ttft_s: list[float], rate: float, seed: int, load: float
) -> dict[str, Any]:
    order = ["arrived", *PARTS]
    parts, shares = {}, dict.fromkeys(("demo", "copy", "calls", "hands"), 0.0)
    for before, after in pairwise(order):
        ms = [1e3 * (times[after] - times[before]) for times in requests]
        whose, what = PARTS[after]
        p50, p90 = np.percentile(ms, (50, 90))
        shares[whose] += float(p50)
        parts[after] = {
            "what": what,
            "whose": whose,
            "ms_p50": round(float(p50), 2),
            "ms_p90": round(float(p90), 2),
        }
    return {
        "recipe": {
            "command": "python -m benchmarks demo_parts",
            "seed": seed,
            "requests_per_s": round(rate, 1),
            "requests": len(requests),
            "load_average": [load, os.getloadavg()[0]],
            **machine(),
        },
        "ttft_p50_ms": round(1e3 * float(np.median(ttft_s)), 2),
        "sum_of_parts_ms": round(sum(shares.values()), 2),
        "whose_ms": {whose: round(ms, 2) for whose, ms in shares.items()},
        "parts": parts,
    }
