"""The variables `PREFIXKV_...` that are settings of serving. `prefixkv/variables.py` has all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from prefixkv.serving.config import KINDS, ProxyConfig, ServeConfig
from prefixkv.settings import settings_of


@cache
def settings_variables() -> frozenset[str]:
    kinds = (*KINDS.values(), ServeConfig, ProxyConfig)
    return frozenset(setting.variable for kind in kinds for setting in settings_of(kind))


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a worker, without the settings of the process that starts it."""
    ours = settings_variables()
    return {name: value for name, value in environ.items() if name not in ours}
