"""What two servers with small pools are explored with: requests of clients, and all the orders in
which they may arrive. Shared by the models of the library's schedulers (`world.py`) and of vLLM's
(tests/integration/vllm/liveness), which `play.py` plays."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

BLOCK = 4  # tokens of a page


@dataclass(frozen=True)
class Ask:
    """A client's request. `kind`: "room" (both servers are asked at once, in a room that the router
    has drawn), "drawn" (prefill draws the room, and decode is asked when it has answered), or
    "plain" (decode alone is asked). `prompt` are words of so many tokens each, (word, length);
    equal words at one place are shared tokens. `way` is prefill's server and decode's."""

    kind: str
    prompt: tuple[tuple[int, int], ...]
    num_out: int = 3
    way: str = "ab"

    @property
    def tokens(self) -> list[int]:
        return [
            3 + (word * 7919 + i * 31) % 1900 for word, length in self.prompt for i in range(length)
        ]


class LivenessError(AssertionError):
    """Something waits for ever, or is left behind."""


PATTERNS = "different", "two share", "all share", "equal", "prefix"


def prompts(pattern: str, lengths: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Prompts of these lengths, tokens. A word of 100 is what they share."""
    shared = 2 * BLOCK
    match pattern:
        case "different":
            return [((i, length),) for i, length in enumerate(lengths)]
        case "two share":
            return [
                ((100, shared), (i, length - shared)) if i < 2 else ((i, length),)
                for i, length in enumerate(lengths)
            ]
        case "all share":
            return [((100, shared), (i, length - shared)) for i, length in enumerate(lengths)]
        case "equal":
            return [((100, lengths[0]),) for _ in lengths]
        case "prefix":
            # Each is the beginning of the one before it.
            cuts = [max(length - i * (BLOCK + 1), 2) for i, length in enumerate(lengths)]
            return [((100, min(cuts[: i + 1])),) for i in range(len(lengths))]
    raise ValueError(pattern)


def asked_alike(
    num: int, patterns: tuple[str, ...], lengths: tuple[int, ...], pools: Iterable[Any],
    all_kinds: Iterable[tuple[str, ...]],
) -> Iterator[tuple[Any, tuple[Ask, ...]]]:  # fmt: skip
    """So many requests for each pattern, size, pool and kinds, with the pool."""
    for pattern, length, pool, kinds in product(patterns, lengths, pools, all_kinds):
        words = prompts(pattern, (length,) * num)
        yield pool, tuple(Ask(kinds[i % len(kinds)], words[i]) for i in range(num))


def arrivals(kinds: tuple[str, ...]) -> list[str]:
    """Events: "P0" is request 0 at its prefill server, "D0" at its decode server."""
    return [
        event
        for i, kind in enumerate(kinds)
        for event in ([f"D{i}"] if kind == "plain" else [f"P{i}", f"D{i}"])
    ]


def orders(asks: tuple[Ask, ...]) -> Iterator[tuple[str, ...]]:
    """All orders of arrival. Of those that differ in the names of like requests only, one; a drawn
    room's decode server is asked behind prefill."""
    events = arrivals(tuple(ask.kind for ask in asks))
    for order in permutations(events):
        firsts = [
            min(at for at, event in enumerate(order) if int(event[1:]) == i)
            for i in range(len(asks))
        ]
        like = all(
            firsts[i] < firsts[j]
            for i, one in enumerate(asks)
            for j, other in enumerate(asks)
            if i < j and _is_like(one, other, asks)
        )
        drawn = all(
            ask.kind != "drawn" or order.index(f"P{i}") < order.index(f"D{i}")
            for i, ask in enumerate(asks)
        )
        if like and drawn:
            yield order


def _is_like(one: Ask, other: Ask, asks: tuple[Ask, ...]) -> bool:
    """Whether another name would be another case. Words that others have too count."""

    def shape(ask: Ask) -> Any:
        words = [word for each in asks for word in {word for word, _ in each.prompt}]
        return replace(
            ask,
            prompt=tuple(
                (word if words.count(word) > 1 else -1, length) for word, length in ask.prompt
            ),
        )

    return bool(shape(one) == shape(other))


def leaving(
    order: list[str], asks: tuple[Ask, ...], chance: random.Random, *, abandons: bool = False
) -> list[str]:
    """The client of one request leaves: at decode, at prefill, at both, or before it came to
    decode, which decode is told where the room is a router's. `abandons`: also where it is not."""
    i = chance.randrange(len(asks))
    kind, prefill, decode = asks[i].kind, f"P{i}", f"D{i}"
    ways = "decode", "prefill", "both", *("never",) * (abandons or kind == "room")
    how = "decode" if kind == "plain" else chance.choice(ways)
    if how == "never":
        order = [event for event in order if event != decode]
        if kind == "room" or chance.random() < 0.5:
            order.insert(chance.randrange(len(order) + 1), f"!{decode}")
    for name in {"decode": [decode], "prefill": [prefill], "both": [prefill, decode]}.get(how, []):
        order.insert(chance.randrange(order.index(name) + 1, len(order) + 1), f"-{name}")
    return order
