"""Decode's host memory: first tokens and bytes of agents that come back, and what its copies take.

    python -m benchmarks host --json benchmarks/results/host.json

`turns`: a prefill worker on one core and two decode workers on another, as `prefixkv worker` runs
them; the other decode worker waits meanwhile. Prefill sends at most 1 Gbit/s. Decode's pool holds a
tenth of the pages of all sessions. One of the two has host memory of four times its pool, and
computes what a turn adds (`compute_below`). Two sessions are active at a time. The next one is
mostly one of the last few (`NEAR`), else any: so most turns come soon, and some long after.
A round is a pass with both and two without, which are A against A; the order changes from round to
round. "as pool": prefill's pool holds a third of all pages. "keeps all": it holds them all.

`copies`: see `host_copies.py`. What a tier finds on a trace: `python -m benchmarks replay`. What it
costs an admission: `python -m benchmarks sched --part host_admission`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import host_copies
from benchmarks.own_compute import Served, agents, ratios, served
from benchmarks.report import JsonFile, Row, check_outputs, tell, write
from benchmarks.turns.workload import longest_request
from prefixkv.cli.demo.workers import PREFILL, ChatAnswer, ModelWorkers
from prefixkv.cli.demo.workload import Workload, small_vocabulary

SESSIONS, ACTIVE = 20, 2
NEAR, NEAR_SHARE = 3, 0.6
"""Of the turns so many are of one of the last `NEAR` sessions of their lane."""
LINK_BYTES_PER_S = 125_000_000
PAGE_SIZE = 16
POOL, HOST = 0.1, 4.0  # of all sessions' pages; of the pool
CASES = {"as pool": 1 / 3, "keeps all": 1.5}
ON, OFF, AGAIN = "decode-both", "decode-today", "decode-today again"


def order(seed: int, turns: list[int]) -> Iterator[int]:
    """Yield the sessions in the order of their turns: `turns` says how many each has."""
    draw = np.random.default_rng(seed)
    left = dict(enumerate(turns))
    last: list[int] = []
    while left:
        near = [one for one in last[-NEAR:] if one in left]
        among = near if near and draw.random() < NEAR_SHARE else list(left)
        chosen = among[int(draw.integers(len(among)))]
        last = [*(one for one in last if one != chosen), chosen]
        left[chosen] -= 1
        if not left[chosen]:
            del left[chosen]
        yield chosen


async def _play(
    workers: ModelWorkers, decode: str, workload: Workload, salt: str
) -> list[ChatAnswer]:
    """Play all sessions, `ACTIVE` at a time, each lane its own ones. Returns the answers of later
    turns."""
    speller = small_vocabulary()
    later: list[ChatAnswer] = []

    async def lane(number: int) -> None:
        mine = list(range(number, len(workload.sessions), ACTIVE))
        said: dict[int, list[int]] = {session: [] for session in mine}
        turn_of = dict.fromkeys(mine, 0)
        turns = [len(workload.sessions[session]) for session in mine]
        for at in order(1000 * number + len(mine), turns):
            session = mine[at]
            turn_number = turn_of[session]
            turn = workload.sessions[session][turn_number]
            turn_of[session] += 1
            said[session] += speller(turn, turn_number == 0)
            rid = f"{salt}.{session}.{turn_number}"
            answer = await workers.ask(decode, rid, said[session], turn.output_len, salt, True)
            said[session] += answer.tokens
            if turn_number:
                later.append(answer)

    async with asyncio.TaskGroup() as group:
        for number in range(ACTIVE):
            group.create_task(lane(number))
    return later


async def measured(model: Served, case: str, pairs: int, below: int) -> dict[str, Any]:
    """Measure one case: the ratios of each pair, and their medians."""
    most = longest_request(agents(1, SESSIONS)) + 64
    working_set = SESSIONS * -(-most // PAGE_SIZE)
    pool = int(POOL * working_set)
    prefill = {
        "num_pages": int(CASES[case] * working_set),
        "transport_max_bytes_per_s": LINK_BYTES_PER_S,
    }
    today = {"num_pages": pool}
    both = {**today, "compute_below": below, "host_memory_num_pages": int(HOST * pool)}
    settings: dict[str, dict[str, Any]] = {ON: both, OFF: today}
    passes: dict[str, list[dict[str, float]]] = {ON: [], OFF: [], AGAIN: []}
    async with ModelWorkers(model.folder, prefill, settings, *model.within) as workers:
        for name in settings:  # so that no pass has the nodes' wire-up in it
            await workers.ask(name, "first", [*range(16)], 2, f"first {name}")
        for number in range(pairs):
            for kind in [ON, OFF, AGAIN] if number % 2 == 0 else [OFF, AGAIN, ON]:
                name = ON if kind == ON else OFF
                before = await workers.figures(PREFILL)
                later = await _play(workers, name, agents(2 + number, SESSIONS), f"{kind} {number}")
                await workers.settled(name)
                after = await workers.figures(PREFILL)
                passes[kind].append(_row(later, _sent(after) - _sent(before)))
                print(case, kind, passes[kind][-1], flush=True)

    keys = ("later_ttft_p50_ms", "later_ttft_p99_ms", "itl_p99_ms", "sent_mib")
    found = ratios(passes, ON, OFF, AGAIN, keys)
    return {"pool_pages": pool, "working_set_pages": working_set, **found, "passes": passes}


def _sent(figures: dict[str, float]) -> float:
    return sum(value for name, value in figures.items() if "prefixkv_sent_bytes_total" in name)


def _row(later: list[ChatAnswer], sent_bytes: float) -> dict[str, float]:
    ttft_ms = 1e3 * np.array([answer.ttft_s for answer in later])
    itl_ms = 1e3 * np.array([one for answer in later for one in answer.itl_s])
    usages = [answer.usage for answer in later]
    hits = sum(one.decode_hit_tokens for one in usages) / sum(one.prompt_tokens for one in usages)
    return {
        "later_ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 2),
        "later_ttft_p99_ms": round(float(np.percentile(ttft_ms, 99)), 2),
        "itl_p99_ms": round(float(np.percentile(itl_ms, 99)), 2),
        "hit_ratio": round(hits, 4),
        "sent_mib": round(sent_bytes / (1 << 20), 1),
    }


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
                row = asyncio.run(measured(model, case, 1 if quick else pairs, below))
                rows.append({"part": "turns", "prefill": case, **row})
    if Part.copies in (part or Part):
        size = 32 << 20 if quick else host_copies.POOL_BYTES
        for row in host_copies.measure(2 if quick else rounds, seed, size):
            rows.append(row)
            tell(row)
    write(
        json_file, f"host --pairs {pairs} --rounds {rounds}" + " --quick" * quick, rows,
        sessions=SESSIONS, active=ACTIVE, near=NEAR, near_share=NEAR_SHARE, pool=POOL, host=HOST,
        link_bytes_per_s=LINK_BYTES_PER_S, below=below, piece_bytes=host_copies.PIECE_BYTES,
        copies="GB/s: medians of rounds; by_rows: median and quartiles of the rounds' ratios, "
        "speed by that of the loop over rows in the same round; cpu: by processor time",
    )  # fmt: skip
