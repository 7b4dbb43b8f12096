"""The router: its index against the caches it follows, and where it sends what."""

import random

import numpy as np
import pytest

from prefixkv.cache.events import Cleared, EventBatch, EventFeed, Removed, Stored, page_keys
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.errors import CallerError, ConfigError, ProtocolError
from prefixkv.serving.router import BoundedAffinityRouter, WorkerIndex

PAGE_SIZE = 2
SYSTEM = list(range(1000, 1016))  # 8 pages


def keys_of(tokens: list[int]) -> list[bytes]:
    return page_keys(RadixKey(tokens).data, PAGE_SIZE)


class Worker:
    """A cache and its feed."""

    def __init__(self, name: str = "w", incarnation: int = 1) -> None:
        self.cache = RadixCache(page_size=PAGE_SIZE, policy="lru")
        self.feed = EventFeed(self.cache, name, incarnation)
        self._next_page = 0

    def insert(self, tokens: list[int], namespace: str | None = None) -> None:
        match = self.cache.match_prefix(tokens, namespace)
        missing = (len(tokens) - match.prefix_len) // PAGE_SIZE
        new = range(self._next_page, self._next_page + missing)
        self._next_page += missing
        self.cache.insert(tokens, np.array([*match.pages.tolist(), *new], np.int32), namespace)


def chat(number: int, pages: int) -> list[int]:
    """Tokens that begin with everybody's system prompt."""
    return [*SYSTEM, *(2000 + 100 * number + i for i in range(PAGE_SIZE * pages))]


# --- the index ------------------------------------------------------------------------------------


class Life:
    """Random things happen to a cache; prompts with much in common are looked up."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.worker = Worker()
        self.prompts = [[self.rng.randrange(3) for _ in range(24)] for _ in range(40)]

    def step(self) -> None:
        namespace = self.rng.choice([None, "lora"])
        match self.rng.randrange(12):
            case 0 | 1 | 2:
                self.worker.cache.evict(self.rng.randrange(1, 12))
            case 3:
                if not self.rng.randrange(20):
                    self.worker.cache.reset()
            case _:
                prompt = self.rng.choice(self.prompts)
                self.worker.insert(prompt[: PAGE_SIZE * self.rng.randrange(1, 13)], namespace)

    def depths(self, index: WorkerIndex) -> list[tuple[int, int]]:
        """(by the index, by the cache) for every prompt, in pages."""
        return [
            (
                index.depth(namespace, keys_of(prompt)),
                self.worker.cache.match_prefix(prompt, namespace).depth,
            )
            for prompt in self.prompts
            for namespace in (None, "lora")
        ]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_in_host_memory_counts_as_what_is_in_the_pool(seed: int) -> None:
    """Each has its own events in a worker's batches; a gap is mended for both."""
    life, host = Life(seed), Life(seed)
    host.rng = random.Random(seed + 1000)
    host.worker.feed = EventFeed(host.worker.cache, "w", 1, is_behind=True)
    index = WorkerIndex(1000)

    def take(snapshot: bool = False) -> EventBatch:
        batch, more = (one.worker.feed.take(snapshot) for one in (life, host))
        return EventBatch("w", 1, batch.seq, batch.events + more.events)

    for _ in range(80):
        for _ in range(life.rng.randrange(4)):
            life.rng.choice([life, host]).step()
        batch = take()
        if life.rng.randrange(8):
            in_sync = index.apply(EventBatch.decode(batch.encode()))
            if index.next_seq and not in_sync:
                assert index.apply(EventBatch.decode(take(snapshot=True).encode()))
            pairs = zip(life.depths(index), host.depths(index), strict=True)
            assert all(ours == max(pool, host) for (ours, pool), (_, host) in pairs)
            caches = life.worker.cache, host.worker.cache
            assert index.num_pages == sum(cache.num_pages for cache in caches)


@pytest.mark.parametrize("seed", range(5))
def test_a_lost_batch_is_noticed_and_a_fresh_one_mends_it(seed: int) -> None:
    life = Life(seed)
    index = WorkerIndex(1000)
    synced = index.apply(life.worker.feed.take())
    for _ in range(100):
        life.step()
        batch = life.worker.feed.take()
        if life.rng.randrange(10):
            was_synced, synced = synced, index.apply(EventBatch.decode(batch.encode()))
            was_reset = any(isinstance(event, Cleared) for event in batch.events)
            assert was_synced or synced == was_reset
        else:
            synced = False
        if not synced and life.rng.randrange(2):
            assert index.apply(life.worker.feed.take(snapshot=True))
            synced = True
        if synced:
            assert all(ours == theirs for ours, theirs in life.depths(index))
            assert index.num_pages == life.worker.cache.num_pages


@pytest.mark.parametrize("lives", [(1, 2), (2, 1)])
def test_batches_heard_twice_or_of_a_predecessor_change_nothing(lives: tuple[int, int]) -> None:
    """Which life is the newer one, its number does not say. One whose beginning was not heard is
    out of sync."""
    old, new = (Worker(incarnation=life) for life in lives)
    index = WorkerIndex(1000)
    old.insert([1, 2, 3, 4])
    first = old.feed.take()
    assert index.apply(first)
    assert index.apply(first)
    assert index.num_pages == 2
    new.insert([5, 6])
    assert index.apply(new.feed.take())
    old.insert([1, 2, 3, 4, 5, 6])
    assert index.apply(old.feed.take())
    assert (index.num_pages, index.depth(None, keys_of([5, 6]))) == (1, 1)
    assert index.depth(None, keys_of([1, 2])) == 0
    late = Worker(incarnation=3)
    late.feed.take()
    late.insert([3, 4])
    assert not index.apply(late.feed.take())
    assert index.num_pages == 0
    assert index.apply(late.feed.take(snapshot=True))
    assert index.depth(None, keys_of([3, 4])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_pages", [0, 1, 7, 20])
def test_the_index_is_bounded_and_never_claims_more(max_pages: int) -> None:
    life = Life(1)
    index = WorkerIndex(max_pages)
    for _ in range(300):
        life.step()
        assert index.apply(life.worker.feed.take())
        assert index.num_pages <= max_pages
        assert all(ours <= theirs for ours, theirs in life.depths(index))
    life.worker.cache.evict(10_000)
    assert index.apply(life.worker.feed.take())
    assert index.num_pages == 0
    assert not index._held


def test_pages_behind_a_page_beyond_the_bound_take_no_room() -> None:
    index, keys = WorkerIndex(2), (b"a", b"b", b"c")
    events = (
        Cleared(), Stored(None, b"", (b"k",)), Stored(None, b"", keys[:2]),
        Removed(None, b"", (b"k",)), Stored(None, b"b", keys[2:]),
    )  # fmt: skip
    assert index.apply(EventBatch("w", 1, 0, events))
    assert index.num_pages == index.depth(None, keys) == 1


def test_what_is_expected_counts_until_its_time_or_until_it_is_there() -> None:
    worker = Worker()
    index = WorkerIndex(1000)
    assert index.apply(worker.feed.take())
    keys = keys_of(chat(1, 4))
    index.expect(None, keys, until_s=10.0)
    index.expire(9.0)
    assert index.depth(None, keys) == index.num_pages == 12
    worker.insert(SYSTEM)
    assert index.apply(worker.feed.take())
    assert index.num_pages == 12
    index.expire(10.0)
    assert index.depth(None, keys) == index.num_pages == 8
    index.expect(None, keys, until_s=20.0)
    index.expect(None, keys, until_s=30.0)
    index.expire(20.0)
    assert index.depth(None, keys) == 12
    index.forget()
    index.expire(30.0)
    assert index.num_pages == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\xff", b"\x93\x01\x02\x03", EventBatch("w", 1, 0, ()).encode()[:-2],
        # A namespace that cannot be looked up.
        EventBatch("w", 1, 0, (Stored({1: 2}, b"", (b"k",)),)).encode(),
    ],
)  # fmt: skip
def test_a_malformed_batch_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        EventBatch.decode(raw)


# --- where requests go ----------------------------------------------------------------------------


class Cluster:
    """A router and caches that store a prompt as soon as it is routed there."""

    def __init__(self, num_workers: int, **settings: float) -> None:
        self.router = BoundedAffinityRouter(**settings)
        self.workers: dict[str, Worker] = {}
        for number in range(num_workers):
            self.join(f"w{number}")

    def join(self, name: str, incarnation: int = 1) -> None:
        self.workers[name] = Worker(name, incarnation)
        self.router.add_worker(name)
        assert self.router.apply(self.workers[name].feed.take())

    def send(self, tokens: list[int], now_s: float, *, end: bool = True, **options: float) -> str:
        route = self.router.route(keys_of(tokens), now_s, **options)
        worker = self.workers[route.worker]
        worker.insert(tokens)
        assert self.router.apply(worker.feed.take())
        if end:
            self.router.ended(route, now_s)
        return route.worker


def test_the_turns_of_a_chat_meet_on_one_worker_and_chats_spread() -> None:
    cluster = Cluster(8)
    homes = {number: cluster.send(chat(number, 40), 0.0) for number in range(64)}
    counts = [list(homes.values()).count(name) for name in cluster.workers]
    assert sum(counts) == 64
    assert max(counts) <= 1.2 * 8 + 2 + 1  # the bound, the slack, and the request that exceeds them
    assert min(counts) >= 6
    stayed = 0
    for turn in range(2, 6):
        for number in sorted(homes, key=lambda number: number * 37 % 64):
            home = cluster.send(chat(number, 40 * turn), 100.0 * turn)
            stayed += home == homes[number]
            homes[number] = home
    assert stayed >= 0.95 * 64 * 4  # a few move, where their worker was too busy, and stay there


@pytest.mark.parametrize("num_workers", [2, 3, 4, 6, 8, 16, 40])
def test_a_worker_that_joins_late_is_not_starved_though_all_others_hold_the_system_prompt(
    num_workers: int,
) -> None:
    """Also where the system prompt is nearly all of a prompt."""
    cluster = Cluster(num_workers - 1)
    for number in range(8 * num_workers):
        cluster.send(chat(number, 1), 0.0)
    cluster.join("new")
    homes = [cluster.send(chat(1000 + number, 1), 1.0) for number in range(16 * num_workers)]
    assert homes.count("new") > 8
    assert cluster.send(chat(1, 40), 2.0) != "new"  # a chat stays where it is


def test_a_document_that_everybody_asks_about_spreads_before_its_worker_is_too_busy() -> None:
    cluster = Cluster(8, bound=1.2, slack=2.0)
    document = chat(0, 40)
    for question in range(200):
        ids = [*document, 9000 + 2 * question, 9001 + 2 * question]
        cluster.send(ids, 0.1 * question, end=False)
        if question > 20:
            loads = cluster.router.loads(0.1 * question).values()
            average = 50.0
            assert max(loads) <= 1.2 * sum(loads) / 8 + 3 * average
    assert cluster.router.stats()["overflowed"] > 0


def test_a_burst_with_a_new_prefix_goes_together_before_any_event_tells() -> None:
    router = BoundedAffinityRouter(slack=4.0, expect_s=10.0)
    for number in range(8):
        router.add_worker(f"w{number}")
    routes = [router.route(keys_of([*chat(0, 40), 9000 + 2 * i, 1]), 0.0) for i in range(4)]
    assert len({route.worker for route in routes}) == 1
    assert [route.matched_pages for route in routes] == [0, 48, 48, 48]
    for route in routes:
        router.ended(route, 0.0)
    # Nothing came of it: it is forgotten, with a request or without.
    assert router.stats()["known_pages"] == 52
    router.expire(10.0)
    assert router.stats()["known_pages"] == 0
    assert router.route(keys_of(chat(0, 40)), 1e6).matched_pages == 0


def test_load_is_what_is_in_progress_and_what_ended_lately() -> None:
    router = BoundedAffinityRouter(fade_s=100.0)
    router.add_worker("w")
    route = router.route(keys_of(list(range(18))), 0.0)  # 9 pages
    assert router.loads(1000.0) == {"w": 10.0}
    for _ in range(2):
        router.ended(route, 1000.0)
    assert router.loads(1000.0) == {"w": 10.0}
    assert router.loads(1100.0)["w"] == pytest.approx(10 / np.e)
    assert router.loads(900.0)["w"] == pytest.approx(10 / np.e)  # a clock that steps back


def test_a_lost_worker_is_forgotten_and_may_come_back() -> None:
    cluster = Cluster(2)
    home = cluster.send(chat(1, 10), 0.0)
    route = cluster.router.route(keys_of(chat(1, 12)), 0.0)
    assert (route.worker, route.matched_pages) == (home, 18)
    cluster.router.remove_worker(home)
    cluster.router.ended(route, 1.0)
    other = cluster.send(chat(1, 10), 1.0)
    assert other != home
    cluster.join(home, incarnation=2)
    cluster.router.ended(route, 2.0)
    assert cluster.router.loads(2.0)[home] == 0
    assert cluster.send(chat(1, 14), 2.0) == other
    assert cluster.router.route(keys_of(chat(1, 14)), 2.0, among=[home]).worker == home


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    router = BoundedAffinityRouter()
    with pytest.raises(CallerError, match="no worker"):
        router.route([], 0.0)
    router.add_worker("w")
    with pytest.raises(CallerError, match="known already"):
        router.add_worker("w")
    with pytest.raises(CallerError, match="unknown"):
        router.remove_worker("v")
    with pytest.raises(CallerError, match="unknown"):
        router.route([], 0.0, among=["v"])
    with pytest.raises(CallerError, match="now_s"):
        router.route([], float("nan"))
    assert router.apply(EventBatch("v", 1, 5, ()))
    assert router.stats()["routed"] == 0


@pytest.mark.parametrize(
    "settings",
    [{"bound": 0.9}, {"slack": -1}, {"fade_s": 0}, {"min_worth": -0.1}, {"expect_s": -1},
     {"max_pages": -1}, {"bound": float("nan")}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BoundedAffinityRouter(**settings)
