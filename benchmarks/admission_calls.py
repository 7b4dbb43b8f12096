"""Claim: the slowest hundredth of admissions does hardly more than the others: what makes it slow
is the machine.

    python -m benchmarks admission_calls --json benchmarks/results/admission_calls.json

The admissions of `sched` (8,192 tokens of which 6,144 are cached, the default policy), with free
pages and with none, where an admission evicts what it takes. Of each one the calls are counted that
it makes, of functions of Python and of C. No clock is looked at: so it is the same on every
machine.
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.sched import (
    CACHED_TOKENS,
    MOST_RUNNING,
    OUTPUT_TOKENS,
    PAGE_SIZE,
    PROMPT_TOKENS,
    Worker,
)
from prefixkv.config import DecodeConfig
from prefixkv.paging import whole_pages


def calls_of(call: Callable[[], object]) -> Counter[str]:
    """Make a call, and count by name the calls that are made in it."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            found[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            found[getattr(function, "__qualname__", str(function))] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def counted(full: bool, requests: int, seed: int = 1) -> dict[str, Any]:
    """Admit requests one after the other, and count the calls of each admission."""
    worker = Worker(seed, DecodeConfig(evict_reserve=0.0))
    scheduler, pasts = worker.scheduler, worker.fill_cache()
    worker.leave_free(0 if full else 2 * MOST_RUNNING)
    found: list[Counter[str]] = []
    for number in range(requests + len(pasts)):
        past = pasts[number % len(pasts)]
        tokens = np.concatenate([past, worker.tokens(PROMPT_TOKENS - CACHED_TOKENS)])
        now_s = worker.now_s
        req = worker.add(tokens, now_s)
        found.append(calls_of(lambda now_s=now_s: worker.admit(now_s)))  # type: ignore[misc]
        worker.succeed(req)
        scheduler.pop_transferred(now_s)
        worker.generate([req], OUTPUT_TOKENS)
        left = whole_pages(req.kv_len - CACHED_TOKENS, PAGE_SIZE)
        scheduler.finish(req, now_s)
        if not full:
            worker.drop_cached(left)
    found = found[len(pasts) :]
    sums = np.array([one.total() for one in found])
    order = np.argsort(sums, kind="stable")
    usual, most = found[order[len(order) // 2]], found[order[-1]]
    return {
        "pool_full": full,
        "admissions": requests,
        **{f"calls_p{at}": int(np.percentile(sums, at)) for at in (50, 90, 99)},
        "most_calls": int(sums.max()),
        "most_has_more": dict((most - usual).most_common(4)),
    }


def admission_calls(
    requests: Annotated[int, typer.Option(help="Admissions of each row.")] = 1000,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write recipe and rows there.")
    ] = None,
) -> None:
    """Calls of functions per admission, at P50 and P99."""
    rows = [counted(full, requests) for full in (False, True)]
    for row in rows:
        print(json.dumps(row))
    if json_file is not None:
        recipe = {
            "command": f"python -m benchmarks admission_calls --requests {requests}",
            "python": platform.python_version(), "numpy": np.__version__,
        }  # fmt: skip
        text = json.dumps({"recipe": recipe, "rows": rows}, indent=1)
        json_file.write_text(text + "\n", encoding="utf-8")
