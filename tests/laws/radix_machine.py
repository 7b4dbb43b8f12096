"""The radix cache and its naive model side by side, through any sequence of calls."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import prefixkv.assembly  # noqa: F401 - its parts, also where no conftest is loaded
from prefixkv.cache.events import NO_PARENT, Cleared, EventFeed, Removed, Stored, page_key
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import make_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from tests.laws.adaptive_model import (
    BLOCK_PAGES,
    GHOST_PAGES,
    HALF_LIFE_S,
    LONG_PAGES,
    PERIOD,
    STRIDE_PAGES,
    TINY_PAGES,
    TRUST,
    AdaptiveModel,
)
from tests.laws.radix_model import RANKS, RadixModel

POOL_PAGES = 4096
NAMESPACES = st.sampled_from([None, "lora", 7])
SECONDS = st.integers(0, 40)


MODELS: dict[str, type[RadixModel]] = {
    **dict.fromkeys(RANKS, RadixModel),
    "adaptive": AdaptiveModel,
}
POLICIES = list(MODELS)


def make_pair(policy: str, page_size: int) -> tuple[RadixCache, RadixModel]:
    """A cache and its model, with settings that a short run gets to feel."""
    ghosts = {
        "ghosts": GHOST_PAGES / POOL_PAGES, "block_tokens": BLOCK_PAGES * page_size,
        "stride_blocks": STRIDE_PAGES // BLOCK_PAGES,
    }  # fmt: skip
    chosen: Any = policy
    if policy == "adaptive":
        chosen = Adaptive(
            short_tokens=TINY_PAGES * page_size,
            long_tokens=LONG_PAGES * page_size, trust=TRUST, period=PERIOD,
            half_life_s=HALF_LIFE_S, **ghosts,
        )  # fmt: skip
    chosen = make_policy(chosen)
    return RadixCache(page_size=page_size, policy=chosen, pool_pages=POOL_PAGES), MODELS[policy](
        page_size, policy
    )


class RadixMachine(RuleBasedStateMachine):
    """Set `policy` and `page_sizes` in a subclass."""

    policy = "lru"
    page_sizes = (1, 2, 3, 16, 64)

    keys = Bundle("keys")
    results = Bundle("results")

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.page_size = data.draw(st.sampled_from(self.page_sizes), label="page_size")
        self.cache, self.model = make_pair(self.policy, self.page_size)
        self.free = set(range(POOL_PAGES))
        self.locks: list[tuple[Any, Any]] = []
        self.wants: list[int] = []
        self.now_s = 0.0
        self.stored: set[tuple[Any, bytes]] = set()
        self.listens = data.draw(st.booleans(), label="listens")
        self.feed = EventFeed(self.cache, "w", 1)
        if self.listens:
            self.feed.take()
        # Some paths to begin with, from few branches, so that most runs come to eviction among
        # them; many of them begin with the same pages, where a run begins them so.
        self.stem = [1] * data.draw(st.integers(0, 7), label="stem")
        runs = st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=6))
        for stemmed, own in data.draw(st.lists(runs, max_size=8), label="paths"):
            self.serve((self._tokens(self.stem * stemmed + own), None), [], False)

    def _tokens(self, runs: list[int]) -> tuple[int, ...]:
        return tuple(run for run in runs for _ in range(self.page_size))

    def _pages(self, num_pages: int) -> list[int]:
        return sorted(self.free)[:num_pages]

    def _prefix_keys(self, place: Any) -> Any:
        namespace, prefix = place
        key = NO_PARENT
        for at in range(0, len(prefix), self.page_size):
            key = page_key(key, np.array(prefix[at : at + self.page_size], np.int32).tobytes())
        return namespace, key

    # A key is a list of page-sized runs of one of three values, then a few more tokens: few enough
    # kinds that paths meet, part and end inside one another.

    @rule(
        target=keys,
        stemmed=st.booleans(),
        runs=st.lists(st.integers(0, 2), max_size=8),
        tail=st.integers(0, 3),
        namespace=NAMESPACES,
    )
    def new_key(self, stemmed: bool, runs: list[int], tail: int, namespace: Any) -> Any:
        tail = min(tail, self.page_size - 1)
        return self._tokens(self.stem * stemmed + runs) + (9,) * tail, namespace

    @rule(
        target=keys,
        key=keys,
        runs=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        last=st.booleans(),
    )
    def longer_key(self, key: Any, runs: list[int], last: bool) -> Any:
        tokens, namespace = key
        tokens = tokens[: len(tokens) // self.page_size * self.page_size][: 20 * self.page_size]
        more = self._tokens(runs)
        if last:
            more = (*more[:-1], 5)  # all but the last token the same
        return tokens + more, namespace

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(target=results, key=keys, prebuilt=st.booleans())
    def match(self, key: Any, prebuilt: bool) -> Any:
        tokens, namespace = key
        nodes = self.cache.num_nodes
        if prebuilt:
            result = self.cache.match_prefix(RadixKey(tokens, namespace))
        else:
            result = self.cache.match_prefix(np.array(tokens, np.int32), namespace)
        depth = self.model.match(tokens, namespace)
        assert result.prefix_len == depth * self.page_size
        assert result.pages.tolist() == self.model.page_ids(tokens, namespace, depth)
        places = [(namespace, self.model.cut(tokens, at + 1)) for at in range(depth)]
        assert result.unprotected_pages == sum(not self.model.held(place) for place in places)
        assert self.cache.num_nodes == nodes
        return result, key, True

    @rule(result=results)
    def match_again(self, result: Any) -> None:
        """Until pages come or go, a match is as good as a new one, whatever is locked, split or
        merged meanwhile."""
        old, (tokens, namespace), is_match = result
        if is_match and old.is_current:
            new = self.cache.match_prefix(tokens, namespace)
            assert old.prefix_len == new.prefix_len
            assert old.pages.tolist() == new.pages.tolist()
            assert old.unprotected_pages == new.unprotected_pages

    @rule(target=results, key=keys, priority=st.integers(-2, 2))
    def insert(self, key: Any, priority: int) -> Any:
        tokens, namespace = key
        num_pages = len(tokens) // self.page_size
        old = self.model.match(tokens, namespace)
        ids = self._pages(num_pages)
        result = self.cache.insert(list(tokens), ids, namespace, priority, self.now_s)
        assert self.model.insert(tokens, ids, namespace, self.now_s, priority) == old
        self.free -= set(ids[old:])
        assert result.prefix_len == old * self.page_size
        assert result.pages.tolist() == self.model.page_ids(tokens, namespace, num_pages)
        return result, key, False

    def insert_behind(self, key: Any, lock: Any, twin: Any, extend_lock: bool) -> Any:
        """As `insert`, of what is behind a lock of the key's beginning."""
        tokens, namespace = key
        old, num_pages = self.model.match(tokens, namespace), len(tokens) // self.page_size
        ids = self.model.page_ids(tokens, namespace, old) + self._pages(num_pages - old)
        own = ids[lock.prefix_len // self.page_size :]
        more: Any = {"lock": lock, "extend_lock": extend_lock}
        result = self.cache.insert(list(tokens), own, namespace, 0, self.now_s, **more)
        assert self.model.insert(tokens, ids, namespace, self.now_s, 0, twin, extend_lock) == old
        self.free -= set(ids[old:])
        assert result.prefix_len == old * self.page_size
        assert result.pages.tolist() == ids
        assert lock.pages.tolist() == ids[: len(twin.place[1]) // self.page_size]
        return result, key, False

    @precondition(lambda self: self.locks)
    @rule(data=st.data(), runs=st.lists(st.integers(0, 2), max_size=4), extend_lock=st.booleans())
    def insert_behind_a_lock(self, data: st.DataObject, runs: list[int], extend_lock: bool) -> None:
        """Whatever has happened since the lock was taken, but a reset."""
        lock, twin = self.locks[data.draw(st.integers(0, len(self.locks) - 1))]
        if lock.epoch == self.cache._epoch:
            namespace, prefix = twin.place
            key = prefix + self._tokens(runs), namespace
            self.insert_behind(key, lock, twin, extend_lock)

    @rule(
        key=keys, more=st.lists(st.integers(0, 2), max_size=3), pauses=st.booleans(),
        extend_lock=st.booleans(), first=st.integers(0, 6),
    )  # fmt: skip
    def serve(
        self, key: Any, more: list[int], pauses: bool, extend_lock: bool = False, first: int = 0
    ) -> None:
        """A whole request, as an engine runs it: hold what is there, add the prompt, its `first`
        new pages alone if that is more than none, add the answer."""
        tokens, namespace = key
        self.lock((self.cache.match_prefix(tokens, namespace), key, True))
        held = self.locks.pop()
        beyond = len(held[1].place[1]) + first * self.page_size
        if first and beyond < len(tokens):
            self.insert_behind((tokens[:beyond], namespace), *held, extend_lock)
        inserted = self.insert_behind(key, *held, extend_lock)
        if not extend_lock:
            self.lock(inserted)
            self._end(held)
            held = self.locks.pop()
        if pauses:
            self.now_s += 7
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        answer = self._tokens(more)
        if extend_lock:
            self.insert_behind((tokens + answer, namespace), *held, extend_lock)
        else:
            self.insert((tokens + answer, namespace), 0)
        self._end(held)

    def _end(self, pair: Any) -> None:
        lock, twin = pair
        freed = self.cache.unlock(lock)
        assert sorted(freed.tolist()) == sorted(self.model.unlock(twin))
        self.free |= set(freed.tolist())

    @rule(result=results)
    def lock(self, result: Any) -> None:
        found, (tokens, namespace), visit = result
        lock = self.cache.lock(found, self.now_s)
        twin = self.model.lock(tokens, namespace, self.now_s, visit)
        assert lock.prefix_len == len(twin.place[1])
        assert lock.pages.tolist() == self.model.page_ids(
            tokens, namespace, lock.prefix_len // self.page_size
        )
        self.locks.append((lock, twin))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self._end(self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1))))

    @rule(num_pages=st.sampled_from([1, 1, 1, 2, 3, 5, 12, 1000, 0]), batch=st.booleans())
    def evict(self, num_pages: int, batch: bool) -> None:
        steps = [num_pages] if batch else [1] * min(num_pages, 20)
        for step in steps:
            taken = self.cache.evict(step, self.now_s).tolist()
            assert len(taken) == len(set(taken))
            assert set(taken) == self.model.evict(step, self.now_s, taken)
            self.free |= set(taken)

    @rule(key=keys)
    def begin_to_wait(self, key: Any) -> None:
        tokens, namespace = key
        number = self.cache.want(self.cache.match_prefix(tokens, namespace))
        self._want(number, (namespace, self.model.cut(tokens, self.model.whole(tokens))))

    @rule(result=results)
    def begin_to_wait_for_what_was_found(self, result: Any) -> None:
        found, (tokens, namespace), _ = result
        whole = (namespace, self.model.cut(tokens, self.model.whole(tokens)))
        self._want(self.cache.want(found), whole)

    def _want(self, number: int, place: Any) -> None:
        self.wants.append(number)
        self.model.wants.append(place)

    @precondition(lambda self: self.model.wants)
    @rule(data=st.data())
    def wait_no_longer(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.wants) - 1))
        self.model.wants.pop(at)
        self.cache.unwant(self.wants.pop(at))

    @rule(
        result=results, continues=st.sampled_from([True, False, None, 5.0, 20.0]),
        is_parked=st.booleans(), keep_pages=st.integers(0, 2),
    )  # fmt: skip
    def hint(
        self, result: Any, continues: bool | float | None, is_parked: bool, keep_pages: int
    ) -> None:
        found, (tokens, namespace), _ = result
        _, depth = self.cache.locate(found)
        use = self.model.before(tokens, namespace, depth)
        if use is not None and use.covers > depth:
            return  # it left a mark here on its way; a hint is about a use that ended here
        self.cache.hint(found, continues, is_parked=is_parked, keep_pages=keep_pages)
        if continues is not None and depth:
            self.model.hint(tokens, namespace, depth, continues, is_parked, keep_pages)

    @precondition(lambda self: len(self.model.pages) > 3)
    @rule()
    def reset(self) -> None:
        freed = self.cache.reset().tolist()
        assert sorted(freed) == sorted(self.model.reset())
        self.free |= set(freed)

    @invariant()
    def agree(self) -> None:
        cache, model = self.cache, self.model
        cache.check_invariants()
        assert cache.num_pages == len(model.pages)
        assert cache.protected_pages == model.protected_pages
        assert cache.evictable_pages == len(model.pages) - model.protected_pages
        assert cache.num_pages + cache.orphan_pages + len(self.free) == POOL_PAGES

    @invariant()
    def listener_knows_the_tree(self) -> None:
        if not self.listens:
            return
        for event in self.feed.take().events:
            if isinstance(event, Cleared):
                self.stored.clear()
                continue
            places = {(event.namespace, own) for own in event.page_keys}
            assert len(places) == len(event.page_keys)
            if isinstance(event, Stored):
                assert event.parent == NO_PARENT or (event.namespace, event.parent) in self.stored
                assert not places & self.stored
                self.stored |= places
            else:
                assert isinstance(event, Removed)
                assert places <= self.stored
                self.stored -= places
        assert self.stored == {self._prefix_keys(place) for place in self.model.pages}

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.locks:
            lock, _ = self.locks.pop()
            self.free |= set(self.cache.unlock(lock).tolist())
        assert self.cache.protected_pages == 0
        self.free |= set(self.cache.evict(POOL_PAGES, self.now_s).tolist())
        self.cache.check_invariants()
        assert len(self.free) == POOL_PAGES
        assert self.cache.num_nodes == 0
