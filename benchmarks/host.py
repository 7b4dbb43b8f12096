"""Decode's host memory: first tokens and bytes of agents that come back, and what its copies take.

    python -m benchmarks host --json benchmarks/results/host.json

`turns`: `agents.py` has workers and rounds. Prefill sends at most 1 Gbit/s. Decode's pool holds a
tenth of the pages of all sessions. One of the two has host memory of four times its pool, and
computes what a turn adds (`compute_below`). Two sessions are active at a time. The next one is
mostly one of the last few (`NEAR`), else any: so most turns come soon, and some long after.
"as pool": prefill's pool holds a third of all pages. "keeps all": it holds them all.

`copies`: see `host_copies.py`. What a tier finds on a trace: `python -m benchmarks replay`. What it
costs an admission: `python -m benchmarks sched --part host_admission`.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks import host_copies
from benchmarks.agents import (
    NEAR,
    NEAR_SHARE,
    Served,
    Sides,
    agents,
    compared,
    pages_of_longest,
    served,
)
from benchmarks.report import JsonFile, Row, check_outputs, told, write

SESSIONS, ACTIVE = 20, 2
LINK_BYTES_PER_S = 125_000_000
POOL, HOST = 0.1, 4.0  # of all sessions' pages; of the pool
CASES = {"as pool": 1 / 3, "keeps all": 1.5}
SIDES = Sides("decode-both", "decode-today", "decode-today again")


def measured(model: Served, case: str, pairs: int, below: int) -> dict[str, Any]:
    """Measure one case: the ratios of each pair, and their medians."""
    sessions = partial(agents, num_chats=SESSIONS)
    working_set = SESSIONS * pages_of_longest(sessions(1))
    pool = int(POOL * working_set)
    both = {"compute_below": below, "host_memory_num_pages": int(HOST * pool)}
    settings: dict[str, dict[str, Any]] = {
        "prefill": {
            "num_pages": int(CASES[case] * working_set),
            "transport_max_bytes_per_s": LINK_BYTES_PER_S,
        },
        SIDES.on: {"num_pages": pool, **both}, SIDES.off: {"num_pages": pool},
    }  # fmt: skip
    found = asyncio.run(compared(model, SIDES, settings, pairs, sessions, ACTIVE))
    return {"pool_pages": pool, "working_set_pages": working_set, **found}


class Part(StrEnum):
    turns = "turns"
    copies = "copies"


def host(
    pairs: Annotated[int, typer.Option(min=1, help="Of turns: rounds of three passes.")] = 2,
    below: Annotated[int, typer.Option(help="Most tokens that decode computes of one.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Of copies; the median counts.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the pages that are copied.")] = 1,
    quick: Annotated[bool, typer.Option(help="Small pools: whether it works.")] = False,
    part: Annotated[list[Part] | None, typer.Option(help="Only this; may be given again.")] = None,
    json_file: JsonFile = None,
) -> None:
    """First tokens and bytes sent of agents that come back, with host memory, and its copies."""
    check_outputs(json_file)
    rows: list[Row] = []
    if Part.turns in (part or Part):
        with served() as model:
            for case in [*CASES][: 1 if quick else None]:
                row = measured(model, case, 1 if quick else pairs, below)
                rows.append({"part": "turns", "prefill": case, **row})
    if Part.copies in (part or Part):
        size = 32 << 20 if quick else host_copies.POOL_BYTES
        rows += told(host_copies.measure(2 if quick else rounds, seed, size))
    write(
        json_file, f"host --pairs {pairs} --rounds {rounds}" + " --quick" * quick, rows,
        sessions=SESSIONS, active=ACTIVE, near=NEAR, near_share=NEAR_SHARE, pool=POOL, host=HOST,
        link_bytes_per_s=LINK_BYTES_PER_S, below=below, piece_bytes=host_copies.PIECE_BYTES,
        copies="GB/s: medians of rounds; by_rows: median and quartiles of the rounds' ratios, "
        "speed by that of the loop over rows in the same round; cpu: by processor time",
    )  # fmt: skip
