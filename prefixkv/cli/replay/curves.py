"""Several policies at several capacities: the capacities, the recommendation, and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prefixkv.cli.replay.optimum import OPTIMUM
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.errors import ConfigError
from prefixkv.spi import DEFAULT_POLICY

NOISE: Final = 0.02
"""Share of the hits, or of the misses, up to which a difference between two policies is noise."""

_PARTS: Final = (64, 32, 16, 8, 4, 2, 1)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def capacities_for(blocks: int) -> list[int]:
    """Return capacities that show the hit curve of a trace with this many distinct blocks, rising.

    >>> capacities_for(6400)
    [100, 200, 400, 800, 1600, 3200, 6400]
    """
    return sorted({max(1, blocks // part) for part in _PARTS})


def middle(capacities: Sequence[int]) -> int:
    """Return the capacity in the middle, the larger of two."""
    return sorted(capacities)[len(capacities) // 2]


def amount(num_bytes: float) -> str:
    """Format a size in bytes, for the recommendation at a capacity and the replay's table.

    >>> amount(3 << 20), amount(1536), amount(12)
    ('3.0 MiB', '1.5 KiB', '12 B')
    """
    unit = 0
    while num_bytes >= 1024 and unit + 1 < len(_UNITS):
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def best(results: Sequence[ReplayResult], capacity: int) -> ReplayResult | None:
    """Return the result with the most hits, unless the default, or else lru, is as good up to
    noise. None if no policy was run."""
    there = [one for one in results if one.capacity_blocks == capacity and one.policy != OPTIMUM]
    most_hit = max((one.block_hit_ratio for one in there), default=0.0)
    # Noise counts from both ends: near a hit rate of 1 a small share of the hits is most of the
    # misses.
    as_good = [
        one
        for one in there
        if one.block_hit_ratio >= (1 - NOISE) * most_hit
        and 1 - one.block_hit_ratio <= (1 + NOISE) * (1 - most_hit)
    ]
    for name in (DEFAULT_POLICY, "lru"):
        for one in as_good:
            if one.policy == name:
                return one
    return max(as_good, key=lambda one: one.block_hit_ratio, default=None)


def sentence(
    results: Sequence[ReplayResult], pool: int, bytes_per_token: int = 0, block_tokens: int = 0
) -> str:
    """Recommend for a pool of `pool` blocks, and say what half or twice of it would bring.

    Args:
        results: of one trace; at `pool` all policies, at half and twice of it that of `best`.
        bytes_per_token: of KV; 0: unknown, savings are then given in tokens.
        block_tokens: tokens per block, to give the pool's size in bytes; 0: the size is left out.
    """
    chosen = best(results, pool)
    if chosen is None:
        return "No policy was replayed."
    at = {(one.policy, one.capacity_blocks): one for one in results}
    named = f"{chosen.policy}, the default" if chosen.policy == DEFAULT_POLICY else chosen.policy
    size = amount(pool * block_tokens * bytes_per_token)
    large = f" ({size})" if block_tokens and bytes_per_token else ""
    text = f"{chosen.trace}, {pool:,} blocks{large}: take {named}, which finds "
    text += f"{chosen.block_hit_ratio:.1%} of the blocks"
    # The two figures that put the choice in proportion: the default's, and the bound on any policy.
    if chosen.policy != DEFAULT_POLICY and (other := at.get((DEFAULT_POLICY, pool))):
        text += f" (the default, {DEFAULT_POLICY}: {other.block_hit_ratio:.1%})"
    if optimum := at.get((OPTIMUM, pool)):
        text += f", where no policy could find more than {optimum.block_hit_ratio:.1%}"
    text += f"; that saves {_saved(chosen.hit_tokens, bytes_per_token)}"
    for scale, blocks in (("half", max(1, pool // 2)), ("twice", 2 * pool)):
        # The best policy alone: its replays at half and twice of the pool must be in `results`.
        other = at[chosen.policy, blocks]
        more = other.hit_tokens - chosen.hit_tokens
        saved = f"{_saved(abs(more), bytes_per_token)} {'more' if more >= 0 else 'less'}"
        text += f"; {scale} the memory: {other.block_hit_ratio:.1%}, {saved}"
    if chosen.too_long:
        text += f"; {chosen.too_long:,} requests are refused, since they do not fit this pool"
    return text + "."


def _saved(num_tokens: int, bytes_per_token: int) -> str:
    if bytes_per_token:
        return f"{amount(num_tokens * bytes_per_token)} of KV"
    return f"the KV of {num_tokens:,} tokens"


def check_plot(path: Path | None) -> None:
    """Raise ConfigError if a plot is requested and matplotlib is missing."""
    if path is not None:
        try:
            import matplotlib  # noqa: F401, ICN001
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'prefixkv[plot]'") from error


def draw(results: Sequence[ReplayResult], path: Path) -> None:
    """Draw one curve per policy, one panel per trace. Raises ConfigError without matplotlib."""
    check_plot(path)
    import matplotlib as mpl

    # A backend without a display; it must be chosen before pyplot is imported.
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.trace for result in results))
    figure, panels = plt.subplots(1, len(names), figsize=(7 * len(names), 4), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for policy in dict.fromkeys(result.policy for result in results):
            # Results come in the order of replay, with half and twice of the pool at the end.
            mine = [result for result in results if (result.trace, result.policy) == (name, policy)]
            mine.sort(key=lambda result: result.capacity_blocks)
            style: dict[str, object] = (
                {"color": "black", "linestyle": "--"} if policy == OPTIMUM else {}
            )
            if policy == DEFAULT_POLICY:
                style = {"linewidth": 2.5}
            capacities = [result.capacity_blocks for result in mine]
            misses = [1 - result.block_hit_ratio for result in mine]
            label = f"{policy} (default)" if policy == DEFAULT_POLICY else policy
            panel.plot(capacities, misses, marker=".", label=label, **style)
        panel.set(title=name, xlabel="capacity (blocks)", ylabel="block miss ratio", xscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
