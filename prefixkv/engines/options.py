"""Settings that an operator gives to an engine as a mapping, made into the frozen classes here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Final, TypeVar

from prefixkv import ControlConfig, CurveConfig, TransportConfig
from prefixkv.spi import ConfigError

C = TypeVar("C")

_WITHIN: Final[dict[str, type[Any]]] = {
    "control": ControlConfig, "curve": CurveConfig, "transport": TransportConfig,
}  # fmt: skip


def made(kind: type[C], name: str, said: Any) -> C:
    """The dataclass `kind` of what was said, under `name`; its fields that are configs are made of
    mappings too.

    Raises ConfigError for what is no mapping, has a setting that is unknown, or lacks one.

    >>> made(CurveConfig, "curve", {"public_key": "x"})
    Traceback (most recent call last):
    prefixkv.errors.ConfigError: curve has no secret_key
    """
    if not isinstance(said, Mapping):
        raise ConfigError(f"{name} is {said!r}, an object with settings is needed")
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    if unknown := [key for key in said if key not in known]:
        raise ConfigError(f"{name} has {', '.join(unknown)}; known are {', '.join(known)}")
    needed = [one.name for one in fields(kind) if _is_needed(one)]  # type: ignore[arg-type]
    if missing := [key for key in needed if key not in said]:
        raise ConfigError(f"{name} has no {', '.join(missing)}")
    said = dict(said)
    for key, within in _WITHIN.items():
        if said.get(key) is not None:
            said[key] = made(within, key, said[key])
    return kind(**said)


def _is_needed(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
