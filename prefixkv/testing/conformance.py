"""A conformance kit for engines: it runs an engine's own two loops through hits, retractions,
aborts, ends and restarts on small workers, and says by law what broke.

    report = conformance.run(make)      # make: ScenarioSettings -> EngineSides
    print(report)                       # what broke: law, what was seen, how to see it again

    @pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
    def test_my_engine(case):
        case.check(make)                # AssertionError with the same text

    python -m prefixkv.testing.conformance my_engine.workers:make

`docs/integrate.md` has an example; `prefixkv.testing.toy` is a whole engine that passes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
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

Backend = Literal["nixl", "shm", "auto"]

PATIENCE_S: Final = 30.0
"""How long nothing at all may happen before an engine counts as stalled, in seconds."""


@dataclass(slots=True)
class ConformanceReport:
    """What scenarios have found. `str()` of it is for people.

    `passed` has the names of the runs ("full hit, seed 0") without a finding; `skipped` those that
    the engine does not take part in, with its reason.
    """

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if no law was found broken."""
        return not self.findings

    @property
    def laws(self) -> set[str]:
        """Laws that were found broken, as `LAWS` names them."""
        return {found.law for found in self.findings}

    def __str__(self) -> str:
        lines = []
        for found in self.findings:
            lines.append(f"in {found.scenario!r}, seed {found.seed}: {found}")
        lines += [f"not run: {name}: {why}" for name, why in self.skipped.items()]
        broken = {(found.scenario, found.seed) for found in self.findings}
        lines.append(
            f"{len(self.passed)} passed, {len(broken)} broken, {len(self.skipped)} not run, "
            f"{self.seconds:.1f} s"
        )
        return "\n".join(lines)


class Case(NamedTuple):
    """One scenario and one seed, as a test is parametrised with them."""

    scenario: str
    seed: int

    def __str__(self) -> str:
        return f"{self.scenario}, seed {self.seed}"

    def check(
        self, make: MakeSides, *, patience_s: float = PATIENCE_S, probe: bool = True,
        backend: Backend = "nixl",
    ) -> None:  # fmt: skip
        """Run the case on an engine. Raises AssertionError, with the report, if a law is broken.

        An engine that does not take part in the scenario (`make` raises NotImplementedError)
        passes it.
        """
        report = run(
            make, only=[self.scenario], seeds=[self.seed], patience_s=patience_s, probe=probe,
            backend=backend,
        )  # fmt: skip
        if not report.ok:
            raise AssertionError(str(report))


def scenarios(seeds: Iterable[int] = (0,)) -> list[Case]:
    """Return every scenario with each of these seeds, to parametrise a test with."""
    return [Case(name, seed) for name in SCENARIOS for seed in seeds]


def run(
    make: MakeSides, *, only: Sequence[str] = (), seeds: Iterable[int] = (0,),
    patience_s: float = PATIENCE_S, probe: bool = True, backend: Backend = "nixl",
) -> ConformanceReport:  # fmt: skip
    """Run an engine through the conformance scenarios. About a minute for all of them.

    Args:
        make: makes both workers of the engine; called once for each scenario and seed. It may raise
            NotImplementedError for settings that the engine does not know.
        only: names of scenarios (`SCENARIOS`); all of them by default.
        seeds: each scenario is run once with each.
        patience_s: how long nothing at all may happen before the engine counts as stalled.
        probe: look at bytes, too: fill with junk what the engine has to write, and compare what it
            may not write. False for an engine whose device is still busy when a call of a node
            returns, and that gives no `ready=`.
        backend: transport between the two workers (`TransportConfig.backend`). With "shm" and
            "auto" the pools have to be shared memory (`ScenarioSettings.shared`).

    Returns: the report; nothing is raised for what an engine does wrong.
    Raises: ValueError for a scenario that there is not; what `make` raises.
    """
    unknown = [name for name in only if name not in SCENARIOS]
    if unknown:
        raise ValueError(f"there is no scenario {unknown[0]!r}, there are {', '.join(SCENARIOS)}")
    report = ConformanceReport()
    began_s = time.monotonic()
    for case in scenarios(seeds):
        if not only or case.scenario in only:
            _run_case(case, make, report, patience_s, probe, backend)
    report.seconds = time.monotonic() - began_s
    return report


def _run_case(
    case: Case, make: MakeSides, report: ConformanceReport, patience_s: float, probe: bool,
    backend: Backend,
) -> None:  # fmt: skip
    """Run one conformance case, and enter what it found into the report."""
    scenario = SCENARIOS[case.scenario]
    settings = scenario.settings
    if backend != "nixl":
        transport = TransportConfig(backend=backend)
        settings = replace(
            settings, shared=True, decode=replace(settings.decode, transport=transport),
            prefill=replace(settings.prefill, transport=transport),
        )  # fmt: skip
    try:
        one = ScenarioRun(case.scenario, case.seed, settings, make, patience_s, probe)
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
        one.sides.close()
    report.findings += one.findings
    if not one.findings:
        report.passed.append(str(case))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the conformance kit from a command line. Returns 1 if a law was found broken."""
    parser = argparse.ArgumentParser(
        prog="python -m prefixkv.testing.conformance",
        description="Run an engine's two loops through the conformance scenarios.",
    )
    parser.add_argument(
        "make", nargs="?", default="prefixkv.testing.toy:ToySides",
        help="module:name of the function that makes both workers; %(default)s",
    )  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO",
                        help="run this scenario; may be given several times")  # fmt: skip
    parser.add_argument("--seed", action="append", type=int, metavar="N",
                        help="run with this seed, 0 by default; may be repeated")  # fmt: skip
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S",
                        help="seconds without progress that are a stall; %(default)s")  # fmt: skip
    parser.add_argument("--backend", choices=("nixl", "shm", "auto"), default="nixl",
                        help="transport between the workers; %(default)s")  # fmt: skip
    parser.add_argument("--no-probe", action="store_true", help="watch calls only, and no bytes")
    parser.add_argument("--list", action="store_true", help="name the scenarios, and end")
    given = parser.parse_args(arguments)
    if given.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name}: {scenario.about}")
        return 0
    module, _, name = given.make.partition(":")
    make: MakeSides = getattr(import_module(module), name or "make")
    report = run(
        make, only=given.only, seeds=given.seed or (0,), patience_s=given.patience,
        probe=not given.no_probe, backend=given.backend,
    )  # fmt: skip
    print(report)
    return int(not report.ok)


if __name__ == "__main__":
    sys.exit(main())
