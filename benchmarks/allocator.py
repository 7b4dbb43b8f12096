"""Claim: with a fragmented pool, allocating 100 pages and freeing them takes under 50 us at the
median.

    python -m benchmarks allocator [--pages 100000] [--allocations 100000] [--seed 1] >
    benchmarks/results/allocator.json

Requests of 1 to 200 pages come and go through a full pool: when pages are short, cold requests lose
pages from their tails, exactly as many as are missing ("exact"), or that and a reserve of the pool
at once ("reserve"). Then 100 pages are allocated and freed again, and again. "singles" is the worst
case there is: no two free pages touch.
"""

from __future__ import annotations

import json
import platform
import time
from collections import deque
from typing import Annotated

import numpy as np
import typer

from prefixkv.errors import ConfigError
from prefixkv.pages.allocator import PageAllocator

PAGES_A_REQUEST = 100
COLD = 50  # an eviction picks among this many of the oldest requests


def churned(
    num_pages: int, allocations: int, reserve_pages: int, seed: int
) -> tuple[PageAllocator, dict[str, float]]:
    """A pool after `allocations` random ones, and what they came to."""
    random = np.random.default_rng(seed)
    allocator = PageAllocator(num_pages)
    live: deque[np.ndarray] = deque()

    def evict(missing: int) -> None:
        while missing > 0:
            at = int(random.integers(0, min(len(live), COLD)))
            pages = live[at]
            allocator.free(pages[-missing:])
            if len(pages) > missing:
                live[at] = pages[:-missing]
            else:
                del live[at]
            missing -= len(pages)

    sizes = random.integers(1, 201, allocations).tolist()
    pages_taken = runs_taken = 0
    for done, size in enumerate(sizes):
        if allocator.free_pages < size:
            evict(size - allocator.free_pages + reserve_pages)
        pages = allocator.alloc(size)
        live.append(pages)
        if done >= allocations // 2:
            pages_taken += size
            runs_taken += 1 + int(np.count_nonzero(np.diff(pages) != 1))
    if allocator.free_pages < PAGES_A_REQUEST:
        evict(PAGES_A_REQUEST - allocator.free_pages)
    return allocator, {"runs_per_100_pages_second_half": round(100 * runs_taken / pages_taken, 1)}


def singles(num_pages: int) -> PageAllocator:
    allocator = PageAllocator(num_pages)
    allocator.free(allocator.alloc(num_pages)[::2])
    return allocator


def measure(allocator: PageAllocator, repeats: int) -> dict[str, float]:
    alloc_us, free_us, runs = [], [], []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        pages = allocator.alloc(PAGES_A_REQUEST)
        middle = time.perf_counter_ns()
        allocator.free(pages)
        end = time.perf_counter_ns()
        alloc_us.append((middle - start) / 1e3)
        free_us.append((end - middle) / 1e3)
        runs.append(1 + int(np.count_nonzero(np.diff(pages) != 1)))
    both_us = np.add(alloc_us, free_us)
    allocator.check_invariants()
    return {
        "alloc_free_us_p50": round(float(np.percentile(both_us, 50)), 1),
        "alloc_free_us_p99": round(float(np.percentile(both_us, 99)), 1),
        "alloc_us_p50": round(float(np.percentile(alloc_us, 50)), 1),
        "free_us_p50": round(float(np.percentile(free_us, 50)), 1),
        "runs_a_request": round(float(np.mean(runs)), 1),
        "free_pages": allocator.free_pages,
        "free_runs": allocator.num_free_runs,
    }


def allocator(
    pages: Annotated[int, typer.Option(help="Of the pool.")] = 100_000,
    allocations: Annotated[int, typer.Option(help="Before it is measured.")] = 100_000,
    repeats: Annotated[int, typer.Option(help="Measured calls.")] = 5_000,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 1,
) -> None:
    """What it takes to allocate 100 pages of a fragmented pool and to free them; JSON on stdout."""
    if min(pages, allocations, repeats) < 1_000:
        raise ConfigError("--pages, --allocations and --repeats must be at least 1000")
    cases: dict[str, dict[str, float]] = {}
    for name, reserve in {
        "exact": 0.0,
        "reserve_1_percent": 0.01,
        "reserve_5_percent": 0.05,
    }.items():
        pool, history = churned(pages, allocations, int(reserve * pages), seed)
        cases[name] = measure(pool, repeats) | history
    cases["singles"] = measure(singles(pages), repeats)
    cases["not_fragmented"] = measure(PageAllocator(pages), repeats)
    recipe = {
        "what": f"allocate {PAGES_A_REQUEST} pages, free them; one thread, times include all "
        "checks",
        "pages": pages,
        "allocations": allocations,
        "repeats": repeats,
        "seed": seed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
    }
    print(json.dumps({"recipe": recipe, "cases": cases}, indent=1))
