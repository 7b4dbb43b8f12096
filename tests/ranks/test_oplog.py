"""A replica that follows the log ends up equal to rank 0, whatever happened; one that drifts says
so."""

from typing import Any

import numpy as np
import pytest

from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import Use
from prefixkv.cache.node import Mark
from prefixkv.cache.radix_key import RadixKey
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import InternalError
from prefixkv.pages.manager import PageManager
from prefixkv.ranks.oplog import AnyOp, Opened, Replica, ReplicatedPageManager, decode_op, encode_op
from prefixkv.ranks.replica import RankLog
from tests.models.sim import Storm
from tests.models.sim_engines import ROWS, PairSim


class LoggedSim(PairSim):
    """A pair whose decode scheduler logs all that happens to its books, in every life."""

    def __post_init__(self) -> None:
        self.logs: list[list[bytes]] = []
        self.leaders: list[ReplicatedPageManager] = []
        super().__post_init__()

    def decode_page_manager(self, log: RankLog) -> ReplicatedPageManager:
        ops: list[bytes] = []
        settings: dict[str, Any] = {"policy": self.policy, "num_slots": self.num_slots}
        pages = ReplicatedPageManager(
            lambda op: ops.append(encode_op(op)), self.decode_pages, 4, ROWS, **settings
        )
        self.logs.append(ops)
        self.leaders.append(pages)
        return pages


def _tree(pages: PageManager) -> list[tuple[object, ...]]:
    return sorted(
        (node.start, node.end, bytes(node.key), bytes(node.pages), node.lock_ref)
        for node in pages.cache.nodes()
    )


def _assert_equal(ours: PageManager, theirs: PageManager) -> None:
    assert _tree(ours) == _tree(theirs)
    assert np.array_equal(ours.table.array, theirs.table.array)
    assert ours.allocator.free_runs() == theirs.allocator.free_runs()
    assert set(ours.allocator.owners()) == set(theirs.allocator.owners())
    if ours.slots is not None and theirs.slots is not None:
        assert ours.slots.free_runs() == theirs.slots.free_runs()
        assert set(ours.slots.owners()) == set(theirs.slots.owners())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_replica_equals_rank_0_after_a_storm(seed: int) -> None:
    num_slots = 5 * (seed // 3)  # of extra state
    storm = Storm(abort=0.02, fail_at_check=0.03, drop=0.02, flush=0.004 * (seed % 2))
    pages = (13, 18)[seed % 2]
    sim = LoggedSim(seed, storm, decode_pages=pages, failure_policy="retry", num_slots=num_slots)
    sim.run()
    logs, leaders = sim.logs, sim.leaders
    assert sum(map(len, logs)) > 10
    for leader, log in zip(leaders, logs, strict=True):
        settings: dict[str, Any] = {"policy": leader.cache.policy.name, "num_slots": num_slots}
        replica = Replica(
            PageManager(leader.num_pages, leader.page_size, len(leader.table.array), **settings)
        )
        for raw in log:
            replica.apply(decode_op(raw))
        replica.page_manager.check_invariants()
        _assert_equal(leader, replica.page_manager)


def test_policies_hear_of_all_tokens_of_a_load_s_request_on_every_rank() -> None:
    """A load from host memory is of a part of them; what a policy makes of it has to be equal."""

    class Hearing(LeastRecentlyUsed):
        name = "hearing"

        def __init__(self) -> None:
            super().__init__()
            self.heard: list[bytes] = []

        def mark(self, use: Use) -> Mark:
            self.heard.append(use.data)
            return super().mark(use)

    ops: list[bytes] = []
    policies = Hearing(), Hearing()
    pages = ReplicatedPageManager(
        lambda op: ops.append(encode_op(op)), 16, 4, ROWS, policy=policies[0], spare_rows=1
    )
    replica = Replica(PageManager(16, 4, ROWS, policy=policies[1], spare_rows=1))
    key, longer = RadixKey(range(8)), RadixKey(range(24))
    pages.cache_finished(pages.open(key, pages.match(key), 2, 0.0), key, 0.0)
    load = pages.open(longer.prefix(16), pages.match(longer), 2, 1.0, is_load=True)
    pages.cache_unfinished(load, longer.prefix(16), 2.0)
    for raw in ops:
        replica.apply(decode_op(raw))
    assert longer.data in policies[0].heard
    assert policies[0].heard == policies[1].heard
    _assert_equal(pages, replica.page_manager)


def test_a_replica_that_drifts_raises() -> None:
    log: list[AnyOp] = []
    leader = ReplicatedPageManager(log.append, 8, 4, 2)
    key = RadixKey(range(8))
    pages = leader.open(key, leader.match(key), 2, 0.0)
    leader.cache_finished(pages, key, 0.0)
    replica = Replica(PageManager(8, 4, 2))
    for op in log:
        replica.apply(op)
    replica.page_manager.flush()  # what rank 0 did not do
    pages = leader.open(key, leader.match(key), 0, 1.0)
    assert isinstance(log[-1], Opened)
    with pytest.raises(InternalError, match="rank 0 matched 8 tokens, this rank 0"):
        replica.apply(log[-1])


def test_what_waits_goes_last_on_every_rank() -> None:
    log: list[AnyOp] = []
    leader = ReplicatedPageManager(log.append, 8, 4, 2, policy="lru")
    replica = Replica(PageManager(8, 4, 2, policy="lru"))

    def follow() -> None:
        for op in log:
            replica.apply(decode_op(encode_op(op)))
        log.clear()

    for begin in (0, 100):
        key = RadixKey(range(begin, begin + 8), ("lora", 1))
        leader.cache_finished(leader.open(key, leader.match(key), 2, 0.0), key, 0.0)
    old = RadixKey(range(13), ("lora", 1))  # its last page is not whole
    match = leader.match(old)
    assert match is not None
    number = leader.want(match)
    new = RadixKey(range(200, 224))
    pages = leader.open(new, leader.match(new), 6, 1.0)
    follow()
    _assert_equal(leader, replica.page_manager)
    assert replica.page_manager.cache.match_prefix(old).prefix_len == 8
    leader.drop(pages)
    leader.unwant(number)
    follow()
    assert replica.page_manager.cache.num_wants == 0
    replica.page_manager.want(
        match_of := replica.page_manager.cache.match_prefix(old)
    )  # as rank 0 did not
    assert match_of.prefix_len == 8
    leader.want(match)
    with pytest.raises(InternalError, match="this rank came to 3 where rank 0 has 2"):
        follow()


def test_scheduler_logs_nothing_without_a_log() -> None:
    assert type(DecodeScheduler(PageManager(4, 4, 1)).pages) is PageManager
