"""A conformance kit for engines: it runs an engine's own two loops through hits, retractions,
aborts, ends and restarts on small workers, and says by law what broke.

    report = conformance.run(make)      # make: ScenarioSettings -> EngineSides
    print(report)                       # what broke: law, what was seen, how to see it again

    @pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
    def test_my_engine(case):
        case.check(make)                # AssertionError with the same text

    python -m prefixkv.testing.conformance my_engine.workers:make

`docs/integrate/conformance.md` has an example; `prefixkv.testing.toy` is a whole engine that passes.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Final, Literal, NamedTuple

from prefixkv import TransportConfig
from prefixkv.testing.bench import MakeSides as MakeSides
from prefixkv.testing.bench import ScenarioOverError, ScenarioRun
from prefixkv.testing.scenarios import SCENARIOS
from prefixkv.testing.sides import LAWS as LAWS
from prefixkv.testing.sides import AnswerLog as AnswerLog
from prefixkv.testing.sides import EngineSides as EngineSides
from prefixkv.testing.sides import Finding as Finding
from prefixkv.testing.sides import Prompt as Prompt
from prefixkv.testing.sides import ScenarioSettings as ScenarioSettings
from prefixkv.testing.sides import Side as Side
from prefixkv.testing.sides import SidesError as SidesError

Backend = Literal["nixl", "shm", "auto"]

PATIENCE_S: Final = 30.0
"""How long nothing at all may happen before an engine counts as stalled, in seconds."""

_PAGE_SIZE: Final = 4  # of most scenarios
_SHOWN_LOG_LINES: Final = 20  # of one run, the last ones
_LOGGER: Final = logging.getLogger("prefixkv")
_NUMBER: Final = re.compile(r"\d+")
_RID: Final = re.compile(r"r\d+\b")  # names of a run's prompts


@dataclass(slots=True)
class ConformanceReport:
    """What scenarios have found. `str()` of it is for people.

    `passed` has the names of the runs ("full hit, seed 0") without a finding; `skipped` those that
    the engine does not take part in, with its reason; `logs` what the library logged in runs with
    findings.
    """

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def laws(self) -> set[str]:
        """The broken laws, as `LAWS` names them."""
        return {found.law for found in self.findings}

    def __str__(self) -> str:
        lines = []
        for first, *alike in _of_one_cause(self.findings):
            lines.append(f"in {first.scenario!r}, seed {first.seed}: {first}")
            if alike:
                lines.append(f"    and {len(alike)} more of the kind: {_named(alike)}")
        for name, logged in self.logs.items():
            lines.append(f"logged in {name}:")
            lines += [f"    {line}" for line in logged[-_SHOWN_LOG_LINES:]]
        lines += [f"not run: {name}: {why}" for name, why in self.skipped.items()]
        broken = {(found.scenario, found.seed) for found in self.findings}
        lines.append(
            f"{len(self.passed)} passed, {len(broken)} broken, {len(self.skipped)} not run, "
            f"{self.seconds:.1f} s"
        )
        return "\n".join(lines)


def _of_one_cause(findings: Iterable[Finding]) -> Iterator[list[Finding]]:
    """Group findings that differ in names and numbers only, in order of the first."""
    groups: dict[Finding, list[Finding]] = {}
    for found in findings:
        kind = found._replace(what=_NUMBER.sub("#", found.what))
        groups.setdefault(kind, []).append(found)
    yield from groups.values()


def _named(findings: Sequence[Finding]) -> str:
    """Return the requests that findings begin with, else the first of their texts."""
    names = [match[0] for found in findings if (match := _RID.match(found.what))]
    return ", ".join(dict.fromkeys(names)) or findings[0].what


class _HeldLog(logging.Handler):
    """Keeps what is logged, instead of showing it: many scenarios go wrong on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._before: tuple[bool, list[logging.Handler]]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")

    def __enter__(self) -> _HeldLog:
        self._before = _LOGGER.propagate, _LOGGER.handlers
        _LOGGER.propagate, _LOGGER.handlers = False, [self]
        return self

    def __exit__(self, *exc: object) -> None:
        _LOGGER.propagate, _LOGGER.handlers = self._before


class Case(NamedTuple):
    """One scenario and one seed, to parametrise a test with."""

    scenario: str
    seed: int

    def __str__(self) -> str:
        return f"{self.scenario}, seed {self.seed}"

    def check(
        self, make: MakeSides, *, patience_s: float = PATIENCE_S, probe: bool = True,
        backend: Backend = "nixl", page_size: int = _PAGE_SIZE,
    ) -> None:  # fmt: skip
        """Raises AssertionError, with the report, if a law is broken. An engine that does not take
        part in the scenario (`make` raises NotImplementedError) passes it."""
        report = run(
            make, only=[self.scenario], seeds=[self.seed], patience_s=patience_s, probe=probe,
            backend=backend, page_size=page_size,
        )  # fmt: skip
        if not report.ok:
            raise AssertionError(str(report))


def scenarios(seeds: Iterable[int] = (0,)) -> list[Case]:
    """Return every scenario with each of these seeds."""
    return [Case(name, seed) for name in SCENARIOS for seed in seeds]


def _check_run(only: Sequence[str], page_size: int) -> None:
    for name in only:
        if name not in SCENARIOS:
            known = ", ".join(repr(one) for one in SCENARIOS)
            raise ValueError(f"there is no scenario {name!r}, there are {known}")
    if page_size < _PAGE_SIZE or page_size % _PAGE_SIZE:
        raise ValueError(f"page_size is {page_size}, a multiple of {_PAGE_SIZE} is needed")


def run(
    make: MakeSides, *, only: Sequence[str] = (), seeds: Iterable[int] = (0,),
    patience_s: float = PATIENCE_S, probe: bool = True, backend: Backend = "nixl",
    page_size: int = _PAGE_SIZE,
) -> ConformanceReport:  # fmt: skip
    """Run an engine through the scenarios. What the library logs meanwhile is held back, and is in
    the report where something was found; nothing is raised for what an engine does wrong.

    Args:
        make: makes both workers; called once for each scenario and seed. It may raise
            NotImplementedError for settings that the engine does not know.
        only: names of scenarios (`SCENARIOS`); all of them by default.
        seeds: each scenario is run once with each.
        patience_s: how long nothing at all may happen before the engine counts as stalled.
        probe: look at bytes, too: fill with junk what the engine has to write, and compare what it
            may not write. False for an engine whose device is still busy when a call of a node
            returns, and that gives no `ready=`.
        backend: transport between the two workers (`TransportConfig.backend`). With "shm" and
            "auto" the pools have to be shared memory (`ScenarioSettings.shared`).
        page_size: tokens per page in most scenarios, a multiple of 4; all other sizes grow with it.
            A few have pages of a quarter or of half of it, or twice as large.

    Raises: ValueError for a scenario that there is not, or another page size; SidesError, a
    TypeError, where `make` returns no EngineSides; what `make` raises.
    """
    _check_run(only, page_size)
    report = ConformanceReport()
    began_s = time.monotonic()
    for case in scenarios(seeds):
        if not only or case.scenario in only:
            found = len(report.findings)
            with _HeldLog() as held:
                _run_case(case, make, report, patience_s, probe, backend, page_size)
            if held.lines and len(report.findings) > found:
                report.logs[str(case)] = held.lines
    report.seconds = time.monotonic() - began_s
    return report


def _run_case(
    case: Case, make: MakeSides, report: ConformanceReport, patience_s: float, probe: bool,
    backend: Backend, page_size: int,
) -> None:  # fmt: skip
    scenario = SCENARIOS[case.scenario]
    settings, factor = scenario.settings, page_size // _PAGE_SIZE
    settings = replace(
        settings, page_size=settings.page_size * factor,
        prefill_page_size=settings.prefill_page_size * factor,
        chunk_tokens=settings.chunk_tokens * factor,
    )  # fmt: skip
    if backend != "nixl":
        transport = TransportConfig(backend=backend)
        settings = replace(
            settings, shared=True, decode=replace(settings.decode, transport=transport),
            prefill=replace(settings.prefill, transport=transport),
        )  # fmt: skip
    try:
        one = ScenarioRun(case.scenario, case.seed, settings, make, patience_s, probe, factor)
    except NotImplementedError as error:
        report.skipped[str(case)] = str(error) or "not implemented"
        return
    try:
        scenario.play(one)
        one.rest()
    except ScenarioOverError:
        pass
    except NotImplementedError as error:
        report.skipped[str(case)] = str(error) or "not implemented"
        return
    finally:
        try:
            one.sides.close()
        except Exception as error:
            one.tell("calls", f"close raised {type(error).__name__}: {error}")
    options = "" if factor == 1 else f", page_size={page_size}"
    options += "" if backend == "nixl" else f", backend={backend!r}"
    report.findings += [found._replace(options=options) for found in one.findings]
    if not one.findings:
        report.passed.append(str(case))


def _imported(text: str) -> MakeSides:
    """Return what MODULE:NAME stands for. Raises ValueError."""
    module, _, name = text.partition(":")
    name = name or "make"
    try:
        found = import_module(module)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        # Another module that this one imports and misses is the engine's fault, not a wrong name.
        missing = getattr(error, "name", None) or module
        if not f"{module}.".startswith(f"{missing}."):
            raise
        raise ValueError(f"there is no module {module!r} here (MODULE:NAME is needed)") from None
    make: MakeSides | None = getattr(found, name, None)
    if not callable(make):
        has = "is not callable" if hasattr(found, name) else "does not exist"
        raise ValueError(f"{name!r} of module {module!r} {has} (MODULE:NAME is needed)")
    return make


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a law was found broken, 2 after a mistake in the command (on stderr)."""
    parser = argparse.ArgumentParser(
        prog="python -m prefixkv.testing.conformance",
        description="Run an engine's two loops through the conformance scenarios.",
    )
    parser.add_argument(
        "make", nargs="?", default="prefixkv.testing.toy:ToySides",
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
    parser.add_argument("--page-size", type=int, default=_PAGE_SIZE, metavar="TOKENS",
                        help="tokens per page, a multiple of 4; %(default)s")  # fmt: skip
    parser.add_argument("--no-probe", action="store_true", help="watch calls only, and no bytes")
    parser.add_argument("--list", action="store_true", help="name the scenarios, and end")
    given = parser.parse_args(arguments)
    if given.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name}: {scenario.about}")
        return 0
    try:
        _check_run(given.only, given.page_size)
        make = _imported(given.make)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    try:
        report = run(
            make, only=given.only, seeds=given.seed or (0,), patience_s=given.patience,
            probe=not given.no_probe, backend=given.backend,
            page_size=given.page_size,
        )  # fmt: skip
    except SidesError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(report)
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main())
