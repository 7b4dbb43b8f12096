"""The settings of the library, as `settings.py` describes such classes.

Times are seconds, `*_tokens` tokens, `*_bytes` bytes, a `Share` is a part of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, TypedDict

from msgspec import Meta

from prefixkv.addresses import check_address
from prefixkv.admission import Admission, explain_admission
from prefixkv.cache.eviction.policy import Policy, explain_policy
from prefixkv.errors import ConfigError, shown
from prefixkv.settings import (
    MAX_BYTES,
    MAX_COUNT,
    Bytes,
    BytesOrZero,
    Count,
    CountOrZero,
    Number,
    Seconds,
    SecondsOrZero,
    Share,
    check_fields,
    check_kind,
    check_order,
    doc,
)

Backend = Literal["auto", "nixl", "shm"]

Z85Key = Annotated[str, Meta(min_length=40, max_length=40)]
Name = Annotated[
    str, Meta(min_length=1, max_length=256), doc("Unique per worker, kept over restarts.")
]
PolicyName = Annotated[str | Policy, doc("Eviction policy: which cached pages go first.")]
MaxRunning = Annotated[Count, doc("Requests that hold pages at once.")]

# Pauses between empty polls at `polling` 1: short ones first, for latency, longer ones once it has
# been quiet, for processor time.
_SPIN_S: Final = 50e-6
_SLEEP_S: Final = 30e-6
_IDLE_SLEEP_S: Final = 200e-6

MOST_LOADS: Final = 64
"""Loads from host memory that are under way at once, at most: each has a spare row of the page
table."""

MAX_VERSION_CHARS = 256
"""Characters of a weights version: it travels with each promise."""


def check_version(version: str) -> str:
    """Return a configured weights version. Raises ConfigError for one that is too long, or does not
    print."""
    check_kind("weights_version", version, str)
    if not version.isprintable():
        raise ConfigError(f"weights_version: {version!r} has characters that do not print")
    if len(version) > MAX_VERSION_CHARS:
        raise ConfigError(
            f"weights_version: has {len(version)} characters, more than {MAX_VERSION_CHARS}"
        )
    return version


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Identity of a model's KV, beyond the shape of its pool.

    Both sides must agree on `model` and `kv_scales`, and for each request on `weights_version`. A
    node begins with that version, and `flush(weights_version=)` moves it. `option_names` maps a
    field of the handshake to the engine's option for it, `{"page_size": "--block-size"}`: a refusal
    names the option. It is not compared.
    """

    model: str = "unnamed"
    weights_version: Annotated[str, Meta(max_length=MAX_VERSION_CHARS)] = "0"
    kv_scales: str = "none"
    option_names: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_version(self.weights_version)


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """CURVE keys of the control plane, as z85 text of 40 characters.

    A server (prefill) accepts the clients in `allowed_clients`, which maps a public key to the name
    of a worker, for all its ranks. A client (decode) needs the `server_key` of its prefill workers.
    """

    public_key: Z85Key
    secret_key: Z85Key
    server_key: Annotated[str, Meta(max_length=40)] = ""
    allowed_clients: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.server_key) not in (0, 40):
            raise ConfigError(f"server_key: has {len(self.server_key)} characters, fewer than 40")


def short_key(key: str) -> str:
    """Return a public key as logs and errors name it.

    >>> short_key("Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID")
    'Yne@$w-v...'
    """
    return f"{key[:8]}..."


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """Timing and bounds of the control plane.

    A deadline ends a wait with an error. It never frees a page that a peer may still write: a room
    whose `drain_timeout_s` has passed is quarantined, and its pages come back on proof only.

    A request fails after `connect_timeout_s` if its prefill worker's address does not answer.
    `bootstrap_timeout_s` is for the handshake and the promise, `waiting_timeout_s` for the first
    chunk, `transfer_timeout_s` for the next. These three count from when the peer was last heard: a
    wait in the queue of a peer that answers ends with the request's own `deadline_s`, or after
    `longest_wait_s` (the timeout itself, where that is more). A write that is in flight has
    `transfer_timeout_s` in any case.

    After a fence, bytes that the kernel still holds of the dead writer are read for
    `fence_settle_s` before its pages are used again (0 where writes bypass the kernels, as RDMA's
    do). With `prove_death` a peer on this machine is fenced as soon as the kernel proves it dead.
    On prefill `max_peer_bytes` bounds the rooms, page ids and introductions held for one decode
    worker, all its ranks together.
    """

    heartbeat_s: Seconds = 1.0
    suspect_after_s: Seconds = 5.0
    forget_after_s: Seconds = 60.0
    resend_s: Seconds = 0.25
    connect_timeout_s: Seconds = 1.0
    bootstrap_timeout_s: Seconds = 30.0
    waiting_timeout_s: Seconds = 120.0
    transfer_timeout_s: Seconds = 60.0
    longest_wait_s: Seconds = 600.0
    ack_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 30.0
    parked_timeout_s: Seconds = 30.0
    fence_settle_s: SecondsOrZero = 0.5
    prove_death: bool = True
    max_parked_per_peer: Count = 1024
    max_peers: Count = 1024
    max_peer_bytes: Bytes = 32 << 20
    max_queued_frames: Count = 2_000
    max_aux_bytes: BytesOrZero = 64 << 10
    curve: CurveConfig | None = None
    allow_remote_without_keys: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.suspect_after_s <= self.heartbeat_s:
            raise ConfigError(
                f"suspect_after_s: {self.suspect_after_s} is not above heartbeat_s, "
                f"{self.heartbeat_s}"
            )
        # A peer is suspect before it is forgotten, and what is lost once is said again in time.
        check_order(self, "suspect_after_s", "forget_after_s")
        check_order(self, "resend_s", "bootstrap_timeout_s")
        check_order(self, "resend_s", "ack_timeout_s")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Posts, polls and staging memory of the transport thread.

    A post is at most `post_bytes` and `post_descriptors`; at most `window` posts per peer are in
    flight. Over shared memory the thread makes a post's copy itself. With work outstanding, empty
    polls spin for `spin_s`, then sleep for `sleep_s`, later for `idle_sleep_s`, and up to 25 times
    as long the longer it is quiet. `polling` multiplies these pauses: above 1 costs latency and
    saves processor time, 0 never sleeps. When an agent is replaced, so that its failed writes can
    no longer land, its other posts have `renew_grace_s` to end.

    With `staging_bytes` on both sides, slices of heads (tensor parallelism that differs) are
    gathered, written whole and scattered, in leases of at most `lease_bytes` of the decode rank's
    memory, by `copy_threads`. A prefill rank has `staging_bytes // lease_bytes` slots; with two of
    them, copies and writes overlap. 0 bytes: slices are written one by one, straight into pages.

    `interface` names the network that KV travels on, as UCX calls it: "eth0", or several,
    "eth0,mlx5_0:1". "": the loopback interface, for peers on this machine. UCX_NET_DEVICES in the
    environment overrides it. With `trial_peers` a prefill rank first loads a peer's NIXL metadata
    in a child process (40 MiB), which may die of it; without, only the known parts of the metadata
    are checked.

    `backend`: "nixl"; "shm", which copies into mapped memory of the peer, for two workers of one
    user on one host, with decode's pool and state made with `shared=True`; or "auto": shm where
    both sides can, else NIXL.

    `max_bytes_per_s` bounds what this rank sends, to all its peers together, so that KV leaves room
    for other traffic of its network: a token bucket over parts of 2 ms, or 64 KiB if that is more.
    A room has to arrive within its deadline at this rate, too. 0: as fast as the network takes it.
    """

    post_bytes: Bytes = 8 << 20
    post_descriptors: Count = 1024
    window: Count = 8
    polling: Number = 1.0
    renew_grace_s: SecondsOrZero = 2.0
    staging_bytes: Annotated[
        BytesOrZero, doc("Memory for slices of heads, where tensor-parallel sizes differ.")
    ] = 0
    lease_bytes: Bytes = 16 << 20
    copy_threads: Count = 1
    interface: Annotated[str, doc('Network that KV travels on, "eth0"; none: this machine.')] = ""
    trial_peers: bool = True
    backend: Annotated[Backend, doc("nixl, shm (memory of this host), or auto.")] = "nixl"
    max_bytes_per_s: Annotated[
        BytesOrZero, doc("Most bytes of KV sent per second, to all peers together; 0: no limit.")
    ] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.staging_bytes and self.staging_bytes < self.lease_bytes:
            raise ConfigError(
                f"staging_bytes: {self.staging_bytes} is below lease_bytes, {self.lease_bytes}"
            )
        if self.interface and not re.fullmatch(r"[^\s,=]+(,[^\s,=]+)*", self.interface):
            raise ConfigError(
                f"interface: {self.interface!r} is not a list of names with commas between, "
                '"eth0,eth1"'
            )

    @property
    def spin_s(self) -> float:
        """Time for which, by its config, the transport's empty polls follow each other without a
        sleep."""
        return _SPIN_S * self.polling

    @property
    def sleep_s(self) -> float:
        """Sleep between two polls that the config gives the transport once it has spun for
        `spin_s`."""
        return _SLEEP_S * self.polling

    @property
    def idle_sleep_s(self) -> float:
        """The shortest sleep that the config gives the transport once it has been quiet for
        longer."""
        return _IDLE_SLEEP_S * self.polling


class PageSettings(TypedDict, total=False):
    """Arguments of a `PageManager` besides its sizes."""

    caching: bool
    policy: str | Policy
    evict_reserve_pages: int
    num_slots: int
    reserved_pages: int
    spare_rows: int
    num_checkpoints: int


def check_reserved(reserved_pages: int, num_pages: int) -> int:
    """Return the reserved pages of a configured worker. Raises ConfigError if its pool of
    `num_pages` has no others."""
    if reserved_pages >= num_pages:
        raise ConfigError(f"reserved_pages: {reserved_pages} leaves none of {num_pages} pages")
    return reserved_pages


class Retarget(Protocol):
    """Choose the prefill worker for a request whose transfer failed; None: the one before."""

    def __call__(self, req: Any, error: Exception) -> str | None: ...


def _check_names(policy: str | Policy, admission: str | Admission = "fifo") -> None:
    """Raise ConfigError, with the nearest name, if a worker's config names an eviction or admission
    policy that is not registered."""
    for setting, given in (("policy", policy), ("admission", admission)):
        # Both look like what is meant, and an object is what a node needs.
        if isinstance(given, type):
            name = given.__name__
            raise ConfigError(f"{setting}: {name} is a class, give an object: {name}()")
        module, colon, name = given.partition(":") if isinstance(given, str) else ("", "", "")
        if colon and name.isidentifier():
            raise ConfigError(
                f"{setting}: {given!r} names a class, as for prefixkv replay; give an object: "
                f"{name}(), of module {module}"
            )
    if isinstance(policy, str) and (why := explain_policy(policy)):
        raise ConfigError(f"policy: {why}")
    if isinstance(admission, str) and (why := explain_admission(admission)):
        raise ConfigError(f"admission: {why}")


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Cache events for routers, in vLLM's format (`docs/fleet.md`).

    Three sockets bind: a PUB for events, a ROUTER that repeats events from a number on, a ROUTER
    that sends snapshots. "" turns the last two off, a port of `*` takes a free one. Events carry
    the tokens of prompts, and every client of the ports can read them: an address beyond loopback
    belongs on an isolated network, and is warned of.

    `topic`: "" is "kv@" + the worker's name + "@" + `ModelConfig.model`. `medium` names the kind of
    memory in the format's terms. `dp_rank` is the data-parallel rank that events name.

    The last `keep_batches` and `keep_bytes` are kept to be repeated. A subscriber that is 10,000
    batches behind loses events, and sees a gap in the numbers; one that is `queue_bytes` behind is
    cut off, and comes back. `queue_bytes` also bounds the unread snapshots and repeats of all
    clients together; the next one is made when there is room. After `heartbeat_s` without events an
    empty batch is published, so that a loss of the last events is seen. At most `max_backlog_pages`
    wait for the publisher's thread; beyond, it starts over with a snapshot.

    With `checkpoint_blocks` a worker that goes on from checkpoints alone tells where they are, as
    blocks of a group of their own.

    With `epoch_frames` the number's frame is followed by 16 bytes that name this life of the
    worker, for llm-d's recovery by snapshots. Dynamo refuses such frames.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str = "tcp://127.0.0.1:5558"
    snapshot_endpoint: str = "tcp://127.0.0.1:5559"
    topic: str = ""
    medium: str = "GPU"
    dp_rank: CountOrZero = 0
    keep_batches: CountOrZero = 10_000
    keep_bytes: BytesOrZero = 64 << 20
    queue_bytes: Bytes = 64 << 20
    heartbeat_s: Seconds = 1.0
    max_backlog_pages: Count = 1 << 20
    epoch_frames: bool = False
    checkpoint_blocks: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            address = getattr(self, name)
            try:
                if address or name == "endpoint":
                    check_address(address)
            except ValueError as error:
                raise ConfigError(f"{name}: {address!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Prompts that a decode worker's engine computes itself (`DecodeNode.pop_local`).

    A request that lacks at most `below` tokens may be computed here: `decode/sources.py` has the
    rule. With `DecodeConfig.failure_policy` "local", one whose prefill worker cannot be asked is
    computed here where it lacks at most `down_below` tokens.

    A step computes at most `chunk_tokens` of prompts. Beside requests that run, it computes no more
    than makes their step longer by `itl_share` of it. Where even 8 tokens make it longer than that,
    only some steps compute them: all together get no longer than by that share.

    `ask`: the engine submits a request to both sides at once ("both"), so that prefill has to be
    told where it is computed here; or it waits until `pop_needs_prefill` returns it ("late").
    """

    below: Annotated[
        CountOrZero, doc("Most missing tokens of a prompt that decode computes itself.")
    ] = 16384
    down_below: Annotated[
        CountOrZero, doc("The same where prefill is down and failure_policy is local.")
    ] = MAX_COUNT
    chunk_tokens: Annotated[Count, doc("Most tokens of prompts per step of decode.")] = 256
    itl_share: Annotated[
        Annotated[float, Meta(gt=0, le=100)],
        doc("Longest addition of such tokens to a step, as a part of it."),
    ] = 0.5
    ask: Literal["both", "late"] = "both"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Host memory in which a decode worker keeps what its pool cannot: `times` the size of the
    pool, or `num_bytes` on each rank, or `num_pages` pages. The last two exclude each other.

    Less than twice the pool is of little use, since what is in the pool is there as well. `policy`
    chooses the pages that are evicted there first, as `DecodeConfig.policy` does in the pool; None:
    the same, with a name.

    Kept are the layers whose pages have the pool's ids: the first ones, and aligned groups. Windows
    and extra state are sent with each prompt.

    `copy_threads` copy between both, in pieces of at most `piece_bytes` (0: 4 MiB, on a GPU 16 MiB,
    where each costs a launch); loads go before writes.
    """

    times: Annotated[
        Annotated[float, Meta(gt=0, le=1000)],
        doc("Host memory for KV that the pool cannot keep, by the pool's size."),
    ] = 4.0
    num_bytes: Annotated[BytesOrZero, doc("The same in bytes on each rank; 0: by times.")] = 0
    num_pages: Annotated[CountOrZero, doc("The same in pages; 0: by times.")] = 0
    policy: Annotated[
        str | Policy | None, doc("Eviction policy of host memory; none: that of the pool.")
    ] = None
    copy_threads: Annotated[Count, doc("Threads that copy to and from host memory.")] = 2
    piece_bytes: Annotated[
        BytesOrZero, doc("Largest piece of a copy; 0: 4 MiB, on a GPU 16 MiB.")
    ] = 0

    def __post_init__(self) -> None:
        if self.policy is not None:
            _check_names(self.policy)
        check_fields(self)
        if self.num_bytes and self.num_pages:
            raise ConfigError(
                f"num_pages: is {self.num_pages}, and num_bytes {self.num_bytes}; give one of them"
            )

    def pages_of(self, pool_pages: int, page_bytes: int) -> int:
        """Return how many pages the configured host memory has, for a pool of `pool_pages`, each of
        `page_bytes` on this rank. Raises ConfigError for none."""
        if self.num_pages:
            return self.num_pages
        if not self.num_bytes:
            return max(1, int(self.times * pool_pages))
        if self.num_bytes < page_bytes:
            raise ConfigError(
                f"host_memory: num_bytes is {self.num_bytes}, a page has {page_bytes} bytes"
            )
        return self.num_bytes // page_bytes


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A decode worker.

    `max_running` requests hold a row of the page table at once (in transfer or running).
    `reserve_tokens` is the space kept for each request's output before it is admitted.
    `cache=False` turns the prefix cache off: nothing is matched, nothing kept.

    `policy` chooses the cached pages that are evicted first: a registered name, or a `Policy` with
    settings of its own (`Adaptive(trust=20)`), which serves one cache.
    `admission` chooses the request that is admitted first: "hit_aware", "fifo", "priority", a
    registered name, or an `AdmissionPolicy`. No other overtakes a request that has waited
    `patience_s`, unless that steps aside because the running ones cannot make room for it. A
    request without a `deadline_s` that is not admitted within `waiting_timeout_s` fails, and
    prefill is told. None: `control.longest_wait_s`, the most that is allowed, since prefill waits
    no longer either.

    The first `reserved_pages` of the pool are the engine's: no request gets them. A padded batch
    writes its padding there.

    An eviction frees `evict_reserve` of the pool beyond the missing pages, so that new pages lie
    together; 0: only the missing ones.

    While several prefill workers are ready, at most `prefill_share` of the pool is promised to each
    or held for it: a worker that never proves the end of its writes does not get it all. 1: no
    bound.

    A request whose transfer fails is asked for again `max_retries` times (None: once where
    `failure_policy` is "retry", else never). Before each, `retarget(req, error)` may name the
    address of another prefill worker; `req` is the DecodeRequest, `req.prefill` where it failed.

    `compute` lets the engine compute prompts of which little is missing (see ComputeConfig); None:
    prefill computes all. With it and `failure_policy` "local", decode carries on alone while a
    prefill worker does not answer: what was asked of it, and what would be, is computed here, as
    far as `compute.down_below` allows; the rest fails as without.

    `record` names a file to which the node writes its traffic for `prefixkv replay`, as salted
    hashes (runtime/record.py): four files of at most `record_bytes`. None: nothing is written. A
    hash is of `record_block_tokens`, cut to whole pages; of one page, if that is larger.

    `kv_events` publishes the changes of the prefix cache, for routers; None: not.

    `host_memory` keeps in host memory what the pool cannot (see HostConfig); None: it is forgotten.

    With `compute` and extra state, `checkpoints` of the StatePool's slots, the last ones, keep
    states behind cached prefixes, at multiples of `checkpoint_tokens`, from which the engine goes
    on (`DecodeRequest.checkpoint_slot`). A request that runs fills one of them. With `compute` and
    window groups it is the number of windows that are kept at most.
    """

    name: Name = "decode-0"
    max_running: MaxRunning = 256
    reserve_tokens: CountOrZero = 128
    cache: Annotated[bool, doc("Keep and match prefixes.")] = True
    policy: PolicyName = "adaptive"
    admission: Annotated[
        str | Admission, doc("Which waiting request is admitted first: hit_aware, fifo, priority.")
    ] = "hit_aware"
    patience_s: SecondsOrZero = 5.0
    waiting_timeout_s: Seconds | None = None
    evict_reserve: Share = 1 / 256
    reserved_pages: CountOrZero = 0
    prefill_share: Share = 0.5
    record: Annotated[
        Annotated[str, Meta(min_length=1)] | Path | None,
        doc("File for a record of the traffic, for prefixkv replay."),
    ] = None
    record_bytes: Annotated[int, Meta(ge=4096, le=MAX_BYTES, extra={"unit": "bytes"})] = 64 << 20
    record_block_tokens: Annotated[int, Meta(ge=1, le=1 << 20, extra={"unit": "tokens"})] = 512
    failure_policy: Literal["fail", "retry", "local"] = "fail"
    max_retries: CountOrZero | None = None
    retarget: Retarget | None = None
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = None
    compute: ComputeConfig | None = None
    host_memory: HostConfig | None = None
    checkpoints: CountOrZero = 0
    checkpoint_tokens: Count = 1

    def __post_init__(self) -> None:
        _check_names(self.policy, self.admission)  # first: it says more of a class than its type
        check_fields(self)
        if self.checkpoints and self.compute is None:
            raise ConfigError(
                f"checkpoints: {self.checkpoints} are to compute from, which needs compute"
            )
        if self.host_memory is not None and not self.cache:
            raise ConfigError("host_memory: without cache nothing is kept there")
        if (
            self.host_memory is not None
            and self.host_memory.policy is None
            and not isinstance(self.policy, str)
        ):
            raise ConfigError(
                "host_memory: policy is needed, since the pool's is an object, which serves one "
                "cache"
            )
        if self.failure_policy == "local" and self.compute is None:
            raise ConfigError(
                "failure_policy: 'local' needs compute, the engine's word that it computes prompts"
            )
        if self.waiting_timeout_s is not None:
            # Prefill has given a request up by then, so its pages would be taken for nothing.
            check_order(self, "waiting_timeout_s", "control.longest_wait_s")
        if self.retarget is not None and not callable(self.retarget):
            raise ConfigError(f"retarget: {shown(self.retarget)} is not a function")

    def for_page_manager(self, num_pages: int, num_slots: int = 0) -> PageSettings:
        """Return what this config of a decode worker gives a `PageManager` as arguments, besides
        its sizes, alike on every rank."""
        return {
            "caching": self.cache,
            "policy": self.policy,
            "evict_reserve_pages": int(self.evict_reserve * num_pages),
            "num_slots": max(0, num_slots - self.checkpoints),
            "reserved_pages": check_reserved(self.reserved_pages, num_pages),
            "spare_rows": 0 if self.host_memory is None else MOST_LOADS,
            "num_checkpoints": self.checkpoints,
        }

    @property
    def num_retries(self) -> int:
        """`max_retries` of this config of a decode worker as a number."""
        if self.max_retries is None:
            return int(self.failure_policy == "retry")
        return self.max_retries

    @property
    def admission_patience_s(self) -> float:
        """`patience_s` of this config of a decode worker, but at most half of the time that a
        request may wait: else one that fits might be overtaken until it fails."""
        return min(self.patience_s, self.admission_wait_s / 2)

    @property
    def admission_wait_s(self) -> float:
        """`waiting_timeout_s` of this config of a decode worker as a number."""
        if self.waiting_timeout_s is None:
            return self.control.longest_wait_s
        return self.waiting_timeout_s


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker. `bind` is its ROUTER's address; a port of `*` takes a free one.

    A request whose prefix another computes waits for it, but not once nothing has been computed for
    `follow_s`; 0: each computes its own. `reserved_pages` and `kv_events` as on decode; of
    several ranks the first publishes events.

    With extra state, `checkpoints` of the StatePool's slots, the last ones, keep states behind
    cached prefixes, at multiples of `checkpoint_tokens`, from which the engine goes on
    (`PrefillRequest.checkpoint_slot`). 0: it computes every prompt from its beginning, unless it
    has states of its own (`usable_prefix`).
    """

    name: Name = "prefill-0"
    bind: Annotated[str, doc("Address where decode workers connect; port *: a free one.")] = (
        "tcp://127.0.0.1:*"
    )
    max_running: MaxRunning = 256
    cache: Annotated[bool, doc("Keep and match prefixes.")] = True
    policy: PolicyName = "adaptive"
    follow_s: SecondsOrZero = 1.0
    reserved_pages: CountOrZero = 0
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = None
    checkpoints: CountOrZero = 0
    checkpoint_tokens: Count = 1

    def __post_init__(self) -> None:
        _check_names(self.policy)
        check_fields(self)
        # Decode waits no longer for the first chunk.
        check_order(self, "follow_s", "control.longest_wait_s")
