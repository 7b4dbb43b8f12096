"""How to divide a card's memory where layers do not all keep everything: replays of a trace with
one pool for all layers, and with full pages beside windows, states and checkpoints.

Decode finds full pages alone: prefill sends the last window and the state with every prompt, so
beside full pages decode has room for those of the requests that run. Prefill goes on from a
checkpoint, so there the rest is divided between full pages and checkpoints, which are saved where
prefill saves them: at the end of each prompt, and where its path leaves what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prefixkv.cli.replay.curves import amount
from prefixkv.cli.replay.measure import MakePolicy
from prefixkv.cli.replay.model import ModelShape
from prefixkv.cli.replay.run import replay_policy
from prefixkv.cli.replay.tiers import Tier
from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import NO_SLOT, Checkpoints, ConfigError

SHARES: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
"""Of prefill's memory, for checkpoints."""

PAGE_TOKENS: Final = 16
"""Of an engine's pages, in which a window is kept; the blocks of a trace may be larger."""


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Hit rates of one division of the memory. A ratio is of all blocks asked for."""

    trace: str
    model: str
    policy: str
    side: str  # "one pool", "decode" or "prefill"
    memory_bytes: int
    capacity_blocks: int  # for the layers that keep everything; of one pool, for all layers
    checkpoints: int  # slots
    share: float  # of the memory that is for checkpoints
    dense_ratio: float  # blocks whose full pages are there
    resume_ratio: float  # blocks behind which computing can go on; decode does not compute


def check_split(shape: ModelShape, memory_bytes: int, running: int) -> None:
    """Raise ConfigError for a model all of whose layers keep everything, or memory in which not
    even the requests fit that run."""
    if shape.is_plain:
        raise ConfigError(
            f"--model: all layers of {shape.name} keep everything, so there is nothing to divide"
        )
    if not shape.full_token_bytes:
        raise ConfigError(f"--model: no layer of {shape.name} keeps everything: nothing is cached")
    taken = running * shape.running_bytes(PAGE_TOKENS)
    if taken >= memory_bytes:
        raise ConfigError(
            f"--memory is {amount(memory_bytes)}: the windows and states of {running} running "
            f"requests of {shape.name} take {amount(taken)}"
        )


def replay_splits(
    trace: Trace,
    shape: ModelShape,
    memory_bytes: int,
    name: str,
    make: MakePolicy,
    warm: float = 0.0,
    running: int = 1,
) -> list[SplitResult]:
    """Replay a trace with one policy: all layers in one pool, decode's division, and prefill's with
    each of `SHARES`. Raises as `check_split`.

    Args:
        name, make: of the policy.
        memory_bytes: for KV and states, of one worker.
        warm: share of the requests that only warm the cache.
        running: requests that run at a time.
    """
    check_split(shape, memory_bytes, running)
    results = []

    def note(side: str, blocks: int, slots: int, share: float, dense: float, on: float) -> None:
        results.append(
            SplitResult(
                trace.name, shape.name, name, side, memory_bytes, blocks, slots, share, dense, on
            )
        )

    block, running_bytes = trace.block_tokens, running * shape.running_bytes(PAGE_TOKENS)
    # States have no tokens: of one pool for all layers too, those that run take theirs.
    of_states = running * shape.state_bytes
    sizes = {
        "one pool": (memory_bytes - of_states) // (block * shape.all_token_bytes),
        "decode": (memory_bytes - running_bytes) // (block * shape.full_token_bytes),
    }
    for side, blocks in sizes.items():
        if blocks:
            found = replay_policy(trace, make(), blocks, warm, running=running)
            ratio = found.block_hit_ratio
            # Where windows are kept like everything else, computing goes on anywhere.
            on = ratio if side == "one pool" and not shape.state_layers else 0.0
            note(side, blocks, 0, 0.0, ratio, on)
        else:
            note(side, 0, 0, 0.0, 0.0, 0.0)
    each = shape.checkpoint_bytes(PAGE_TOKENS)
    for share in SHARES:
        left = memory_bytes - running_bytes
        slots = int(share * left) // each
        blocks = (left - slots * each) // (block * shape.full_token_bytes)
        if slots and blocks:
            dense, on = replay_resume(trace, make, blocks, slots, warm)
            note("prefill", blocks, slots, share, dense, on)
    return results


def replay_resume(
    trace: Trace, make: MakePolicy, capacity: int, slots: int, warm: float = 0.0
) -> tuple[float, float]:
    """Replay a trace through a real `RadixCache` and real `Checkpoints`, one request after the
    other. Return the shares of all blocks whose full pages were there, and behind which prefill
    could go on.

    Args:
        capacity: blocks.
        slots: checkpoints.
        warm: share of the requests that only warm the cache.
    """
    tier = Tier(trace, make(), capacity, makes_room=True)
    points = tier.checkpoints = Checkpoints(tier.cache, capacity, slots)
    start, size = int(warm * len(trace.requests)), trace.page_size
    asked = dense = resume = 0
    for at, request in enumerate(trace.requests):
        key, now_s = request.whole_key, request.time_s
        total = len(key) // size
        counts = at >= start
        asked += counts * (len(request.key) // size)
        if not 0 < total <= capacity:
            continue
        match = tier.cache.match_prefix(key)
        found = points.find(match)
        lock = tier.cache.lock(match, now_s)
        known, on = lock.prefix_len // size, 0 if found is None else found.depth
        if found is not None:
            points.use(found)
            points.lock(found)
        if counts:
            dense += known
            resume += on
        # The slots before the pages, as prefill takes them while it computes.
        saved = [(depth, points.take()) for depth in sorted({known, total}) if depth > on]
        if found is not None:
            points.unlock(found)
        tier.store(key, lock, now_s)
        pages = tier.cache.match_prefix(key).pages
        for depth, slot in saved:
            if slot != NO_SLOT:
                points.save(int(pages[depth - 1]), depth, slot, found)
        tier.cache.unlock(lock)
    points.check_invariants()
    return dense / max(1, asked), resume / max(1, asked)


def shape_sentence(shape: ModelShape) -> str:
    """Say what the layers of a model keep."""
    parts = [
        f"{shape.full_layers} layers keep everything, {amount(shape.full_token_bytes)} a token"
    ]
    parts += [
        f"{one.layers} keep the last {one.tokens:,} tokens, {amount(one.token_bytes)} a token"
        for one in shape.windows
    ]
    if shape.state_layers:
        parts.append(f"{shape.state_layers} keep a state, {amount(shape.state_bytes)} in all")
    each = shape.checkpoint_bytes(PAGE_TOKENS)
    worth = each // shape.full_token_bytes
    return (
        f"{shape.name}: {'; '.join(parts)}. A checkpoint takes {amount(each)}, as much as "
        f"{worth:,} tokens of what is kept of all"
    )


def split_row(result: SplitResult) -> str:
    """Format the result of one division as a line of the command's table."""
    name = f"{result.side}, {result.policy}"
    some = f"{result.checkpoints:,} ({result.share:.1%})" if result.checkpoints else "-"
    on = "-" if result.side == "decode" else f"{result.resume_ratio:.4f}"
    return LAYOUT.format(name, result.capacity_blocks, some, f"{result.dense_ratio:.4f}", on)


LAYOUT: Final = "{:<26.26} {:>10} {:>14} {:>8} {:>8}"
HEADS: Final = ("side, policy", "blocks", "checkpoints", "found", "goes on")


def split_sentence(results: list[SplitResult]) -> str:
    """Say how to divide the memory, from the results of one trace and policy."""
    one, decode, *prefill = results
    text = (
        f"{one.trace}, {one.model}, {amount(one.memory_bytes)}, {one.policy}: decode finds "
        f"{decode.dense_ratio:.1%} of the blocks"
    )
    if decode.capacity_blocks > one.capacity_blocks:
        text += f" with full pages in a pool of their own, with one for all {one.dense_ratio:.1%}"
    text += "."
    best = max(prefill, key=lambda split: split.resume_ratio, default=None)
    if best is None:
        return f"{text} For a checkpoint there is no room on prefill."
    if best.resume_ratio <= one.resume_ratio:
        return f"{text} Prefill goes on behind no more with checkpoints than with one pool."
    return (
        f"{text} Give checkpoints {best.share:.0%} of prefill's memory, {best.checkpoints:,} of "
        f"them: it goes on behind {best.resume_ratio:.1%} of the blocks"
        + (f", with one pool behind {one.resume_ratio:.1%}." if one.resume_ratio else ".")
    )
