"""Settings of workers, of `prefixkv serve` and of `prefixkv proxy`: see `prefixkv/settings.py`."""

# ruff: noqa: RUF009 - `_flat` returns a dataclass field
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from prefixkv import DecodeConfig, PrefillConfig
from prefixkv.errors import ConfigError
from prefixkv.settings import (
    FILE,
    Bytes,
    Count,
    CountOrZero,
    Found,
    Number,
    Port,
    Seconds,
    SecondsOrZero,
    as_environ,
    build,
    check_fields,
    doc,
    fields_of,
    find,
    is_loopback_host,
    parse_size,
    read_toml,
    settings_of,
)


def _flat(kind: Any, *but: str) -> Any:
    return field(default_factory=kind, metadata={"flat": True, "but": but})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client may cost. A client that is beyond them gets 408, 413 or 429."""

    max_body_bytes: Bytes = 16 << 20
    """Most bytes of a request's body."""
    head_timeout_s: Seconds = 10.0
    """How long a request's head may take once it is connected."""
    body_timeout_s: Seconds = 30.0
    """How long a request's body may take."""
    idle_timeout_s: Seconds = 60.0
    """A connection without a request is closed after this."""
    write_timeout_s: Seconds = 60.0
    """A connection that reads nothing of its answer is closed after this, or up to twice this."""
    max_requests_per_client: CountOrZero = 1024
    """Answers of one address that a front or a proxy gives at once (`n`, times prompts, of each
    request); 0: any number. Behind another proxy all clients have one address."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model, and how it computes."""

    model: Annotated[
        str,
        doc("Folder with config.json, *.safetensors, tokenizer.json; none: a small model from the "
            "seed."),
    ] = ""  # fmt: skip
    seed: Annotated[CountOrZero, doc("Seed of the small model's weights.")] = 0
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        doc("float32, bfloat16 or float16; none: the model's own."),
    ] = ""
    device: Annotated[str, doc("Device of torch, such as cpu or cuda:0.")] = "cpu"
    context: Annotated[CountOrZero, doc("Most tokens per request; 0: the model's own limit.")] = 0
    threads: Annotated[CountOrZero, doc("torch threads (0: torch's default).")] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.model and self.seed:
            raise ConfigError(
                f"seed: {self.seed} is of the small model, and model is {self.model!r}"
            )


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Addresses of a process: for requests, for its health and metrics."""

    host: Annotated[str, doc("Bind address; non-loopback addresses need an API key.")] = "127.0.0.1"
    port: Annotated[Port, doc("0 picks a free port.")] = 0
    status_host: Annotated[str, doc("Bind address of /health and /metrics.")] = "127.0.0.1"
    status_port: Annotated[Port, doc("0 picks a free port.")] = 0
    api_key: Annotated[
        str, doc("Bearer token that clients need; better set by PREFIXKV_API_KEY.")
    ] = ""
    drain_timeout_s: Annotated[
        SecondsOrZero, doc("Seconds that requests may take to end after SIGTERM.")
    ] = 30.0
    request_log: Annotated[
        str, doc("File that gets one JSON line per request that has ended; none: no file.")
    ] = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_fields(self)
        check_key("api_key", self.api_key)
        check_bind(self.host, self.api_key)
        check_bind(self.status_host, self.api_key, "status_host")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of both kinds of worker."""

    page_size: Annotated[Count, doc("Tokens per page.")] = 16
    num_pages: Annotated[Count, doc("Pages of the pool.")] = 1024
    window_pages: Annotated[
        CountOrZero, doc("Pages of layers with sliding windows; 0: what is needed.")
    ] = 0
    layout: Literal["layer_major", "page_major"] = "layer_major"
    """How the pool's pages lie in memory."""
    models: ModelSettings = _flat(ModelSettings)
    # A worker takes prompts as lists of tokens, which are longer than their texts.
    listen: ListenSettings = _flat(lambda: ListenSettings(limits=Limits(max_body_bytes=64 << 20)))
    parent: CountOrZero = 0
    """A process without which this one is killed; 0: none."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.listen.limits.max_requests_per_client != Limits().max_requests_per_client:
            raise ConfigError(
                "limits.max_requests_per_client: is of a front or a proxy; a worker answers its "
                "front alone"
            )


@dataclass(frozen=True, slots=True)
class PrefillWorkerConfig:
    """`prefixkv worker prefill`."""

    chunk_tokens: Annotated[Count, doc("Most tokens per forward.")] = 512
    worker: WorkerSettings = _flat(WorkerSettings)
    node: PrefillConfig = _flat(PrefillConfig, "model")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DecodeWorkerConfig:
    """`prefixkv worker decode`."""

    worker: WorkerSettings = _flat(WorkerSettings)
    node: DecodeConfig = _flat(DecodeConfig, "model")
    thinking: Annotated[
        Literal["on", "off"], doc("Cache the KV of a model's thinking: on or off.")
    ] = "on"

    def __post_init__(self) -> None:
        check_fields(self)


OPTION_NAMES: Final = {
    "page_size": "--page-size",
    "model": "--model, or --seed",
    "weights_version": "--model, or --dtype",
    "dtype": "--dtype, or --model",
    "attention": "--model",
    "num_layers": "--model",
    "num_kv_heads": "--model",
    "head_dim": "--model",
    "transport backend": "--transport-backend",
    "staging": "--transport-staging-bytes",
    "lease_bytes": "--transport-lease-bytes",
    "slot_bytes": "--transport-lease-bytes",
    "decode workers": "--control-max-peers",
}
"""Options of a worker's command line by field of a handshake: `ModelConfig.option_names`."""

WorkerConfig = PrefillWorkerConfig | DecodeWorkerConfig
KINDS = {"prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of a front, whoever starts its workers."""

    served_name: Annotated[str, doc("The model's name for clients; none: its folder's name.")] = ""
    answer_tokens: Annotated[
        CountOrZero, doc("Default limit of tokens per chat answer (0: up to the context).")
    ] = 512
    tokenizer_folder: Annotated[
        str,
        doc("Folder that gets the small model's tokenizer, for clients that count tokens; none: no "
            "folder."),
    ] = ""  # fmt: skip
    start_timeout_s: SecondsOrZero = 600.0
    """How long requests wait for a worker that is missing, and a start for its workers."""
    models: ModelSettings = _flat(ModelSettings)
    listen: ListenSettings = _flat(lambda: ListenSettings(port=8000, status_port=8001))

    def check(self) -> None:
        check_fields(self)
        if self.models.model and self.tokenizer_folder:
            raise ConfigError(
                f"tokenizer_folder: is of the small model, and model is {self.models.model!r}: its "
                "tokenizer is there"
            )


@dataclass(frozen=True, slots=True)
class FrontConfig(FrontSettings):
    """`prefixkv front`, before workers that were started by hand."""

    start_timeout_s: SecondsOrZero = 30.0  # nobody may be about to start a missing worker
    workers: Annotated[str, doc("URLs of all workers, separated by commas.")] = ""
    workers_key: Annotated[
        str, doc("Bearer token that the workers need; better set by PREFIXKV_WORKERS_KEY.")
    ] = ""
    models: ModelSettings = _flat(ModelSettings, "seed", "dtype", "device", "context", "threads")

    def __post_init__(self) -> None:
        self.check()
        check_key("workers_key", self.workers_key)
        for url in without_user(self.workers).split(","):
            if not is_server(url.strip()):
                raise ConfigError(f"workers: {url!r} is no worker: http://HOST:PORT")


@dataclass(frozen=True, slots=True)
class ServeConfig(FrontSettings):
    """`prefixkv serve`. Settings of its workers that are not here are set in the files of their
    roles, or by the environment."""

    prefill: Annotated[Count, doc("Prefill workers.")] = 1
    decode: Annotated[Count, doc("Decode workers.")] = 1
    prefill_config: Annotated[
        str, doc("Settings of the prefill workers, a file as `worker prefill` reads it.")
    ] = ""
    decode_config: Annotated[str, doc("Settings of the decode workers, likewise.")] = ""
    page_size: Annotated[Count, doc("Tokens per page.")] = 16
    prefill_pages: Annotated[Count, doc("Pages of a prefill worker's pool.")] = 1024
    decode_pages: Annotated[Count, doc("Pages of a decode worker's pool.")] = 1024
    prefill_window_pages: Annotated[
        CountOrZero,
        doc("For a model with sliding windows: a prefill worker's pages of the layers that have "
            "them; 0: what requests and checkpoints need, at most as many as the pool."),
    ] = 0  # fmt: skip
    decode_window_pages: Annotated[
        CountOrZero, doc("The same of a decode worker; 0: what requests need.")
    ] = 0
    chunk_tokens: Annotated[Count, doc("Most tokens per forward of prefill.")] = 512
    checkpoints: Annotated[
        CountOrZero,
        doc("For a model with recurrent layers or windows: places in cached prefixes from which a "
            "prefill worker goes on, about one per session; 0: 16 to 256, by the pool's bytes."),
    ] = 0  # fmt: skip
    compute_below: Annotated[
        CountOrZero, doc("Most missing tokens of a prompt that decode computes itself; 0: none.")
    ] = 16384
    carry_on: Annotated[
        bool, doc("Decode workers compute whole prompts while no prefill worker answers.")
    ] = True
    host_memory: Annotated[
        str,
        doc("Host memory of a decode worker for KV that its pool cannot keep: 8GiB, or 4x (times "
            "the pool); none: it is forgotten."),
    ] = ""  # fmt: skip
    ray: Annotated[
        str,
        doc("Address of a Ray cluster that runs the workers, or auto; none: this machine."),
    ] = ""
    ray_cpus: Annotated[Count, doc("With --ray: CPUs per worker, and threads of torch.")] = 1
    ray_gpus: Annotated[Number, doc("With --ray: GPUs per worker.")] = 0.0
    ray_placement: Annotated[
        Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"],
        doc("With --ray: strategy of the workers' placement group."),
    ] = "SPREAD"

    def __post_init__(self) -> None:
        self.check()
        for one in fields_of(ServeConfig):
            is_set = getattr(self, one.name) != one.default
            if one.name.startswith("ray_") and is_set and not self.ray:
                raise ConfigError(f"{one.name}: is of --ray, which is not set")
        self.host_size()

    def host_size(self) -> dict[str, float]:
        """Return the setting of a decode worker that gives it serve's `host_memory`. Raises
        ConfigError for what is no size.

        >>> ServeConfig(host_memory="8GiB").host_size(), ServeConfig(host_memory="4x").host_size()
        ({'host_memory_num_bytes': 8589934592}, {'host_memory_times': 4.0})
        """
        if not self.host_memory:
            return {}
        number, unit = parse_size(self.host_memory) or (0.0, "")
        if not unit:
            raise ConfigError(
                f"host_memory: {self.host_memory!r} is no size: 8GiB, or 4x (times the pool)"
            )
        # The worker's settings take 0 for "not given".
        if not (number := number if unit == "x" else int(number)):
            raise ConfigError(f"host_memory: {self.host_memory!r} is none; leave it out")
        return {"host_memory_times" if unit == "x" else "host_memory_num_bytes": number}


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """`prefixkv proxy`, but for its servers."""

    servers_key: Annotated[
        str, doc("Bearer token that the servers need; better set by PREFIXKV_SERVERS_KEY.")
    ] = ""
    answer_timeout_s: Annotated[
        Seconds, doc("A server is lost after this silence, in seconds.")
    ] = 600.0
    listen: ListenSettings = _flat(lambda: ListenSettings(port=8000, status_port=8001))

    def __post_init__(self) -> None:
        check_fields(self)
        check_key("servers_key", self.servers_key)


class ServerAt(NamedTuple):
    """A server of an engine that a proxy asks at `url`, which is its name here. `at` names it for
    the other server: the address at which a prefill server's connector listens, or the name of a
    decode server's connector."""

    url: str
    at: str

    @classmethod
    def of(cls, text: str, where: str = "") -> ServerAt:
        """Parse "URL=AT". Raises ConfigError, which begins with `where`."""
        url, _, at = text.partition("=")
        if not is_server(url) or not at:
            why = "http://HOST:PORT=ADDRESS for prefill, http://HOST:PORT=NAME for decode"
            raise ConfigError(f"{where}{without_user(text)!r} is no server: {why}")
        return cls(url.rstrip("/"), at)


def check_key(setting: str, key: str) -> None:
    """Raise ConfigError for what no header carries: the line end of a file with a secret."""
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(f"{setting}: has characters that a header cannot carry")


def without_user(url: str) -> str:
    """Return what is shown of a URL that is refused: nothing before its last "@", which may be a
    password.

    >>> without_user("http://me:secret@h"), without_user("http://h:99999")
    ('...@h', 'http://h:99999')
    """
    _, user, rest = url.rpartition("@")
    return f"{user and '...@'}{rest}"


def is_server(url: str) -> bool:
    """Tell whether `url` names a server of HTTP.

    >>> [is_server(url) for url in ("http://[::1]:80/a", "http://", "http://[::", "http://a:99999")]
    [True, False, False, False]
    """
    try:
        parts = urlsplit(url)
        # A path is asked for below it, with a bearer token.
        is_named = parts.hostname and parts.port != 0 and not {*"@?#"} & {*url}
        return parts.scheme in ("http", "https") and bool(is_named)
    except ValueError:
        return False


def check_bind(host: str, api_key: str, setting: str = "host") -> None:
    """Raise ConfigError for an address that other machines reach, without a key."""
    if not api_key and not is_loopback_host(host):
        why = "may be reached by other machines: it needs api_key, or 127.0.0.1"
        raise ConfigError(f"{setting}: {host!r} {why}")


# --- workers of `prefixkv serve` ------------------------------------------------------------------

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
    process's: what `serve` has for their role, and before that what the role's own file
    (`--prefill-config`, `--decode-config`) and the environment say. A variable that `serve` has too
    is its own. `key` is what workers require. Raises ConfigError, with the place, for what `serve`
    sets, or workers cannot have."""
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
