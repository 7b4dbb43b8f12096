"""Each long run of `fuzz/` runs, for a moment: what it drives may have changed under it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FUZZ = Path(__file__).parents[2] / "fuzz"
SECONDS = ["--seconds", "2"]
SHORT = {
    "twenty_mutants.py": ["--only", "10", "--processes", "1"],
    **{
        f"run.py {name}": [*SECONDS, *more]
        for name, more in {
            "allocator": [],
            "engine": [],
            "explore": ["--max-states", "300"],
            "frames": ["--frames", "3000"],
            "leases": [],
            "liveness": ["--seed", "7000"],
            "mesh_pair": [],
            "radix": [],
            "scheduler": [],
            "weights": [],
            "windows": [],
        }.items()
    },
}
LIMIT_S = 900.0  # of one that takes half a minute, on a machine with much other work


def test_each_is_run() -> None:
    run = load(FUZZ / "run.py")
    names = [f"run.py {name}" for name in (*run.SEEDED, *run.WHOLE)]
    files = {path.name for path in FUZZ.glob("*.py")} - {"mutants.py", "run.py", "frames.py"}
    assert {*names, *files} == SHORT.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHORT))
def test_it_runs(name: str) -> None:
    file, *which = name.split()
    command = [sys.executable, str(FUZZ / file), *which, *SHORT[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def load(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_each_of_the_mutants_can_be_made_and_its_test_is_there() -> None:
    """A function or test of another name needs that name in the mutant's row, too."""
    module = load(FUZZ / "twenty_mutants.py")
    for mutant in module.MUTANTS:
        path, text = module.mutated(module.ROOT, mutant)
        compile(text, str(path), "exec")
        file = module.find_test(module.ROOT, mutant.test).partition("::")[0]
        assert (module.ROOT / file).exists()


def test_each_file_that_mutants_are_drawn_from_is_there() -> None:
    for modules, tests in load(FUZZ / "mutants.py").PARTS.values():
        paths = [*(f"prefixkv/{module}" for module in modules), *tests]
        assert [path for path in paths if not (FUZZ.parent / path).exists()] == []


def test_each_law_has_a_mutant_and_each_mutant_a_law() -> None:
    """docs/reference/laws.md is the table of them."""
    mutants = load(FUZZ / "twenty_mutants.py").MUTANTS
    laws = load(FUZZ.parent / "docs" / "gen.py").read_laws()
    assert {mutant.law for mutant in mutants} == laws.keys()
    assert len(mutants) >= 40
