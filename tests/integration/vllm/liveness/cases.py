"""Cases: every order of arrival, random ones, and those that stood still once."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from msgspec.structs import replace

from tests.integration.vllm.liveness.case import MAX_LEN_BLOCKS, Case
from tests.laws.liveness.arrivals import (
    BLOCK,
    PATTERNS,
    Ask,
    arrivals,
    asked_alike,
    leaving,
    orders,
    prompts,
)

LENGTHS = 14 * BLOCK, 14 * BLOCK - 2, 10 * BLOCK, 7 * BLOCK + 1
"""Of 24 blocks one, one, two and three prompts take all that can be had."""
POOLS = (24, 24), (24, 200), (200, 24)
KINDS = ("room",), ("drawn",), ("room", "drawn"), ("drawn", "room"), ("room", "plain")


def every_order(num: int, patterns: tuple[str, ...], paces: tuple[str, ...]) -> Iterator[Case]:
    """Every order of so many requests, for each pattern, size, pool, kind and pace."""
    for pool, asks in asked_alike(num, patterns, LENGTHS, POOLS, KINDS):
        for order, pace in product(orders(asks), paces):
            yield Case(asks, order, (pace,), blocks=pool)


def at_random(seed: int) -> Case:
    """A case of which all is drawn, aborts among it."""
    chance = random.Random(seed)
    num = chance.choice((2, 3, 3, 3, 4))
    both = chance.random() < 0.3
    length = chance.choice(LENGTHS)
    lengths = tuple(chance.choice((length, length, chance.choice(LENGTHS))) for _ in range(num))
    words = prompts(chance.choice(PATTERNS), lengths)
    kinds = chance.choice((*KINDS, ("room",), ("room",)))
    asks = tuple(
        Ask(
            kinds[i % len(kinds)],
            words[i],
            chance.choice((1, 3, 8, 20)),
            chance.choice(("ab", "ba")) if both else "ab",
        )
        for i in range(num)
    )
    order = arrivals(tuple(ask.kind for ask in asks))
    chance.shuffle(order)
    if chance.random() < 0.4:
        order = leaving(order, asks, chance, abandons=True)
    case = Case(
        asks,
        tuple(order),
        (chance.choice(("none", "rest", "a", "b", "random", "random", "random")),),
        storm=chance.choice((0, 0, 40, 200)),
        seed=seed,
        blocks=chance.choice((*POOLS, (24, 24))),
        chunk=chance.choice((1024, 1024, 16, 9)),
        share=chance.choice((0, 0, 7)),
        join=chance.random() < 0.7,
        recompute_below=chance.choice((0, 0, 0, 2 * BLOCK, 9 * BLOCK)),
        asynchronous=chance.random() < 0.4,
        both=both,
    )
    below = chance.choice((0, 0, 2 * BLOCK, 9 * BLOCK, MAX_LEN_BLOCKS * BLOCK))
    return replace(case, compute_below=0 if case.recompute_below else below)


def with_both(seed: int) -> Case:
    """A case of `with_host` with two servers of both roles. Half of them have no host memory."""
    case, chance = with_host(seed, both=True), random.Random(-1 - seed)
    blocks = chance.choice((case.blocks, (24, 24), (24, 24), (34, 24)))
    case = replace(case, blocks=blocks)
    return case if chance.random() < 0.5 else replace(case, host="", copies_fail=0.0)


def with_host(seed: int, *, both: bool = False) -> Case:
    """A case with host memory: a few prompts that are asked again and again, of which two or three
    fill decode's cache, so that they evict each other there. Clients leave at any time. `both`:
    with servers of both roles, which a fifth of the cases has anyway."""
    chance = random.Random(seed)
    num = chance.choice((6, 8, 10))
    shared = chance.choice((0, 0, 2 * BLOCK))
    words = []
    for i in range(chance.choice((2, 3, 3, 4))):
        own = (i, chance.choice(LENGTHS) - 2 * BLOCK)
        words.append(((100, shared), own) if shared else (own,))
    both = (chance.random() < 0.2) or both
    kinds = chance.choice((("plain",), ("room",), ("room", "plain"), ("room", "plain", "drawn")))
    asks = []
    for i in range(num):
        word = words[i % len(words)] if chance.random() < 0.7 else chance.choice(words)
        more = ((50 + i, chance.choice((1, 3, 9))),) if chance.random() < 0.4 else ()
        num_out = chance.choice((1, 3, 8, 20))
        way = chance.choice(("ab", "ba")) if both else "ab"
        asks.append(Ask(chance.choice(kinds), word + more, num_out, way))
    order = arrivals(tuple(ask.kind for ask in asks))
    if chance.random() < 0.3:
        chance.shuffle(order)
    for i in chance.sample(range(num), chance.choice((0, 0, 1, 3))):
        at = order.index(f"D{i}") + 1
        order.insert(chance.randrange(at, min(at + 3, len(order)) + 1), f"-D{i}")
    case = Case(
        tuple(asks),
        tuple(order),
        (chance.choice(("none", "rest", "random", "random", "random", "random")),),
        storm=chance.choice((40, 200, 600)),
        seed=seed,
        blocks=chance.choice(((200, 24), (200, 24), (24, 24), (200, 34))),
        chunk=chance.choice((1024, 1024, 16, 9)),
        share=chance.choice((0, 0, 7)),
        asynchronous=chance.random() < 0.4,
        both=both,
        host=chance.choice(("8x", "4x", "2x", "1x", "0.5x")),
        copies_fail=chance.choice((0.0, 0.0, 0.2)),
        flushes=chance.choice((0.0, 0.0, 0.0, 0.02)),
        leaves=chance.choice((0.0, 0.0, 0.1)),
    )
    below = chance.choice((0, 0, 2 * BLOCK, MAX_LEN_BLOCKS * BLOCK))
    return replace(case, compute_below=below)


WINDOWS = ((5,), (9,), (8,), (16,), (9, 9), (6, 21), (40,))
"""In tokens, of each window group: less than two blocks, whole blocks and one more, two groups."""


def with_windows(seed: int) -> Case:
    """A case of `at_random` whose model has layers that keep a window."""
    windows = random.Random(-1 - seed).choice(WINDOWS)
    return _with_groups(seed, 22 * len(windows), windows=windows)


STATES = ("align", "align"), ("checkpoint", "checkpoint"), ("none", "align"), ("align", "none")
"""How servers a and b keep states: each with the prefix cache on and off."""


def with_states(seed: int) -> Case:
    """A case of `at_random` whose model has layers that keep a state."""
    states = random.Random(-1 - seed).choice(STATES)
    # Of each of the two groups what a request has at once.
    most = max({"none": 1, "align": 3, "checkpoint": 6}[mode] for mode in states)
    return _with_groups(seed, 2 * most, states=states)


def _with_groups(seed: int, num_blocks: int, **groups: Any) -> Case:
    """`num_blocks`: what the groups of a request take besides."""
    chance, small = random.Random(-2 - seed), 24 + num_blocks
    return replace(
        at_random(seed),
        blocks=chance.choice(((small, small), (small, small), (small, 300), (300, small))),
        recompute_below=0,
        compute_below=0,
        flushes=chance.choice((0.0, 0.0, 0.0, 0.02)),
        **groups,
    )


WITH: dict[str, Callable[[int], Case]] = {
    "": at_random, "host": with_host, "both": with_both, "windows": with_windows,
    "states": with_states,
}  # fmt: skip


def _once() -> dict[str, Case]:
    """Cases that stood still once."""
    long, one, other = ((0, 14 * BLOCK),), ((1, 14 * BLOCK),), ((2, 14 * BLOCK),)
    shared, beside = prompts("all share", (14 * BLOCK,) * 2)
    first_at_each = "P0", "D1", "P1", "D0"
    rooms = (Ask("room", long), Ask("room", one))
    joined = (Ask("room", shared), Ask("room", beside))
    behind = (Ask("drawn", long), Ask("room", one), Ask("drawn", other))
    cut_short = Ask("drawn", shared, 1), Ask("room", beside, 1)
    across = (Ask("drawn", long), Ask("drawn", one, way="ba"))
    loads = tuple(Ask("room", ((i, 10 * BLOCK),), way="ab" if i < 2 else "ba") for i in range(4))
    grows = Ask("plain", ((0, 50),), 20), Ask("room", ((1, 41),), 1, way="ba")
    in_between = (
        Ask("room", ((0, 10 * BLOCK),), way="ba"),
        Ask("plain", ((1, 54),), 20),
        Ask("room", ((2, 30),)),
        Ask("plain", ((3, 54),), 20, way="ba"),
    )
    return {
        # Prefill has computed and holds request 0, decode waits for request 1.
        "ordered": Case(rooms, first_at_each, ("rest",)),
        # Decode has blocks for both, but request 0 waits for what request 1 loads.
        "join": Case(joined, first_at_each, ("rest",), blocks=(24, 200)),
        # A promised prompt is behind one that may not have an offer's blocks yet.
        "behind": Case(behind, ("P2", "D1", "P0", "P1", "D0", "D2"), ("rest",)),
        # A promised prompt is preempted for one that is then offered.
        "preempted": Case(cut_short, ("D1", "P0", "P1", "D0"), share=7),
        # Each server offers a prompt, and has no blocks to load the other's.
        "across": Case(across, ("P0", "P1", "D0", "D1"), both=True),
        # Each server's loads take all of its blocks, and wait for the other to compute.
        "loads": Case(
            loads,
            tuple(f"D{i}" for i in range(4)) + tuple(f"P{i}" for i in range(4)),
            ("rest",),
            both=True,
        ),
        # Two prompts that are half computed hold what each other lacks.
        "halves": Case(rooms, ("D0", "D1", "P0", "P1"), ("none",), blocks=(24, 200), share=8),
        # On each server a request is preempted for which a load leaves too few blocks. The prompts
        # for which the loads wait are behind it.
        "behind what loads": Case(
            in_between, ("P0", "D0", "D1", "P2", "D2", "D3"), ("none",), both=True
        ),
        # A promised prompt is preempted for a request that then needs more than is left beside it.
        "behind what grew": Case(grows, ("D0", "D1", "P1"), ("none",), share=5, both=True),
    }


ONCE = _once()
