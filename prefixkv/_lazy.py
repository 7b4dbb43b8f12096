"""Names of a module that are loaded when they are first used.

A public module lists each of its names with the module that defines it. Importing the public module
then loads neither torch nor nixl, nor the optional package that one of its names may need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def homes_of(names: Mapping[str, str]) -> dict[str, str]:
    """Return the module of each name. `names` has those of each module, with blanks between."""
    return {name: home for home, listed in names.items() for name in listed.split()}


def lazy_names(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for `module`. `homes` has the module of each name, below
    `prefixkv`."""
    space = vars(sys.modules[module])

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        import_module("prefixkv.policies")
        value = getattr(import_module(f"prefixkv.{homes[name]}"), name)
        # Kept in the module, so that the next use does not come here again.
        space[name] = value
        return value

    return load, lambda: sorted({*space, *homes})
