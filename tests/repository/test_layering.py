"""What an import costs and brings in, in a fresh interpreter; and that no import leads back."""

import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import prefixkv
from tests.repository.imports import imports
from tests.support.patience import PATIENCE_S

HEAVY = ("torch", "nixl", "zmq")


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True,
        timeout=PATIENCE_S
    ).stdout.strip()  # fmt: skip


def test_the_package_is_imported_with_next_to_nothing() -> None:
    """So it costs next to no time: not even numpy comes before it is needed."""
    program = (
        "import sys; before = set(sys.modules); import prefixkv; "
        "print(*sorted(name.split('.')[0] for name in set(sys.modules) - before))"
    )
    loaded = run(program).split()
    assert not {*HEAVY, "numpy", "msgspec"} & set(loaded)
    assert len(loaded) < 20, loaded


def test_the_pure_part_runs_without_transport_sockets_and_tensors() -> None:
    """All its modules load where torch, nixl and zmq are not installed."""
    pure = {"cache", "decode", "prefill", "protocol", "request", "pages", "control", "staging",
            "ranks", "config", "errors", "paging"}  # fmt: skip
    names = [module.name for module in pkgutil.walk_packages(prefixkv.__path__, "prefixkv.")]
    names = [name for name in names if name.split(".")[1] in pure]
    assert len(names) > 25
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY})); import importlib; "
        f"[importlib.import_module(name) for name in {names}]; print('fine')"
    )
    assert run(program) == "fine"


# --- circles --------------------------------------------------------------------------------------


def imports_of(name: str, modules: set[str]) -> set[str]:
    """The modules of the package that a module's text imports anywhere."""
    spec: Any = importlib.util.find_spec(name)
    every = imports(Path(spec.origin).read_text())
    # A module of that name, or a name in the module.
    return {inner if (inner := f"{of}.{one}") in modules else of for of, one in every} & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every set of modules each of which imports all the others, directly or through others."""
    reach = {name: set(imported) for name, imported in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in graph
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def test_no_import_leads_back_to_its_module_type_only_ones_included() -> None:
    modules = {module.name for module in pkgutil.walk_packages(prefixkv.__path__, "prefixkv.")}
    modules.add("prefixkv")
    graph = {name: imports_of(name, modules) for name in modules}
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []
