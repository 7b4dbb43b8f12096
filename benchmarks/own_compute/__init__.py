"""Decode that computes what a turn adds, beside decode that asks prefill for all.

    python -m benchmarks own_compute --pairs 6 --json benchmarks/results/own_compute.json
    python -m benchmarks own_compute AGENTS CONVERSATION --json benchmarks/results/rule.json

A prefill worker on one core and two decode workers on another, as `prefixkv worker` runs them, one
of which has `compute`; the other one waits meanwhile. Chats as coding agents have them: a long
first prompt, then turns of 64 to 512 tokens, each as soon as the one before is answered. A round is
a pass with own compute and two without, which are A against A; the order changes from round to
round.

"as pool": prefill's pool holds a third of the pages of all chats, as that of a worker does which
many decode workers share.
"keeps all": it holds them all three times.

With traces the rule alone is measured, in a model of queues (`rule.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.report import JsonFile, Row, check_outputs, write
from benchmarks.turns.workload import longest_request
from prefixkv.cli.demo.command import SIZES
from prefixkv.cli.demo.workers import ModelWorkers
from prefixkv.cli.demo.workload import Played, Run, Turn, Workload, play, small_vocabulary
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


class Served(NamedTuple):
    """A model in a folder, and the commands that its prefill and decode workers run within."""

    folder: Path
    within: Sequence[Sequence[str]]


@contextmanager
def served() -> Iterator[Served]:
    """Save the small model and its tokenizer, for prefill on one core and decode on another. Raises
    ConfigError where there is one alone."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two cores are needed")
    with tempfile.TemporaryDirectory(prefix="prefixkv-served-") as name:
        folder = Path(name)
        Reference(small_model(1, **SIZES, trial=False)).save(folder)
        small_tokenizer().save(str(folder / "tokenizer.json"))
        yield Served(folder, [("taskset", "-c", str(core)) for core in cores[:2]])


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
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="AGENTS CONVERSATION", help="The rule, on traces."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds of three passes.")] = 4,
    below: Annotated[int, typer.Option(help="Most tokens that decode computes of one.")] = 2048,
    json_file: JsonFile = None,
) -> None:
    """First tokens of agents' later turns, and gaps between tokens, own compute on and off."""
    check_outputs(json_file)
    if traces:
        from benchmarks.own_compute.rule import play_traces

        play_traces(traces, json_file)
        return
    rows = []
    with served() as model:
        for case in CASES:
            row = asyncio.run(measured(model, case, pairs, below))
            rows.append({"prefill": case, "pairs": pairs, **row})
            print(json.dumps(rows[-1], indent=1), flush=True)
    write(json_file, f"own_compute --pairs {pairs} --below {below}", rows, workload=CHATS)


async def measured(model: Served, case: str, pairs: int, below: int) -> dict[str, Any]:
    """Measure one case: the ratios of each pair, and their medians."""
    most = longest_request(agents(1)) + 64
    working_set = CHATS["conversations"] * -(-most // PAGE_SIZE)
    prefill_pages = max(int(CASES[case] * working_set), -(-most // PAGE_SIZE) + 8)
    prefill = {"num_pages": prefill_pages}
    decode: dict[str, Any] = {"num_pages": 3 * working_set}
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

    return {"passes": passes, **ratios(passes, ON, OFF, AGAIN)}


def ratios(
    passes: Mapping[str, Sequence[Mapping[str, float]]], on: str, off: str, again: str,
    keys: Sequence[str] = ("later_ttft_p50_ms", "later_ttft_p99_ms", "itl_p99_ms"),
) -> Row:  # fmt: skip
    """Of each figure the ratios of the pairs and their median: with, by without; and without, by
    without again."""
    found: Row = {}
    for key in keys:
        for name, one in (("on_by_off", on), ("off_by_off", again)):
            both = zip(passes[one], passes[off], strict=True)
            each = [round(a[key] / b[key], 4) for a, b in both]
            found[f"{key}_{name}"] = {"median": round(statistics.median(each), 4), "ratios": each}
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
