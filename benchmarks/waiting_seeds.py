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

from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.trace_rows import (
    TRACES,
    Jobs,
    JsonFile,
    Paths,
    Requests,
    measured,
    read_traces,
    write_rows,
)
from benchmarks.waiting import ANSWER_S, BLOCK_S, RUNNING, WAITING, Play
from prefixkv.cache.eviction.policy import DEFAULT_POLICY

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


def _measure(job: tuple[str, int, int, int, Case]) -> Row:
    name, blocks, waiting, seed, case = job
    run = Play(
        TRACES[name], blocks, case.admission, waiting, case.protect, DEFAULT_POLICY,
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
    paths: Paths,
    blocks: Annotated[str, typer.Option(help="Of the pool, 512 tokens each, by commas.")] = "8000",
    seeds: Annotated[int, typer.Option(help="Number of seeds, from 1 on.")] = 10,
    requests: Requests = None,
    jobs: Jobs = 2,
    json_file: JsonFile = None,
) -> None:
    """Protection of what waits, and the order of admission, each switched off, with seeds."""
    read_traces(paths, requests)
    todo = [
        (name, size, waiting, seed, case)
        for name, size, waiting, seed, case in product(
            TRACES, map(int, blocks.split(",")), WAITING, range(1, seeds + 1), CASES
        )
    ]
    rows = measured(_measure, todo, jobs)
    recipe = {
        "policy": DEFAULT_POLICY,
        "simulated": f"prefill {BLOCK_S} s a missing block, one request after the other; an "
        f"answer {ANSWER_S} s; at most {RUNNING} at once",
        "seed": "the order in which sessions begin, and for each pause a factor from .9 to 1.1",
        "pause_more_s": "added to each pause: the same case again, to see chance",
        "counted": "the second half of the requests to get their first token",
        "soon": f"share of them with a first token within {SOON_S} s",
    }
    write_rows(
        json_file,
        f"waiting_seeds --blocks {blocks} --seeds {seeds}",
        paths,
        requests,
        recipe,
        [asdict(row) for row in rows],
    )
