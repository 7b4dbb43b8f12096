"""What files import, read from their text: also for type checkers alone, and inside functions."""

import ast
from collections.abc import Iterator
from types import ModuleType

import prefixkv
from prefixkv import spi, transfer

WAIST: dict[str, ModuleType] = {
    "prefixkv": prefixkv, "prefixkv.transfer": transfer, "prefixkv.spi": spi,
}  # fmt: skip
"""Modules whose names have their homes in a table."""
RINGS = ("engines", "serving", "proxy", "cli", "conformance")


def homes(module: str) -> dict[str, str]:
    """Where the names of such a module are from, below the package."""
    return vars(WAIST[module])["_HOMES"] if module in WAIST else {}


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import; the name is "" where a module is imported by itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level, "a relative import"
            yield from ((node.module, alias.name) for alias in node.names)
