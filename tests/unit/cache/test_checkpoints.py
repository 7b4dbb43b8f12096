"""Checkpoints beside a radix cache: found by the page that they end on, and the order in which they
go."""

import pytest

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoints
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.errors import InternalError
from prefixkv.pages.groups import TailGroups

NO_WINDOWS = TailGroups()
PATH = list(range(8))  # one token a page


@pytest.fixture
def cache() -> RadixCache:
    made = RadixCache(page_size=1, policy="lru", pool_pages=32)
    made.insert(PATH, range(8))
    made.insert([*PATH[:4], 100, 101], [0, 1, 2, 3, 10, 11])
    return made


def saved(points: Checkpoints, *pages_and_depths: tuple[int, int]) -> list[int]:
    slots = []
    for page, depth in pages_and_depths:
        slot = points.take()
        points.save(page, depth, slot)
        slots.append(slot)
        points.check_invariants()
    return slots


def test_the_deepest_on_the_path_is_found(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 8, NO_WINDOWS)
    saved(points, (1, 2), (3, 4), (11, 6))

    def depth_of(tokens: list[int]) -> int:
        found = points.find(cache.match_prefix(tokens))
        return 0 if found is None else found.depth

    assert depth_of(PATH) == 4, "and not that of the other branch"
    assert depth_of(PATH[:3]) == 2
    assert depth_of(PATH[:1]) == depth_of([9, 9]) == 0
    assert depth_of([*PATH[:4], 100, 101, 102]) == 6
    # Whatever nodes split: the page is the same.
    with cache.lock(cache.match_prefix(PATH[:5])):
        assert depth_of(PATH) == 4
        points.check_invariants()


def test_what_came_since_a_match_is_not_found_by_it(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 8, NO_WINDOWS)
    match = cache.match_prefix([*PATH[:4], 200])
    cache.insert([*PATH[:4], 200], [0, 1, 2, 3, 12])
    saved(points, (3, 4), (12, 5))
    found = points.find(match)
    assert found is not None
    assert found.depth == 4


def test_the_last_used_goes_last_and_what_was_left_behind_first(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 3, NO_WINDOWS)
    saved(points, (1, 2), (3, 4))
    old = points.find(cache.match_prefix(PATH[:4]))
    assert old is not None
    points.use(old)
    slot = points.take()
    points.save(7, 8, slot, parent=old)
    points.check_invariants()
    # It was used after the one at 2, and still goes before it.
    assert points.take() == old.slot
    assert points.find(cache.match_prefix(PATH[:4])) is not old
    points.give_back(old.slot)
    points.check_invariants()


def test_a_use_keeps_it_longer(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 2, NO_WINDOWS)
    _, newer = saved(points, (1, 2), (3, 4))
    first = points.find(cache.match_prefix(PATH[:2]))
    assert first is not None
    points.use(first)
    assert points.take() == newer


def test_one_that_others_use_too_is_not_left_behind(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 3, NO_WINDOWS)
    before, _ = saved(points, (1, 2), (3, 4))
    common = points.find(cache.match_prefix(PATH))
    assert common is not None
    points.use(common)
    points.use(common)
    points.save(7, 8, points.take(), parent=common)
    assert points.take() == before


def test_a_locked_one_stays(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 1, NO_WINDOWS)
    saved(points, (3, 4))
    found = points.find(cache.match_prefix(PATH))
    assert found is not None
    path = cache.lock(cache.match_prefix(PATH[:4]))
    points.use(found)
    points.lock(found)
    assert points.take() == NO_SLOT
    assert points.find(cache.match_prefix(PATH)) is found
    points.check_invariants()
    points.unlock(found)
    cache.unlock(path)
    assert points.take() == found.slot


def test_a_second_one_at_a_page_gives_its_slot_back(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 2, NO_WINDOWS)
    first, second = saved(points, (3, 4), (3, 4))
    assert len(points) == 1
    assert points.take() == second
    found = points.find(cache.match_prefix(PATH))
    assert found is not None
    assert found.slot == first


def test_it_goes_with_its_page(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 4, NO_WINDOWS)
    saved(points, (7, 8), (3, 4))
    points.dropped(cache.evict(2))
    points.check_invariants()
    points.dropped(cache.evict(100))
    points.check_invariants()
    assert len(points) == 0


def test_what_was_emptied_under_a_lock_keeps_its_slot_until_the_lock_ends(
    cache: RadixCache,
) -> None:
    points = Checkpoints(cache, 32, 1, NO_WINDOWS)
    (slot,) = saved(points, (3, 4))
    found = points.find(cache.match_prefix(PATH))
    assert found is not None
    path = cache.lock(cache.match_prefix(PATH[:4]))
    points.lock(found)
    cache.reset()
    points.reset()
    points.check_invariants()
    assert points.take() == NO_SLOT, "what was locked is still being read"
    points.unlock(found)
    assert points.take() == slot
    cache.unlock(path)


def test_a_broken_law_is_named(cache: RadixCache) -> None:
    points = Checkpoints(cache, 32, 4, NO_WINDOWS)
    saved(points, (3, 4))
    cache.evict(100)  # and nobody says so
    with pytest.raises(InternalError, match="H9"):
        points.check_invariants()
