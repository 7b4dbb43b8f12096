"""The contract of a transport: it writes from our pool, staging area or state into a peer's, and
reports how each write ended.

`nixl/`, `shm/` and the tests' fabric keep it, and one test suite holds them to it. A
call queues and returns at once, from any thread. Events come through the `sink` given at
construction, one call of each transport at a time, from a thread of its own (in the fake: from the
caller that steps it).

A write passes three points: *posted* (NIXL has it; it can no longer be called back), *ended* (DONE,
or an error), and the job as a whole is *drained* when none of its writes can land any more. An
error after posting is an end without proof of drain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from prefixkv.memory.kv_layout import KVLayout, RelayArea
from prefixkv.memory.mesh import Shard
from prefixkv.memory.state_layout import StateLayout, StateLink
from prefixkv.paging import Pages
from prefixkv.protocol.ids import ChunkTag, PeerId
from prefixkv.request import DeviceEvent

Route = str
"""Kind of memory that a write goes to: "pages", "staging", "state", or `window_route`."""


def window_route(number: int) -> Route:
    """Return the route into a window group, transported like pages, by its number among them."""
    return f"window {number}"


class RankMemory(NamedTuple):
    """What a rank writes from, and is written to: pages, staging area and state, on one device."""

    layout: KVLayout
    relay: RelayArea | None = None
    state: StateLayout | None = None

    def validate(self) -> None:
        """Raise ConfigError where a layout or the area breaks its laws."""
        for part in self:
            if part is not None:
                part.validate()

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of each stretch."""
        ranges = [*self.layout.regions]
        if self.relay is not None:
            ranges.append((self.relay.base, self.relay.num_bytes))
        return ranges if self.state is None else [*ranges, *self.state.regions]


class PeerMemory(NamedTuple):
    """A peer's memory as `add_peer` gets it. `parts` says which layers and heads of our pool go to
    which of the peer's, each in its pool's own numbers; None: all. `state` is the peer's state
    memory, and what of ours goes there. A job for what is missing on one side fails. `checksum` is
    the algorithm of the checksums in its notifications, "" for none."""

    layout: KVLayout
    parts: tuple[Shard, Shard] | None = None
    relay: RelayArea | None = None
    state: StateLink | None = None
    checksum: str = ""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """As `RankMemory.ranges`."""
        state = None if self.state is None else self.state.layout
        return RankMemory(self.layout, self.relay, state).ranges


@dataclass(frozen=True, slots=True, eq=False)
class WriteJob:
    """Copy page `src_pages[i]` of our pool to page `dst_pages[i]` of the peer's, for every i.

    Both are int32 arrays of the same length, at least 1; they belong to the job until it ends.
    Where page sizes differ they are unit pages (`paging.py`). On the route "staging" they are
    numbers of blocks of BLOCK_BYTES in our staging area and in the peer's, on "state" slots of both
    state pools, on that of a window group pages of it; where one side has none, the job fails with
    a ConfigError.

    `job_id` is unique among the jobs that have not ended drained. The job is cut into parts of
    bounded size. Every part notifies the peer with `tag`, with `part`, `num_parts` and `num_pages`
    filled in from what is posted, and checksums where the peer takes them: of `src_pages`, on the
    route "staging" of `units`, unit pages of our pool. Nothing is posted before `ready`, and the
    jobs of one room (`tag.room`, `tag.generation`) are posted in the order in which they came.
    """

    # Units: `src_pages` and `dst_pages` count what the route says, never bytes or addresses.

    job_id: int
    peer: PeerId
    src_pages: Pages
    dst_pages: Pages
    tag: ChunkTag
    ready: DeviceEvent | None = None
    route: Route = "pages"
    units: Pages | None = None


class Stamp:
    """What goes with the notifications of the parts of writes to a peer: nothing by itself."""

    ahead = 16  # parts that are worked out at once

    def least_parts(self, job: WriteJob) -> int:
        """Return of how many parts a job has to be. Raises PageStateError for pages that cannot be
        read."""
        return 1

    def put(self, job: WriteJob, tag: ChunkTag) -> ChunkTag:
        """Return the tag of a part, which is posted next."""
        return tag


class Checks(NamedTuple):
    """What compares pages that arrive with what was sent: the algorithms to offer, the best first,
    and the makers of a peer's `Stamp`, of a link's plan (of both sides' Hello), of what reads a
    part of a pool by an algorithm, and of a control thread's part. `setting` asks for it."""

    setting: str
    algorithms: tuple[str, ...]
    stamp: Callable[[RankMemory, PeerMemory], Stamp]
    plan: Callable[[Any, Any], Any]
    reader: Callable[..., Any]
    threads: Callable[..., Any]


CHECKS: list[Checks] = []
"""The one there is, if any; `assembly.py` puts it here."""


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every part of the job has ended DONE: its bytes are in the peer's memory."""

    job_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The job ended without success, and no part of it is under way any more.

    `drained` is True if every part either ended DONE or was never posted (cancelled, bad pages,
    unknown peer, refused before anything was handed on): nothing of the job can land from now on.
    It is False if a part ended in an error after it was posted, or in the post itself, which may
    have handed on some of its descriptors: it may still land until this agent is destroyed, see
    `Transport.renew`.
    """

    job_id: int
    error: Exception
    drained: bool


@dataclass(frozen=True, slots=True)
class WriteDrained:
    """The agent that posted a job is destroyed, after a WriteFailed that was not drained. What
    kernels held of the job by then may still land as the target polls, as after `close`."""

    job_id: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A notification from a peer's write: the raw tag, not yet checked."""

    tag: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to `Transport.settle`."""

    token: Hashable


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """`add_peer` failed, or a write found the peer gone. A later write tries to reconnect.
    `was_reached`: it was connected before."""

    peer: PeerId
    error: Exception
    was_reached: bool = False


# A job's events: WriteDone; or WriteFailed, and after one that is not drained WriteDrained, once
# the agent is destroyed. WriteDone and a drained WriteFailed are the last word on a job.
TransportEvent = WriteDone | WriteFailed | WriteDrained | Arrived | Settled | PeerUnreachable
Sink = Callable[[TransportEvent], None]


class Transport(Protocol):
    """The contract. One owner creates and closes it; any thread may call the others."""

    @property
    def metadata(self) -> bytes:
        """Bytes that a peer needs in `add_peer` to reach this one; opaque, sent in Hello."""

    def add_peer(self, peer: PeerId, metadata: bytes, memory: PeerMemory) -> None:
        """Make the peer's memory a target: load its metadata, and prepare descriptor lists once.

        For a peer that is known already, new metadata lets its jobs wait for the new connection;
        jobs for other memory than before fail.
        """

    def remove_peer(self, peer: PeerId) -> None:
        """Forget a peer once its jobs have ended; jobs that are not posted end as cancelled.
        Unknown: no-op."""

    def write(self, job: WriteJob) -> None:
        """Queue a job. One WriteDone or WriteFailed follows, unless the peer stalls for ever."""

    def cancel(self, job_id: int) -> None:
        """Post no further part of a job; it ends when those posted have. Ended or unknown:
        no-op."""

    def expect(self, num_rooms: int) -> None:
        """Say how many rooms peers may be writing now; above 0, notifications are polled."""

    def settle(self, token: Hashable, for_s: float) -> None:
        """Poll for `for_s` seconds, then emit Settled: what kernels held of a writer that is gone
        has landed. Only time in which this transport really polled counts: a stopped process has
        read nothing."""

    def renew(self) -> None:
        """Replace the agent if any job ended undrained; WriteDrained follows for each such job.

        New posts go through the new agent at once. The former one is destroyed when its posts have
        ended, or after `renew_grace_s`; what has not ended by then fails, drained. All calls during
        one renewal lead to one more. Only for a transport that peers do not write to: they know the
        former agent. Closed: no-op.
        """

    def close(self) -> None:
        """Destroy the agent and join the thread; jobs that are left end with ClosedError. May be
        called again.

        Once it returns, no write of ours can start to land: a fence. Over TCP the kernels may still
        hold bytes sent before; they land when the *target* polls next, so a target that learns of a
        fence polls for a moment (`settle`) before it frees pages. Raises InternalError if the agent
        could not be destroyed; then it is no fence.
        """
