"""What is said of one trace's results: a table by size, a recommendation, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prefixkv.cli.outputs import check_plot
from prefixkv.cli.replay.optimum import OPTIMUM
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

    def same(self) -> dict[str, list[str]]:
        """Return the policies to show, each with those that find the same at every size."""
        shown: dict[tuple[Any, ...], list[str]] = {}
        for name in self.policies:
            found = tuple(
                (one.hit_tokens, tuple(host.hit_tokens for host in one.host))
                for one in (self._at[name, size] for size in self.sizes)
            )
            shown.setdefault(found, []).append(name)
        return {names[0]: names[1:] for names in shown.values()}

    def best(self, size: int) -> str | None:
        """Return the policy with the most hits, unless the default, or else lru, is as good up to
        noise. None if only the optimum was replayed."""
        hits = {name: self._at[name, size].block_hit_ratio for name in self.policies}
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


# --- the table ------------------------------------------------------------------------------------


def table(results: TraceResults) -> list[str]:
    """Return a line for each size, and below it one for each host tier."""
    same = results.same()
    heads = ["blocks", "size", *map(_starred, same)]
    if results.has_optimum:
        heads += [OPTIMUM, "gap"]
    rows = [heads]
    for size in results.sizes:
        here = [results.at(name, size) for name in same]
        hits = [one.block_hit_ratio for one in here]
        optimum = results.at(OPTIMUM, size).block_hit_ratio if results.has_optimum else None
        rows.append(_row(results, f"{size:,}", size, hits, optimum))
        for at, host in enumerate(here[0].host if here else ()):
            behind = [one.host[at].block_hit_ratio for one in here]
            label = f"+ {host.host_blocks / size:.3g}x"
            rows.append(_row(results, label, host.host_blocks, behind, None))
    if not any(row[1] for row in rows[1:]):  # bytes are not known
        rows = [[row[0], *row[2:]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    about = []
    if DEFAULT_POLICY in results.policies:
        about.append("* is the default policy")
    if results.has_optimum:
        about.append("gap: from the best policy to the optimum, which no policy exceeds")
    if any(label.strip().startswith("+") for label, *_ in rows[1:]):
        about.append("+ is found in the pool or in a host tier of so many times its size")
    about += [
        f"{', '.join(map(_starred, others))}: as {_starred(name)} in every row"
        for name, others in same.items()
        if others
    ]
    return [*lines, *about]


def _starred(policy: str) -> str:
    return policy + "*" * (policy == DEFAULT_POLICY)


def _row(
    results: TraceResults, label: str, blocks: int, hits: Sequence[float], optimum: float | None
) -> list[str]:
    row = [label, results.size(blocks), *(f"{hit:.1%}" for hit in hits)]
    if results.has_optimum:
        gap = "" if optimum is None or not hits else f"{optimum - max(hits):.1%}"
        row += ["" if optimum is None else f"{optimum:.1%}", gap]
    return row


# --- the recommendation ---------------------------------------------------------------------------


def sentence(results: TraceResults, pool: int) -> str:
    """Recommend for a pool of so many blocks, and say what half or twice of it would bring, where
    these were replayed."""
    name = results.best(pool)
    if name is None:
        return "No policy was replayed."
    chosen = results.at(name, pool)
    size = f" ({results.size(pool)})" if results.size(pool) else ""
    named = f"{name}, the default" if name == DEFAULT_POLICY else name
    verb = "take " if len(results.policies) > 1 else ""
    text = (
        f"{results.trace.name}, {pool:,} blocks{size}: {verb}{named}: it finds "
        f"{chosen.block_hit_ratio:.1%} of the blocks and saves the KV of "
        f"{chosen.hit_tokens:,} tokens"
    )
    if results.trace.bytes_per_token:
        text += f", {results.amount(chosen.hit_tokens)}"
    text += f". {_others(results, chosen)}"
    if results.has_optimum:
        bound = results.at(OPTIMUM, pool).block_hit_ratio
        text += f"No policy could find more than {bound:.1%}. "
    for words, blocks in (("Half", pool // 2), ("Twice", 2 * pool)):
        if blocks in results.sizes:
            other = results.at(name, blocks)
            more = other.hit_tokens - chosen.hit_tokens
            saved = f"{results.amount(abs(more))} {'more' if more >= 0 else 'less'}"
            text += f"{words} the memory: {other.block_hit_ratio:.1%}, {saved}. "
    for host in chosen.host:
        written, loaded = (
            results.amount(blocks * results.trace.block_tokens)
            for blocks in (host.written_blocks, host.loaded_blocks)
        )
        text += (
            f"With host memory of {host.host_blocks / pool:.3g} times the pool: "
            f"{host.block_hit_ratio:.1%}; it writes {written}, and loads {loaded} for "
            f"{host.loads:,} requests. "
        )
    if chosen.too_long:
        text += f"{chosen.too_long:,} requests do not fit this pool, and are refused."
    return text.rstrip()


def _others(results: TraceResults, chosen: ReplayResult) -> str:
    """Say which policies find as much as the table shows of the chosen one, or more."""
    hits = {
        name: results.at(name, chosen.capacity_blocks).block_hit_ratio
        for name in results.policies
        if name != chosen.policy
    }
    mine = chosen.block_hit_ratio
    equal = [name for name, hit in hits.items() if f"{hit:.1%}" == f"{mine:.1%}"]
    text = ""
    if equal:
        listed = " and ".join(filter(None, (", ".join(equal[:-1]), equal[-1])))
        text = f"{listed} {'find' if len(equal) > 1 else 'finds'} as much. "
    most = max(hits, key=hits.__getitem__, default="")
    if most and most not in equal and hits[most] > mine:
        text += f"{most} finds {hits[most]:.1%}, too little more to choose by. "
    default = hits.get(DEFAULT_POLICY)
    if default is not None and DEFAULT_POLICY not in equal:
        text += f"The default, {DEFAULT_POLICY}, finds {default:.1%}. "
    return text


# --- the plot -------------------------------------------------------------------------------------

_LINES: Final = ("-", "--", "-.", ":")
_MARKERS: Final = "osD^vP*Xh<>"


def draw(results: Sequence[ReplayResult], path: Path) -> None:
    """Draw one curve per policy, one panel per trace; curves that are the same are one. Raises
    ConfigError without matplotlib."""
    check_plot(path)
    import matplotlib as mpl

    # A backend without a display; it must be chosen before pyplot is imported.
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    traces = list(dict.fromkeys(result.trace for result in results))
    figure, panels = plt.subplots(1, len(traces), figsize=(7.5 * len(traces), 5), squeeze=False)
    # A policy looks the same in each panel: by colour, dashes and marker.
    policies = [*dict.fromkeys(one.policy for one in results if one.policy != OPTIMUM)]
    for panel, trace in zip(panels[0], traces, strict=True):
        curves: dict[tuple[tuple[int, float], ...], list[str]] = {}
        for policy in [*policies, OPTIMUM]:
            mine = [one for one in results if (one.trace, one.policy) == (trace, policy)]
            points = sorted((one.capacity_blocks, 1 - one.block_hit_ratio) for one in mine)
            if points:
                curves.setdefault(tuple(points), []).append(policy)
        for curve, names in curves.items():
            label = ", ".join(name + " (default)" * (name == DEFAULT_POLICY) for name in names)
            style: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
            if names[0] != OPTIMUM:
                at = policies.index(names[0])
                style = {
                    "color": f"C{at % 10}", "linestyle": _LINES[at % len(_LINES)],
                    "marker": _MARKERS[at % len(_MARKERS)], "markersize": 5,
                    "linewidth": 2.5 if DEFAULT_POLICY in names else 1.3,
                }  # fmt: skip
            panel.plot(*zip(*curve, strict=True), label=label, **style)
        panel.set(title=trace, xlabel="capacity (blocks)", ylabel="block miss ratio", xscale="log")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1), handlelength=4)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
