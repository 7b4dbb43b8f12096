"""The storm's own parts: what is to find a fault has to find it. And a short storm on each
transport finds nothing."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.__main__ import run
from benchmarks.chaos_clients import Call, Conversation, Ledger, Sizes, system_prompts
from benchmarks.chaos_pages import TARGET_CANARY, WatchedAllocator
from prefixkv.cache.radix_key import RadixKey
from prefixkv.memory.kv_pool import KVPool
from prefixkv.pages.manager import PageManager

# --- pages ----------------------------------------------------------------------------------------


@pytest.fixture(params=["layer_major", "page_major"])
def watched(request: pytest.FixtureRequest) -> WatchedAllocator:
    pool = KVPool.create(8, 4, 2, 1, 16, order=request.param)
    return WatchedAllocator(pool, TARGET_CANARY)


def write(allocator: WatchedAllocator, page: int, value: int = 7) -> None:
    data = allocator._pool.read_pages([page])
    data[0, 1, 2] = value  # a part of it
    allocator._pool.write_pages([page], data)


@pytest.mark.parametrize("how", ["free", "release", "never used"])
@pytest.mark.parametrize("found", ["taken", "scanned"])
def test_a_write_to_a_free_page_is_found_once(
    watched: WatchedAllocator, how: str, found: str
) -> None:
    pages = watched.alloc(8)
    if how == "release":
        watched.hold(pages, "room")
        watched.release("room")
    elif how == "free":
        watched.free(pages)
    else:
        watched = WatchedAllocator(watched._pool, TARGET_CANARY)
    write(watched, 5)
    if found == "taken":
        watched.alloc(8)
    else:
        watched.scan()
        watched.scan()
        watched.alloc(8)
    assert watched.num_findings == 1
    (text,) = watched.findings
    assert text.startswith("page 5 ")
    assert found in text


def test_under_the_scheduler_s_books_what_a_request_leaves_is_filled(
    watched: WatchedAllocator,
) -> None:
    """The books name pages in their own ways; what ends, is replaced or is evicted is seen."""
    page_manager = PageManager(8, 4, 4)
    page_manager.allocator = watched
    key = RadixKey(range(10))
    pages = page_manager.open(page_manager.match(key), 3, 0.0)
    ids = page_manager.pages(pages).copy()
    watched._pool.write_pages(ids, watched._pool.read_pages(ids).fill_(9))
    page_manager.cache_finished(pages, key, 0.0)
    assert [watched.holds_canary(page) for page in ids.tolist()] == [False, False, True]
    other = RadixKey(range(100, 128))
    pages = page_manager.open(page_manager.match(other), 7, 1.0)
    assert watched.num_findings == 0
    assert watched.holds_canary(int(ids[1]))  # evicted
    page_manager.hold(pages, "room")
    page_manager.release("room")
    watched.scan()
    assert watched.num_findings == 0


# --- what was asked, and what became of it --------------------------------------------------------


def worker(side: str) -> Any:
    return SimpleNamespace(side=side, name=side)


class Booked:
    """A ledger with one call and its ask."""

    def __init__(self) -> None:
        self.ledger = Ledger(deadline_s=5.0)
        self.decode, self.prefill = worker("decode"), worker("prefill")
        conversation = Conversation(
            random.Random(1), system_prompts(random.Random(1), Sizes()), Sizes()
        )
        self.call = Call("r1", self.ledger.new_room(None), self.decode, conversation, 0.0)
        self.ledger.opened(self.call)
        self.ledger.asked("r1.0", self.prefill, self.call)

    def end(self, rid: str = "r1", took_s: float = 1.0, by: Any = None) -> None:
        side = self.prefill if "." in rid else self.decode
        self.ledger.ended(by or side, rid, "sent" if "." in rid else "finished", "", took_s)


def test_a_call_that_ends_once_on_both_sides_is_in_order_and_frees_its_room() -> None:
    booked = Booked()
    booked.end()
    assert not booked.ledger.free_rooms
    booked.end("r1.0")
    assert booked.ledger.idle
    assert booked.ledger.free_rooms == [booked.call.room]
    assert not booked.ledger.violations


WRONG: dict[str, Callable[[Booked], Any]] = {
    "two outcomes": lambda booked: (booked.end(), booked.end()),
    "too late": lambda booked: booked.end(took_s=5.1),
    "by another worker": lambda booked: booked.end(by=worker("decode")),
    "an outcome from the grave": lambda booked: (booked.ledger.lost(booked.decode), booked.end()),
    "asked for twice": lambda booked: booked.ledger.asked("r1.0", booked.prefill, booked.call),
}


@pytest.mark.parametrize("what", WRONG.values(), ids=WRONG)
def test_anything_else_is_a_violation(what: Callable[[Booked], Any]) -> None:
    booked = Booked()
    what(booked)
    assert len(booked.ledger.violations) == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_short_storm_finds_nothing(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "storm.json"
    options = ["--duration", "10", "--transport", transport]
    run(["chaos", *options, "--json", str(path)])
    (found,) = json.loads(path.read_text())["rows"]
    assert sum(found["faults"].values()) > 5
    assert found["outcomes"]["finished"] > 50
    off = [name for name, ok in found["checks"].items() if not ok]
    assert off in ([], ["all is served after the storm"])  # which a busy machine may spoil
