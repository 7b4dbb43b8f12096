"""Prefill's writes, between its rooms and the transport: straight into pages, or staged in slices.

Rooms and peers add actions to a list, which becomes effects here. Where slices are staged,
`StagingSender` stands between the two, and reports the end of a room's write back to the room.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

import numpy as np

from prefixkv.control.effects import (
    Cancel,
    EffectList,
    Examine,
    LeaseGranted,
    PeerAccepted,
    PrefillEffect,
    RemovePeer,
    RoomAction,
    SendFrame,
)
from prefixkv.control.prefill.peers import Peers
from prefixkv.control.prefill.rooms import SenderRooms
from prefixkv.memory.staging_area import BLOCK_BYTES
from prefixkv.protocol.events import Bootstrapped, RoomEnded, SourceFree
from prefixkv.protocol.ids import PeerId
from prefixkv.protocol.sender_events import CancelWrite, JobDrained, JobEnded, PostWrite
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging.sender import (
    CancelStaged,
    Gather,
    PostStaged,
    SendLeaseAsk,
    StagedWriteAction,
    StagingSender,
)
from prefixkv.transport.base import Route, WriteJob, window_route


class StagingSlots(NamedTuple):
    """The local memory that slices are gathered into: `num_slots` slots of `slot_bytes` bytes. At
    most `window` pieces per room and reader are under way."""

    num_slots: int
    slot_bytes: int
    window: int


class Writes:
    """Actions of rooms and peers on their way to effects, with staging between. Owned by a
    `PrefillControl`."""

    def __init__(
        self,
        me: PeerId,
        rank: int,
        staging: StagingSender | None,
        rooms: SenderRooms,
        peers: Peers,
        actions: EffectList[RoomAction],
        out: EffectList[PrefillEffect],
    ) -> None:
        self._me = me
        self._rank = rank
        self._staging = staging
        # Blocks per slot
        self._slot_blocks = 0 if staging is None else staging.slot_bytes // BLOCK_BYTES
        self._rooms = rooms
        self._peers = peers
        self._actions = actions
        self._out = out

    def ended(
        self,
        job_id: int,
        error: Exception | None,
        drained: bool,
        now_s: float,
    ) -> None:
        if self._staging is not None and self._staging.owns(job_id):
            ended = self._staging.on_write_ended(job_id, error, drained, now_s)
            self.stage(ended, now_s)
        else:
            self._rooms.write_ended(job_id, error, drained, now_s)
            self.flush(now_s)

    def drained(self, job_id: int, now_s: float) -> None:
        """Take the proof that nothing can land any more of a write that had ended undrained."""
        if self._staging is not None and self._staging.owns(job_id):
            self.stage(self._staging.on_write_drained(job_id), now_s)
        else:
            self._rooms.write_drained(job_id, now_s)
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Turn the `actions` into effects: writes go to the transport, straight or by staging."""
        actions = self._actions.effects
        if not actions:
            return
        # Taken first: what staging says of a room's write below makes the room add more, which is
        # carried out by a call inside this one, before what is left here.
        self._actions.begin()
        staging = self._staging
        if staging is not None:
            for action in actions:
                # None of the room's writes is under way, so staging has no job of it either.
                if isinstance(action, SourceFree):
                    staging.forget(action.key)
        for action in actions:
            match action:
                case PostWrite():
                    self._write(action, now_s)
                case CancelWrite():
                    # The job is either staging's or the transport's; the other one does not know
                    # it.
                    if staging is not None:
                        self.stage(staging.cancel(action.job_id), now_s)
                    self._out.add(Cancel(action.job_id))
                case LeaseGranted():
                    if staging is not None:
                        self.stage(staging.on_grant(action.peer, action.key, action.grant), now_s)
                case PeerAccepted():
                    # The transport must know the peer before anything is written to it.
                    self._out.add(action.added)
                    if staging is not None and action.cut is not None:
                        staging.add_peer(action.added.peer, action.cut)
                case RemovePeer():
                    self._out.add(action)
                    if staging is not None:
                        self.stage(staging.remove_peer(action.peer), now_s)
                case SendFrame() | Examine():
                    self._out.add(action)
                case Bootstrapped() | RoomEnded() | SourceFree():
                    self._out.add(action)
                case _:
                    assert_never(action)

    def _write(self, action: PostWrite, now_s: float) -> None:
        """By staging if the peer takes slices of what we hold, else into pages."""
        staging = self._staging
        # Extra state and window pages are never staged: they go straight where they belong.
        is_of_first = not action.state and action.window < 0
        if staging is not None and action.peer in staging.peers and is_of_first:
            what = action.first_unit, action.src_pages, action.ready, now_s
            staged = staging.write(action.job_id, action.key, action.ticket, action.peer, *what)
            self.stage(staged, now_s)
            return
        tag = ChunkTag(
            self._me.incarnation,
            *action.key.numbers,
            rank=self._rank,
            chunk=action.chunk,
            ticket=action.ticket,
        )
        pages = action.src_pages, action.dst_pages
        route: Route = "state" if action.state else "pages"
        if action.window >= 0:
            route = window_route(action.window)
        self._out.add(WriteJob(action.job_id, action.peer, *pages, tag, action.ready, route))

    def stage(self, actions: list[StagedWriteAction], now_s: float) -> None:
        """Turn what staging wants into effects; ends of jobs go back to their rooms."""
        for action in actions:
            match action:
                case SendLeaseAsk():
                    peer = self._peers.find(action.peer)
                    if peer is not None:
                        self._peers.send(peer, action.ask, now_s)
                        self.flush(now_s)
                case Gather():
                    self._out.add(action)
                case PostStaged():
                    self._out.add(self._staged_write(action))
                case CancelStaged():
                    self._out.add(Cancel(action.write_id))
                case JobEnded(job_id, error, drained):
                    # The recursion ends: a room answers a job's end by wants, and each job ends
                    # once.
                    self._rooms.write_ended(job_id, error, drained, now_s)
                    self.flush(now_s)
                case JobDrained(job_id):
                    self._rooms.write_drained(job_id, now_s)
                    self.flush(now_s)
                case _:
                    assert_never(action)

    def _staged_write(self, post: PostStaged) -> WriteJob:
        # Rounded up: slots and leases are whole blocks, so the last one stays inside both.
        blocks = np.arange(-(-post.num_bytes // BLOCK_BYTES), dtype=np.int32)
        src = blocks + np.int32(post.slot * self._slot_blocks)
        dst = blocks + np.int32(post.dst_offset // BLOCK_BYTES)
        tag = ChunkTag(
            self._me.incarnation,
            *post.key.numbers,
            rank=self._rank,
            chunk=post.piece,
            lease_id=post.lease_id,
            ticket=post.ticket,
        )
        return WriteJob(post.write_id, post.peer, src, dst, tag, route="staging")
