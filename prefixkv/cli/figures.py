"""Figures that reports share: the machine they were measured on, quantiles, and ratios in words."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

CACHE_NAMES: Final = {True: "cache_on", False: "cache_off"}


def machine() -> dict[str, Any]:
    """Return the machine and the versions that figures are measured with."""
    import psutil

    return {
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average_before": list(os.getloadavg()),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("prefixkv", "nixl", "torch", "numpy", "pyzmq")},
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def ratio(numerator: float, divisor: float) -> float | None:
    return numerator / divisor if numerator is not None and divisor else None


def less(runs: dict[str, Any], figure: Callable[[dict[str, Any]], float]) -> float | None:
    """Return how many times smaller a figure is with the cache on; None unless both were run."""
    if len(runs) < 2:
        return None
    return ratio(figure(runs["cache_off"]), figure(runs["cache_on"]))


_ALIKE_RATIO: Final = 1.1
"""Sides whose medians have a smaller ratio are alike, however close their own passes are."""

_OPPOSITE: Final = {"lower": "higher", "fewer": "more", "less": "more", "higher": "lower"}


def times(ratio: float, comparison: str, digits: int = 2) -> str:
    """Return a ratio of two figures in words, for a report; below one, by the opposite of the first
    word.

    >>> times(2.0, "lower TTFT"), times(0.5, "lower TTFT"), times(0.5, "the rate")
    ('2.00 times lower TTFT', '2.00 times higher TTFT', '0.50 times the rate')
    """
    first, _, rest = comparison.partition(" ")
    if 0 < ratio < 1 and first in _OPPOSITE:
        ratio, comparison = 1 / ratio, f"{_OPPOSITE[first]} {rest}".rstrip()
    return f"{ratio:.{digits}f} times {comparison}"


def compared(ours: Sequence[float], theirs: Sequence[float], comparison: str) -> str:
    """Compare two sides' figures of several passes in words: by the ratio of their medians, theirs
    by ours; "alike" where that differs by no more than the passes of one side do, or by less than a
    tenth.

    The tenth is for sides of two passes: these may lie close together by chance, and a difference
    of some percent between sides that are alike would then count in about a third of all runs.

    >>> compared([1.0, 1.2], [2.4, 2.0], "lower"), compared([1.0, 1.2], [1.2, 1.4], "lower")
    ('2.0 times lower', 'alike')
    >>> compared([1.0, 1.0], [1.09, 1.09], "lower"), compared([1.0, 1.0], [1.1, 1.1], "lower")
    ('alike', '1.1 times lower')
    """
    our, their = statistics.median(ours), statistics.median(theirs)
    difference = abs(our - their)
    spread = max(max(ours) - min(ours), max(theirs) - min(theirs))
    if difference <= spread or max(our, their) < _ALIKE_RATIO * min(our, their):
        return "alike"
    return times(their / our, comparison, 1)


def quantiles(values: list[float], *percents: int) -> dict[str, float | None]:
    if not values:
        return {f"p{percent}": None for percent in percents}
    found = np.percentile(values, percents)
    return {f"p{percent}": float(value) for percent, value in zip(percents, found, strict=True)}


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f}"
