"""Events as numbered batches, against the tree that they tell of. Of checkpoints: a router knows
of each prompt how far computing can go on, and what it is told of can be used, at every batch."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from prefixkv.cache.checkpoints import NO_SLOT, Checkpoints
from prefixkv.cache.events import (
    NO_PARENT,
    CheckpointStored,
    Cleared,
    EventBatch,
    EventFeed,
    PageRef,
    Removed,
    Stored,
    page_keys,
)
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import Namespace, RadixKey, shortened
from prefixkv.errors import RequestError
from prefixkv.kv_events.stream import BlockEvents, EventStream, Keep
from prefixkv.pages.groups import TailGroups
from prefixkv.serving.router import BoundedAffinityRouter, WorkerIndex
from tests.unit.kv_events.follower import Follower

FIRST = 1_000_000
NAMESPACES = [
    None, Namespace(lora="legal"), Namespace(salt="tenant"), Namespace(lora="legal", salt="tenant"),
    Namespace(images=[("cat", 0, 3)]), Namespace(images=[("dog", 0, 3)]),
]  # fmt: skip


class Tree:
    """A tree with few different tokens, so that much is shared."""

    def __init__(self, seed: int, page_size: int = 2) -> None:
        self.chance = random.Random(seed)
        self.page_size = page_size
        self.cache = RadixCache(page_size=page_size, policy="lru")
        self.log = self.cache.record()
        self.namespaces = NAMESPACES
        self.prompts = [
            [self.chance.randrange(2) for _ in range(self.chance.randrange(1, 9) * page_size)]
            for _ in range(25)
        ]
        self._next_page = 0

    def step(self) -> None:
        match self.chance.randrange(40):
            case 0:
                self.cache.reset()
            case number if number < 14:
                self.cache.evict(self.chance.randrange(1, 9))
            case _:
                tokens = self.chance.choice(self.prompts)
                namespace = self.chance.choice(self.namespaces)
                match = self.cache.match_prefix(tokens, namespace)
                missing = (len(tokens) - match.prefix_len) // self.page_size
                new = range(self._next_page, self._next_page + missing)
                self._next_page += missing
                ids = np.array([*match.pages.tolist(), *new], np.int32)
                self.cache.insert(tokens, ids, namespace)

    def agrees(self, follower: Follower, medium: str) -> None:
        assert len(follower.held[medium]) == self.cache.num_pages
        for tokens in self.prompts:
            for namespace in self.namespaces:
                held = self.cache.match_prefix(tokens, namespace).prefix_len
                assert follower.matched(tokens, namespace, medium) == held


MEDIA = "GPU", BlockEvents.host_medium


class World:
    """The pool's tree, and host memory's if there is one, each with a life of its own, and the
    stream of them."""

    def __init__(
        self, seed: int, page_size: int = 2, keep: int = 8, *, has_host: bool = False,
        num_bytes: int = 1 << 20, pool: Tree | None = None, at_saves: bool = False,
    ) -> None:  # fmt: skip
        self.pool = pool or Tree(seed, page_size)
        self.tiers = [self.pool, *([Tree(seed + 1000)] if has_host else [])]
        self.media = MEDIA[: len(self.tiers)]
        words = [BlockEvents(page_size, medium, at_saves) for medium in (*self.media, None)]
        self.stream = EventStream(
            page_size,
            words[0],
            0,
            FIRST,
            Keep(keep, num_bytes),
            host=words[1] if has_host else None,
        )
        self.cache, self.chance = self.pool.cache, self.pool.chance
        self.published: list[tuple[int, bytes]] = []

    def step(self) -> None:
        self.chance.choice(self.tiers).step()
        if len(self.tiers) > 1 and self.chance.randrange(40) == 0:  # as a flush does
            for tree in self.tiers:
                tree.cache.reset()

    def publish(self) -> None:
        for tier, tree in enumerate(self.tiers):
            if tier and self.chance.randrange(20) == 0:
                tree.log.restart()
            self.published += self.stream.publish(tree.log.take(), 1.0, tier)
            self.stream.check_invariants()

    def follower(self, next_seq: int | None = FIRST) -> Follower:
        return Follower(self.pool.page_size, self.media, next_seq=next_seq)

    def follow(self, follower: Follower) -> None:
        assert all(follower.take(*batch) for batch in self.published)
        self.published.clear()

    def agrees(self, follower: Follower) -> None:
        assert self.stream.num_pages == sum(tree.cache.num_pages for tree in self.tiers)
        for medium, tree in zip(self.media, self.tiers, strict=True):
            tree.agrees(follower, medium)


@pytest.mark.parametrize("has_host", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_knows_the_tree_of_each_tier(seed: int, has_host: bool) -> None:
    """What ends in one goes on in the other, also where one of the two starts over."""
    world = World(seed, has_host=has_host)
    follower = world.follower()
    for number in range(120):
        world.step()
        if world.chance.random() < 0.6:
            world.publish()
            world.follow(follower)
            if number % 5 == 0:
                world.agrees(follower)
    assert follower.num_events > 50
    world.publish()
    late = world.follower()
    late.restart(*world.stream.snapshot(1.0))
    world.agrees(late)
    late.restart(*world.stream.clear(1.0))
    assert not any(late.held.values())
    assert not world.stream.num_pages


def test_a_long_tier_that_ends_is_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixkv.kv_events.stream.BATCH_PAGES", 2)
    world = World(3, has_host=True)
    pool, host = world.tiers
    host.cache.insert([9, 9], [0])
    for number in range(5):
        pool.cache.insert([number, number, 0, 0], [2 * number, 2 * number + 1])
    world.publish()
    pool.cache.reset()
    follower = world.follower()
    follower.restart(*world.stream.snapshot(1.0))
    batches = list(world.stream.publish(pool.log.take(), 1.0))
    assert len(batches) == 5
    assert all(follower.take(*batch) for batch in batches)
    world.agrees(follower)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_with_a_gap_is_given_a_snapshot(seed: int) -> None:
    """From any number: those batches, or a snapshot where they are not kept."""
    world = World(seed, keep=5)
    world.pool.log.take()
    for _ in range(60):
        world.step()
        world.publish()
        first_kept = max(FIRST, world.stream.next_seq - 5)
        for seq in {0, FIRST, first_kept - 1, first_kept, world.stream.next_seq + 7}:
            follower, at = world.follower(None), seq
            follower.next_seq = seq if seq else None
            for past, payload in world.published:
                if past < seq and first_kept <= seq <= world.stream.next_seq:
                    follower.next_seq = past
                    follower.take(past, payload)
            follower.next_seq = seq if seq else None
            while (batch := world.stream.since(at, 1.0)) is not None:
                if not (batch.seq == at and follower.take(*batch)):
                    follower.restart(*batch)
                at = batch.seq + 1
            assert at == world.stream.next_seq
            world.agrees(follower)


def test_a_snapshot_is_made_once_for_all_that_ask() -> None:
    world = World(1)
    for _ in range(10):
        world.step()
    world.publish()
    snapshot = world.stream.snapshot(1.0)
    assert world.stream.snapshot(2.0) is snapshot
    world.stream.heartbeat(3.0)
    later = world.stream.snapshot(3.0)
    assert later.seq == snapshot.seq + 1
    assert msgspec.msgpack.decode(later.payload)[1] == msgspec.msgpack.decode(snapshot.payload)[1]


@pytest.mark.parametrize("num_pages", [5, 4])
def test_what_follows_goes_first(num_pages: int) -> None:
    """Also where all goes at once, in no order."""
    world = World(1, page_size=1)
    world.pool.log.take()
    world.cache.insert([1, 2, 3], [0, 1, 2])
    world.cache.insert([1, 2, 4, 5], [0, 1, 3, 4])
    world.cache.evict(num_pages)
    world.publish()
    follower = world.follower()
    world.follow(follower)
    assert len(follower.blocks) == 5 - num_pages


def test_a_snapshot_keeps_namespaces_apart() -> None:
    """Equal tokens have equal page keys in all of them."""
    world = World(1, page_size=1)
    world.pool.log.take()  # from now on in the order in which it happens
    for namespace in (None, Namespace(lora="a")):
        world.cache.insert([1], [world.cache.num_pages], namespace)
    world.cache.insert([1, 2], [0, 2], None)  # it follows a page of the other, in order
    world.publish()
    follower = Follower(1)
    follower.restart(*world.stream.snapshot(1.0))
    assert len(follower.blocks) == 3
    assert follower.matched([1, 2]) == 2
    assert follower.matched([1, 2], Namespace(lora="a")) == 1


def test_what_is_kept_is_bounded_by_batches_and_bytes() -> None:
    world = World(2, keep=1000, num_bytes=2_000)
    for _ in range(100):
        world.step()
        world.publish()
    assert 500 < world.stream.kept_bytes <= 2_000
    nothing = World(3, keep=0)
    nothing.step()
    nothing.publish()
    batch = nothing.stream.since(FIRST, 1.0)
    assert batch is not None
    assert batch == nothing.stream.snapshot(1.0)


def test_a_long_list_of_changes_is_several_batches() -> None:
    cache = RadixCache(page_size=1)
    log = cache.record()
    log.take()
    for start in range(0, 9_000, 1_000):
        cache.insert([start, *range(999)], range(start, start + 1_000))
    worded = BlockEvents(1, "GPU")
    stream = EventStream(1, worded, 0, 0, Keep(10, 1 << 20))
    batches = list(stream.publish(log.take(), 1.0))
    assert [seq for seq, _ in batches] == [0, 1]
    follower = Follower(1, next_seq=0)
    assert all(follower.take(*batch) for batch in batches)
    assert len(follower.blocks) == 9_000


# --- words ----------------------------------------------------------------------------------------


def events_of(namespace: Any, page_size: int = 4) -> list[dict[str, Any]]:
    """What is published of three pages, two of which go; their last page goes first."""
    cache = RadixCache(page_size=page_size)
    log = cache.record()
    log.take()
    cache.insert([7, 8, 9, 10] * 3, [5, 6, 7], namespace)
    cache.insert([7, 8, 9, 10] * 3 + [1] * page_size, [5, 6, 7, 8], namespace)
    cache.evict(3)
    worded = BlockEvents(page_size, "GPU")
    stream = EventStream(page_size, worded, 3, 0, Keep(1, 1 << 20))
    [batch] = stream.publish(log.take(), 12.5)
    ts, events, rank = msgspec.msgpack.decode(batch.payload)
    assert (ts, rank) == (12.5, 3)
    return list(events)


def test_vllm_s_words() -> None:
    first, second, removed, *more = events_of(None)
    hashes = first["block_hashes"]
    assert first == {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None,
        "token_ids": [7, 8, 9, 10] * 3, "block_size": 4, "lora_id": None, "medium": "GPU",
        "lora_name": None,
    }  # fmt: skip
    assert second["parent_block_hash"] == hashes[2]
    assert removed["type"] == "BlockRemoved"
    gone = [one for event in (removed, *more) for one in event["block_hashes"]]
    assert gone == [second["block_hashes"][0], hashes[2], hashes[1]]


def test_a_namespace_in_vllm_s_words() -> None:
    named = Namespace("legal", "tenant", [("cat", 2, 3), ("dog", 9, 1)])
    first, second, *_ = events_of(named)
    assert first["lora_name"] == "legal"
    assert first["cache_salt"] == second["cache_salt"] == "tenant"
    assert first["extra_keys"] == [
        ["legal", ["cat", 2], "tenant"], ["legal", ["cat", -2]], ["legal", ["dog", 1]],
    ]  # fmt: skip
    assert second["extra_keys"] == [["legal"]]
    assert events_of(Namespace(salt="t"))[1]["extra_keys"] == [None]


def test_equal_tokens_in_two_namespaces_are_two_blocks() -> None:
    hashes = {
        namespace: tuple(events_of(namespace)[0]["block_hashes"]) for namespace in NAMESPACES[:4]
    }
    assert len({one for run in hashes.values() for one in run}) == 3 * len(hashes)
    again = events_of(Namespace(lora="legal"))[0]["block_hashes"]
    assert tuple(again) == hashes[Namespace(lora="legal")]


def test_no_hash_is_0_which_llm_d_takes_for_no_parent() -> None:
    key, worded = b"\x01" * 8 + bytes(8), BlockEvents(1, "GPU")
    assert worded.hash(key, None) == 1
    assert worded.hash(b"\xff" * 8 + bytes(7) + b"\x05", None) == 5  # the last bytes, unsigned
    [stored] = [worded.event(Stored, [PageRef(None, key, b"\x02" * 16, 1, bytes(4))])]
    assert stored.parent_block_hash == 1
    assert (
        worded.event(Stored, [PageRef(None, NO_PARENT, key, 0, bytes(4))]).parent_block_hash is None
    )


@pytest.mark.parametrize("namespace", ["lora", 7, b"salt", ("lora", None, ()), True])
def test_a_namespace_that_does_not_say_what_it_is_has_no_words(namespace: Any) -> None:
    worded = BlockEvents(1, "GPU")
    with pytest.raises(RequestError, match="no words"):
        worded.check(namespace)
    worded.check(None)
    worded.check(Namespace(lora="lora"))


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"lora": ""}, {"lora": 7}, {"salt": b"x"}, {"images": [("", 0, 1)]},
        {"images": [("cat", -1, 1)]}, {"images": [("cat", 0, 0)]}, {"images": [(7, 0, 1)]},
        {"images": [("cat", 2**31, 1)]}, {"images": [("cat", 0, 2**64)]},
        {"lora": "\ud800"}, {"salt": "\ud800"}, {"images": [("\ud800", 0, 1)]},
    ],
)  # fmt: skip
def test_a_namespace_of_nothing_or_that_no_event_carries_is_refused(wrong: dict[str, Any]) -> None:
    """One that was stored would be in a batch that the publisher cannot encode."""
    with pytest.raises(RequestError):
        Namespace(**wrong)
    assert Namespace(salt=shortened("\ud800")) != Namespace(salt=shortened("\ud801"))


def test_batches_of_take_begin_with_the_whole_tree_and_go_on_from_there() -> None:
    cache = RadixCache(page_size=1)
    feed = EventFeed(cache, "w", 1)
    cache.insert([1, 2], [0, 1])
    assert [type(event) for event in feed.take().events] == [Cleared, Stored]
    cache.insert([1, 2, 3], [0, 1, 2])
    cache.insert([1, 2, 3, 4], [0, 1, 2, 3])
    assert [len(event.page_keys) for event in feed.take().events] == [1, 1]
    assert [type(event) for event in feed.take(snapshot=True).events] == [Cleared, Stored]


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
