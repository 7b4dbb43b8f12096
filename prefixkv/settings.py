"""The checks that settings have in common."""

from __future__ import annotations

from prefixkv.errors import ConfigError


def at_least(bound: float, /, **settings: float) -> None:
    """Raise ConfigError, with its name, for a setting below `bound` (or not a number)."""
    for name, value in settings.items():
        if not value >= bound:
            raise ConfigError(f"{name} is {value}, at least {bound} is needed")


def above(bound: float, /, **settings: float) -> None:
    """Raise ConfigError, with its name, for a setting at `bound` or below (or not a number)."""
    for name, value in settings.items():
        if not value > bound:
            raise ConfigError(f"{name} is {value}, it has to be above {bound}")
