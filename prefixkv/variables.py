"""The `PREFIXKV_...` variables that some part of prefixkv reads. Unknown ones are refused, since
they would be ignored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from prefixkv.config import DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError, nearest
from prefixkv.settings import PREFIX, settings_of

# A plug-in of an engine cannot ask the commands for theirs, so the names stand here;
# tests/unit/serving/test_roles.py holds them against the commands' classes.
_OF_SERVING: Final = (
    "ANSWER_TIMEOUT_S", "ANSWER_TOKENS", "API_KEY", "CARRY_ON", "CHUNK_TOKENS", "CONTEXT",
    "DECODE", "DECODE_CONFIG", "DECODE_PAGES", "DECODE_WINDOW_PAGES", "DEVICE", "DRAIN_TIMEOUT_S",
    "DTYPE", "HOST", "HOST_MEMORY", "LAYOUT",
    "LIMITS_BODY_TIMEOUT_S", "LIMITS_HEAD_TIMEOUT_S", "LIMITS_IDLE_TIMEOUT_S",
    "LIMITS_MAX_BODY_BYTES", "LIMITS_MAX_REQUESTS_PER_CLIENT",
    "LIMITS_WRITE_TIMEOUT_S", "MODEL", "NUM_PAGES", "PAGE_SIZE", "PARENT", "PORT", "PREFILL",
    "PREFILL_CONFIG", "PREFILL_PAGES", "PREFILL_WINDOW_PAGES", "RAY", "RAY_CPUS", "RAY_GPUS",
    "RAY_PLACEMENT", "REQUEST_LOG", "SEED", "SERVED_NAME", "SERVERS_KEY", "START_TIMEOUT_S",
    "STATUS_HOST", "STATUS_PORT", "THINKING", "THREADS", "TOKENIZER_FOLDER", "WINDOW_PAGES",
    "WORKERS", "WORKERS_KEY",
)  # fmt: skip
_OTHERS: Final = (
    "DEBUG",  # nodes check that they are called from their own thread
    # The plug-in for SGLang (engines/sglang/plugin.py).
    "POLICY", "ADMISSION", "PATIENCE_S", "JOIN", "CPU_NIXL", "TRANSFER",
    # Tests and benchmarks.
    "ENGINE_PYTHON", "TEST_DEVICE", "TEST_BACKEND", "TEST_OF_ENV", "JUNK_EXAMPLES", "KILLS",
    "RECORD", "BENCHMARKS_MARKS",
)  # fmt: skip


@cache
def known_variables() -> frozenset[str]:
    """Return the names of all variables, a command's settings among them."""
    settings = {one.variable for kind in (DecodeConfig, PrefillConfig) for one in settings_of(kind)}
    return frozenset({*settings, *(PREFIX + name for name in (*_OF_SERVING, *_OTHERS))})


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ConfigError, with the nearest name, for an unknown PREFIXKV_... variable."""
    known = known_variables()
    names = {one.removeprefix(PREFIX): one for one in known}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            # Compared without the prefix, which would make any two names alike.
            near = nearest(variable.removeprefix(PREFIX), names)
            hint = near.replace("nearest is ", f"nearest is {PREFIX}")
            raise ConfigError(f"there is no variable {variable}{hint}")
