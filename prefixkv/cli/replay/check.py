"""What a trace holds, what any cache could find in it, and why a replay of it finds nothing."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final

from prefixkv.cli.replay.report import amount
from prefixkv.cli.replay.trace import MOONCAKE, RECORD, TOKENS, Trace, chained, whole_blocks

_FAST_S: Final = 0.005
_SLOW_S: Final = 24 * 3600.0
"""Mean times between requests beyond which a trace's timestamps are hardly in ms."""


class TraceCheck:
    """What a trace holds and what repeats in it. `warm`: share of the requests that only warm the
    cache. O(blocks), but where nothing repeats O(blocks log blocks)."""

    def __init__(self, trace: Trace, warm: float = 0.0) -> None:
        requests = trace.requests
        begin = int(warm * len(requests))
        paths = [*trace.paths()]
        seen: set[Any] = set()
        known = []
        for path in paths:
            # A hit is a prefix, and what is in `seen` is closed upwards: the count is its length.
            known.append(sum(name in seen for name in path))
            seen.update(path)
        times = [request.time_s for request in requests] or [0.0]
        counted_tokens = sum(request.num_tokens for request in requests[begin:])
        counted_blocks = sum(request.blocks for request in requests[begin:])
        repeats = sum(known[begin:])
        self.trace, self.kind, self.requests = trace.name, trace.kind, len(requests)
        self.seconds = max(times) - min(times)  # from the first request to the last
        self.namespaces = len({request.key.namespace for request in requests})
        self.block_tokens = trace.block_tokens
        self.bytes_per_token = trace.bytes_per_token  # of KV; 0: the trace does not say
        # A prompt's partial last block included.
        self.asked_blocks = sum(request.blocks for request in requests)
        self.whole_blocks = sum(map(len, paths))
        self.different_blocks = len(seen)  # whole ones; a cache of this many never evicts
        self.largest_blocks = max(map(len, paths), default=0)  # whole blocks of one prompt
        self.longest_tokens = max((request.num_tokens for request in requests), default=0)
        # The greatest `block_hit_ratio` and `token_hit_ratio` of any cache.
        self.block_bound = repeats / max(1, counted_blocks)
        self.token_bound = repeats * trace.block_tokens / max(1, counted_tokens)
        self.lru_blocks = _lru_blocks(paths, begin)  # with so many lru finds a block; 0: none does
        # Why no cache can find a block, and what looks wrong: a sentence each. Of the reasons, from
        # the plainest one on, the first that holds is said.
        self.why_nothing: list[str] = []
        self.doubts = _doubts(trace, self.seconds)
        if repeats:
            return
        if not any(paths):
            # The partial block's id is there, but no cache keeps it.
            self.why_nothing = [
                f"No prompt has a whole block: the longest has {self.longest_tokens:,} tokens, a "
                f"block {trace.block_tokens:,}. {_SMALLER.get(trace.kind, _SMALLER[MOONCAKE])}"
            ]
        elif any(known):
            self.why_nothing = [
                f"What repeats is in the first {begin:,} requests, which only warm the cache "
                f"(--warm {warm:g}); the {len(requests) - begin:,} others ask for new blocks alone."
            ]
        else:
            self.why_nothing = [_nothing_repeats(trace, self.namespaces), *self.doubts]

    def __str__(self) -> str:
        size = f"; KV of a token: {amount(self.bytes_per_token)}" if self.bytes_per_token else ""
        lines = [
            f"{self.trace}: {self.kind}",
            f"{self.requests:,} requests in {self.seconds:,.1f} s, namespaces: "
            f"{self.namespaces:,}; the longest prompt has {self.longest_tokens:,} tokens{size}",
            f"blocks of {self.block_tokens:,} tokens: {self.asked_blocks:,} asked for, "
            f"{self.whole_blocks:,} of them whole, {self.different_blocks:,} different; at most "
            f"{self.largest_blocks:,} in a prompt",
            f"repeats: {self.block_bound:.1%} of the blocks, {self.token_bound:.1%} of the tokens; "
            "no cache finds more",
        ]
        if not self.why_nothing:
            lines.append(f"lru finds some from {self.lru_blocks:,} blocks on")
        return "\n  ".join([*lines, *(self.why_nothing or self.doubts)])

    def why_nothing_at(self, capacity: int) -> list[str]:
        """Say why policies find no block at this capacity."""
        if self.why_nothing:
            return [*self.why_nothing]
        enough, kept = self.lru_blocks, self.different_blocks
        found = f"With all blocks kept ({kept:,}) {self.block_bound:.1%} would be found."
        if enough <= capacity:
            return [found, f"lru finds some with {enough:,} blocks."]
        return [
            found,
            f"Between a prompt and the next that begins like it {enough:,} different blocks are "
            f"asked for, or more, and {capacity:,} fit: lru finds some from {enough:,} blocks on.",
        ]


check_trace = TraceCheck


_SMALLER: Final = {
    TOKENS: "--block-tokens takes smaller ones.",
    RECORD: "Record with smaller ones: DecodeConfig(record_block_tokens=16).",
    MOONCAKE: "Smaller ones need ids of their own: docs/traces.md says how to make them.",
}


def _doubts(trace: Trace, seconds: float) -> list[str]:
    """Say what looks wrong though it can be replayed: times, and prompts shorter than a block."""
    found = []
    requests, count = trace.requests, len(trace.requests)
    gap_s = seconds / max(1, count - 1)
    if count > 1 and not seconds:
        found.append("All requests have the same time: policies that learn from time see none.")
    elif count > 1 and not _FAST_S <= gap_s <= _SLOW_S:
        each = f"{1 / gap_s:,.0f} a second" if gap_s < 1 else f"one in {gap_s / 3600:,.0f} hours"
        found.append(f"Requests come {each}: are the times in the unit of this format?")
    if trace.out_of_order and trace.kind != RECORD:  # a record has them as they end
        found.append(
            f"{trace.out_of_order:,} requests are earlier than the one before them in the file; "
            "all are replayed by time."
        )
    short = sum(len(request.key) < trace.page_size for request in requests)
    if 0 < short < count:
        found.append(
            f"{short:,} of {count:,} prompts are shorter than a block of {trace.block_tokens} "
            "tokens: they can find nothing."
        )
    return found


def _nothing_repeats(trace: Trace, namespaces: int) -> str:
    """Say what could repeat if the file were another."""
    blocks = [whole_blocks(request.key, trace.page_size) for request in trace.requests]
    paths = [*map(chained, blocks)]  # as if there were one namespace
    shared = sum(map(len, paths)) - len(set[int]().union(*paths))
    again = sum(len({*own}) for own in blocks) - len(set[bytes]().union(*blocks))
    if shared:
        return (
            f"Equal blocks ({shared:,}) stand in different namespaces, {namespaces:,} for "
            f"{len(trace.requests):,} requests: those share nothing."
        )
    if again:
        return (
            f"{again:,} blocks come again, but behind other blocks: a block is found only if all "
            "before it are the same. Prompts that begin with a time or a name are all new."
        )
    return (
        "No block comes a second time. An id has to be the same wherever the prompt is the same up "
        "to its block's end; ids of a record are salted for each file."
    )


def _lru_blocks(paths: list[list[Any]], begin: int) -> int:
    """Return a number of blocks with which lru finds one; 0 if no cache does. O(blocks)."""
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
    _, first, end = nearest
    return max(len({name for path in paths[first:end] for name in path}), len(paths[end]))
