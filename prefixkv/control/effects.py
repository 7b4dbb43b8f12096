"""Inputs and effects of control objects, besides commands, transport events and events for the
scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from prefixkv.config import Way
from prefixkv.protocol.commands import DecodeCommand, PrefillCommand
from prefixkv.protocol.events import DecodeEvent, PrefillEvent, SourceFree, WorkerEvent
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.messages import Drained, ProcessLife
from prefixkv.transport.base import PeerMemory, TransportEvent, WriteJob

To = TypeVar("To", str, bytes)

# --- inputs ---------------------------------------------------------------------------------------


class FrameReceived(msgspec.Struct, Generic[To], frozen=True):
    """A frame from an address (on decode), or from behind a ROUTER's route (on prefill).

    `credential` is the CURVE key that the socket proved for the sender, "" without keys.
    `is_local`: the other end of the connection is on this machine.
    """

    source: To
    raw: bytes
    credential: str = ""
    is_local: bool = False


class FrameFailed(msgspec.Struct, Generic[To], frozen=True):
    """Taking this frame raised an exception: its sender is at fault, so only its room ends."""

    frame: FrameReceived[To]
    error: Exception


class ConnectFailed(msgspec.Struct, frozen=True):
    """There will be no connection: the answer to a Connect of an address that does not exist; or
    the keys of both ends do not fit, and `address` names the other end."""

    address: str
    error: Exception


class Unreached(msgspec.Struct, frozen=True):
    """There is no connection to this address (any more), and an attempt has failed. `guess`: a
    possible cause where nothing has ever answered there."""

    address: str
    why: str
    guess: str = ""


class Reached(msgspec.Struct, frozen=True):
    """There is a connection to this address (again)."""

    address: str


class CopyDone(msgspec.Struct, frozen=True):
    """A Gather or Scatter has ended: no thread touches its memory. `error` is what it raised, or
    ClosedError if it never ran."""

    copy_id: int
    error: Exception | None = None


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: look at deadlines, repeats and heartbeats."""


class AgentDestroyed(msgspec.Struct, frozen=True):
    """Our transport's agent is destroyed, so no write of ours can land: tell all peers."""


# --- effects --------------------------------------------------------------------------------------


class Raised(msgspec.Struct, frozen=True):
    """Taking the input has raised an exception. `source`: of the frame that it was, else None."""

    error: Exception
    source: str | bytes | None


# Generic in where it goes: decode knows prefill ranks by address, prefill answers routes.
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
    """Peers may be writing the pages of `num_rooms` rooms: see `Transport.expect`."""

    num_rooms: int


class Left(msgspec.Struct, frozen=True):
    """Token of a `Settle`: the process that answered at this address has left."""

    peer: PeerId
    address: str


class Settle(msgspec.Struct, frozen=True):
    """Read for `for_s` what kernels may still hold of a writer that is gone, then answer Settled.
    Over TCP what it sent before it ended lands as our transport reads. `token`: a process, one that
    has left, or the word that one rank is done with one use of a room."""

    token: PeerId | Left | Drained
    for_s: float


class Examine(msgspec.Struct, frozen=True):
    """Find out whether the process that the peer says it is has ended. If so, a Fence with `proved`
    answers; if not, nothing does, and the question is repeated."""

    peer: PeerId
    life: ProcessLife


class AddPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Make the peer's pool a target of the transport `way`, and of no other one.

    If `relayed`, slices are gathered in unit pages of `unit_tokens` tokens and written to its
    staging area.
    """

    peer: PeerId
    metadata: bytes
    memory: PeerMemory
    unit_tokens: int
    way: Way = "nixl"
    relayed: bool = False


class RemovePeer(msgspec.Struct, frozen=True):
    """Forget the peer once its writes have ended: `Transport.remove_peer`."""

    peer: PeerId


class Cancel(msgspec.Struct, frozen=True):
    """Post no further part of this write: see `Transport.cancel`. Parts that are posted go on."""

    job_id: int


class Renew(msgspec.Struct, frozen=True):
    """Replace the agent that a write failed on, so that nothing of it can land:
    `Transport.renew`."""


# --- both, by side --------------------------------------------------------------------------------

Common = TransportEvent | CopyDone | ConnectFailed | Reached | Unreached | Tick | AgentDestroyed
"""Inputs of either side, besides the scheduler's commands and frames."""
DecodeInput = DecodeCommand | FrameReceived[str] | FrameFailed[str] | Common
PrefillInput = PrefillCommand | FrameReceived[bytes] | FrameFailed[bytes] | Common

DecodeEffect = (
    SendFrame[str]
    | Connect
    | Disconnect
    | Expect  # for the transport
    | Settle
    | Examine  # for what looks at processes
    | DecodeEvent  # RoomEnded, RoomDrained, RoomOverdue: for the scheduler
    | WorkerEvent  # PrefillReady, PrefillAway, PrefillLost: the same, if it asked
    | Raised
)

PrefillEffect = (
    SendFrame[bytes]
    | AddPeer  # for the transport, and where slices are staged for the copy threads
    | RemovePeer
    | Examine  # for what looks at processes
    | WriteJob  # for the transport
    | Cancel
    | Renew
    | PrefillEvent  # Bootstrapped, RoomEnded, SourceFree: for the scheduler
    | Raised
)


# --- what is said inside a control object ---------------------------------------------------------


class LeadersChanged(NamedTuple):
    """Prefill workers at these addresses may be ready now, or may be ready no more."""

    addresses: set[str]


class Freed(NamedTuple):
    """Nothing of a room is written any more: its source is free, its streams in the relay end."""

    streams: dict[PeerId, Any]
    source: SourceFree


class RelayTick(NamedTuple):
    """Rooms and peers have seen that time has passed: the relay is to look too."""


# --- a route of writes that cannot go straight into pages -----------------------------------------


class RelaySlots(NamedTuple):
    """The local memory that slices are gathered into: `num_slots` slots of `slot_bytes` bytes. At
    most `window` pieces per room and reader are under way."""

    num_slots: int
    slot_bytes: int
    window: int


class Relay(NamedTuple):
    """The makers of such a route's parts: `sender` and `receiver` of a control object, `cut` and
    `plan` of a handshake, `copies` of a control thread, and their `memory`, None unless `setting`
    asks for it."""

    setting: str
    memory: Callable[..., Any]
    sender: Callable[..., Any]
    receiver: Callable[..., Any]
    cut: Callable[..., Any]
    plan: Callable[..., Any]
    copies: Callable[..., Any]


RELAYS: list[Relay] = []
"""The one there is, if any; `assembly.py` puts it here."""
