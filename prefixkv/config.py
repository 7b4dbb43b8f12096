"""The settings of the library, as `settings.py` describes such classes.

Times are seconds, `*_tokens` tokens, `*_bytes` bytes, a `Share` is a part of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from prefixkv.admission import AdmissionPolicy, explain_admission
from prefixkv.cache.eviction.policy import Policy, default_policy, explain_policy
from prefixkv.errors import ConfigError, RequestError, nearest, shown, travels
from prefixkv.pages.groups import GroupSpec
from prefixkv.settings import (
    MAX_BYTES,
    MAX_COUNT,
    PREFIX,
    Bytes,
    BytesOrZero,
    Count,
    CountOrZero,
    Number,
    Seconds,
    SecondsOrZero,
    Share,
    check_callable,
    check_fields,
    check_kind,
    check_order,
    doc,
    is_loopback_host,
    settings_of,
)

Backend = Literal["auto", "nixl", "shm"]
Way = Literal["nixl", "shm"]  # by which a peer is written

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
    """Return a weights version. Raises ConfigError if it is too long, or does not print."""
    check_kind("weights_version", version, str)
    if not version.isprintable():
        raise ConfigError(f"weights_version: {version!r} has characters that do not print")
    if len(version) > MAX_VERSION_CHARS:
        raise ConfigError(
            f"weights_version: has {len(version)} characters, more than {MAX_VERSION_CHARS}"
        )
    return version


# Of a setting that asks for a part of a node that the package may have been left without.
_ORGAN: Final = {"organ": True}


def organs_of(config: Any) -> list[tuple[str, Any]]:
    """List those that are set of the settings that ask for an organ, with their values."""
    named = (one.name for one in fields(config) if one.metadata.get("organ"))
    return [(name, value) for name in named if (value := getattr(config, name))]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Identity of a model's KV, beyond the shape of its pool.

    Two workers that differ in `model` or `kv_scales` refuse each other; a request between two that
    differ in `weights_version` ends at once.
    """

    model: str = "unnamed"
    """Name of the model; both sides must agree."""
    weights_version: Annotated[str, Meta(max_length=MAX_VERSION_CHARS)] = "0"
    """Which weights a node begins with, at most 256 printable characters. When weights change in
    place, `flush(weights_version=...)` moves the node to the new version."""
    kv_scales: str = "none"
    """How quantised KV is scaled; both sides must agree."""
    option_names: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """The engine's option for each field of the handshake, `{"page_size": "--block-size"}`. A
    refusal names the option. Adapters fill it in; it is not compared."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_version(self.weights_version)


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """CURVE keys of the control plane, as z85 text of 40 characters."""

    public_key: Z85Key
    """This worker's public key."""
    secret_key: Z85Key
    """This worker's secret key."""
    server_key: Annotated[str, Meta(max_length=40)] = ""
    """Decode: the public key of the prefill workers."""
    allowed_clients: Mapping[str, str] = field(default_factory=dict)
    """Prefill: the decode workers that may connect: public key to worker's name, for all its ranks.
    """

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
    """Timing and bounds of the control plane; give both sides the same values.

    A deadline ends a wait with an error. It never frees a page that a peer may still write.
    """

    heartbeat_s: Seconds = 1.0
    """A peer to which nothing was sent for this long gets a heartbeat."""
    suspect_after_s: Seconds = 5.0
    """A peer that is silent for this long is "suspect": decode promises it no new rooms. Nothing is
    freed. Must be above `heartbeat_s`; raise it where processes stop for seconds."""
    forget_after_s: Seconds = 60.0
    """A silent peer without rooms is forgotten, its connection and its NIXL lists with it. At least
    `suspect_after_s`."""
    resend_s: Seconds = 0.25
    """Pause before an unanswered message is sent again; it doubles up to eight times this. Raise it
    on slow networks. At most `bootstrap_timeout_s` and `ack_timeout_s`."""
    connect_timeout_s: Seconds = 1.0
    """If nothing answers at a prefill worker's address for this long, 2 s more where no packet
    comes back, the requests that wait for it fail with `PeerLostError`. They wait as long for a
    worker whose death is proved: a new process may start at its address. Raise it if workers may
    start after their requests."""
    bootstrap_timeout_s: Seconds = 30.0
    """Prefill: to decode's promise, from `add` or from when decode was last heard, whichever is
    later. Decode: how long a request waits for a prefill worker that does not answer; no page is
    taken for it meanwhile."""
    waiting_timeout_s: Seconds = 120.0
    """From the promise to the first chunk, or from when the peer was last heard."""
    transfer_timeout_s: Seconds = 60.0
    """From a chunk to the next, or from when the peer was last heard. On prefill, a write that is
    in flight has to end within it in any case."""
    longest_wait_s: Seconds = 600.0
    """The longest that bootstrap, waiting or transfer lasts, however often the peer is heard. It
    ends requests without a deadline that only one side has. Raise it where requests queue for
    longer."""
    ack_timeout_s: Seconds = 30.0
    """Prefill repeats an outcome for this long if decode does not acknowledge it."""
    drain_timeout_s: Seconds = 30.0
    """Decode: pages of a failed room that are not proved free after this time count as quarantined.
    Only the count changes; they stay held."""
    parked_timeout_s: Seconds = 30.0
    """Prefill keeps a promise, or an abort, whose request has not been added for this long."""
    fence_settle_s: SecondsOrZero = 0.5
    """After a fence, decode goes on reading what the kernels still hold of the dead writer for this
    long, before its pages are used again. `0` where writes bypass the kernels, as with RDMA."""
    prove_death: bool = True
    """Fence a peer on this machine as soon as the kernel proves its process dead. Off: only `fence`
    ends a peer, and this process does not say which process it is."""
    max_parked_per_peer: Count = 1024
    """Promises of one peer that may wait for their requests; further ones are refused."""
    max_peers: Count = 1024
    """Decode workers that a prefill rank accepts; further ones are refused in the handshake."""
    max_queued_frames: Count = 2_000
    """Length of each socket's queue towards a peer. A frame that finds it full is dropped and
    counted. Of what a peer sends, at most 16 frames wait here unread; the rest waits in the kernel
    and in that peer's own queue."""
    max_aux_bytes: BytesOrZero = 64 << 10
    """Most that `aux` of the last chunk may have."""
    curve: CurveConfig | None = None
    """Keys of the control plane. None: neither encrypted nor authenticated."""
    network_is_isolated: bool = False
    """Says that only workers, and routers that read cache events, are on the network. Without keys
    a node binds beyond loopback only with it; ports of cache events, which have no keys, need it in
    any case."""

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
    """How KV travels: the transport thread's posts, polls and staging memory.

    `window`, `post_descriptors`, `renew_grace_s` and `interface` are NIXL's alone. Where one side
    uses shared memory, `staging_bytes` is not used.
    """

    post_bytes: Bytes = 8 << 20
    """Largest post to NIXL. Over shared memory a post is a copy by the transport thread."""
    post_descriptors: Count = 1024
    """Most descriptors of one post."""
    window: Count = 8
    """Posts in flight to a peer at once."""
    polling: Number = 1.0
    """Factor on the pauses between empty polls while work is outstanding. At 1 they spin for 50 us,
    then sleep 30 us, later 200 us; where the thread only receives, a 32nd of the quiet so far, up
    to 5 ms. Raise it to save processor time, lower it for latency; 0 never sleeps."""
    renew_grace_s: SecondsOrZero = 2.0
    """When an agent is replaced because a posted write failed, its other posts have this long to
    end."""
    staging_bytes: Annotated[
        BytesOrZero, doc("Memory for slices of heads, where tensor-parallel sizes differ.")
    ] = field(default=0, metadata=_ORGAN)
    """Memory on each rank for staging slices of heads; both sides need it. Set it where
    tensor-parallel sizes differ. A multiple of 4096; 0: slices are written one by one, which is
    much slower."""
    lease_bytes: Bytes = 16 << 20
    """Largest lease of decode's staging memory; on prefill, the size of a slot. A multiple of 4096,
    at most `staging_bytes`; with half of it, copies and writes overlap."""
    copy_threads: Count = 1
    """Threads that gather and scatter staged slices, and on decode as many that compare checksums.
    """
    interface: Annotated[str, doc('Network that KV travels on, "eth0"; none: this machine.')] = ""
    """The network that KV travels on, as UCX calls it: "eth0", or several, "eth0,mlx5_0:1". It must
    be an isolated network. Empty: loopback and shared memory, for peers on this machine.
    `UCX_NET_DEVICES` overrides it."""
    backend: Annotated[Backend, doc("nixl, shm (memory of this host), or auto.")] = "nixl"
    """What KV travels by. "nixl"; "shm": prefill copies into decode's memory, which it maps, for
    two workers of one user on one host; "auto": shm where both are in one place, else NIXL."""
    max_bytes_per_s: Annotated[
        BytesOrZero, doc("Most bytes of KV sent per second, to all peers together; 0: no limit.")
    ] = 0
    """Most bytes of KV that this rank sends per second, to all peers together, by NIXL and by
    shared memory each; 0: no limit. Set it on prefill where KV would crowd out other traffic. Parts
    of 2 ms go at once, at least 64 KiB. A request must arrive within `transfer_timeout_s` at this
    rate, too."""

    checksums: Annotated[bool, doc("Compare a checksum of each page that is sent.")] = field(
        default=False, metadata=_ORGAN
    )
    """Compare a checksum of each page that is sent, where both sides have it on: a request with a
    page of other bytes than prefill has fails with `ChecksumError`, and nothing of it is cached.
    For memory of the CPU. With the extra `checksums` (xxhash) on both sides it costs least."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.staging_bytes:
            check_order(self, "lease_bytes", "staging_bytes")
        if self.interface and not re.fullmatch(r"[^\s,=]+(,[^\s,=]+)*", self.interface):
            raise ConfigError(
                f"interface: {self.interface!r} is not a list of names with commas between, "
                '"eth0,eth1"'
            )

    @property
    def spin_s(self) -> float:
        """Time for which empty polls follow each other without a sleep."""
        return _SPIN_S * self.polling

    @property
    def sleep_s(self) -> float:
        """Sleep between two polls after `spin_s`."""
        return _SLEEP_S * self.polling

    @property
    def idle_sleep_s(self) -> float:
        """The shortest sleep after a longer quiet."""
        return _IDLE_SLEEP_S * self.polling


class PageOptions(NamedTuple):
    """What a `PageManager` has besides its sizes.

    Attributes:
        evict_reserve_pages: an eviction takes this many more than are missing. They become free
            side by side, so that pages taken later form fewer runs.
        num_slots: of extra state, a group of one page a request.
        reserved_pages: the first pages of the pool, which are the engine's own.
        spare_rows: rows of the page table for pages that are loaded from host memory.
        num_saved: checkpoints kept at most, each with a slot, pages in the window groups, or both.
        windows: groups of layers that keep the last tokens only.
    """

    caching: bool = True
    policy: str | Policy = ""
    evict_reserve_pages: int = 0
    num_slots: int = 0
    reserved_pages: int = 0
    spare_rows: int = 0
    num_saved: int = 0
    windows: Sequence[GroupSpec] = ()


def check_reserved(reserved_pages: int, num_pages: int) -> int:
    """Return `reserved_pages`. Raises ConfigError if the pool has no others."""
    if reserved_pages >= num_pages:
        raise ConfigError(f"reserved_pages: {reserved_pages} leaves none of {num_pages} pages")
    return reserved_pages


UsablePrefix = Callable[[Any, int], int]
"""(request, tokens that hit) -> from how many of them prefill can go on."""

Retarget = Callable[[Any, Exception], str | None]
"""(request whose transfer failed, why) -> the prefill worker to ask; None: the one before."""


def _check_names(policy: str | Policy, admission: str | AdmissionPolicy = "fifo") -> None:
    """Raise ConfigError, with the nearest name, for an unregistered policy."""
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

    Each address is bound; a port of `*` takes a free one. Events carry the tokens of prompts, and
    every client of the ports can read them: an address beyond loopback needs
    `ControlConfig.network_is_isolated`, also where the control plane has keys.
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    """Where events are published."""
    replay_endpoint: str = "tcp://127.0.0.1:5558"
    """Where a router asks for events again, from a number on. Empty: nowhere; then a router that
    has missed an event stays wrong."""
    snapshot_endpoint: str = "tcp://127.0.0.1:5559"
    """Where a router asks for a snapshot of the whole cache. Empty: nowhere."""
    topic: str = ""
    """First frame of an event. Empty: `kv@`, the worker's name, `@`, `ModelConfig.model`."""
    medium: str = "GPU"
    """Where the pool's KV is, as vLLM's format names it. KV in host memory has a name of its own.
    """
    dp_rank: CountOrZero = 0
    """The data-parallel rank that events name. Routers tell prefixkv's workers apart by address, so
    leave it."""
    keep_batches: CountOrZero = 10_000
    """Batches that are kept to be sent again. A request for older batches is answered by a
    snapshot."""
    keep_bytes: BytesOrZero = 64 << 20
    """The same, in bytes of all kept batches."""
    heartbeat_s: Seconds = 1.0
    """After this long without events an empty batch is published, so that a loss of the last events
    is seen. llm-d gives up after 5 s of silence."""
    max_backlog_pages: Count = 1 << 20
    """Most pages of changes that wait for the publisher's thread; beyond, it starts over with a
    snapshot."""
    epoch_frames: bool = False
    """Follow the number's frame with 16 bytes that name this life of the worker, for llm-d's
    recovery by snapshots. Dynamo refuses such frames."""
    checkpoint_blocks: bool = False
    """Publish where a prefill worker's checkpoints are, as blocks of a group of their own, for
    routers that read `group_idx`."""

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

    `docs/operate.md` has the rule that chooses between prefill and the own engine.
    """

    below: Annotated[
        CountOrZero, doc("Most missing tokens of a prompt that decode computes itself.")
    ] = 16384
    """A request that lacks more tokens is prefill's; below that the rule decides. Lower it only to
    keep long prompts from running requests. 0: compute only where prefill cannot be asked."""
    down_below: Annotated[
        CountOrZero, doc("The same where prefill is down and failure_policy is local.")
    ] = MAX_COUNT
    """With `failure_policy="local"`: while prefill is gone, a request that lacks more tokens is not
    computed here, and fails."""
    chunk_tokens: Annotated[Count, doc("Most tokens of prompts per step of decode.")] = 256
    itl_share: Annotated[
        Annotated[float, Meta(gt=0, le=100)],
        doc("Longest addition of such tokens to a step, as a part of it."),
    ] = 0.5
    """How much longer a step of running requests may become by the chunk in it, as a share of the
    step. Where even 8 tokens exceed it, only some steps have a chunk, and the average keeps to it.
    Lower it where gaps between tokens matter more than the first token."""
    ask: Literal["both", "late"] = "both"
    """When prefill gets a request. "both": the engine submits it to both sides at once, and prefill
    is told if it is computed here. "late": prefill gets only what `pop_needs_prefill` returns."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """Host memory behind a decode worker's pool.

    What requests leave in the pool is copied there, and loaded again where the pool has forgotten
    it. Kept are the layers whose pages have the pool's ids: the first ones, and aligned groups.
    Windows and extra state are sent with each prompt. Loads go before writes.
    """

    times: Annotated[
        Annotated[float, Meta(gt=0, le=1000)],
        doc("Host memory for KV that the pool cannot keep, by the pool's size."),
    ] = 4.0
    """Host memory of this rank, as a multiple of the pool: at least 2, since what is in the pool is
    there as well. `prefixkv replay --host 4x` says what more is worth for your traffic."""
    num_bytes: Annotated[BytesOrZero, doc("The same in bytes on each rank; 0: by times.")] = 0
    num_pages: Annotated[CountOrZero, doc("The same in pages; 0: by times.")] = 0
    """The same in pages of the pool; excludes `num_bytes`. 0: by `times`."""
    policy: Annotated[
        str | Policy | None, doc("Eviction policy of host memory; none: that of the pool.")
    ] = None
    """Which pages are evicted first from host memory: a name or a `Policy` object. None: the pool's
    policy, which must then be a name."""
    copy_threads: Annotated[Count, doc("Threads that copy to and from host memory.")] = 2
    """Threads that copy to and from host memory. On a GPU each has a stream, and uses twice
    `piece_bytes` of the device's memory."""
    piece_bytes: Annotated[
        BytesOrZero, doc("Largest piece of a copy; 0: 4 MiB, on a GPU 16 MiB.")
    ] = 0
    """Largest piece of a copy; 0: 4 MiB, on a GPU 16 MiB. A load waits at most for the pieces that
    are being copied; smaller pieces cost more calls."""

    def __post_init__(self) -> None:
        if self.policy is not None:
            _check_names(self.policy)
        check_fields(self)
        if self.num_bytes and self.num_pages:
            raise ConfigError(
                f"num_pages: is {self.num_pages}, and num_bytes {self.num_bytes}; give one of them"
            )

    def pages_of(self, pool_pages: int, page_bytes: int) -> int:
        """Return how many pages fit, each of `page_bytes` on this rank. Raises ConfigError for
        none."""
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
    """A decode worker."""

    name: Name = "decode-0"
    """The worker's name in metrics, logs and the handshake: unique per worker, kept over restarts.
    A new process of the same name replaces the old one."""
    max_running: MaxRunning = 256
    """Requests in transfer or running at once (rows of the page table). Set it to the engine's
    largest batch, plus the requests that may be in transfer meanwhile."""
    reserve_tokens: CountOrZero = 128
    """Space kept for each request's output when it is admitted, at most what it may still write.
    Raise it if many requests are retracted; lower it if pages stay free while requests wait."""
    cache: Annotated[bool, doc("Keep and match prefixes.")] = True
    """Keep and match prefixes. Off is for comparison."""
    policy: PolicyName = field(default_factory=default_policy)
    """Which cached pages are evicted first: a registered name, or a `Policy` object
    (`Adaptive(trust=20)`), which serves one cache."""
    admission: Annotated[
        str | AdmissionPolicy,
        doc("Which waiting request is admitted first: hit_aware, fifo, priority."),
    ] = "hit_aware"
    """Which waiting request is admitted first: "hit_aware", "fifo", "priority", another registered
    name, or an `AdmissionPolicy` object."""
    patience_s: SecondsOrZero = 5.0
    """No other request overtakes a request that has waited this long, unless that waits aside.
    Lower it for fairness, raise it for throughput. At most half of `waiting_timeout_s` counts."""
    waiting_timeout_s: Seconds | None = None
    """How long a request without a `deadline_s` waits to be admitted; then it fails with
    `AdmissionTimeoutError`, and prefill is told. After a retraction or a retry it starts again.
    None: `control.longest_wait_s`, the largest value, since prefill waits no longer."""
    evict_reserve: Share = 1 / 256
    """Share of the pool that an eviction frees beyond the missing pages, so that new pages are
    neighbours."""
    reserved_pages: CountOrZero = 0
    """First pages of the pool that no request gets: the engine writes the padding of its batches
    there."""
    prefill_share: Share = 0.5
    """While several prefill workers are ready, at most this share of the pool is promised to one of
    them, or held for it; its further requests wait. 1: no bound."""
    record: Annotated[
        Annotated[str, Meta(min_length=1)] | Path | None,
        doc("File for a record of the traffic, for prefixkv replay."),
    ] = field(default=None, metadata=_ORGAN)
    """File to which the node writes its traffic, for `prefixkv replay`: lengths, times and salted
    hashes of blocks, no tokens. An existing file is kept as `PATH.1`."""
    record_bytes: Annotated[int, Meta(ge=4096, le=MAX_BYTES, extra={"unit": "bytes"})] = 64 << 20
    """Rotate the record after this many bytes; four files are kept. A line has about 18 bytes per
    block."""
    record_block_tokens: Annotated[int, Meta(ge=1, le=1 << 20, extra={"unit": "tokens"})] = 512
    """Tokens of a block of the record, cut to whole pages, at least one page. Prompts shorter than
    a block share nothing in a replay: take your page size where prompts are short."""
    failure_policy: Literal["fail", "retry", "local"] = "fail"
    """What becomes of a request whose transfer failed. "retry": it is asked for once more
    (`pop_needs_prefill`) before it fails. "local": decode computes it, which needs `compute`."""
    max_retries: CountOrZero | None = None
    """How often a failed request is asked for again. None: once with `failure_policy="retry"`, else
    never."""
    retarget: Retarget | None = None
    """Called before each retry as `retarget(req, error)`: returns the address of the prefill worker
    to ask next, or None for the same one. `req.prefill` is where it failed."""
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = field(default=None, metadata=_ORGAN)
    """Publish the changes of the prefix cache, for routers. None: not."""
    compute: ComputeConfig | None = None
    """Let the engine compute prompts of which little is missing. None: prefill computes all.
    Refused for a worker of several ranks; with extra state or window groups it needs `checkpoints`.
    """
    host_memory: HostConfig | None = None
    """Keep in host memory what the pool cannot. None: it is forgotten. Each rank takes its own.
    Refused without `cache`."""
    checkpoints: CountOrZero = 0
    """Number of StatePool slots reserved for checkpoints (the last ones), from which own compute
    goes on. Each running request fills one: set it above the number that runs. With window groups:
    the most windows that are kept. Needs `compute`. The Hugging Face engine takes 0 for a number
    that fits the pool."""
    checkpoint_tokens: Count = 1
    """A checkpoint lies at a multiple of this and of a page."""

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
        check_callable("retarget", self.retarget)

    def for_page_manager(self, num_pages: int, num_slots: int = 0) -> PageOptions:
        reserve, slots = int(self.evict_reserve * num_pages), max(0, num_slots - self.checkpoints)
        reserved = check_reserved(self.reserved_pages, num_pages)
        loads = 0 if self.host_memory is None else MOST_LOADS
        what = self.cache, self.policy, reserve, slots, reserved, loads, self.checkpoints
        return PageOptions(*what)

    @property
    def source_settings(self) -> set[str]:
        """Those of its settings that ask for a source of pages."""
        return {name for name in ("compute", "host_memory") if getattr(self, name) is not None}

    @property
    def num_retries(self) -> int:
        """`max_retries` as a number."""
        if self.max_retries is None:
            return int(self.failure_policy == "retry")
        return self.max_retries

    @property
    def admission_patience_s(self) -> float:
        """`patience_s`, at most half of what a request may wait: else one that fits could be
        overtaken until it fails."""
        return min(self.patience_s, self.admission_wait_s / 2)

    @property
    def admission_wait_s(self) -> float:
        """`waiting_timeout_s` as a number."""
        if self.waiting_timeout_s is None:
            return self.control.longest_wait_s
        return self.waiting_timeout_s


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker."""

    name: Name = "prefill-0"
    bind: Annotated[str, doc("Address where decode workers connect; port *: a free one.")] = (
        "tcp://127.0.0.1:*"
    )
    """Address where decode workers connect; a port of `*` takes a free one, which `endpoint` tells.
    An address that other machines reach needs keys."""
    max_running: MaxRunning = 256
    """Requests that hold pages at once. Further ones wait as promised."""
    cache: Annotated[bool, doc("Keep and match prefixes.")] = True
    """Prefill's own prefix cache."""
    policy: PolicyName = field(default_factory=default_policy)
    follow_s: SecondsOrZero = 1.0
    """A request whose prefix another request is computing waits for it, until nothing has been
    computed for this long. 0: each computes its own. At most `control.longest_wait_s`."""
    reserved_pages: CountOrZero = 0
    model: ModelConfig = ModelConfig()
    control: ControlConfig = ControlConfig()
    transport: TransportConfig = TransportConfig()
    kv_events: KVEventsConfig | None = field(default=None, metadata=_ORGAN)
    """Publish the changes of the prefix cache, for routers; of several ranks the first publishes.
    None: not."""
    checkpoints: CountOrZero = 0
    """Number of StatePool slots reserved for checkpoints (the last ones), from which prefill goes
    on behind cached prefixes; with window groups, the most checkpoints that are kept. About one for
    each session whose next turn is to be cheap. 0: prompts are computed from their beginning; the
    Hugging Face engine then takes 16 to 256, by its pool's bytes."""
    checkpoint_tokens: Count = 1
    """A checkpoint lies at a multiple of this and of a page: where the model's kernels can give a
    state."""
    usable_prefix: UsablePrefix | None = None
    """Called for a hit in prefill's own cache, with the request and the tokens that hit. Returns
    from how many of them the engine can go on, having the extra state behind them; rounded down to
    whole pages. By default none where there is extra state without `checkpoints`, all where there
    is none."""

    def __post_init__(self) -> None:
        _check_names(self.policy)
        check_fields(self)
        check_callable("usable_prefix", self.usable_prefix)
        # Decode waits no longer for the first chunk.
        check_order(self, "follow_s", "control.longest_wait_s")

    def for_page_manager(self, num_pages: int) -> PageOptions:
        reserved = check_reserved(self.reserved_pages, num_pages)
        return PageOptions(self.cache, self.policy, 0, 0, reserved, num_saved=self.checkpoints)


# --- addresses ------------------------------------------------------------------------------------


_MAX_PORT = 65_535


@lru_cache(1024)
def is_loopback(address: str) -> bool:
    """Return whether a socket bound to this address can be reached from this machine only.

    >>> is_loopback("tcp://127.0.0.1:5000"), is_loopback("tcp://*:5000"), is_loopback("ipc:///run/kv")
    (True, False, True)
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        return False
    if parts.scheme in ("ipc", "inproc"):
        return True
    # Without the port, and without the brackets of IPv6.
    return is_loopback_host((parts.netloc.rpartition(":")[0] or parts.netloc).strip("[]"))


def check_address(address: str) -> None:
    """Raise ValueError for a socket address that zmq would misread, or reject unclearly."""
    scheme, _, rest = address.partition("://")
    if not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise ValueError(
            "an address begins with tcp://, as in tcp://127.0.0.1:5000, or with ipc://"
        )
    host, _, port = rest.rpartition(":")
    # Only TCP has ports; "*" lets the system choose one.
    if scheme != "tcp" or (host and port == "*"):
        return
    # zmq reduces a larger number modulo 65536, and would use some other port.
    if not (host and port.isascii() and port.isdecimal() and int(port) <= _MAX_PORT):
        raise ValueError(f"the port is {port!r}, a number up to {_MAX_PORT} is needed, or *")


def check_prefill(rid: str, prefill: object) -> None:
    """Raise RequestError for what cannot be the address of a request's prefill worker.

    Only that there is one: a test, or an engine with a transport of its own, uses any string.
    """
    if not isinstance(prefill, str):
        raise RequestError(f"prefill is {shown(prefill)}, a string is needed")
    if not prefill:
        raise RequestError(f"request {rid!r} names no prefill worker")
    if not travels(prefill):
        raise RequestError(f"prefill is {prefill!r}, which UTF-8 has no bytes for")


# --- variables of the environment -----------------------------------------------------------------


# Unknown ones are refused, since they would be ignored.
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
