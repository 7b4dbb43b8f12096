"""Free pages as maximal runs: gives out the fewest runs possible, and merges what comes back.

Two arrays hold a run's length at its first page and behind its last, so a freed run finds its
neighbours in O(1). Dictionaries file runs by length and first page. When many runs come back, only
those with a neighbour are merged one by one; the others are entered together.

To take n pages: the shortest run of at least n, else all of the longest run, and so on. No other
choice has fewer runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from prefixkv.errors import check_laws
from prefixkv.paging import Index, Where

# With fewer runs in one call a loop over them is faster than the vector operations.
_LOOP_BELOW_RUNS = 8


class FreeRuns:
    """The maximal runs among pages 0..num_pages-1, all free at first. Owned by one `PageAllocator`.

    It trusts its caller: `add` gets pages that are not free, `take` never more than there are.
    """

    def __init__(self, num_pages: int) -> None:
        # The length of the free run that begins at a page / that ends just before it, 0 if none
        # does. One entry more than pages, so that no neighbour needs a bounds check.
        self._length_from = np.zeros(num_pages + 1, np.int32)
        self._length_to = np.zeros(num_pages + 1, np.int32)
        # The same memory for single elements, which a memoryview reads in a third of an ndarray's
        # time.
        self._from = self._length_from.data
        self._to = self._length_to.data
        # First pages by length; of one length the run filed last is taken first.
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []  # the keys of _by_length, ascending
        self._put(0, num_pages)

    def runs(self) -> list[tuple[int, int]]:
        """Return all runs as (first page, pages), ascending. O(num_pages)."""
        starts = np.flatnonzero(self._length_from)
        return list(zip(starts.tolist(), self._length_from[starts].tolist(), strict=True))

    # --- out --------------------------------------------------------------------------------------

    def take(self, num_pages: int) -> Index:
        """Remove `num_pages` pages, at least one, and return their ids, ascending."""
        # Whole lengths first, then the part of a run that is left: the ends in the two arrays are
        # cleared below, for all runs at once.
        lengths = self._lengths
        starts: list[int] = []
        sizes: list[int] = []  # pages from each
        missing = num_pages
        while missing:
            # The shortest run that is long enough, else the longest. Of the latter as many as are
            # needed whole: they are all taken at once.
            at = bisect_left(lengths, missing)
            length = lengths[at] if at < len(lengths) else lengths[-1]
            found = self._pop(length, missing // length or 1)
            # Part of one run: its rest goes back as a run of its own. This ends the loop.
            if length > missing:
                self._put(found[0] + missing, length - missing)
                length = missing
            missing -= length * len(found)
            starts += found
            sizes += [length] * len(found)
        # Clear both ends of each run and list its pages: in a loop for a few runs, else as vectors.
        if len(starts) < _LOOP_BELOW_RUNS:
            parts: list[Index] = []
            for start, length in sorted(zip(starts, sizes, strict=True)):
                self._from[start] = self._to[start + length] = 0
                parts.append(np.arange(start, start + length))
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        firsts, taken = np.array(starts), np.array(sizes)
        self._length_from[firsts] = 0
        self._length_to[firsts + taken] = 0
        # Page i of the result is i plus its run's first page, less the pages of the runs before.
        firsts += taken - taken.cumsum()
        pages: Index = np.arange(num_pages) + firsts.repeat(taken)
        pages.sort()
        return pages

    def take_run(self, num_pages: int) -> int | None:
        """Remove `num_pages` pages of one run and return the first. None if no run is so long."""
        lengths = self._lengths
        at = bisect_left(lengths, num_pages)
        if at == len(lengths):
            return None
        length = lengths[at]
        runs = self._by_length[length]
        start, _ = runs.popitem()
        if not runs:
            del self._by_length[length], lengths[at]
        # The rest is a run of its own: its mark at the far end replaces that of the whole run.
        if length > num_pages:
            self._put(start + num_pages, length - num_pages)
        self._from[start] = self._to[start + num_pages] = 0
        return start

    def _pop(self, length: int, most: int) -> list[int]:
        """Return the first pages of up to `most` runs of this length, taken out of the file. Both
        arrays still have the length at their ends: the caller clears these."""
        runs = self._by_length[length]
        if most < len(runs):
            starts = [runs.popitem()[0] for _ in range(most)]
        else:
            starts = list(runs)
            self._drop_length(length)
        return starts

    def _drop_length(self, length: int) -> None:
        del self._by_length[length]
        del self._lengths[bisect_left(self._lengths, length)]

    # --- back -------------------------------------------------------------------------------------

    def add(self, pages: Where) -> None:
        """Add `pages`, at least one, ascending."""
        if type(pages) is slice:
            self._add_run(pages.start, pages.stop)
            return
        # A run ends where the next page is not the next id.
        first, last = int(pages[0]), int(pages[-1])
        (breaks,) = (pages[1:] - pages[:-1] != 1).nonzero()
        num_runs = len(breaks) + 1
        starts = np.empty(num_runs, np.intp)
        starts[0] = first
        starts[1:] = pages[breaks + 1]
        ends = np.empty(num_runs, np.intp)  # just behind the last page
        ends[:-1] = pages[breaks]
        ends[-1] = last
        ends += 1
        if num_runs < _LOOP_BELOW_RUNS:
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                self._add_run(start, end)
        else:
            self._add_runs(starts, ends)

    def _add_run(self, start: int, end: int) -> None:
        # `_to[start]`: a run that ends just before. `_from[end]`: one that begins just behind.
        left, right = self._to[start], self._from[end]
        if left:
            start -= left
            self._remove(start, left)
        if right:
            self._remove(end, right)
            end += right
        self._put(start, end - start)

    def _remove(self, start: int, length: int) -> None:
        runs = self._by_length[length]
        del runs[start]
        if not runs:
            self._drop_length(length)
        self._from[start] = self._to[start + length] = 0

    def _add_runs(self, starts: Index, ends: Index) -> None:
        """Add many runs, which ascend and do not touch each other."""
        meets = (self._length_to[starts] | self._length_from[ends]).astype(np.bool_)
        # 1. Those that touch a free run merge, one by one. Two of them may touch the same free run,
        #    so the second has to see what the first has made. The others still touch none then.
        if np.count_nonzero(meets):
            for start, end in zip(starts[meets].tolist(), ends[meets].tolist(), strict=True):
                self._add_run(start, end)
            starts, ends = starts[~meets], ends[~meets]
        # 2. The others are maximal as they are.
        lengths = ends - starts
        self._length_from[starts] = lengths
        self._length_to[ends] = lengths
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._file(start, length)

    def _put(self, start: int, length: int) -> None:
        """Enter a maximal run: both ends and the file."""
        self._from[start] = self._to[start + length] = length
        self._file(start, length)

    def _file(self, start: int, length: int) -> None:
        runs = self._by_length.get(length)
        if runs is None:
            self._by_length[length] = {start: None}
            insort(self._lengths, length)
        else:
            runs[start] = None

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self, free: npt.NDArray[np.bool_]) -> None:
        """Check the runs against the pages that are free. O(num_pages). Raises InternalError."""
        edges = np.diff(np.concatenate(([False], free, [False])).astype(np.int8))
        starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        expected = list(zip(starts.tolist(), ends.tolist(), strict=True))
        from_start = [(start, start + length) for start, length in self.runs()]
        from_end = [
            (end - length, end) for end, length in enumerate(self._length_to.tolist()) if length
        ]
        filed = [
            (start, start + length) for length, runs in self._by_length.items() for start in runs
        ]
        laws = {
            "runs are the maximal runs of free pages": from_start == expected,
            "both ends of a run tell its length": from_end == expected,
            "every run is filed under its length, and nothing else": sorted(filed) == expected,
            "the lengths are those that are there, ascending": self._lengths
            == sorted(self._by_length),
            "no length is without runs": all(self._by_length.values()),
        }
        check_laws(laws, f"runs {from_start[:20]}", f"free {expected[:20]}")
