"""What the pool cannot keep stays in host memory: written behind a request's end, loaded for the
next one, whatever else happens in between."""

from collections.abc import Sequence
from typing import Any

import pytest

from prefixkv import ComputeConfig, DecodeRequest, Hints, OutOfPagesError
from prefixkv.cache.eviction.plain import LeastFrequentlyUsed
from prefixkv.cache.eviction.policy import Policy, Use
from prefixkv.cache.node import Mark
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.decode import ending, host_tier
from prefixkv.decode.admission import HELD
from prefixkv.decode.host_tier import FRESH_S, HOST, HostPages
from prefixkv.decode.rooms import Workers
from prefixkv.decode.sources import Sources
from prefixkv.pages.groups import GroupSpec
from prefixkv.protocol.events import HostCopy, HostCopyDone, PrefillAway, PrefillReady
from prefixkv.protocol.ids import RoomKey
from prefixkv.protocol.messages import Promise
from prefixkv.ranks.leader import RankLeader
from tests.support.schedulers import host_of
from tests.unit.decode.desk import PAGE_SIZE, Desk, OpenRoom


class HostDesk(Desk):
    """A desk with host memory, whose copies are made by hand."""

    def __init__(
        self,
        num_pages: int = 16,
        host_pages: int = 32,
        spare_rows: int = 4,
        are_ready: bool = True,
        host_policy: str | Policy = "lru",
        **settings: Any,
    ) -> None:
        settings = {"policy": "lru", "admission": "fifo", **settings}
        host = HostPages(host_pages, host_policy, None if are_ready else int)
        super().__init__(num_pages, spare_rows=spare_rows, host=host, **settings)
        assert host_of(self.scheduler) is not None
        self.host = host_of(self.scheduler)
        self.under_way: list[HostCopy] = []

    def orders(self) -> list[HostCopy]:
        """The copies that were ordered since the last call."""
        new = self.scheduler.take_orders()
        self.under_way += new
        return self._checked(new)

    def end_copy(self, order: HostCopy | None = None, error: Exception | None = None) -> HostCopy:
        """The copy ends, the oldest if none is named."""
        self.orders()
        order = order or self.under_way[0]
        self.under_way.remove(order)
        done = HostCopyDone(order.number, error, 1, 1e-6)
        self._checked(self.scheduler.hear(done, self.now_s))
        return order

    def end_all_copies(self) -> None:
        while self.orders() or self.under_way:
            self.end_copy()

    def promises(self) -> dict[RoomKey, Promise]:
        opened = [command.promise for command in self.commands() if isinstance(command, OpenRoom)]
        return {RoomKey(promise.room, promise.generation): promise for promise in opened}

    def leave_in_host_memory(self, rid: str = "a", tokens: int = 16, **how: Any) -> DecodeRequest:
        """A request has been here, was written, and the pool has forgotten it."""
        req = self.start(rid, tokens)
        self.finish(req, **how)
        self.end_all_copies()
        self.evict(self.pages.num_pages)
        assert self.prefix_of(req) == 0
        self.commands()
        return req

    def _go_on(self) -> None:
        super()._go_on()
        self.host.ready(self.host.allocator.num_pages)
        self.end_all_copies()

    def at_rest_after(self, req: DecodeRequest) -> None:
        self.finish(req)
        self.end_all_copies()
        self.at_rest()

    def at_rest(self) -> None:
        super().at_rest()
        self.pop_failed()
        self.scheduler.pop_needs_prefill()
        assert not self.under_way
        assert not len(self.host)
        assert self.host.cache.protected_pages == self.host.allocator.owned_pages == 0
        assert not self.host.due
        assert self.scheduler.idle


def prompt(rid: str, num_tokens: int) -> list[int]:
    """The tokens that `Desk.request` gives a request of this name."""
    return [ord(rid[0]) * 1000 + place for place in range(num_tokens)]


def next_turn(desk: HostDesk, rid: str = "b", num_tokens: int = 22) -> DecodeRequest:
    """The conversation of "a" goes on: 16 tokens that were here, then new ones."""
    req = desk.add(rid, prompt("a", num_tokens))
    assert desk.admit() == [rid]
    return req


def two_that_need_it(**settings: Any) -> tuple[HostDesk, DecodeRequest, DecodeRequest]:
    """Both go on from the 16 tokens in host memory, each in its own way."""
    desk = HostDesk(num_pages=32, **settings)
    desk.leave_in_host_memory()
    b, c = desk.add("b", prompt("a", 22)), desk.add("c", [*prompt("a", 16), 7, 7, 7])
    assert desk.admit() == ["b", "c"]
    return desk, b, c


# --- written, and loaded --------------------------------------------------------------------------


def test_what_the_pool_forgets_is_loaded_again() -> None:
    desk = HostDesk()
    desk.leave_in_host_memory()
    assert desk.host.cache.num_pages == 4
    req = next_turn(desk)
    (promise,) = desk.promises().values()
    assert promise.prefix_len == req.prefix_len == 16
    assert len(promise.page_ids()) == 2
    (load,) = desk.orders()
    assert load.is_load
    assert load.device_pages.tolist() == req.pages[:4].tolist()
    # Prefill's part alone is not enough, and neither is the load alone.
    desk.succeed(req.room_key)
    assert desk.transferred() == []
    desk.end_copy()
    assert desk.transferred() == ["b"]
    assert (req.hit_tokens, req.brought.get("loaded"), req.shared_tokens) == (16, 16, 0)
    assert desk.prefix_of(req) == 20
    counters = desk.scheduler.counters
    assert (counters["host_hit_tokens"], counters["host_loaded_pages"]) == (16, 4)
    desk.finish(req)
    desk.end_all_copies()
    assert desk.host.cache.num_pages == 5
    assert counters["host_written_pages"] == 5, "what is there already is not written again"
    desk.at_rest()


def test_a_page_that_nothing_waits_for_is_not_written() -> None:
    desk = HostDesk()
    desk.finish(desk.start("a", 16), continues=False)
    desk.finish(desk.start("b", 16, cacheable=False))
    desk.finish(desk.start("c", 3))
    desk.abort(desk.start("d", 16))
    assert desk.orders() == []
    kept = desk.start("e", 16, max_new=8, outputs=7)
    desk.finish(kept, keep_tokens=16)
    (write,) = desk.orders()
    assert len(write.host_pages) == 4, "and not the two of the answer"
    desk.end_copy()
    assert desk.scheduler.counters["host_missed_pages"] == 0


def test_a_write_waits_for_the_device() -> None:
    class Late:
        done = False

        def query(self) -> bool:
            return self.done

    event, desk = Late(), HostDesk()
    desk.finish(desk.start("a", 16), after=event)
    assert desk.orders() == [], "the device may still write what would be read"
    event.done = True
    desk.scheduler.release_deferred(desk.now_s)
    assert len(desk.orders()) == 1


def test_a_write_leaves_a_page_to_each_that_runs() -> None:
    desk = HostDesk(num_pages=8)
    a = desk.start("a", 16)
    others = [desk.start(rid, 4) for rid in "xyz"]
    desk.finish(a)
    (write,) = desk.orders()
    assert len(write.device_pages) == 2, "five could be had, three may be needed"
    desk.end_copy()
    # The others are done, so the rest has its turn.
    for req in others:
        desk.finish(req, continues=False)
    desk.admit()
    (write,) = desk.orders()
    assert len(write.device_pages) == 2
    desk.end_copy()
    assert desk.host.cache.match_prefix(prompt("a", 16)).prefix_len == 16
    desk.at_rest()


def test_what_goes_on_behind_a_write_is_written_when_that_has_ended() -> None:
    desk = HostDesk(num_pages=32)
    desk.finish(desk.start("a", 16))
    (write,) = desk.orders()
    desk.finish(desk.start("b", prompt("a", 24)))
    assert desk.orders() == [], "a part of it is being written"
    desk.end_copy(write)
    (rest,) = desk.orders()
    assert len(rest.host_pages) == 2
    desk.end_copy()
    assert desk.host.cache.match_prefix(prompt("a", 24)).depth == 6
    desk.at_rest()


def test_what_is_due_is_not_matched_again_before_a_write_could_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = HostDesk(num_pages=8)
    a = desk.start("a", 16, 1)
    others = [desk.start(rid, 4, 1) for rid in "wxyz"]
    desk.finish(a)
    assert desk.orders() == []
    assert desk.host.due
    find, found = desk.pages.find, []
    monkeypatch.setattr(desk.pages, "find", lambda key: found.append(key) or find(key))
    for _ in range(3):
        desk.admit()
    assert not found
    desk.abort(others.pop())
    found.clear()
    desk.admit()
    assert len(desk.orders()) == 1
    for _ in range(3):
        desk.admit()
    assert len(found) <= 2
    for req in others:
        desk.finish(req, continues=False)
    for _ in range(3):
        desk.admit()
        desk.end_all_copies()
    assert desk.host.cache.match_prefix(prompt("a", 16)).prefix_len == 16
    desk.at_rest()


def test_what_is_due_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_MOST_DUE_BYTES", 4 * 40)
    desk = HostDesk(num_pages=32)
    held = desk.start("z", 4)
    monkeypatch.setattr(host_tier, "_MOST_WRITES", 0)
    for rid in "abcd":
        desk.finish(desk.start(rid, 16))
    assert desk.scheduler.counters["host_missed_pages"] == 8, "of a and b"
    desk.finish(desk.start("c2", prompt("c", 17)))  # the same path, once more
    monkeypatch.setattr(host_tier, "_MOST_WRITES", 32)
    desk.finish(held, continues=False)
    desk.end_all_copies()
    there = [desk.host.cache.match_prefix(prompt(rid, 16)).prefix_len for rid in "abcd"]
    assert there == [0, 0, 16, 16]
    desk.at_rest()


def test_no_eviction_takes_what_a_copy_reads() -> None:
    desk = HostDesk(num_pages=6)
    desk.finish(desk.start("a", 16))
    (write,) = desk.orders()
    other = desk.add("x", 12)
    assert desk.admit() == []
    desk.end_copy(write)
    assert desk.admit() == ["x"]
    assert len(other.pages) == 3


def test_nothing_is_retracted_for_pages_that_a_write_gives_back() -> None:
    desk = HostDesk(num_pages=12)
    first, second = desk.start("x", 4, 16), desk.start("y", 4, 16)
    desk.finish(desk.start("a", 16, 1))
    assert len(desk.orders()) == 1
    for _ in range(12):
        desk.token(first, second)
    assert desk.pages.available_pages == 0
    with pytest.raises(OutOfPagesError) as caught:
        desk.token(first, second)
    assert caught.value.retract == (), "the copy's pages come back by themselves"
    desk.end_copy()
    desk.token(first, second)


def test_host_pages_are_used_once_they_are_ready() -> None:
    desk = HostDesk(host_pages=8, are_ready=False)
    desk.finish(desk.start("a", 16))
    assert desk.orders() == []
    desk.host.ready(3)
    desk.finish(desk.start("b", 16))
    (write,) = desk.orders()
    assert write.host_pages.tolist() == [0, 1, 2]
    desk.host.ready(8)
    desk.finish(desk.start("c", 16))
    assert sorted(desk.orders()[0].host_pages.tolist()) == [3, 4, 5, 6]


# --- several at once ------------------------------------------------------------------------------


def test_what_two_need_is_loaded_once() -> None:
    desk, b, c = two_that_need_it()
    assert len(desk.orders()) == 1
    assert c.pages[:4].tolist() == b.pages[:4].tolist()
    assert (c.hit_tokens, c.brought.get("loaded", 0), c.shared_tokens) == (0, 0, 16)
    desk.succeed(b.room_key)
    desk.succeed(c.room_key)
    assert desk.transferred() == []
    desk.end_copy()
    assert sorted(desk.transferred()) == ["b", "c"]


def test_a_load_goes_on_behind_what_is_on_its_way() -> None:
    """The first page comes from prefill for another; host memory has what follows."""
    desk = HostDesk(num_pages=32)
    desk.leave_in_host_memory()
    desk.host.allocator.check_invariants()
    first = desk.add("b", prompt("a", 5), max_new=1)
    # Nothing of it is loaded: so it has to be sent.
    first.may_load = False
    assert desk.admit() == ["b"]
    second = desk.admitted("c", prompt("a", 22))
    (load,) = desk.orders()
    assert len(load.device_pages) == 3
    assert (second.shared_tokens, second.brought["loaded"]) == (4, 12)
    desk.end_copy()
    desk.succeed(second.room_key)
    assert desk.transferred() == []
    desk.succeed(first.room_key)
    assert desk.transferred() == ["b", "c"]


def test_no_more_loads_than_there_are_rows_for() -> None:
    desk = HostDesk(num_pages=32, spare_rows=1)
    for rid in "ab":
        desk.leave_in_host_memory(rid)
    one, two = desk.add("c", prompt("a", 20)), desk.add("d", prompt("b", 20))
    assert desk.admit() == ["c", "d"]
    assert (one.prefix_len, two.prefix_len) == (16, 0)
    assert len(desk.orders()) == 1


# --- ends before the copy's -----------------------------------------------------------------------


def test_an_aborted_load_keeps_its_pages_until_the_copy_has_ended() -> None:
    desk = HostDesk()
    desk.leave_in_host_memory()
    req = next_turn(desk)
    pages = req.pages[:4].tolist()
    (load,) = desk.orders()
    desk.abort(req)
    desk.carry_out_aborts()
    held_by = RoomKey(load.number, 0, HOST)
    assert desk.pages.allocator.held_by(held_by).tolist() == sorted(pages)
    assert desk.host.cache.protected_pages == 4, "the copy reads them"
    assert desk.scheduler.waiting.unproved()[HELD] == 0, "they come back by themselves"
    assert desk.pop_failed() == [req]
    assert not desk.scheduler.idle, "a copy goes on"
    desk.end_copy()
    assert desk.scheduler.idle
    assert desk.pages.allocator.held_pages == 0
    assert desk.prefix_of(req) == 0, "nothing vouches for what no request waits for"
    desk.at_rest()


def test_a_load_goes_on_for_the_one_that_joined_it() -> None:
    desk, b, c = two_that_need_it()
    desk.abort(b)
    desk.carry_out_aborts()
    desk.succeed(c.room_key)
    desk.end_copy()
    assert desk.transferred() == ["c"]


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_load_that_fails_leaves_nothing_in_the_tree(has_arrived: bool) -> None:
    desk, b, c = two_that_need_it()
    if has_arrived:
        desk.succeed(b.room_key)
    generations = b.generation, c.generation
    desk.commands()
    desk.end_copy(error=OSError("a bad page"))
    desk.carry_out_aborts()
    assert desk.prefix_of(b) == 0
    assert (b.generation, c.generation) == (generations[0] + 1, generations[1] + 1)
    assert sorted(desk.admit()) == ["b", "c"]
    assert desk.orders() == [], "the copy's error may be of these pages"
    for req in (b, c):
        desk.succeed(req.room_key)
    assert sorted(desk.transferred()) == ["b", "c"]
    assert desk.scheduler.counters["host_copies_failed"] == 1


def test_a_write_that_fails_leaves_nothing_in_host_memory() -> None:
    desk = HostDesk()
    desk.finish(desk.start("a", 16))
    desk.end_copy(error=OSError("a bad page"))
    assert desk.host.cache.num_pages == desk.host.allocator.cached_pages == 0
    desk.at_rest()


def test_a_flush_between_order_and_end_of_a_write() -> None:
    desk = HostDesk()
    desk.finish(desk.start("a", 16))
    desk.orders()
    desk.scheduler.flush()
    desk.scheduler.check_invariants()
    desk.end_copy()
    assert desk.host.cache.num_pages == 0
    assert desk.pages.allocator.free_pages == 16
    desk.at_rest()


def test_a_flush_between_order_and_end_of_a_load() -> None:
    desk = HostDesk()
    desk.leave_in_host_memory()
    req = next_turn(desk)
    desk.orders()
    desk.scheduler.flush()
    desk.scheduler.check_invariants()
    assert desk.host.cache.num_pages == 0
    assert desk.admit() == ["b"], "it asks for all of it, in other pages"
    desk.end_copy()
    assert desk.prefix_of(req) == 0
    assert desk.host.allocator.free_pages == 32
    desk.carry_out_aborts()
    desk.arrive(req)


def test_all_of_a_retracted_request_may_be_in_host_memory() -> None:
    """Then nothing is asked of prefill."""
    desk = HostDesk(num_pages=12)
    desk.start("x", 4, 20)
    req = desk.start("a", 15, 8, outputs=2)
    assert req.kv_len == 16
    desk.retract(req)
    desk.end_all_copies()
    desk.evict(12)
    desk.commands()
    assert desk.admit() == ["a"]
    assert desk.commands() == []
    assert desk.transferred() == []
    desk.end_copy()
    assert desk.transferred() == ["a"]


# --- who used what --------------------------------------------------------------------------------


def visits(cache: RadixCache, num_pages: int) -> list[int]:
    """How many requests have used each of the first pages of a tree that has one beginning, as a
    policy hears it that counts them."""
    marks: list[tuple[int, int]] = []
    for node in cache.nodes():
        steps = [*(node.steps or ()), (node.end, node.mark)]
        marks += [(end, mark[0]) for end, mark in steps if mark is not None]
    return [sum(num for end, num in marks if end >= page) for page in range(1, num_pages + 1)]


def test_each_request_is_one_use_of_what_host_memory_has() -> None:
    """Of what it found there, and of what was written for it."""
    heard: list[bool] = []

    class Hearing(LeastFrequentlyUsed):
        name = "hearing"

        def mark(self, use: Use) -> Mark:
            heard.append(use.visit)
            return super().mark(use)

        def insertion_marks(self, use: Use) -> Sequence[tuple[int, Mark]]:
            heard.append(use.visit)
            return super().insertion_marks(use)

    desk = HostDesk(num_pages=32, policy="lfu", host_policy=Hearing())
    desk.leave_in_host_memory("a", 8)
    assert visits(desk.host.cache, 2) == [1, 1]
    assert sum(heard) == 1
    req = desk.admitted("b", prompt("a", 16))
    desk.succeed(req.room_key)
    desk.end_copy()
    desk.transferred()
    desk.finish(req)
    desk.end_all_copies()
    assert visits(desk.host.cache, 4) == [2, 2, 1, 1]
    assert sum(heard) == 2


def test_a_load_is_one_use_of_the_pool() -> None:
    """By the request that it was begun for; one that joins it is another."""
    desk, b, c = two_that_need_it(policy="lfu")
    desk.succeed(b.room_key)
    desk.succeed(c.room_key)
    desk.end_copy()
    assert sorted(desk.transferred()) == ["b", "c"]
    assert visits(desk.pages.cache, 4) == [2] * 4
    for req in (b, c):
        desk.finish(req)
    assert visits(desk.pages.cache, 4) == [2] * 4


# --- what others got wrong ------------------------------------------------------------------------


def test_nothing_is_retracted_for_pages_that_an_aborted_load_gives_back() -> None:
    desk = HostDesk(num_pages=12)
    desk.leave_in_host_memory("a", 16)
    first, second = desk.start("x", 4, 16), desk.start("y", 4, 16)
    loading = desk.admitted("b", prompt("a", 17), 1)
    desk.abort(loading)
    desk.carry_out_aborts()
    assert len(desk.orders()) == 1
    assert desk.host.held_pages == 4
    assert not desk.host.pins
    while desk.pages.available_pages or not desk.pages.allocator.held_pages:
        desk.token(first, second)
    for _ in range(PAGE_SIZE):
        try:
            desk.token(first, second)
        except OutOfPagesError as error:
            assert error.retract == (), "the copy's pages come back by themselves"
            break
    else:
        raise AssertionError("there was a page all the same")
    desk.end_copy()
    desk.token(first, second)


def test_nothing_is_promised_before_its_bytes_are_there() -> None:
    """What is being written is not in host memory yet: a request asks prefill for it."""
    desk = HostDesk(num_pages=12)
    desk.finish(desk.start("a", 16))
    (write,) = desk.orders()
    desk.scheduler.flush()  # the pool forgets it; the copy goes on
    desk.commands()
    req = next_turn(desk)
    (promise,) = desk.promises().values()
    assert promise.prefix_len == req.prefix_len == 0
    assert desk.orders() == []
    desk.end_copy(write)
    desk.arrive(req)
    # Nor is what was evicted from the pool while it waited for its turn.
    desk = HostDesk(num_pages=16, host_pages=4, are_ready=False)
    desk.finish(desk.start("a", 16))
    desk.evict(16)
    desk.commands()
    next_turn(desk)
    (promise,) = desk.promises().values()
    assert promise.prefix_len == 0


def test_what_is_due_is_forgotten_with_the_weights() -> None:
    desk = HostDesk(num_pages=8)
    a = desk.start("a", 16, 1)
    for rid in "wxyz":
        desk.start(rid, 4, 1)
    desk.finish(a)
    assert desk.orders() == []
    assert desk.host.due, "those that run may need its pages"
    desk.scheduler.flush()
    assert not desk.host.due


def test_a_second_rank_that_failed_ends_the_load() -> None:
    """Joined from all ranks, the end of a copy is as good as the worst of them."""
    desk = HostDesk(num_pages=32)
    leader = RankLeader[object]("decode", 2, None, print, desk.scheduler.hear)
    desk.leave_in_host_memory("a")
    req = next_turn(desk)
    (load,) = desk.orders()
    desk.succeed(req.room_key)
    desk.commands()
    leader.on(0, HostCopyDone(load.number, None, 1, 1e-6), desk.now_s)
    assert desk.transferred() == [], "one rank has its bytes, the other has not"
    desk.under_way.remove(load)
    error = OSError("a bad page")
    leader.on(1, HostCopyDone(load.number, error, 0, 1e-6), desk.now_s)
    assert desk.transferred() == []
    assert desk.prefix_of(req) == 0


# --- or not loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_s", "is_loaded"), [(1e-3, True), (10.0, False)])
def test_what_comes_sooner_from_prefill_is_not_loaded(load_s: float, is_loaded: bool) -> None:
    desk = HostDesk(num_pages=32, sources=Sources(loads=True))
    desk.leave_in_host_memory("a")
    # What is not measured is loaded; then the loads, and prefill, are.
    for number in range(2):
        req = next_turn(desk, f"b{number}")
        desk.now_s += 0.1
        desk.succeed(req.room_key)
        (order,) = desk.orders()
        desk.under_way.remove(order)
        desk.scheduler.hear(HostCopyDone(order.number, None, 1, load_s), desk.now_s)
        assert desk.transferred() == [req.rid]
        desk.finish(req)
        desk.end_all_copies()
        desk.evict(32)
        assert req.brought.get("loaded") >= 16
    last = next_turn(desk, "c")
    assert ("loaded" in last.brought) is is_loaded
    assert bool(desk.orders()) is is_loaded
    # What is not loaded is not measured, so after a minute it is tried again.
    desk.abort(last)
    desk.carry_out_aborts()
    desk.end_all_copies()
    desk.now_s += FRESH_S + 1
    desk.finish(desk.start("x", 8))  # what prefill takes is known all the time
    assert next_turn(desk, "d").brought["loaded"] > 0


# --- and what decode computes itself --------------------------------------------------------------


def test_what_is_computed_waits_for_what_it_continues() -> None:
    sources = Sources(ComputeConfig(below=16))
    desk = HostDesk(sources=sources)
    a = desk.admitted("a", 16)
    assert desk.scheduler.pop_local() == [a]
    desk.scheduler.computed(a, 16)
    desk.transferred()
    desk.finish(a)
    desk.end_all_copies()
    desk.evict(16)
    desk.commands()
    req = desk.admitted("b", prompt("a", 16))
    assert req.prefix_len == 12, "its last page is computed, to sample its first token"
    assert desk.scheduler.pop_local() == []
    desk.end_copy()
    assert desk.transferred() == []
    assert desk.scheduler.pop_local() == [req]
    desk.scheduler.computed(req, 16)
    assert desk.transferred() == ["b"]


def test_host_memory_counts_where_decode_is_alone() -> None:
    """What it lacks is small enough to compute, with what host memory has."""
    desk = HostDesk(sources=Sources(ComputeConfig(below=0, down_below=8), fails_over=True))
    desk.leave_in_host_memory()
    req = desk.admitted("b", prompt("a", 22), prefill="")
    assert req.state.value == "preallocated"
    desk.end_copy()
    assert desk.transferred() == []
    assert desk.scheduler.pop_local() == [req]


@pytest.mark.parametrize("has_it", [True, False])
def test_host_memory_counts_where_the_prefill_worker_goes_while_it_waits(has_it: bool) -> None:
    """Of 22 tokens it lacks 6, with what host memory has: so it need not wait for the worker."""
    config = ComputeConfig(below=0, down_below=8)
    workers = Workers(gated=True, patience_s=30.0)
    desk = HostDesk(sources=Sources(config, fails_over=True), workers=workers)
    warm = desk.add("a", prompt("a" if has_it else "x", 16))
    desk.scheduler.hear(PrefillReady("p"), desk.now_s)
    assert desk.admit() == ["a"]
    desk.arrive(warm)
    desk.finish(warm)
    desk.end_all_copies()
    desk.evict(16)
    req = desk.add("b", prompt("a", 22))
    desk.scheduler.hear(PrefillAway("p"), desk.now_s)
    assert (not req.asks) == has_it
    assert desk.admit() == ["b"] * has_it


assert PAGE_SIZE == 4


# --- with windows and states ----------------------------------------------------------------------

LAST = [GroupSpec("last", 6, 9, 1)]  # three pages of it for each request


def test_a_load_has_no_pages_in_window_groups_and_no_slot() -> None:
    desk = HostDesk(num_slots=3, windows=LAST)
    desk.leave_in_host_memory()
    req, (group,) = next_turn(desk), desk.pages.windows
    (promise,) = desk.promises().values()
    # All that host memory has is left out of what is sent; the window and the state are not.
    assert (promise.prefix_len, len(promise.page_ids())) == (16, 2)
    window, slot = promise.group_ids()
    assert (len(window), slot.tolist()) == (2, [req.state_slot])
    assert desk.pages.slots is not None
    assert (group.allocator.owned_pages, desk.pages.slots.owned_pages) == (3, 1)
    # Its pages are held by the load, which has no others; those of the request by the room.
    (load,) = desk.orders()
    desk.abort(req)
    assert desk.states()["HELD"] == 6
    assert (group.allocator.held_pages, desk.pages.slots.held_pages) == (3, 1)
    desk.end_copy(load)
    assert desk.states()["HELD"] == 2
    desk.carry_out_aborts()
    assert group.allocator.free_pages == 9
    desk.at_rest()


def test_a_retracted_request_is_loaded_and_its_window_and_state_are_sent() -> None:
    desk = HostDesk(num_slots=3, windows=LAST)
    desk.start("old", 4)
    req = desk.start("a", 15, 9, outputs=2)
    desk.commands()
    desk.retract(req)
    desk.end_all_copies()
    desk.evict(desk.pages.num_pages)
    assert desk.admit() == ["a"]
    (promise,) = desk.promises().values()
    assert (promise.prefix_len, promise.fill_len, promise.pages) == (16, 16, b"")
    window, slot = promise.group_ids()
    assert (len(window), slot.tolist()) == (2, [req.state_slot])
    desk.end_all_copies()
    assert desk.transferred() == [], "without its window and state it does not run"
    desk.arrive(req)


def test_what_is_computed_from_a_checkpoint_loads_nothing() -> None:
    """Host memory has pages behind the checkpoint, and no state: they are computed again, or
    loaded for what prefill sends."""
    for below, is_here in ((8, False), (1000, True)):
        sources = Sources(ComputeConfig(below=below))
        desk = HostDesk(40, num_slots=3, num_checkpoints=4, sources=sources)
        desk.finish(desk.start("a", 8, may_compute=False))
        first = desk.start("a2", prompt("a", 8), 2, may_compute=False)
        assert desk.scheduler.save_states([first]) == [(first.state_slot, 3)]
        desk.token(first)
        desk.finish(first)
        desk.end_all_copies()
        desk.finish(desk.start("a3", prompt("a", 16), may_compute=False))
        desk.end_all_copies()
        desk.evict(2)
        desk.commands()
        req = desk.admitted("b", prompt("a", 22))
        # 8 tokens are in the pool, with a state; 8 more in host memory.
        assert req.prefix_len == (8 if is_here else 16)
        assert [order.is_load for order in desk.orders()] == ([] if is_here else [True])
        if is_here:
            assert desk.scheduler.pop_local() == [req]
            desk.scheduler.computed(req, 22)
        else:
            desk.succeed(req.room_key)
        desk.end_all_copies()
        assert desk.transferred() == ["b"]
        desk.finish(req)
        desk.end_all_copies()
        desk.carry_out_aborts()
        desk.at_rest()


# --- what clients say of their sessions -----------------------------------------------------------


def leave(desk: HostDesk, rid: str, num_tokens: int = 16, **hints: Any) -> DecodeRequest:
    req = desk.start(rid, num_tokens, hints=Hints(**hints))
    desk.finish(req)
    desk.end_all_copies()
    return req


@pytest.mark.parametrize("how", ["announced", "due", "never"])
def test_a_session_that_pauses_is_parked_and_loaded_ahead_of_its_next_turn(how: str) -> None:
    desk = HostDesk(num_pages=8)
    parked = leave(desk, "a", session="s", returns_after=120)
    other = leave(desk, "o")
    # 1. What is parked goes first, though nothing was said of the other, and it was used last.
    desk.evict(2)
    assert (desk.prefix_of(parked), desk.prefix_of(other)) == (8, 16)
    # 2. It comes back by itself.
    if how == "announced":
        desk.scheduler.announce("s")
    desk.admit(desk.now_s + (31 if how == "due" else 1))
    desk.end_all_copies()
    desk.transferred()
    assert desk.prefix_of(parked) == (8 if how == "never" else 16)
    assert desk.prefix_of(other) == 16
    assert desk.scheduler.counters["host_hit_tokens"] == 0, "no prompt was admitted for it"
    desk.at_rest()


@pytest.mark.parametrize("is_announced", [True, False])
def test_what_the_device_still_has_is_parked_no_longer_once_its_next_turn_is_near(
    is_announced: bool,
) -> None:
    desk = HostDesk(num_pages=8)
    parked = leave(desk, "a", session="s", returns_after=120)
    other = leave(desk, "o")
    if is_announced:
        desk.scheduler.announce("s")
    desk.admit(desk.now_s + (1 if is_announced else 31))
    desk.evict(2)
    assert (desk.prefix_of(parked), desk.prefix_of(other)) == (16, 8)
    desk.at_rest()


def test_a_path_is_loaded_ahead_only_where_that_takes_nothing_of_worth() -> None:
    desk = HostDesk(num_pages=10)
    parked = leave(desk, "a", session="s", returns_after=600)
    desk.evict(2)
    others = [leave(desk, "o"), leave(desk, "p", session="t")]
    desk.scheduler.announce("s")
    desk.admit()
    assert not desk.orders()  # its own pages that are left would be the first to go
    # A session that ends makes room, and is not written again.
    turn = desk.start("q", prompt("p", 16), hints=Hints(session="t", ends=True))
    desk.finish(turn)
    desk.admit(desk.now_s + 2)
    desk.end_all_copies()
    desk.transferred()
    assert [desk.prefix_of(req) for req in (parked, *others)] == [16, 16, 8]
    desk.at_rest()


def test_a_load_ahead_waits_for_a_row() -> None:
    desk = HostDesk(num_pages=32, spare_rows=1)
    parked = leave(desk, "a", session="s", returns_after=600)
    desk.leave_in_host_memory("b")
    assert desk.prefix_of(parked) == 0
    req = desk.admitted("b2", prompt("b", 20))
    desk.scheduler.announce("s")
    desk.admit()
    assert len(desk.orders()) == 1, "of the request, in the only row"
    desk.end_copy()
    desk.arrive(req)
    desk.finish(req)
    desk.admit(desk.now_s + 2)
    desk.end_all_copies()
    desk.transferred()
    assert desk.prefix_of(parked) == 16
    desk.at_rest()


def test_a_session_that_goes_on_at_an_unknown_time_is_not_parked() -> None:
    desk = HostDesk(num_pages=8)
    goes_on = desk.start("a", 16)
    desk.finish(goes_on, continues=True)
    desk.end_all_copies()
    other = leave(desk, "o")
    desk.evict(2)
    assert (desk.prefix_of(goes_on), desk.prefix_of(other)) == (16, 8)
    desk.at_rest()


def test_no_request_is_retracted_for_pages_of_a_load_ahead() -> None:
    desk = HostDesk(num_pages=9)
    leave(desk, "a", session="s", returns_after=600)
    desk.evict(4)
    reqs = [desk.start(rid, 4, 14, cacheable=False) for rid in "bc"]
    desk.scheduler.announce("s")
    desk.admit()
    for _ in range(4):
        desk.token(*reqs)
    with pytest.raises(OutOfPagesError) as caught:
        desk.token(*reqs)
    assert caught.value.retract == ()
    desk.end_all_copies()
    desk.transferred()
    desk.token(*reqs)
    for req in reqs:
        desk.finish(req)
    desk.at_rest()


def test_what_other_sessions_begin_with_stays_when_its_session_ends() -> None:
    desk = HostDesk(num_pages=16)
    leave(desk, "a", 8, session="s", shared=True)
    other = leave(desk, "o")
    ended = desk.start("b", prompt("a", 16), hints=Hints(session="s", ends=True))
    desk.finish(ended)
    desk.end_all_copies()
    desk.evict(4)
    assert (desk.prefix_of(ended), desk.prefix_of(other)) == (8, 8)
    assert desk.host.cache.match_prefix(ended.key).prefix_len == 8
    desk.at_rest()


@pytest.mark.parametrize("is_announced", [False, True])
def test_what_other_sessions_begin_with_stays_while_its_session_is_parked(
    is_announced: bool,
) -> None:
    desk = HostDesk(num_pages=16)
    other = leave(desk, "o")
    leave(desk, "a", 8, session="s", shared=True)
    parked = desk.start("b", prompt("a", 16), hints=Hints(session="s", returns_after=120))
    desk.finish(parked)
    desk.end_all_copies()
    if is_announced:
        desk.scheduler.announce("s")
        desk.admit()
    desk.evict(6 if is_announced else 4)
    kept = (8, 0) if is_announced else (8, 8)
    assert (desk.prefix_of(parked), desk.prefix_of(other)) == kept
    desk.at_rest()


def test_what_is_parked_goes_last_from_host_memory() -> None:
    desk = HostDesk(num_pages=32, host_pages=8)
    parked, other = leave(desk, "a", session="s", returns_after=120), leave(desk, "o")
    leave(desk, "p", 8)
    found = [desk.host.cache.match_prefix(req.key).prefix_len for req in (parked, other)]
    assert found == [16, 8]
    desk.at_rest()


def test_a_million_sessions_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_MOST_DUE", 4)
    monkeypatch.setattr(ending, "_MOST_SESSIONS", 4)
    desk = HostDesk(num_pages=64)
    for at in range(12):
        leave(desk, chr(97 + at), session=f"s{at}", returns_after=120, shared=True)
    source = desk.scheduler.sources["loaded"]
    assert len(source._pauses) == len(source._by_session) == len(source._parked) == 4
    assert len(desk.scheduler._ending._shared) == 4
    desk.scheduler.announce("s0")
    for _ in range(100):
        desk.scheduler.announce("s11")
    assert len(source._parked) == 4
    desk.admit(desk.now_s + 700)
    assert not source._pauses
    assert not source._pause_bytes
