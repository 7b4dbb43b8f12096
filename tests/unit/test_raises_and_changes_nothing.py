"""A call that raises has changed nothing: every public call of the parts without threads, with
junk in the place of its arguments, in a state that holds some of everything. What is compared is
all that the object reaches; then its laws hold, and the story that was under way runs to its end.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.admission import AdmissionPolicy, admission_names, register_admission
from prefixkv.cache.events import Cleared, EventBatch, EventFeed, Removed, Stored, page_keys
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import policy_names, register_policy
from prefixkv.cache.eviction.queues import EvictionQueue
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import ComputeConfig, ControlConfig, DecodeConfig, PrefillConfig
from prefixkv.decode.budget import PreallocBudget
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeParts, DecodeScheduler
from prefixkv.decode.sources import Sources
from prefixkv.errors import CallerError, CapacityError, ConfigError, shown
from prefixkv.pages.allocator import PageAllocator, PageState
from prefixkv.pages.manager import PageManager
from prefixkv.pages.table import PageTable
from prefixkv.pages.windows import WindowSpec, WindowStart
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.commands import DeclineRoom, OpenRoom
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.request import Request
from prefixkv.serving.router import BoundedAffinityRouter
from tests.support.junk import JUNK, OwnError, each_junk
from tests.support.picture import picture
from tests.support.timed import CONTROL

EXAMPLES = int(os.environ.get("PREFIXKV_JUNK_EXAMPLES", "60"))  # more for a long run
Calls = dict[str, tuple[list[Any], dict[str, Any]]]


class World:
    """An object in the middle of its life, and what may be handed to each of its calls."""

    kind: type
    thing: Any
    calls: Calls
    odd: list[Any] = []  # objects of the right type in the wrong place

    def reached(self) -> tuple[Any, ...]:
        """What no call that raises may change."""
        return (self.thing,)

    def check(self) -> None:
        self.thing.check_invariants()

    def finish(self) -> None:
        """The story runs to its end."""


class CacheWorld(World):
    kind = RadixCache

    def __init__(self) -> None:
        self.thing = cache = RadixCache(2, "adaptive", 64)
        other = RadixCache(2, "lru", 64)
        other.insert([1, 2, 3, 4], [1, 2])
        foreign = other.lock(other.match_prefix([1, 2]))
        cache.insert([9, 9, 9, 9], [40, 41])
        self.orphan = cache.lock(cache.match_prefix([9, 9, 9, 9]))
        cache.reset()
        cache.insert([1, 2, 3, 4, 5, 6], [1, 2, 3], now_s=1.0)
        cache.insert([1, 2, 7, 8], [4, 5], "lora", now_s=2.0, priority=2)
        cache.insert([1, 2, 7, 8, 9, 9], [6, 7, 8], now_s=3.0)  # page 6 is not taken
        self.lock = cache.lock(cache.match_prefix([1, 2, 3, 4]), 4.0)
        ended = cache.lock(cache.match_prefix([1, 2]), 4.0)
        cache.unlock(ended)
        match = cache.match_prefix([1, 2, 7, 8, 5])
        self.want = cache.want(match)
        cache.drain_changes()
        self.odd = [foreign, other.match_prefix([1, 2]), ended, self.orphan, self.lock, match]
        self.calls = {
            "match_prefix": ([[1, 2, 3, 4], None], {}),
            "lock": ([match, 5.0], {"visit": True}),
            "unlock": ([self.lock], {}),
            "insert": (
                [[1, 2, 3, 4, 11, 12], [20], None, 0, 6.0],
                {"visit": None, "lock": self.lock, "extend_lock": True},
            ),
            "evict": ([2, 7.0], {}),
            "reset": ([False], {}),
            "hint": ([match, True], {}),
            "want": ([match], {}),
            "unwant": ([self.want], {}),
            "drain_changes": ([False], {}),
            "dump": ([10], {}),
            "locate": ([match], {}),
        }

    def finish(self) -> None:
        cache = self.thing
        cache.unwant(self.want)
        cache.insert([1, 2, 3, 4, 11, 12], [20], now_s=9.0, lock=self.lock, extend_lock=True)
        assert self.lock.pages.tolist() == [1, 2, 20]
        cache.unlock(self.lock)
        assert sorted(cache.unlock(self.orphan).tolist()) == [40, 41]
        assert sorted(cache.evict(64, 10.0).tolist()) == [1, 2, 3, 4, 5, 7, 8, 20]
        cache.check_invariants()
        assert cache.num_pages == 0
        assert not cache.locks


class AllocatorWorld(World):
    kind = PageAllocator

    def __init__(self) -> None:
        self.thing = pages = PageAllocator(32)
        pages.alloc(12)
        pages.free([2, 3, 7])
        pages.cache([0, 1])
        pages.hold([4, 5], "room")
        pages.hold([6], "late")
        pages.quarantine("late")
        self.odd = [[8, 8], [0], [2], [31], [-1], [32], [8, 2**40], "room", "late", bytes(3)]
        self.calls = {
            "alloc": ([5], {}),
            "free": ([[8, 9]], {}),
            "owned": ([[8]], {}),
            "cache": ([[8, 10]], {}),
            "uncache": ([[0]], {}),
            "hold": ([[8, 9], "room"], {}),
            "quarantine": (["room"], {}),
            "release": (["room"], {}),
            "state": ([3], {}),
            "pages_in": ([PageState.FREE], {}),
            "holds": (["room"], {}),
            "held_by": (["room"], {}),
        }

    def finish(self) -> None:
        pages = self.thing
        pages.uncache([0, 1])
        pages.free([0, 1, 8, 9, 10, 11])
        assert pages.release("room") + pages.release("late") == 3
        assert pages.free_runs() == [(0, 32)]
        assert pages.alloc(32).tolist() == list(range(32))


class TableWorld(World):
    kind = PageTable

    def __init__(self) -> None:
        self.thing = table = PageTable(4, 4)
        self.full, self.some, self.empty = table.alloc_row(), table.alloc_row(), table.alloc_row()
        table.write(self.full, 0, [1, 2, 3, 4])
        table.write(self.some, 0, [5, 6])
        self.odd = [self.full, 99, [self.full], [self.some, self.some], [7, 8, 9], bytes(20)]
        self.calls = {
            "alloc_row": ([], {}),
            "free_row": ([self.some], {}),
            "length": ([self.some], {}),
            "pages": ([self.some], {}),
            "packed": ([self.some, 0, 1], {}),
            "fill": ([self.empty, [b"\1\0\0\0", np.array([2, 3], np.int32)]], {}),
            "write": ([self.some, 1, [7, 8]], {}),
        }

    def finish(self) -> None:
        table = self.thing
        for row in (self.full, self.some, self.empty):
            table.free_row(row)
        assert table.free_rows == 4
        assert (table.array == -1).all()


class ManagerWorld(World):
    kind = PageManager

    def __init__(self) -> None:
        windows = [WindowSpec("w", 3, 20, 2)]
        self.thing = pages = PageManager(
            16, 2, 6, 4, policy="adaptive", num_slots=6, windows=windows
        )
        self.keys = [RadixKey([1, 2, 3, 4]), RadixKey([1, 2, 9]), RadixKey([1, 2, 3, 4, 5, 6])]
        first, second, third = self.keys
        self.first = pages.open(first, None, 2, 1.0, window_start=WindowStart(4, 4))
        pages.cache_unfinished(self.first, first, 1.0)
        self.second = pages.open(
            second, pages.match(second), 1, 2.0, window_start=WindowStart(3, 4)
        )
        self.third = pages.open(
            third, pages.match(third), 1, 3.0, self.second, 1, window_start=WindowStart(6, 4)
        )
        gone = pages.open(RadixKey([7, 7, 7]), None, 2, 3.0, window_start=WindowStart(3, 4))
        pages.cache_finished(gone, RadixKey([7, 7, 7]), 3.0)
        held = pages.open(RadixKey([8, 8]), None, 1, 3.0, window_start=WindowStart(2, 4))
        pages.hold(held, "room")
        self.want = pages.want(pages.cache.match_prefix([7, 7]))
        match = pages.match(third)
        elsewhere = PageManager(16, 2, 6, 4)
        foreign = elsewhere.match(first)
        long = RadixKey(list(range(10)))
        self.odd = [gone, held, foreign, long, "room", [self.first, self.first], [gone], match,
                    [self.first, gone], self.third, 9]  # fmt: skip
        self.calls = {
            "pages": ([self.first], {}),
            "match": ([first, True], {}),
            "open": ([third, match, 1, 4.0], {"window_start": WindowStart(6, 4)}),
            "slide": ([self.first, 5], {}),
            "lock_joined": ([self.third, third, 4.0], {}),
            "grow_many": ([[self.first, self.second], 4.0], {}),
            "cache_unfinished": ([self.second, second, 4.0], {"priority": 0, "being_read": False}),
            "cache_finished": ([self.second, second, 4.0], {"priority": 0, "continues": True}),
            "hint": ([self.first, True], {}),
            "want": ([match], {}),
            "unwant": ([self.want], {}),
            "drop": ([self.second], {}),
            "hold": ([self.second, "room"], {}),
            "release": (["room"], {}),
            "quarantine": (["room"], {}),
            "holds": (["room"], {}),
        }

    def finish(self) -> None:
        page_manager = self.thing
        page_manager.unwant(self.want)
        page_manager.grow_many([self.first, self.second], 8.0)
        for pages, key in zip((self.first, self.second), self.keys, strict=False):
            page_manager.cache_finished(pages, key, 9.0)
        page_manager.drop(self.third)
        page_manager.release("room")
        page_manager.check_invariants()
        assert page_manager.available_pages == 16
        assert page_manager.allocator.owned_pages == 0
        assert page_manager.table.free_rows == page_manager.slots.free_pages == 6


class BudgetWorld(World):
    kind = PreallocBudget

    def __init__(self) -> None:
        self.thing = budget = PreallocBudget(2)
        budget.start("a", 4, 0)
        budget.start("b", 4, 3)
        self.odd = [["a", "unknown"], ["b", []], "a"]
        self.calls = {
            "start": (["b", 3, 2], {}),
            "grow_many": ([["a", "b"]], {}),
            "stop": (["a"], {}),
        }

    def finish(self) -> None:
        self.thing.grow_many(["a", "b"])
        self.thing.stop("a")
        self.thing.stop("b")
        assert self.thing.private_pages == self.thing.reserved_pages == self.thing.active == 0


class RouterWorld(World):
    kind = BoundedAffinityRouter

    def __init__(self) -> None:
        self.thing = router = BoundedAffinityRouter()
        cache = RadixCache(2)
        self.feed = EventFeed(cache, "one", 1)
        for name in ("one", "two"):
            router.add_worker(name)
        cache.insert([1, 2, 3, 4], [0, 1])
        router.apply(self.feed.take())
        self.keys = page_keys(RadixKey([1, 2, 3, 4, 5, 6]).data, 2)
        self.open = router.route(self.keys, 1.0)
        over = router.route([], 1.0)
        router.ended(over, 2.0)
        other = BoundedAffinityRouter()
        other.add_worker("one")
        self.foreign = other.route([], 1.0)
        cache.insert([1, 2, 3, 4, 5, 6], [0, 1, 2])
        self.batch = self.feed.take()
        wrong: Any = [object(), Stored(b"", None, [1]), Removed(b"", [], [b"x"]), Cleared()]
        batches = [EventBatch("one", 1, 1, (*self.batch.events, event)) for event in wrong[:3]]
        half = EventBatch("one", 1, 1, (wrong[3], Stored(b"", None, (b"k", []))))  # type: ignore[arg-type]
        self.odd = [over, self.foreign, *batches, half, ["one", "three"], [self.keys[0], [], b"z"],
                    [b"a", 5, []], "three", EventBatch("one", 2, 0, (wrong[0],)),
                    EventBatch("one", 1, "x", ())]  # type: ignore[arg-type]  # fmt: skip
        self.calls = {
            "add_worker": (["three"], {}),
            "remove_worker": (["two"], {}),
            "apply": ([self.batch], {}),
            "route": ([self.keys, 3.0], {"namespace": None, "work": 2.0, "among": ["one", "two"]}),
            "ended": ([self.open, 3.0], {}),
            "expire": ([3.0], {}),
            "loads": ([3.0], {}),
        }

    def reached(self) -> tuple[Any, ...]:
        return self.thing, self.open, self.foreign

    def check(self) -> None:
        for worker in self.thing._workers.values():
            index = worker.index
            assert index.num_pages == sum(map(len, index._pool._held.values()))
            assert worker.open_work >= 0
            assert worker.faded >= 0

    def finish(self) -> None:
        router = self.thing
        assert router.apply(self.batch)
        route = router.route(self.keys, 4.0)
        assert (route.worker, route.matched_pages) == ("one", 3)
        assert router.ended(self.open, 4.0)
        assert router.ended(route, 4.0)
        assert sum(router.loads(1e9).values()) < 1e-6


def request(rid: str, room: int, **fields: Any) -> Request:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, room]
    wanted = {"max_new_tokens": 8, "prefill": "tcp://p:1", "decode": "d", **fields}
    return Request(rid, tokens, room=room, **wanted)


CONFIG = DecodeConfig(name="d", reserve_tokens=0)


class DecodeWorld(World):
    """One request of each state: it waits, is on its way, has run, runs, was aborted."""

    kind = DecodeScheduler

    def __init__(self) -> None:
        pages = PageManager(32, 2, 8)
        self.thing = scheduler = DecodeScheduler(pages, CONFIG)
        self.oldest = self.runs("oldest", 1)
        self.younger = self.runs("younger", 2)
        scheduler.append_many([self.oldest, self.younger], [5, 6])
        gone = scheduler.add(request("gone", 3))
        scheduler.abort("gone")
        self.flies = scheduler.add(request("flies", 4))
        scheduler.pop_preallocated()
        self.waits = scheduler.add(request("waits", 5))
        elsewhere = DecodeWorld.__new__(DecodeWorld)
        elsewhere.thing = DecodeScheduler(PageManager(32, 2, 8), CONFIG)
        foreign = elsewhere.runs("oldest", 1)
        both = [self.oldest, self.younger]
        self.odd = [gone, self.flies, self.waits, "waits", "flies", "oldest", [*both, gone],
                    [self.oldest, foreign], [self.oldest] * 2, [self.oldest, self.flies], [1, -1],
                    request("oldest", 6), request("new", 1), request("new", 6, decode="e"),
                    request("new", 6, prefill=""), foreign]  # fmt: skip
        self.calls = {
            "add": ([request("new", 7)], {}),
            "pop_preallocated": ([], {}),
            "pop_transferred": ([], {}),
            "pop_failed": ([None], {}),
            "pop_local": ([], {}),
            "computed": ([self.flies, 1, b""], {}),
            "save_state": ([self.flies, 1], {}),
            "save_states": ([both], {}),
            "give_up_prefill": (["gone", "no"], {}),
            "pop_needs_prefill": ([], {}),
            "append_many": ([both, [1, 2]], {}),
            "reserve_many": ([both, 3], {}),
            "finish": ([self.younger, None, True], {}),
            "retract": (["younger", None], {}),
            "abort": (["waits", None], {}),
            "fail": (["waits", ValueError("no"), None], {}),
            "retarget": (["waits", "tcp://q:1"], {}),
            "refuse": ([request("no", 8), "no"], {}),
            "flush": (["2"], {}),
        }

    def runs(self, rid: str, room: int) -> Any:
        scheduler = self.thing
        req = scheduler.add(request(rid, room))
        scheduler.pop_preallocated()
        self.arrive()
        assert [one.rid for one in scheduler.pop_transferred()] == [rid]
        return req

    def arrive(self) -> None:
        for command in self.thing.take_commands():
            if isinstance(command, OpenRoom):
                key = RoomKey(command.promise.room, command.promise.generation)
                self.thing.room_ended(key, KVPoll.SUCCESS, None, b"", 1.0)

    def finish(self) -> None:
        scheduler = self.thing
        running = [self.oldest, self.younger]
        for _ in range(7):
            scheduler.append_many(running, [1, 2][: len(running)])
        for req in running:
            scheduler.finish(req)
        for _ in range(3):
            scheduler.pop_preallocated()
            self.arrive()
            for req in scheduler.pop_transferred():
                scheduler.finish(req)
        scheduler.room_drained(RoomKey(3, 0))
        assert [req.rid for req in scheduler.pop_failed()] == ["gone"]
        scheduler.pop_needs_prefill()
        scheduler.check_invariants()
        assert scheduler.idle
        assert scheduler.pages.available_pages == 32


class ComputingWorld(World):
    """Requests with extra state that decode computes: one is new, one computed in part, with a
    checkpoint on its way, one runs and has a checkpoint to go on from."""

    kind = DecodeScheduler

    def __init__(self) -> None:
        pages = PageManager(32, 2, 8, num_slots=8, num_checkpoints=4)
        self.thing = scheduler = DecodeScheduler(
            pages, CONFIG, DecodeParts(Sources(ComputeConfig()))
        )
        own = [self._new("oldest", 1), self._new("runs", 2)]
        self.oldest, self.runs = own
        for req in own:
            scheduler.save_state(req, req.stops[-1])
            scheduler.computed(req, 9)
        assert scheduler.pop_transferred() == own
        scheduler.append_many(own, [5, 6])
        self.computes = self._new("computes", 3)
        scheduler.computed(self.computes, 4)
        scheduler.add(request("new", 4, namespace="new"))
        scheduler.pop_preallocated()
        self.odd = [[self.computes], [self.runs, self.computes], "runs", 2, 4, 9, 10]
        self.calls = {
            "pop_local": ([], {}),
            "computed": ([self.computes, 9, b"x"], {}),
            "save_state": ([self.computes, self.computes.stops[-1]], {}),
            "save_states": ([own], {}),
            "append_many": ([own, [1, 2]], {}),
            "finish": ([self.runs, None, True], {}),
            "retract": (["runs", None], {}),
            "abort": (["computes", None], {}),
            "fail": (["computes", ValueError("no"), None], {}),
            "flush": (["2"], {}),
        }

    def _new(self, rid: str, room: int) -> Any:
        self.thing.add(request(rid, room, namespace=rid))
        self.thing.pop_preallocated()
        (req,) = self.thing.pop_local()
        return req

    def finish(self) -> None:
        scheduler, own = self.thing, [self.oldest, self.runs]
        for _ in range(2):
            scheduler.save_states(own)
            scheduler.append_many(own, [1, 2])
        scheduler.retract("runs")
        scheduler.save_state(self.computes, self.computes.stops[-1])
        scheduler.computed(self.computes, 9)
        for _ in range(3):
            scheduler.pop_preallocated()
            for req in scheduler.pop_local():
                # What is retracted goes on from its checkpoint.
                assert (req.prefix_len > 0) == (req is self.runs)
                scheduler.computed(req, req.fill_len)
            for req in scheduler.pop_transferred():
                scheduler.finish(req)
        scheduler.finish(self.oldest)
        for room in (1, 2, 3, 4):
            scheduler.room_drained(RoomKey(room, 0))
        scheduler.check_invariants()
        assert scheduler.idle
        assert scheduler.pages.checkpoints is not None
        assert len(scheduler.pages.checkpoints) > 0


class PrefillWorld(World):
    """One request waits for its promise, one is computed in part, one was sent, one has failed."""

    kind = PrefillScheduler

    def __init__(self) -> None:
        pages = PageManager(32, 2, 8, num_checkpoints=3)
        self.thing = scheduler = PrefillScheduler(
            pages, PrefillConfig(control=ControlConfig(max_aux_bytes=16))
        )
        for rid, room in (("sent", 1), ("fails", 2), ("computes", 3), ("waits", 4)):
            scheduler.add(request(rid, room, namespace=rid))
        for room in (1, 2, 3):
            scheduler.room_bootstrapped(RoomKey(room, 0, "d"), 2, "d", 1.0)
        sent, fails, self.computes = scheduler.pop_bootstrapped()
        scheduler.send_chunk(sent, 9, last=True, aux=b"x")
        scheduler.room_ended(sent.room_key, KVPoll.SUCCESS, None, 2.0)
        scheduler.abort("fails")
        scheduler.send_chunk(self.computes, 4)
        waits = scheduler.requests["waits"]
        self.odd = [sent, fails, waits, "sent", request("waits", 9), request("new", 3),
                    request("new", 9, decode=""), 2, 10, bytes(17)]  # fmt: skip
        self.calls = {
            "add": ([request("new", 7)], {}),
            "refuse": ([request("no", 8), "no"], {}),
            "pop_bootstrapped": ([5], {}),
            "send_chunk": (
                [self.computes, 9],
                {"last": True, "aux": b"x", "ready": None, "state_slot": -1},
            ),
            "save_state": ([self.computes, 8], {}),
            "pop_sent": ([], {}),
            "pop_failed": ([None], {}),
            "abort": (["waits"], {}),
            "fail": (["waits", ValueError("no")], {}),
            "flush": (["2"], {}),
        }

    def reached(self) -> tuple[Any, ...]:
        # Decode is told of what `add` refuses: a command, and nothing else.
        said = [one for one in self.thing._commands if not isinstance(one, DeclineRoom)]
        return ({**vars(self.thing), "_commands": said},)

    def finish(self) -> None:
        scheduler = self.thing
        scheduler.send_chunk(self.computes, 9, last=True)
        scheduler.room_bootstrapped(RoomKey(4, 0, "d"), 0, "d", 4.0)
        (waits,) = scheduler.pop_bootstrapped()
        scheduler.send_chunk(waits, 9, last=True)
        for room in (3, 4):
            scheduler.room_ended(RoomKey(room, 0, "d"), KVPoll.SUCCESS, None, 5.0)
        for room in (1, 2, 3, 4):
            scheduler.source_free(RoomKey(room, 0, "d"), 5.0)
        assert [req.rid for req in scheduler.pop_sent()] == ["sent", "computes", "waits"]
        assert [req.rid for req in scheduler.pop_failed()] == ["fails"]
        scheduler.check_invariants()
        assert scheduler.idle
        assert scheduler.pages.available_pages == 32


WORLDS = [CacheWorld, AllocatorWorld, TableWorld, ManagerWorld, BudgetWorld, RouterWorld,
          DecodeWorld, ComputingWorld, PrefillWorld]  # fmt: skip

_PUBLIC = {RadixCache, BoundedAffinityRouter, DecodeScheduler, PrefillScheduler}

# What the control plane or an audit calls, and what only looks.
_NOT_THE_ENGINES = CONTROL | {
    "stats", "nodes", "oldest_lock", "owners", "free_runs", "cache_owned", "check_fits",
    "check_growth", "append_checked", "pin", "unpin", "digest", "keep_hash", "keep_hashes",
    "hashed", "pin_key", "find", "holds_all", "note_checkpoint", "is_spare",
}  # fmt: skip


@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_every_public_call_is_tried(make: Callable[[], World]) -> None:
    world = make()
    public = {
        name
        for name, value in inspect.getmembers(world.kind)
        if inspect.isfunction(value) and not name.startswith("_")
    }
    tried = {name for one in WORLDS if one.kind is world.kind for name in one().calls}
    assert public - _NOT_THE_ENGINES - {"flush"} == tried - {"flush"}
    world.check()
    world.finish()  # undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_whatever_is_handed_over(make: Callable[[], World], data: st.DataObject) -> None:
    world = make()
    name = data.draw(st.sampled_from(sorted(world.calls)))
    args, named = list(world.calls[name][0]), dict(world.calls[name][1])
    anything = st.one_of(JUNK, st.sampled_from(range(len(world.odd))).map(world.odd.__getitem__))
    places: list[Any] = [*range(len(args)), *named]
    for place in data.draw(st.sets(st.sampled_from(places), min_size=1)) if places else ():
        if isinstance(place, int):
            args[place] = data.draw(anything)
        else:
            named[place] = data.draw(anything)
    check_call(world, name, args, named)


@pytest.mark.slow
@pytest.mark.parametrize("make", WORLDS, ids=lambda make: make.__name__)
def test_each_junk_in_each_place(make: Callable[[], World]) -> None:
    """One wrong argument at a time, and each is tried: draws pass by most of them."""
    calls, num_junk = make().calls, len([*each_junk()])
    for name in calls:
        for place in [*range(len(calls[name][0])), *calls[name][1]]:
            for at in range(num_junk):
                world, wrong = make(), [*each_junk()][at]
                args, named = list(world.calls[name][0]), dict(world.calls[name][1])
                if isinstance(place, int):
                    args[place] = wrong
                else:
                    named[place] = wrong
                check_call(world, name, args, named)


def check_call(world: World, name: str, args: list[Any], named: dict[str, Any]) -> None:
    """A call raises what it may and has changed nothing, or has taken its arguments."""
    before = picture(*world.reached())
    try:
        getattr(world.thing, name)(*args, **named)
    except Exception as error:
        # What an engine calls tells it by its class that the mistake is its own. What its own
        # objects raise comes through.
        if world.kind in _PUBLIC and not isinstance(error, CallerError | CapacityError | OwnError):
            raise AssertionError(f"{name}: {shown((args, named))} raised {error!r}") from error
        assert picture(*world.reached()) == before, (name, shown((args, named)))
        world.check()
        world.finish()
    else:
        if name != "fill":  # which trusts the ids that it is given
            world.check()


# --- a user's own classes -------------------------------------------------------------------------


class Fragile(LeastRecentlyUsed):
    """Raises where a cache is built around it, until it is mended."""

    def __init__(self, where: str) -> None:
        self.where = where

    def bind(self, page_size: int, pool_pages: int | None) -> None:
        if self.where == "bind":
            raise OSError("bind")

    def make_queue(self) -> EvictionQueue:
        if self.where == "make_queue":
            raise OSError("make_queue")
        return super().make_queue()


@pytest.mark.parametrize("where", ["bind", "make_queue", "max_requests", "num_pages", "page_size"])
def test_a_policy_whose_cache_was_not_built_serves_the_next(where: str) -> None:
    policy = Fragile(where)
    sizes = {"num_pages": 8, "page_size": 2, "max_requests": 2}
    with pytest.raises((OSError, ConfigError)):
        PageManager(**{**sizes, **({where: 0} if where in sizes else {})}, policy=policy)
    policy.where = ""
    pages = PageManager(**sizes, policy=policy)
    pages.drop(pages.open(RadixKey([1, 2]), None, 1, 0.0))


@pytest.mark.parametrize(
    "register", [register_policy, register_admission], ids=["policy", "admission"]
)
@given(junk=JUNK)
def test_what_is_no_policy_is_not_registered(register: Callable[[Any], Any], junk: Any) -> None:
    nameless = type("Nameless", (AdmissionPolicy,), {"name": 7})
    before = policy_names(), admission_names()
    for wrong in (junk, object, nameless):
        with pytest.raises(ConfigError):
            register(wrong)
    assert (policy_names(), admission_names()) == before


class Ranks(AdmissionPolicy):
    """Ranks by priority; raises for 7, and says what is no rank for 8."""

    name = "ranks"
    overtakes = True

    def rank(self, req: DecodeRequest, new_pages: int) -> Any:
        priority = req.request.priority
        if priority == 7:
            raise OSError("rank")
        return "eight" if priority == 8 else priority


@pytest.mark.parametrize("priority", [7, 8])
def test_an_admission_policy_that_raises_leaves_nothing_behind(priority: int) -> None:
    pages = PageManager(32, 2, 8)
    scheduler = DecodeScheduler(pages, DecodeConfig(name="d", admission=Ranks()))
    scheduler.add(request("waits", 1))
    before = picture(scheduler)
    for room in range(2, 90):  # each names a worker that no other does
        wrong = request("wrong", room, prefill=f"tcp://p:{room}", priority=priority)
        with pytest.raises((OSError, CallerError)):
            scheduler.add(wrong)
        assert picture(scheduler) == before
    scheduler.check_invariants()
    assert [req.rid for req in scheduler.pop_preallocated()] == ["waits"]


@pytest.mark.parametrize(
    "usable", [2.0, np.float32(2.0), "2", None, [2], float("nan")], ids=lambda one: repr(one)
)
def test_a_usable_prefix_that_is_no_number_is_none(usable: Any) -> None:
    pages = PageManager(32, 2, 8)
    scheduler = PrefillScheduler(pages, PrefillConfig(), usable_prefix=lambda *_: usable)
    cached = pages.open(RadixKey([1, 2, 3, 4]), None, 2, 0.0)
    pages.cache_finished(cached, RadixKey([1, 2, 3, 4]), 0.0)
    for room in (1, 2):
        scheduler.add(request(str(room), room))
        scheduler.room_bootstrapped(RoomKey(room, 0, "d"), 0, "d", 1.0)
    popped = scheduler.pop_bootstrapped()
    assert [(req.rid, req.prefix_len) for req in popped] == [("1", 0), ("2", 0)]
    with pytest.raises(TypeError):
        scheduler.pop_bootstrapped()
    scheduler.check_invariants()


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise OSError("mute")


def test_an_error_that_cannot_be_read_ends_a_request_all_the_same() -> None:
    decode, prefill = DecodeWorld(), PrefillWorld()
    for rid in ("waits", "flies", "younger"):
        assert decode.thing.fail(rid, MuteError())
        decode.check()
    for rid in ("waits", "computes"):
        assert prefill.thing.fail(rid, MuteError())
        prefill.check()
