"""Whether the chats of `prefixkv demo` get their first token sooner with decode's cache on.

One pass of 30 turns says little of it, so passes with the cache on and off take turns here, on the
same workers: pair by pair, the order changed each time. Each pass has a salt of its own, so none
finds another's KV.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path

from benchmarks.report import Row
from prefixkv.cli.demo.command import CHATS, SETTINGS, SIZES
from prefixkv.cli.demo.play import play, small_vocabulary
from prefixkv.cli.demo.workers import ModelWorkers
from prefixkv.cli.demo.workload import chat
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer

STARTS = 2  # of the workers, each with its pairs
NAMES = {True: "on", False: "off"}


def measure(pairs: int, seed: int) -> tuple[Row, Row]:
    """Median TTFT of each pass, turn about; and the recipe."""
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="prefixkv-demo-") as folder:
        path = Path(folder)
        Reference(small_model(seed, **SIZES, trial=False)).save(path)
        small_tokenizer().save(str(path / "tokenizer.json"))
        for number in range(STARTS):
            found += asyncio.run(_pairs(path, pairs, seed, begins=number % 2 == 0))
    passes = {name: [pair[name] for pair in found] for name in NAMES.values()}
    row = {
        "ttft_p50_ms": {name: [round(one, 1) for one in ms] for name, ms in passes.items()},
        "median_ms": {name: round(statistics.median(ms), 1) for name, ms in passes.items()},
        "on_of_off": round(statistics.median(pair["on"] / pair["off"] for pair in found), 3),
        "pairs_in_which_on_was_lower": sum(pair["on"] < pair["off"] for pair in found),
    }
    return row, {"workload": CHATS, "workers": SETTINGS, "starts": STARTS}


async def _pairs(folder: Path, pairs: int, seed: int, *, begins: bool) -> list[dict[str, float]]:
    """Median TTFT in ms of the passes of each pair. `begins`: whether the cache is on in the first
    pass of all."""
    workload, spell = chat(seed, **CHATS), small_vocabulary()
    decode = {name: {**SETTINGS, "cache": on} for on, name in NAMES.items()}
    found: list[dict[str, float]] = []
    async with ModelWorkers(folder, SETTINGS, decode) as workers:
        for name in decode:  # so that no pass has the two nodes' wire-up in it
            await workers.ask(name, "first", [*range(16)], 2, f"first {name}")
        for number in range(pairs):
            pair: dict[str, float] = {}
            first = begins if number % 2 == 0 else not begins
            for on in (first, not first):
                name = NAMES[on]
                played = await play(workers, name, workload, spell, f"{name} {number}")
                pair[name] = 1e3 * statistics.median(answer.ttft_s for answer in played.all())
                await workers.settled(name)
            found.append(pair)
    return found
