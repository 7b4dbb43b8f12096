"""The state of each page of the pool, one per page, and the only transitions between them.

    FREE -> OWNED     alloc          OWNED -> HELD                hold (for a room, say)
    OWNED -> FREE     free           HELD -> QUARANTINED          quarantine
    OWNED -> CACHED   cache          HELD, QUARANTINED -> FREE    release
    CACHED -> OWNED   uncache

Reserved pages are outside of this: they are RESERVED from the start, and stay so.

Every transition is all or nothing. A page out of range, named twice or in another state raises, and
nothing changes. The states are bytes in one array, so a call checks and moves its pages in
a few vector operations; `FreeRuns` keeps the free ones. Nothing else is linear in the pool.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from prefixkv.errors import InternalError, OutOfPagesError, PageStateError, check_laws
from prefixkv.paging import MAX_INDEX, Index, PageIds, Pages, Where, as_pages
from prefixkv.settings import check_whole, whole_count


class PageState(enum.IntEnum):
    """The holder of a page: see `PageAllocator` for what each state means.

    FREE: none. OWNED: a request, or the caller between two moves. CACHED: the tree. HELD: a room
    that a peer may still write. QUARANTINED: such a room, after its deadline for proof. RESERVED:
    the engine itself, for padding.
    """

    FREE = 0
    OWNED = 1
    CACHED = 2
    HELD = 3
    QUARANTINED = 4
    RESERVED = 5


# Plain ints: an enum member costs a microsecond in numpy.
_FREE, _OWNED, _CACHED, _HELD, _QUARANTINED, _RESERVED = range(6)
_RUN_OF = [bytes([state]) for state in range(6)]  # of one page
_PACKED = 4  # bytes an id has


class PageAllocator:
    """States of the pages 0..num_pages-1, all FREE at first but `reserved_pages` in front. Owner:
    the scheduler's thread.

    Page ids come in as int32 arrays, as any sequence of integers, or packed, as bytes; in any
    order. They go out as int32 arrays that are the caller's own.

    >>> pages = PageAllocator(8)
    >>> pages.alloc(3).tolist(), pages.alloc(2).tolist()
    ([0, 1, 2], [3, 4])
    >>> pages.free([1, 2])
    >>> pages.free_runs()
    [(1, 2), (5, 3)]
    >>> pages.alloc(2).tolist()  # the shortest run that is long enough
    [1, 2]
    >>> pages.hold([3, 4], owner="room 7")  # a peer may still write them
    >>> pages.free_pages, pages.release("room 7"), pages.free_pages
    (3, 2, 5)
    """

    def __init__(self, num_pages: int, reserved_pages: int = 0) -> None:
        check_whole("num_pages", num_pages, 1, MAX_INDEX)
        check_whole("reserved_pages", reserved_pages, 0, num_pages - 1)
        self.num_pages = num_pages
        # All ids in order, packed: any run of pages is a slice of it, recognised by one memcmp.
        self._ids = np.arange(num_pages, dtype=np.int32).tobytes()
        # The states are the truth: free runs and counts follow from them.
        self._state = np.zeros(num_pages, np.uint8)
        self._states = self._state.data  # the same memory, faster for a run
        self._runs = FreeRuns(num_pages)
        self._counts = [num_pages, 0, 0, 0, 0, 0]  # by state
        # Every page HELD or QUARANTINED, by its owner; an owner may also hold none.
        self._held: dict[Hashable, list[Index]] = {}
        if reserved_pages:
            # All pages are one free run, so its first ones are taken.
            self._runs.take(reserved_pages)
            self._set(slice(0, reserved_pages), reserved_pages, _FREE, _RESERVED)

    # --- transitions ------------------------------------------------------------------------------

    def alloc(self, num_pages: int) -> Pages:
        """Take free pages (FREE -> OWNED) and return their ids, ascending, in the fewest runs.

        Raises, with nothing taken, OutOfPagesError: fewer pages are free; CallerError: the number
        is negative or not whole.
        """
        num_pages = whole_count("num_pages", num_pages)
        if num_pages > self._counts[_FREE]:
            raise OutOfPagesError(needed=num_pages, free=self._counts[_FREE])
        if num_pages == 0:
            return np.empty(0, np.int32)
        if (start := self._runs.take_run(num_pages)) is not None:
            self._set(slice(start, start + num_pages), num_pages, _FREE, _OWNED)
            return np.arange(start, start + num_pages, dtype=np.int32)
        where = self._runs.take(num_pages)
        self._set(where, num_pages, _FREE, _OWNED)
        return where.astype(np.int32)

    def free(self, pages: PageIds | bytes) -> None:
        """Free pages (OWNED -> FREE). Raises PageStateError, with nothing changed."""
        where, num_pages = self.checked(pages)
        if num_pages:
            self._set(where, num_pages, _OWNED, _FREE)
            self._runs.add(where)

    def cache(self, pages: PageIds | bytes) -> None:
        """Mark pages as the tree's (OWNED -> CACHED). Raises PageStateError, with nothing
        changed."""
        self._set(*self.checked(pages), _OWNED, _CACHED)

    def cache_owned(self, where: Where, num_pages: int) -> None:
        """As `cache`, of what `checked` has returned: no page may have changed since."""
        self._set(where, num_pages, _OWNED, _CACHED)

    def uncache(self, pages: PageIds | bytes) -> None:
        """Take pages back from the tree (CACHED -> OWNED). Raises PageStateError, with nothing
        changed."""
        self._set(*self.checked(pages, _CACHED), _CACHED, _OWNED)

    def hold(self, pages: PageIds | bytes, owner: Hashable) -> None:
        """Let `owner`, a room, keep pages that a peer may still write (OWNED -> HELD), until
        `release`.

        An owner may hold more in a later call, and may hold none: it exists until its release all
        the same. Raises PageStateError, with nothing changed, for a page that is not OWNED.
        """
        # First: it raises for an owner without a hash, which must change nothing.
        hash(owner)
        where, _ = self.checked(pages)
        ascending: Index = np.arange(where.start, where.stop) if type(where) is slice else where
        self._held.setdefault(owner, []).append(ascending)
        self._set(ascending, len(ascending), _OWNED, _HELD)

    def quarantine(self, owner: Hashable) -> int:
        """Mark what `owner` holds as overdue (HELD -> QUARANTINED): no proof came by its deadline.
        Return how many pages. Raises PageStateError for an unknown owner, or one in quarantine."""
        pages = self._pages_of(owner)
        # The owner may have come to hold more since an earlier quarantine.
        held = pages[self._state[pages] == _HELD]
        if len(pages) and not len(held):
            raise self._fault(pages.astype(np.int32).tobytes(), _HELD)
        self._set(held, len(held), _HELD, _QUARANTINED)
        return len(held)

    def release(self, owner: Hashable) -> int:
        """Free all that `owner` holds (HELD, QUARANTINED -> FREE), and return how many pages. Only
        with proof that no write can land any more. Raises PageStateError for an unknown owner."""
        pages = np.sort(self._pages_of(owner))
        del self._held[owner]
        if len(pages):
            num_quarantined = int(np.count_nonzero(self._state[pages] == _QUARANTINED))
            self._counts[_QUARANTINED] -= num_quarantined
            self._counts[_HELD] -= len(pages) - num_quarantined
            self._counts[_FREE] += len(pages)
            self._state[pages] = _FREE
            self._runs.add(pages)
        return len(pages)

    def _set(self, where: Where, num_pages: int, before: int, after: int) -> None:
        """The caller has checked the pages."""
        counts = self._counts
        if type(where) is slice:
            self._states[where] = _RUN_OF[after] * num_pages
        else:
            self._state[where] = after
        counts[before] -= num_pages
        counts[after] += num_pages

    # --- what is where ----------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        return self._counts[_FREE]

    @property
    def owned_pages(self) -> int:
        return self._counts[_OWNED]

    @property
    def cached_pages(self) -> int:
        return self._counts[_CACHED]

    @property
    def held_pages(self) -> int:
        return self._counts[_HELD]

    @property
    def quarantined_pages(self) -> int:
        return self._counts[_QUARANTINED]

    def counts(self) -> dict[str, int]:
        """Return the number of pages in each state, without those that are reserved."""
        return {state.name.lower(): self._counts[state] for state in list(PageState)[:_RESERVED]}

    def state(self, page: int) -> PageState:
        """Return the state of one page. Raises PageStateError if it is outside the pool."""
        if not 0 <= page < self.num_pages:
            raise PageStateError(f"page {page} is not in [0, {self.num_pages})")
        return PageState(int(self._state[page]))

    def pages_in(self, state: PageState) -> Pages:
        """Return all pages in `state`, ascending. O(num_pages)."""
        return np.flatnonzero(self._state == int(state)).astype(np.int32)

    def owners(self) -> list[Hashable]:
        """Return the owners that hold pages (or none), in the order of their first `hold`."""
        return list(self._held)

    def holds(self, owner: Hashable) -> bool:
        """Return whether `owner` has called `hold` and was not released since. O(1)."""
        return owner in self._held

    def held_by(self, owner: Hashable) -> Pages:
        """Return the HELD and QUARANTINED pages of `owner`, ascending; none if it is unknown."""
        pages = np.sort(self._pages_of(owner)) if owner in self._held else np.empty(0)
        return pages.astype(np.int32)

    def free_runs(self) -> list[tuple[int, int]]:
        """Return the runs of the free pages as (first page, pages), ascending. O(num_pages)."""
        return self._runs.runs()

    # --- checks -----------------------------------------------------------------------------------

    def _pages_of(self, owner: Hashable) -> Index:
        try:
            held = self._held[owner]
        except KeyError:
            raise PageStateError(f"{owner!r} holds no pages") from None
        return held[0] if len(held) == 1 else np.concatenate(held)

    def checked(self, pages: PageIds | bytes, state: int = _OWNED) -> tuple[Where, int]:
        """Return where pages are, and how many. Raises PageStateError unless all are in `state`,
        each once."""
        if type(pages) is bytes:
            packed = pages
            if len(packed) % _PACKED:
                raise PageStateError(f"{len(packed)} bytes are no packed page ids")
        else:
            packed = as_pages(pages).tobytes()
        num_pages = len(packed) // _PACKED
        if num_pages == 0:
            return slice(0, 0), 0
        # Bytes are compared, searched and counted in a fraction of the time of numpy's own calls.
        # 1. One run within the pool, the usual case: ids are in order and in range if they equal a
        #    slice of all ids, so only their states are left to check.
        first = int.from_bytes(packed[:_PACKED], "little")
        if self._ids.startswith(packed, _PACKED * first):
            run = slice(first, first + num_pages)
            if self._states[run].tobytes().count(state) == num_pages:
                return run, num_pages
            raise self._fault(packed, state)
        # 2. Any other pages. Sorted, so that the ends show the range and neighbours show
        #    duplicates. The range is tested before the states are indexed: numpy would take -1 for
        #    the last page.
        ascending = np.frombuffer(packed, np.int32).astype(np.intp)
        ascending.sort()
        if (
            ascending[0] < 0
            or ascending[-1] >= self.num_pages
            or b"\1" in (ascending[1:] == ascending[:-1]).tobytes()
            or self._state[ascending].tobytes().count(state) != num_pages
        ):
            raise self._fault(packed, state)
        return ascending, num_pages

    def _fault(self, packed: bytes, state: int) -> PageStateError:
        seen, pages = set(), np.frombuffer(packed, np.int32)
        for page in pages.tolist():
            if not 0 <= page < self.num_pages:
                return PageStateError(f"page {page} is not in [0, {self.num_pages})")
            if page in seen:
                return PageStateError(f"page {page} is named twice")
            if self._state[page] != state:
                return PageStateError(
                    f"page {page} is {self.state(page).name}, must be {PageState(state).name}"
                )
            seen.add(page)
        raise InternalError(f"no fault found in {pages!r}")

    def check_invariants(self) -> None:
        """Check every law. O(num_pages). Raises InternalError with the state."""
        counts = np.bincount(self._state, minlength=6)
        is_kept = (self._state == _HELD) | (self._state == _QUARANTINED)
        kept = np.flatnonzero(is_kept).tolist()
        listed = [page for parts in self._held.values() for part in parts for page in part.tolist()]
        laws = {
            "each page is in one of the six states": len(counts) == 6,
            "each counter is the number of pages in its state": counts.tolist() == self._counts,
            "free + owned + cached + held + quarantined + reserved = all": sum(self._counts)
            == self.num_pages,
            "held and quarantined pages have one owner, others none": kept == sorted(listed),
        }
        check_laws(laws, f"counts {self._counts}", f"{len(self._held)} owners")
        self._runs.check_invariants(self._state == _FREE)


# --- free pages -----------------------------------------------------------------------------------

# Maximal runs: taking pages takes the fewest runs possible, and what comes back is merged. Two
# arrays hold a run's length at its first page and behind its last, so a freed run finds its
# neighbours in O(1). Dictionaries file runs by length and first page. When many runs come back,
# only those with a neighbour are merged one by one; the others are entered together.
#
# To take n pages: the shortest run of at least n, else all of the longest run, and so on. No other
# choice has fewer runs.

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
