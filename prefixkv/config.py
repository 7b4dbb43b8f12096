"""Every setting, frozen and checked where it is made. Times are seconds, `*_tokens` tokens,
`*_bytes` bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from prefixkv.addresses import check_address
from prefixkv.cache.eviction.policy import Policy
from prefixkv.errors import ConfigError
from prefixkv.settings import above, at_least, check_kind, check_types


def _at_least(config: object, bound: float, *names: str) -> None:
    at_least(bound, **{name: getattr(config, name) for name in names})


def _above(config: object, bound: float, *names: str) -> None:
    above(bound, **{name: getattr(config, name) for name in names})


def _at_most(value: float, bound: float, name: str, other: str) -> None:
    """Raise ConfigError for a setting that contradicts another one."""
    if value > bound:
        raise ConfigError(f"{name} is {value}, it has to be at most {other}, {bound}")


def _one_of(config: object, allowed: tuple[str, ...], *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(f"{name} is {value!r}, one of {', '.join(allowed)} is needed")


Backend = Literal["auto", "nixl", "shm"]

MAX_VERSION_CHARS = 256
"""Characters of a weights version: it travels with each promise."""


def check_version(version: str) -> str:
    """A weights version. Raises ConfigError for what is none, or one that is too long."""
    check_kind("weights_version", version, str)
    if not version.isprintable():
        raise ConfigError(f"weights_version is {version!r}, characters that print are needed")
    if len(version) > MAX_VERSION_CHARS:
        raise ConfigError(
            f"weights_version has {len(version)} characters, {MAX_VERSION_CHARS} is the most"
        )
    return version


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What KV bytes depend on and a pool's shape does not tell. Both sides must agree on `model`
    and `kv_scales`, and on `weights_version`, at most 256 characters, for each request: it is the
    version to begin with, which `flush(weights_version=)` moves.

    `option_names` says what the engine's user sets a field of the handshake by, as
    `{"page_size": "--block-size"}`: a refusal names it. It is not compared.
    """

    model: str = "unnamed"
    weights_version: str = "0"
    kv_scales: str = "none"
    option_names: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        check_types(self)
        check_version(self.weights_version)
        check_kind("option_names", self.option_names, Mapping)


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """CURVE keys, z85 text. A server (prefill) takes the clients whose public key `allowed_clients`
    maps to a name, that of the worker for all its ranks; a client (decode) needs the `server_key`
    of every prefill worker it talks to.
    """

    public_key: str
    secret_key: str
    server_key: str = ""
    allowed_clients: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_kind("allowed_clients", self.allowed_clients, Mapping)
        keys = {"public_key": self.public_key, "secret_key": self.secret_key}
        if self.server_key:
            keys["server_key"] = self.server_key
        for name, key in keys.items():
            if len(key) != 40:
                raise ConfigError(f"{name} has {len(key)} characters, a z85 key has 40")


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Timing and bounds of the control plane.

    A deadline ends a wait with an error. It never frees a page that a peer may still write: a room
    whose `drain_timeout_s` has passed is quarantined, and its pages come back on proof only.
    What waits for a prefill worker at whose address nobody answers fails after `connect_timeout_s`.
    `bootstrap_timeout_s` is for the handshake and the promise, `waiting_timeout_s` for the first
    chunk, `transfer_timeout_s` for the next. These three count from when the peer was last heard: a
    wait in a queue of a peer that is there ends with the request's own `deadline_s`, or after
    `longest_wait_s` (the timeout itself, where that is more). A write that is in flight has
    `transfer_timeout_s` in any case. After a fence, what the dead writer's kernel still holds is
    read for `fence_settle_s` before its pages are used again (0 where writes bypass the kernels, as
    RDMA's do).
    With `prove_death` a peer on this machine that the kernel proves dead is fenced unasked.
    On prefill `max_peer_bytes` is what is held for one decode worker, of all its ranks: rooms, page
    ids, what it introduced itself with.
    """

    heartbeat_s: float = 1.0
    suspect_after_s: float = 5.0
    forget_after_s: float = 60.0
    resend_s: float = 0.25
    connect_timeout_s: float = 1.0
    bootstrap_timeout_s: float = 30.0
    waiting_timeout_s: float = 120.0
    transfer_timeout_s: float = 60.0
    longest_wait_s: float = 600.0
    ack_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    parked_timeout_s: float = 30.0
    fence_settle_s: float = 0.5
    prove_death: bool = True
    max_parked_per_peer: int = 1024
    max_peers: int = 1024
    max_peer_bytes: int = 32 << 20
    max_queued_frames: int = 2_000
    max_aux_bytes: int = 64 << 10
    curve: CurveConfig | None = None
    allow_remote_without_keys: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.curve is not None:
            check_kind("curve", self.curve, CurveConfig)
        _above(
            self, 0, "heartbeat_s", "suspect_after_s", "forget_after_s", "resend_s",
            "connect_timeout_s", "bootstrap_timeout_s", "waiting_timeout_s",
            "transfer_timeout_s", "longest_wait_s", "ack_timeout_s", "drain_timeout_s",
            "parked_timeout_s",
        )  # fmt: skip
        _at_least(self, 1, "max_parked_per_peer", "max_peers", "max_queued_frames")
        _at_least(self, 1, "max_peer_bytes")
        _at_least(self, 0, "max_aux_bytes", "fence_settle_s")
        if self.suspect_after_s <= self.heartbeat_s:
            raise ConfigError(
                f"suspect_after_s is {self.suspect_after_s}, it has to be above heartbeat_s, "
                f"{self.heartbeat_s}"
            )
        # A peer is suspect before it is forgotten, and what is lost once is said again in time.
        _at_most(self.suspect_after_s, self.forget_after_s, "suspect_after_s", "forget_after_s")
        for name in ("bootstrap_timeout_s", "ack_timeout_s"):
            _at_most(self.resend_s, getattr(self, name), "resend_s", name)


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How the transport thread posts and polls.

    A post is at most `post_bytes` and `post_descriptors`; at most `window` posts are in flight a
    peer. Over shared memory a post is a copy that the thread makes itself, 1 ms for 8 MiB; each
    costs about 50 us besides. With work outstanding an empty poll spins `spin_s` in all, then
    sleeps `sleep_s`, later `idle_sleep_s`, and up to 25 times as long as the quiet goes on, sooner
    where it only receives. When an agent is replaced, so that what failed there cannot land any
    more, its other posts have `renew_grace_s` to end.

    With `staging_bytes` on both sides, slices of heads (tensor parallelism that differs) are
    gathered, written whole and scattered, in leases of at most `lease_bytes` of the decode rank's
    memory; a prefill rank has `staging_bytes // lease_bytes` slots. With two of each, copies and
    writes overlap; what a lease costs besides them is the same for any size. At most
    `staging_window` leases of a room and pair are under way, `copy_threads` copy. 0 bytes: slices
    are written one by one, straight into pages.

    `interface` names the network that KV travels on, as UCX calls it: "eth0", or several,
    "eth0,mlx5_0:1". "": the loopback interface, for peers on this machine. What the environment
    sets in UCX_NET_DEVICES goes before it. `trial_peers`: a prefill rank loads a peer's NIXL
    metadata in a child process first (40 MiB), which may die of it; without it, it is only checked
    as far as its form is known.

    `backend`: "nixl"; "shm", which copies into memory of the peer's that is mapped, for two workers
    of one user on one host, with decode's pool and state made with `shared=True`; or "auto": shm
    where both sides can, else NIXL. `nixl_backends` are those that NIXL's agent is made with, UCX
    the first of them.
    """

    post_bytes: int = 8 << 20
    post_descriptors: int = 1024
    window: int = 8
    spin_s: float = 50e-6
    sleep_s: float = 30e-6
    idle_sleep_s: float = 200e-6
    renew_grace_s: float = 2.0
    staging_bytes: int = 0
    lease_bytes: int = 16 << 20
    staging_window: int = 4
    copy_threads: int = 1
    interface: str = ""
    trial_peers: bool = True
    backend: Backend = "nixl"
    nixl_backends: tuple[str, ...] = ("UCX",)

    def __post_init__(self) -> None:
        check_types(self)
        _at_least(self, 1, "post_bytes", "post_descriptors", "window")
        _at_least(self, 1, "lease_bytes", "staging_window", "copy_threads")
        _at_least(self, 0, "staging_bytes")
        if self.staging_bytes and self.staging_bytes < self.lease_bytes:
            raise ConfigError(
                f"staging_bytes is {self.staging_bytes}, a lease alone takes {self.lease_bytes}"
            )
        _at_least(self, 0, "spin_s", "sleep_s", "idle_sleep_s", "renew_grace_s")
        _one_of(self, ("auto", "nixl", "shm"), "backend")
        names = self.nixl_backends
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"nixl_backends is {names!r}, a tuple of names is needed")
        if names[:1] != ("UCX",) or len(set(names)) < len(names):
            raise ConfigError(f'nixl_backends is {names!r}, must begin with "UCX", each name once')
        if self.interface and not re.fullmatch(r"[^\s,=]+(,[^\s,=]+)*", self.interface):
            raise ConfigError(
                f'interface is {self.interface!r}, names with commas between are needed: "eth0"'
            )


class PageSettings(TypedDict, total=False):
    """What a `PageManager` may be made with besides its sizes."""

    caching: bool
    policy: str | Policy
    evict_reserve_pages: int
    num_slots: int


class Retarget(Protocol):
    """A function that says where a request whose transfer failed goes next; None: where it went."""

    def __call__(self, req: Any, error: Exception) -> str | None: ...


class Admission(Protocol):
    """An `AdmissionPolicy` (decode/admission.py)."""

    name: str
    overtakes: bool

    def rank(self, req: Any, new_pages: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Cache events for routers, in the words of other engines (`docs/fleet.md`).

    Three sockets bind: a PUB for events, a ROUTER that repeats those from a number on, a ROUTER
    that says what there is. "" turns the last two off, a port of `*` takes a free one. Events carry
    the tokens of prompts, and whoever reaches the ports can read them: another address than a
    loopback one is for a network that is isolated, and is warned of.

    `topic`: "" is "kv@" + the worker's name + "@" + `ModelConfig.model`. `medium` is where the KV
    is, in the dialect's words. `dp_rank` is the data-parallel rank that events name.

    Of what was published, at most `keep_batches` and `keep_bytes` are kept to be repeated. A
    subscriber that does not read has at most `queue_batches` waiting; it misses what is beyond, and
    sees that by the numbers. One that is `queue_bytes` behind is cut off, and comes back. Snapshots
    and repeats that were not read are at most as many bytes, of all clients; the next is made when
    there is room. After `heartbeat_s` without events an empty batch is published, so
    that the last events cannot be missed unseen. What waits for the publisher's thread is at most
    `max_behind_pages`; beyond, it begins afresh.

    With `epoch_frames` the number's frame goes on with 16 bytes that name this life of the worker,
    as llm-d's recovery by snapshots wants them. Dynamo refuses such frames.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = "tcp://127.0.0.1:5558"
    snapshot_endpoint: str = "tcp://127.0.0.1:5559"
    topic: str = ""
    dialect: Literal["vllm", "sglang"] = "vllm"
    medium: str = "GPU"
    dp_rank: int = 0
    keep_batches: int = 10_000
    keep_bytes: int = 64 << 20
    queue_batches: int = 10_000
    queue_bytes: int = 64 << 20
    heartbeat_s: float = 1.0
    max_behind_pages: int = 1 << 20
    epoch_frames: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _one_of(self, ("vllm", "sglang"), "dialect")
        _at_least(self, 0, "dp_rank", "keep_batches", "keep_bytes")
        _at_least(self, 1, "queue_batches", "queue_bytes", "max_behind_pages")
        _above(self, 0, "heartbeat_s")
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            address = getattr(self, name)
            try:
                if address or name == "endpoint":
                    check_address(address)
            except ValueError as error:
                raise ConfigError(f"{name} is {address!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A decode worker.

    `max_running` requests hold a row of the page table at once (in transfer or running).
    `reserve_tokens` is the room kept for each request's output before it is admitted. `cache=False`
    turns the prefix cache off: nothing is matched, nothing kept.

    `policy` says which cached pages are evicted first: a name, or a `Policy` with settings of its
    own (`Adaptive(trust=20)`), which serves one cache; ranks need a name. `admission` says which
    request is admitted first: "hit_aware", "fifo", "priority", a registered name, or an
    `AdmissionPolicy`. A request that has waited `patience_s` is overtaken by nothing, unless it
    steps aside since nothing that runs can make room for it. One without a `deadline_s` that is
    not admitted within `waiting_timeout_s` fails, and prefill is told. None:
    `control.longest_wait_s`, since prefill waits no longer either; more is refused.

    Where pages are evicted, `evict_reserve` of the pool is beyond what is missing: at 1/256 the new
    pages of a request form a third of the runs, for 0.1 points of hit rate
    (`benchmarks/eviction_reserve.py`). 0: exactly what is missing.

    While several prefill workers are ready, each has at most `prefill_share` of the pool promised
    to it or held for it: one that never proves the end of its writes does not get it all. 1: no
    bound.

    A request whose transfer fails is asked for again `max_retries` times (None: once where
    `failure_policy` is "retry", else never). Before each, `retarget(req, error)` may name the
    address of another prefill worker; `req` is the DecodeRequest, `req.prefill` where it failed.

    `record` names a file to which the node writes its traffic for `prefixkv replay`, as salted
    hashes (runtime/record.py): at most `record_files` of at most `record_bytes`. None: nothing is
    written.

    `kv_events` publishes what the prefix cache does, for routers; None: not.
    """

    name: str = "decode-0"
    max_running: int = 256
    reserve_tokens: int = 128
    cache: bool = True
    policy: str | Policy = "adaptive"
    admission: str | Admission = "hit_aware"
    patience_s: float = 5.0
    waiting_timeout_s: float | None = None
    evict_reserve: float = 1 / 256
    prefill_share: float = 0.5
    record: str | Path | None = None
    record_bytes: int = 64 << 20
    record_files: int = 4
    failure_policy: Literal["fail", "retry"] = "fail"
    max_retries: int | None = None
    retarget: Retarget | None = None
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = None

    def __post_init__(self) -> None:
        _check_worker(self)
        _at_least(self, 0, "reserve_tokens", "patience_s", "evict_reserve", "prefill_share")
        for name in ("evict_reserve", "prefill_share"):
            if getattr(self, name) > 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, it is a part of the pool: at most 1"
                )
        if self.record is not None and (
            not isinstance(self.record, str | Path) or not str(self.record)
        ):
            raise ConfigError(f"record is {self.record!r}, a path or None is needed")
        _at_least(self, 4096, "record_bytes")
        _at_least(self, 1, "record_files")
        if self.waiting_timeout_s is not None:
            _above(self, 0, "waiting_timeout_s")
            # Prefill has given a request up by then, so its pages would be taken for nothing.
            _at_most(self.waiting_timeout_s, self.control.longest_wait_s,
                     "waiting_timeout_s", "control.longest_wait_s")  # fmt: skip
        _one_of(self, ("fail", "retry"), "failure_policy")
        if self.max_retries is not None:
            _at_least(self, 0, "max_retries")
        if self.retarget is not None and not callable(self.retarget):
            raise ConfigError(f"retarget is {self.retarget!r}, a function is needed")

    def for_books(self, num_pages: int, num_slots: int = 0) -> PageSettings:
        """What a `PageManager` is made with besides their sizes, alike on every rank."""
        return {
            "caching": self.cache,
            "policy": self.policy,
            "evict_reserve_pages": int(self.evict_reserve * num_pages),
            "num_slots": num_slots,
        }

    @property
    def num_retries(self) -> int:
        """`max_retries` as a number."""
        if self.max_retries is None:
            return int(self.failure_policy == "retry")
        return self.max_retries

    @property
    def admission_patience_s(self) -> float:
        """`patience_s`, but at most half of the time that a request may wait: else one that fits
        might be overtaken until it fails."""
        return min(self.patience_s, self.admission_wait_s / 2)

    @property
    def admission_wait_s(self) -> float:
        """`waiting_timeout_s` as a number."""
        if self.waiting_timeout_s is None:
            return self.control.longest_wait_s
        return self.waiting_timeout_s


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker. `bind` is its ROUTER's address; a port of `*` takes a free one.

    A request whose prefix another computes waits for it, but not once nothing has been computed for
    `follow_s`; 0: each computes its own. `kv_events` as on decode; of several ranks the first
    publishes.
    """

    name: str = "prefill-0"
    bind: str = "tcp://127.0.0.1:*"
    max_running: int = 256
    cache: bool = True
    policy: str | Policy = "adaptive"
    follow_s: float = 1.0
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = None

    def __post_init__(self) -> None:
        _check_worker(self)
        _at_least(self, 0, "follow_s")
        # Decode waits no longer for the first chunk.
        _at_most(self.follow_s, self.control.longest_wait_s, "follow_s", "control.longest_wait_s")


def _check_worker(config: DecodeConfig | PrefillConfig) -> None:
    """What the settings of both workers have in common."""
    check_types(config)
    check_kind("model", config.model, ModelConfig)
    check_kind("control", config.control, ControlConfig)
    check_kind("transport", config.transport, TransportConfig)
    if config.kv_events is not None:
        check_kind("kv_events", config.kv_events, KVEventsConfig)
    _at_least(config, 1, "max_running")
    if not 1 <= len(config.name) <= 256:
        raise ConfigError(f"name has {len(config.name)} characters, 1 to 256 are needed")
