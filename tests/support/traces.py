"""Traces for replays, in blocks of 512 tokens: lines of files, and traces in memory."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefixkv.cli.replay import Trace, make_trace


def entry(ids: list[int], length: int | None = None, at: float = 0, **fields: Any) -> Any:
    """A line of Mooncake's; `at` is in ms."""
    length = 512 * len(ids) if length is None else length
    return {"timestamp": at, "input_length": length, "hash_ids": ids, **fields}


def write(path: Path, entries: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in entries), encoding="utf-8")
    return path


def trace_of(*paths: list[int], step_s: float = 1.0, bytes_per_token: int = 0) -> Trace:
    """Requests a step apart; equal ids behind equal beginnings are equal blocks."""
    entries = [entry([*path], at=1000 * step_s * at) for at, path in enumerate(paths)]
    return replace(make_trace("t", entries), bytes_per_token=bytes_per_token)


def sessions(seed: int, number: int = 300) -> list[list[int]]:
    """The blocks of requests of sessions that grow, a few at a time, all with one beginning."""
    rng = random.Random(seed)
    fresh = iter(range(10, 10**6))
    going: list[list[int]] = []
    paths = []
    for _ in range(number):
        if len(going) < 8 or rng.random() < 0.4:
            going.append([0])
        path = going[-1 - min(len(going) - 1, int(rng.expovariate(0.2)))]
        path += [next(fresh) for _ in range(rng.randrange(1, 6))]
        paths.append([*path])
    return paths
