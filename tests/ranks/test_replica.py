"""Ranks that follow rank 0's log: equal after any run, in processes of their own; one that drifts
says so at once."""

from __future__ import annotations

import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import benchmarks.policies.gated  # noqa: F401  makes it known by name
from prefixkv.cache.eviction.adaptive import Adaptive
from prefixkv.cache.eviction.policy import policy_names
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.cache.results import PrefixLock
from prefixkv.config import DecodeConfig
from prefixkv.errors import CallerError, ConfigError, InternalError, OutOfPagesError, RequestError
from prefixkv.pages.manager import RequestPages
from prefixkv.protocol.host_copy import HostCopy
from prefixkv.protocol.ids import RoomKey
from prefixkv.ranks.oplog import ReplicatedPageManager
from prefixkv.ranks.replica import DecodeReplica, RankLog, digests, sizes
from prefixkv.request import Request
from tests.models.processes import Command

PAGE_SIZE = 4
CONFIG = DecodeConfig(max_running=4, policy="gated")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_in_processes_of_their_own_end_equal(world: int, tmp_path: pathlib.Path) -> None:
    """gloo carries the log; digests of all books are compared at every message, whole dumps at the
    end of each run."""
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.models.rank_process"]
    arguments = [str(world), str(tmp_path / "rendezvous"), "3"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Command(*command, str(rank), *arguments, **environ))
            for rank in range(world)
        ]
        for rank in ranks:
            assert rank.ended(600) == 0, rank.shown()
    sent = int(ranks[0].out[0].split()[3])
    assert sent > 100
    for rank in range(1, world):
        words = ranks[rank].out[0].split()
        assert (int(words[1]), int(words[3])) == (rank, sent)
        assert int(words[-3]) >= 3


class Ranks:
    """Rank 0's books and one replica."""

    def __init__(self, digest_every: int = 1, num_pages: int = 16, **settings: object) -> None:
        self.log = RankLog(digest_every)
        space = num_pages, PAGE_SIZE, 4
        self.pages = ReplicatedPageManager(self.log.append, *space, policy=CONFIG.policy)
        self.replica = DecodeReplica(num_pages, PAGE_SIZE, CONFIG)

    def open(
        self, tokens: range, num_new: int, now_s: float = 1.0
    ) -> tuple[RequestPages, RadixKey]:
        key = RadixKey(tokens)
        return self.pages.open(key, self.pages.match(key), num_new, now_s), key

    def finish(self, pages: RequestPages, key: RadixKey, now_s: float = 2.0) -> None:
        self.pages.cache_finished(pages, key, now_s)

    def pass_ends(self) -> None:
        self.replica.apply(self.log.take(self.pages))

    def equal(self) -> bool:
        ours, theirs = self.pages, self.replica.page_manager
        return sizes(ours) == sizes(theirs) and digests(ours) == digests(theirs)


def busy() -> Ranks:
    """Two prompts in the tree, one of them held by a request that runs, and a room that holds
    pages."""
    ranks = Ranks()
    ranks.finish(*ranks.open(range(8), 2))
    ranks.finish(*ranks.open(range(100, 112), 3))
    ranks.open(range(12), 1)
    failed, _ = ranks.open(range(200, 208), 2)
    ranks.pages.hold(failed, RoomKey(7, 0))
    ranks.pass_ends()
    assert ranks.equal()
    return ranks


def test_a_replica_has_the_rows_that_its_kernels_read() -> None:
    ranks = busy()
    assert ranks.replica.page_table.shape == (4, 16)
    assert np.array_equal(ranks.replica.page_table, ranks.pages.table.array)
    assert ranks.replica.pages(0).tolist() == ranks.pages.table.pages(0).tolist() != []


def _corruptions() -> Iterator[tuple[str, Callable[[DecodeReplica], object]]]:
    yield (
        "a use that rank 0 has not seen",
        lambda r: r.page_manager.cache.unlock(
            r.page_manager.cache.lock(r.page_manager.cache.match_prefix(range(100, 112)))
        ),
    )
    yield (
        "an evicted page",
        lambda r: r.page_manager.allocator.uncache(r.page_manager.cache.evict(1)),
    )
    yield "a lost tree", lambda r: r.page_manager.flush()
    yield "a page taken", lambda r: r.page_manager.allocator.alloc(1)
    yield "a room released", lambda r: r.page_manager.release(RoomKey(7, 0))
    yield "a room quarantined", lambda r: r.page_manager.quarantine(RoomKey(7, 0))
    yield "a row repointed", lambda r: r.page_table.__setitem__((0, 0), 15)
    yield "a row taken", lambda r: r.page_manager.table.alloc_row()
    yield "another time of use", _older


def _older(replica: DecodeReplica) -> None:
    """What was used last was used at another time: no count tells, and no page yet."""
    node = max(replica.page_manager.cache.nodes(), key=lambda node: node.mark.tick)
    node.mark = node.mark._replace(now_s=0.5)


@pytest.mark.parametrize(
    ("what", "corrupt"),
    list(_corruptions()),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rank_that_differs_says_so_at_the_next_message(
    what: str, corrupt: Callable[[DecodeReplica], object]
) -> None:
    ranks = busy()
    corrupt(ranks.replica)
    raw = ranks.log.take(ranks.pages)
    with pytest.raises(InternalError, match="differs from rank 0 in message 1"):
        ranks.replica.apply(raw)
    with pytest.raises(
        InternalError, match="differs from rank 0 in message 1"
    ):  # and is of no use any more
        ranks.replica.apply(ranks.log.take(ranks.pages))


def test_without_digests_the_pages_of_the_next_operation_tell() -> None:
    """Rank 1 thinks another prompt the older: nothing differs that can be counted, until one has to
    go."""
    ranks = Ranks(digest_every=0)
    for start in (0, 100, 200):
        ranks.finish(*ranks.open(range(start, start + 20), 5))
    ranks.pass_ends()
    marks = {node.key[:4]: node for node in ranks.replica.page_manager.cache.nodes()}
    first, second = list(marks.values())[:2]
    first.mark, second.mark = second.mark, first.mark
    for node in (first, second):
        ranks.replica.page_manager.cache._queue.add(node)
    ranks.pass_ends()
    ranks.open(range(300, 320), 5)
    with pytest.raises(InternalError, match=r"in message 2.*this rank came to"):
        ranks.pass_ends()


def test_messages_are_read_once_each_and_in_order() -> None:
    ranks = Ranks()
    first = ranks.log.take(ranks.pages)
    ranks.open(range(8), 2)
    second = ranks.log.take(ranks.pages)
    for wrong, message in (
        (second, "message 1 of rank 0 came where 0"),
        (b"", "no message"),
        (b"\xc1", "no message"),
    ):
        with pytest.raises(CallerError, match=message):
            ranks.replica.apply(wrong)
    ranks.replica.apply(first)
    with pytest.raises(CallerError, match="message 0 of rank 0 came where 1"):
        ranks.replica.apply(first)
    ranks.replica.apply(second)
    assert ranks.equal()


@pytest.mark.parametrize(
    ("replica", "name"),
    [
        (lambda: DecodeReplica(17, PAGE_SIZE, CONFIG), "num_pages is 17"),
        (lambda: DecodeReplica(16, 8, CONFIG), "page_size is 8"),
        (lambda: DecodeReplica(16, PAGE_SIZE, DecodeConfig(max_running=5)), "max_running is 5"),
        (
            lambda: DecodeReplica(16, PAGE_SIZE, DecodeConfig(max_running=4, policy="lru")),
            "policy is lru",
        ),
        (
            lambda: DecodeReplica(16, PAGE_SIZE, DecodeConfig(max_running=4, cache=False)),
            "cache is False",
        ),
    ],
)
def test_a_rank_of_other_settings_is_refused(
    replica: Callable[[], DecodeReplica], name: str
) -> None:
    ranks = Ranks()
    with pytest.raises(ConfigError, match=name):
        replica().apply(ranks.log.take(ranks.pages))


def test_a_policy_object_stands_for_one_of_each_rank() -> None:
    log = RankLog(1)
    config = DecodeConfig(max_running=4, policy=Adaptive(half_life_s=60.0))
    sizes_of = 16, PAGE_SIZE, 4
    pages = ReplicatedPageManager(log.append, *sizes_of, **config.for_page_manager(16))
    message = log.take(pages)
    replicas = [DecodeReplica(16, PAGE_SIZE, config) for _ in range(2)]
    for replica in replicas:
        assert replica.page_manager.cache.policy.half_life_s == 60.0  # type: ignore[attr-defined]
        replica.apply(message)
    other = DecodeConfig(max_running=4, policy=Adaptive(half_life_s=61.0))
    with pytest.raises(ConfigError, match=r"'half_life_s': 61\.0.*'half_life_s': 60\.0"):
        DecodeReplica(16, PAGE_SIZE, other).apply(message)


def test_what_rank_0_could_not_get_counts_as_a_use_everywhere() -> None:
    ranks = busy()
    with pytest.raises(OutOfPagesError):
        ranks.open(range(100, 140), 16)
    ranks.pass_ends()
    assert ranks.equal()
    ranks.open(range(100, 140), 7)
    ranks.pass_ends()
    assert ranks.equal()


def test_namespaces_travel_or_are_refused() -> None:
    log = RankLog()
    for namespace in (None, "lora", 2**64 - 1, -(2**63), b"salt", ("tenant", ("lora", 1))):
        request = Request("r", [1, 2, 3, 4], room=1, namespace=namespace)
        log.check(request)
        ranks = Ranks()
        pages = ranks.pages.open(request.key, ranks.pages.match(request.key), 1, 0.0)
        ranks.finish(pages, request.key)
        ranks.pass_ends()
        assert (
            ranks.replica.page_manager.cache.match_prefix(
                [1, 2, 3, 4], namespace=namespace
            ).prefix_len
            == 4
        )
    for refused in (frozenset({1}), ("tenant", 1.5), object(), "\ud800", ("a", "\ud800"), 2**64):
        with pytest.raises(RequestError, match="namespace"):
            log.check(Request("r", [1], room=1, namespace=refused))


@pytest.mark.parametrize(
    ("host", "device", "why"),
    [
        ([8], [1], "page 8 is not"),
        ([0], [16], "page 16 is not"),
        ([0, 1], [1], "a copy of 2 to 1 pages"),
        ([], [], "a copy of 0 to 0 pages"),
    ],
)
def test_copies_of_pages_that_there_are_not_change_nothing(
    host: list[int], device: list[int], why: str
) -> None:
    ranks = Ranks()
    ranks.log.host_pages = 8
    ranks.replica = replica = DecodeReplica(16, PAGE_SIZE, CONFIG, host_pages=8)
    ranks.log.copy(HostCopy(1, False, np.array([3, 7]), np.array([2, 15])))
    ranks.pass_ends()
    (good,) = replica.take_copies()
    assert (good.host_pages.tolist(), good.device_pages.tolist()) == ([3, 7], [2, 15])
    ranks.open(range(8), 2)
    ranks.log.copy(HostCopy(2, True, np.array(host, np.int32), np.array(device, np.int32)))
    with pytest.raises(CallerError, match=why):
        replica.apply(ranks.log.take(ranks.pages))
    assert replica.num_batches == 1
    assert not replica.take_copies()
    assert replica.page_manager.allocator.free_pages == 16


def test_a_message_is_the_operations_since_the_last() -> None:
    ranks = Ranks(digest_every=0)
    ranks.pass_ends()
    ranks.open(range(8), 2)
    ranks.pass_ends()
    idle = ranks.log.take(ranks.pages)
    ranks.replica.apply(idle)
    assert len(idle) < 150
    assert ranks.equal()


@pytest.mark.parametrize("policy", policy_names())
def test_a_listener_on_rank_0_leaves_no_trace(policy: str) -> None:
    """What is remembered of pages that went may be a sum of floats: it has to be summed in one
    order."""
    chance = random.Random(1)
    ranks = [RadixCache(page_size=1, policy=policy, pool_pages=200) for _ in range(2)]
    ranks[0].drain_changes()  # a router reads rank 0's events
    locks: list[list[PrefixLock]] = []
    free = list(range(200))
    for step in range(400):
        now_s = 1000.0 + 37.3 * step
        tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 6))]
        action = chance.choice(
            ["insert", "insert", "insert", "lock", "unlock", "evict all", "evict"]
        )
        if action == "insert":
            there = ranks[0].match_prefix(tokens)
            new = [free.pop() for _ in range(len(tokens) - there.prefix_len)]
            for cache in ranks:
                cache.insert(tokens, [*there.pages.tolist(), *new], priority=step % 3, now_s=now_s)
        elif action == "lock":
            locks.append([cache.lock(cache.match_prefix(tokens), now_s=now_s) for cache in ranks])
        elif action == "unlock" and locks:
            for cache, lock in zip(ranks, locks.pop(), strict=True):
                cache.unlock(lock)
        elif action.startswith("evict"):
            num_pages = ranks[0].evictable_pages if action == "evict all" else 2
            taken = [set(cache.evict(num_pages, now_s=now_s).tolist()) for cache in ranks]
            assert taken[0] == taken[1]
            free += taken[0]
        assert _marks(ranks[0]) == _marks(ranks[1])


def _marks(cache: RadixCache) -> list[tuple[bytes, str, str]]:
    return sorted((bytes(node.pages), repr(node.mark), repr(node.steps)) for node in cache.nodes())
