"""Eviction policies on the command line: a name, or a name with settings."""

from __future__ import annotations

from inspect import signature
from typing import Any

from prefixkv.spi import ConfigError, Policy, make_policy


def policy_of(text: str) -> Policy:
    """A new policy object of `NAME` or `NAME:setting=value:setting=value`.

    Raises:
        ConfigError: an unknown name or setting, a value that is no number or out of its bounds.

    >>> policy_of("adaptive:trust=5:half_life_s=600").half_life_s
    600
    """
    name, *pairs = text.split(":")
    plain = make_policy(name)
    known = list(signature(type(plain)).parameters)
    settings: dict[str, Any] = {}
    for pair in pairs:
        setting, _, value = pair.partition("=")
        if setting not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"policy {text!r}: {setting!r} is no setting of {name}, of {listed}")
        try:
            settings[setting] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise ConfigError(f"policy {text!r}: {setting} is no number") from None
    return type(plain)(**settings) if settings else plain
