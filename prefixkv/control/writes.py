"""Prefill's writes, between its rooms and the transport: straight into pages, or staged in slices.

Rooms and peers return wants (`Want`), which become effects here. Where slices are staged,
`StagingSender` stands between the two, and reports the end of a room's write back to the room.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, assert_never

import numpy as np

from prefixkv.control.effects import AddPeer, Cancel, Examine, RemovePeer, Renew, SendFrame, TryPeer
from prefixkv.control.peers import Peers
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.protocol.events import Bootstrapped, PrefillEvent, RoomEnded, SourceFree
from prefixkv.protocol.ids import PeerId, RoomKey
from prefixkv.protocol.messages import LeaseGrant
from prefixkv.protocol.sender_events import CancelWrite, PostWrite
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.cut import LeaseCut
from prefixkv.staging.sender import Action as StagingAction
from prefixkv.staging.sender import (
    CancelStaged,
    Gather,
    JobDrained,
    JobEnded,
    PostStaged,
    SendAsk,
    StagingSender,
)
from prefixkv.transport.base import Route, WriteJob


class StagingSlots(NamedTuple):
    """The local memory that slices are gathered into: `num_slots` slots of `slot_bytes` bytes.

    At most `window` pieces per room and reader are under way.
    """

    num_slots: int
    slot_bytes: int
    window: int


class Welcome(NamedTuple):
    """A peer that can be written to from now on; `cut` says how slices for it are staged, None: not
    at all."""

    added: AddPeer
    cut: LeaseCut | None


class Granted(NamedTuple):
    """A lease in a peer's staging memory was granted to one of our rooms."""

    peer: PeerId
    key: RoomKey
    grant: LeaseGrant


Want = (
    SendFrame[bytes]
    | TryPeer
    | Examine
    | Welcome
    | Granted
    | RemovePeer
    | PostWrite
    | CancelWrite
    | PrefillEvent
)
"""What rooms and peers want, before staging has taken its part of it."""

WriteEffect = (
    SendFrame[bytes]
    | TryPeer
    | Examine
    | AddPeer
    | RemovePeer
    | WriteJob
    | Cancel
    | Renew
    | Gather
    | PrefillEvent
)
"""What becomes of it: all effects of `PrefillControl`."""


class Rooms(Protocol):
    """The rooms that hear how their writes ended; each method returns what they want next."""

    def write_ended(
        self, job_id: int, error: Exception | None, drained: bool, now_s: float
    ) -> list[Want]: ...

    def write_drained(self, job_id: int, now_s: float) -> list[Want]: ...


class Writes:
    """Turns wants into effects. Owned by a `PrefillControl`; methods append to `out`, in order."""

    def __init__(
        self, me: PeerId, rank: int, staging: StagingSender | None, rooms: Rooms, peers: Peers
    ) -> None:
        self._me = me
        self._rank = rank
        self._staging = staging
        # Blocks per slot.
        self._slot_blocks = 0 if staging is None else staging.slot_bytes // BLOCK_BYTES
        self._rooms = rooms
        self._peers = peers

    def ended(
        self,
        job_id: int,
        error: Exception | None,
        drained: bool,
        now_s: float,
        out: list[WriteEffect],
    ) -> None:
        """Take the end of a write: a staged piece's goes to staging, any other to its room."""
        if self._staging is not None and self._staging.owns(job_id):
            ended = self._staging.on_write_ended(job_id, error, drained, now_s)
            self.stage(ended, now_s, out)
        else:
            wants = self._rooms.write_ended(job_id, error, drained, now_s)
            self.carry_out(wants, now_s, out)

    def drained(self, job_id: int, now_s: float, out: list[WriteEffect]) -> None:
        """Take the proof that nothing can land any more of a write that had ended undrained."""
        if self._staging is not None and self._staging.owns(job_id):
            self.stage(self._staging.on_write_drained(job_id), now_s, out)
        else:
            self.carry_out(self._rooms.write_drained(job_id, now_s), now_s, out)

    def carry_out(self, wants: list[Want], now_s: float, out: list[WriteEffect]) -> None:
        """Turn wants into effects, with staging between rooms and transport."""
        staging = self._staging
        if staging is not None:
            for want in wants:
                # None of the room's writes is under way, so staging has no job of it either.
                if isinstance(want, SourceFree):
                    staging.forget(want.key)
        for want in wants:
            match want:
                case PostWrite():
                    self._write(want, now_s, out)
                case CancelWrite():
                    # The job is either staging's or the transport's; the other one does not know
                    # it.
                    if staging is not None:
                        self.stage(staging.cancel(want.job_id), now_s, out)
                    out.append(Cancel(want.job_id))
                case Granted():
                    if staging is not None:
                        self.stage(staging.on_grant(want.peer, want.key, want.grant), now_s, out)
                case Welcome():
                    # The transport must know the peer before anything is written to it.
                    out.append(want.added)
                    if staging is not None and want.cut is not None:
                        staging.add_peer(want.added.peer, want.cut)
                case RemovePeer():
                    out.append(want)
                    if staging is not None:
                        self.stage(staging.remove_peer(want.peer), now_s, out)
                case SendFrame() | TryPeer() | Examine():
                    out.append(want)
                case Bootstrapped() | RoomEnded() | SourceFree():
                    out.append(want)
                case _:
                    assert_never(want)

    def _write(self, want: PostWrite, now_s: float, out: list[WriteEffect]) -> None:
        """Post a room's write: by staging if its peer takes slices of what we hold, else into
        pages."""
        staging = self._staging
        # Extra state is never staged: it goes straight to its slot.
        if staging is not None and want.peer in staging.peers and not want.state:
            what = want.first_unit, want.src_pages, want.ready, now_s
            staged = staging.write(want.job_id, want.key, want.ticket, want.peer, *what)
            self.stage(staged, now_s, out)
            return
        tag = ChunkTag(self._me.incarnation, *want.key.numbers, rank=self._rank, chunk=want.chunk)
        pages = want.src_pages, want.dst_pages
        route: Route = "state" if want.state else "pages"
        out.append(WriteJob(want.job_id, want.peer, *pages, tag, want.ready, route))

    def stage(self, actions: list[StagingAction], now_s: float, out: list[WriteEffect]) -> None:
        """Turn what staging wants into effects; ends of jobs go back to their rooms."""
        for action in actions:
            match action:
                case SendAsk():
                    peer = self._peers.find(action.peer)
                    if peer is not None:
                        out += self._peers.send(peer, action.ask, now_s)
                case Gather():
                    out.append(action)
                case PostStaged():
                    out.append(self._staged_write(action))
                case CancelStaged():
                    out.append(Cancel(action.write_id))
                case JobEnded(job_id, error, drained):
                    # The recursion ends: a room answers a job's end by wants, and each job ends
                    # once.
                    ended = self._rooms.write_ended(job_id, error, drained, now_s)
                    self.carry_out(ended, now_s, out)
                case JobDrained(job_id):
                    self.carry_out(self._rooms.write_drained(job_id, now_s), now_s, out)
                case _:
                    assert_never(action)

    def _staged_write(self, post: PostStaged) -> WriteJob:
        """Return the write of one gathered slot into a lease, in blocks of BLOCK_BYTES."""
        # Rounded up: slots and leases are whole blocks, so the last one stays inside both.
        blocks = np.arange(-(-post.num_bytes // BLOCK_BYTES), dtype=np.int32)
        src = blocks + np.int32(post.slot * self._slot_blocks)
        dst = blocks + np.int32(post.dst_offset // BLOCK_BYTES)
        me = self._me.incarnation
        tag = ChunkTag(
            me, *post.key.numbers, rank=self._rank, chunk=post.piece, lease_id=post.lease_id
        )
        return WriteJob(post.write_id, post.peer, src, dst, tag, route="staging")
