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

`steps`: processor time of one forward of the engine by itself, with a chunk beside its batch and
without.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from prefixkv.cli.chats.command import SIZES, small_vocabulary
from prefixkv.cli.chats.play import Played, play
from prefixkv.cli.chats.workers import ModelWorkers
from prefixkv.cli.chats.workload import Run, Turn, Workload
from prefixkv.cli.figures import machine
from prefixkv.engines.hf.attention import FlatPool
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
BATCH, CONTEXT, CHUNKS = 3, 1000, (4, 8, 16, 64)  # sequences, tokens, tokens


@dataclass(frozen=True)
class Served:
    """A model in a folder, and how its workers run: the commands that the prefill worker and the
    decode workers run within, and settings of all of them."""

    folder: Path
    within: Sequence[Sequence[str]] = ((), ())
    settings: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def served(
    within: Sequence[Sequence[str]], settings: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """Save the small model, made with these options, and its tokenizer for as long as it is
    served."""
    with tempfile.TemporaryDirectory(prefix="prefixkv-served-") as name:
        folder = Path(name)
        Reference(small_model(1, **{**SIZES, "trial": False, **options})).save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        yield Served(folder, within, settings or {})


def one_core_each() -> list[tuple[str, ...]]:
    """Return commands that keep prefill on one core and decode on another. Raises ConfigError where
    there is one alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are needed")
    return [("taskset", "-c", str(core)) for core in cores[:2]]


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
    if pairs < 1:
        raise ConfigError("--pairs must be at least 1")
    if only and only not in CASES:
        raise ConfigError(f"--only {only!r} is none of {', '.join(CASES)}")
    rows: dict[str, dict[str, Any]] = {}
    if only and json_file is not None and json_file.exists():
        rows = {row["prefill"]: row for row in json.loads(json_file.read_text())["rows"]}
    with served(one_core_each()) as model:
        for case in [only] if only else CASES:
            load_before = os.getloadavg()[0]
            row = asyncio.run(measured(model, case, pairs, below))
            load = [load_before, os.getloadavg()[0]]
            rows[case] = {"prefill": case, "pairs": pairs, "load_average": load, **row}
            print(json.dumps(rows[case], indent=1), flush=True)
    if json_file is not None:
        recipe: dict[str, Any] = {
            "command": f"python -m benchmarks own_compute --pairs {pairs} --below {below}",
            "workload": CHATS, "below": below, **machine(),
        }  # fmt: skip
        of_cases = [rows[case] for case in CASES if case in rows]
        found = {"recipe": recipe, "steps": steps_ms(), "rows": of_cases}
        json_file.write_text(json.dumps(found, indent=1) + "\n")


def steps_ms(repeats: int = 15) -> dict[str, Any]:
    """Measure a step of the engine's batch, and the same with a chunk of a prompt beside it:
    medians of the thread's processor time, in ms."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = small_model(1, **SIZES, trial=False)
    pages = CONTEXT // PAGE_SIZE + 8
    flat = FlatPool(model.make_pool((BATCH + 1) * pages, PAGE_SIZE))
    rows = np.arange((BATCH + 1) * pages, dtype=np.int32).reshape(-1, pages)

    def median_ms(chunk: int) -> float:
        news = [1] * BATCH + [chunk] * (chunk > 0)
        found = []
        for _ in range(repeats):
            begin_s = time.thread_time()
            model.forward(
                flat, np.full(sum(news), 7), rows[: len(news)], [CONTEXT] * len(news),
                [CONTEXT + num for num in news], range(BATCH),
            )  # fmt: skip
            found.append(time.thread_time() - begin_s)
        return round(1e3 * statistics.median(found), 2)

    median_ms(0)
    by_chunk = {num: median_ms(num) for num in (0, *CHUNKS)}
    torch.set_num_threads(threads)
    return {"batch": BATCH, "context": CONTEXT, "ms_by_chunk": by_chunk}


async def measured(model: Served, case: str, pairs: int, below: int) -> dict[str, Any]:
    """Measure one case: the ratios of each pair, and their medians."""
    most = agents(1).max_request_tokens + 64
    working_set = CHATS["conversations"] * -(-most // PAGE_SIZE)
    prefill_pages = max(int(CASES[case] * working_set), -(-most // PAGE_SIZE) + 8)
    prefill = {**model.settings, "num_pages": prefill_pages}
    decode: dict[str, Any] = {**model.settings, "num_pages": 3 * working_set}
    settings = {ON: {**decode, "compute_below": below}, OFF: decode}
    passes: dict[str, list[dict[str, float]]] = {ON: [], OFF: [], AGAIN: []}
    computed = {ON: 0, OFF: 0}  # requests that decode has computed
    async with ModelWorkers(model.folder, prefill, settings, *model.within) as workers:
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
