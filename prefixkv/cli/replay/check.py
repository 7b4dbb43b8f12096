"""What a trace holds, what any cache could find in it, and why a replay of it finds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from prefixkv.cli.replay.trace import MOONCAKE, RECORD, TOKENS, Trace, block_names
from prefixkv.spi import TOKEN_BYTES, RadixKey

_FAST_S: Final = 0.005
_SLOW_S: Final = 24 * 3600.0
"""Mean times between requests beyond which a trace's timestamps are hardly in ms."""


@dataclass(frozen=True, slots=True)
class TraceCheck:
    """Counts with `counted` are of the requests that do not only warm the cache."""

    trace: str
    kind: str
    requests: int
    seconds: float  # from the first request to the last
    namespaces: int
    out_of_order: int  # requests with an earlier time than the one before them in the file
    block_tokens: int
    bytes_per_token: int  # of KV; 0: the trace does not say
    asked_blocks: int  # a prompt's partial last block included
    whole_blocks: int
    different_blocks: int  # whole ones; a cache of this many never evicts
    largest_blocks: int  # whole blocks of one prompt
    longest_tokens: int
    prompts_without_block: int  # shorter than a block
    repeated_blocks: int  # found by a cache that never evicts: no policy finds more
    counted_asked_blocks: int
    counted_repeated_blocks: int
    counted_tokens: int
    empty_prompts: int = 0
    repeating_prompts: int = 0  # with an id at two of their positions; of token lists none count
    why_nothing: tuple[str, ...] = ()  # why no cache can find a block, a sentence each
    doubts: tuple[str, ...] = ()  # what looks wrong, a sentence each

    @property
    def block_bound(self) -> float:
        """The greatest `block_hit_ratio` of any cache."""
        return self.counted_repeated_blocks / max(1, self.counted_asked_blocks)

    @property
    def token_bound(self) -> float:
        """The greatest `token_hit_ratio` of any cache."""
        return self.counted_repeated_blocks * self.block_tokens / max(1, self.counted_tokens)


def check_trace(trace: Trace, warm: float = 0.0) -> TraceCheck:
    """Count what a trace holds and what repeats in it. `warm`: share of the requests that only warm
    the cache. O(blocks), but where nothing repeats O(blocks log blocks)."""
    begin = int(warm * len(trace.requests))
    seen: set[Any] = set()
    asked = whole = largest = without = repeated = 0
    counted_asked = counted_repeated = counted_tokens = 0
    for at, request in enumerate(trace.requests):
        names = block_names(request.whole_key, trace.page_size)
        # A hit is a prefix, and what is in `seen` is closed upwards: the count is the hit's length.
        known = sum(name in seen for name in names)
        seen.update(names)
        blocks = len(request.key) // trace.page_size
        asked, whole, repeated = asked + blocks, whole + len(names), repeated + known
        largest, without = max(largest, len(names)), without + (not names)
        if at >= begin:
            counted_asked, counted_repeated = counted_asked + blocks, counted_repeated + known
            counted_tokens += request.num_tokens
    times = [request.time_s for request in trace.requests]
    found = TraceCheck(
        trace=trace.name,
        kind=trace.kind,
        requests=len(trace.requests),
        seconds=max(times, default=0.0) - min(times, default=0.0),
        namespaces=len({request.key.namespace for request in trace.requests}),
        out_of_order=trace.out_of_order,
        block_tokens=trace.block_tokens,
        bytes_per_token=trace.bytes_per_token,
        asked_blocks=asked,
        whole_blocks=whole,
        different_blocks=len(seen),
        largest_blocks=largest,
        longest_tokens=max((request.num_tokens for request in trace.requests), default=0),
        prompts_without_block=without,
        repeated_blocks=repeated,
        counted_asked_blocks=counted_asked,
        counted_repeated_blocks=counted_repeated,
        counted_tokens=counted_tokens,
        empty_prompts=sum(not request.num_tokens for request in trace.requests),
        repeating_prompts=_repeating_prompts(trace),
    )
    found = replace(found, doubts=tuple(doubts(found)))
    return replace(found, why_nothing=tuple(why_nothing(trace, found, warm)))


def _repeating_prompts(trace: Trace) -> int:
    if trace.kind == TOKENS:  # equal tokens at two positions are two blocks
        return 0
    count = 0
    for request in trace.requests:
        pages = [*_pages(trace, request.whole_key)]
        count += len(set(pages)) < len(pages)
    return count


def doubts(check: TraceCheck) -> list[str]:
    """Say what looks wrong though it can be replayed: times, and prompts shorter than a block."""
    found = []
    gap_s = check.seconds / max(1, check.requests - 1)
    if check.requests > 1 and not check.seconds:
        found.append("All requests have the same time: policies that learn from time see none.")
    elif check.requests > 1 and not _FAST_S <= gap_s <= _SLOW_S:
        each = f"{1 / gap_s:,.0f} a second" if gap_s < 1 else f"one in {gap_s / 3600:,.0f} hours"
        found.append(f"Requests come {each}: are the times in the unit of this format?")
    if check.out_of_order and check.kind in (MOONCAKE, TOKENS):
        found.append(
            f"{check.out_of_order:,} requests are earlier than the one before them in the file; "
            "all are replayed by time."
        )
    if check.repeating_prompts:
        found.append(
            f"{check.repeating_prompts:,} of {check.requests:,} prompts have one id at two "
            "positions: an id stands for its block and all before it, so it cannot come again in a "
            "prompt. Are the ids those of single blocks?"
        )
    if check.empty_prompts:
        found.append(f"{check.empty_prompts:,} of {check.requests:,} prompts are empty.")
    short = check.prompts_without_block - check.empty_prompts
    if 0 < short < check.requests:
        found.append(
            f"{short:,} of {check.requests:,} prompts are shorter than a "
            f"block of {check.block_tokens} tokens: they can find nothing."
        )
    return found


def why_nothing(trace: Trace, check: TraceCheck, warm: float = 0.0) -> list[str]:
    """Say why no cache of any size can find a block; empty if one can."""
    # From the plainest reason to the one that is left over: the first that holds is said.
    if check.counted_repeated_blocks:
        return []
    if not check.whole_blocks:
        # The partial block's id is there, but no cache keeps it.
        return [
            f"No prompt has a whole block: the longest has {check.longest_tokens:,} tokens, a "
            f"block {check.block_tokens:,}. {_smaller(trace)}"
        ]
    if check.requests == 1:
        return ["It has one request only."]
    if check.repeated_blocks:
        first = int(warm * check.requests)
        return [
            f"What repeats is in the first {first:,} requests, which only warm the cache "
            f"(--warm {warm:g}); the {check.requests - first:,} others ask for new blocks alone."
        ]
    found = []
    if shared := _repeats_across_namespaces(trace):
        found.append(
            f"Equal blocks ({shared:,}) stand in different namespaces, {check.namespaces:,} for "
            f"{check.requests:,} requests: those share nothing."
        )
    elif again := _repeats_elsewhere(trace):
        found.append(
            f"{again:,} blocks come again, but behind other ones: a block is found only if all "
            "before it are the same. Prompts that begin with a time or a name are all new; an id "
            "has to stand for the whole prompt up to its end, not for a number in the request."
        )
    else:
        found.append(
            "No block comes a second time. An id has to be the same wherever the prompt is the "
            "same up to its block's end; an id drawn for each request never comes again."
        )
    if trace.kind == TOKENS and (common := _common_tokens(trace)):
        found.append(
            f"Prompts share up to {common:,} tokens from their beginnings, fewer than a block of "
            f"{check.block_tokens:,}: --page-size {1 << common.bit_length() - 1} finds some."
        )
    if check.kind == RECORD:
        found.append(
            "The ids of a record are salted for each file: what another file has seen is unknown "
            "in this one, put together or not. A greater record_bytes keeps more in one file."
        )
    return [*found, *check.doubts]


def why_nothing_here(trace: Trace, check: TraceCheck, warm: float, capacity: int) -> list[str]:
    """Say why policies find no block at this capacity."""
    if check.why_nothing:
        return [*check.why_nothing]
    enough = enough_for_lru(trace, warm)
    found = [
        f"With all blocks kept ({check.different_blocks:,}) {check.block_bound:.1%} would be found."
    ]
    if enough > capacity:
        found.append(
            f"Between a prompt and the next that begins like it {enough:,} different blocks are "
            f"asked for, or more, and {capacity:,} fit: lru finds some from {enough:,} blocks on."
        )
    else:
        found.append(f"lru finds some with {enough:,} blocks.")
    return found


def enough_for_lru(trace: Trace, warm: float = 0.0) -> int:
    """Return a number of blocks with which lru finds one; 0 if no cache does. O(blocks)."""
    begin = int(warm * len(trace.requests))
    paths = [block_names(request.whole_key, trace.page_size) for request in trace.requests]
    asked = [0, *accumulate(map(len, paths))]
    last: dict[Any, int] = {}  # by first block: the last request that has it
    nearest: tuple[int, int, int] | None = None  # (blocks asked for between, from, to)
    for at, path in enumerate(paths):
        if not path:
            continue
        before = last.get(path[0])
        if before is not None and at >= begin:
            between = asked[at] - asked[before]
            nearest = min(nearest or (between, before, at), (between, before, at))
        last[path[0]] = at
    if nearest is None:
        return 0
    # Of those between, each different one takes the room of one; and a prompt with more blocks than
    # the capacity is refused.
    _, begin, end = nearest
    needed = {name for path in paths[begin:end] for name in path}
    return max(len(needed), len(paths[end]))


def _smaller(trace: Trace) -> str:
    if trace.kind == TOKENS:
        return "--page-size takes smaller ones."
    if trace.kind == RECORD:
        return "Record with smaller ones: DecodeConfig(record_block_tokens=16)."
    return "Smaller ones need ids of their own: docs/traces.md says how to make them."


def _pages(trace: Trace, key: RadixKey) -> Iterator[bytes]:
    """Yield whole blocks, without what stands before them."""
    size = TOKEN_BYTES * trace.page_size
    for at in range(len(key) // trace.page_size):
        yield key.data[at * size : (at + 1) * size]


def _number_in_mix(key: RadixKey) -> int:
    """Equal blocks of two traces mean nothing."""
    return key.namespace[0] if isinstance(key.namespace, tuple) else 0


def _repeats_across_namespaces(trace: Trace) -> int:
    """Count blocks that would be found if all requests shared a namespace."""
    seen: set[Any] = set()
    found = 0
    for request in trace.requests:
        above = hash(_number_in_mix(request.key))
        for page in _pages(trace, request.whole_key):
            above = hash((above, page))
            found += above in seen
            seen.add(above)
    return found


def _repeats_elsewhere(trace: Trace) -> int:
    """Count blocks that an earlier request has too, wherever it has them."""
    seen: set[tuple[int, bytes]] = set()
    found = 0
    for request in trace.requests:
        number = _number_in_mix(request.key)
        pages = {(number, page) for page in _pages(trace, request.whole_key)}
        found += len(pages & seen)
        seen |= pages
    return found


def _common_tokens(trace: Trace) -> int:
    """Return the most tokens that two prompts share from their beginnings."""
    # Sorted, the two that share most are neighbours. The order is that of bytes, which keeps equal
    # beginnings together as well as any other.
    keys = sorted((repr(one.key.namespace), bytes(one.key.data)) for one in trace.requests)
    most = 0
    for (space, data), (other_space, other) in pairwise(keys):
        if space == other_space:
            most = max(most, _common_bytes(data, other) // TOKEN_BYTES)
    return most


def _common_bytes(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        half = (low + high + 1) // 2
        if one[low:half] == other[low:half]:
            low = half
        else:
            high = half - 1
    return low
