"""`python -m benchmarks gpu`: what moving KV costs in VRAM on one GPU, and what it costs a model.

Shapes of an 8B-class model (32 layers, 8 KV heads of 128, bfloat16: 128 KiB of KV a token). Two
processes share the GPU, as a prefill and a decode worker on one card would; UCX copies between them
by cuda_ipc. Parts, each in processes of its own, a part that fails being told in the place of its
figures:

- `copies`: the card's copy bandwidth, and the staging copies (Triton's gather and scatter) against
  it, by shape.
- `transfer`: VRAM to VRAM, from `send_chunk` to `pop_transferred`, beside raw NIXL
  (`benchmarks/transfer.py`), and staged between unequal ranks (`benchmarks/claim_staging.py`).
- `step`: a decode step's matrix products with and without transfers beside it.
- `turns`: conversations of several turns, decode's cache on and off, every byte verified.
- `host`: the host tier's copies between VRAM and pinned memory, against plain copies of as many
  bytes (`benchmarks/gpu_host.py`).
- `agents`: the chats of `benchmarks/own_compute.py` and `benchmarks/host_turns.py` with a model of
  the engine of Hugging Face's models on the card, as its workers run it.

But for `agents` no model is run: the KV is a pattern or random, and computing it costs nothing.
`--device cpu` with `--quick` tries the whole of it where there is no GPU.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks import claim_staging, gpu_agents, gpu_copies, gpu_host, gpu_step, gpu_turns
from benchmarks import transfer as transfers
from benchmarks.pair import Row, run_pair
from prefixkv.cli.figures import machine
from prefixkv.errors import ConfigError

CORES: Final = 4  # a side, where there are so many
PAGE_SIZES: Final = (16, 64)
PAGES: Final = ("fresh", "random")


class Part(StrEnum):
    copies = "copies"
    transfer = "transfer"
    step = "step"
    turns = "turns"
    host = "host"
    agents = "agents"


def measure_copies(device: str, quick: bool) -> list[Callable[[], Row]]:
    return [partial(gpu_copies.measure, device, quick)]


def measure_transfer(device: str, quick: bool) -> list[Callable[[], Row]]:
    """A row for each layout, page size and order of pages; then unequal ranks."""

    def pair(case: transfers.Transfer, tls: str) -> Row:
        env = {"UCX_TLS": tls} if tls else None
        cores = 1 if quick else CORES
        row: Row = run_pair(
            transfers.decode_side, transfers.prefill_side, case, env=env, cores=cores
        )
        return {"page_size": case.page_size, "tokens": case.tokens, "ucx_tls": tls, **row}

    def unequal(meshes: str) -> Row:
        case = claim_staging.small(meshes) if quick else claim_staging.Staging(meshes)
        case = replace(case, device=device, pages="random", patience_s=1.0)
        sides = claim_staging.decode_side, claim_staging.prefill_side
        row: Row = run_pair(*sides, case, cores=1 if quick else CORES)
        return row

    calls: list[Callable[[], Row]] = []
    make = transfers.small if quick else transfers.Transfer
    for layout, page_size, pages in product(transfers.LAYOUTS, PAGE_SIZES, PAGES):
        case = make(layout, pages)
        case = replace(
            case, device=device, page_size=page_size, patience_s=1.0,
            num_pages=case.num_pages * 16 // page_size,
        )  # fmt: skip
        calls.append(partial(pair, case, ""))
    if device != "cpu":
        over_tcp = replace(case, layout="page_major", tokens=512, repeats=3, warm_up=1)
        calls.append(partial(pair, over_tcp, "tcp,cuda_copy"))
    for meshes in claim_staging.MESHES:
        calls.append(partial(unequal, meshes))
    return calls


def measure_step(device: str, quick: bool) -> list[Callable[[], Row]]:
    case = gpu_step.small(device) if quick else gpu_step.Steps(device)
    sides, cores = (gpu_step.decode_side, gpu_step.prefill_side), 1 if quick else CORES
    return [
        partial(run_pair, *sides, replace(case, batch=batch, layout=layout), cores=cores)
        for batch in ((4,) if quick else (64, 1024))
        for layout in transfers.LAYOUTS
    ]


def measure_turns(device: str, quick: bool) -> list[Callable[[], Row]]:
    case = gpu_turns.small(device) if quick else gpu_turns.Turns(device)
    sides, cores = (gpu_turns.decode_side, gpu_turns.prefill_side), 1 if quick else CORES
    return [
        partial(run_pair, *sides, replace(case, cache=cache), cores=cores)
        for cache in (True, False)
    ]


MEASURES: Final[dict[Part, Callable[[str, bool], list[Callable[[], Row]]]]] = {
    Part.copies: measure_copies,
    Part.transfer: measure_transfer,
    Part.step: measure_step,
    Part.turns: measure_turns,
    Part.host: gpu_host.measures,
    Part.agents: gpu_agents.measures,
}


def gpu(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
    only: Annotated[list[Part] | None, typer.Option(help="These parts; may be repeated.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu to try it out.")] = "cuda",
    quick: Annotated[
        bool, typer.Option(help="Tiny sizes: whether it works, not how fast it is.")
    ] = False,
) -> None:
    """What KV in VRAM costs to move between two processes on one GPU, and a model beside it."""
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json is {json_file}, there is no such folder")
    name = device_name(device)
    recipe = {
        "command": "python -m benchmarks gpu" + (" --quick" if quick else ""),
        "device": name,
        "statistic": "medians; where two things are compared, of the ratio within a repetition",
        "transfer": asdict(transfers.Transfer("", "")),
        "step": asdict(gpu_step.Steps(device)),
        "turns": asdict(gpu_turns.Turns(device)),
        **machine(),
    }
    found: dict[str, list[Row]] = {}
    for part in only or list(Part):
        found[part.value] = rows = []
        for call in MEASURES[part](device, quick):
            began_s = time.monotonic()
            try:
                row = call()
            except Exception:
                row = {"failed": traceback.format_exc()[-2000:]}
            rows.append(row)
            took_s = time.monotonic() - began_s
            print(f"{part.value}, {took_s:.0f} s: {json.dumps(row)}", flush=True)
            if json_file is not None:  # what there is, should a later part not end
                text = json.dumps({"recipe": recipe, "measured": found}, indent=1)
                json_file.write_text(text + "\n", encoding="utf-8")
    if any("failed" in row for rows in found.values() for row in rows):
        raise typer.Exit(1)


def device_name(device: str) -> str:
    """What the card calls itself. Raises ConfigError for one that is not there."""
    if device == "cpu":
        return "cpu"
    import torch

    cuda: Any = torch.cuda
    try:
        return str(cuda.get_device_name(torch.device(device)))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"--device is {device}: {str(error).splitlines()[0]}") from None
