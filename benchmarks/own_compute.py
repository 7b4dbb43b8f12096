"""Claim: where prefill has to compute most prefixes again, decode that computes what a turn adds
answers it sooner; where prefill has them all and nothing else to do, it does not.

    python -m benchmarks own_compute --pairs 4 --json benchmarks/results/own_compute.json

A prefill worker on one core and two decode workers on another, as `prefixkv worker` runs them, one
of which has `compute`; the other one waits meanwhile. Chats as coding agents have them: a long
first prompt, then turns of 64 to 512 tokens, each as soon as the one before is answered. A round is
a pass with own compute and two without, which are A against A; the order changes from round to
round.

"as pool": prefill's pool holds a third of the pages of all chats, as that of a worker does which
many decode workers share.
"keeps all": it holds them all three times.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from prefixkv.cli.chats.command import SIZES, small_vocabulary
from prefixkv.cli.chats.play import Played, play
from prefixkv.cli.chats.workers import ModelWorkers
from prefixkv.cli.chats.workload import Run, Turn, Workload
from prefixkv.cli.figures import machine
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.errors import ConfigError

CHATS = {
    "conversations": 4, "turns": 5, "first_tokens": 600, "least_tokens": 64, "most_tokens": 512,
    "output_tokens": 24,
}  # fmt: skip
ON, OFF, AGAIN = "decode-computes", "decode-asks", "decode-asks again"
PAGE_SIZE = 16
CASES = {"as pool": 1 / 3, "keeps all": 3.0}


def agents(seed: int, num_chats: int = CHATS["conversations"]) -> Workload:
    """Return chats whose first prompts are long and have nothing in common, and whose later turns
    add 64 to 512 tokens, equally many of each power of two."""
    draw = np.random.default_rng(seed)
    low, high = np.log(CHATS["least_tokens"]), np.log(CHATS["most_tokens"])
    sessions = []
    for chat in range(num_chats):
        lengths = [CHATS["first_tokens"]]
        lengths += np.exp(draw.uniform(low, high, CHATS["turns"] - 1)).astype(int).tolist()
        marks = 8  # the marks of a chat
        texts = [Run(1_000 * seed + 100 * chat + at, num - marks) for at, num in enumerate(lengths)]
        first = (Run(7, 4), texts[0])  # a system prompt of a few words
        turns = [first, *((text,) for text in texts[1:])]
        sessions.append(tuple(Turn(text, CHATS["output_tokens"]) for text in turns))
    return Workload(tuple(sessions))


def own_compute(
    pairs: Annotated[int, typer.Option(help="Rounds of three passes.")] = 4,
    below: Annotated[int, typer.Option(help="Most tokens that decode computes of one.")] = 2048,
    only: Annotated[
        str, typer.Option(help="One case alone; the file's rows of the others stay.")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """First tokens of agents' later turns, and gaps between tokens, own compute on and off."""
    cores = sorted(os.sched_getaffinity(0))
    if pairs < 1 or len(cores) < 2:
        raise ConfigError("--pairs must be at least 1, and two cores are needed")
    if only and only not in CASES:
        raise ConfigError(f"--only {only!r} is none of {', '.join(CASES)}")
    rows: dict[str, dict[str, Any]] = {}
    if only and json_file is not None and json_file.exists():
        rows = {row["prefill"]: row for row in json.loads(json_file.read_text())["rows"]}
    with tempfile.TemporaryDirectory(prefix="prefixkv-own-") as name:
        folder = Path(name)
        Reference(small_model(1, **SIZES, trial=False)).save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        for case in [only] if only else CASES:
            load_before = os.getloadavg()[0]
            row = asyncio.run(_case(folder, case, pairs, below, cores))
            load = [load_before, os.getloadavg()[0]]
            rows[case] = {"prefill": case, "pairs": pairs, "load_average": load, **row}
            print(json.dumps(rows[case], indent=1), flush=True)
    if json_file is not None:
        recipe: dict[str, Any] = {
            "command": f"python -m benchmarks own_compute --pairs {pairs} --below {below}",
            "workload": CHATS, "below": below, **machine(),
        }  # fmt: skip
        found = {"recipe": recipe, "rows": [rows[case] for case in CASES if case in rows]}
        json_file.write_text(json.dumps(found, indent=1) + "\n")


async def _case(
    folder: Path, case: str, pairs: int, below: int, cores: list[int]
) -> dict[str, Any]:
    """Measure one case: the ratios of each pair, and their medians."""
    most = agents(1).max_request_tokens + 64
    working_set = CHATS["conversations"] * -(-most // PAGE_SIZE)
    prefill = {"num_pages": max(int(CASES[case] * working_set), -(-most // PAGE_SIZE) + 8)}
    decode: dict[str, Any] = {"num_pages": 3 * working_set}
    settings = {ON: {**decode, "compute_below": below}, OFF: decode}
    pins = [("taskset", "-c", str(core)) for core in cores[:2]]
    passes: dict[str, list[dict[str, float]]] = {ON: [], OFF: [], AGAIN: []}
    computed = {ON: 0, OFF: 0}  # requests that decode has computed
    async with ModelWorkers(folder, prefill, settings, *pins) as workers:
        for name in settings:  # so that no pass has the nodes' wire-up in it
            await workers.ask(name, "first", [*range(16)], 2, f"first {name}")
        for number in range(pairs):
            order = [ON, OFF, AGAIN] if number % 2 == 0 else [OFF, AGAIN, ON]
            for kind in order:
                name = ON if kind == ON else OFF
                workload = agents(2 + number)
                played = await play(
                    workers, name, workload, small_vocabulary(), f"{kind} {number}", ignore_end=True
                )
                figures, _ = await workers.settled(name)
                total = figures.get(f'prefixkv_computed_requests_total{{node="{name}"}}', 0.0)
                passes[kind].append({**_row(played), "computed": int(total) - computed[name]})
                computed[name] = int(total)

    def ratio(key: str, one: str, other: str) -> list[float]:
        pairs_of = zip(passes[one], passes[other], strict=True)
        return [round(mine[key] / theirs[key], 4) for mine, theirs in pairs_of]

    found: dict[str, Any] = {"passes": passes}
    for key in ("later_ttft_p50_ms", "later_ttft_p99_ms", "itl_p99_ms"):
        for name, one in (("on_by_off", ON), ("off_by_off", AGAIN)):
            ratios = ratio(key, one, OFF)
            found[f"{key}_{name}"] = {
                "median": round(statistics.median(ratios), 4), "ratios": ratios
            }  # fmt: skip
    return found


def _row(played: Played) -> dict[str, float]:
    later = [answer for chat in played.answers for answer in chat[1:]]
    ttft_ms = 1e3 * np.array([answer.ttft_s for answer in later])
    itl_ms = 1e3 * np.array([one for answer in played.all() for one in answer.itl_s])
    return {
        "later_ttft_p50_ms": round(float(np.percentile(ttft_ms, 50)), 2),
        "later_ttft_p99_ms": round(float(np.percentile(ttft_ms, 99)), 2),
        "itl_p50_ms": round(float(np.percentile(itl_ms, 50)), 2),
        "itl_p99_ms": round(float(np.percentile(itl_ms, 99)), 2),
        "duration_s": round(played.duration_s, 3),
    }
