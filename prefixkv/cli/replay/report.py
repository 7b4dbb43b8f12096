"""What is said of one trace's results: a table by size, a recommendation, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prefixkv.cli.outputs import aligned, drawing
from prefixkv.cli.replay.curves import OPTIMUM
from prefixkv.cli.replay.run import ReplayResult
from prefixkv.cli.replay.trace import Trace
from prefixkv.spi import DEFAULT_POLICY

NOISE: Final = 0.02
"""Share of the hits, or of the misses, up to which a difference between two policies is noise."""

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def amount(num_bytes: float) -> str:
    """Format a size in bytes.

    >>> amount(3 << 20), amount(1536), amount(12)
    ('3.0 MiB', '1.5 KiB', '12 B')
    """
    unit = 0
    while num_bytes >= 1024 and unit + 1 < len(_UNITS):
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


class TraceResults:
    """Results of one trace: of the same policies at each capacity."""

    def __init__(self, trace: Trace, results: Sequence[ReplayResult]) -> None:
        self.trace = trace
        self.sizes = sorted({one.capacity_blocks for one in results})
        names = dict.fromkeys(one.policy for one in results)
        # Of policies that find the same, the first stands for all.
        self.policies = sorted(
            (name for name in names if name != OPTIMUM),
            key=lambda name: (name != DEFAULT_POLICY, name != "lru"),
        )
        self.has_optimum = OPTIMUM in names
        self._at = {(one.policy, one.capacity_blocks): one for one in results}

    def size(self, blocks: int) -> str:
        """Format a number of blocks in bytes; "" where those of a token are not known."""
        return self.amount(blocks * self.trace.block_tokens) if self.trace.bytes_per_token else ""

    def amount(self, num_tokens: int) -> str:
        """Format the KV of tokens in bytes, or as a number of tokens."""
        if self.trace.bytes_per_token:
            return amount(num_tokens * self.trace.bytes_per_token)
        return f"{num_tokens:,} tokens"

    def at(self, policy: str, size: int) -> ReplayResult:
        return self._at[policy, size]

    def hosts(self, size: int) -> list[int]:
        """Return the sizes of the host tiers, in blocks."""
        return [one.host_blocks for name in self.policies[:1] for one in self._at[name, size].host]

    def hits(self, size: int, host: int | None = None) -> dict[str, float]:
        """Return the block hit ratio of each policy, with a host tier by its number."""
        at = {name: self._at[name, size] for name in self.policies}
        return {
            name: (one if host is None else one.host[host]).block_hit_ratio
            for name, one in at.items()
        }

    def same(self) -> dict[str, list[str]]:
        """Return the policies to show, each with those that find the same at every size."""
        shown: dict[tuple[Any, ...], list[str]] = {}
        for name in self.policies:
            found = tuple(
                (one.hit_tokens, *(host.hit_tokens for host in one.host))
                for one in (self._at[name, size] for size in self.sizes)
            )
            shown.setdefault(found, []).append(name)
        return {names[0]: names[1:] for names in shown.values()}

    def best(self, size: int) -> str | None:
        """Return the policy with the most hits, unless the default, or else lru, is as good up to
        noise. None if only the optimum was replayed."""
        hits = self.hits(size)
        most = max(hits.values(), default=0.0)
        # Noise counts from both ends: near a hit rate of 1 a small share of the hits is most of the
        # misses.
        good = [
            name
            for name, hit in hits.items()
            if hit >= (1 - NOISE) * most and 1 - hit <= (1 + NOISE) * (1 - most)
        ]
        for name in (DEFAULT_POLICY, "lru"):
            if name in good:
                return name
        return max(good, key=hits.__getitem__, default=None)


def table(results: TraceResults) -> list[str]:
    """Return a line for each size, and below it one for each host tier."""
    same = results.same()
    rows = [["blocks", "size", *map(_starred, same)]]
    about = ["* is the default policy"] if DEFAULT_POLICY in results.policies else []
    if results.has_optimum:
        rows[0] += [OPTIMUM, "gap"]
        about.append("gap: from the best policy to the optimum, which no policy exceeds")
    for size in results.sizes:
        hits = results.hits(size)
        row = [f"{size:,}", results.size(size), *(f"{hits[name]:.1%}" for name in same)]
        if results.has_optimum:
            bound = results.at(OPTIMUM, size).block_hit_ratio
            gap = f"{bound - max(hits.values()):.1%}" if hits else ""
            row += [f"{bound:.1%}", gap]
        rows.append(row)
        for at, host in enumerate(results.hosts(size)):
            hits = results.hits(size, at)
            row = [f"+ {host / size:.3g}x", results.size(host)]
            row += [f"{hits[name]:.1%}" for name in same]
            rows.append(row + [""] * (len(rows[0]) - len(row)))
    if any(row[0].startswith("+") for row in rows):
        about.append("+ is found in the pool or in a host tier of so many times its size")
    if not results.trace.bytes_per_token:
        rows = [[row[0], *row[2:]] for row in rows]
    about += [
        f"{', '.join(map(_starred, others))}: as {_starred(name)} in every row"
        for name, others in same.items()
        if others
    ]
    return [*aligned(rows, ">"), *about]


def _starred(policy: str) -> str:
    return policy + "*" * (policy == DEFAULT_POLICY)


# --- the recommendation ---------------------------------------------------------------------------


def sentence(results: TraceResults, pool: int) -> str:
    """Recommend for a pool of so many blocks, and say what half or twice of it would bring, where
    these were replayed."""
    name = results.best(pool)
    if name is None:
        return "No policy was replayed."
    chosen = results.at(name, pool)
    hits = results.hits(pool)
    size = f" ({results.size(pool)})" if results.size(pool) else ""
    verb = "take " if len(hits) > 1 else ""
    named = f"{name}, the default" if name == DEFAULT_POLICY else name
    saved = f"{chosen.hit_tokens:,} tokens"
    if results.trace.bytes_per_token:
        saved += f", {results.amount(chosen.hit_tokens)}"
    said = [
        f"{results.trace.name}, {pool:,} blocks{size}: {verb}{named}: it finds {hits[name]:.1%} of "
        f"the blocks and saves the KV of {saved}.",
        *_others(hits, name),
    ]
    if results.has_optimum:
        bound = results.at(OPTIMUM, pool).block_hit_ratio
        said.append(f"No policy could find more than {bound:.1%}.")
    for words, blocks in (("Half", pool // 2), ("Twice", 2 * pool)):
        if blocks in results.sizes:
            other = results.at(name, blocks)
            more = other.hit_tokens - chosen.hit_tokens
            saved = f"{results.amount(abs(more))} {'more' if more >= 0 else 'less'}"
            said.append(f"{words} the memory: {other.block_hit_ratio:.1%}, {saved}.")
    for host in chosen.host:
        times = f"{host.host_blocks / pool:.3g}"
        said.append(f"With host memory of {times} times the pool: {host.block_hit_ratio:.1%}.")
    if chosen.too_long:
        said.append(f"{chosen.too_long:,} requests do not fit this pool, and are refused.")
    return " ".join(said)


def _others(hits: dict[str, float], chosen: str) -> list[str]:
    """Say which policies find as much as the table shows of the chosen one, or more."""
    said, shown = [], {name: f"{hit:.1%}" for name, hit in hits.items()}
    equal = [name for name in hits if name != chosen and shown[name] == shown[chosen]]
    if equal:
        listed = " and ".join(filter(None, (", ".join(equal[:-1]), equal[-1])))
        said.append(f"{listed} {'find' if len(equal) > 1 else 'finds'} as much.")
    most = max(hits, key=hits.__getitem__)
    if hits[most] > hits[chosen] and shown[most] != shown[chosen]:
        said.append(f"{most} finds {shown[most]}, too little more to choose by.")
    if DEFAULT_POLICY in hits and DEFAULT_POLICY not in (chosen, *equal):
        said.append(f"The default, {DEFAULT_POLICY}, finds {shown[DEFAULT_POLICY]}.")
    return said


# --- the plot -------------------------------------------------------------------------------------


def draw(results: Sequence[ReplayResult], path: Path) -> None:
    """Draw one curve per policy, one panel per trace. Raises ConfigError without matplotlib."""
    by_trace: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for one in sorted(results, key=lambda one: one.capacity_blocks):
        points = by_trace.setdefault(one.trace, {}).setdefault(one.policy, [])
        points.append((one.capacity_blocks, 1 - one.block_hit_ratio))
    size = (7.5 * len(by_trace), 5)
    with drawing(path, ncols=len(by_trace), figsize=size, squeeze=False) as panels:
        for panel, (trace, curves) in zip(panels[0], by_trace.items(), strict=True):
            # Dashes show a curve that lies below another.
            for at, (policy, points) in enumerate(sorted(curves.items())):
                look = "k:" if policy == OPTIMUM else f"C{at % 10}{'-' * (at % 2 + 1)}o"
                label = policy + " (default)" * (policy == DEFAULT_POLICY)
                panel.plot(*zip(*points, strict=True), look, label=label)
            panel.set(
                title=trace, xlabel="capacity (blocks)", ylabel="block miss ratio", xscale="log"
            )
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), handlelength=4)
