"""The shadow beside a pool that does as it likes: what it names is usable, and named once."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from benchmarks.policies.gated import Gated
from prefixkv.engines.vllm.shadow import Shadow
from tests.unit.engines.vllm.standin import DECODE, Request, side_of

BLOCK, NUM_BLOCKS = 2, 12


class Pool:
    """A naive one: which blocks are in use and which are cached, and for what tokens."""

    def __init__(self) -> None:
        self.refs = [0] * NUM_BLOCKS
        self.holds: dict[int, tuple[int, ...]] = {}  # by block: all tokens up to its end

    def usable(self, block: int) -> bool:
        return self.refs[block] == 0 and block in self.holds

    def block_of(self, tokens: tuple[int, ...]) -> int | None:
        return next((block for block, held in self.holds.items() if held == tokens), None)


class ShadowedPool(RuleBasedStateMachine):
    """Requests come, find blocks, take others from the shadow or against it, and end."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.time = Pool(), 0.0
        self.shadow = Shadow(BLOCK, "lru", self.clock)
        self.requests: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self.count = 0

    def clock(self) -> float:
        self.time += 1.0
        return self.time

    def take(self, number: int, by_policy: bool) -> list[int] | None:
        pool, found = self.pool, []
        free = [block for block in range(NUM_BLOCKS) if not pool.refs[block]]
        if len(free) < number:
            return None
        unknown = [block for block in free if block not in pool.holds][:number]
        found += unknown
        if by_policy and len(found) < number:
            named = self.shadow.victims(number - len(found), pool.usable)
            assert len(named) == len(set(named)) <= number - len(found)
            assert all(pool.usable(block) and block not in found for block in named)
            found += named
        found += [block for block in free if block not in found][: number - len(found)]
        for block in found:
            pool.holds.pop(block, None)
            self.shadow.taken(block)
            pool.refs[block] = 1
        return found

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9).map(tuple),
        by_policy=st.booleans(),
    )
    def admit(self, tokens: tuple[int, ...], by_policy: bool) -> None:
        blocks: list[int] = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            block = self.pool.block_of(tokens[:end])
            if block is None:
                break
            blocks.append(block)
        for block in blocks:
            self.pool.refs[block] += 1
        new = self.take(len(tokens) // BLOCK - len(blocks), by_policy)
        if new is None:
            for block in blocks:
                self.pool.refs[block] -= 1
            return
        self.count += 1
        rid = str(self.count)
        self.shadow.admitted(rid, tokens, blocks + new)
        self.requests[rid] = tokens, blocks + new

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: Any, keeps: bool) -> None:
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        tokens, blocks = self.requests.pop(rid)
        if keeps:
            for i, block in enumerate(blocks):
                if block not in self.pool.holds:
                    self.pool.holds[block] = tokens[: (i + 1) * BLOCK]
        cached = [block for block in blocks if block in self.pool.holds]
        self.shadow.ended(rid, tokens, blocks if len(cached) == len(blocks) else [])
        for block in blocks:
            self.pool.refs[block] -= 1

    @rule()
    def forget_all(self) -> None:
        """vLLM resets its cache; the shadow may not even be told."""
        if not any(self.pool.refs):
            self.pool.holds.clear()

    @rule()
    def flush(self) -> None:
        self.shadow.flush()

    @invariant()
    def laws(self) -> None:
        self.shadow.check_invariants()


ShadowedPool.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShadow = ShadowedPool.TestCase
TestShadow.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]


def test_the_policy_decides() -> None:
    """Under lru the conversation used longest ago goes first, its end before its beginning."""
    times = iter(range(100))
    shadow = Shadow(BLOCK, "lru", lambda: float(next(times)))
    for rid, tokens, blocks in (("1", [1, 1, 1, 1], [7, 3]), ("2", [2, 2, 2, 2], [5, 9])):
        shadow.admitted(rid, tokens)
        shadow.ended(rid, tokens, blocks)
    shadow.admitted("3", [1, 1, 1, 1])
    assert shadow.victims(1, lambda _: True) == [9]
    shadow.ended("3", [1, 1, 1, 1], [7, 3])
    assert sorted(shadow.victims(4, lambda block: block != 3)) == [5, 7]


def test_what_runs_beside_a_request_says_nothing_of_it() -> None:
    """All begin with a system prompt. A long new prompt is a one-shot for `gated`, and goes first,
    also where a short one, which goes on from the system prompt, was admitted while it ran."""
    times = iter(range(1, 100))
    shadow = Shadow(BLOCK, Gated(short_tokens=4 * BLOCK), lambda: float(next(times)))

    def request(rid: str, tokens: list[int], first: int) -> tuple[str, list[int], list[int]]:
        asked = rid, [1] * BLOCK + tokens, [0, *range(first, first + len(tokens) // BLOCK)]
        shadow.admitted(*asked)
        return asked

    shadow.ended(*request("system", [], 1))
    long = request("long", [7] * 8 * BLOCK, 10)
    shadow.ended(*request("short", [5] * 2 * BLOCK, 1))
    shadow.ended(*long)
    assert sorted(shadow.victims(8, lambda _: True)) == [*range(10, 18)]


def test_namespaces_are_apart() -> None:
    shadow = Shadow(BLOCK, "lru", lambda: 0.0)
    shadow.ended("1", [1, 1], [4], "a")
    shadow.ended("2", [1, 1], [5], "b")
    assert sorted(shadow.victims(9, lambda _: True)) == [4, 5]


def test_a_request_that_ends_leaves_its_cached_blocks_until_a_flush() -> None:
    """The scheduler's side tells the shadow: only blocks that have a hash, and whole ones."""
    shadow = Shadow(4, "lru", lambda: 0.0)
    side, pool = side_of(DECODE, num_blocks=8)
    side.bind(pool, shadow)
    for rid, first in (("1", 10), ("2", 20)):
        request = Request(rid, range(first, first + 15), num_computed_tokens=15)
        blocks = pool.new_blocks(4) or []
        for block in blocks[:2] + blocks[3:]:
            pool.cache(block, first + block.block_id)
        pages = [block.block_id for block in blocks]
        side.allocated(request, (pages,), 0)
        side.finished(request, pages)
        if rid == "1":
            assert sorted(shadow.victims(9, side.holds.is_cached)) == pages[:2]
    side.flush()
    assert shadow.victims(9, lambda _: True) == []
