"""The pages of layers that keep the last tokens only: a window group's allocator and requests'
rows.

From `open` to its end a request has a *row* of fixed length, for its window and one engine step:

    first_page                                                         first_page + length
    |  shared: under checkpoints too  |  own, written  |  own, for what comes  |

As the window moves on (`slide`), own pages behind it go to the row's end to be written again. So a
running request needs no page more, and a token at n can read from n + 1 - window on. A checkpoint
on prefill keeps the pages before it (`share`): they are free with the last checkpoint or row that
counts them. A row counts passed ones until its request ends, since its device may still read them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import numpy as np

from prefixkv.errors import CallerError, InternalError, check_laws, shown
from prefixkv.pages.allocator import PageAllocator, PageState
from prefixkv.pages.table import UNUSED
from prefixkv.paging import Pages, pages_for

T = TypeVar("T")

_NO_ROW: Final = -1
_ALL_TOKENS: Final = 2**31  # more than a request has
_NONE: Final = np.empty(0, np.int32)


class GroupSpec(NamedTuple):
    """A window group: its name, its pages, and the tokens that its layers see.

    `step_tokens` is the most that the engine computes of a request between two calls about it.
    """

    name: str
    window: int
    num_pages: int
    step_tokens: int


class GroupStart(NamedTuple):
    """Where a request begins in the window groups: behind `num_tokens` tokens, of `end_pages` pages
    that it may come to have. `shared`: by group, the pages of the checkpoint from which it goes
    on."""

    num_tokens: int
    end_pages: int
    shared: tuple[Pages, ...] = ()

    def shared_in(self, number: int) -> Pages:
        return self.shared[number] if number < len(self.shared) else _NONE


class GroupPages(NamedTuple):
    """What a request has in one window group: int32 `ids` of its pages from `first_page` on. The
    token at position n is slot n % page_size of page ids[n // page_size - first_page]."""

    first_page: int
    ids: Pages


class TailGroup:
    """One window group of a worker. Owner: the scheduler's thread.

    `array` (int32 [max_requests, columns], C order; its memory never moves) and `first_pages` are
    for an attention kernel: by the request's row of the page table, its page ids, -1 where unused,
    and the page number of the first of them. `num_requests`: rows. `is_shared`: whether checkpoints
    keep pages of it.
    """

    def __init__(
        self, spec: GroupSpec, page_size: int, num_requests: int, is_shared: bool = False
    ) -> None:
        self.spec = spec
        self.name, self.window, num_pages, self.step_tokens = spec
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        # The most pages that the tokens before a page boundary, and these with a step, lie in.
        self.tail_pages = pages_for(self.window - 1, page_size)
        self.row_pages = (self.window + self.step_tokens + page_size - 3) // page_size + 1
        self.is_shared = is_shared
        self.array = np.full((num_requests, self.most_pages), UNUSED, np.int32)
        self.first_pages = np.zeros(num_requests, np.int32)
        self._first_page = self.first_pages.data  # the same memory, faster for single rows
        self._lengths = np.full(num_requests, _NO_ROW, np.int32)
        self._length_of = self._lengths.data
        # By row: how often what it names has changed, ever.
        self.changes = np.zeros(num_requests, np.int64)
        self._num_changes = self.changes.data
        # By page: how many checkpoints and rows have it, and how many of these may not give it up:
        # rows, checkpoints that are locked, and those that are not entered yet.
        self.refs = np.zeros(num_pages, np.int32)
        self.pins = np.zeros(num_pages, np.int32)
        self._num_loose = 0  # pages with a count and no pin
        self._passed: dict[int, list[Pages]] = {}  # by row: shared pages that it has moved past

    @property
    def most_pages(self) -> int:
        """Pages that one request may hold at once, those of a checkpoint included."""
        return self.row_pages + (self.tail_pages if self.is_shared else 0)

    def first_page(self, num_tokens: int) -> int:
        """Return the number of the first page that is needed behind `num_tokens` tokens.

        >>> group = TailGroup(GroupSpec("w", 9, 8, 1), page_size=4, num_requests=1)
        >>> [group.first_page(num_tokens) for num_tokens in (0, 8, 11, 12, 16)]
        [0, 0, 0, 1, 2]
        """
        return max(0, num_tokens + 1 - self.window) // self.page_size

    # --- room -------------------------------------------------------------------------------------

    def own_pages(self, start: GroupStart, number: int) -> int:
        there = self.first_page(start.num_tokens) + len(start.shared_in(number))
        return max(0, min(self.row_pages, start.end_pages - there))

    def available_pages(self, besides: Pages = _NONE) -> int:
        """Return the pages that are free, or checkpoints could give up, `besides` left out."""
        return self.allocator.free_pages + self._num_loose - self._loose(besides)

    def _loose(self, ids: Pages) -> int:
        return int(np.count_nonzero((self.refs[ids] > 0) & (self.pins[ids] == 0)))

    def add_counts(self, ids: Pages, refs: int, pins: int) -> None:
        """Add to the counts of these pages; those without a count are free."""
        before = self._loose(ids)
        self.refs[ids] += refs
        self.pins[ids] += pins
        self._num_loose += self._loose(ids) - before
        if refs < 0 and len(gone := ids[self.refs[ids] == 0]):
            self.allocator.uncache(gone)
            self.allocator.free(gone)

    # --- a request's life -------------------------------------------------------------------------

    def open(self, row: int, num_tokens: int, num_own: int, shared: Pages = _NONE) -> None:
        """Give a request its row: `num_own` new pages, behind those of a checkpoint. Raises
        OutOfPagesError, with nothing changed."""
        ids = self.allocator.alloc(num_own)
        if len(shared):
            self.add_counts(shared, 1, 1)
            ids = np.concatenate([shared, ids])
        self.array[row, : len(ids)] = ids
        self.first_pages[row] = self.first_page(num_tokens)
        self._lengths[row] = len(ids)
        self._num_changes[row] += 1

    def row(self, row: int) -> GroupPages:
        """Return a read-only view, valid until the row changes. Raises CallerError if not in
        use."""
        view = self.array[row, : self._length(row)]
        view.flags.writeable = False
        return GroupPages(int(self.first_pages[row]), view)

    def has_row(self, row: int) -> bool:
        return 0 <= row < len(self._length_of) and self._length_of[row] != _NO_ROW

    def _length(self, row: int) -> int:
        if not self.has_row(row):
            raise CallerError(f"row {row} of window group {self.name!r} is not in use")
        return self._length_of[row]

    def slide(self, row: int, num_tokens: int) -> None:
        """Move a row on: only the pages needed behind `num_tokens` tokens are read."""
        first, length = self.first_page(num_tokens), self._length(row)
        passed = first - self._first_page[row]
        if passed <= 0:
            return
        if passed > length:
            raise CallerError(
                f"window group {self.name!r}: {num_tokens} tokens, the row has pages "
                f"{self.first_pages[row]} to {self.first_pages[row] + length}"
            )
        self._num_changes[row] += 1
        ids = self.array[row, :length]
        out = ids[:passed].copy()
        # Own pages behind the others: what is computed next is written there.
        if not self.is_shared:
            ids[: length - passed] = ids[passed:]
            ids[length - passed :] = out
            self._first_page[row] = first
            return
        is_shared = self.refs[out] > 0
        if is_shared.any():
            self._passed.setdefault(row, []).append(out[is_shared])
        moved = np.concatenate([ids[passed:], out[~is_shared]])
        ids[len(moved) :] = UNUSED
        ids[: len(moved)] = moved
        self._first_page[row], self._lengths[row] = first, len(moved)

    def close(self, row: int) -> Pages:
        """End a request's row. Return its own pages, which are the caller's to free or hold."""
        length = self._length(row)
        ids = self.array[row, :length].copy()
        if self.is_shared:
            is_shared = self.refs[ids] > 0
            for shared in [*self._passed.pop(row, []), ids[is_shared]]:
                self.add_counts(shared, -1, -1)
            ids = ids[~is_shared]
        self.array[row, :length] = UNUSED
        self._lengths[row], self.first_pages[row] = _NO_ROW, 0
        return ids

    # --- checkpoints ------------------------------------------------------------------------------

    def num_replaced(self, row: int, depth: int, end_pages: int) -> int:
        """Return the pages that a request, which goes on to `end_pages`, needs for those that a
        checkpoint of its first `depth` pages would keep."""
        first, ids = self.row(row)
        own = int(np.count_nonzero(self.refs[ids] == 0))
        kept = self._tail(first, ids, depth)
        left = own - int(np.count_nonzero(self.refs[kept] == 0))
        return max(0, min(self.row_pages, end_pages - depth) - left)

    def share(self, row: int, depth: int, end_pages: int) -> Pages:
        """Let a checkpoint have the pages, all whole, before the end of a request's first `depth`;
        nothing before them is read any more. Return them, pinned. Raises OutOfPagesError if too few
        are free for those that the request needs instead."""
        # First, so that the row has room for what comes instead.
        self.slide(row, depth * self.page_size)
        new = self.allocator.alloc(self.num_replaced(row, depth, end_pages))
        first, ids = self.row(row)
        kept = self._tail(first, ids, depth).copy()
        mine = kept[self.refs[kept] == 0]
        self.allocator.cache(mine)
        # One count for the row, which still reads them, and one for the checkpoint.
        self.add_counts(mine, 1, 1)
        self.add_counts(kept, 1, 1)
        length = len(ids)
        self.array[row, length : length + len(new)] = new
        self._lengths[row] = length + len(new)
        self._num_changes[row] += 1
        return kept

    def _tail(self, first: int, ids: Pages, depth: int) -> Pages:
        start = self.first_page(depth * self.page_size)
        if not first <= start <= depth <= first + len(ids):
            raise InternalError(
                f"window group {self.name!r}: pages {start} to {depth} of a row that has {first} "
                f"to {first + len(ids)}"
            )
        return ids[start - first : depth - first]

    # --- laws -------------------------------------------------------------------------------------

    @property
    def rows_in_use(self) -> list[int]:
        """Rows that requests have, ascending; for audits."""
        return np.flatnonzero(self._lengths != _NO_ROW).tolist()

    def check_invariants(self, kept: Sequence[tuple[Pages, bool]] = ()) -> None:
        """Check the laws. `kept`: of each checkpoint, its pages, and whether it pins them. O(its
        size). Raises InternalError."""
        self.allocator.check_invariants()
        refs, pins = np.zeros_like(self.refs), np.zeros_like(self.pins)
        for ids, is_pinned in kept:
            refs[ids] += 1
            pins[ids] += is_pinned
        own: list[int] = []
        for row in self.rows_in_use:
            _, ids = self.row(row)
            is_shared = self.refs[ids] > 0
            own += ids[~is_shared].tolist()
            for shared in [ids[is_shared], *self._passed.get(row, [])]:
                refs[shared] += 1
                pins[shared] += 1
        columns = np.arange(self.array.shape[1])
        unused = columns >= np.maximum(self._lengths, 0)[:, None]
        owned = self.allocator.pages_in(PageState.OWNED).tolist()
        cached = self.allocator.pages_in(PageState.CACHED).tolist()
        laws = {
            "H11: every owned page of a window group is one request's": sorted(own) == owned,
            "H10: a window page is kept if and only if a checkpoint or a row has it": (
                cached == np.flatnonzero(self.refs > 0).tolist()
            ),
            "only rows have passed pages": self._passed.keys() <= set(self.rows_in_use),
            "they are counted": bool((refs == self.refs).all() and (pins == self.pins).all())
            and self._num_loose == np.count_nonzero((refs > 0) & (pins == 0)),
            "rows hold -1 behind their pages": bool((self.array[unused] == UNUSED).all()),
        }
        check_laws(laws, f"window group {self.name!r}", f"{owned} owned", f"{cached} cached")


def of_window(windows: Mapping[str, T], name: str) -> T:
    """Return what is of the window group of this name. Raises CallerError if there is none."""
    if not isinstance(name, str) or name not in windows:
        raise CallerError(f"there is no window group {shown(name)}")
    return windows[name]


def state_group(num_slots: int, num_requests: int) -> TailGroup:
    """Return the group of extra state: a request has one page, its slot, for any tokens."""
    return TailGroup(GroupSpec("state", 1, num_slots, 1), _ALL_TOKENS, num_requests)


class TailGroups(tuple[TailGroup, ...]):
    """Groups of one worker: those of windows, in the order of its layout, then the state's."""

    __slots__ = ()

    def named(self, name: str) -> TailGroup:
        """Return the group of this name. Raises CallerError if there is none."""
        return of_window({group.name: group for group in self}, name)

    def short_of(self, start: GroupStart) -> TailGroup | None:
        """Return the first group without room; None if all have room. What the request shares
        could not be given up."""
        for number, group in enumerate(self):
            available = group.available_pages(start.shared_in(number))
            if group.own_pages(start, number) > available:
                return group
        return None

    def open(
        self, row: int, start: GroupStart, make_room: Callable[[Sequence[int]], object]
    ) -> None:
        """Give a request that fits its row in each group; `make_room` has checkpoints give up what
        is needed. Where it raises, `free` takes back what there is."""
        needs = [group.own_pages(start, number) for number, group in enumerate(self)]
        make_room(needs)
        for number, group in enumerate(self):
            group.open(row, start.num_tokens, needs[number], start.shared_in(number))

    def counts(self) -> dict[str, int]:
        """Return how many pages of all window groups are in each state, 0 without any."""
        states = "free", "owned", "cached", "held", "quarantined"
        found = [group.allocator.counts() for group in self]
        total = {f"window_pages_{state}": sum(one[state] for one in found) for state in states}
        total["window_pages_held"] += total.pop("window_pages_quarantined")
        return total

    def num_replaced(self, row: int, depth: int, end_pages: int) -> list[int] | None:
        """By group `TailGroup.num_replaced`; None where the row has moved on, or too few pages
        are available."""
        if any(one.row(row).first_page > one.first_page(depth * one.page_size) for one in self):
            return None
        needs = [group.num_replaced(row, depth, end_pages) for group in self]
        has_room = all(n <= one.available_pages() for one, n in zip(self, needs, strict=True))
        return needs if has_room else None

    # The pages that a checkpoint keeps, by group; () if its model has no windows.

    def add_counts(self, windows: Sequence[Pages], refs: int, pins: int) -> None:
        for group, ids in zip(self, windows, strict=bool(windows)):
            group.add_counts(ids, refs, pins)

    def lacks(self, needs: Sequence[int]) -> bool:
        return any(g.allocator.free_pages < need for g, need in zip(self, needs, strict=False))

    def share(self, row: int, depth: int, end_pages: int) -> tuple[Pages, ...]:
        """`TailGroup.share` in each group, of which enough pages are free."""
        return tuple(group.share(row, depth, end_pages) for group in self)

    def promised(self, row: int, end_page: int) -> tuple[bytes, ...]:
        """By group, packed ids of a request's pages up to `end_page`: what prefill is to write."""
        found = []
        for group in self:
            first, ids = group.row(row)
            found.append(ids[: end_page - first].astype("<i4").tobytes())
        return tuple(found)

    def slide(self, row: int, num_tokens: int) -> None:
        """`TailGroup.slide` in each group."""
        for group in self:
            group.slide(row, num_tokens)

    # A load has no row in any group.

    def free(self, row: int) -> None:
        for group in self:
            if group.has_row(row):
                group.allocator.free(group.close(row))

    def hold(self, row: int, owner: Hashable) -> None:
        """End a request's row; `owner` holds its pages until `release`, and is known in any
        case."""
        for group in self:
            group.allocator.hold(group.close(row) if group.has_row(row) else _NONE, owner)
