"""Claim: what protecting the prefixes of waiting requests seems to cost a median is chance, and no
order of admission makes it so.

    python -m benchmarks waiting_seeds AGENTS --blocks 8000 --json \
        benchmarks/results/waiting_seeds.json

The simulation of `waiting`, with several seeds: sessions begin in another order, and their pauses
differ. Each of the two is switched off by itself: the protection (what waits is evicted like all
else), and the order (first come, first served, so nothing but evictions can differ). With each seed
the case of neither runs a second time with pauses .1 s longer, A against A: what differs there is
chance.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.waiting import ANSWER_S, BLOCK_S, RUNNING, WAITING, Play
from prefixkv.cache.eviction.policy import DEFAULT_POLICY
from prefixkv.cli.replay import Trace, read_trace

SOON_S = 1.0
AGAIN_S = 0.1


class Case(NamedTuple):
    """What one run switches on."""

    admission: str
    protect: bool
    pause_more_s: float = 0.0


CASES = (
    Case("hit_aware", protect=True),
    Case("hit_aware", protect=False),
    Case("hit_aware", protect=False, pause_more_s=AGAIN_S),
    Case("fifo", protect=True),
    Case("fifo", protect=False),
)


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    blocks: int  # of the pool
    waiting: int  # asked for
    seed: int
    admission: str
    protect: bool
    pause_more_s: float
    requests: int  # counted: the second half
    block_hit_ratio: float
    soon: float  # share of the requests with a first token within `SOON_S`
    ttft_s_mean: float
    ttft_s_p40: float
    ttft_s_p50: float
    ttft_s_p60: float
    ttft_s_p90: float


_TRACES: dict[str, Trace] = {}
"""By name; the children of a fork have them."""


def _measure(job: tuple[str, int, int, int, Case]) -> Row:
    name, blocks, waiting, seed, case = job
    run = Play(
        _TRACES[name], blocks, case.admission, waiting, case.protect, DEFAULT_POLICY,
        seed, case.pause_more_s,
    )  # fmt: skip
    run.run()
    half = run.served[len(run.served) // 2 :]
    hit, asked, ttft_s, _ = (np.array(column) for column in zip(*half, strict=True))
    p40, p50, p60, p90 = (round(float(one), 2) for one in np.percentile(ttft_s, [40, 50, 60, 90]))
    return Row(
        trace=name, blocks=blocks, waiting=waiting, seed=seed, admission=case.admission,
        protect=case.protect, pause_more_s=case.pause_more_s, requests=len(half),
        block_hit_ratio=round(float(hit.sum() / asked.sum()), 4),
        soon=round(float((ttft_s <= SOON_S).mean()), 4),
        ttft_s_mean=round(float(ttft_s.mean()), 2),
        ttft_s_p40=p40, ttft_s_p50=p50, ttft_s_p60=p60, ttft_s_p90=p90,
    )  # fmt: skip


def waiting_seeds(
    paths: Annotated[list[Path], typer.Argument(metavar="TRACES", help="As `prefixkv replay`.")],
    blocks: Annotated[str, typer.Option(help="Of the pool, 512 tokens each, by commas.")] = "8000",
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 1 on.")] = 10,
    requests: Annotated[int | None, typer.Option(help="Read so many only.")] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """Protection of what waits, and the order of admission, each switched off, with seeds."""
    _TRACES.update((trace.name, trace) for trace in (read_trace(p, limit=requests) for p in paths))
    todo = [
        (name, size, waiting, seed, case)
        for name, size, waiting, seed, case in product(
            _TRACES, map(int, blocks.split(",")), WAITING, range(1, seeds + 1), CASES
        )
    ]
    rows = []
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for row in pool.imap(_measure, todo):
            rows.append(row)
            print(row, flush=True)
    if json_file is not None:
        recipe = {
            "command": "python -m benchmarks waiting_seeds "
            + " ".join(path.name for path in paths)
            + f" --blocks {blocks} --seeds {seeds} --json {json_file.name}",
            "policy": DEFAULT_POLICY,
            "simulated": f"prefill {BLOCK_S} s a missing block, one request after the other; an "
            f"answer {ANSWER_S} s; at most {RUNNING} at once",
            "seed": "the order in which sessions begin, and for each pause a factor from .9 to 1.1",
            "pause_more_s": "added to each pause: the same case again, to see chance",
            "counted": "the second half of the requests to get their first token",
            "soon": f"share of them with a first token within {SOON_S} s",
            "python": platform.python_version(),
        }
        text = {"recipe": recipe, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
