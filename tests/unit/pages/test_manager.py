"""The region bookkeeping of requests' pages, against a model that knows what each page was written
with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import PageOptions
from prefixkv.errors import (
    CapacityError,
    InternalError,
    OutOfPagesError,
    PageStateError,
    UserErrors,
)
from prefixkv.pages.allocator import PageState
from prefixkv.pages.manager import PageManager, RequestPages
from prefixkv.paging import pages_for
from prefixkv.protocol.ids import RoomKey
from prefixkv.ranks.row_log import RankLog, RankSizes, RowFollower

PAGE_SIZE = 2


def key_of(tokens: list[int], namespace: Any = None) -> RadixKey:
    return RadixKey(tokens, namespace)


def states(manager: PageManager) -> dict[str, int]:
    counts = {state.name: len(manager.allocator.pages_in(state)) for state in PageState}
    return {name: count for name, count in counts.items() if count}


def opened(
    manager: PageManager, tokens: list[int], num_pages: int | None = None
) -> tuple[RequestPages, RadixKey]:
    """A request of these tokens, its prefix locked, its KV written."""
    key = key_of(tokens)
    match = manager.match(key)
    num_pages = pages_for(len(tokens), PAGE_SIZE) if num_pages is None else num_pages
    return manager.open(
        match, num_pages - (match.prefix_len // PAGE_SIZE if match else 0), 0.0
    ), key


# --- the regions, one by one ----------------------------------------------------------------------


def test_whole_pages_become_the_trees_and_the_tail_stays() -> None:
    manager = PageManager(8, PAGE_SIZE, 4)
    pages, key = opened(manager, [1, 2, 3, 4, 5], num_pages=4)
    row = manager.pages(pages).tolist()
    assert (pages.num_locked, pages.num_own) == (0, 4)
    manager.cache_unfinished(pages, key, 0.0)
    assert manager.pages(pages).tolist() == row, "the tree has taken over the pages as they are"
    assert (pages.num_locked, pages.num_own) == (2, 2)
    assert manager.match(key_of([1, 2, 3, 4, 5, 6])).pages.tolist() == row[:2]
    assert (manager.cache.protected_pages, states(manager)) == (
        2,
        {"FREE": 4, "OWNED": 2, "CACHED": 2},
    )
    manager.cache_finished(pages, key, 0.0)
    assert (manager.cache.protected_pages, states(manager)) == (0, {"FREE": 6, "CACHED": 2})


def test_a_match_is_locked_before_pages_are_evicted_for_what_it_lacks() -> None:
    """It is the first that would go: both its leaf is the oldest, and nothing else is left free."""
    manager = PageManager(6, PAGE_SIZE, 4, options=PageOptions(policy="lru"))
    manager.cache_finished(*opened(manager, list(range(1, 9))), 1.0)
    manager.cache_finished(*opened(manager, list(range(50, 54))), 2.0)
    cached = manager.match(key_of([*range(1, 10)])).pages.tolist()
    pages, _ = opened(manager, list(range(1, 13)))
    row = manager.pages(pages).tolist()
    assert (len(cached), row[:4], len(set(row))) == (4, cached, 6)
    assert states(manager) == {"OWNED": 2, "CACHED": 4}
    manager.check_invariants()


@pytest.mark.parametrize(("reserve", "free"), [(0, 0), (2, 2), (100, 6)])
def test_where_pages_are_missing_a_reserve_is_evicted_with_them(reserve: int, free: int) -> None:
    manager = PageManager(12, PAGE_SIZE, 4, options=PageOptions(evict_reserve_pages=reserve))
    for start in (10, 30):
        manager.cache_finished(*opened(manager, list(range(start, start + 10))), 0.0)
    assert states(manager) == {"FREE": 2, "CACHED": 10}
    small, _ = opened(manager, [1, 2, 3, 4])
    assert manager.evicted_pages == 0, "nothing is evicted while nothing is missing"
    version = manager.version
    pages, _ = opened(manager, list(range(50, 58)))
    assert (len(manager.pages(pages)), manager.evicted_pages) == (4, 4 + free)
    assert states(manager) == {"OWNED": 6} | ({"FREE": free} if free else {}) | (
        {"CACHED": 6 - free} if free < 6 else {}
    )
    assert manager.version == version, "which makes no room that was not there"
    with pytest.raises(OutOfPagesError):
        opened(manager, list(range(70, 84)))
    assert manager.evicted_pages == 4 + free, "nothing is evicted in vain"
    manager.drop(pages)
    manager.drop(small)
    manager.check_invariants()


@pytest.mark.parametrize("joins", [0, 2], ids=["all new", "behind what another has cached"])
@pytest.mark.parametrize(
    ("place", "page", "message"),
    [
        (2, 0, "page 0 is CACHED, must be OWNED"),
        (2, 11, "page 11 is FREE, must be OWNED"),
        (2, "of a room", "is HELD, must be OWNED"),
        (2, 12, r"page 12 is not in \[0, 12\)"),
        (3, -1, r"page -1 is not in"),
        (3, "the first", "is named twice"),
    ],
)
def test_the_tree_is_given_no_page_that_is_not_the_request_s_own(
    place: int, page: int | str, message: str, joins: int
) -> None:
    """The allocator looks at them, the tree does not look again: so nothing may get past it."""
    manager = PageManager(12, PAGE_SIZE, 4)
    cached, cached_key = opened(manager, [7, 8])
    manager.cache_unfinished(cached, cached_key, 0.0)
    pages, key = opened(manager, [1, 2, 3, 4, 5, 6, 9, 9])
    if joins:
        other, other_key = opened(manager, [1, 2, 3, 4])
        manager.cache_unfinished(other, other_key, 0.0)
    manager.allocator.hold(others := manager.allocator.alloc(2), "a room")
    row = manager.table.array[pages.row]
    row[place] = {"the first": row[0], "of a room": others[0]}.get(page, page)
    before = states(manager), manager.cache.dump(), manager.table.array.tolist()
    with pytest.raises(PageStateError, match=message):
        manager.cache_unfinished(pages, key, 0.0)
    assert (states(manager), manager.cache.dump(), manager.table.array.tolist()) == before
    assert pages.num_locked == 0


@pytest.mark.parametrize("being_read", [False, True])
def test_duplicates_are_repointed_and_freed_when_nothing_reads_them(being_read: bool) -> None:
    manager = PageManager(12, PAGE_SIZE, 4)
    (first, first_key), (second, second_key) = (
        opened(manager, [1, 2, 3, 4]),
        opened(manager, [1, 2, 3, 4, 5, 6]),
    )
    own = manager.pages(second).tolist()
    manager.cache_unfinished(first, first_key, 0.0)
    manager.cache_unfinished(second, second_key, 0.0, being_read=being_read)
    assert manager.pages(second).tolist() == manager.pages(first).tolist() + own[2:]
    assert (second.num_locked, second.num_own) == (3, 0)
    kept = [manager.allocator.state(page) for page in own]
    assert kept == [PageState.OWNED if being_read else PageState.FREE] * 2 + [PageState.CACHED]
    manager.drop(second)
    assert [manager.allocator.state(page) for page in own] == [PageState.FREE] * 2 + [
        PageState.CACHED
    ]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_nothing_new_to_cache_changes_nothing(tokens: list[int]) -> None:
    manager = PageManager(8, PAGE_SIZE, 4)
    opened_pages, key = opened(manager, tokens)
    manager.cache_unfinished(opened_pages, key, 0.0)
    lock, version, before = opened_pages.lock, manager.version, states(manager)
    manager.cache_unfinished(opened_pages, key, 0.0)
    assert (opened_pages.lock, manager.version, states(manager)) == (lock, version, before)


def test_a_request_that_joins_is_one_visitor_of_all_that_it_found() -> None:
    """Policies count who used a page: the pages cached before, those that were on their way, and
    its own."""
    manager = PageManager(12, PAGE_SIZE, 4, options=PageOptions(policy="lfu"))
    first, first_key = opened(manager, [1, 2])
    manager.cache_finished(first, first_key, 0.0)
    owner, owner_key = opened(manager, [1, 2, 3, 4])
    key = key_of([1, 2, 3, 4, 5, 6])
    joiner = manager.open(manager.match(key), 1, 0.0, owner, 2)
    manager.cache_unfinished(owner, owner_key, 0.0)
    manager.lock_joined(joiner, key, 0.0)
    manager.cache_unfinished(joiner, key, 0.0)
    for pages in (owner, joiner):
        manager.drop(pages)
    [node] = manager.cache.nodes()
    marks = [*(node.steps or ()), (node.end, node.mark)]
    visits = {page: sum(mark[0] for depth, mark in marks if depth >= page) for page in (1, 2, 3)}
    assert visits == {1: 3, 2: 2, 3: 1}


def test_what_was_joined_before_a_flush_is_not_what_the_tree_has_since() -> None:
    manager = PageManager(12, PAGE_SIZE, 4)
    owner, key = opened(manager, [1, 2, 3, 4])
    joiner = manager.open(manager.match(key), 0, 0.0, owner, 2)
    manager.flush()
    manager.cache_finished(*opened(manager, [1, 2, 3, 4]), 0.0)
    with pytest.raises(InternalError, match="2 pages were joined"):
        manager.lock_joined(joiner, key, 0.0)
    for pages in (owner, joiner):
        manager.drop(pages)
    assert manager.cache.protected_pages == 0


def test_with_caching_off_nothing_is_matched_or_kept() -> None:
    manager = PageManager(8, PAGE_SIZE, 4, options=PageOptions(caching=False))
    pages, key = opened(manager, [1, 2, 3, 4])
    assert pages.lock is None
    manager.cache_unfinished(pages, key, 0.0)
    manager.cache_finished(pages, key, 0.0, continues=True)
    assert states(manager) == {"FREE": 8}


def test_what_is_held_comes_back_by_release_only() -> None:
    manager = PageManager(8, PAGE_SIZE, 4)
    pages, key = opened(manager, [1, 2, 3, 4])
    manager.cache_unfinished(pages, key, 0.0)
    key.extend([5, 6])
    manager.grow_many([pages], 0.0)
    manager.hold(pages, "room")
    assert states(manager) == {"FREE": 5, "CACHED": 2, "HELD": 1}, (
        "the tree's pages are nobody's to hold"
    )
    assert (manager.quarantine("room"), manager.allocator.holds("room")) == (1, True)
    assert (manager.release("other"), manager.release("room"), manager.release("room")) == (0, 1, 0)
    assert states(manager) == {"FREE": 6, "CACHED": 2}


def test_after_a_flush_those_that_run_cache_nothing_and_their_pages_come_back() -> None:
    manager = PageManager(12, PAGE_SIZE, 4)
    idle, idle_key = opened(manager, [7, 7])
    manager.cache_finished(idle, idle_key, 0.0)
    locked, locked_key = opened(manager, [1, 2, 3, 4])
    manager.cache_unfinished(locked, locked_key, 0.0)
    moving, moving_key = opened(manager, [5, 6])
    assert manager.flush() == 1
    manager.cache_unfinished(moving, moving_key, 0.0)
    assert moving.num_own == 1
    for pages, key in ((moving, moving_key), (locked, locked_key)):
        manager.cache_finished(pages, key, 0.0, continues=True)
    assert states(manager) == {"FREE": 12}
    after, after_key = opened(manager, [1, 2])
    manager.cache_finished(after, after_key, 0.0)
    assert states(manager) == {"FREE": 11, "CACHED": 1}


def test_the_version_grows_whenever_there_may_be_more_room_or_more_to_match() -> None:
    manager = PageManager(8, PAGE_SIZE, 4)
    pages, key = opened(manager, [1, 2, 3, 4])
    other, _ = opened(manager, [5])

    def grew(act: Any, *args: Any) -> bool:
        before = manager.version
        act(*args)
        return manager.version > before

    assert grew(manager.cache_unfinished, pages, key, 0.0)
    assert grew(manager.hold, other, "room")
    assert grew(manager.release, "room")
    assert grew(manager.drop, pages)
    assert not grew(manager.match, key)
    assert grew(manager.flush)


# --- the model ------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass(eq=False)
class Live:
    pages: RequestPages
    key: RadixKey
    epoch: int
    cacheable: bool
    duplicates: list[int] = field(default_factory=list)
    joined: Live | None = None

    def written(self, page: int) -> tuple[Any, ...]:
        """What page number `page` of the request has been written with: all tokens before its
        end."""
        return (
            self.epoch,
            self.key.namespace,
            *self.key.tokens()[: (page + 1) * PAGE_SIZE].tolist(),
        )

    def num_cached(self) -> int:
        """Pages of its row that the tree has: locked by itself, or by those it waits for."""
        joined = min(self.joined.num_cached(), self.pages.num_shared) if self.joined else 0
        return max(self.pages.num_locked, joined)


class Books(RuleBasedStateMachine):
    """Rank 0's pages, a rank that follows them, and for every page what it was written with."""

    @initialize(num_pages=st.integers(6, 20), policy=st.sampled_from(["lru", "lfu"]))
    def start(self, num_pages: int, policy: str) -> None:
        self.log = RankLog()
        self.log.sizes = RankSizes("decode", num_pages, PAGE_SIZE, 4)
        self.follower = RowFollower(self.log.sizes)
        self.manager = PageManager(num_pages, PAGE_SIZE, 4, options=PageOptions(policy=policy))
        self.live: list[Live] = []
        self.content: dict[int, tuple[Any, ...]] = {}
        self.rooms: list[RoomKey] = []
        self.num_rooms = 0
        self.now_s = 0.0

    def _write(self, live: Live, first_page: int) -> None:
        row = self.manager.pages(live.pages).tolist()
        for page in range(first_page, len(row)):
            self.content[row[page]] = live.written(page)

    def _time(self) -> float:
        self.now_s += 1.0
        return self.now_s

    @rule(
        tokens=TOKENS,
        namespace=st.sampled_from([None, "lora"]),
        cacheable=st.booleans(),
        reserve=st.integers(0, 2),
    )
    def open(self, tokens: list[int], namespace: Any, cacheable: bool, reserve: int) -> None:
        manager, key = self.manager, RadixKey(tokens, namespace)
        match = manager.match(key, cacheable)
        prefix_pages, unprotected = (
            (match.prefix_len // PAGE_SIZE, match.unprotected_pages) if match else (0, 0)
        )
        num_new = pages_for(len(tokens), PAGE_SIZE) - prefix_pages + reserve
        fits = num_new <= manager.available_pages - unprotected
        if fits and manager.table.free_rows:
            pages = manager.open(match, num_new, self._time())
            assert (pages.num_locked, pages.num_pages) == (prefix_pages, prefix_pages + num_new), (
                "as the match said"
            )
            self.live.append(Live(pages, key, manager.epoch, cacheable))
            self._write(self.live[-1], prefix_pages)
        else:
            before = (
                states(manager),
                manager.cache.protected_pages,
                manager.table.free_rows,
                manager.evicted_pages,
            )
            with pytest.raises(CapacityError if not manager.table.free_rows else OutOfPagesError):
                manager.open(match, num_new, self._time())
            assert (
                states(manager),
                manager.cache.protected_pages,
                manager.table.free_rows,
                manager.evicted_pages,
            ) == before

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), common=st.integers(1, 4), tokens=TOKENS)
    def join(self, which: int, common: int, tokens: list[int]) -> None:
        """A request that begins like another, whose pages are not in the tree yet."""
        manager, owner = self.manager, self.live[which % len(self.live)]
        common = min(common, len(owner.key) // PAGE_SIZE)
        key = RadixKey(
            [*owner.key.tokens()[: common * PAGE_SIZE].tolist(), *tokens], owner.key.namespace
        )
        match = manager.match(key)
        num_locked, num_new = match.prefix_len // PAGE_SIZE, pages_for(len(key), PAGE_SIZE) - common
        fits = (
            num_new <= manager.available_pages - match.unprotected_pages and manager.table.free_rows
        )
        if not fits or num_locked >= common or not owner.cacheable or owner.epoch != manager.epoch:
            return
        if owner.pages.num_joined and common <= owner.pages.num_shared:
            return  # those pages are of the request that the owner joined: join that one
        pages = manager.open(match, num_new, self._time(), owner.pages, common)
        assert (pages.num_locked, pages.num_joined, pages.num_own) == (
            num_locked,
            common - num_locked,
            num_new,
        )
        self.live.append(Live(pages, key, manager.epoch, True, joined=owner))
        self._write(self.live[-1], common)

    def _joiners(self, owner: Live) -> list[Live]:
        return [live for live in self.live if live.joined is owner]

    def _settle(self, owner: Live) -> None:
        for live in self._joiners(owner):
            self.manager.lock_joined(live.pages, live.key, self._time())
            live.joined = None

    def _drop_joiners(self, owner: Live) -> None:
        for live in self._joiners(owner):
            self._drop_joiners(live)
            self.live.remove(live)
            self.manager.drop(live.pages)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), tokens=TOKENS)
    def generate(self, which: int, tokens: list[int]) -> None:
        live = self.live[which % len(self.live)]
        for token in tokens:
            if len(live.key) == live.pages.num_pages * PAGE_SIZE:
                if not self.manager.available_pages:
                    with pytest.raises(OutOfPagesError):
                        self.manager.grow_many([live.pages], self._time())
                    return
                self.manager.grow_many([live.pages], self._time())
            live.key.append(token)
            self._write(live, (len(live.key) - 1) // PAGE_SIZE)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 3), being_read=st.booleans())
    def cache_unfinished(self, which: int, being_read: bool) -> None:
        live = self.live[which % len(self.live)]
        if live.cacheable and live.joined is None:
            manager, pages, num_whole = self.manager, live.pages, len(live.key) // PAGE_SIZE
            before, was_locked, free = (
                manager.pages(pages).tolist(),
                pages.num_locked,
                manager.allocator.free_pages,
            )
            manager.cache_unfinished(pages, live.key, self._time(), being_read=being_read)
            row = manager.pages(pages).tolist()
            replaced = [page for page, now in zip(before, row, strict=True) if page != now]
            if live.epoch == manager.epoch:
                assert pages.num_locked == max(num_whole, was_locked)
                assert manager.match(live.key).pages.tolist() == row[:num_whole]
            else:
                assert not replaced
                assert pages.num_locked == was_locked
            if being_read:
                live.duplicates += replaced
            assert manager.allocator.free_pages == free + (0 if being_read else len(replaced))
            if live.epoch == manager.epoch:
                self._settle(live)

    @precondition(lambda self: self.live)
    @rule(
        which=st.integers(0, 3), how=st.sampled_from(["finish", "drop", "hold"]),
        continues=st.sampled_from([None, True, False]), keep=st.none() | st.integers(0, 12),
    )  # fmt: skip
    def end(self, which: int, how: str, continues: bool | None, keep: int | None) -> None:
        manager, live = self.manager, self.live[which % len(self.live)]
        if live.cacheable and live.joined is None and self._joiners(live):
            manager.cache_unfinished(live.pages, live.key, self._time())
            self._settle(live)
        self._drop_joiners(live)
        self.live.remove(live)
        if how == "finish" and live.cacheable and live.joined is None:
            there = manager.match(live.key).prefix_len
            key = live.key if keep is None else live.key.prefix(keep)
            manager.cache_finished(live.pages, key, self._time(), continues=continues)
            if live.epoch == manager.epoch:
                kept = len(live.key) if keep is None else min(keep, len(live.key))
                wanted = max(there, kept // PAGE_SIZE * PAGE_SIZE)
                assert manager.match(live.key).prefix_len == wanted
        elif how == "hold":
            own = manager.pages(live.pages).tolist()[live.pages.num_shared :]
            self.num_rooms += 1
            self.rooms.append(RoomKey(self.num_rooms, 0))
            manager.hold(live.pages, self.rooms[-1])
            assert manager.allocator.held_by(self.rooms[-1]).tolist() == sorted(own)
        else:
            manager.drop(live.pages)

    @precondition(lambda self: self.rooms)
    @rule(which=st.integers(0, 3), how=st.sampled_from(["release", "quarantine"]))
    def room(self, which: int, how: str) -> None:
        key = self.rooms[which % len(self.rooms)]
        if how == "release":
            self.rooms.remove(key)
            self.manager.release(key)
        elif not self.manager.allocator.quarantined_pages:
            self.manager.quarantine(key)

    @rule()
    def flush(self) -> None:
        for live in list(self.live):
            self._drop_joiners(live)
        self.manager.flush()
        assert self.manager.cache.num_pages == 0

    @invariant()
    def laws(self) -> None:
        manager = self.manager
        manager.check_invariants()
        owned: list[int] = []
        for live in self.live:
            row = manager.pages(live.pages).tolist()
            num_locked, num_shared = live.pages.num_locked, live.pages.num_shared
            assert (num_shared > num_locked) == (live.joined is not None)
            assert manager.table.length(live.pages.row) == live.pages.num_pages == len(row)
            for page in range(pages_for(len(live.key), PAGE_SIZE)):
                assert self.content[row[page]] == live.written(page), (
                    "a page holds other KV than its request's"
                )
            num_cached = live.num_cached()
            wanted = [PageState.CACHED] * num_cached + [PageState.OWNED] * (len(row) - num_cached)
            assert [manager.allocator.state(page) for page in row] == wanted
            owned += row[num_shared:] + live.duplicates
        assert sorted(owned) == manager.allocator.pages_in(PageState.OWNED).tolist(), (
            "each owned page is one request's"
        )
        self.follower.apply(self.log.take(manager))
        assert self.follower.is_like(manager), "the rank that follows has other rows"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for live in self.live:
            self.manager.drop(live.pages)
        for key in self.rooms:
            self.manager.release(key)
        self.manager.check_invariants()
        assert set(states(self.manager)) <= {"FREE", "CACHED"}
        assert self.manager.cache.protected_pages == self.manager.cache.num_locks == 0
        assert self.manager.cache.num_pages == self.manager.allocator.cached_pages
        assert self.manager.table.free_rows == 4
        self.manager.flush()
        assert states(self.manager) == {"FREE": self.manager.num_pages}


TestBooks = Books.TestCase


def test_no_two_calls_in_a_row_raise_what_the_user_s_code_did() -> None:
    """A loop whose policy raises at every pass gets the results of every second one."""
    errors = UserErrors()
    errors.raise_due()
    raised = []
    for number in range(4):
        errors.caught(ValueError(number))
        errors.caught(ValueError("and one more"))
        try:
            errors.raise_due()
        except ValueError as error:
            raised.append((number, str(error)))
    assert raised == [(0, "0"), (2, "1")]
    assert errors.num == 8
