"""Page ids as runs of neighbours.

An allocator gives out neighbouring pages as far as it can, so the pages of an insertion mostly form
a few runs. What is asked of a run is one search or one copy of bytes, at a fraction of what the
set-up of array operations costs; ids that form many runs are looked up as an array.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import numpy as np

from prefixkv.cache.node import PAGE_ID_BYTES, Packed

Runs: TypeAlias = list[tuple[int, int]]
"""(first, end) of runs of neighbouring page ids, in the order of the ids."""

MAX_RUNS = 4
"""Limit of runs that are looked at one by one."""

SHORT_PAGES = 8
"""Where the first runs are shorter than this on average, very many are taken to follow."""

_FIRST_RUNS = 2


def packed_range(num_pages: int) -> bytes:
    """Return the page ids from 0 to `num_pages`, packed, for `page_runs`."""
    return np.arange(num_pages, dtype=np.int32).tobytes()


def page_runs(packed: Packed, ids: bytes) -> Runs | None:
    """Return packed page ids as runs of neighbours; None for more than `MAX_RUNS`, or seem to.

    One memcmp for a single run, else O(runs * pages). An id that is not in the pool is a run of its
    own. `ids`: the result of `packed_range` for the pool.

    >>> page_runs(np.array([7, 8, 9, 3], np.int32).tobytes(), packed_range(10))
    [(7, 10), (3, 4)]
    """
    runs: Runs = []
    at, end = 0, len(packed)
    while at < end:
        seem_short = at < _FIRST_RUNS * SHORT_PAGES * PAGE_ID_BYTES < end // MAX_RUNS
        if len(runs) == MAX_RUNS or (len(runs) == _FIRST_RUNS and seem_short):
            return None
        # As a number without a sign: a negative id is then far beyond `ids`, like any other that is
        # not in the pool.
        first = int.from_bytes(packed[at : at + PAGE_ID_BYTES], sys.byteorder)
        rest = packed[at:] if at else packed
        start = first * PAGE_ID_BYTES
        if ids.startswith(rest, start):
            count = len(rest) // PAGE_ID_BYTES
        else:
            # The ids by which both runs begin alike; 1 at least.
            known = np.frombuffer(ids[start : start + len(rest)], np.int32)
            differs = known != np.frombuffer(rest, np.int32, len(known))
            count = max(1, int(differs.argmax()) or len(known)) if len(known) else 1
        runs.append((first, first + count))
        at += count * PAGE_ID_BYTES
    return runs
