"""Whether the chats of `prefixkv demo` get their first token sooner with decode's cache on.

One pass of 30 turns says little of it, so passes with the cache on and off take turns here, on the
same workers: pair by pair, the order changed each time. Each pass has a salt of its own, so none
finds another's KV.

    python -m benchmarks demo_chats > benchmarks/results/demo_chats.json
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.demo_trace import NAMES, beside, pairs_of
from prefixkv.cli.chats.command import CHATS, SETTINGS, SIZES, small_vocabulary
from prefixkv.cli.chats.play import play
from prefixkv.cli.chats.workers import ModelWorkers
from prefixkv.cli.chats.workload import chat
from prefixkv.cli.figures import machine
from prefixkv.engines.hf.reference import Reference
from prefixkv.engines.hf.small import small_model, small_tokenizer
from prefixkv.errors import ConfigError


def demo_chats(
    pairs: Annotated[int, typer.Option(help="Of passes, cache on and off.")] = 6,
    starts: Annotated[int, typer.Option(help="Of the workers, each with its pairs.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the model and the workload.")] = 1,
) -> None:
    """Median TTFT of each pass, turn about; JSON on stdout."""
    if min(pairs, starts) < 1:
        raise ConfigError("--pairs and --starts must be at least 1")
    load_before = os.getloadavg()
    model = small_model(seed, **SIZES, trial=False)
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="prefixkv-demo-") as folder:
        path = Path(folder)
        Reference(model).save(path)
        small_tokenizer().save(str(path / "tokenizer.json"))
        for number in range(starts):
            found += asyncio.run(_pairs(path, pairs, seed, begins=number % 2 == 0))
    recipe: dict[str, Any] = {
        "command": "python -m benchmarks demo_chats",
        "what": "ttft_p50_ms: the median of all turns of a pass, pair by pair",
        "seed": seed,
        "workload": CHATS,
        "workers": SETTINGS,
        "starts": starts,
        "pairs": pairs,
        "load_average": [load_before[0], os.getloadavg()[0]],
        **machine(),
    }
    print(json.dumps({"recipe": recipe, **beside(found)}, indent=1))


async def _pairs(folder: Path, pairs: int, seed: int, *, begins: bool) -> list[dict[str, float]]:
    """Median TTFT in ms of the passes of each pair. `begins`: whether the cache is on in the first
    pass of all."""
    workload, spell = chat(seed, **CHATS), small_vocabulary()
    decode = {name: {**SETTINGS, "cache": on} for on, name in NAMES.items()}
    found: list[dict[str, float]] = []
    async with ModelWorkers(folder, SETTINGS, decode) as workers:
        for name in decode:  # so that no pass has the two nodes' wire-up in it
            await workers.ask(name, "first", [*range(16)], 2, f"first {name}")
        for number, order in enumerate(pairs_of(pairs, begins=begins)):
            pair: dict[str, float] = {}
            for on in order:
                name = NAMES[on]
                played = await play(workers, name, workload, spell, f"{name} {number}")
                pair[name] = 1e3 * statistics.median(answer.ttft_s for answer in played.all())
                await workers.settled(name)
            found.append(pair)
    return found
