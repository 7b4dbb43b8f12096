"""The variables `PREFIXKV_...` of the environment that are settings of the commands of serving. All
that are known stand in `prefixkv/variables.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from prefixkv.serving.config import KINDS, ProxyConfig, ServeConfig
from prefixkv.spi import settings_of


@cache
def settings_variables() -> frozenset[str]:
    """Return the variables that are settings of a command of serving."""
    kinds = (*KINDS.values(), ServeConfig, ProxyConfig)
    return frozenset(setting.variable for kind in kinds for setting in settings_of(kind))


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a worker process, without the settings that the process which
    starts it has for itself."""
    ours = settings_variables()
    return {name: value for name, value in environ.items() if name not in ours}
