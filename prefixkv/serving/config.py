"""Settings of workers, of `prefixkv serve` and of `prefixkv proxy`. See `settings` for where they
are set."""

# ruff: noqa: RUF009 - `_help` and `_flat` return dataclass fields
from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from prefixkv import DecodeConfig, PrefillConfig
from prefixkv.spi import ConfigError, above, at_least, check_types, check_whole

_PLACEMENTS: Final = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _flat(kind: Any, *but: str) -> Any:
    return field(default_factory=kind, metadata={"flat": True, "but": but})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may cost.

    `max_body_bytes` of a request's body. `head_timeout_s` for a request's head to come, once its
    connection is there; `body_timeout_s` for the rest. A connection without a request is closed
    after `idle_timeout_s`, one that does not read what is sent after `write_timeout_s`.
    `max_bodies_bytes` of all requests under way; where there is no room for more, the body that has
    been coming for longest is given up.
    `max_requests_per_client` are answered at once of one address, by a front or a proxy: more get
    429; 0: any number. Behind another proxy all clients have one address.
    """

    max_body_bytes: int = 16 << 20
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    max_bodies_bytes: int = 128 << 20
    max_requests_per_client: int = 1024

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, max_body_bytes=self.max_body_bytes)
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ConfigError(
                f"max_bodies_bytes is {self.max_bodies_bytes}, one body may have "
                f"{self.max_body_bytes}"
            )
        at_least(0, max_requests_per_client=self.max_requests_per_client)
        above(
            0, head_timeout_s=self.head_timeout_s, body_timeout_s=self.body_timeout_s,
            idle_timeout_s=self.idle_timeout_s, write_timeout_s=self.write_timeout_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, and how it computes."""

    model: str = _help("", "Folder with config.json, *.safetensors and tokenizer.json; none: a "
        "small model made from the seed.")  # fmt: skip
    seed: int = _help(0, "Of the small model's weights.")
    dtype: str = _help("", "float32, bfloat16 or float16; none: the model's own.")
    device: str = _help("cpu", "As torch names it.")
    context: int = _help(0, "Most tokens of a request; 0: what the model was made for.")
    threads: int = _help(0, "Of torch; 0: as torch has it.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.dtype not in ("", "float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype is {self.dtype!r}, one of float32, bfloat16, float16 is needed"
            )
        at_least(0, context=self.context, threads=self.threads, seed=self.seed)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where a process is asked, and where its health and metrics are."""

    host: str = _help("127.0.0.1", "Another than a loopback address needs an API key.")
    port: int = _help(0, "0: a free one.")
    status_host: str = _help("127.0.0.1", "Of /health and /metrics. Another than a loopback "
        "address needs an API key, which then guards /metrics.")  # fmt: skip
    status_port: int = _help(0, "0: a free one.")
    api_key: str = _help("", "What a client has to say as a bearer token. Best set by "
        "PREFIXKV_API_KEY.")  # fmt: skip
    drain_timeout_s: float = _help(30.0, "How long SIGTERM lets requests go on.")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("port", "status_port"):
            check_whole(name, getattr(self, name), 0, 65_535)
        at_least(0, drain_timeout_s=self.drain_timeout_s)
        if not self.api_key.isascii() or self.api_key != self.api_key.strip():
            raise ConfigError("api_key has characters that a header cannot carry")
        check_bind(self.host, self.api_key)
        check_bind(self.status_host, self.api_key, "status_host")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What both kinds of worker have."""

    page_size: int = _help(16, "Tokens a page.")
    num_pages: int = _help(1024, "Pages of the pool.")
    layout: Literal["layer_major", "page_major"] = _help("layer_major", "Of the pool's memory.")
    models: ModelSettings = _flat(ModelSettings)
    listen: ListenSettings = _flat(ListenSettings)
    parent: int = _help(0, "A process without which this one is killed; 0: none.")

    def __post_init__(self) -> None:
        check_types(self)
        if self.layout not in ("layer_major", "page_major"):
            raise ConfigError(f"layout is {self.layout!r}, layer_major or page_major is needed")
        at_least(1, page_size=self.page_size, num_pages=self.num_pages)


@dataclass(frozen=True, slots=True)
class PrefillWorkerConfig:
    """`prefixkv worker prefill`."""

    chunk_tokens: int = _help(512, "Most tokens of one forward.")
    worker: WorkerSettings = _flat(WorkerSettings)
    node: PrefillConfig = _flat(PrefillConfig, "model")

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class DecodeWorkerConfig:
    """`prefixkv worker decode`."""

    worker: WorkerSettings = _flat(WorkerSettings)
    node: DecodeConfig = _flat(DecodeConfig, "model")


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
    "bytes held for it": "--control-max-peer-bytes",
}
"""By field of a handshake, what a worker's command line sets it by: `ModelConfig.option_names`."""

WorkerConfig = PrefillWorkerConfig | DecodeWorkerConfig
KINDS = {"prefill": PrefillWorkerConfig, "decode": DecodeWorkerConfig}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`prefixkv serve`. Settings of its workers that are not here are set in the tables
    [workers.prefill] and [workers.decode] of its file, or by the environment."""

    prefill: int = _help(1, "Prefill workers.")
    decode: int = _help(1, "Decode workers.")
    served_name: str = _help("", "What clients call the model; none: its folder's name.")
    page_size: int = _help(16, "Tokens a page.")
    prefill_pages: int = _help(1024, "Pages of a prefill worker's pool.")
    decode_pages: int = _help(1024, "Pages of a decode worker's pool.")
    chunk_tokens: int = _help(512, "Most tokens of one forward of prefill.")
    answer_tokens: int = _help(512, "Most tokens of a chat's answer whose request does not say; 0: "
        "as many as there is room for.")  # fmt: skip
    start_timeout_s: float = _help(600.0, "How long workers may take to start.")
    ray: str = _help("", "Address of a cluster of Ray's, or auto: workers are actors there. None: "
        "processes of this machine.")  # fmt: skip
    ray_cpus: int = _help(1, "With --ray: CPUs that a worker takes, and threads of torch.")
    ray_gpus: float = _help(0.0, "With --ray: GPUs that a worker takes.")
    ray_placement: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = _help("SPREAD",
        "With --ray: on which nodes workers are, as a placement group has it.")  # fmt: skip
    models: ModelSettings = _flat(ModelSettings)
    listen: ListenSettings = _flat(lambda: ListenSettings(port=8000, status_port=8001))

    def __post_init__(self) -> None:
        check_types(self)
        at_least(1, prefill=self.prefill, decode=self.decode, page_size=self.page_size)
        at_least(1, prefill_pages=self.prefill_pages, decode_pages=self.decode_pages)
        at_least(1, chunk_tokens=self.chunk_tokens)
        at_least(0, start_timeout_s=self.start_timeout_s, answer_tokens=self.answer_tokens)
        at_least(1, ray_cpus=self.ray_cpus)
        at_least(0, ray_gpus=self.ray_gpus)
        if self.ray_placement not in _PLACEMENTS:
            raise ConfigError(
                f"ray_placement is {self.ray_placement!r}, one of {', '.join(_PLACEMENTS)} is "
                "needed"
            )


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """`prefixkv proxy`, but for its servers."""

    servers_key: str = _help("", "What the servers want to hear as a bearer token. Best set by "
        "PREFIXKV_SERVERS_KEY.")  # fmt: skip
    answer_timeout_s: float = _help(600.0, "A server that is silent for so long is lost.")
    listen: ListenSettings = _flat(lambda: ListenSettings(port=8000, status_port=8001))

    def __post_init__(self) -> None:
        check_types(self)
        above(0, answer_timeout_s=self.answer_timeout_s)


@dataclass(frozen=True, slots=True)
class ServerAt:
    """A server of an engine that a proxy asks.

    `url` is where it takes HTTP. `at` is what the other server is told of it: of a prefill server
    the address at which its connector listens, of a decode server its connector's name.
    """

    url: str
    at: str

    @classmethod
    def of(cls, text: str) -> ServerAt:
        """From "URL=AT". Raises ConfigError."""
        url, _, at = text.partition("=")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or not at:
            raise ConfigError(
                f"{text!r} is no server: http://HOST:PORT=ADDRESS for prefill, "
                "http://HOST:PORT=NAME for decode"
            )
        return cls(url.rstrip("/"), at)

    @property
    def name(self) -> str:
        """In logs and metrics."""
        return self.url


def check_bind(host: str, api_key: str, what: str = "host") -> None:
    """Raises ConfigError for an address that others reach, without a key."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"{what} is {host!r}, which other machines may reach: it needs api_key, or 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
