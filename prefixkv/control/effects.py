"""What goes into a control object besides commands and the transport's events, and what comes out
of it besides events for the scheduler.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from prefixkv.memory.kv_layout import KVLayout
from prefixkv.memory.mesh import Shard
from prefixkv.memory.staging_area import StagingArea
from prefixkv.memory.state_layout import StateLink
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import ProcessLife

To = TypeVar("To", str, bytes)

# --- inputs ---------------------------------------------------------------------------------------


class FrameReceived(msgspec.Struct, Generic[To], frozen=True):
    """A frame from a prefill rank's address (decode), or from behind a ROUTER's route (prefill).

    `credential` is what the socket proved of the sender (its CURVE key), "" without keys.
    `is_local`: what the socket is connected to is on this machine.
    """

    source: To
    raw: bytes
    credential: str = ""
    is_local: bool = False


class FrameFailed(msgspec.Struct, Generic[To], frozen=True):
    """An exception came out of taking this frame: its sender's fault, whose room ends for it."""

    frame: FrameReceived[To]
    error: Exception


class ConnectFailed(msgspec.Struct, frozen=True):
    """The answer to a Connect: there is no such address."""

    address: str
    error: Exception


class Unreached(msgspec.Struct, frozen=True):
    """There is no connection to this address (any more), and an attempt at one has failed."""

    address: str
    why: str


class Reached(msgspec.Struct, frozen=True):
    """There is a connection to this address (again)."""

    address: str


class PeerTried(msgspec.Struct, frozen=True):
    """The answer to a TryPeer: `error` says why the peer's metadata must not be loaded."""

    peer: PeerId
    error: Exception | None = None


class CopyDone(msgspec.Struct, frozen=True):
    """A Gather or Scatter has ended, and nothing of it runs any more; `error` is what it raised, or
    ClosedError if it never ran."""

    copy_id: int
    error: Exception | None = None


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: look at deadlines, repeats and heartbeats."""


class AgentDestroyed(msgspec.Struct, frozen=True):
    """Our transport's agent is gone, so no write of ours can land any more: tell every peer."""


# --- effects --------------------------------------------------------------------------------------


class SendFrame(msgspec.Struct, Generic[To], frozen=True):
    """Send to the prefill rank at this address, or to the decode rank behind this route."""

    to: To
    raw: bytes


class Connect(msgspec.Struct, frozen=True):
    """Open a socket for this address. ConnectFailed answers if there is none."""

    address: str


class Disconnect(msgspec.Struct, frozen=True):
    """Close the address's socket."""

    address: str


class Expect(msgspec.Struct, frozen=True):
    """Peers may now be writing for so many rooms: `Transport.expect`."""

    num_rooms: int


class RankDrained(msgspec.Struct, frozen=True):
    """A `Settle`'s token: this rank's Drained for one use of a room."""

    key: RoomKey
    rank: int
    ticket: int


class Left(msgspec.Struct, frozen=True):
    """A `Settle`'s token: the process that answered at this address has left."""

    peer: PeerId
    address: str


class Settle(msgspec.Struct, frozen=True):
    """A writer's agent is gone: read for `for_s` what kernels may still hold of it, then answer
    Settled."""

    token: PeerId | Left | RankDrained
    for_s: float


class Examine(msgspec.Struct, frozen=True):
    """Find out whether the peer, which says that it is this process, has ended. A proved Fence
    answers if so, nothing if not."""

    peer: PeerId
    life: ProcessLife


class TryPeer(msgspec.Struct, frozen=True):
    """Find out whether the peer's metadata can be loaded. PeerTried answers.

    `ranges` are address and length of all memory that its Hello names.
    """

    peer: PeerId
    metadata: bytes
    ranges: tuple[tuple[int, int], ...]


class AddPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Make the peer's pool a target of our transport: `parts` are what of ours goes where in it.

    Where `staged`, slices are gathered in unit pages of `unit_tokens`, and written to `staging`.
    """

    peer: PeerId
    metadata: bytes
    layout: KVLayout
    parts: tuple[Shard, Shard]
    unit_tokens: int
    staging: StagingArea | None = None
    staged: bool = False
    state: StateLink | None = None


class RemovePeer(msgspec.Struct, frozen=True):
    """Forget the peer once its writes have ended: `Transport.remove_peer`."""

    peer: PeerId


class Cancel(msgspec.Struct, frozen=True):
    """Post no further part of the write: `Transport.cancel`."""

    job_id: int


class Renew(msgspec.Struct, frozen=True):
    """Put another agent in place of the one a write failed on: `Transport.renew`."""
