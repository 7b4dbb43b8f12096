"""The types of all inputs and effects of each side's control object."""

from __future__ import annotations

from prefixkv.control.effects import (
    AddPeer,
    AgentDestroyed,
    Cancel,
    Connect,
    ConnectFailed,
    CopyDone,
    Disconnect,
    Examine,
    Expect,
    FrameFailed,
    FrameReceived,
    PeerTried,
    Reached,
    RemovePeer,
    Renew,
    SendFrame,
    Settle,
    Tick,
    TryPeer,
    Unreached,
)
from prefixkv.protocol.commands import DecodeCommand, PrefillCommand
from prefixkv.protocol.events import DecodeEvent, PrefillEvent, WorkerEvent
from prefixkv.staging.receiver import Scatter
from prefixkv.staging.sender import Gather
from prefixkv.transport.base import (
    Arrived,
    PeerUnreachable,
    Settled,
    WriteDone,
    WriteDrained,
    WriteFailed,
    WriteJob,
)

# The cases of `DecodeControl.on`, by where they come from.
DecodeInput = (
    DecodeCommand  # OpenRoom, MeetPrefill, RefuseRoom, AbortRoom, Fence: the scheduler's
    | FrameReceived[str]  # a prefill rank's
    | FrameFailed[str]  # one of them has raised
    | Arrived  # the transport's: a part of a write has landed
    | Settled
    | PeerUnreachable
    | WriteDone  # decode writes nothing, so these four raise InternalError
    | WriteFailed
    | WriteDrained
    | PeerTried
    | CopyDone  # the copy threads': a Scatter has ended
    | ConnectFailed
    | Unreached
    | Reached
    | Tick
    | AgentDestroyed
)
DecodeEffect = (
    SendFrame[str]
    | Connect
    | Disconnect
    | Expect  # for the transport
    | Settle
    | Examine  # for what looks at processes
    | Scatter  # for the copy threads
    | DecodeEvent  # RoomEnded, RoomDrained, RoomOverdue: for the scheduler
    | WorkerEvent  # PrefillReady, PrefillAway, PrefillLost: the same, if it asked
)

# The cases of `PrefillControl.on`, by where they come from.
PrefillInput = (
    PrefillCommand  # AddRoom, OfferRoom, SendChunk, AbortRoom, Fence: the scheduler's
    | FrameReceived[bytes]  # a decode rank's
    | FrameFailed[bytes]  # one of them has raised
    | WriteDone  # the transport's
    | WriteFailed
    | WriteDrained
    | Arrived
    | Settled
    | PeerUnreachable
    | PeerTried  # the trial's
    | CopyDone  # the copy threads': a Gather has ended
    | ConnectFailed
    | Reached
    | Unreached
    | Tick
    | AgentDestroyed
)
PrefillEffect = (
    SendFrame[bytes]
    | AddPeer  # for the transport, and where slices are staged for the copy threads
    | RemovePeer
    | TryPeer  # for the trial
    | Examine  # for what looks at processes
    | WriteJob  # for the transport
    | Cancel
    | Renew
    | Gather  # for the copy threads
    | PrefillEvent  # Bootstrapped, RoomEnded, SourceFree: for the scheduler
)
