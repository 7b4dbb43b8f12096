"""Cases: every order of arrival and of what goes on in between, and random ones."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Final

import benchmarks.policies.gated  # noqa: F401  makes it known by name
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
from tests.laws.liveness.world import GROUPS, Case
from tests.support.schedulers import AGES_S
from tests.support.sim_engines import ROWS

LENGTHS = 5 * BLOCK, 5 * BLOCK - 2, 3 * BLOCK, 2 * BLOCK + 1
"""Of 8 pages one, one, two and three prompts take all that can be had."""
TOO_LONG = 9 * BLOCK  # for 8 pages
POOLS = (8, 8), (8, 40), (40, 8)
KINDS = ("room",), ("drawn",), ("room", "drawn"), ("drawn", "room")
PACES = (*GROUPS, "rest")


def every_order(
    num: int, patterns: tuple[str, ...] = PATTERNS, *, mixed: bool = False
) -> Iterator[Case]:
    """Every order of so many requests, for each pattern, size, pool and kind. What goes on between
    two arrivals is one for all of them, or, `mixed`, each by itself."""
    for pool, asks in asked_alike(num, patterns, LENGTHS, POOLS, KINDS):
        for order in orders(asks):
            paces = product(PACES, repeat=len(order) - 1) if mixed else ((one,) for one in PACES)
            for pace in paces:
                yield Case(asks, order, pace, pages=pool)


def second_turns() -> Iterator[Case]:
    """Two conversations whose first turns have ended, so that each side has what they begin with in
    its cache, and a small new prompt: every order of the second turns and that."""
    for more, kinds, pool in product((2 * BLOCK, 4 * BLOCK), KINDS, POOLS):
        asks = _turns(more, kinds)
        for order in orders(asks[2:]):
            for pace in PACES:
                yield _later(asks, order, pace, pool)


def _turns(more: int, kinds: tuple[str, ...]) -> tuple[Ask, ...]:
    first = 4 * BLOCK - 3  # with an answer of 3 tokens 4 pages
    words: list[tuple[tuple[int, int], ...]] = [((i, first),) for i in range(2)]
    words += [((i, first), (2 + i, more)) for i in range(2)]
    words.append(((9, BLOCK + 1),))
    return tuple(
        Ask("room" if i < 2 else kinds[i % len(kinds)], word) for i, word in enumerate(words)
    )


def _later(asks: tuple[Ask, ...], order: tuple[str, ...], pace: str, pool: tuple[int, int]) -> Case:
    """The first two have ended when the others, which `order` counts from 0, begin to come."""
    later = [f"{event[0]}{int(event[1]) + 2}" for event in order]
    paces = ("rest",) * 4 + (pace,) * (len(later) - 1)
    return Case(asks, ("P0", "D0", "P1", "D1", *later), paces, pages=pool)


def _once() -> dict[str, Case]:
    """Cases in which one fault each shows: see `mutants`."""
    long, other = Ask("room", ((0, 5 * BLOCK),)), Ask("room", ((1, 5 * BLOCK),))
    crossed = "P0", "D1", "P1", "D0"
    first, beside = (Ask("room", words) for words in prompts("all share", (5 * BLOCK,) * 2))
    drawn = tuple(Ask("drawn", ask.prompt) for ask in (long, other))
    return {
        "crossed": Case((long, other), crossed, ("rest",)),
        "crossed, large decode": Case((long, other), crossed, ("rest",), pages=(8, 40)),
        "late": Case((long, other), ("P0", "P1", "D1", "D0"), ("decode",), pages=(40, 8)),
        "shared": Case((first, beside), ("P0", "P1", "D1", "D0"), ("network",), pages=(8, 40)),
        "shared, the second first": Case(
            (first, beside), ("D0", "D1", "P1", "P0"), ("rest",), pages=(40, 40)
        ),
        "offers": Case(drawn, ("P0", "P1", "D1", "D0"), ("rest",)),
        "an offer and a room": Case((drawn[0], other), ("P0", "P1", "D1", "D0"), ("rest",)),
        "too long for prefill": Case(
            (Ask("room", ((0, TOO_LONG),)), other), ("D0", "P0", "P1", "D1"), pages=(8, 40)
        ),
        "too long for decode": Case(
            (Ask("room", ((0, TOO_LONG),)), other), ("P0", "D0", "P1", "D1"), pages=(40, 8)
        ),
        "prefill's client leaves": Case(
            (long, other), ("D0", "P0", "-P0", "P1", "D1"), ("network",)
        ),
        "decode's client leaves": Case((long, other), ("D0", "D1", "-D0", "P0", "P1"), ("rest",)),
        "second turns": _later(
            _turns(4 * BLOCK, ("room",)), ("D2", "D0", "D1", "P2", "P0", "P1"), "rest", (40, 8)
        ),
    }


ONCE: Final = _once()


def at_random(seed: int) -> Case:
    """A case of which all is drawn: steps of anything, clients that leave, prompts that can never
    fit, a frame that is lost."""
    chance = random.Random(seed)
    num = chance.choice((2, 3, 3, 3, 4))
    lengths = chance.choice(LENGTHS), chance.choice(LENGTHS), TOO_LONG
    sizes = chance.choices(lengths, (6, 3, 1), k=num)
    words = prompts(chance.choice(PATTERNS), tuple(sizes))
    kinds = chance.choice((*KINDS, ("room",), ("room",)))
    asks = tuple(Ask(kinds[i % len(kinds)], words[i], chance.choice((1, 3, 6))) for i in range(num))
    order = arrivals(tuple(ask.kind for ask in asks))
    chance.shuffle(order)
    if chance.random() < 0.3:
        order = leaving(order, asks, chance)
    return Case(
        asks,
        tuple(order),
        paces=chance.choice((*((one,) for one in PACES), *(("random",),) * 8)),
        storm=chance.choice((0, 0, 40, 200)),
        seed=seed,
        pages=chance.choice((*POOLS, (8, 8), (9, 9))),
        policy=chance.choice(("lru", "lru", "gated", "slru")),
        admission=chance.choice(("hit_aware", "fifo", "priority")),
        patience_s=chance.choice((AGES_S, 0.0)),
        reserve=chance.choice((0, 0, 4)),
        lose=chance.choice((-1, -1, chance.randrange(40))),
    )


def own_compute_at_random(seed: int) -> Case:
    """The same beside an engine that computes prompts itself, and has few rows: some name no
    prefill worker, and are sent to it later."""
    chance = random.Random(seed)
    num = chance.choice((2, 3, 4, 5, 6))
    sizes = tuple(chance.choice((*LENGTHS, 7 * BLOCK)) for _ in range(num))
    words = prompts(chance.choice((*PATTERNS, "equal", "equal", "prefix")), sizes)
    kinds = [chance.choice(("room", "plain")) for _ in range(num)]
    asks = tuple(Ask(kinds[i], words[i], chance.choice((1, 3, 6))) for i in range(num))
    order = arrivals(tuple(kinds))
    chance.shuffle(order)
    for i in range(num):
        if kinds[i] == "plain" and chance.random() < 0.5:
            at = order.index(f"D{i}") + 1
            order.insert(chance.randrange(at, min(at + 2, len(order)) + 1), f"~D{i}")
    if chance.random() < 0.2:
        order = leaving(order, asks, chance)
    return Case(
        asks,
        tuple(order),
        paces=chance.choice((*((one,) for one in PACES), *(("random",),) * 8)),
        storm=chance.choice((0, 0, 40)),
        seed=seed,
        pages=(40, chance.choice((8, 9, 10, 11, 12, 14, 40))),
        admission=chance.choice(("hit_aware",) * 4 + ("fifo", "priority")),
        reserve=chance.choice((0, 0, 4)),
        compute=chance.choice((0, BLOCK, 100)),
        rows=chance.choice((1, 2, 2, 3, 3, 4, ROWS)),
    )
