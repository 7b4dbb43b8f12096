"""Settings of the workers of `prefixkv serve`: what it has for their role, and before that what the
role's own file (`--prefill-config`, `--decode-config`) and the environment say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from prefixkv.errors import ConfigError
from prefixkv.serving.config import KINDS, ServeConfig
from prefixkv.settings import FILE, Found, as_environ, build, find, read_toml, settings_of

_BY_SERVE: Final = ("host", "status_host", "api_key", "parent", "model", "seed", "dtype")
_PORTS: Final = ("port", "status_port")
_ADDRESSES: Final = (
    "bind", "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_snapshot_endpoint",
)  # fmt: skip
_HOST_SIZES: Final = {"host_memory_times", "host_memory_num_bytes", "host_memory_num_pages"}


def role_environs(
    config: ServeConfig, role: str, key: str, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environments of the workers of a role, with their settings in place of this
    process's. A variable that `serve` has too is its own. `key` is what workers require. Raises
    ConfigError, with the place, for what `serve` sets, or workers cannot have."""
    kind, file = KINDS[role], config.prefill_config if role == "prefill" else config.decode_config
    ours = {setting.variable for setting in settings_of(ServeConfig)}
    theirs = {name: text for name, text in environ.items() if name not in ours}
    found = find(kind, read_toml(Path(file)) if file else {}, file, theirs)
    for name in _BY_SERVE:
        if name in found:
            raise ConfigError(f"{found[name].where}: serve sets it, the same for all workers")
    settings = {name: Found(value, name, FILE) for name, value in _of_serve(config, role).items()}
    if _HOST_SIZES & found.keys():
        settings = {name: one for name, one in settings.items() if name not in _HOST_SIZES}
    build(kind, settings | found)
    values = {name: one.value for name, one in (settings | found).items()}
    num = config.prefill if role == "prefill" else config.decode
    of_all = {
        "host": "127.0.0.1", "status_host": "127.0.0.1", "api_key": key,
        # An actor's process is the raylet's child, on another machine perhaps.
        "parent": 0 if config.ray else os.getpid(),
    }  # fmt: skip
    return [
        without_settings(environ) | as_environ(kind, numbered(values, number, num) | of_all)
        for number in range(num)
    ]


def _of_serve(config: ServeConfig, role: str) -> dict[str, Any]:
    models, workers = config.models, config.prefill + config.decode
    threads = config.ray_cpus if config.ray else max(1, (os.cpu_count() or 1) // workers)
    settings: dict[str, Any] = {
        "name": role, "model": models.model, "seed": models.seed, "dtype": models.dtype,
        "device": models.device, "context": models.context, "threads": models.threads or threads,
        "page_size": config.page_size,
        # One file for all: each line names its worker.
        "request_log": os.path.abspath(log) if (log := config.listen.request_log) else "",
    }  # fmt: skip
    if role == "prefill":
        return settings | {
            "num_pages": config.prefill_pages, "window_pages": config.prefill_window_pages,
            "chunk_tokens": config.chunk_tokens, "checkpoints": config.checkpoints,
        }  # fmt: skip
    settings |= {"num_pages": config.decode_pages, "window_pages": config.decode_window_pages}
    if config.compute_below or config.carry_on:  # else a decode worker computes nothing
        settings["compute_below"] = config.compute_below
    if config.carry_on:
        settings["failure_policy"] = "local"
    return settings | config.host_size()


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a worker, without the settings of the process that starts it."""
    kinds = (*KINDS.values(), ServeConfig)
    ours = {setting.variable for kind in kinds for setting in settings_of(kind)}
    return {name: text for name, text in environ.items() if name not in ours}


def numbered(settings: Mapping[str, Any], number: int, num: int) -> dict[str, Any]:
    """Count up what the workers of a role, `num` of them, cannot share.

    >>> numbered({"name": "d", "port": 90, "bind": "tcp://[::1]:95", "record": "a.jsonl"}, 2, num=3)
    {'name': 'd-2', 'port': 92, 'bind': 'tcp://[::1]:97', 'record': 'a-2.jsonl'}
    >>> numbered({"name": "p", "kv_events_endpoint": "ipc:///run/a", "bind": "tcp://h:*"}, 1, num=3)
    {'name': 'p-1', 'kv_events_endpoint': 'ipc:///run/a-1', 'bind': 'tcp://h:*'}
    """
    made = dict(settings, name=f"{settings['name']}-{number}")
    for name in _PORTS:
        if made.get(name):
            made[name] += number
    for name in _ADDRESSES:
        host, _, port = made.get(name, "").rpartition(":")
        if port.isdecimal() and int(port):
            made[name] = f"{host}:{int(port) + number}"
        elif host == "ipc" and num > 1:
            made[name] += f"-{number}"
    if made.get("record") and num > 1:
        path = Path(made["record"])
        made["record"] = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return made
