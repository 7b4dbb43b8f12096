"""A conformance kit for engines: it runs an engine's own two loops through hits, retractions,
aborts, ends and restarts on small workers, and says by law what broke.

    report = conformance.run(make)      # make: ScenarioSettings -> EngineSides
    print(report)                       # what broke: law, what was seen, how to see it again

    @pytest.mark.parametrize("case", conformance.scenarios(), ids=str)
    def test_my_engine(case):
        case.check(make)                # AssertionError with the same text

    python -m prefixkv.conformance my_engine.workers:make

`docs/integrate/conformance.md` has an example; `prefixkv.conformance.toy` is a whole engine that
passes, and `prefixkv.conformance.pattern` has KV that shows where a wrong byte came from.
"""

from prefixkv.conformance.interface import (
    LAWS,
    AnswerLog,
    EngineSides,
    Finding,
    Prompt,
    ScenarioSettings,
    Side,
    SidesError,
)
from prefixkv.conformance.kit import PATIENCE_S, Case, ConformanceReport, run, scenarios
from prefixkv.conformance.scenario_run import MakeSides

__all__ = [
    "LAWS",
    "PATIENCE_S",
    "AnswerLog",
    "Case",
    "ConformanceReport",
    "EngineSides",
    "Finding",
    "MakeSides",
    "Prompt",
    "ScenarioSettings",
    "Side",
    "SidesError",
    "run",
    "scenarios",
]
