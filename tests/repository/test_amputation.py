"""An organ can be taken out: its files are deleted, and the lines of `assembly.py` that name it."""

import ast
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.repository.imports import RINGS, homes, imports

ROOT = Path(__file__).parents[2]
LIMIT_S = 600

POLICIES = ("adaptive", "ghosts", "hazards", "least_worth", "hints")
ORGANS = {
    "policies": [f"cache/eviction/{name}.py" for name in POLICIES],
    "kv_events": ["kv_events"],
    "record": ["runtime/record.py"],
    "death": ["runtime/death.py"],
    "ranks": ["ranks", "runtime/ranks.py"],
    "staging": ["staging", "runtime/staging.py"],
    "checksums": ["memory/page_sums.py", "control/decode/looks.py", "runtime/looks.py"],
    "compute": ["decode/compute_source.py"],
    "checkpoints": ["cache/checkpoints.py", "pages/request_checkpoints.py"],
    "host": [
        "decode/host_tier.py",
        "memory/host_pool.py",
        "memory/page_copy.py",
        "runtime/host_copies.py",
    ],
    "metrics": ["runtime/metrics.py"],
    "shm": ["transport/shm"],
}
"""Paths below the package, by organ."""

SHARED = {
    "decode/sources.py": ("compute", "host"),
    "memory/copy_triton.py": ("staging", "host"),
    "memory/stage_copy.py": ("staging", "host"),
    "memory/stage_plan.py": ("staging", "host", "checksums"),
    "runtime/copies.py": ("staging", "host", "checksums"),
}
"""Files that go with the last of these organs."""

BOTH = {"decode/state_checkpoints.py": ("compute", "checkpoints")}
"""A file that goes with the first of these."""

BETWEEN = ("assembly.py", "policies.py", "__init__.py", "spi.py", "transfer.py")

# Of the kernel alone, so that it runs whatever is away.
MACHINE = "tests/unit/pages/test_allocator.py::TestAllocator"
SETTINGS = {"compute": "prefixkv.config.ComputeConfig"}
"""What a test imports that asks a scheduler for an organ, and names no file of it."""

KERNEL_TESTS = ("cache", "pages", "decode", "prefill", "control", "protocol")


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def pruned(text: str, gone: Iterable[str]) -> str:
    """`assembly.py` without the imports of modules below `gone`, and without the statements that
    use what was imported.

    >>> pruned("from a.b import c\\nfrom d import e\\ne.x = c\\ne.y = 1\\n", ["a"])
    'from d import e\\ne.y = 1'
    """
    lost: set[str] = set()
    kept = []
    for node in ast.parse(text).body:
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
            modules = [f"{node.module}.{name}" for name in names]
            if any(f"{module}.".startswith(f"{one}.") for module in modules for one in gone):
                lost |= {*names}
                continue
        if not used & lost:
            kept.append(ast.unparse(node))
    return "\n".join(kept)


def imports_of(path: Path) -> Iterator[str]:
    """The modules that a file imports; of a public name its home."""
    for module, name in imports(path.read_text()):
        yield module
        yield f"prefixkv.{homes(module)[name]}" if name in homes(module) else f"{module}.{name}"


def imported(path: Path, root: Path) -> Iterator[str]:
    """The modules that a file of the tests needs, through other files of them too."""
    seen: set[Path] = set()
    files = [path]
    while files:
        file = files.pop()
        if file not in seen and file.is_file():
            seen.add(file)
            for module in imports_of(file):
                yield module
                if module.split(".")[0] in ("tests", "benchmarks"):
                    files.append((root / module.replace(".", "/")).with_suffix(".py"))


def without(organs: Iterable[str], copy: Path) -> list[str]:
    """Copy the package and its tests without these organs; return the modules that are gone."""
    for name in ("prefixkv", "tests", "benchmarks", "docs"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    shutil.copy(ROOT / "pyproject.toml", copy)
    paths = [path for organ in organs for path in ORGANS[organ]]
    paths += [path for path, users in SHARED.items() if {*users} <= {*organs}]
    paths += [path for path, users in BOTH.items() if {*users} & {*organs}]
    for path in (copy / "prefixkv" / path for path in paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone = [f"prefixkv.{module_of(path)}" for path in paths]
    for name in ("assembly.py", "policies.py"):
        file = copy / "prefixkv" / name
        file.write_text(pruned(file.read_text(), gone))
    if "policies" in organs:
        # These derive from one of the package's. Tests that only make them known run without them.
        for file in (copy / "benchmarks" / "policies").glob("*.py"):
            file.write_text("")
        gone.append("benchmarks.policies.*.*")
    return gone + [setting for organ, setting in SETTINGS.items() if organ in organs]


def test_each_statement_of_the_assembly_is_of_one_organ() -> None:
    """One that names two goes with either, and the other would lose what it says."""
    organs = {
        f"prefixkv.{module_of(path)}.": organ for organ, paths in ORGANS.items() for path in paths
    }
    owner: dict[str, str] = {}
    for node in ast.parse((ROOT / "prefixkv/assembly.py").read_text()).body:
        used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        assert len({owner[name] for name in used & owner.keys()}) <= 1, ast.unparse(node)
        if isinstance(node, ast.ImportFrom):
            modules = {alias.name: f"{node.module}.{alias.name}." for alias in node.names}
            for (name, module), path in itertools.product(modules.items(), organs):
                if module.startswith(path):
                    owner[name] = organs[path]


def test_nothing_but_the_assembly_and_the_waist_imports_an_organ_of_the_core() -> None:
    organs = {path: organ for organ, paths in ORGANS.items() for path in paths}
    gone = {f"prefixkv.{module_of(path)}.": organ for path, organ in organs.items()}
    shared = {f"prefixkv.{module_of(path)}": users for path, users in SHARED.items()}
    found = []
    for path in sorted((ROOT / "prefixkv").rglob("*.py")):
        name = path.relative_to(ROOT / "prefixkv").as_posix()
        if name.split("/")[0] in RINGS or name in BETWEEN:
            continue
        own = next((organ for at, organ in organs.items() if name.startswith(at)), None)
        mine = (SHARED | BOTH).get(name, (own,))
        goes_last = all if name in SHARED else any
        for module in imports_of(path):
            users = next((by for at, by in shared.items() if module.startswith(at)), mine)
            users = next(((one,) for at, one in gone.items() if f"{module}.".startswith(at)), users)
            is_there = goes_last(one in users for one in mine)
            found += [] if is_there else [f"{name} imports {module}"]
    assert found == []


# An editable install, or a path to the checkout, would find there what is away.
ALONE = """import sys
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in getattr(x, "__module__", "")]
import prefixkv
assert prefixkv.__path__ == [sys.argv[1]], prefixkv.__path__
"""
PYTEST = """
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run(copy: Path, program: str, *args: str) -> str:
    command = [sys.executable, "-c", ALONE + program, str(copy / "prefixkv"), *args]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=copy, env=environ, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def readme_example() -> str:
    (code,) = re.findall(
        r"```python\n(from prefixkv import.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    return str(code)


def check_alive(copy: Path) -> None:
    # One process for both: most of what it takes is to import the package.
    assert "96 of 150 tokens hit" in run(copy, readme_example() + PYTEST, MACHINE)


@pytest.mark.slow
@pytest.mark.parametrize("organ", ORGANS)
def test_without_one_organ_the_example_and_a_machine_run(organ: str, tmp_path: Path) -> None:
    without([organ], tmp_path)
    check_alive(tmp_path)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy without any organ, and the modules that are gone."""
    copy = tmp_path_factory.mktemp("kernel")
    return copy, without(ORGANS, copy)


@pytest.mark.slow
def test_without_any_organ_the_example_and_a_machine_run(kernel: tuple[Path, list[str]]) -> None:
    check_alive(kernel[0])


@pytest.mark.slow
@pytest.mark.parametrize("folder", KERNEL_TESTS)
def test_without_any_organ_the_tests_of_the_kernel_pass(
    folder: str, kernel: tuple[Path, list[str]]
) -> None:
    """But those that are about an organ: they import it, or a setting that asks for it."""
    copy, gone = kernel
    needs = re.compile("|".join(re.escape(f"{one}.").replace(r"\*", r"\w+") for one in gone))
    files = [*(copy / "tests" / "unit" / folder).rglob("test_*.py")]
    kept = [
        str(path)
        for path in files
        if not any(needs.match(f"{module}.") for module in imported(path, copy))
    ]
    assert len(kept) >= 0.2 * len(files)
    run(copy, PYTEST, *kept)
