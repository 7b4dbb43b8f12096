"""Runs of an engine through the scenarios, and the report of what broke."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from prefixkv import TransportConfig
from prefixkv.conformance.interface import Finding, ScenarioSettings
from prefixkv.conformance.scenario_run import MakeSides, ScenarioOverError, ScenarioRun
from prefixkv.conformance.scenarios import SCENARIOS

Backend = Literal["nixl", "shm", "auto"]

PATIENCE_S: Final = 30.0
"""How long nothing at all may happen before an engine counts as stalled, in seconds."""

PAGE_SIZE: Final = 4  # of most scenarios
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
        # Findings that differ in names and numbers alone have one cause.
        groups: dict[Finding, list[Finding]] = {}
        for found in self.findings:
            groups.setdefault(found._replace(what=_NUMBER.sub("#", found.what)), []).append(found)
        for first, *alike in groups.values():
            lines.append(f"in {first.scenario!r}, seed {first.seed}: {first}")
            if alike:
                names = [match[0] for one in alike if (match := _RID.match(one.what))]
                named = ", ".join(dict.fromkeys(names)) or alike[0].what
                lines.append(f"    and {len(alike)} more of the kind: {named}")
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


@contextmanager
def _held_log() -> Iterator[list[str]]:
    """Keep what is logged, instead of showing it: many scenarios go wrong on purpose."""
    lines: list[str] = []
    held = logging.Handler()
    held.emit = lambda record: lines.append(  # type: ignore[method-assign]
        f"{record.levelname} {record.name}: {record.getMessage()}"
    )
    before = _LOGGER.propagate, _LOGGER.handlers
    _LOGGER.propagate, _LOGGER.handlers = False, [held]
    try:
        yield lines
    finally:
        _LOGGER.propagate, _LOGGER.handlers = before


class Case(NamedTuple):
    """One scenario and one seed, to parametrise a test with."""

    scenario: str
    seed: int

    def __str__(self) -> str:
        return f"{self.scenario}, seed {self.seed}"

    def check(self, make: MakeSides, **options: Any) -> None:
        """Raises AssertionError, with the report, if a law is broken; `options` are those of `run`.
        An engine that does not take part in the scenario (`make` raises NotImplementedError) passes
        it."""
        report = run(make, only=[self.scenario], seeds=[self.seed], **options)
        if not report.ok:
            raise AssertionError(str(report))


def scenarios(seeds: Iterable[int] = (0,)) -> list[Case]:
    """Return every scenario with each of these seeds."""
    return [Case(name, seed) for name in SCENARIOS for seed in seeds]


def check_run(only: Sequence[str], page_size: int) -> None:
    for name in only:
        if name not in SCENARIOS:
            known = ", ".join(repr(one) for one in SCENARIOS)
            raise ValueError(f"there is no scenario {name!r}, there are {known}")
    if page_size < PAGE_SIZE or page_size % PAGE_SIZE:
        raise ValueError(f"page_size is {page_size}, a multiple of {PAGE_SIZE} is needed")


def run(
    make: MakeSides, *, only: Sequence[str] = (), seeds: Iterable[int] = (0,),
    patience_s: float = PATIENCE_S, probe: bool = True, backend: Backend = "nixl",
    page_size: int = PAGE_SIZE,
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
    check_run(only, page_size)
    report = ConformanceReport()
    began_s = time.monotonic()
    options = "" if page_size == PAGE_SIZE else f", page_size={page_size}"
    options += "" if backend == "nixl" else f", backend={backend!r}"
    for case in scenarios(seeds):
        if only and case.scenario not in only:
            continue
        scenario = SCENARIOS[case.scenario]
        settings = _settings_of(scenario.settings, backend, page_size // PAGE_SIZE)
        try:
            with _held_log() as lines:
                one = ScenarioRun(case.scenario, case.seed, settings, make, patience_s, probe)
                with closing(one), suppress(ScenarioOverError):
                    scenario.play(one)
                    one.rest()
        except NotImplementedError as error:
            report.skipped[str(case)] = str(error) or "not implemented"
            continue
        report.findings += [found._replace(options=options) for found in one.findings]
        if not one.findings:
            report.passed.append(str(case))
        elif lines:
            report.logs[str(case)] = lines
    report.seconds = time.monotonic() - began_s
    return report


def _settings_of(settings: ScenarioSettings, backend: Backend, factor: int) -> ScenarioSettings:
    """Make all sizes `factor` times larger, and the nodes have this backend."""
    transport = TransportConfig(backend=backend)
    return replace(
        settings, page_size=settings.page_size * factor,
        prefill_page_size=settings.prefill_page_size * factor,
        chunk_tokens=settings.chunk_tokens * factor, factor=factor, shared=backend != "nixl",
        decode=replace(settings.decode, transport=transport),
        prefill=replace(settings.prefill, transport=transport),
    )  # fmt: skip
