"""What a decode endpoint adds to `StagedRooms`: which pages a lease goes into, and ends that have
to wait. Pure.

A room's machine knows nothing of staging. So what it says of the room's end goes through `pass_on`:
SUCCESS is kept back until the last scatter, RoomDrained until no copy of ours writes the room's
pages any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prefixkv.memory.mesh import Shard, sent_share, writers_to
from prefixkv.memory.staging_area import StagingArea
from prefixkv.paging import Pages, pages_for, unit_pages
from prefixkv.protocol.ids import KVPoll, RoomKey
from prefixkv.protocol.messages import Hello, HelloReply, LeaseAsk, Promise
from prefixkv.protocol.receiver_machine import RoomDrained, RoomEnded, RoomOverdue
from prefixkv.protocol.tags import ChunkTag
from prefixkv.staging import rooms as staged_rooms
from prefixkv.staging.cut import LeaseCut
from prefixkv.staging.rooms import SayGrant, StagedRooms


class StagingPlan(NamedTuple):
    """How one prefill worker stages for us: `parts` are what each of its writers sends, in our
    pool's own numbers."""

    cut: LeaseCut
    parts: dict[int, Shard]
    unit_tokens: int

    @classmethod
    def of(cls, hello: Hello, reply: HelloReply) -> StagingPlan:
        """From what we said and what the worker answered. Raises HandshakeError where a lease takes
        no unit page."""
        assert hello.staging is not None
        ours, theirs = hello.topology.mesh(hello.digest), reply.topology.mesh(reply.digest)
        unit_tokens = min(hello.topology.page_size, reply.topology.page_size)
        layout = hello.layout
        unit_head_bytes = unit_tokens * layout.head_bytes * layout.slabs_per_layer
        parts = {}
        for writer in writers_to(theirs, ours, hello.rank):
            share = sent_share(theirs, writer, ours, hello.rank)
            assert share is not None
            parts[writer] = share.inside(ours.shard(hello.rank))
        cut = LeaseCut.of(theirs, ours, hello.rank, unit_head_bytes, hello.staging)
        return cls(cut, parts, unit_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class ScatterLease:
    """Copy each section of a lease, the part `parts[section.rank]` of the model, into these unit
    pages of our pool.

    `on_scattered` answers.
    """

    lease_id: int
    units: Pages
    unit_tokens: int
    sections: tuple[staged_rooms.Section, ...]
    parts: dict[int, Shard]


@dataclass(frozen=True, slots=True)
class BreakRoom:
    """Fail this room's machine."""

    key: RoomKey
    error: Exception


Ending = RoomEnded | RoomDrained | RoomOverdue
Action = SayGrant | ScatterLease | BreakRoom | Ending


class _Room(NamedTuple):
    units: Pages
    plan: StagingPlan


class RoomStaging:
    """Owned by the endpoint. Every method returns the actions to carry out, in order."""

    def __init__(self, area: StagingArea) -> None:
        self.rooms = StagedRooms(area.num_bytes)
        self._open: dict[RoomKey, _Room] = {}
        self._held: dict[RoomKey, RoomEnded | RoomDrained] = {}

    def open(self, promise: Promise, page_size: int, plan: StagingPlan) -> list[Action]:
        """The room's pages were promised to the writers of `plan`."""
        key = RoomKey(promise.room, promise.generation)
        num_units = pages_for(promise.fill_len - promise.prefix_len, plan.unit_tokens)
        units = unit_pages(promise.page_ids(), page_size // plan.unit_tokens, 0, num_units)
        self._open[key] = _Room(units, plan)
        return self._translate(self.rooms.open(key, promise.ticket, num_units, plan.cut))

    def on_ask(self, rank: int, ask: LeaseAsk) -> list[Action]:
        """See `StagedRooms.on_ask`. Raises ProtocolError; then the room has to fail."""
        return self._translate(self.rooms.on_ask(rank, ask))

    def on_arrival(self, tag: ChunkTag) -> list[Action]:
        return self._translate(self.rooms.on_arrival(tag))

    def on_written(self, key: RoomKey, rank: int) -> list[Action]:
        """The writer's Outcome is ok."""
        return self._translate(self.rooms.on_written(key, rank))

    def on_scattered(self, lease_id: int, error: Exception | None) -> list[Action]:
        return self._translate(self.rooms.on_scattered(lease_id, error))

    def pass_on(self, ending: Ending) -> list[Action]:
        """What the room's machine said of its end, if it may be said now, and what follows from
        it."""
        key = ending.key
        if key not in self._open or isinstance(ending, RoomOverdue):
            return [ending]
        if isinstance(ending, RoomDrained):
            actions = self._translate(self.rooms.drained(key))
            if not self.rooms.may_drain(key):
                self._held[key] = ending
                return actions
            del self._open[key]
            return [*actions, ending]
        if ending.poll is KVPoll.SUCCESS and not self.rooms.complete(key):
            self._held[key] = ending
            return []
        if ending.poll is KVPoll.SUCCESS:
            del self._open[key]
        return [ending, *self._translate(self.rooms.close(key))]

    def _translate(self, actions: list[staged_rooms.Action]) -> list[Action]:
        out: list[Action] = []
        for action in actions:
            match action:
                case SayGrant():
                    out.append(action)
                case staged_rooms.Scatter(lease_id, key, first, count, sections):
                    units, plan = self._open[key]
                    units = units[first : first + count]
                    out.append(
                        ScatterLease(lease_id, units, plan.unit_tokens, sections, plan.parts)
                    )
                case staged_rooms.RoomScattered(key) | staged_rooms.RoomQuiet(key):
                    held = self._held.pop(key, None)
                    if held is not None:
                        out += self.pass_on(held)
                case staged_rooms.RoomBroken(key, error):
                    out += self._broken(key, error)
        return out

    def _broken(self, key: RoomKey, error: Exception) -> list[Action]:
        """Its machine may have ended well already: then nothing of its writers can land, and only
        our copy failed."""
        if self._held.pop(key, None) is None:
            return [BreakRoom(key, error)]
        ended, *rest = self.pass_on(RoomEnded(key, KVPoll.FAILED, error))
        return [ended, *rest, *self.pass_on(RoomDrained(key))]

    @property
    def num_waiting(self) -> int:
        """Rooms whose end is kept back."""
        return len(self._held)
