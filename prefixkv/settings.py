"""The checks that settings have in common."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from prefixkv.errors import ConfigError

_MOST = 2**31 - 1  # of what is counted
_MOST_BYTES = 2**62 - 1


def at_least(bound: float, /, **settings: float) -> None:
    """Raise ConfigError, with its name, for a setting below `bound` (or not a number)."""
    for name, value in settings.items():
        if not _is_number(value) or not value >= bound:
            raise ConfigError(f"{name} is {value!r}, at least {bound} is needed")


def above(bound: float, /, **settings: float) -> None:
    """Raise ConfigError, with its name, for a setting at `bound` or below (or not a number)."""
    for name, value in settings.items():
        if not _is_number(value) or not value > bound:
            raise ConfigError(f"{name} is {value!r}, it has to be above {bound}")


def check_types(config: Any) -> None:
    """Raise ConfigError, with its name, for a field of a frozen dataclass that is not of the plain
    type it is declared as. Counts have to be below 2**31, bytes below 2**62."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        kind = str(field.type)
        if kind == "int" or (kind == "int | None" and value is not None):
            most = _MOST_BYTES if name.endswith("_bytes") else _MOST
            if not _is_number(value) or not isinstance(value, Integral) or int(value) > most:
                raise ConfigError(f"{name} is {value!r}, a whole number up to {most} is needed")
        elif kind == "float" or (kind == "float | None" and value is not None):
            if not _is_number(value):
                raise ConfigError(f"{name} is {value!r}, a number is needed")
        elif kind == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}, True or False is needed")
        elif kind == "str" and not isinstance(value, str):
            raise ConfigError(f"{name} is {value!r}, a string is needed")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Raise ConfigError unless `value` is a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ConfigError(f"{name} is {value!r}, must be in [{low}, {high}], whole")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigError, with its name, for an argument that is no object of `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is a {type(value).__name__}, a {kind.__name__} is needed")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
