"""The checks that settings have in common, and those of numbers that calls are given."""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

from prefixkv.errors import CallerError, ConfigError

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


def check_time(now_s: float) -> None:
    """Raise CallerError for a time that is no finite number. To be called before anything changes:
    times are compared, and come to stand in heaps, in the middle of a change."""
    if (type(now_s) is not float and not _is_number(now_s)) or now_s - now_s != 0:
        raise CallerError(f"now_s is {now_s!r}, seconds of a monotonic clock are needed")


def whole_count(name: str, value: Any) -> int:
    """`value` as an int. Raises CallerError for what is no whole number, or below 0."""
    if type(value) is not int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise CallerError(f"{name} is {value!r}, a whole number is needed")
        value = int(value)
    if value < 0:
        raise CallerError(f"{name} is {value}, at least 0 is needed")
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
