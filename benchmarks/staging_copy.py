"""Claim: on the CPU, gathering KV into staging memory and scattering it out of it cost a few plain
copies of the bytes.

    taskset -c 0 python -m benchmarks staging_copy [--lease-mib 4] [--seed 1] >
    benchmarks/results/staging_copy.json

One rank of TP4 against one of TP1 of an 8B-class model (32 layers, 8 KV heads of 128, bf16, pages
of 16 tokens): the narrow pool's rows are whole pages of a layer, the wide pool's are 512 bytes, a
quarter of a token. 256 pages, random or as an allocator gives them, in leases that follow one
another through one piece of memory. A round times, one after the other: a copy of the same bytes
between two large tensors ("memcpy"), gather from and scatter into each pool.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
import typer

from prefixkv.errors import ConfigError
from prefixkv.memory.kv_pool import KVPool
from prefixkv.memory.mesh import Shard
from prefixkv.memory.stage_copy import StagingCopy
from prefixkv.memory.stage_copy import staging_copy as copy_between

NUM_PAGES, LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, RANKS = 256, 32, 8, 128, 16, 4


def timed_ms(act: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - start) / 1e6


def measure(
    order: str, contiguous: bool, lease_bytes: int, rounds: int, seed: int
) -> dict[str, float]:
    random = np.random.default_rng(seed)
    wide, narrow = (
        KVPool.create(2 * NUM_PAGES, PAGE_SIZE, LAYERS, heads, HEAD_DIM, order=order)
        for heads in (HEADS, HEADS // RANKS)
    )
    copies = {
        "wide": copy_between(
            wide.layout, Shard(0, LAYERS, HEADS // RANKS, HEADS // RANKS), PAGE_SIZE
        ),
        "narrow": copy_between(narrow.layout, Shard.whole(narrow.layout), PAGE_SIZE),
    }
    pages = (
        np.arange(NUM_PAGES) + 1 if contiguous else random.permutation(2 * NUM_PAGES)[:NUM_PAGES]
    )
    pages = pages.astype(np.int32)
    total = copies["narrow"].num_bytes(NUM_PAGES)
    pages_a_lease = max(1, lease_bytes // copies["narrow"].num_bytes(1))
    lease = torch.zeros(copies["narrow"].num_bytes(pages_a_lease), dtype=torch.uint8)
    plain = torch.zeros(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)

    def whole(copy: StagingCopy, name: str) -> None:
        for first in range(0, NUM_PAGES, pages_a_lease):
            part = pages[first : first + pages_a_lease]
            getattr(copy, name)(part, lease[: copy.num_bytes(len(part))])

    steps: dict[str, Callable[[], object]] = {"memcpy": lambda: plain[1].copy_(plain[0])}
    for pool, copy in copies.items():
        for name in ("gather", "scatter"):
            steps[f"{name}_{pool}"] = partial(whole, copy, name)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            took = timed_ms(step)
            if number:  # the first touches the memory
                times[name].append(took)
    median = {name: float(np.median(took)) for name, took in times.items()}
    ratios = {
        # of a round, so that a slow moment of the machine counts on both sides
        f"{a}_then_{b}_over_memcpy": np.median(
            (np.array(times[f"gather_{a}"]) + np.array(times[f"scatter_{b}"]))
            / np.array(times["memcpy"])
        )
        for a, b in (("wide", "narrow"), ("narrow", "wide"))
    }
    return {
        "mib": total / 2**20,
        "pages_a_lease": pages_a_lease,
        **{f"{name}_gb_s": round(total / took / 1e6, 2) for name, took in median.items()},
        **{name: round(float(ratio), 2) for name, ratio in ratios.items()},
    }


def staging_copy(
    lease_mib: Annotated[int, typer.Option(help="Of a lease.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of which the median counts.")] = 11,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
) -> None:
    """What gathering KV into staging memory and scattering it cost on the CPU; JSON on stdout."""
    if min(lease_mib, rounds) < 1:
        raise ConfigError("--lease-mib and --rounds must be at least 1")
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    cases = {
        f"{order}, {'contiguous' if contiguous else 'random'} pages": measure(
            order, contiguous, lease_mib << 20, rounds, seed
        )
        for order in ("layer_major", "page_major")
        for contiguous in (True, False)
    }
    recipe = {
        "what": "medians of rounds, one thread; GB/s of KV bytes, each read once and written once",
        "lease_mib": lease_mib,
        "rounds": rounds,
        "seed": seed,
        "load_average": [load_before[0], os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
    }
    print(json.dumps({"recipe": recipe, "cases": cases}, indent=1))
