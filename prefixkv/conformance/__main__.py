"""`python -m prefixkv.conformance MODULE:NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from prefixkv.conformance.interface import SidesError
from prefixkv.conformance.kit import PAGE_SIZE, PATIENCE_S, check_run, run
from prefixkv.conformance.scenario_run import MakeSides
from prefixkv.conformance.scenarios import SCENARIOS


def _imported(text: str) -> MakeSides:
    """Return what MODULE:NAME stands for. Raises ValueError."""
    module, _, name = text.partition(":")
    try:
        make: MakeSides = resolve_name(f"{module}:{name or 'make'}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"MODULE:NAME is needed, {text!r} is not: {error}") from error
    if not callable(make):
        raise ValueError(f"MODULE:NAME is needed, {text!r} is not callable")
    return make


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a law was found broken, 2 after a mistake in the command (on stderr)."""
    parser = argparse.ArgumentParser(
        prog="python -m prefixkv.conformance",
        description="Run an engine's two loops through the conformance scenarios.",
    )
    parser.add_argument(
        "make", nargs="?", default="prefixkv.conformance.toy:ToySides",
        help="MODULE:NAME of the class or function that makes both workers, as `make` of `run`; "
             "without :NAME it is `make` in that module; %(default)s",
    )  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO",
                        help="run this scenario; may be given several times")  # fmt: skip
    parser.add_argument("--seed", action="append", type=int, metavar="N",
                        help="run with this seed, 0 by default; may be repeated")  # fmt: skip
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S",
                        help="seconds without progress that are a stall; %(default)s")  # fmt: skip
    parser.add_argument("--backend", choices=("nixl", "shm", "auto"), default="nixl",
                        help="transport between the workers; %(default)s")  # fmt: skip
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE, metavar="TOKENS",
                        help="tokens per page, a multiple of 4; %(default)s")  # fmt: skip
    parser.add_argument("--no-probe", action="store_true", help="watch calls only, and no bytes")
    parser.add_argument("--list", action="store_true", help="name the scenarios, and end")
    given = parser.parse_args(arguments)
    if given.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name}: {scenario.about}")
        return 0
    try:
        check_run(given.only, given.page_size)
        make = _imported(given.make)
    except ValueError as error:
        return _print_error(parser, error)
    try:
        report = run(
            make, only=given.only, seeds=given.seed or (0,), patience_s=given.patience,
            probe=not given.no_probe, backend=given.backend, page_size=given.page_size,
        )  # fmt: skip
    except SidesError as error:
        return _print_error(parser, error)
    print(report)
    return int(not report.ok)


def _print_error(parser: argparse.ArgumentParser, error: Exception) -> int:
    print(f"{parser.prog}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
