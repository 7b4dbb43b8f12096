"""The variables `PREFIXKV_...` of the environment: the settings of every command, and what else
reads one. An unknown one is refused, since it would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from prefixkv.serving.config import KINDS, ProxyConfig, ServeConfig
from prefixkv.spi import PREFIX, ConfigError, nearest, settings_of

OTHERS: Final = frozenset(
    PREFIX + name
    for name in (
        "DEBUG",  # nodes check that they are called from their own thread
        # The plug-in for SGLang (engines/sglang/plugin.py).
        "POLICY", "HINTS", "ADMISSION", "PATIENCE_S", "JOIN", "PEEK", "MIRROR", "CPU_NIXL",
        "TRANSFER",
        # Tests and benchmarks.
        "ENGINE_PYTHON", "TEST_DEVICE", "TEST_BACKEND", "TEST_OF_ENV", "JUNK_EXAMPLES", "KILLS",
        "RECORD", "BENCHMARKS_MARKS",
    )
)  # fmt: skip
"""Variables that are no setting of a command; some have the name of one."""


@cache
def settings_variables() -> frozenset[str]:
    """Return the variables that are settings of a command of serving."""
    kinds = (*KINDS.values(), ServeConfig, ProxyConfig)
    return frozenset(setting.variable for kind in kinds for setting in settings_of(kind))


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ConfigError, with the nearest name, for a variable PREFIXKV_... that no part of
    prefixkv reads. Those of another command are known: an environment may serve several."""
    known = settings_variables() | OTHERS
    names = {one.removeprefix(PREFIX): one for one in known}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            # Compared without the prefix, which would make any two names alike.
            near = nearest(variable.removeprefix(PREFIX), names)
            hint = near.replace("nearest is ", f"nearest is {PREFIX}")
            raise ConfigError(f"there is no variable {variable}{hint}")


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a worker process, without the settings that the process which
    starts it has for itself."""
    ours = settings_variables()
    return {name: value for name, value in environ.items() if name not in ours}
