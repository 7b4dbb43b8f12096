"""A call that raises has changed nothing: every public call of a cache, with junk in the place of
its arguments, in a state that holds some of everything. What is compared is all that the object
reaches; then its laws hold, and the story that was under way runs to its end. Nodes, and so the
schedulers: tests/unit/runtime/test_raises_and_changes_nothing.py.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixkv.admission import AdmissionPolicy, admission_names, register_admission
from prefixkv.cache.eviction.plain import LeastRecentlyUsed
from prefixkv.cache.eviction.policy import EvictionQueue, policy_names, register_policy
from prefixkv.cache.radix_cache import RadixCache
from prefixkv.cache.radix_key import RadixKey
from prefixkv.config import DecodeConfig, PageOptions, PrefillConfig
from prefixkv.decode.request import DecodeRequest
from prefixkv.decode.scheduler import DecodeScheduler
from prefixkv.errors import CallerError, ConfigError, shown
from prefixkv.pages.manager import PageManager
from prefixkv.prefill.scheduler import PrefillScheduler
from prefixkv.protocol.events import Bootstrapped
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.request import Request
from tests.support.junk import EXAMPLES, JUNK, is_taken, put, with_junk
from tests.support.picture import picture


class World:
    """A cache in the middle of its life, and what may be handed to each of its calls."""

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
        cache.record().take()
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


def request(rid: str, room: int, **fields: Any) -> Request:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, room]
    wanted = {"max_new_tokens": 8, "prefill": "tcp://p:1", "decode": "d", **fields}
    return Request(rid, tokens, room=room, **wanted)


# What only looks, and what a page manager calls.
_NOT_THE_ENGINES = {
    "stats", "check_invariants", "nodes", "oldest_lock", "pin", "keep_hash", "hashed",
    "note_change", "insert_owned", "lock_at", "record",
}  # fmt: skip


def test_every_public_call_is_tried() -> None:
    world = World()
    public = {
        name
        for name, value in inspect.getmembers(RadixCache)
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert public - _NOT_THE_ENGINES == world.calls.keys()
    world.thing.check_invariants()
    world.finish()  # undisturbed


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_whatever_is_handed_over(data: st.DataObject) -> None:
    world = World()
    name = data.draw(st.sampled_from(sorted(world.calls)))
    call = world.calls[name]
    args, named = put(with_junk(data, *call, num_odd=len(world.odd)), *call, world.odd)
    before = picture(world.thing)
    taken = is_taken(name, getattr(world.thing, name), args, named)
    assert taken or picture(world.thing) == before, (name, shown((args, named)))
    world.thing.check_invariants()
    if not taken:
        world.finish()


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
    options = PageOptions(policy=policy)
    sizes = {"num_pages": 8, "page_size": 2, "max_requests": 2}
    with pytest.raises((OSError, ConfigError)):
        PageManager(**{**sizes, **({where: 0} if where in sizes else {})}, options=options)
    policy.where = ""
    pages = PageManager(**sizes, options=options)
    pages.drop(pages.open(None, 1, 0.0))


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
    cached = pages.open(None, 2, 0.0)
    pages.cache_finished(cached, RadixKey([1, 2, 3, 4]), 0.0)
    for room in (1, 2):
        scheduler.add(request(str(room), room))
        scheduler.hear(Bootstrapped(RoomKey(room, 0, "d"), PeerId("d", 1), 0), 1.0)
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
    decode = DecodeScheduler(PageManager(32, 2, 8), DecodeConfig(name="d"))
    prefill = PrefillScheduler(PageManager(32, 2, 8), PrefillConfig())
    for scheduler in (decode, prefill):
        scheduler.add(request("waits", 1))
        assert scheduler.fail("waits", MuteError())
        scheduler.check_invariants()
