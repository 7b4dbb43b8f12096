"""Invariant tested: in every state that a small configuration can reach, by all orders of messages,
writes and engine steps, with a loss, a repeat, an abort, a restart (and more) anywhere, the laws of
tests/models/explore/laws.py hold, and a way leads to rest.

    python fuzz/explore.py [--config NAME] [--seconds 1800] [--max-states N] [--list]
    python fuzz/explore.py --prefill 2 --decode 1 --chunks 2 --lose 1 --abort 1
    python fuzz/explore.py --mutants

The whole has run within 1,200 s on one core beside other work, when it was 127 configurations and
17,395,389 states; its last line says how much it is now. `--seconds` bounds it.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from tests.models.explore.actors import Use
from tests.models.explore.configs import WHOLE, config_of
from tests.models.explore.mutants import MUTANTS
from tests.models.explore.search import explore
from tests.models.explore.state import Budget, Config, LawError


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--config", help="one of --list; all of them by default")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--mutants", action="store_true", help="each has to be found")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for all of them")
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
        return WHOLE
    uses = tuple(Use(i, i, 7 + i, options.chunks) for i in range(options.workers))
    decode = (options.decode,) * options.workers
    own = Config("yours", options.prefill, decode, uses, budget, arrivals=options.arrivals)
    return [own]


def _explore(configs: list[Config], options: argparse.Namespace) -> None:
    started = time.monotonic()
    states, num_all = 0, 0
    for config in configs:
        left_s = options.seconds - (time.monotonic() - started)
        if left_s <= 0:
            break
        try:
            found = explore(config, max_states=options.max_states, max_seconds=left_s)
        except LawError as error:
            print(f"{config.name}: {error}", *error.trace, sep="\n    ", file=sys.stderr)
            raise
        print(found, flush=True)
        states += found.states
        num_all += found.complete
    took = time.monotonic() - started
    whole = f"{num_all} of {len(configs)} configurations whole"
    print(f"explore: {states:,} states in {took:.0f} s, {whole}, no finding")


def _mutants() -> None:
    for mutant in MUTANTS:
        try:
            with mutant.alive():
                explore(config_of(mutant.config))
        except LawError as error:
            print(f"{mutant.name}: {error} ({len(error.trace)} moves)", flush=True)
        else:
            raise SystemExit(f"{mutant.name}: not found in {mutant.config!r}")
    print(f"explore: all {len(MUTANTS)} mutants found")


if __name__ == "__main__":
    chosen = _options()
    if chosen.list:
        print(*(config.name for config in WHOLE), sep="\n")
    elif chosen.mutants:
        _mutants()
    else:
        _explore(_configs(chosen), chosen)
