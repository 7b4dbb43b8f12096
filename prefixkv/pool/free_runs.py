"""Free pages as maximal runs: hands out the fewest runs there can be, and merges what comes back.

Two arrays hold a run's length at its first page and just behind its last one, so a freed run meets both
neighbours in O(1), and many at once in a dozen vector operations. Runs are filed by length in stacks. An
entry is not looked for when its run is taken or merged: it turns stale, and is skipped when it comes up (it is
live while the run that begins there has the length it is filed under).

To take n pages: the shortest run of at least n if there is one, else the longest whole, and again for the
rest. No other choice has fewer runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from prefixkv.errors import InternalError
from prefixkv.pool.page_ids import Index

# With fewer runs in one call a loop over them is faster than the vector operations.
_LOOP_BELOW_RUNS = 24


class FreeRuns:
    """The maximal runs among pages 0..num_pages-1, all of them free at first. Owned by one `PageAllocator`.

    It trusts its caller: `add` gets pages that are not free, `take` is asked for no more than there are.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # The length of the free run that begins at a page / that ends just before it, 0 if none does. One entry
        # more than pages, so that no neighbour needs a bounds check.
        self._length_from = np.zeros(num_pages + 1, np.int32)
        self._length_to = np.zeros(num_pages + 1, np.int32)
        # The same memory for single elements, which a memoryview reads in a third of an ndarray's time.
        self._from = self._length_from.data
        self._to = self._length_to.data
        self._stacks: dict[int, list[int]] = {}  # length -> first pages, stale ones among them
        self._lengths: list[int] = []  # the keys of _stacks, ascending
        self._num_filed = 0  # since stale entries were last thrown out
        self._num_runs = 0
        self._put(0, num_pages)

    def __len__(self) -> int:
        """How many runs there are. O(1)."""
        return self._num_runs

    def runs(self) -> list[tuple[int, int]]:
        """All runs as (first page, pages), ascending. O(num_pages)."""
        starts = np.flatnonzero(self._length_from)
        return list(zip(starts.tolist(), self._length_from[starts].tolist(), strict=True))

    # --- out --------------------------------------------------------------------------------------

    def take(self, num_pages: int) -> Index:
        """Remove `num_pages` pages, at least one, and give back their ids, ascending. About 0.15 us a run."""
        # Bounds the stale entries by the pool's size, at a cost that their making has paid for.
        if self._num_filed > self._num_pages:
            self._refile()
        lengths = self._lengths
        starts: list[int] = []
        sizes: list[int] = []  # pages from each of the next counts[i] starts
        counts: list[int] = []
        missing = num_pages
        while missing:
            at = bisect_left(lengths, missing)
            fits = at < len(lengths)
            length = lengths[at] if fits else lengths[-1]
            found = self._pop(length, 1 if fits else missing // length)
            if fits and found:
                length, rest = missing, length - missing
                if rest:
                    self._put(found[0] + length, rest)
            missing -= length * len(found)
            starts += found
            sizes.append(length)
            counts.append(len(found))
        if len(starts) == 1:
            return np.arange(starts[0], starts[0] + num_pages)
        taken = np.array(sizes).repeat(counts)
        before = taken.cumsum() - taken  # pages in the runs before each
        pages: Index = np.arange(num_pages) + (np.array(starts) - before).repeat(taken)
        pages.sort()
        return pages

    def _pop(self, length: int, most: int) -> list[int]:
        """The first pages of up to `most` runs of this length, which are no runs any more."""
        stack = self._stacks[length]
        length_from, length_to = self._from, self._to
        starts: list[int] = []
        while stack and len(starts) < most:
            start = stack.pop()
            if length_from[start] == length:  # else stale
                length_from[start] = 0
                length_to[start + length] = 0
                starts.append(start)
        if not stack:
            del self._stacks[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._num_runs -= len(starts)
        return starts

    # --- back -------------------------------------------------------------------------------------

    def add(self, pages: Index) -> None:
        """Take back `pages`: ascending, no two alike, at least one. About 0.3 us a run."""
        first, last = int(pages[0]), int(pages[-1])
        if last - first == len(pages) - 1:
            self._add_run(first, last + 1)
            return
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
        left, right = self._to[start], self._from[end]
        if left:
            self._to[start] = 0
            start -= left
            self._num_runs -= 1
        if right:
            self._from[end] = 0
            end += right
            self._num_runs -= 1
        self._put(start, end - start)

    def _add_runs(self, starts: Index, ends: Index) -> None:
        """`_add_run` for many: the runs ascend and do not touch, but the free run between two may touch both."""
        length_from, length_to = self._length_from, self._length_to
        left, right = length_to[starts], length_from[ends]
        self._num_runs -= int(np.count_nonzero(left) + np.count_nonzero(right))
        # Where there is no neighbour, the entry cleared here is 0 already.
        length_to[starts] = 0
        length_from[ends] = 0
        starts = starts - left
        ends = ends + right
        length_from[starts] = 0
        length_to[ends] = 0
        # A free run between two of ours was counted as neighbour of both, and makes the three of them one.
        apart = ends[:-1] < starts[1:] + left[1:]
        if not apart.all():
            self._num_runs += int(np.count_nonzero(~apart))
            starts = starts[np.concatenate(([True], apart))]
            ends = ends[np.concatenate((apart, [True]))]
        lengths = ends - starts
        length_from[starts] = lengths
        length_to[ends] = lengths
        self._num_runs += len(starts)
        self._file(starts, lengths)

    def _put(self, start: int, length: int) -> None:
        """Enter a maximal run."""
        self._from[start] = length
        self._to[start + length] = length
        self._num_runs += 1
        self._num_filed += 1
        stack = self._stacks.get(length)
        if stack is None:
            self._stacks[length] = [start]
            insort(self._lengths, length)
        else:
            stack.append(start)

    def _file(self, starts: Index, lengths: npt.NDArray[np.signedinteger]) -> None:
        """Put runs on the stack of their length."""
        stacks = self._stacks
        for length, start in zip(lengths.tolist(), starts.tolist(), strict=True):
            stack = stacks.get(length)
            if stack is None:
                stacks[length] = [start]
                insort(self._lengths, length)
            else:
                stack.append(start)
        self._num_filed += len(starts)

    def _refile(self) -> None:
        """File every run anew, without stale entries. O(num_pages), about once in num_pages runs filed."""
        self._stacks.clear()
        self._lengths.clear()
        self._num_filed = 0
        starts = np.flatnonzero(self._length_from)[::-1]  # lowest page on top
        self._file(starts, self._length_from[starts])

    # --- laws -------------------------------------------------------------------------------------

    def check_invariants(self, free: npt.NDArray[np.bool_]) -> None:
        """Check against the pages that are free. O(num_pages). Raises InternalError."""
        edges = np.diff(np.concatenate(([False], free, [False])).astype(np.int8))
        expected = list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))
        from_start = [(start, start + length) for start, length in self.runs()]
        from_end = [(end - length, end) for end, length in enumerate(self._length_to.tolist()) if length]
        filed = {(start, start + length) for length, stack in self._stacks.items() for start in stack}
        laws = {
            "runs are the maximal runs of free pages": from_start == expected,
            "both ends of a run tell its length": from_end == expected,
            "every run is filed under its length": filed.issuperset(expected),
            "the run count is right": self._num_runs == len(expected),
            "the lengths are those of the stacks, ascending": self._lengths == sorted(self._stacks),
            "no stack is empty": all(self._stacks.values()),
        }
        if broken := [law for law, holds in laws.items() if not holds]:
            raise InternalError(f"broken: {'; '.join(broken)}; runs {from_start[:20]}, free {expected[:20]}")
