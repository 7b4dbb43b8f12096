"""This tree's side of `sched --against`: measures the parts that it is told.

It runs as a file, with PYTHONPATH set to its tree, so that `benchmarks` and `prefixkv` are that
tree's own. It answers each order, a tuple, with the seconds of single calls, by name. A commit that
has this file is measured by its own; an older one by `driver_76518cc8.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

Seconds = dict[str, list[float]]

CALLS = (
    "life", "full_pool", "match", "evict", "append_many", "prefill", "evict_all", "policies",
    "host_admission", "crowd",
)  # fmt: skip


class Order(NamedTuple):
    """What to measure. `cpu`: calls of one thread by its processor time, not on the wall."""

    part: str
    calls: int
    seed: int = 0
    policy: str | None = None
    quick: bool = False
    cpu: bool = False


def call(order: Order) -> Seconds:
    """Measure a part of `benchmarks.sched`."""
    from benchmarks import sched

    size = sched.Size(order.calls, order.seed, quick=order.quick)
    if order.policy is not None:
        size = size._replace(policy=order.policy)
    return {name: times.seconds(order.cpu) for name, times in sched.PARTS[order.part](size).items()}


def full_hit(order: Order) -> Seconds:
    """Measure a prompt that both sides have, over NIXL, from decode's `add` to its commit."""
    from benchmarks.against.full_hit import measure
    from benchmarks.pair import run_pair

    return measure(run_pair, order.quick)


def goodput(order: Order) -> Seconds:
    """Measure transfers of a small and of a large request over NIXL, pages as in a fresh pool."""
    from benchmarks import transfer
    from benchmarks.pair import run_pair

    large = transfer.Transfer("page_major", "fresh", patience_s=0.0)
    small = replace(large, tokens=256, num_layers=8, num_kv_heads=2, head_dim=64, repeats=40)
    if order.quick:
        large = transfer.small("page_major", "fresh")
    return {
        f"goodput, {which}": run_pair(sends, transfer.prefill_side, case)
        for which, case in (("small", small), ("large", large))
    }


def sends(pipe: Connection, _watch: Any, case: Any) -> list[float]:
    """On decode: return the seconds that a MiB of each transfer took."""
    from benchmarks import transfer

    with transfer.decode_of(pipe, case) as (decode, _pool):
        took_s = [decode.take("stack", room) for room in range(case.warm_up + case.repeats)]
        pipe.send(None)
    return [one / (case.num_bytes / 2**20) for one in took_s[case.warm_up :]]


PAIRS: dict[str, Callable[[Order], Seconds]] = {"full_hit": full_hit, "goodput": goodput}


def main(measure: Callable[[Order], Seconds]) -> None:
    """Answer orders until the other end of the pipe is closed."""
    pipe, tree = Connection(int(sys.argv[1])), Path(sys.argv[2]).resolve()
    imported = Path(importlib.import_module("prefixkv").__file__ or "").resolve()
    if tree not in imported.parents:
        sys.exit(f"prefixkv comes from {imported}, not from {tree}")
    cores = sorted(os.sched_getaffinity(0))
    while True:
        try:
            order = Order(*pipe.recv())
        except EOFError:
            return
        # Calls of one thread are measured on one core, the same for all sides. Pairs choose theirs.
        os.sched_setaffinity(0, cores if order.part in PAIRS else cores[-1:])
        try:
            pipe.send((True, measure(order)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    main(lambda order: PAIRS.get(order.part, call)(order))
