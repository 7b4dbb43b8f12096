"""The contract of the radix cache, case by case: its dump and the readers of its changes
included."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

import benchmarks.policies.gated  # noqa: F401  makes it known by name
from prefixkv.cache.events import Cleared, Inserted, TakenOut
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import Use, policy_names
from prefixkv.cache.node import PAGE_ID_BYTES, Mark
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cache.results import PrefixLock, Releases
from prefixkv.errors import CallerError, InternalError, LockError, PageStateError


def filled(*runs: str, page_size: int = 1, policy: str = "lru") -> RadixCache:
    """A cache with these strings inserted, a letter a token; page ids are counted up."""
    cache = RadixCache(page_size=page_size, policy=policy)
    page = 0
    for run in runs:
        num_pages = len(run) // page_size
        cache.insert(tokens(run), np.arange(page, page + num_pages), now_s=float(page))
        page += num_pages
    cache.check_invariants()
    return cache


def tokens(run: str) -> list[int]:
    return [ord(letter) for letter in run]


def cached(cache: RadixCache, run: str) -> int:
    return cache.match_prefix(tokens(run)).prefix_len


def fails_unchanged(cache, error, call, *args, **kwargs):
    before = cache.dump()
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert cache.dump() == before
    cache.check_invariants()
    return str(caught.value)


# --- matching and inserting -----------------------------------------------------------------------


def test_looking_does_not_fragment():
    cache = RadixCache(page_size=1)
    run = np.random.default_rng(0).integers(0, 5, 2000)
    cache.insert(run, np.arange(2000))
    cache.insert(
        np.append(run[:900], run[:50] + 10), np.append(np.arange(900), np.arange(2000, 2050))
    )
    before = cache.dump()
    for length in np.random.default_rng(1).integers(1, 2000, 100_000).tolist():
        assert cache.match_prefix(run[:length]).prefix_len == length
    for length in range(1, 2000, 7):
        assert cache.match_prefix([*run[:length].tolist(), 9]).prefix_len == length
    assert cache.dump() == before


@pytest.mark.parametrize("policy", policy_names())
def test_a_conversation_is_one_node_until_something_branches_off(policy):
    cache = RadixCache(page_size=4, policy=policy)
    run: list[int] = []
    for turn in range(64):
        with cache.lock(cache.match_prefix(run)):
            run += [turn] * 11
            lock = cache.lock(cache.insert(run, np.arange(len(run) // 4)))
        cache.check_invariants()
        cache.unlock(lock)
        assert cache.num_nodes == 1
    cache.insert([*run[:44], 99, 99, 99, 99], [*range(11), 5000])
    assert cache.num_nodes == 3
    cache.evict(1)
    cache.evict(1)
    cache.check_invariants()


def test_namespaces_never_share():
    cache = RadixCache(page_size=1, policy="lru")
    cache.insert([1, 2], [0, 1])
    cache.insert([1, 2], [2, 3], namespace="lora")
    cache.insert(RadixKey([1, 2], ("tenant", 7)), [4, 5])
    assert cache.match_prefix([1, 2], namespace="lora").pages.tolist() == [2, 3]
    assert cache.match_prefix(RadixKey([1, 2], ("tenant", 7))).pages.tolist() == [4, 5]
    assert cache.match_prefix([1, 2], namespace="other").prefix_len == 0
    assert sorted(cache.evict(3).tolist()) == [0, 1, 3]  # one order over all namespaces
    fails_unchanged(cache, CallerError, cache.match_prefix, RadixKey([1]), namespace="lora")
    fails_unchanged(cache, CallerError, cache.insert, RadixKey([1]), [9], namespace="lora")


def test_arrays_that_come_in_are_copied_and_arrays_that_go_out_are_the_callers():
    cache = RadixCache(page_size=1)
    key, pages = np.array([1, 2, 3], np.int32), np.array([7, 8, 9], np.int32)
    result = cache.insert(key, pages)
    key[:] = pages[:] = 0
    match = cache.match_prefix([1, 2, 3])
    lock = cache.lock(match)
    for mine in (result.pages, match.pages, lock.pages):
        mine[:] = 0
    assert match.pages.tolist() == lock.pages.tolist() == [7, 8, 9]
    cache.unlock(lock)
    taken = cache.evict(1)
    taken += 1
    assert cache.match_prefix([1, 2]).pages.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("pages", "error"),
    [
        ([0], PageStateError),  # too few
        ([0, 1, 2, 3], PageStateError),  # too many
        ([0, 0], PageStateError),
        ([5, 5, 3], PageStateError),
        ([0, -1], PageStateError),
        ([-1, 0], PageStateError),
        ([0, 2**31], PageStateError),
        ([0.0, 1.0], PageStateError),
        ([[0, 1]], PageStateError),
        ([0, 100], PageStateError),  # the pool has 100
        ([0, 42], PageStateError),  # in the tree already
        ([True, False], PageStateError),
    ],
)
def test_wrong_page_ids_change_nothing(pages, error):
    cache = RadixCache(page_size=2, pool_pages=100)
    cache.insert([9, 9], [42])
    fails_unchanged(cache, error, cache.insert, [1, 2, 3, 4], pages)


def test_the_partial_pages_id_is_ignored():
    cache = RadixCache(page_size=2, pool_pages=100)
    cache.insert([1, 2, 3, 4, 5], [3, 4, 3])
    assert cache.evict(9).tolist() == [3, 4]
    cache.insert([1, 2, 3, 4, 5], [3, 4, 9999])
    assert cache.num_pages == 2


# --- locks ----------------------------------------------------------------------------------------


def test_double_unlock_changes_nothing():
    cache = filled("abc")
    lock, other = (
        cache.lock(cache.match_prefix(tokens("abc"))),
        cache.lock(cache.match_prefix(tokens("ab"))),
    )
    cache.unlock(lock)
    fails_unchanged(cache, LockError, cache.unlock, lock)
    assert cache.protected_pages == 2
    cache.unlock(other)


def test_another_caches_lock_match_and_hint_are_refused():
    cache, other = filled("abc"), filled("abc")
    lock = other.lock(other.match_prefix(tokens("abc")))
    fails_unchanged(cache, LockError, cache.unlock, lock)
    fails_unchanged(cache, LockError, cache.lock, other.match_prefix(tokens("a")))
    fails_unchanged(cache, LockError, cache.hint, lock, continues=True)
    fails_unchanged(cache, LockError, cache.hint, other.match_prefix(tokens("a")), continues=True)
    other.unlock(lock)


def test_an_insertion_goes_on_only_from_a_lock_that_is_held_in_this_tree():
    """Its tokens are not looked at again: another lock would put pages behind others' tokens."""
    cache, other = filled("abc"), filled("abc")
    foreign = other.lock(other.match_prefix(tokens("abc")))
    given_back = cache.lock(cache.match_prefix(tokens("abc")))
    cache.unlock(given_back)
    longer = cache.lock(cache.match_prefix(tokens("abc")))
    for lock, run, pages in ((foreign, "abcd", [9]), (given_back, "abcd", [9]), (longer, "ab", [])):
        for extend_lock in (False, True):
            more = {"lock": lock, "extend_lock": extend_lock}
            fails_unchanged(cache, LockError, cache.insert, tokens(run), pages, **more)
    cache.reset()
    fails_unchanged(cache, LockError, cache.insert, tokens("abcd"), [9], lock=longer)
    cache.unlock(longer)
    other.unlock(foreign)


def test_a_stale_match_locks_what_is_there_now():
    cache = filled("abcd")
    short = cache.match_prefix(tokens("abcdef"))
    cache.insert(tokens("abcdef"), range(10, 16))
    with cache.lock(short) as lock:
        assert lock.prefix_len == 6
    long = cache.match_prefix(tokens("abcdef"))
    cache.evict(4)
    assert long.pages.tolist() == [0, 1]
    with cache.lock(long) as lock:
        assert lock.prefix_len == 2
    gone = cache.match_prefix(tokens("abcdef"))
    cache.reset()
    with cache.lock(gone) as lock:
        assert lock.prefix_len == 0
    assert cache.num_locks == 0


def test_a_match_survives_splits_and_merges_without_a_walk(monkeypatch):
    cache = filled("abcdef", "abxy")
    matches = [cache.match_prefix(tokens("abcdef"[:length])) for length in range(1, 7)]
    with cache.lock(matches[3]):
        pass
    inner = cache.lock(matches[4])
    monkeypatch.setattr(cache, "_walk", None)
    for length, match in enumerate(matches, start=1):
        with cache.lock(match) as lock:
            assert lock.prefix_len == length
            cache.check_invariants()
    cache.unlock(inner)
    assert cache.num_nodes == 3


def test_a_grown_key_does_not_change_the_match_that_was_made_of_it():
    cache = filled("abc")
    key = RadixKey(tokens("ab"))
    match = cache.match_prefix(key)
    key.append(ord("c"))
    cache.insert(tokens("z"), [50])
    with cache.lock(match) as lock:
        assert lock.prefix_len == 2


def test_locking_stops_at_the_first_node_that_is_held():
    cache = RadixCache(page_size=1)
    locks = []
    for length in range(1, 1001):
        locks.append(cache.lock(cache.insert(range(length), range(length))))
    refs = [node.lock_ref for node in cache.nodes()]
    assert refs == [2] * 999 + [1]
    for lock in locks:
        cache.unlock(lock)
        cache.check_invariants() if lock.prefix_len % 100 == 0 else None
    assert cache.num_nodes == 1


def test_reset_that_forgets_locks_gives_everything_back():
    """Also what a lock held through an earlier reset."""
    cache = filled("abcd", "q")
    before = cache.lock(cache.match_prefix(tokens("ab")))
    assert sorted(cache.reset().tolist()) == [2, 3, 4]
    cache.insert(tokens("abc"), [10, 11, 12])
    after = cache.lock(cache.match_prefix(tokens("abc")))
    want = cache.want(cache.match_prefix(tokens("ab")))
    assert sorted(cache.reset(forget_locks=True).tolist()) == [0, 1, 10, 11, 12]
    cache.check_invariants()
    assert (cache.num_pages, cache.orphan_pages, cache.num_locks) == (0, 0, 0)
    for lock in (before, after):
        assert not lock.held
        with pytest.raises(LockError, match="was unlocked before"):
            cache.unlock(lock)
    cache.insert(tokens("abc"), [10, 11, 12])  # their pages may come back
    cache.unwant(want)
    cache.check_invariants()


# --- eviction -------------------------------------------------------------------------------------


def test_a_use_of_all_there_is_moves_a_leaf_where_its_rank_falls():
    cache = filled("a", "b", policy="mru")
    cache.insert(tokens("a"), [0])
    assert cache.evict(1).tolist() == [0]


def test_locks_that_end_together_free_what_they_share():
    cache = filled("abcd", "abxy")
    locks = [cache.lock(cache.match_prefix(tokens(run))) for run in ("abcd", "abxy", "ab")]
    releases = Releases()
    assert [releases.end(lock) for lock in locks] == [2, 2, 2]
    assert Releases().end(locks[0]) == 2
    assert cache.protected_pages == 6


def test_a_wanted_page_at_the_end_but_one_ends_the_cut():
    cache = filled("abcd", "x")
    want = cache.want(cache.match_prefix(tokens("abc")))
    assert sorted(cache.evict(2).tolist()) == [3, 4]
    cache.unwant(want)
    assert cache.evict(1).tolist() == [2]


def test_a_request_that_was_counted_goes_on_from_its_own_use_and_a_new_one_does_not():
    """Though others have used the pages since."""
    seen = []

    class Noting(LeastRecentlyUsed):
        def mark(self, use):
            seen.append(use.before)
            return use.tick

    cache = RadixCache(page_size=1, policy=Noting())
    cache.insert([1, 2], [0, 1])
    match = cache.match_prefix([1, 2])
    with cache.lock(match) as lock, cache.lock(match) as other:
        assert lock.mark < other.mark
        cache.insert([1, 2, 3], [2], lock=lock)
        assert seen[-1] == lock.mark
        cache.insert([1, 2, 4], [3], lock=lock, visit=True)
        assert seen[-1] == other.mark


@pytest.mark.slow
def test_a_deep_chain_is_no_recursion_error():
    cache = RadixCache(page_size=1, policy="lru")
    depth = 1 << 17
    run = np.arange(depth, dtype=np.int32)
    cache.insert(run, run)
    key = RadixKey(run)
    node_ending_at = {depth: cache.match_prefix(key).node}
    locks = []
    stride = depth // 2
    while stride:  # halve every node again and again, so that splitting costs little
        for end in range(stride, depth, 2 * stride):
            match = cache.match_prefix(RadixKey([0]))
            match.depth, match.node = end, node_ending_at[end + stride]
            locks.append(cache.lock(match))
            node_ending_at[end] = locks[-1].node
        stride //= 2
    locks.append(cache.lock(cache.match_prefix(key)))
    assert cache.num_nodes == depth == sum(1 for _ in cache.nodes())
    cache.check_invariants()
    assert cache.dump().splitlines()[-1] == f"and {depth - 1000} more nodes"
    assert len(cache.reset()) == 0
    assert sum(len(cache.unlock(lock)) for lock in locks) == depth
    assert cache.orphan_pages == 0


def test_a_broken_law_is_reported_with_the_state():
    cache = filled("abc", "abd")
    next(iter(cache.nodes())).lock_ref = 1
    with pytest.raises(InternalError, match=r"lock_ref is the locks that end there[\s\S]*0 locks"):
        cache.check_invariants()


# --- wants and events -----------------------------------------------------------------------------


def test_a_reader_that_comes_late_or_falls_behind_gets_the_tree_as_it_is():
    cache = filled("abc", "abd")
    log, slow = cache.record(), cache.record(limit_pages=3)
    for each in (log, slow):
        first, *rest = each.take()
        assert first == Cleared()
        assert [type(change) for change in rest] == [Inserted] * 3
        assert sum(len(change.pages) for change in rest) == 4 * PAGE_ID_BYTES
        assert each.take() == []
    evicted = cache.evict(1)
    cache.insert(tokens("wxyz"), range(10, 14))
    taken, stored = log.take()
    assert taken == TakenOut([evicted.tobytes()])
    first, *rest = slow.take()
    assert first == Cleared()
    assert sum(len(change.pages) for change in rest) == cache.num_pages * PAGE_ID_BYTES
    assert (len(stored.pages), slow.overruns, log.overruns) == (4 * PAGE_ID_BYTES, 1, 0)
    log.restart()
    assert log.take() == slow._whole()


class Recorded(LeastRecentlyUsed):
    """Takes down what insertions are said to go on from."""

    def __init__(self) -> None:
        self.went_on_from: list[object] = []

    def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
        self.went_on_from.append(use.before)
        return super().insertion_marks(use)


def test_an_insertion_that_extends_its_lock_is_one_use_and_holds_what_it_brought() -> None:
    policy = Recorded()
    cache = RadixCache(page_size=1, policy=policy)
    cache.insert([1, 2], [10, 11])  # use 1
    lock = cache.lock(cache.match_prefix([1, 2]))  # 2
    assert lock.pages.tolist() == [10, 11]
    cache.insert([1, 2, 3], [12], lock=lock, extend_lock=True, now_s=5.0)  # 3
    assert (lock.prefix_len, lock.pages.tolist(), lock.taken_s) == (3, [10, 11, 12], 5.0)
    assert (cache.num_nodes, cache.protected_pages, cache.evict(9).tolist()) == (1, 3, [])
    other = cache.lock(cache.match_prefix([1, 2, 3]))  # 4
    cache.insert([1, 2, 3, 4], [13], lock=lock, extend_lock=True)  # 5
    assert (cache.num_nodes, cache.num_locks, cache.tick) == (2, 2, 5)
    assert policy.went_on_from == [None, 2, 3], "from its own use, not the other's"
    cache.check_invariants()
    cache.unlock(other)
    assert cache.num_nodes == 1
    cache.insert([1, 2, 3, 4, 5], [20, 21, 22, 23, 14])
    cache.insert([1, 2, 3, 4], [], lock=lock, extend_lock=True)  # adds nothing
    assert (cache.num_nodes, cache.protected_pages, cache.evictable_pages) == (2, 4, 1)
    cache.insert([1, 2, 3, 4, 5], [15], lock=lock, extend_lock=True)  # nor this
    assert (cache.num_nodes, cache.protected_pages, cache.evictable_pages) == (1, 5, 0)
    cache.unlock(lock)
    assert sorted(cache.evict(9).tolist()) == [10, 11, 12, 13, 14]
    cache.check_invariants()


def small():
    cache = RadixCache(page_size=2, policy="lru")
    cache.insert([1, 1, 2, 2, 3, 3], range(3))
    cache.insert([1, 1, 2, 2, 4, 4], [0, 1, 9], namespace=None)
    cache.lock(cache.match_prefix([1, 1, 2, 2]))
    cache.insert([5, 5], [20], namespace="[red]lora")
    cache.want(cache.match_prefix([5, 5, 6, 6], namespace="[red]lora"))
    return cache


def test_dump_names_depth_pages_locks_and_the_last_use():
    text = small().dump()
    assert text.splitlines()[1:3] == [
        "  <TreeNode pages 0..2 lock_ref=1 children=2>, used 3",
        "    <TreeNode pages 2..3 lock_ref=0 children=0>, used 1",
    ]
    assert "namespace '[red]lora'" in text
    assert "wanted by 1" in text


def test_dump_is_cut_and_says_so():
    assert small().dump(max_nodes=2).splitlines()[-1] == "and 2 more nodes"


@pytest.mark.slow
def test_a_deep_chain_can_be_shown():
    cache = RadixCache(page_size=1, policy="lru")
    run = np.arange(2000)
    locks = [cache.lock(cache.insert(run[:end], run[:end])) for end in range(1, 2001)]
    assert len(cache.dump(max_nodes=5000).splitlines()) == 2001
    assert cache.dump().splitlines()[-1] == "and 1000 more nodes"
    assert len(locks) == 2000


@pytest.mark.parametrize("policy", policy_names())
def test_who_listens_to_a_cache_changes_nothing_in_it(policy: str) -> None:
    """What is remembered of pages that went may be a sum of floats: it has to be summed in one
    order."""
    chance = random.Random(1)
    caches = [RadixCache(page_size=1, policy=policy, pool_pages=200) for _ in range(2)]
    caches[0].record().take()  # a router reads its events
    locks: list[list[PrefixLock]] = []
    free = list(range(200))
    for step in range(400):
        now_s = 1000.0 + 37.3 * step
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 6))]
        action = chance.choice(
            ["insert", "insert", "insert", "lock", "unlock", "evict all", "evict"]
        )
        if action == "insert":
            there = caches[0].match_prefix(tokens)
            new = [free.pop() for _ in range(len(tokens) - there.prefix_len)]
            for cache in caches:
                cache.insert(tokens, [*there.pages.tolist(), *new], priority=step % 3, now_s=now_s)
        elif action == "lock":
            locks.append([cache.lock(cache.match_prefix(tokens), now_s=now_s) for cache in caches])
        elif action == "unlock" and locks:
            for cache, lock in zip(caches, locks.pop(), strict=True):
                cache.unlock(lock)
        elif action.startswith("evict"):
            num_pages = caches[0].evictable_pages if action == "evict all" else 2
            taken = [set(cache.evict(num_pages, now_s=now_s).tolist()) for cache in caches]
            assert taken[0] == taken[1]
            free += taken[0]
        assert _marks(caches[0]) == _marks(caches[1])


def _marks(cache: RadixCache) -> list[tuple[bytes, str, str]]:
    return sorted((bytes(node.pages), repr(node.mark), repr(node.steps)) for node in cache.nodes())
