"""The waist: the names through which everything around the core reaches it."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import prefixkv
from prefixkv import errors, settings, spi
from tests.repository.imports import RINGS, WAIST, homes, imports

PACKAGE = Path(prefixkv.__file__).parent
GATED = PACKAGE.parent / "benchmarks" / "policies"  # the example of a policy of one's own
PLAIN = {"prefixkv.errors": errors, "prefixkv.settings": settings}  # each has its names itself


def of_the_core(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import of the core in a ring's file, wherever it stands in it."""
    for module, name in imports(text):
        inside = f"{module}.{name}".split(".")
        if inside[0] == "prefixkv" and inside[1] not in (*RINGS, ""):
            yield module, name


def is_plain(module: str, name: str) -> bool:
    """Return whether a module without a table has this public name, and has not imported it."""
    if module not in PLAIN:
        return False
    text = Path(str(PLAIN[module].__file__)).read_text()
    taken = {imported or of for of, imported in imports(text)}
    return name[:1] != "_" and name in dir(PLAIN[module]) and name not in taken


def around(ring: str) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {name} of {module}"
        for path in sorted((PACKAGE / ring).rglob("*.py"))
        for module, name in of_the_core(path.read_text())
        if not (is_plain(module, name) or name in homes(module) or name[:2] == "__")
    ]


@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_takes_nothing_of_the_core_but_through_the_waist(ring: str) -> None:
    assert around(ring) == []


def test_an_import_around_the_waist_is_seen() -> None:
    """Also one in a function, one for type checkers alone, and one of a module."""
    text = (
        "from prefixkv import DecodeNode\nimport prefixkv.paging\nfrom prefixkv import errors\n"
        "def f():\n    from prefixkv.cache.tree import RadixTree\nfrom prefixkv.engines import hf\n"
    )
    assert list(of_the_core(text)) == [
        ("prefixkv", "DecodeNode"),
        ("prefixkv.paging", ""),
        ("prefixkv", "errors"),
        ("prefixkv.cache.tree", "RadixTree"),
    ]


@pytest.mark.parametrize("module", list(WAIST.values()))
def test_each_name_is_where_the_table_says_and_type_checkers_see_the_same(
    module: ModuleType,
) -> None:
    homes: dict[str, str] = vars(module)["_HOMES"]
    for name, home in homes.items():
        inside = import_module(f"prefixkv.{home}")
        assert getattr(module, name) is getattr(inside, name)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    checked = {
        alias.name: str(node.module).removeprefix("prefixkv.")
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert checked == homes


def test_what_is_in_the_waist_is_used_by_a_ring_or_is_for_engines_of_ones_own() -> None:
    """The waist is no attic: what no ring takes has a reason here."""
    used = {
        name
        for folder in (*(PACKAGE / ring for ring in RINGS), GATED)
        for path in folder.rglob("*.py")
        for _, name in of_the_core(path.read_text())
    }
    for_others = {
        "AdmissionPolicy", "register_admission",  # an admission policy of one's own
        "DecodeRank", "RankLog", "PrefillRank",  # an engine whose ranks are processes
        "DecodeGroup", "PrefillGroup",  # one whose ranks are pools of one process
        "Transport",  # a transport of one's own
        "page_table",  # a batch's block table, for an engine's kernels
    }  # fmt: skip
    assert set(vars(spi)["_HOMES"]) - used == for_others
