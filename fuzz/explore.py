"""Invariant tested: in every state that a small configuration can reach, by all orders of messages,
writes and engine steps, with a loss, a repeat, an abort, a restart (and more) anywhere, the laws of
tests/laws/explore/laws.py hold, and a way leads to rest.

    python fuzz/explore.py [--config NAME] [--seconds 1800] [--max-states N] [--list]
    python fuzz/explore.py --prefill 2 --decode 1 --chunks 2 --lose 1 --abort 1
    python fuzz/explore.py --mutants

A configuration that is part of another (the same but for fewer faults) is left out. `--seconds`
bounds the whole.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.laws.explore.actors import Actors, Use
from tests.laws.explore.configs import WHOLE, config_of, needed
from tests.laws.explore.mutants import MUTANTS
from tests.laws.explore.search import Found, explore
from tests.laws.explore.state import Budget, Config, LawError


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--config", help="one of --list; all of them by default")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--mutants", action="store_true", help="each has to be found")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--max-states", type=int, default=10**9, help="of each")
    own = parser.add_argument_group("a configuration of your own")
    own.add_argument("--prefill", type=int, default=1, help="ranks")
    own.add_argument("--decode", type=int, default=1, help="ranks")
    own.add_argument("--workers", type=int, default=1, help="of decode, each with a request")
    own.add_argument("--chunks", type=int, default=1)
    own.add_argument("--arrivals", action="store_true", help="notifications are seen, or lost")
    for name in Budget._fields:
        own.add_argument(f"--{name}", type=int, default=0)
    return parser.parse_args()


def _configs(options: argparse.Namespace) -> list[Config]:
    if options.config:
        return [config_of(options.config)]
    budget = Budget(*(getattr(options, name) for name in Budget._fields))
    sizes = options.prefill, options.decode, options.workers, options.chunks
    if not any(budget) and sizes == (1, 1, 1, 1):
        return needed(WHOLE)
    uses = tuple(Use(i, i, 7 + i, options.chunks) for i in range(options.workers))
    decode = (options.decode,) * options.workers
    own = Config("yours", options.prefill, decode, uses, budget, arrivals=options.arrivals)
    return [own]


def _explore(configs: list[Config], options: argparse.Namespace) -> None:
    started = time.monotonic()
    tasks = [(config, options.max_states, started + options.seconds) for config in configs]
    states, num_all = 0, 0
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(tasks))) as pool:
        for config, found in pool.imap_unordered(_explored, tasks):
            if isinstance(found, LawError):
                print(f"{config.name}: {found}", *found.trace, sep="\n    ", file=sys.stderr)
                raise found
            print(found, flush=True)
            states += found.states
            num_all += found.complete
    took = time.monotonic() - started
    whole = f"{num_all} of {len(configs)} configurations whole"
    print(f"explore: {states:,} states in {took:.0f} s, {whole}, no finding")


_tables: dict[Any, Actors] = {}  # of this process, by what decides what control objects do


def _explored(task: tuple[Config, int, float]) -> tuple[Config, Found | LawError]:
    """In a process of its own."""
    config, max_states, end_s = task
    shape = config.prefill, config.decode, config.uses
    table = _tables.setdefault(shape, Actors())
    try:
        left_s = max(0.0, end_s - time.monotonic())
        return config, explore(config, table, max_states=max_states, max_seconds=left_s)
    except LawError as error:
        return config, error


def _mutants() -> None:
    missed = []
    for mutant in MUTANTS:
        try:
            with mutant.alive():
                explore(config_of(mutant.config))
        except LawError as error:
            print(f"{mutant.name}: {error} ({len(error.trace)} moves)", flush=True)
        else:
            missed.append(f"{mutant.name}: not found in {mutant.config!r}")
            print(missed[-1], flush=True)
    if missed:
        raise SystemExit("\n".join(missed))
    print(f"explore: all {len(MUTANTS)} mutants found")


if __name__ == "__main__":
    chosen = _options()
    if chosen.list:
        print(*(config.name for config in WHOLE), sep="\n")
    elif chosen.mutants:
        _mutants()
    else:
        _explore(_configs(chosen), chosen)
