"""The stand-in's report: figures from a pass's measurements, the JSON file, the table and the plot.
No engine in here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from prefixkv.cli.figures import CACHE_NAMES, less, milliseconds, percent, quantiles, ratio, times
from prefixkv.cli.outputs import write_text

if TYPE_CHECKING:
    from rich.table import Table


PAGE_STATES: Final = ("free", "owned", "cached", "held", "quarantined")
PAGES_LEFT: Final = ("owned", "held", "quarantined")  # which a node at rest has none of
_RATIOS: Final = {
    "ttft_p50": "lower TTFT P50",
    "ttft_p50_saturated": "lower saturated",
    "requests_per_s": "the saturated request rate",
    "bytes_sent": "fewer bytes sent",
}
_AS_MEASURED: Final = (
    "requests", "prompt_tokens", "hit_tokens", "bytes_sent", "bytes_skipped", "duration_s",
    "evicted_pages", "locks_at_end",
)  # fmt: skip


@dataclass(slots=True)
class Measured:
    """One pass, as the two workers saw it. Times are seconds; one entry of `ttft_s` a request
    answered."""

    requests: int = 0  # asked for: answered and failed
    failed: int = 0
    prompt_tokens: int = 0  # of the requests that decode admitted
    hit_tokens: int = 0
    prefill_prompt_tokens: int = 0
    prefill_hit_tokens: int = 0
    bytes_sent: int = 0
    bytes_skipped: int = 0
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    evicted_pages: int = 0
    retractions: int = 0
    pages_verified: int = 0
    pages_mismatched: int = 0
    locks_at_end: int = 0
    pages_at_end: dict[str, int] = field(default_factory=dict)
    prefill_locks_at_end: int = 0
    prefill_pages_at_end: dict[str, int] = field(default_factory=dict)

    def complaints(self) -> list[str]:
        """What must not be: every failed request, wrong page and page or lock that was not
        given back."""
        found = {"requests failed": self.failed, "pages mismatched": self.pages_mismatched}
        for side, locks, pages in (
            ("decode", self.locks_at_end, self.pages_at_end),
            ("prefill", self.prefill_locks_at_end, self.prefill_pages_at_end),
        ):
            found[f"{side} locks left"] = locks
            for state in PAGES_LEFT:
                found[f"{side} pages left {state}"] = pages.get(state, 0)
        return [f"{count} {what}" for what, count in found.items() if count]


@dataclass(slots=True)
class Report:
    """All passes, keyed by whether decode's cache was on; `timed` ones are at moderate load."""

    recipe: dict[str, Any]
    verified: dict[bool, Measured] = field(default_factory=dict)
    timed: dict[bool, Measured] = field(default_factory=dict)
    saturated: dict[bool, Measured] = field(default_factory=dict)

    def complaints(self) -> list[str]:
        """One line a finding, with the pass it was made in."""
        passes = (("verified", self.verified), ("timed", self.timed), ("saturated", self.saturated))
        return [
            f"{name} pass, {CACHE_NAMES[cache]}: {complaint}"
            for name, runs in passes
            for cache, measured in runs.items()
            for complaint in measured.complaints()
        ]

    def as_json(self) -> dict[str, Any]:
        """The content of `--json`.

        In `ratios` (None unless both were run) TTFT and bytes are cache_off / cache_on at the
        moderate load, requests a second cache_on / cache_off saturated, where TTFT has one more. A
        ratio whose divisor is 0 is None.
        """
        runs, saturated = (
            {CACHE_NAMES[cache]: self._figures(run, cache) for cache, run in kind.items()}
            for kind in (self.timed, self.saturated)
        )
        ratios: dict[str, float | None] = {
            "ttft_p50": less(runs, lambda r: r["ttft_s"]["p50"]),
            "ttft_p50_saturated": less(saturated, lambda r: r["ttft_s"]["p50"]),
            "requests_per_s": None,
            "bytes_sent": less(runs, lambda r: r["bytes_sent"]),
        }
        if len(saturated) == 2:
            rates = [saturated[name]["requests_per_s"] for name in ("cache_on", "cache_off")]
            ratios["requests_per_s"] = ratio(*rates)
        return {"recipe": self.recipe, "runs": runs, "saturated": saturated, "ratios": ratios}

    def _figures(self, run: Measured, cache: bool) -> dict[str, Any]:
        verified = self.verified.get(cache, Measured())
        return {name: getattr(run, name) for name in _AS_MEASURED} | {
            # a request that failed unverified or verified has failed
            "failed": run.failed + verified.failed,
            "token_hit_rate": ratio(run.hit_tokens, run.prompt_tokens),
            "prefill_hit_rate": ratio(run.prefill_hit_tokens, run.prefill_prompt_tokens),
            "ttft_s": quantiles(run.ttft_s, 50, 90, 99),
            "itl_s": quantiles(run.itl_s, 50, 99),
            "requests_per_s": ratio(run.requests - run.failed, run.duration_s),
            "pages_verified": verified.pages_verified,
            "pages_mismatched": verified.pages_mismatched,
            "pages_at_end": {state: run.pages_at_end.get(state, 0) for state in PAGE_STATES},
        }

    def table(self) -> Table:
        """The figures as a table for a terminal, one column a run."""
        from rich.table import Table

        content = self.as_json()
        table = Table(title="a stand-in engine")
        table.add_column("")
        rows = [[label] for label, _ in _ROWS]
        for title, kind in (("moderate load", "runs"), ("saturated", "saturated")):
            for name, figures in content[kind].items():
                table.add_column(f"{title}\n{name.replace('_', ' ')}", justify="right")
                for row, (_, show) in zip(rows, _ROWS, strict=True):
                    row.append(show(figures))
        for row in rows:
            table.add_row(*row)
        return table

    def verdict(self) -> str:
        """The ratios in one line; empty if only one side was run."""
        parts = [
            times(ratio, _RATIOS[name])
            for name, ratio in self.as_json()["ratios"].items()
            if ratio is not None
        ]
        return "cache on against off: " + ", ".join(parts) if parts else ""

    def write_json(self, path: Path) -> None:
        """Raises OutputError."""
        write_text("--json", path, json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")

    def plot(self, path: Path) -> None:
        """TTFT of the timed passes as cumulative distributions. Needs matplotlib; the file's suffix
        is the format."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for cache, run in sorted(self.timed.items(), reverse=True):
            times_ms = np.sort(run.ttft_s) * 1e3
            share = np.arange(1, len(times_ms) + 1) / max(1, len(times_ms))
            axes.step(times_ms, share, where="post", label=CACHE_NAMES[cache].replace("_", " "))
        axes.set(xscale="log", ylabel="share of requests")
        axes.set_xlabel("TTFT: arrival to KV committed (ms)")
        axes.set_title(f"at {self.recipe['offered_load']['requests_per_s']:.1f} requests/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=150)


_ROWS: Final[tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]] = (
    ("requests", lambda r: f"{r['requests']:,}"),
    ("failed", lambda r: f"{r['failed']:,}"),
    ("hit rate, decode", lambda r: percent(r["token_hit_rate"])),
    ("hit rate, prefill", lambda r: percent(r["prefill_hit_rate"])),
    ("MiB sent", lambda r: f"{r['bytes_sent'] / 2**20:,.0f}"),
    ("MiB not sent", lambda r: f"{r['bytes_skipped'] / 2**20:,.0f}"),
    ("TTFT P50 (ms)", lambda r: milliseconds(r["ttft_s"]["p50"])),
    ("TTFT P90 (ms)", lambda r: milliseconds(r["ttft_s"]["p90"])),
    ("TTFT P99 (ms)", lambda r: milliseconds(r["ttft_s"]["p99"])),
    ("between tokens P50 (ms)", lambda r: milliseconds(r["itl_s"]["p50"])),
    ("between tokens P99 (ms)", lambda r: milliseconds(r["itl_s"]["p99"])),
    ("requests/s", lambda r: "-" if r["requests_per_s"] is None else f"{r['requests_per_s']:.1f}"),
    ("pages evicted", lambda r: f"{r['evicted_pages']:,}"),
    ("pages verified", lambda r: f"{r['pages_verified']:,}"),
    ("pages mismatched", lambda r: f"{r['pages_mismatched']:,}"),
)
