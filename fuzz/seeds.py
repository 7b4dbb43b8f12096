"""What the fuzz targets share that run one simulation a seed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable

from tests.support.sim import Sim


def parser(doc: str | None) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    made.add_argument("--seconds", type=float, default=60.0)
    made.add_argument("--seed", type=int, default=1, help="of the first run; each later adds 1")
    return made


def fuzz_seeds(
    name: str,
    options: argparse.Namespace,
    simulation: Callable[[int], Sim],
    counted: Callable[[Sim], dict[str, int]],
) -> None:
    """Run until the time is up. A finding is printed with its seed, and raised."""
    started = time.monotonic()
    totals: Counter[str] = Counter()
    seed = options.seed
    while time.monotonic() - started < options.seconds:
        sim = simulation(seed)
        try:
            sim.run()
        except BaseException:
            print(f"found with --seed {seed}: {sim.shape}, {sim.storm}", file=sys.stderr)
            raise
        totals.update(counted(sim))
        seed += 1
    print(
        f"{name}: {seed - options.seed} runs from seed {options.seed}, no finding; {dict(totals)}"
    )
