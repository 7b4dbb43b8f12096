"""Cache events: what SGLang's tree tells, ours tells, block for block."""

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from tests.integration.sglang.inside.desk import Desk, Request
from tests.integration.sglang.inside.test_requests import request, served

OURS, RUST = "prefixkv", "unified-rust"
NAMED = "named" + "x" * 32
NAMES = [
    {}, {"extra_key": "e"}, {"cache_salt": "s"}, {"extra_key": NAMED},
    {"extra_key": "e", "cache_salt": "s"},
]  # fmt: skip


class Router:
    """What a consumer of the events holds for cached: every block with its parent and tokens."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Any, ...]] = {}
        self.num_stored = self.num_removed = 0

    def take(self, events: list[Any], page_size: int) -> None:
        for event in events:
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.blocks
                    assert event.block_size == page_size
                    assert len(event.token_ids) == page_size * len(event.block_hashes)
                    for number, block in enumerate(event.block_hashes):
                        tokens = event.token_ids[number * page_size : (number + 1) * page_size]
                        self.blocks[block] = (
                            parent, tuple(map(_plain, tokens)), event.cache_salt, event.lora_name,
                            event.medium,
                        )  # fmt: skip
                        parent = block
                        self.num_stored += 1
                case BlockRemoved():
                    assert event.medium == "GPU"
                    for block in event.block_hashes:
                        del self.blocks[block]
                        self.num_removed += 1
                case AllBlocksCleared():
                    self.blocks.clear()


def _plain(token: Any) -> Any:
    return tuple(token) if isinstance(token, (tuple, list)) else token


def name_adapters(desk: Desk) -> None:
    """The adapter behind one of the extra keys has a public name."""
    desk.params.kv_event_lora_names.register(
        SimpleNamespace(lora_id="x" * 32, extra_key=NAMED), lora_name="poems"
    )


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_same_blocks_are_told_as_by_sglangs_tree(
    page_size: int, eagle: bool, dynamo: bool
) -> None:
    desks = [
        Desk(kind, page_size, 8192, eagle=eagle, events=True, dynamo_events=dynamo)
        for kind in (OURS, RUST)
    ]
    routers = [Router(), Router()]
    rng = random.Random(page_size)
    known = [[rng.randrange(9) for _ in range(20)]]
    for desk in desks:
        name_adapters(desk)
    for number in range(60):
        base = rng.choice(known)
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(9) for _ in range(12)]
        known.append(tokens)
        names = rng.choice(NAMES)
        for desk, router in zip(desks, routers, strict=True):
            served(desk, f"r{number}", tokens, outputs=range(5), **names)
            if number == 40:
                desk.flush()
            if number % 3 == 0:
                router.take(desk.cache.take_events(), page_size)
    for desk, router in zip(desks, routers, strict=True):
        router.take(desk.cache.take_events(), page_size)
        # Without Dynamo's format SGLang gives unnamed extra keys no hash of their own.
        assert not dynamo or len(router.blocks) == desk.cache.evictable_size() // page_size
    assert routers[0].blocks == routers[1].blocks
    assert routers[0].num_stored > 300


@pytest.mark.parametrize("eagle", [False, True])
def test_what_is_evicted_is_told_and_what_remains_is_what_is_cached(eagle: bool) -> None:
    desk = Desk(OURS, 4, 512, eagle=eagle, events=True, policy="adaptive")
    router, rng = Router(), random.Random(3)
    known = [[rng.randrange(9) for _ in range(40)]]
    for number in range(300):
        base = rng.choice(known)
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(9) for _ in range(20)]
        known.append(tokens)
        del known[:-20]
        served(desk, f"r{number}", tokens, outputs=range(6), cache_salt=rng.choice((None, "s")))
        router.take(desk.cache.take_events(), 4)
        assert len(router.blocks) == desk.cache.total_size() // 4
    assert router.num_removed > 500


def test_a_new_tree_says_that_nothing_is_held_and_without_events_nothing_is_told() -> None:
    loud, quiet = Desk(OURS, 4, 64, events=True), Desk(OURS, 4, 64)
    assert [type(event) for event in loud.cache.take_events()] == [AllBlocksCleared]
    for desk in (loud, quiet):
        served(desk, "a", range(8))
    assert quiet.cache.take_events() == []
    assert len(loud.cache.take_events()) == 1
    assert loud.cache.take_events() == []


def test_a_flush_is_told_after_what_was_stored_before_it() -> None:
    desk = Desk(OURS, 4, 64, events=True)
    served(desk, "a", range(8))
    desk.flush()
    served(desk, "b", range(4))
    kinds = [type(event) for event in desk.cache.take_events()]
    assert kinds == [AllBlocksCleared, BlockStored, AllBlocksCleared, BlockStored]


def test_a_request_that_hit_stores_only_what_is_new_after_what_it_hit() -> None:
    desk = Desk(OURS, 4, 64, events=True)
    served(desk, "a", range(8))
    before = desk.cache.take_events()
    req: Request = request("b", array("q", range(12)))
    assert desk.admit(req)
    desk.checkpoint(req)
    (stored,) = desk.cache.take_events()
    assert stored.parent_block_hash == before[-1].block_hashes[-1]
    assert stored.token_ids == [8, 9, 10, 11]
