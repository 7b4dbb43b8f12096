"""Events of checkpoints: a router knows of each prompt how far computing can go on, and what it is
told of can be used, at every batch. By the sockets' batches, and by those of `take`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoints
from prefixkv.cache.events import (
    CheckpointStored,
    Cleared,
    EventBatch,
    EventFeed,
    Removed,
    Stored,
    page_keys,
)
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.kv_events.stream import BlockEvents
from prefixkv.pages.groups import TailGroups
from prefixkv.serving.router import BoundedAffinityRouter, WorkerIndex
from tests.unit.kv_events.follower import Follower
from tests.unit.kv_events.test_stream import FIRST, Tree, World

NO_WINDOWS = TailGroups()
POOL, SLOTS = 90, 3


class Told(Tree):
    """A tree with checkpoints beside it, whose page ids are used again, and a router's index that
    applies the batches of `take`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cache = RadixCache(page_size=self.page_size, policy="lru", pool_pages=POOL)
        self.points = Checkpoints(self.cache, POOL, SLOTS, NO_WINDOWS)
        self.free = list(range(POOL))
        self.feed = EventFeed(self.cache, "prefill-0", 7, at_saves=True)
        self.log = self.cache.record()
        self.index = WorkerIndex(10_000)
        assert self.index.apply(self.feed.take())

    def evict(self, num: int) -> None:
        pages = self.cache.evict(num)
        self.points.dropped(pages)
        self.free += pages.tolist()

    def step(self) -> None:
        tokens = self.chance.choice(self.prompts)
        namespace = self.chance.choice(self.namespaces)
        match self.chance.randrange(40):
            case 0:
                self.free += self.cache.reset().tolist()
                self.points.reset()
            case number if number < 10:
                self.evict(self.chance.randrange(1, 9))
            case number if number < 24:
                match = self.cache.match_prefix(tokens, namespace)
                slot = self.points.take() if match.depth else NO_SLOT
                if slot == NO_SLOT:
                    return
                if self.chance.random() < 0.1:
                    self.points.give_back(slot)
                    return
                depth = self.chance.randrange(match.depth) + 1
                self.points.save(int(match.pages[depth - 1]), depth, slot)
            case _:
                missing = len(tokens) // self.page_size
                if len(self.free) < missing:
                    self.evict(missing)
                match = self.cache.match_prefix(tokens, namespace)
                missing -= match.depth
                new, self.free = self.free[:missing], self.free[missing:]
                ids = np.array([*match.pages.tolist(), *new], np.int32)
                self.cache.insert(tokens, ids, namespace)

    def agrees(self, follower: Follower, medium: str) -> None:
        super().agrees(follower, medium)
        assert len(follower.checkpoints) == len(self.points)
        for tokens in self.prompts:
            keys = page_keys(RadixKey(tokens).data, self.page_size)
            for namespace in self.namespaces:
                match = self.cache.match_prefix(tokens, namespace)
                found = self.points.find(match)
                depth = 0 if found is None else found.depth
                assert follower.resumed(tokens, namespace) == depth * self.page_size
                assert self.index.depth(namespace, keys) == depth


def told(seed: int, **more: Any) -> tuple[Told, World, Follower]:
    tree = Told(seed)
    world = World(seed, pool=tree, at_saves=True, **more)
    return tree, world, Follower(tree.page_size, world.media, groups=True, next_seq=FIRST)


@pytest.mark.parametrize("seed", [2, 3])
def test_routers_know_where_computing_can_go_on(seed: int) -> None:
    tree, world, follower = told(seed)
    seen = 0
    for number in range(160):
        tree.step()
        tree.points.check_invariants()
        if tree.chance.random() < 0.5:
            world.publish()
        if tree.chance.random() < 0.3 or number == 159:
            world.publish()
            assert tree.index.apply(tree.feed.take(tree.chance.random() < 0.1))
            world.follow(follower)
            world.agrees(follower)
            seen += len(follower.checkpoints)
            # A snapshot adds up to the same.
            late = Follower(tree.page_size, groups=True)
            late.restart(*world.stream.snapshot(1.0))
            assert late.checkpoints == follower.checkpoints
    assert seen > 20
    assert tree.points.evicted


def test_another_tier_that_is_emptied_keeps_what_the_first_has() -> None:
    """Its blocks and checkpoints end one by one, since AllBlocksCleared would end all."""
    tree, world, follower = told(0, has_host=True)
    host = world.tiers[1]
    host.namespaces = [None]
    while len(tree.points) < 3 or not host.cache.num_pages:
        tree.step()
        host.step()
    world.publish()
    world.follow(follower)
    assert len(follower.checkpoints) == len(tree.points)
    tree.cache.reset()
    tree.points.reset()
    world.publish()
    world.follow(follower)
    assert not follower.checkpoints
    assert not follower.blocks
    assert len(follower.held[BlockEvents.host_medium]) == host.cache.num_pages


# --- the embedded router --------------------------------------------------------------------------


def test_a_worker_that_is_expected_to_save_one_counts_in_full() -> None:
    """A request on its way there ends in a checkpoint; when it does not come the pages count no
    more. Of a worker that needs no checkpoints all pages count at any time."""
    cache = RadixCache(page_size=2, policy="lru", pool_pages=POOL)
    points = Checkpoints(cache, POOL, SLOTS, NO_WINDOWS)
    cache.insert(range(12), range(6))
    points.save(1, 2, points.take())
    keys = page_keys(RadixKey(range(16)).data, 2)
    for at_saves, depth in ((True, 2), (False, 6)):
        index = WorkerIndex(100)
        feed = EventFeed(cache, "w", 1, at_saves=at_saves)
        assert index.apply(feed.take())
        assert index.depth(None, keys) == depth
        index.expect(None, keys, 5.0)
        assert index.depth(None, keys) == 8
        index.expire(6.0)
        assert index.depth(None, keys) == depth


def test_a_worker_that_tells_of_a_page_without_those_before_it_does_no_harm() -> None:
    """No worker of ours does; a batch may come from anywhere."""
    index, keys = WorkerIndex(100), [b"a", b"b", b"c", b"d"]
    events = Cleared(), Stored(None, b"", tuple(keys)), Removed(None, b"a", (b"b",))
    assert index.apply(EventBatch("w", 1, 0, events, True))
    for end in range(5):
        assert index.depth(None, keys[:end]) <= end
    events = Stored(None, b"a", (b"b",)), CheckpointStored(None, b"b")
    index.apply(EventBatch("w", 1, 1, events, True))
    assert index.depth(None, keys) == 2


def test_a_checkpoint_of_a_page_that_is_not_known_does_no_harm() -> None:
    router = BoundedAffinityRouter()
    router.add_worker("w")
    assert not router.apply(EventBatch("w", 1, 0, (CheckpointStored(None, b"k"),), True))
    raw = msgspec.msgpack.encode({"worker": "w", "incarnation": 1, "seq": 0, "events": [
        {"type": "CheckpointStored", "namespace": ["a", 1], "page_key": b"k"}]})  # fmt: skip
    [event] = EventBatch.decode(raw).events
    assert event == CheckpointStored(("a", 1), b"k")
