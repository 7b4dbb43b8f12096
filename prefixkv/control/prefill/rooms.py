"""Prefill's rooms: events go to a room, which is its machine, and what it wants is said. Its
readers are the decode ranks that have named it. Who holds a room, and what frees it:

     no room            one half is here   both halves        ended             no room
    +------------------+------------------+------------------+-----------------+----------------+
    | Tombs: a half is | the request, or  | in_flight: the   | undrained: they | Tombs: the use |
    | awaited. What    | a promise that   | writes that may  | failed, and may | is over. A     |
    | comes ends with  | is parked        | land. SourceFree | still land. An  | late word is   |
    | its error        |                  | follows the last | outcome waits   | answered       |
    +------------------+------------------+------------------+-----------------+----------------+
      until it comes,    until the other    until each has     until the agent   until the
      or a deadline      half comes, or a   ended; a Cancel    is destroyed;     oldest goes
                         deadline           only hurries it    the outcome's
                                                               answer, or a
                                                               deadline
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from prefixkv.control.handshake import OurSide
from prefixkv.control.inbox import ControlInbox
from prefixkv.control.lives import LostPeers
from prefixkv.control.prefill.peers import Peers
from prefixkv.control.prefill.tombs import Half, Tombs
from prefixkv.errors import AbortedError
from prefixkv.protocol import sender_events as sender
from prefixkv.protocol.events import RoomEnded, SourceFree
from prefixkv.protocol.ids import KVPoll, PeerId, RoomKey
from prefixkv.protocol.machine import RoomTick
from prefixkv.protocol.sender_events import PostWrite, SendToReader
from prefixkv.protocol.sender_machine import SenderMachine


class SenderRooms:
    """The rooms of one prefill rank, with the writes under way for them. Owned by a
    `PrefillControl`. What is to be done is said, in order.

    `timers` wake rooms by key; peers share them.
    """

    def __init__(
        self,
        ours: OurSide,
        inbox: ControlInbox[Any, Any],
        peers: Peers,
        tombs: Tombs,
    ) -> None:
        # By number: one of each decode worker that has a room of it, so one nearly always.
        self._rooms: dict[tuple[int, int], list[SenderMachine]] = {}
        self.num_rooms = 0
        # The room itself of each write that is not proved over: its number may be in use again. A
        # write that failed undrained stays, so that its proof (JobDrained) finds the room.
        self.jobs: dict[int, SenderMachine] = {}
        # An agent was replaced: a Drained that was lost may have asked decode to let it settle
        self.may_need_settle = False
        self._ours = ours
        self._timing = inbox.timing
        self._timers = inbox.timers
        self._peers = peers
        self._say = inbox.say
        self._tombs = tombs
        self._job_ids = count(1)

    def all(self) -> list[SenderMachine]:
        """Return the machines of all rooms. Any thread may ask."""
        return [room for same in list(self._rooms.values()) for room in same]

    def get(self, key: RoomKey) -> SenderMachine | None:
        for room in self._rooms.get(key.numbers, ()):
            if room.key == key:
                return room
        return None

    def new(self, key: RoomKey, now_s: float) -> SenderMachine:
        """Add a room that begins now, for a request, a promise or an offer. `on` follows, which
        counts it."""
        of = self._ours.rank, self._ours.topology.page_size, self.next_job_id, self._timing
        room = SenderMachine(key, *of, now_s)
        # Peers met later may know nothing of the room: see `Peers.heard_s`.
        room.met_before = self._peers.num_met
        self._rooms.setdefault(key.numbers, []).append(room)
        self.num_rooms += 1
        return room

    def on(self, room: SenderMachine, event: sender.SenderEvent, now_s: float) -> None:
        """Give an event to a room's machine and carry out its actions; drop it once it is over."""
        key, was_open = room.key, not room.poll.ended
        for action in room.on(event, now_s):
            if isinstance(action, SendToReader):
                # Its route may lead to the life that replaced it, which must not get these words.
                if (peer := self._peers.find(action.peer)) is not None:
                    self._peers.send(peer, action.body, now_s)
            elif isinstance(action, RoomEnded | SourceFree) and not room.added:
                continue  # the engine has never heard of it
            else:
                if isinstance(action, PostWrite):
                    self.jobs[action.job_id] = room
                self._say(action)
        self._count(room)
        peers = [self._peers.find(reader.peer) for reader in room.readers.values()]
        is_gone = room.poll.ended and bool(peers) and not any(peers)
        # The half that has not come ends with this one. Of a process that is gone none comes.
        unheard = room.poll.ended and not room.readers
        if was_open and room.poll.ended and not is_gone and (unheard or not room.added):
            half = Half.REQUEST if room.readers else Half.PROMISE
            self._tombs.await_half(key, half, _end(room), now_s, digest=room.prompt)
        # Peers that are gone drain their own pages, or never. So only the ends of our writes are
        # waited for, which read our own pages.
        if room.over or unheard or (is_gone and not room.in_flight):
            self.drop(room)
        else:
            self._timers.wake(key, room.wake_s)

    def _count(self, room: SenderMachine) -> None:
        """Count for each reader's peer the pages that we may still write, and parked promises."""
        for reader in room.readers.values():
            now = 0 if room.drained else reader.num_pages, int(room.is_parked)
            if now != reader.counted and (peer := self._peers.find(reader.peer)) is not None:
                peer.num_promised += now[0] - reader.counted[0]
                peer.num_parked += now[1] - reader.counted[1]
            reader.counted = now

    def of(self, peer: PeerId) -> list[SenderMachine]:
        """Return the rooms that this decode rank has named. O(rooms)."""
        return [room for room in self.all() if room.has_reader(peer)]

    def of_numbers(self, numbers: tuple[int, int]) -> list[SenderMachine]:
        return list(self._rooms.get(numbers, ()))

    def tick(self, room: SenderMachine, now_s: float) -> None:
        key = room.key
        heard_s = self._peers.heard_s(key.decode, room.expected, room.met_before)
        self.on(room, RoomTick(heard_s), now_s)

    def drop(self, room: SenderMachine) -> None:
        """Forget a room; the use is remembered for each of its readers, so that a late repeat is
        not taken for the next use of the number."""
        same = self._rooms.get(room.key.numbers, [])
        if room in same:
            same.remove(room)
            self.num_rooms -= 1
            if not same:
                del self._rooms[room.key.numbers]
        self._timers.forget(room.key)
        for reader in room.readers.values():
            is_known = self._peers.find(reader.peer) is not None
            # Of a success that is acknowledged nothing follows.
            if is_known and not (reader.answered and room.poll is KVPoll.SUCCESS):
                use = room.key, reader.peer, room.ticket
                self._tombs.bury(use, _end(room), answered=reader.answered)

    # --- writes -----------------------------------------------------------------------------------

    def next_job_id(self) -> int:
        """Return a number for a write or copy, never given before."""
        return next(self._job_ids)

    def on_job(self, event: sender.JobEnded | sender.JobDrained, now_s: float) -> None:
        """Tell a write's room that it has ended, or that nothing of it can land any more though it
        had ended undrained."""
        job_id = event.job_id
        # A write that failed and is not drained stays known, for its proof.
        if isinstance(event, sender.JobEnded) and event.error is not None and not event.drained:
            room = self.jobs.get(job_id)
        else:
            room = self.jobs.pop(job_id, None)
        # From now on any Drained may follow the end of an agent, so decode is asked to let settle
        # what kernels may hold of it.
        self.may_need_settle |= isinstance(event, sender.JobDrained)
        # A room whose readers are all gone is dropped before its last proof.
        if room is not None and room in self._rooms.get(room.key.numbers, ()):
            self.on(room, event, now_s)

    # --- audits -----------------------------------------------------------------------------------

    def lost_peers(self, trouble: Callable[[PeerId], str]) -> LostPeers:
        """Return, for each reader with `trouble`, the reason and how many rooms it has. Any thread
        may ask."""
        found: LostPeers = {}
        # Copies: this also runs on the scheduler's thread, while the control thread changes both.
        for room in self.all():
            for reader in list(room.readers.values()):
                if what := trouble(reader.peer):
                    found[reader.peer] = what, found.get(reader.peer, (what, 0))[1] + 1
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError if a room is not where it belongs, or peers count what is not."""
        assert self.num_rooms == len(self.all()), "rooms"
        pages, parked = Counter[PeerId](), Counter[PeerId]()
        for room in self.all():
            assert self.get(room.key) is room, "a room is at its key"
            assert not room.over, "what is over is dropped"
            for reader in room.readers.values():
                pages[reader.peer] += 0 if room.drained else reader.num_pages
                parked[reader.peer] += room.is_parked
        for peer in self._peers.all():
            assert peer.num_promised == pages[peer.id] <= peer.pool_pages, (
                "pages that may be written"
            )
            assert peer.num_parked == parked[peer.id], "promises that wait for their requests"


def _end(room: SenderMachine) -> Exception:
    return room.error or AbortedError(f"room {room.key.room} is over")
