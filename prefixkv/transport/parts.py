"""The blocks of a write: flat indices into both sides' prepared lists, cut into bounded parts.

Indices go run by run, pages inside: NIXL merges neighbouring index pairs only inside one run, and
only when its blocks touch (stride = length) on both sides; that is the cheapest descriptor there
is. The runs are made in `runs.py`. Pages here are *unit pages* where the two sides have pages of
different sizes. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixkv.paging import Pages
from prefixkv.transport.runs import RunGroup, Runs, check_index_range


class Part(NamedTuple):
    """The content of one post: blocks `start` to `stop` of `group`, counted run by run, with the
    job's pages inside each run."""

    group: RunGroup
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.group.block_bytes


# --- indices ------------------------------------------------------------------------------------


def flat_indices(
    pages: Pages, num_runs: int, num_pages: int, start: int = 0, stop: int | None = None
) -> Pages:
    """Return the indices `run * num_pages + page` of a write's blocks, for every run and page, run
    by run, or a slice of that sequence for one part.

    The slice is computed without the rest, so a part of a large job costs only itself.

    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10).tolist()
    [4, 5, 14, 15]
    >>> flat_indices(np.array([4, 5], np.int32), num_runs=2, num_pages=10, start=1, stop=3).tolist()
    [5, 14]

    `pages`: int32, checked to lie in [0, num_pages). `start`, `stop`: positions in the sequence, 0
    <= start < stop <= num_runs * len(pages). Raises ConfigError: an index would not fit into an
    int32.
    """
    check_index_range(num_runs, num_pages)
    length = len(pages)
    stop = num_runs * length if stop is None else stop
    # Often a part lies in one run: then no table of runs and pages is built.
    first, last = start // length, (stop - 1) // length
    if first == last:
        return pages[start - first * length : stop - first * length] + np.int32(first * num_pages)
    bases = np.arange(first, last + 1, dtype=np.int32) * np.int32(num_pages)
    return (bases[:, None] + pages).ravel()[start - first * length : stop - first * length]


def part_indices(runs: Runs, part: Part, src_pages: Pages, dst_pages: Pages) -> tuple[Pages, Pages]:
    """Return the int32 indices of a part into the lists of both sides; pair i is one block."""
    first = part.group.first_run * len(src_pages)
    start, stop = first + part.start, first + part.stop
    src, dst = runs.src_positions, runs.dst_positions
    return (
        flat_indices(src.of(src_pages), runs.num_runs, src.num_positions, start, stop),
        flat_indices(dst.of(dst_pages), runs.num_runs, dst.num_positions, start, stop),
    )


def next_indices(
    runs: Runs, parts: list[Part], first: int, most: int, src_pages: Pages, dst_pages: Pages
) -> list[tuple[Pages, Pages]]:
    """Return `part_indices` of up to `most` parts from number `first` on, at least of one.

    Parts that follow each other in one group are worked out together: that takes one of them hardly
    longer, and between two posts, each of which moves more than the caches hold, this code is cold.
    """
    begun = parts[first]
    last = first + 1
    while last < min(first + most, len(parts)) and parts[last].group is begun.group:
        last += 1
    whole = begun._replace(stop=parts[last - 1].stop)
    src, dst = part_indices(runs, whole, src_pages, dst_pages)
    spans = [slice(one.start - begun.start, one.stop - begun.start) for one in parts[first:last]]
    return [(src[span], dst[span]) for span in spans]


# --- parts --------------------------------------------------------------------------------------


def cut_parts(
    runs: Runs, src_pages: Pages, dst_pages: Pages, max_bytes: int, max_descriptors: int
) -> list[Part]:
    """Cut a write into parts of at most `max_bytes` and `max_descriptors` after merging, each at
    least one block. O(len(pages) + parts).

    A post blocks its thread for its whole copy on some transports, and no other peer is served
    meanwhile: hence the bounds.
    """
    # Positions where a page does not continue its predecessor on both sides: each begins a
    # descriptor.
    steps = (np.diff(runs.src_positions.of(src_pages)) == 1) & (
        np.diff(runs.dst_positions.of(dst_pages)) == 1
    )
    breaks = np.flatnonzero(np.concatenate(([True], ~steps)))
    parts: list[Part] = []
    for group in runs.groups:
        parts.extend(_group_parts(group, len(src_pages), breaks, max_bytes, max_descriptors))
    return parts


def _group_parts(
    group: RunGroup,
    num_pages: int,
    breaks: npt.NDArray[np.intp],
    max_bytes: int,
    max_descriptors: int,
) -> Iterator[Part]:
    end = group.num_runs * num_pages
    most_blocks = max(1, max_bytes // group.block_bytes)
    # Blocks that do not touch never merge: one descriptor each.
    if not group.dense:
        most_blocks = min(most_blocks, max_descriptors)
    # With few pieces the byte bound always comes first, which spares the search.
    may_exceed = group.dense and max_descriptors < most_blocks
    start = 0
    while start < end:
        stop = min(start + most_blocks, end)
        if may_exceed:
            run, within = divmod(start, num_pages)
            # The part holds one descriptor, and one more for each break behind `start`. It ends at
            # the first break that would be too many.
            descriptor = run * len(breaks) + int(np.searchsorted(breaks, within, side="right"))
            run, nth = divmod(descriptor + max_descriptors - 1, len(breaks))
            stop = min(stop, run * num_pages + int(breaks[nth]))
        yield Part(group, start, stop)
        start = stop
