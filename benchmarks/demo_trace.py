"""Whether the cache costs anything where it has nothing to give: the stand-in engine on a
trace that hardly repeats, decode's cache on and off.

At .7 of what is sustained a first token mostly waits for those before it, so passes of one kind
differ by much. Here passes with the cache on and off take turns, on the same workers, pair by pair,
the order changed each time; each pass has a salt of its own, so none finds another's KV.

    python -m benchmarks demo_trace TRACE > benchmarks/results/demo_trace_turns.json
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.stand_in.options import LOAD_FRACTION, PassPlan, StandInOptions
from benchmarks.stand_in.report import Measured
from benchmarks.stand_in.workers import Workers
from prefixkv.cli.figures import machine
from prefixkv.errors import ConfigError

NAMES: Final = {True: "on", False: "off"}


def demo_trace(
    trace: Annotated[Path, typer.Argument(help="Mooncake's conversation trace, or one like it.")],
    requests: Annotated[int, typer.Option(help="The first of the trace.")] = 500,
    pairs: Annotated[int, typer.Option(help="Of passes, cache on and off.")] = 16,
) -> None:
    """Median TTFT of each pass, turn about; JSON on stdout."""
    if pairs < 1:
        raise ConfigError("--pairs must be at least 1")
    load_before = os.getloadavg()
    options = StandInOptions(trace=trace, requests=requests)
    workload = options.workload()
    salts = count(1)
    sustained: dict[str, list[float]] = {name: [] for name in NAMES.values()}
    found: list[dict[str, float]] = []
    with Workers(options, workload) as workers:
        workers.wait_ready()

        def one(on: bool, rate: float | None) -> Measured:
            measured = workers.run(PassPlan(on, False, rate, next(salts)), lambda _ended: None)
            if measured.complaints():
                raise RuntimeError("; ".join(measured.complaints()))
            return measured

        one(False, None)  # the wire-up, and the first touch of the pools
        for order in pairs_of(3):
            for on in order:
                measured = one(on, None)
                sustained[NAMES[on]].append(measured.requests / measured.duration_s)
        rate = LOAD_FRACTION * statistics.median(sustained["off"])
        hits = 0.0
        for order in pairs_of(pairs):
            pair: dict[str, float] = {}
            for on in order:
                measured = one(on, rate)
                pair[NAMES[on]] = 1e3 * statistics.median(measured.ttft_s)
                if on:
                    hits = measured.hit_tokens / measured.prompt_tokens
            found.append(pair)
    recipe = {
        "command": "python -m benchmarks demo_trace TRACE",
        "what": "ttft_p50_ms: the median of all requests of a pass, pair by pair",
        "trace": trace.name,
        "requests": requests,
        "pairs": pairs,
        "offered_per_s": round(rate, 1),
        "load_average": [load_before[0], os.getloadavg()[0]],
        **machine(),
    }
    per_s = {name: [round(one, 1) for one in each] for name, each in sustained.items()}
    told = {"token_hit_rate": round(hits, 4), "sustained_per_s": per_s}
    print(json.dumps({"recipe": recipe, **told, **beside(found)}, indent=1))


def pairs_of(pairs: int, *, begins: bool = True) -> Iterator[tuple[bool, bool]]:
    """In which order the passes of each pair go. `begins`: whether the cache is on in the first of
    all."""
    for number in range(pairs):
        first = begins if number % 2 == 0 else not begins
        yield first, not first


def beside(found: list[dict[str, float]]) -> dict[str, object]:
    """What pairs of passes say, cache on beside off, from their median TTFT in ms."""
    passes = {name: [pair[name] for pair in found] for name in NAMES.values()}
    return {
        "ttft_p50_ms": {name: [round(one, 1) for one in ms] for name, ms in passes.items()},
        "median_ms": {name: round(statistics.median(ms), 1) for name, ms in passes.items()},
        "on_of_off": round(statistics.median(pair["on"] / pair["off"] for pair in found), 3),
        "pairs_in_which_on_was_lower": sum(pair["on"] < pair["off"] for pair in found),
    }
